"""`faults`: every kind of fault that is known, as `data/faults.yaml` describes it."""

import itertools
import re
from dataclasses import dataclass
from functools import cache, cached_property
from re import _constants, _parser  # type: ignore[attr-defined]

from helpers import record

SAYS = ("cause", "symptom", "consequence")  # what a sign of the fault says of the job's end; what comes first is named first


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

    @property
    def weight(self) -> int:
        """The place of what it says in `SAYS`."""
        return SAYS.index(self.says)

    @cached_property
    def searches(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """(text that every match contains, the pattern) of each pattern: looking for a fixed text first is ten times as fast."""
        return tuple((needle(pattern), re.compile(pattern, re.MULTILINE)) for pattern in self.patterns)


def needle(pattern: str) -> str:
    """The longest text that everything the pattern matches contains. Raises ValueError where there is none of 3 characters."""
    runs = itertools.groupby(_parser.parse(pattern), key=lambda part: part[0] is _constants.LITERAL)
    found = max(("".join(chr(code) for _, code in run) for literal, run in runs if literal), key=len, default="")
    if len(found) < 3:
        raise ValueError(
            f"pattern {pattern!r} must contain a fixed text: alternatives belong in brackets or in patterns of their own"
        )
    return found


@cache
def faults() -> tuple[Fault, ...]:
    """All entries of `data/faults.yaml`, in its order: of two causes that the same line shows, the first is named."""
    rows = record.data("faults").items()
    return tuple(Fault(id=id, **{**row, "patterns": tuple(row.get("patterns", ()))}) for id, row in rows)
