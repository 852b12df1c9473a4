"""One job on the warm process's side: its ranks are started, watched, and ended together."""

import contextlib
import gc
import json
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from helpers.launching import processes, slots, wire
from helpers.launching import rank as rank_side

GRACE = 0.3  # seconds that the other ranks have to report after the first one failed
JOIN_LIMIT = 120.0  # seconds until every rank has started the function
LEAVE_LIMIT = 5.0  # seconds to leave the group once all have finished
STACK_LIMIT = {"grace": 0.4, "run": 3.0, "join": 3.0}  # seconds to write a stack: a failure is reported within a second
KILL_LIMIT = 60.0  # seconds until what was killed is killed again


class Kernel:
    """The kernel as the warm process sees it; with it this process ends, and every rank."""

    def __init__(self, pipe: int, folders: Iterable[str]) -> None:
        self._pipe, self._folders, self._input = pipe, folders, wire.Reader(0)

    def fileno(self) -> int:
        """What becomes readable when the kernel asks for something."""
        return self._input.descriptor

    def requests(self) -> Iterator[dict[str, Any]]:
        """What it asks for: "run" a job, "cancel" that."""
        for request in self._input.read():
            if request["do"] == "quit":
                self._leave()
            yield request
        if self._input.closed:
            self.has_gone()

    def tell(self, event: str, **more: Any) -> None:
        """Report something of the job."""
        try:
            wire.send(self._pipe, {"event": event, **more})
        except BrokenPipeError:
            self.has_gone()

    def has_gone(self) -> NoReturn:
        """End all; remove what a dead kernel kept on disk and in memory: nobody else is left to do it."""
        self._leave(self._folders)

    def _leave(self, folders: Iterable[str] = ()) -> NoReturn:
        processes.end_descendants()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


@dataclass
class Rank:
    """A rank, and the pipes to it: `ends` are its own, to write `events` to and to wait at for a byte from `control`."""

    number: int
    pid: int = 0  # until it is known, where an elastic agent starts the rank
    started: bool = False
    finished: bool = False
    exit: int | None = None  # exit code, or minus the signal

    def __post_init__(self) -> None:
        (events, events_end), (control_end, self.control) = os.pipe(), os.pipe()
        self.events, self.ends = wire.Reader(events), (events_end, control_end)

    def close_ends(self) -> None:
        """Leave them to the rank: held open here by all at once, those of many ranks would be more than a process may open."""
        for end in self.ends:
            os.close(end)


class Job:
    """One job: its ranks, what they report, and the one moment (`limit`) at which something happens to all of them."""

    def __init__(self, request: dict[str, Any], kernel: Kernel, woken: int, method: str) -> None:
        self.request, self.kernel, self.woken = request, kernel, woken
        self.imported: set[str] = set()
        gc.collect()
        gc.freeze()
        self.ticket = slots.hold_too(request["ticket"])  # as long as a rank may live, also when the kernel has gone
        self.ranks: list[Rank] = []
        self._start(method)
        self.selector = selectors.DefaultSelector()
        self.selector.register(kernel, selectors.EVENT_READ)
        self.selector.register(woken, selectors.EVENT_READ)
        for rank in self.ranks:
            self.selector.register(rank.events.descriptor, selectors.EVENT_READ, rank)
        self._expect("join", JOIN_LIMIT)

    def _expect(self, reason: str, seconds: float) -> None:
        """What the job comes to next, and when that is too late."""
        self.reason, self.limit = reason, time.monotonic() + seconds

    def follow(self) -> None:
        """Until every rank has left."""
        self._listen_to_kernel()  # a cancel may have come with the request
        while self.alive():
            for key, _ in self.selector.select(max(0.0, self.limit - time.monotonic())):
                if key.fileobj is self.kernel:
                    self._listen_to_kernel()
                elif key.fd == self.woken:
                    os.read(self.woken, 4096)
                else:
                    self._listen_to_rank(key.data)
            self._reap()
            if self.alive() and time.monotonic() >= self.limit:
                self._time_is_up()
        self._kill(self.ranks)
        processes.end_descendants()
        for rank in self.ranks:
            os.close(rank.events.descriptor)
            os.close(rank.control)
        self.selector.close()
        if self.ticket is not None:
            os.close(self.ticket)
        self.kernel.tell("done")

    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.exit is None]

    def _start(self, method: str) -> None:
        one_thread = sys.platform != "linux" or len(os.listdir("/proc/self/task")) == 1
        if method == "fork" and one_thread:
            for rank in self._new_ranks():
                rank.pid = fork_rank(self.request, rank.number, rank.ends)
                rank.close_ends()
            return
        path = os.path.join(self.request["folder"], "request")
        with open(path, "w") as file:
            json.dump(self.request, file)
        for rank in self._new_ranks():
            for end in rank.ends:
                os.set_inheritable(end, True)
            code = (
                f"import sys; sys.path[:] = {self.request['path']!r}; from helpers.launching import rank; "
                f"rank.spawned({path!r}, {rank.number}, {os.getpid()}, {rank.ends})"
            )
            rank.pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ, setpgroup=0)
            rank.close_ends()

    def _new_ranks(self) -> Iterator[Rank]:
        for number in range(self.request["ranks"]):
            self.ranks.append(Rank(number))
            yield self.ranks[-1]

    def _listen_to_kernel(self) -> None:
        if any(request["do"] == "cancel" for request in self.kernel.requests()):
            self._cancel()

    def _listen_to_rank(self, rank: Rank) -> None:
        if rank.events.closed:
            return
        code = None
        for message in rank.events.read():
            if message["event"] == "born":
                rank.pid = message["pid"]
            elif message["event"] == "left":
                code = message["code"]
            else:
                self.imported.update(message.pop("imported", ()))
                rank.started |= message["event"] == "started"
                rank.finished |= message["event"] == "finished"
                self.kernel.tell(**message)
        if rank.events.closed:
            self.selector.unregister(rank.events.descriptor)
        if self.reason == "join" and all(other.started for other in self.ranks):
            self._expect("run", self.request["timeout"])
        if self.reason == "run" and all(other.finished for other in self.ranks):
            self._expect("leave", LEAVE_LIMIT)
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

    def _left(self, rank: Rank, code: int) -> None:
        """Note that a rank's process has ended, after what it said before."""
        self._listen_to_rank(rank)
        rank.exit = code
        self.kernel.tell("exited", rank=rank.number, code=code, time=time.perf_counter(), killed=self.reason == "killed")
        if self.reason in ("join", "run"):  # before its release a rank has no good reason to leave
            self._expect("grace", GRACE)

    def _time_is_up(self) -> None:
        stuck = [rank for rank in self.alive() if not rank.finished]
        if self.reason in STACK_LIMIT:
            self._write_stacks(stuck)
        if self.reason in ("join", "run"):
            self.kernel.tell("hung", ranks=[rank.number for rank in stuck], while_in=self.reason)
        self._cancel()

    def _write_stacks(self, ranks: list[Rank]) -> None:
        """Ask each rank for its stack and wait until it is written, down to the frame in which the job began."""
        waiting = {rank.pid: rank_side.file_of(self.request, "stack", rank.number) for rank in ranks if rank.pid}
        for pid in waiting:
            with contextlib.suppress(ProcessLookupError):  # a rank of another host may be gone already
                os.kill(pid, signal.SIGUSR1)
        end = time.monotonic() + STACK_LIMIT[self.reason]
        while waiting and time.monotonic() < end:
            time.sleep(0.005)
            waiting = {
                pid: path for pid, path in waiting.items() if rank_side.__file__ not in Path(path).read_text(errors="replace")
            }

    def _cancel(self) -> None:
        self._expect("killed", KILL_LIMIT)
        self._kill(self.alive())

    def _kill(self, ranks: list[Rank]) -> None:
        """End process groups: the ranks and, where orphans are not adopted, what they have left behind."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)


def fork_rank(request: dict[str, Any], number: int, ends: tuple[int, int]) -> int:
    """The process id of rank `number`, forked from this process. `ends` are its ends of its pipes."""
    parent = os.getpid()

    def child() -> int:
        rank_side.set_apart(rank_side.file_of(request, "log", number), parent, *ends)
        return rank_side.main(request, number, *ends)

    return processes.fork(child)
