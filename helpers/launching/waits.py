"""Who waits for whom: from the recorded collectives of all ranks, also of a job that hung or died. Pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from helpers.measuring import sources
from helpers.measuring.records import Collective

PAIRWISE = ("send", "recv")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


def in_flight(collectives: Iterable[Collective]) -> dict[int, Collective]:
    """rank -> the first operation it began and has not finished."""
    waiting: dict[int, Collective] = {}
    for collective in sorted(collectives, key=lambda c: c.sequence):
        if collective.end is None:
            waiting.setdefault(collective.rank, collective)
    return waiting


def waited_for(collectives: Sequence[Collective]) -> set[int]:
    """Ranks that others wait for while they themselves wait for nobody; empty where all wait for each other."""
    waiting = in_flight(collectives)
    missing: set[int] = set()
    for collective in waiting.values():
        missing |= _missing_from(collective, collectives)
    return {rank for rank in missing if rank not in waiting}


def _missing_from(collective: Collective, collectives: Sequence[Collective]) -> set[int]:
    """The members of the operation's group that have not come to it."""
    if collective.op in PAIRWISE:
        if collective.peer is None:
            return set(collective.group) - {collective.rank}
        counterpart = "send" if collective.op == "recv" else "recv"
        mine = sum(
            c.rank == collective.rank
            and c.op == collective.op
            and c.peer == collective.peer
            and c.sequence <= collective.sequence
            for c in collectives
        )
        theirs = sum(c.rank == collective.peer and c.op == counterpart and c.peer == collective.rank for c in collectives)
        return {collective.peer} if theirs < mine else set()
    sequences = _by_rank(collectives, collective.group)
    position = sequences[collective.rank].index(collective)
    return {rank for rank, sequence in sequences.items() if len(sequence) <= position}


def _by_rank(collectives: Sequence[Collective], group: tuple[int, ...]) -> dict[int, list[Collective]]:
    """What each member issued on this group, in order, without sends and receives."""
    sequences: dict[int, list[Collective]] = {rank: [] for rank in group}
    for collective in sorted(collectives, key=lambda c: c.sequence):
        if collective.group == group and collective.op not in PAIRWISE and collective.rank in sequences:
            sequences[collective.rank].append(collective)
    return sequences


def first_difference(collectives: Sequence[Collective]) -> dict[int, Collective | None] | None:
    """rank -> what it issued at the first place where a group's members do not all issue the same (None: nothing any more).

    The same means operation, dtype and payload size. None where the sequences agree.
    """
    differences = []
    for group in {c.group for c in collectives if c.op not in PAIRWISE}:
        sequences = _by_rank(collectives, group)
        for position in range(max(map(len, sequences.values()))):
            row = {rank: sequence[position] if position < len(sequence) else None for rank, sequence in sequences.items()}
            if len({_kind(issued) for issued in row.values()}) > 1:
                differences.append(row)
                break
    return min(differences, key=lambda row: min(c.start for c in row.values() if c is not None), default=None)


def _kind(collective: Collective | None) -> Any:
    return collective and (collective.op, collective.dtype, collective.bytes)


def odd_one_out(row: dict[int, Collective | None]) -> int | None:
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
        whom = f"{'to' if collective.op == 'send' else 'from'} rank {'any' if collective.peer is None else collective.peer}"
    return f"{collective.op} ({what}) {whom}" + (f" at {collective.source}" if collective.source else "")


def describe_difference(row: dict[int, Collective | None]) -> str:
    """The row of `first_difference`, one rank a line."""
    return "\n".join(f"  rank {rank} issued {describe(issued)}" for rank, issued in row.items())


def read_stack(text: str, boundary: str) -> list[str]:
    """The learner's part of the stack that faulthandler wrote, outermost first: "cell 3, line 4: dist.all_reduce(x)".

    `boundary` is the file whose frames lie outside the job. Frames of libraries follow the last line of the learner's own as
    one entry: "torch/distributed/distributed_c10d.py, line 3027 in all_reduce".
    """
    for block in re.split(r"^(?:Thread|Current thread) .*$", text, flags=re.MULTILINE):
        frames = [match.group("file", "line", "function") for match in map(_FRAME.match, block.splitlines()) if match]
        inner = next((i for i, frame in enumerate(frames) if frame[0] == boundary), None)
        if inner is None:
            continue
        own = [sources.describe_line(name, int(line)) for name, line, _ in frames[:inner] if sources.is_learner_file(name)]
        lines = own[::-1]
        library = [frame for frame in frames[:inner] if not frame[0].startswith(_OURS)]
        if library and not sources.is_learner_file(library[0][0]):
            name, line, function = library[0]
            lines.append(f"{name.split('site-packages/')[-1]}, line {line} in {function}")
        return lines
    return []
