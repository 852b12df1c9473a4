"""`faults`: every kind of fault that is known, as `data/faults.yaml` describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property

import yaml

from helpers import record

SAYS = ("cause", "symptom", "consequence")  # what a sign of the fault says of the job's end; what comes first is named first
_UNSURE = re.compile(  # parts of a pattern that a match need not hold letter by letter: (groups), [classes], what is repeated
    r"(?:\((?:\\.|[^()\\]|\((?:\\.|[^()\\])*\))*\)|\[(?:\\.|[^]\\])*\])(?:[?*+]|\{[\d,]+\})?\??"
    r"|(?:\\.|[^\\])(?:[?*]|\{[\d,]+\})\??|\\[A-Za-z]\+?|\.\+?|[\^$+]"
)


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `patterns` are regular expressions over a log's text, `predicate` names a function of `predicates`."""

    id: str
    name: str
    kind: str  # "loud": raises, dies or hangs; "silent": a wrong result; "slow": a right result that costs too much
    explanation: str
    mend: str
    section: str  # of the notebook that teaches it
    tool: str = "diagnose"  # what finds it
    says: str = "cause"
    patterns: tuple[str, ...] = ()
    predicate: str | None = None
    example: str = ""  # a log, written for this project in the shape in which the library prints it

    @cached_property
    def searches(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """(text that every match contains, the pattern) of each pattern: looking for a fixed text first is ten times as fast."""
        return tuple((needle(pattern), re.compile(pattern, re.MULTILINE)) for pattern in self.patterns)


def needle(pattern: str) -> str:
    """The longest text that everything the pattern matches contains. Raises ValueError where there is none of 3 characters."""
    found = max((part.replace("\\", "") for part in _UNSURE.split(pattern)), key=len)
    if len(found) < 3 or "|" in found:
        raise ValueError(
            f"pattern {pattern!r} must contain a fixed text: alternatives belong in brackets or in patterns of their own"
        )
    return found


@cache
def faults() -> tuple[Fault, ...]:
    """All entries of `data/faults.yaml`, in its order: of two causes that the same line shows, the first is named."""
    rows = yaml.safe_load((record.ROOT / "data" / "faults.yaml").read_text(encoding="utf-8"))
    return tuple(Fault(id=id, **{**row, "patterns": tuple(row.get("patterns", ()))}) for id, row in rows.items())
