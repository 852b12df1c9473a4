"""The processes of a benchmark: everything it starts ends with it, and what other processes use meanwhile is known."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def contained() -> Iterator[None]:
    """Whatever is started inside, also what detaches itself from its parent, is ended on leaving, and temporary files go.

    SIGTERM ends the block like an interrupt does. Whoever runs inside has a temporary folder of its own.
    """
    _adopt_orphans(True)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    outside = os.environ.get("TMPDIR")
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            try:
                yield
            finally:
                end_all()
    finally:
        os.environ.pop("TMPDIR", None)
        if outside is not None:
            os.environ["TMPDIR"] = outside
        tempfile.tempdir = None
        signal.signal(signal.SIGTERM, before)
        _adopt_orphans(False)


def _adopt_orphans(wanted: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def end_all() -> None:
    """End all descendants of this process and take note of their ends. Raises TimeoutError where one cannot be ended."""
    while doomed := [process for process in descendants(os.getpid()) if not gone([process])]:
        end(doomed)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end(doomed: Iterable[psutil.Process]) -> None:
    """Kill these processes and wait until they are gone. Raises TimeoutError where one is still there after 10 s."""
    doomed = list(doomed)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if not gone_within(doomed, 10):
        raise TimeoutError(f"killed, and still there: {doomed}")


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that `pid` has started, and those that they have started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def gone(processes: Iterable[psutil.Process]) -> bool:
    """None of them runs any more (one that ended and whose parent has not asked for its end does not run)."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def gone_within(processes: Iterable[psutil.Process], limit: float) -> bool:
    """Wait until none of them runs any more, for at most `limit` seconds; says whether that is so."""
    processes = list(processes)
    deadline = time.monotonic() + limit
    while not gone(processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def settle(pid: int, still: float = 0.5, limit: float = 60) -> None:
    """Wait until `pid` and its descendants have used next to no CPU for `still` seconds: nothing goes on in the background.

    Raises TimeoutError after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before = _tree_seconds(pid)
        time.sleep(still)
        if _tree_seconds(pid) - before <= 0.05 * still:
            return
    raise TimeoutError(f"process {pid} and its descendants were still busy after {limit:g} s")


def _tree_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants, and of those of their children that have ended."""
    return sum(_seconds(process, 4) for process in [psutil.Process(pid), *descendants(pid)])


def _seconds(process: psutil.Process, parts: int = 2) -> float:
    """User and system time, and as parts 3 and 4 those of children that have ended; 0 for a process that is gone."""
    with contextlib.suppress(psutil.Error):
        return sum(process.cpu_times()[:parts])
    return 0.0


@dataclass(frozen=True)
class _Reading:
    time: float
    machine: float
    ours: float


class Watch:
    """How much CPU processes other than this one and its descendants use, from the making of this object on."""

    def __init__(self) -> None:
        self._begin = self._read()

    def others(self) -> float:
        """Cores in use by others, on average until now (0.5 is half a core), with what a host withheld from this machine."""
        now = self._read()
        passed = now.time - self._begin.time
        used = (now.machine - self._begin.machine) - (now.ours - self._begin.ours)
        return max(0.0, used / passed) if passed > 0 else 0.0

    def _read(self) -> _Reading:
        times = psutil.cpu_times()
        machine = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        return _Reading(time.monotonic(), machine, _tree_seconds(os.getpid()))


def busiest(seconds: float, count: int = 3) -> list[str]:
    """The other processes that use most CPU during the next `seconds`: "python tools/train.py (1.2 cores)"."""
    own = {os.getpid(), *(process.pid for process in descendants(os.getpid()))}
    before = {process: _seconds(process) for process in psutil.process_iter() if process.pid not in own}
    time.sleep(seconds)
    used = {process: (_seconds(process) - start) / seconds for process, start in before.items()}
    top = sorted(used, key=lambda process: used[process], reverse=True)[:count]
    return [f"{_command(process)} ({used[process]:.1f} cores)" for process in top if used[process] > 0.02]


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[:3])[:60] or process.name()
    return f"process {process.pid}"
