"""One rank, from its first instruction to its exit. Runs in a process forked from the warm one, or in one started afresh."""

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
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from helpers import machine
from helpers.launching import processes, shipping, wire
from helpers.measuring import collectives
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


def says_peer_is_gone(text: str) -> bool:
    """Whether an error's text is what gloo or NCCL say on the survivors of another rank's end."""
    return any(sign in text for sign in LOST_PEER) and any(library in text for library in ("gloo", "NCCL", "nccl"))


def file_of(request: dict[str, Any], kind: str, rank: int) -> str:
    """Where a rank leaves its `log`, `stack` or `records`."""
    return os.path.join(request["folder"], f"{kind}{rank}")


def set_apart(log_path: str, parent: int, *pipes: int) -> None:
    """Die with the parent; no terminal, no core file, output to the log, no descriptors but the `pipes`.

    Raises SystemExit where the parent is gone already.
    """
    processes.die_with(parent)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 1)
    os.dup2(1, 2)
    processes.keep_only(*pipes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(request: dict[str, Any], rank: int, events: int, control: int) -> int:
    """Join the group, run the function, report to the pipe `events`; 0 if the function returned. `control` releases the rank."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
        setattr(sys, name, stream)
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=os.open(file_of(request, "stack", rank), os.O_WRONLY | os.O_APPEND))

    def tell(event: str, **more: Any) -> None:
        wire.send(events, {"event": event, "rank": rank, **more})

    try:
        fn, args, kwargs = _prepare(request, rank)
        tell("started", time=time.perf_counter())
        try:
            value = fn(*args, **kwargs)
            _synchronise_gpu()
        finally:
            ended = time.perf_counter()
        path = _leave_value(request, rank, value)
        _flush()
        tell("finished", time=ended, value=path, imported=_imported(request))
        os.read(control, 1)  # when every rank has finished: until then this rank's group stays alive
        _leave_group()
        code = 0
    except SystemExit as leaving:
        print(_traceback(leaving), file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        try:
            tell("raised", **report(error), imported=_imported(request))
        except OSError:  # the job has closed what is not its own
            print(_traceback(error), file=sys.stderr)
        code = 1
    _flush()
    return code


def spawned(request_path: str, rank: int, parent: int, ends: tuple[int, int]) -> NoReturn:
    """Entry of a rank started as a new interpreter, where fork is unsafe."""
    code = 1
    try:
        with open(request_path) as file:
            request = json.load(file)
        set_apart(file_of(request, "log", rank), parent, *ends)
        code = main(request, rank, *ends)
    finally:
        os._exit(code)


def _prepare(request: dict[str, Any], rank: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Environment, device, seeds, threads and process group; then the function itself."""
    ranks, threads, cuda = request["ranks"], request["threads"], request["device"] == "cuda"
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.chdir(request["directory"])
    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(
        {"OMP_NUM_THREADS": str(threads)}  # for processes that the job starts itself
        | request["environment"]
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # the ranks meet through a file: there is no port
            "HELPERS_DEVICE": f"cuda:{rank}" if cuda else "cpu",
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
            "MPLBACKEND": "Agg",
        }
        | request.get("elastic", {})  # on several hosts: what the host's elastic agent gave this rank
        | ({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})
    )

    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if cuda:
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=request["group_timeout"])
    meeting: dict[str, Any] = {}  # on several hosts at the agents' store, which torch finds by itself
    if "elastic" not in request:
        store = dist.FileStore(os.path.join(request["memory"], "store"), ranks)
        store.set_timeout(limit)
        meeting = {"store": store, "rank": rank, "world_size": ranks}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=limit, **meeting)
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if request["record"]:
        collectives.start(file_of(request, "records", rank))
    with open(request["call"], "rb") as file:
        return shipping.loads(file.read())


def _synchronise_gpu() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # `seconds` ends when the work does, not when it was queued


def _imported(request: dict[str, Any]) -> list[str]:
    """What the warm process might have had for this job, and will have for the next one."""
    return [name for name in request["ask_for"] if name in sys.modules]


def _leave_value(request: dict[str, Any], rank: int, value: Any) -> str:
    """The file in which the value lies."""

    def dump(file: BinaryIO) -> None:
        try:
            shipping.dump_value(value, file)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in shipping.FULL:
                raise
            returned = f"the {type(value).__name__} that rank {rank} returned"
            raise TypeError(
                f"{shipping.culprit(returned, value) or returned} cannot be shipped to the notebook: {error}. Return plain "
                f"values, tensors or arrays, and leave models, groups, files and generators in the rank."
            ) from None

    return shipping.write_where_room((request["memory"], request["folder"]), f"value{rank}", dump)


def _leave_group() -> None:
    collectives.stop()
    dist = sys.modules["torch.distributed"]
    if dist.is_initialized():
        dist.destroy_process_group()


def report(error: BaseException) -> dict[str, Any]:
    """What the kernel is to know of the exception."""
    kind = type(error)
    return {
        "type": kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}",
        "summary": "".join(traceback.format_exception_only(error)).rstrip(),
        "traceback": _traceback(error),
        "time": time.perf_counter(),
        "lost_peer": _lost_peer(error),
    }


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
