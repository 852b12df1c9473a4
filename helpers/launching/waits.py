"""Who waits for whom: from the recorded collectives of all ranks, also of a job that hung or died. Pure functions."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from helpers.measuring import sources
from helpers.measuring.records import Collective

PAIRWISE = ("send", "recv")
IN_TORCH = "torch/distributed/"  # how the innermost entry of a stack begins where a rank waits for others
UNEVEN = ("gather", "scatter", "all_to_all")  # payloads that may differ from rank to rank
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')

Row = dict[int, Collective | None]  # what each member issued at one place of a sequence; None: nothing any more


class Meetings:
    """Which operations of the ranks belong together: the n-th of each member of a group, the n-th send and its receive."""

    def __init__(self, collectives: Iterable[Collective]) -> None:
        self.by_rank: dict[int, list[Collective]] = defaultdict(list)
        self.rows: dict[tuple[Any, ...], dict[int, Collective]] = defaultdict(dict)  # by channel and place in its sequence
        self._place: dict[tuple[int, int], int] = {}
        issued: Counter[tuple[Any, ...]] = Counter()
        for collective in sorted(collectives, key=lambda c: c.sequence):
            channel, rank = _channel(collective), collective.rank
            place = self._place[rank, collective.sequence] = issued[rank, channel]
            issued[rank, channel] += 1
            self.by_rank[rank].append(collective)
            self.rows[channel, place][rank] = collective

    def row(self, collective: Collective) -> Row:
        """What every member issued where this rank issued `collective`."""
        channel = _channel(collective)
        found = self.rows[channel, self._place[collective.rank, collective.sequence]]
        return {rank: found.get(rank) for rank in channel[1:]}

    def missing(self, collective: Collective) -> set[int]:
        """The ranks that have not come to it."""
        if collective.op == "recv" and collective.peer is None:  # it takes from whoever sends
            return set(collective.group) - {collective.rank}
        return {rank for rank, issued in self.row(collective).items() if issued is None}


def _channel(collective: Collective) -> tuple[Any, ...]:
    """What an operation shares with those it meets: kind, then the ranks."""
    if collective.op == "send":
        return ("pair", collective.rank, collective.peer)
    if collective.op == "recv":
        return ("pair", collective.peer, collective.rank)
    return ("group", *collective.group)


def in_flight(collectives: Iterable[Collective]) -> dict[int, Collective]:
    """rank -> the operation it waits in, if it waits.

    That is the one it is known to block on. Else, because the end of an operation is not always known, the first without an end
    to which another member has not come, or has come with something else; a send, which need not wait for its receive, last.
    """
    meetings = Meetings(collectives)
    waiting: dict[int, Collective] = {}
    for rank, own in meetings.by_rank.items():
        unfinished = [c for c in own if c.end is None]
        blocked = [c for c in unfinished if c.waited_from is not None]
        unmet = [c for c in unfinished if meetings.missing(c) or _differ(meetings.row(c))]
        candidates = blocked[-1:] or sorted(unmet, key=lambda c: c.op == "send")
        if candidates:
            waiting[rank] = candidates[0]
    return waiting


def waited_for(collectives: Sequence[Collective], waiting: dict[int, Collective]) -> set[int]:
    """Ranks that those `waiting` wait for while they themselves wait for nobody; empty where all wait for each other."""
    meetings = Meetings(collectives)
    return set().union(*(meetings.missing(collective) for collective in waiting.values())) - waiting.keys()


def first_difference(collectives: Sequence[Collective]) -> Row | None:
    """The first place at which a group's members do not all issue the same; None where the sequences agree.

    The same means operation, dtype and, where it must be equal on all ranks, payload size.
    """
    meetings = Meetings(collectives)
    differing: dict[tuple[Any, ...], Row] = {}
    for collective in sorted(collectives, key=lambda c: c.sequence):
        channel = _channel(collective)
        if channel[0] == "group" and channel not in differing and _differ(row := meetings.row(collective)):
            differing[channel] = row
    return min(differing.values(), key=lambda row: min(c.start for c in row.values() if c is not None), default=None)


def _differ(row: Row) -> bool:
    return len({_kind(issued) for issued in row.values()}) > 1


def _kind(collective: Collective | None) -> Any:
    if collective is None:
        return None
    size = None if collective.op in UNEVEN else collective.bytes
    return (None if collective.op in PAIRWISE else collective.op, collective.dtype, size)


def odd_one_out(row: Row) -> int | None:
    """The one rank that differs where all the others (at least two) agree; None where no one can be singled out."""
    kinds = [_kind(issued) for issued in row.values()]
    alone = [rank for rank, issued in row.items() if kinds.count(_kind(issued)) == 1]
    return alone[0] if len(alone) == 1 and len(row) > 2 else None


def describe(collective: Collective | None) -> str:
    """One operation in a line: "all_reduce (float32, 4 B) over ranks 0, 1 at cell 3, line 4: dist.all_reduce(x)"."""
    if collective is None:
        return "nothing any more"
    what = f"{collective.dtype}, {collective.bytes:,} B" if collective.dtype else "no payload"
    whom = f"over ranks {', '.join(map(str, collective.group))}"
    if collective.op in PAIRWISE:
        peer = "any rank" if collective.peer is None else f"rank {collective.peer}"
        whom = f"{'to' if collective.op == 'send' else 'from'} {peer}"
    return f"{collective.op} ({what}) {whom}" + (f" at {collective.source}" if collective.source else "")


def describe_difference(row: Row) -> str:
    """The row of `first_difference`, one rank a line."""
    return "\n".join(f"  rank {rank} issued {describe(issued)}" for rank, issued in row.items())


def read_stack(text: str, boundary: str) -> list[str]:
    """The learner's part of the stack that faulthandler wrote, outermost first: "cell 3, line 4: dist.all_reduce(x)".

    `boundary` is the file whose frames lie outside the job; faulthandler leaves out what lies deeper than 100 frames. Frames of
    libraries follow the last line of the learner's own as one entry: "torch/distributed/distributed_c10d.py, line 3027 in …".
    """
    threads = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    inside = next((t for t in threads if boundary in t), next((t for t in threads if t.startswith("Current")), ""))
    frames = [match.group("file", "line", "function") for match in map(_FRAME.match, inside.splitlines()) if match]
    end = next((i for i, frame in enumerate(frames) if frame[0] == boundary), len(frames))
    lines = [sources.describe_line(name, int(line)) for name, line, _ in frames[:end] if sources.is_learner_file(name)][::-1]
    library = [frame for frame in frames[:end] if not frame[0].startswith(_OURS)]
    if library and not sources.is_learner_file(library[0][0]):
        name, line, function = library[0]
        lines.append(f"{re.split(r'site-packages/|lib/python3[.][0-9]+/', name)[-1]}, line {line} in {function}")
    return lines
