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
from functools import cache
from typing import Any


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


def events(path: str) -> list[list[Any]]:
    """Return the events of the file `path` in the order of writing, without a last line that was cut off."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().split("\n")[:-1]  # what follows the last newline was cut off
    return [json.loads(line) for line in lines]
