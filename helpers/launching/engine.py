"""The kernel's side of the warm process: start it, hand it a job, listen, end it."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from helpers.launching import wire
from helpers.launching.errors import LaunchError

_BY_IMPORTED = ("TORCH", "HF_", "HUGGING", "TRANSFORMERS_")  # by libraries that a warm process has imported
READ_AT_START = (*_BY_IMPORTED, "OMP_", "MKL_", "MALLOC_", "LD_", "NCCL_", "GLOO_", "KMP_", "PYTHON", "WORKSHOP_START_METHOD")
_READ_OFTEN = "TORCHINDUCTOR_CACHE_DIR"  # torch sets it itself when it compiles first, and reads it each time
MEMORY_FOLDER = "/dev/shm"
MEMORY_NEEDED = 256 << 20  # bytes free in /dev/shm below which values go to disk: containers often have 64 MiB of it
ENGINES_KEPT = 2  # the plain one, and the last with variables of its own


class Engine:
    """One warm process. Not for use by two threads at once."""

    def __init__(self, environment: dict[str, str], folders: list[str]) -> None:
        method = environment.get("WORKSHOP_START_METHOD") or ("fork" if sys.platform == "linux" else "spawn")
        if method not in ("fork", "spawn"):
            raise ValueError(f'WORKSHOP_START_METHOD is {method!r}; it must be "fork" or "spawn"')
        from_warm, to_kernel = os.pipe()
        code = (
            f"import sys; sys.path[:] = {import_path()!r}; from helpers.launching import warm; "
            f"warm.main({to_kernel}, {os.getpid()}, {method!r}, {folders!r})"
        )
        environment = {**environment, "MPLBACKEND": "Agg", "PYTHONHASHSEED": "0"}  # sets in the same order in every rank
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is CUDA must not start it
        # threads that wait shall sleep: spinning ones slow a step 20-fold where the cores have other work too
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start a thread, and make fork unsafe
        self.problems = tempfile.TemporaryFile(dir=folders[0])  # noqa: SIM115  (what it says on stderr)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.problems,
            pass_fds=[to_kernel], env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(to_kernel)
        assert self.process.stdin is not None
        self.input = self.process.stdin.fileno()
        self.output = wire.Reader(from_warm)

    def tell(self, message: dict[str, Any]) -> None:
        """Send one request. Raises LaunchError when the warm process is gone."""
        try:
            wire.send(self.input, message)
        except BrokenPipeError:
            self.died()

    def listen(self, seconds: float) -> list[dict[str, Any]]:
        """What comes within `seconds`. Raises LaunchError when the warm process is gone."""
        if not connection.wait([self.output.descriptor], seconds):  # select knows the first 1,024 descriptors only
            return []
        messages = list(self.output.read())
        if self.output.closed:
            self.died()
        return messages

    def died(self) -> None:
        """Raise LaunchError with what the warm process said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)  # a closed pipe is seen before the exit code
        self.problems.seek(0)
        said = self.problems.read().decode(errors="replace").strip()
        self.end()
        raise LaunchError(
            f"the warm process that ranks are started from ended with exit code {self.process.returncode}; the next launch "
            f"starts a new one." + (f" It said:\n{said}" if said else "")
        )

    @property
    def usable(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Let it end its ranks and leave; within a second it is gone. A second time nothing happens."""
        if self.problems.closed:
            return
        try:
            self.process.communicate(b'{"do": "quit"}\n', timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.output.descriptor)
        self.problems.close()


class Interrupts:
    """While held, an interrupt raises nothing: it sets `asked`. At the end it is raised after all.

    Raising KeyboardInterrupt in the middle of a pipe's message would leave half of it behind and break the next job.
    Outside the main thread signals cannot be held, and nothing is changed. Afterwards the handler is as before.
    """

    def __enter__(self) -> Interrupts:
        self.asked = False
        self._held = threading.current_thread() is threading.main_thread()
        if self._held:
            self._before: Any = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_: object) -> None:
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self._held:  # from here on an interrupt raises
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._before is None else self._before)
        if self.asked:
            raise KeyboardInterrupt("the job was stopped; no rank is left") from None


class _Workplace:
    """What one kernel process keeps: its warm processes and its folders on disk and in memory."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.engines: dict[tuple[tuple[str, str], ...], Engine] = {}
        self.jobs = 0
        name = f"helpers-{_place()}-{self.owner}-"
        self.folder = self.memory = tempfile.mkdtemp(prefix=name)
        if os.access(MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_NEEDED:
            self.memory = tempfile.mkdtemp(prefix=name, dir=MEMORY_FOLDER)
        for base in {os.path.dirname(self.folder), os.path.dirname(self.memory)}:
            _remove_orphans(base)

    def engine(self, environment: dict[str, str]) -> Engine:
        """A warm process that started with the variables of `environment` that are read at start."""
        key = tuple(sorted(each for each in environment.items() if each[0].startswith(READ_AT_START) and each[0] != _READ_OFTEN))
        engine = self.engines.pop(key, None)
        if engine is not None and not engine.usable:
            engine.end()
            engine = None
        if engine is None:
            engine = Engine(environment, sorted({self.folder, self.memory}))
        self.engines[key] = engine
        while len(self.engines) > ENGINES_KEPT:
            self.engines.pop(next(iter(self.engines))).end()
        return engine

    @contextlib.contextmanager
    def new_job(self) -> Iterator[tuple[int, str, str]]:
        """(number, folder on disk, folder in memory) of the next job; the folders go at the end of the block."""
        self.jobs += 1
        folder, memory = (os.path.join(base, f"job{self.jobs}") for base in (self.folder, self.memory))
        try:
            for each in {folder, memory}:
                os.makedirs(os.path.dirname(each), mode=0o700, exist_ok=True)  # somebody may have cleaned up
                os.mkdir(each, mode=0o700)
            yield self.jobs, folder, memory
        finally:
            for each in {folder, memory}:
                shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        if os.getpid() != self.owner:
            return
        for engine in self.engines.values():
            engine.end()
        self.engines.clear()
        for folder in (self.folder, self.memory):
            shutil.rmtree(folder, ignore_errors=True)


_workplace: _Workplace | None = None
_making = threading.Lock()


def workplace() -> _Workplace:
    """This process's workplace, made when first needed (anew after a fork of the kernel)."""
    global _workplace
    with _making:
        if _workplace is None or _workplace.owner != os.getpid():
            _workplace = _Workplace()
            atexit.register(_workplace.close)
        return _workplace


def import_path() -> list[str]:
    """Where Python looks for modules: `sys.path` without entries that it ignores (paths that are no strings)."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def _place() -> str:
    """Where this process's number counts: hosts and containers may share a temporary folder and number their processes apart."""
    namespace = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return f"{os.uname().nodename.replace('-', '_')}.{namespace}"


def _remove_orphans(base: str) -> None:
    """Folders of kernels that were killed together with their warm processes."""
    for folder in Path(base).glob(f"helpers-{_place()}-*-*"):
        with contextlib.suppress(OSError, ValueError):
            owner = int(folder.name.split("-")[2])
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(owner):
                shutil.rmtree(folder, ignore_errors=True)
