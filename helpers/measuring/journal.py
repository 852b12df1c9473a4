"""One rank's event file: one small write per event, so that a killed rank leaves everything up to its death.

Each event is a pickled tuple whose first element says what it is: ``("problem", text)``, ``("region", name, start, end)``,
``("issue", …)`` with the fields of `Collective` after its rank, ``("wait", sequence, time)`` and
``("done", sequence, end, sender)``. Times are `time.perf_counter` seconds.
"""

import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from helpers.measuring.records import Collective, Region


class Journal:
    """Appends events to the file `path`."""

    def __init__(self, path: str) -> None:
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.RLock()  # callbacks of collectives write from other threads, also when the rank has closed it

    def write(self, *event: Any) -> None:
        """Write one event with one system call; nothing once the file is closed or its disk is full."""
        data = pickle.dumps(event)
        with self._lock:
            if self._file is not None:
                with suppress(OSError):
                    if os.write(self._file, data) == len(data):
                        return
                self.close()  # there was no room: what came behind an event that was cut off could not be read

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


current: Journal | None = None  # the journal of this process, while it records


@dataclass(frozen=True)
class Recorded:
    """What one rank's file holds. `problem` says why collectives are missing, None where none are."""

    collectives: tuple[Collective, ...] = ()
    regions: tuple[Region, ...] = ()
    problem: str | None = None


def read(path: str, rank: int) -> Recorded:
    """Return what the rank `rank` wrote into `path`, also one that was killed while writing. Needs no torch."""
    found = defaultdict(list)
    try:
        for kind, *values in _events(path):
            found[kind].append(values)
    except FileNotFoundError:
        return Recorded(problem=f"rank {rank} recorded nothing: it did not come to the point where the recorder starts")
    waited = dict(found["wait"])
    done = {sequence: (end, sender) for sequence, end, sender in found["done"]}
    collectives = []
    for issued in sorted(found["issue"]):  # by sequence: threads may have written in another order
        collective = Collective(rank, *issued)
        since = waited.get(collective.sequence)
        end, sender = done.get(collective.sequence, (None, collective.peer))
        if since is None or (end is not None and end <= since):  # what was done before the wait began never blocked
            since = collective.waited_from
        peer = collective.peer if sender is None else sender
        collectives.append(replace(collective, end=end, peer=peer, waited_from=since))
    regions = tuple(Region(rank, *region) for region in found["region"])
    return Recorded(tuple(collectives), regions, found["problem"][0][0] if found["problem"] else None)


def _events(path: str) -> Iterator[tuple[Any, ...]]:
    """Yield the events of the file `path` in the order of writing, without a last one that was cut off."""
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except Exception:  # the end, or an event that was cut off
                return
