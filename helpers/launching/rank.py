"""One rank, from its first instruction to its exit. Runs in a process forked from the warm one, or in one started afresh."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from helpers import machine
from helpers.launching import shipping, wire

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Read error", "Broken pipe", "Connection refused")
_PR_SET_PDEATHSIG = 1


def file_of(request: dict[str, Any], kind: str, rank: int) -> str:
    """Where a rank leaves its `log`, `stack`, `error` or `records`."""
    return os.path.join(request["folder"], f"{kind}{rank}")


def become_rank(request: dict[str, Any], rank: int, parent: int) -> None:
    """Die with the parent; own process group; no terminal; output to the rank's log.

    Raises SystemExit where the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(file_of(request, "log", rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(request: dict[str, Any], rank: int, events: int, wait_for_release: Callable[[], object]) -> int:
    """Join the group, run the function, leave value or error in files; 0 if it returned. `events` is a pipe's descriptor."""
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115  (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=False)
    stack = os.open(file_of(request, "stack", rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        fn, args, kwargs = _prepare(request, rank)
        wire.send(events, {"event": "started", "rank": rank, "time": time.perf_counter()})
        try:
            value = fn(*args, **kwargs)
            _synchronise_gpu()
        finally:
            ended = time.perf_counter()
        _leave_value(request, rank, value)
        _flush()
        imported = [name for name in request["ask_for"] if name in sys.modules]
        wire.send(events, {"event": "finished", "rank": rank, "time": ended, "imported": imported})
        wait_for_release()  # when every rank has finished: until then this rank's group stays alive
        _leave_group()
        code = 0
    except BaseException as error:
        _leave_error(request, rank, error)
        code = 1
    _flush()
    return code


def spawned(folder: str, rank: int, parent: int, events: int, control: int) -> NoReturn:
    """Entry of a rank started as a new interpreter (where fork is unsafe). `control` closes when the parent dies."""
    released = threading.Event()

    def watch() -> None:
        while os.read(control, 1):
            released.set()
        os._exit(1)  # there is no parent-death signal outside Linux

    code = 1
    try:
        with open(os.path.join(folder, "request")) as file:
            request = json.load(file)
        become_rank(request, rank, parent)
        threading.Thread(target=watch, daemon=True).start()
        code = main(request, rank, events, released.wait)
    finally:
        os._exit(code)


def _prepare(request: dict[str, Any], rank: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Environment, device, seeds, threads and process group; then the function itself."""
    ranks = request["ranks"]
    os.chdir(request["directory"])
    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(request["environment"])
    loopback = "lo" if sys.platform == "linux" else "lo0"
    threads = max(1, machine.cores() // ranks)
    cuda = request["device"] == "cuda"
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # the ranks meet through a file: there is no port
        HELPERS_DEVICE=f"cuda:{rank}" if cuda else "cpu",
        GLOO_SOCKET_IFNAME=loopback,
        NCCL_SOCKET_IFNAME=loopback,
        MPLBACKEND="Agg",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for processes that the job starts itself
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{request['memory']}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=request["group_timeout"]),
    )
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if request["record"]:
        from helpers.measuring import collectives

        collectives.start(file_of(request, "records", rank), rank)
    with open(os.path.join(request["memory"], "call"), "rb") as file:
        return shipping.loads(file.read())


def _synchronise_gpu() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # `seconds` ends when the work does, not when it was queued


def _leave_value(request: dict[str, Any], rank: int, value: Any) -> None:
    """Write the value where there is room: memory first, else disk."""
    import cloudpickle

    failure: BaseException | None = None
    for folder in (request["memory"], request["folder"]):
        path = os.path.join(folder, f"value{rank}")
        try:
            with open(path, "wb") as file:
                cloudpickle.dump(value, file)
            return
        except OSError as error:
            failure = error
            if os.path.exists(path):
                os.unlink(path)
        except Exception as error:
            raise TypeError(
                f"rank {rank} returned a {type(value).__name__} that cannot be shipped to the notebook ({error}). "
                f"Return plain values, tensors or arrays, and leave models, groups, files and generators in the rank."
            ) from None
    raise OSError(f"no room for the value that rank {rank} returned: {failure}")


def _leave_group() -> None:
    from helpers.measuring import collectives

    collectives.stop()
    dist = sys.modules["torch.distributed"]
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_error(request: dict[str, Any], rank: int, error: BaseException) -> None:
    """The traceback without our own frames above the job's, atomically."""
    inside: TracebackType | None = error.__traceback__
    while inside is not None and inside.tb_frame.f_code.co_filename == __file__ and inside.tb_next is not None:
        inside = inside.tb_next
    text = "".join(traceback.format_exception(type(error), error, inside))
    lost = isinstance(error, (RuntimeError, OSError)) and any(sign in str(error) for sign in LOST_PEER)
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    report = {"type": name, "message": str(error), "traceback": text, "time": time.perf_counter(), "lost_peer": lost}
    path = file_of(request, "error", rank)
    with open(path + ".part", "w") as file:
        json.dump(report, file)
    os.rename(path + ".part", path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
