"""One rank's event file: one small write per event, so that a killed rank leaves everything up to its death.

Each line is a JSON list whose first element says what it is:
``["start", rank, time]``, ``["problem", text]``, ``["region", name, start, end]``,
``["issue", sequence, op, group, dtype, shape, bytes, start, source, peer, waited_from]``, ``["wait", sequence, time]`` and
``["done", sequence, end, sender]``.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from helpers.measuring.records import Collective, Region


class Journal:
    """Appends events to the file `path`; times are `time.perf_counter` seconds."""

    def __init__(self, path: str, rank: int) -> None:
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()  # callbacks of collectives write from other threads, also when the rank has closed it
        self.write("start", rank, time.perf_counter())

    def write(self, *event: Any) -> None:
        """Write one event with one system call; nothing once the file is closed."""
        self._append(json.dumps(event))

    def issue(
        self,
        sequence: int,
        op: str,
        group: Sequence[int],
        dtype: str | None,
        shape: Sequence[int],
        size: int,
        start: float,
        source: str | None,
        peer: int | None,
        waited_from: float | None,
    ) -> None:
        """Write the issue of a collective: as `write` does, at a third of the time."""
        texts = (
            _text(dtype),
            list(shape),
            size,
            start,
            _text(source),
            _text(peer),
            "null" if waited_from is None else waited_from,
        )
        self._append(f'["issue",{sequence},"{op}",{list(group)},' + ",".join(map(str, texts)) + "]")

    def _append(self, line: str) -> None:
        data = line.encode() + b"\n"
        with self._lock:
            if self._file is not None:
                os.write(self._file, data)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


@cache
def _text(value: str | int | None) -> str:
    return json.dumps(value)


current: Journal | None = None  # the journal of this process, while it records


@dataclass(frozen=True)
class Recorded:
    """What one rank's file holds. `problem` says why collectives are missing, None where none are."""

    collectives: tuple[Collective, ...] = ()
    regions: tuple[Region, ...] = ()
    problem: str | None = None


def read(path: str, rank: int) -> Recorded:
    """Return what the rank `rank` wrote into `path`, also one that was killed while writing. Needs no torch."""
    try:
        events = _events(path)
    except FileNotFoundError:
        return Recorded(problem=f"rank {rank} recorded nothing: it did not come to the point where the recorder starts")
    waited = {event[1]: event[2] for event in events if event[0] == "wait"}
    done = {event[1]: event[2:] for event in events if event[0] == "done"}
    collectives = []
    for event in events:
        if event[0] == "issue":
            sequence, op, group, dtype, shape, size, begin, source, peer, waited_from = event[1:]
            end, sender = done.get(sequence, (None, None))
            if end is None or waited.get(sequence, end) < end:  # what was done before the wait began never blocked
                waited_from = waited.get(sequence, waited_from)
            collectives.append(
                Collective(
                    rank=rank,
                    sequence=sequence,
                    op=op,
                    group=tuple(group),
                    dtype=dtype,
                    shape=tuple(shape),
                    bytes=size,
                    start=begin,
                    end=end,
                    source=source,
                    peer=sender if peer is None else peer,
                    waited_from=waited_from,
                )
            )
    return Recorded(
        collectives=tuple(sorted(collectives, key=lambda collective: collective.sequence)),
        regions=tuple(Region(rank, *event[1:]) for event in events if event[0] == "region"),
        problem=next((event[1] for event in events if event[0] == "problem"), None),
    )


def _events(path: str) -> list[list[Any]]:
    """Return the events of the file `path` in the order of writing, without a last line that was cut off."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().split("\n")[:-1]  # what follows the last newline was cut off
    return [json.loads(line) for line in lines]
