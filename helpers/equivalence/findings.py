"""What a comparison says of a silent fault. Names and mends stand in `data/equivalence.yaml`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers import record


@dataclass(frozen=True)
class Finding:
    """One silent fault: what it is, what shows it, and the mend."""

    fault: str
    evidence: str
    mend: str


def finding(fault: str, evidence: str, **figures: Any) -> Finding:
    """The entry of the table named `fault`, with the figures of the case in its name."""
    return Finding(fault.format(**figures), evidence, record.data("equivalence")[fault])


def several(things: Sequence[Any]) -> str:
    """The first three of them, and how many more there are."""
    return ", ".join(map(str, things[:3])) + (f" and {len(things) - 3} more" if len(things) > 3 else "")
