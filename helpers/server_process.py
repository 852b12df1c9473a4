"""A server as a process of its own: started, waited for until it answers, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
import psutil

_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
GRACE = 40.0  # seconds to finish what was accepted; torchrun gives its ranks 30 of them


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

    def stop(self) -> None:
        """Ask it to finish what it accepted and to end; what is left after `GRACE` seconds is killed, children too."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in psutil.wait_procs(children, timeout=1)[1]:
            child.kill()


@contextmanager
def started(
    command: Sequence[str], url: str, *, path: str = "/health", timeout: float = 300, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run `command` while the block runs, from the moment that `url` + `path` answers 200.

    It ends with the block, and also when this process is killed. `env` is added to the environment, in which the folder for
    temporary files is one that goes with the server.

    Raises RuntimeError with the end of its log when it exits or does not answer within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="server-") as folder, open(os.path.join(folder, "log"), "wb") as output:
        guarded = [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), *command]
        surroundings = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": folder, **(env or {})}  # torchrun leaves a folder behind
        process = subprocess.Popen(
            guarded, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=surroundings, start_new_session=True
        )
        server = ServerProcess(process, url, output.name)
        try:
            _wait_until_ready(server, path, timeout)
            yield server
        finally:
            server.stop()


def _wait_until_ready(server: ServerProcess, path: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        if (code := server.returncode) is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RuntimeError(f"the server ended before it answered ({how}):\n{server.log()[-3000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server did not answer within {timeout:g} s:\n{server.log()[-3000:]}")
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
