"""One job on the warm process's side: its ranks are started, watched, and ended together."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from helpers.launching import rank as rank_side
from helpers.launching import slots, wire

GRACE = 0.3  # seconds that the other ranks have to report after the first one failed
JOIN_LIMIT = 120.0  # seconds until every rank has started the function
LEAVE_LIMIT = 5.0  # seconds to leave the group once all have finished
STACK_LIMIT = {"grace": 0.4, "run": 3.0, "join": 3.0}  # seconds to write a stack: a failure is reported within a second


@dataclass
class _Rank:
    number: int
    pid: int  # 0 until it is known, where an elastic agent starts the rank
    control: int  # write end: a byte releases the rank
    events: wire.Reader
    started: bool = False
    finished: bool = False
    exit: int | None = None  # exit code, or minus the signal


def leave(folders: Iterable[str]) -> NoReturn:
    """End every rank and this process; remove what a dead kernel kept on disk and in memory: nobody else is left to do it."""
    end_descendants()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def end_descendants() -> None:
    """Kill every process below this one. On Linux orphans of ranks are its children, whatever session they moved to."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if not os.waitpid(-1, os.WNOHANG)[0]:  # there are children, and all of them live
                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                os.waitpid(-1, 0)


class Job:
    """One job: its ranks, what they report, and the one moment (`limit`) at which something happens to all of them."""

    def __init__(
        self,
        request: dict[str, Any],
        kernel: int,
        requests: wire.Reader,
        inbox: deque[dict[str, Any]],
        woken: int,
        method: str,
        folders: list[str],
    ) -> None:
        self.request = request
        self.kernel = kernel
        self.requests = requests
        self.inbox = inbox
        self.woken = woken
        self.folders = folders
        self.imported: set[str] = set()
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.selector.register(woken, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()
        self.ticket = slots.hold_too(request["ticket"])  # as long as a rank may live, also when the kernel has gone
        self.ranks = self._start(method)
        self.reason, self.limit = "join", time.monotonic() + JOIN_LIMIT

    def tell(self, event: str, **more: Any) -> None:
        try:
            wire.send(self.kernel, {"run": self.request["run"], "event": event, **more})
        except BrokenPipeError:
            leave(self.folders)

    def follow(self) -> None:
        """Until every rank has left."""
        self.tell("pids", pids=[rank.pid for rank in self.ranks])
        while self.alive():
            for key, _ in self.selector.select(min(max(0.0, self.limit - time.monotonic()), 3600)):
                if key.fd == 0:
                    self._listen_to_kernel()
                elif key.fd == self.woken:
                    os.read(self.woken, 4096)
                else:
                    self._listen_to_rank(key.data)
            self._reap()
            if self.alive() and time.monotonic() >= self.limit:
                self._time_is_up()
        self._kill(self.ranks)
        end_descendants()
        for rank in self.ranks:
            os.close(rank.control)
        self.selector.close()
        if self.ticket is not None:
            os.close(self.ticket)
        self.tell("done")

    def alive(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit is None]

    def _start(self, method: str) -> list[_Rank]:
        one_thread = sys.platform != "linux" or len(os.listdir("/proc/self/task")) == 1
        start = self._fork if method == "fork" and one_thread else self._spawn
        return [start(number) for number in range(self.request["ranks"])]

    def _fork(self, number: int) -> _Rank:
        (events, events_end), (control_end, control) = os.pipe(), os.pipe()
        pid = fork_rank(self.request, number, events_end, control_end)
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
        if pid:
            with contextlib.suppress(OSError):  # the rank does the same: whoever is first
                os.setpgid(pid, pid)
        os.close(events_end)
        os.close(control_end)
        os.set_blocking(events, False)  # a process that the rank forked may hold the other end open for ever
        rank = _Rank(number, pid, control, wire.Reader(events))
        self.selector.register(events, selectors.EVENT_READ, rank)
        return rank

    def _listen_to_kernel(self) -> None:
        """Cancel or quit at once; the next job, asked for by a kernel that did not wait for the end of this one, later."""
        for message in self.requests.read():
            if message == {"do": "cancel", "run": self.request["run"]}:
                self._cancel()
            elif message["do"] == "quit":
                leave([])
            else:
                self.inbox.append(message)
        if self.requests.closed:
            leave(self.folders)

    def _listen_to_rank(self, rank: _Rank, last: bool = False) -> None:
        code = None
        for message in rank.events.read():
            if message["event"] == "born":
                rank.pid = message["pid"]
                continue
            if message["event"] == "left":
                code = message["code"]
                continue
            self.imported.update(message.pop("imported", ()))
            rank.started |= message["event"] == "started"
            rank.finished |= message["event"] == "finished"
            self.tell(**message)
        if rank.events.closed or last:
            rank.events.closed = True
            self.selector.unregister(rank.events.descriptor)
            os.close(rank.events.descriptor)
        if self.reason == "join" and all(other.started for other in self.ranks):
            self.reason, self.limit = "run", time.monotonic() + self.request["timeout"]
        if self.reason == "run" and all(other.finished for other in self.ranks):
            self.reason, self.limit = "leave", time.monotonic() + LEAVE_LIMIT
            for other in self.ranks:
                with contextlib.suppress(BrokenPipeError):
                    os.write(other.control, b"1")
        if code is not None:
            self._left(rank, code)

    def _reap(self) -> None:
        for rank in self.alive():
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                self._left(rank, os.waitstatus_to_exitcode(status))

    def _left(self, rank: _Rank, code: int) -> None:
        """Note that a rank's process has ended, after what it said before."""
        if not rank.events.closed:
            self._listen_to_rank(rank, last=True)
        rank.exit = code
        self.tell("exited", rank=rank.number, code=code, time=time.perf_counter(), killed=self.reason == "killed")
        if self.reason in ("join", "run"):  # before its release a rank has no good reason to leave
            self.reason, self.limit = "grace", time.monotonic() + GRACE

    def _time_is_up(self) -> None:
        stuck = [rank for rank in self.alive() if not rank.finished]
        if self.reason in STACK_LIMIT:
            self._write_stacks(stuck)
        if self.reason in ("join", "run"):
            self.tell("hung", ranks=[rank.number for rank in stuck], while_in=self.reason)
        self._cancel()

    def _write_stacks(self, ranks: list[_Rank]) -> None:
        """Ask each rank for its stack and wait until it is written, down to the frame in which the job began."""
        waiting = {rank.pid: rank_side.file_of(self.request, "stack", rank.number) for rank in ranks if rank.pid}
        for pid in waiting:
            with contextlib.suppress(ProcessLookupError):  # a rank of another host may be gone already
                os.kill(pid, signal.SIGUSR1)
        end = time.monotonic() + STACK_LIMIT[self.reason]
        while waiting and time.monotonic() < end:
            time.sleep(0.005)
            waiting = {pid: path for pid, path in waiting.items() if not _complete(path)}

    def _cancel(self) -> None:
        self.reason, self.limit = "killed", time.monotonic() + 3600
        self._kill(self.alive())

    def _kill(self, ranks: list[_Rank]) -> None:
        """End process groups: the ranks and, where orphans are not adopted, what they have left behind."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)


def fork(child: Callable[[], int]) -> int:
    """The process id of a fork of this process that calls `child` and exits with its value, 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for changed in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
                signal.signal(changed, signal.SIG_DFL)
            code = child()
        finally:
            os._exit(code)
    return pid


def fork_rank(request: dict[str, Any], number: int, events_end: int, control_end: int) -> int:
    """The process id of rank `number`, forked from this process. It writes to `events_end` and is released by `control_end`."""
    parent = os.getpid()

    def child() -> int:
        rank_side.set_apart(rank_side.file_of(request, "log", number), parent)
        keep_only(events_end, control_end)
        return rank_side.main(request, number, events_end, lambda: os.read(control_end, 1))

    return fork(child)


def keep_only(*wanted: int) -> None:
    """Close every descriptor but the standard three and these."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in wanted:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _complete(stack: str) -> bool:
    if not os.path.exists(stack):
        return False
    with open(stack, errors="replace") as file:
        return rank_side.__file__ in file.read()
