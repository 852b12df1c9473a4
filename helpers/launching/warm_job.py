"""One job on the warm process's side: its ranks are started, watched, and ended together."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from helpers.launching import rank as rank_side
from helpers.launching import wire

GRACE = 0.3  # seconds that the other ranks have to report after the first one failed
JOIN_LIMIT = 120.0  # seconds until every rank has started the function
LEAVE_LIMIT = 5.0  # seconds to leave the group once all have finished
STACK_LIMIT = 0.5  # seconds to write a stack


@dataclass
class _Rank:
    number: int
    pid: int
    control: int  # write end: a byte releases the rank
    events: wire.Reader
    started: bool = False
    finished: bool = False
    exit: int | None = None  # exit code, or minus the signal


def leave(folders: list[str]) -> NoReturn:
    """The kernel died: nobody else is left to remove what its jobs kept on disk and in memory."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _keep_only(first: int, second: int) -> tuple[int, int]:
    """Close every descriptor but the standard three and these two; returns their new numbers."""
    low = fcntl.fcntl(first, fcntl.F_DUPFD, 64)
    high = fcntl.fcntl(second, fcntl.F_DUPFD, low)
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
    return low, high


class Job:
    """One job: its ranks, what they report, and the one moment (`limit`) at which something happens to all of them."""

    def __init__(
        self,
        request: dict[str, Any],
        kernel: int,
        requests: wire.Reader,
        woken: int,
        lifeline: int | None,
        method: str,
        folders: list[str],
    ) -> None:
        self.request = request
        self.kernel = kernel
        self.requests = requests
        self.woken = woken
        self.lifeline = lifeline
        self.folders = folders
        self.imported: set[str] = set()
        self.selector = selectors.DefaultSelector()
        for descriptor in (0, woken, lifeline):
            if descriptor is not None:
                self.selector.register(descriptor, selectors.EVENT_READ)
        one_thread = sys.platform != "linux" or len(os.listdir("/proc/self/task")) == 1
        start = self._fork if method == "fork" and one_thread else self._spawn
        gc.collect()
        gc.freeze()
        self.ranks = [start(number) for number in range(request["ranks"])]
        self.reason, self.limit = "join", time.monotonic() + JOIN_LIMIT

    def tell(self, event: str, **more: Any) -> None:
        try:
            wire.send(self.kernel, {"run": self.request["run"], "event": event, **more})
        except BrokenPipeError:
            self._abandon()

    def follow(self) -> None:
        """Until every rank has left."""
        self.tell("pids", pids=[rank.pid for rank in self.ranks])
        while self.alive():
            for key, _ in self.selector.select(min(max(0.0, self.limit - time.monotonic()), 3600)):
                if key.fd == 0:
                    self._listen_to_kernel()
                elif key.fd == self.lifeline:
                    self._abandon()
                elif key.fd == self.woken:
                    os.read(self.woken, 4096)
                else:
                    self._listen_to_rank(key.data)
            self._reap()
            if self.alive() and time.monotonic() >= self.limit:
                self._time_is_up()
        self._end_descendants()
        for rank in self.ranks:
            os.close(rank.control)
        self.selector.close()
        self.tell("done")

    def alive(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit is None]

    def _fork(self, number: int) -> _Rank:
        (events, events_end), (control_end, control) = os.pipe(), os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                rank_side.become_rank(self.request, number, parent)
                events_end, control_end = _keep_only(events_end, control_end)
                code = rank_side.main(self.request, number, events_end, lambda: os.read(control_end, 1))
            finally:
                os._exit(code)
        return self._born(number, pid, events, events_end, control, control_end)

    def _spawn(self, number: int) -> _Rank:
        (events, events_end), (control_end, control) = os.pipe(), os.pipe()
        code = (
            f"import sys; sys.path[:] = {self.request['path']!r}; from helpers.launching import rank; "
            f"rank.spawned({self.request['folder']!r}, {number}, {os.getpid()}, {events_end}, {control_end})"
        )
        with open(os.path.join(self.request["folder"], "request"), "w") as file:
            json.dump(self.request, file)
        process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(events_end, control_end), stdin=subprocess.DEVNULL, process_group=0
        )
        process.returncode = 0  # this module waits for it: Popen must not
        return self._born(number, process.pid, events, events_end, control, control_end)

    def _born(self, number: int, pid: int, events: int, events_end: int, control: int, control_end: int) -> _Rank:
        with contextlib.suppress(OSError):  # the rank does the same: whoever is first
            os.setpgid(pid, pid)
        os.close(events_end)
        os.close(control_end)
        rank = _Rank(number, pid, control, wire.Reader(events))
        self.selector.register(events, selectors.EVENT_READ, rank)
        return rank

    def _listen_to_kernel(self) -> None:
        messages = self.requests.read()
        if self.requests.closed:
            self._abandon()
        if any(message["do"] == "cancel" and message["run"] == self.request["run"] for message in messages):
            self._kill()

    def _listen_to_rank(self, rank: _Rank) -> None:
        for message in rank.events.read():
            self.imported.update(message.pop("imported", ()))
            rank.started |= message["event"] == "started"
            rank.finished |= message["event"] == "finished"
            self.tell(**message)
        if rank.events.closed:
            self.selector.unregister(rank.events.descriptor)
            os.close(rank.events.descriptor)
        if self.reason == "join" and all(other.started for other in self.ranks):
            self.reason, self.limit = "run", time.monotonic() + self.request["timeout"]
        if self.reason == "run" and all(other.finished for other in self.ranks):
            self.reason, self.limit = "leave", time.monotonic() + LEAVE_LIMIT
            for other in self.ranks:
                with contextlib.suppress(BrokenPipeError):
                    os.write(other.control, b"1")

    def _reap(self) -> None:
        for rank in self.alive():
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if not pid:
                continue
            if not rank.events.closed:
                self._listen_to_rank(rank)  # what it said before it left
            rank.exit = os.waitstatus_to_exitcode(status)
            self.tell("exited", rank=rank.number, code=rank.exit, time=time.perf_counter(), killed=self.reason == "killed")
            if self.reason in ("join", "run"):  # before its release a rank has no good reason to leave
                self.reason, self.limit = "grace", time.monotonic() + GRACE

    def _time_is_up(self) -> None:
        stuck = [rank for rank in self.alive() if not rank.finished]
        if self.reason in ("join", "run", "grace"):
            self._write_stacks(stuck)
        if self.reason in ("join", "run"):
            self.tell("hung", ranks=[rank.number for rank in stuck], while_in=self.reason)
        self._kill()

    def _write_stacks(self, ranks: list[_Rank]) -> None:
        """Ask each rank for its stack and wait until the file has stopped growing."""
        waiting = {rank_side.file_of(self.request, "stack", rank.number): -1 for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        end = time.monotonic() + STACK_LIMIT
        while waiting and time.monotonic() < end:
            time.sleep(0.01)
            sizes = {path: os.stat(path).st_size if os.path.exists(path) else 0 for path in waiting}
            waiting = {path: size for path, size in sizes.items() if size == 0 or size != waiting[path]}

    def _kill(self) -> None:
        self.reason, self.limit = "killed", time.monotonic() + 3600
        for rank in self.alive():
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(rank.pid, signal.SIGKILL)

    def _end_descendants(self) -> None:
        """Processes that ranks started and left behind: in their groups, or adopted by this process."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass

    def _abandon(self) -> NoReturn:
        """The kernel died in mid-job: end the ranks, then leave."""
        self._kill()
        self._end_descendants()
        leave(self.folders)
