"""One rank, from its first instruction to its exit. Runs in a process forked from the warm one, or in one started afresh."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from helpers import machine
from helpers.launching import shipping, wire
from helpers.measuring.sources import is_learner_file

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Read error",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
)
_INSTRUMENTS = tuple(os.path.join(os.path.dirname(machine.__file__), folder, "") for folder in ("launching", "measuring"))
_PR_SET_PDEATHSIG = 1


def says_peer_is_gone(text: str) -> bool:
    """Whether an error's text is what gloo or NCCL say on the survivors of another rank's end."""
    return any(sign in text for sign in LOST_PEER) and any(library in text for library in ("gloo", "NCCL", "nccl"))


def file_of(request: dict[str, Any], kind: str, rank: int) -> str:
    """Where a rank leaves its `log`, `stack`, `error` or `records`."""
    return os.path.join(request["folder"], f"{kind}{rank}")


def die_with(parent: int) -> None:
    """Be killed when the parent dies (Linux). Raises SystemExit where it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


def set_apart(log_path: str, parent: int) -> None:
    """Die with the parent; own process group; no terminal, no core file; output to the log.

    Raises SystemExit where the parent is gone already.
    """
    die_with(parent)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(request: dict[str, Any], rank: int, events: int, wait_for_release: Callable[[], object]) -> int:
    """Join the group, run the function, leave value or error in files; 0 if it returned. `events` is a pipe's descriptor."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
        setattr(sys, name, stream)
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
        wire.send(events, {"event": "finished", "rank": rank, "time": ended, "imported": _imported(request)})
        wait_for_release()  # when every rank has finished: until then this rank's group stays alive
        _leave_group()
        code = 0
    except SystemExit as leaving:
        print(_traceback(leaving), file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        leave_error(request, rank, error)
        wire.send(events, {"event": "raised", "rank": rank, "imported": _imported(request)})
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
        set_apart(file_of(request, "log", rank), parent)
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
    threads = request["threads"]
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
    elastic = request.get("elastic", {})  # on several hosts: the variables that the host's elastic agent gave this rank
    os.environ.update(elastic)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for processes that the job starts itself
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if cuda:
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=request["group_timeout"])
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if elastic:
        dist.init_process_group(backend, timeout=limit)  # they meet at the agents' store
    else:
        store = dist.FileStore(os.path.join(request["memory"], "store"), ranks)
        store.set_timeout(limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if request["record"]:
        from helpers.measuring import collectives

        collectives.start(file_of(request, "records", rank))
    with open(shipping.find((request["memory"], request["folder"]), "call"), "rb") as file:
        return shipping.loads(file.read())


def _synchronise_gpu() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # `seconds` ends when the work does, not when it was queued


def _imported(request: dict[str, Any]) -> list[str]:
    """What the warm process might have had for this job, and will have for the next one."""
    return [name for name in request["ask_for"] if name in sys.modules]


def _leave_value(request: dict[str, Any], rank: int, value: Any) -> None:
    def dump(file: Any) -> None:
        try:
            shipping.dump_value(value, file)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in shipping.FULL:
                raise
            whole = f"the {type(value).__name__} that rank {rank} returned"
            where, part = next(shipping.inside(whole, value), (whole, value))
            kind = "" if part is value else f" (a {type(part).__name__})"
            raise TypeError(
                f"{where}{kind} cannot be shipped to the notebook: {error}. Return plain values, tensors or arrays, "
                f"and leave models, groups, files and generators in the rank."
            ) from None

    shipping.write_where_room((request["memory"], request["folder"]), f"value{rank}", dump)


def _leave_group() -> None:
    from helpers.measuring import collectives

    collectives.stop()
    dist = sys.modules["torch.distributed"]
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_error(request: dict[str, Any], rank: int, error: BaseException) -> None:
    """What the kernel is to know of the exception, atomically."""
    kind = type(error)
    report = {
        "type": kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}",
        "summary": "".join(traceback.format_exception_only(error)).rstrip(),
        "traceback": _traceback(error),
        "time": time.perf_counter(),
        "lost_peer": _lost_peer(error),
    }
    path = file_of(request, "error", rank)
    with open(path + ".part", "w") as file:
        json.dump(report, file)
    os.rename(path + ".part", path)


def _traceback(error: BaseException) -> str:
    """As Python prints it, from the learner's first line on where there is one, and without the frames of our instruments."""
    told = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in told.stack if not frame.filename.startswith(_INSTRUMENTS)]
    first = next((index for index, frame in enumerate(frames) if is_learner_file(frame.filename)), 0)
    told.stack[:] = frames[first:]
    return "".join(told.format()).rstrip()


def _lost_peer(error: BaseException | None) -> bool:
    """Whether the exception, or one that it came from, says that another rank has gone."""
    if error is None:
        return False
    told = isinstance(error, RuntimeError) and says_peer_is_gone(str(error))
    return told or _lost_peer(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what compiled code printed
