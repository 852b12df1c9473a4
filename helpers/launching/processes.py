"""What ties processes together, so that none is left behind: each ends with the one that started it."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Be ended when the parent dies, on Linux by a signal of choice. Raises SystemExit where it is gone already."""
    if sys.platform == "linux":
        _set(_PR_SET_PDEATHSIG, by)
    else:
        threading.Thread(target=_watch, args=[parent], daemon=True).start()
    if os.getppid() != parent:
        raise SystemExit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def when_dead(parent: int, leave: Callable[[], object]) -> None:
    """Call `leave` when the parent dies (Linux), also in the middle of an import; now, where it is gone already."""

    def look(*_: object) -> None:
        if os.getppid() != parent:  # else only the parent's thread that started this process has ended
            leave()

    signal.signal(signal.SIGHUP, look)
    _set(_PR_SET_PDEATHSIG, signal.SIGHUP)
    look()


def adopt_orphans() -> None:
    """From now on processes below this one whose parents end become its children (Linux)."""
    _set(_PR_SET_CHILD_SUBREAPER, 1)


def _set(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def fork(child: Callable[[], int]) -> int:
    """The process id of a fork of this process, in a group of its own, that calls `child` and exits with its value."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for changed in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
                signal.signal(changed, signal.SIG_DFL)
            code = child()
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):  # the child does the same: whoever is first
        os.setpgid(pid, pid)
    return pid


def keep_only(*wanted: int) -> None:
    """Close every descriptor but the standard three and these."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in wanted:
            with contextlib.suppress(OSError):
                os.close(int(name))


def end_descendants() -> None:
    """Kill every process below this one and wait for it; with `adopt_orphans` also those that moved to sessions of their own."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if not os.waitpid(-1, os.WNOHANG)[0]:  # there are children, and all of them live
                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                os.waitpid(-1, 0)
