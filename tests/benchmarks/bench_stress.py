"""The launcher under stress: many faults and interrupts, none of which may blame the wrong rank or leave anything behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework import Findings, Row, at_most, benchmark, shown

if TYPE_CHECKING:
    from tests.stress_launch import Outcome

FAULTS, INTERRUPTS = 40, 20  # for each repeat: 200 and 100 in all by default
TELL_LIMIT, CLEAN_LIMIT = 1.0, 3.0  # seconds required


@benchmark
def faults(repeats: int) -> Findings:
    """200 jobs that fail, every kind of fault mixed: the right rank each time, within a second, nothing left."""
    from tests import stress_launch

    return _findings(stress_launch.faulted_runs(FAULTS * repeats), "from the fault to its error", TELL_LIMIT)


@benchmark
def interrupts(repeats: int) -> Findings:
    """100 interrupts at random moments: no rank left within 3 s, the next launch works, later cells can be interrupted."""
    from tests import stress_launch

    return _findings(stress_launch.interrupts(INTERRUPTS * repeats), "from the interrupt until all is over", CLEAN_LIMIT)


def _findings(outcome: Outcome, what: str, limit: float) -> Findings:
    row = Row(what, tuple(outcome.seconds))
    said = f"{outcome.right} of {outcome.runs} as they should be"
    claims = [
        shown(said, outcome.right == outcome.runs > 0),
        at_most("the slowest", max(row.samples, default=float("nan")), limit, "s"),
    ]
    return Findings([row], claims, said, outcome.wrong)
