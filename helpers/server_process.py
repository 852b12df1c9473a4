"""A server as a process of its own: started, waited for until it answers, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import httpx
import psutil

_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
# Waits for its standard input to end. Where its owner was killed, nothing stood there: then it gives the server's process group
# a while to end. Kills what is left of the group, Python's resource trackers last, since they free shared memory when all others
# have ended. Removes the server's folder, and shared memory that is called after a file in it.
_GUARD = """
import glob, os, shutil, sys, time
group, folder, grace = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def ends_within(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except OSError:
            return True
        time.sleep(0.1)
if not ends_within(0.05 if sys.stdin.read() else grace):
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open("/proc/" + pid + "/cmdline", "rb") as line:
                if os.getpgid(int(pid)) == group and b"resource_tracker" not in line.read():
                    os.kill(int(pid), 9)
        except OSError:
            pass
    if not ends_within(3):
        try:
            os.killpg(group, 9)
        except OSError:
            pass
for name in os.listdir(folder):
    for left in glob.glob("/dev/shm/" + glob.escape(name) + "*") if len(name) > 30 else ():
        os.remove(left)
shutil.rmtree(folder, ignore_errors=True)
"""
GRACE = 40.0  # seconds to finish what was accepted; torchrun gives its ranks 30 of them
HASTE = 5.0  # seconds to end before anything was accepted


class NotReady(RuntimeError):
    """A server that did not come up. `log` is all it has printed."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}:\n{log[-3000:]}")
        self.log = log


class ServerProcess:
    """A running server: `url`, `pid`, `log()`, and `returncode` once it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, output: str) -> None:
        self._process, self.url, self._output = process, url, output

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """All that it and its children have printed so far."""
        with open(self._output, encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait(self, seconds: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired when it still runs after `seconds`."""
        return self._process.wait(seconds)

    def stop(self, grace: float = GRACE) -> None:
        """Ask it to finish what it accepted and to end; what is left after `grace` seconds is killed, children too."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in psutil.wait_procs(children, timeout=1)[1]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(child.pid) != self.pid:  # those of the server's own group end with it, see the guard
                    child.kill()


@contextmanager
def started(
    command: Sequence[str],
    url: str,
    *,
    path: str = "/health",
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    watch: Callable[[ServerProcess], object] | None = None,
) -> Iterator[ServerProcess]:
    """Run `command` while the block runs, from the moment that `url` + `path` answers 200.

    It ends with the block, and also when this process is killed. `env` is added to the environment, in which the folder for
    temporary files is one that goes with the server. `watch` is called with the server now and then until it answers; what it
    raises ends the server.

    Raises NotReady with the end of its log when it exits or does not answer within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="server-") as folder, open(os.path.join(folder, "log"), "wb") as output:
        guarded = [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), *command]
        surroundings = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": folder, **(env or {})}  # torchrun leaves a folder behind
        process = subprocess.Popen(
            guarded, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=surroundings, start_new_session=True
        )
        server, grace = ServerProcess(process, url, output.name), HASTE
        guard = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD, str(process.pid), folder, str(3 * HASTE)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _wait_until_ready(server, path, timeout, watch)
            grace = GRACE
            yield server
        finally:
            server.stop(grace)
            guard.communicate(b"ended")


def _wait_until_ready(server: ServerProcess, path: str, timeout: float, watch: Callable[[ServerProcess], object] | None) -> None:
    deadline = time.monotonic() + timeout
    while True:
        if (code := server.returncode) is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise NotReady(f"the server ended before it answered ({how})", server.log())
        if time.monotonic() > deadline:
            raise NotReady(f"the server did not answer within {timeout:g} s", server.log())
        if watch:
            watch(server)
        try:
            if httpx.get(server.url + path, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
