"""`mismatch`: the first place at which the ranks of a group do not issue the same, also in a job that hung, died or returned."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        depths = range(1 + max((len(collective.callers) for collective in collectives), default=0))
        rows = _rows(collectives)
        return next(filter(None, (_swapped(rows, depth) for depth in depths)), None)
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


def same_lines(collectives: Sequence[Collective]) -> bool:
    """Whether the ranks of each group pass lines of the same texts, called from the same, in the same order, where known."""
    texts = ({_lines(c, None) for c in row if c.source} for rows in _rows(collectives) for row in rows)
    return all(len(different) <= 1 for different in texts)


def _rows(collectives: Sequence[Collective]) -> list[list[tuple[Collective, ...]]]:
    """For each group, what each of its ranks issued there, place by place."""
    issued: dict[tuple[int, ...], dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for collective in sorted(collectives, key=lambda c: c.sequence):
        if collective.op not in waits.PAIRWISE:
            issued[collective.group][collective.rank].append(collective)
    return [list(zip(*(by_rank[rank] for rank in group), strict=False)) for group, by_rank in issued.items()]


def _swapped(groups: list[list[tuple[Collective, ...]]], depth: int) -> Mismatch | None:
    """Two operations that rank a issues in the order A, B and rank b in the order B, A: of one group and kind, told apart by the
    text of their lines, which may stand in two branches, and of the `depth` nearest lines that led there.

    Different lines at one place alone are no sign: ranks may take different branches to the same sum, or pass lines that others
    do not. Nor is it one where ranks take a part in turn (other ranks agree at the two places), nor an operation with a root,
    where branches often do so. A loop over names issues both from one line: that is not seen.
    """
    found = []
    for rows in groups:
        alike = [row for row in rows if all(c.op in ALIKE and c.source for c in row)]
        places = [(row, tuple(_lines(c, depth) for c in row)) for row in alike]
        passed = [set(column) for column in zip(*(lines for _, lines in places), strict=True)]
        places = [(row, lines) for row, lines in places if all(own.issuperset(lines) for own in passed)]
        if len({tuple(sorted(column)) for column in zip(*(lines for _, lines in places), strict=True)}) > 1:
            continue  # not the same lines equally often: not an order, but other work
        places = list(itertools.dropwhile(lambda place: len(set(place[1])) == 1, places))
        if not places:
            continue
        here, lines = places[0]
        b = next(member for member, line in enumerate(lines) if line != lines[0])
        there, crossed = next(place for place in places if place[1][0] == lines[b])
        back = next(row for row, passing in places if passing[b] == lines[0])
        if _split(lines) == _split(crossed):
            found.append(
                (min(c.start for c in here), Mismatch("source", _shown(here, depth), _shown((there[0], back[b]), depth)))
            )
    return min(found, key=lambda each: each[0])[1] if found else None


def _shown(issued: Sequence[Collective], depth: int) -> waits.Row:
    return {c.rank: replace(c, source=" <- ".join((str(c.source), *c.callers[:depth]))) for c in issued}


def _lines(collective: Collective, depth: int | None) -> tuple[str, ...]:
    """The texts of the line that issued it and of those that led there; where one is unknown, the line's place."""
    return tuple(place.partition(": ")[2] or place for place in (str(collective.source), *collective.callers[:depth]))


def _split(lines: tuple[tuple[str, ...], ...]) -> list[int]:
    """For each rank, the first one that is in the same line."""
    return [lines.index(line) for line in lines]
