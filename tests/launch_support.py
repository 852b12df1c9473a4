"""What the launcher's tests and its stress share: what a process has left behind, and a notebook kernel to drive."""

from __future__ import annotations

import glob
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

PATIENCE = 120.0  # seconds; a test that waits longer has failed


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> float:
    """Seconds until `condition` held. Raises AssertionError that says `what` did not happen."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begin


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below `pid` that still runs."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if running(process)]


def running(process: psutil.Process) -> bool:
    """Whether it is there and no zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def warm_processes(pid: int) -> list[psutil.Process]:
    """The warm processes that the process `pid` has started."""
    return [p for p in psutil.Process(pid).children() if running(p) and "helpers.launching" in " ".join(p.cmdline())]


def folders_of(pid: int) -> list[str]:
    """What the launcher of the process `pid` keeps in temporary folders and in memory."""
    return [path for base in (tempfile.gettempdir(), "/dev/shm") for path in glob.glob(f"{base}/helpers-*-{pid}-*")]


def working_in(folder: str | os.PathLike[str]) -> list[int]:
    """Processes whose working directory is `folder`, wherever in the process tree: a job's, if it was launched from there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == os.path.realpath(folder) and running(process):
                found.append(process.pid)
        except psutil.Error:
            continue
    return [pid for pid in found if pid != os.getpid()]


class Reply:
    """What one cell gave: `text` printed, `shown` the representations in order, `error` (name, value, traceback) or None."""

    def __init__(self) -> None:
        self.text = ""
        self.shown: list[dict[str, str]] = []
        self.updates: list[dict[str, str]] = []
        self.error: tuple[str, str, str] | None = None


class Kernel:
    """A notebook kernel as a notebook server would drive it."""

    def __init__(self, **environment: str) -> None:
        self._manager = KernelManager(kernel_name="python3")
        clean = {name: text for name, text in os.environ.items() if name not in ("JPY_SESSION_NAME", "PYTEST_CURRENT_TEST")}
        self._manager.start_kernel(env={**clean, "WORKSHOP_DEVICE": "cpu", **environment})
        self.client: BlockingKernelClient = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.pid = psutil.Process(self._manager.provisioner.process.pid).pid  # type: ignore[union-attr]
        self.run("from helpers import LaunchError, RankDied, RankFailed, RanksHung, launch")

    def start(self, code: str) -> str:
        """Begin to execute a cell; returns the id to `finish` it with once it runs: earlier interrupts would be lost."""
        execution = self.client.execute(code, store_history=True)
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if (message["parent_header"].get("msg_id"), message["msg_type"]) == (execution, "execute_input"):
                return execution

    def finish(self, execution: str, seconds: float = PATIENCE, printed: Callable[[str], object] = lambda text: None) -> Reply:
        """Wait for the end of a cell; `printed` is called with what it has printed so far whenever that grows."""
        reply = Reply()
        end = time.monotonic() + seconds
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"a cell did not end within {seconds} s; it printed {reply.text!r}") from None
            if message["parent_header"].get("msg_id") != execution:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                reply.text += content["text"]
                printed(reply.text)
            elif kind in ("display_data", "execute_result"):
                reply.shown.append(content["data"])
            elif kind == "update_display_data":
                reply.updates.append(content["data"])
            elif kind == "error":
                reply.error = content["ename"], content["evalue"], "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return reply

    def run(self, code: str, seconds: float = PATIENCE) -> Reply:
        """Execute a cell to its end."""
        return self.finish(self.start(code), seconds)

    def interrupt(self) -> None:
        """As the ■ button does."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def kill(self) -> None:
        """As the system does when memory runs out."""
        os.kill(self.pid, signal.SIGKILL)

    def warm(self) -> psutil.Process:
        """Its warm process; it has one from the import of `helpers` on."""
        found: list[psutil.Process] = []

        def one() -> bool:
            found[:] = warm_processes(self.pid)
            return bool(found)

        wait_until(one, "the kernel has a warm process")
        return found[0]

    def close(self) -> None:
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


@contextmanager
def kernel(**environment: str) -> Iterator[Kernel]:
    """A kernel for the length of a block."""
    opened = Kernel(**environment)
    try:
        yield opened
    finally:
        opened.close()
