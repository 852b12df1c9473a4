"""`mismatch`: the first place at which the ranks of a group do not issue the same, also in a job that hung, died or returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.launching import waits
from helpers.measuring.records import Collective

ALIKE = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)  # every rank plays the same part: two that meet belong together
TITLES = {
    "missing": "The first place to which not every rank came:",
    "group": "The first place where a rank went to another group:",
    "source": "The ranks pass these lines in opposite order, so each sum mixes the values of both:",
}


@dataclass(frozen=True, repr=False)
class Mismatch:
    """`rows` holds what each rank of the group issued at that place, None where it issued nothing any more.

    `what` differs: "op", "bytes", "dtype", "group" (a rank went to another group), "missing" (a rank did not come), or "source":
    the same operation, but from lines that two ranks pass in opposite order, so that other values are summed than was meant.
    """

    what: str
    rows: waits.Row
    later: waits.Row | None = None  # of "source": where the two ranks issue what the other issued here

    @property
    def odd(self) -> int | None:
        """The one rank that differs where all others (at least two) agree."""
        return None if self.what == "source" else waits.odd_one_out(self.rows)

    def __repr__(self) -> str:
        title = TITLES.get(self.what, f"The first place where the ranks differ in {self.what}:")
        later = ["and later:", waits.describe_difference(self.later)] if self.later else []
        return "\n".join([title, waits.describe_difference(self.rows), *later])


def find(collectives: Sequence[Collective], ended: bool = True) -> Mismatch | None:
    """The first mismatch in what was recorded, None where the sequences agree; not `ended`: the job hung, failed or died."""
    row = waits.first_difference(collectives)
    issued = [collective for collective in (row or {}).values() if collective is not None]
    for what in ("op", "dtype", "bytes"):
        if row and len({getattr(collective, what) for collective in issued}) > 1:
            return Mismatch(what, row)
    waiting = {} if ended else waits.in_flight(collectives)
    roots = waits.waited_for(collectives, waiting)
    if roots and not any(row and rank in row and row[rank] is None for rank in roots):  # who is absent in this row waits itself
        row = next(found for found in (_row(c, waiting) for c in waiting.values()) if roots & found.keys())
    if row is None:
        return _swapped(collectives)
    elsewhere = {
        rank: waiting[rank]
        for rank, collective in row.items()
        if collective is None and not roots and rank in waiting and waiting[rank].op == issued[0].op
    }
    return Mismatch("group", {**row, **elsewhere}) if elsewhere else Mismatch("missing", row)


def _row(collective: Collective, waiting: dict[int, Collective]) -> waits.Row:
    """Who waits in this operation, and who of those that belong to it does not."""
    if collective.op in waits.PAIRWISE:
        others = set(collective.group) - {collective.rank} if collective.peer is None else {collective.peer}
        return {collective.rank: collective, **dict.fromkeys(others)}
    same = {rank: other for rank, other in waiting.items() if other.group == collective.group}
    return {rank: same.get(rank) for rank in collective.group}


def _swapped(collectives: Sequence[Collective]) -> Mismatch | None:
    """Two operations that rank a issues in the order A, B and rank b in the order B, A: of one group and kind, told apart by the
    text of their lines, which may stand in two branches.

    Different lines at one place alone are no sign: ranks may take different branches to the same sum. Nor is it one where ranks
    take a part in turn (other ranks agree at the two places), nor an operation with a root, where branches often do so.
    """
    issued: dict[tuple[int, ...], dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for collective in sorted(collectives, key=lambda c: c.sequence):
        if collective.op in ALIKE and collective.source is not None:
            issued[collective.group][collective.rank].append(collective)
    found = []
    for group, by_rank in issued.items():
        members = [by_rank[rank] for rank in group]
        if len({tuple(sorted(map(_line, sequence))) for sequence in members}) > 1:
            continue  # not the same lines equally often: not an order, but other work
        rows = list(zip(*members, strict=True))
        while rows and len(set(map(_line, rows[0]))) == 1:
            del rows[0]
        if not rows:
            continue
        here, a = rows[0], 0
        b = next(member for member, c in enumerate(here) if _line(c) != _line(here[a]))
        there = next(row for row in rows if _line(row[a]) == _line(here[b]))
        back = next(row for row in rows if _line(row[b]) == _line(here[a]))
        if _split(here) == _split(there):
            found.append(Mismatch("source", {c.rank: c for c in here}, {group[a]: there[a], group[b]: back[b]}))
    return min(found, key=lambda mismatch: min(c.start for c in mismatch.rows.values() if c is not None), default=None)


def _line(collective: Collective) -> str:
    """The text of the line that issued it; where that is unknown, the line's place."""
    return (collective.source or "").partition(": ")[2] or str(collective.source)


def _split(row: Sequence[Collective]) -> list[int]:
    """For each rank, the first one that is in the same line."""
    lines = list(map(_line, row))
    return [lines.index(line) for line in lines]
