"""A server as a process of its own: started, waited for until it answers, and ended with all that it started.

Between the server and the process that wants it, its owner, stands a guard: `python -m helpers.server_process`. It ends the
server when it is asked to, and also when the owner is gone, in whatever way.
"""

import glob
import os
import shutil
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

from helpers.launching.processes import adopt_orphans, die_with, end_descendants

GRACE = 40.0  # seconds to finish what was accepted; torchrun gives its ranks 30 of them
HASTE = 5.0  # seconds to end before anything was accepted, or when nobody waits for it any more


class NotReady(RuntimeError):
    """A server that did not come up, for a `reason`. `log` is all it has printed."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"{reason}:\n{log[-3000:]}")
        self.reason, self.log = reason, log


class ServerProcess:
    """A server at `url`, and the process `pid` that all others of it are below; its output goes to `folder`/log."""

    def __init__(self, command: Sequence[str], url: str, folder: str, env: Mapping[str, str]) -> None:
        self.url, self._output, self._said = url, os.path.join(folder, "log"), ""
        guard = [sys.executable, "-m", "helpers.server_process", str(os.getpid()), folder, *command]
        with open(self._output, "wb") as output:
            # a group of its own keeps Ctrl-C from it. No session of its own: Linux shares cores out among sessions first; where
            # they are few, clients outside that of a server whose processes spin hardly run (a quarter of vLLM's tokens a second)
            self._guard = subprocess.Popen(
                guard, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, process_group=0
            )
        self.pid = self._guard.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; 128 + n where it was ended by signal n, as shells have it."""
        return self._guard.poll()

    def log(self) -> str:
        """All that it and its children have printed so far; also when its folder is gone."""
        with suppress(FileNotFoundError), open(self._output, encoding="utf-8", errors="replace") as file:
            self._said = file.read()
        return self._said

    def wait(self, seconds: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired when it still runs after `seconds`."""
        return self._guard.wait(seconds)

    def stop(self, asked: signal.Signals) -> None:
        """End it: with SIGTERM it may finish what it has accepted (GRACE), with SIGINT it has HASTE; nothing is left."""
        self._guard.send_signal(asked)
        try:
            self._guard.wait()
        except BaseException:  # a second interrupt: it has to be quick now, but still leaves nothing
            self._guard.send_signal(signal.SIGINT)
            self._guard.wait()
            raise
        self.log()


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
    with tempfile.TemporaryDirectory(prefix="server-") as folder:  # torchrun, for one, leaves a folder behind
        server = ServerProcess(command, url, folder, {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": folder, **(env or {})})
        asked = signal.SIGINT
        try:
            _wait_until_ready(server, path, timeout, watch)
            asked = signal.SIGTERM
            yield server
        finally:
            server.stop(asked)


def _wait_until_ready(server: ServerProcess, path: str, timeout: float, watch: Callable[[ServerProcess], object] | None) -> None:
    deadline = time.monotonic() + timeout
    while True:
        if (code := server.returncode) is not None:
            signals = {number: each.name for each in signal.Signals for number in (128 + each, -each)}
            how = signals.get(code, f"exit code {code}")
            raise NotReady(f"the server ended before it answered ({how})", server.log())
        if time.monotonic() > deadline:
            raise NotReady(f"the server did not answer within {timeout:g} s", server.log())
        if watch:
            watch(server)
        with suppress(httpx.TransportError):
            if httpx.get(server.url + path, timeout=2, trust_env=False).status_code == 200:  # not by way of a proxy
                return
        time.sleep(0.1)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def guard(owner: int, folder: str, command: Sequence[str]) -> int:
    """Run `command` until it ends, this process gets a signal, or `owner`, its parent, is gone; then end what it has started.

    Returns its exit code. Shared memory that is called after a file in `folder` goes too, and `folder` where the owner is gone.
    """
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    adopt_orphans()
    me = os.getpid()
    linux = sys.platform == "linux"
    server = subprocess.Popen(command, preexec_fn=(lambda: die_with(me)) if linux else None)  # also when this guard is killed
    while server.poll() is None and not asked and os.getppid() == owner:
        time.sleep(0.1)
    family = _below()
    server.terminate()
    end = time.monotonic() + (GRACE if signal.SIGTERM in asked else HASTE)
    while server.poll() is None and time.monotonic() < end:
        if signal.SIGINT in asked or os.getppid() != owner:
            end = min(end, time.monotonic() + HASTE)
        time.sleep(0.1)
    server.kill()  # nothing where it has ended
    code = server.wait()
    left = psutil.wait_procs(family | _below(), timeout=1)[1]
    for process in left:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
    psutil.wait_procs(left, timeout=3)  # Python's resource trackers free shared memory when all others have ended
    end_descendants()
    for name in (name for name in os.listdir(folder) if len(name) > 30):  # long enough to be nobody else's
        for shared in glob.glob(f"/dev/shm/{glob.escape(name)}*"):
            os.remove(shared)
    if os.getppid() != owner:
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _below() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
