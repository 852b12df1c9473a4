"""Records every collective, send and receive a rank issues, whoever does it: DDP, DTensor, FSDP2, pipelining, the learner.

The recorder overrides the kernels of torch's `c10d` operators at the dispatch key `BackendSelect`, the one place that all
of them pass. That place is not documented, so each torch version is tested before it is admitted; where it does not fit,
the job runs unrecorded and `Recorded.problem` says why.

`bytes` is the logical payload: for all_gather and reduce_scatter the full (gathered) buffer, for gather and scatter the
full buffer on the root and the rank's own part elsewhere, for all_to_all what the rank hands in, for a barrier 0.

`end` is known where torch tells it:

* gloo collectives except reduce_scatter: when the work's future completes, waited for or not;
* gloo send, receive and reduce_scatter have no future: when Python's `Work.wait` returns, so None for one that is never
  waited for, or waited for in C++ (DTensor's reduce_scatter);
* on CUDA: when a CUDA event behind the collective has completed; written with the next collective or at `stop`;
* monitored_barrier: when the call returns.

`source` is None for what a callback thread issues (PowerSGD's second and third all_reduce): no line of the learner's is
on that stack.
"""

import functools
import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from helpers.measuring import journal
from helpers.measuring.records import Collective, Region
from helpers.measuring.sources import learner_line


class _Operator(NamedTuple):
    op: str
    payload: int | None  # index of the argument whose tensors are the payload
    otherwise: int = 0  # the argument to count where that one is empty: gather and scatter away from the root
    peer: int | None = None  # index of the argument that holds the other end's rank in the group


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", 0),
    "allreduce_coalesced_": _Operator("all_reduce", 0),
    "broadcast_": _Operator("broadcast", 0),
    "allgather_": _Operator("all_gather", 0),
    "_allgather_base_": _Operator("all_gather", 0),
    "allgather_coalesced_": _Operator("all_gather", 0),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", 0),
    "reduce_": _Operator("reduce", 0),
    "reduce_scatter_": _Operator("reduce_scatter", 1),
    "_reduce_scatter_base_": _Operator("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", 1),
    "gather_": _Operator("gather", 0, otherwise=1),
    "scatter_": _Operator("scatter", 1),
    "alltoall_": _Operator("all_to_all", 1),
    "alltoall_base_": _Operator("all_to_all", 1),
    "barrier": _Operator("barrier", None),
    "monitored_barrier_": _Operator("barrier", None),
    "send": _Operator("send", 0, peer=2),
    "recv_": _Operator("recv", 0, peer=2),
    "recv_any_source_": _Operator("recv", 0),
}


def _tensors(argument: Any) -> list[Any]:
    if not isinstance(argument, list | tuple):
        return [argument]
    return [tensor for part in argument for tensor in (part if isinstance(part, list | tuple) else (part,))]


def _payload(operator: _Operator, arguments: tuple[Any, ...]) -> tuple[str | None, tuple[int, ...], int, bool]:
    """Return dtype, shape and bytes of what `operator` moves, several tensors as one flat one, and whether it is on CUDA."""
    if operator.payload is None:
        return None, (), 0, arguments[0].is_cuda
    tensors = _tensors(arguments[operator.payload]) or _tensors(arguments[operator.otherwise])
    first = tensors[0]
    shape = tuple(first.shape) if len(tensors) == 1 else (sum(tensor.numel() for tensor in tensors),)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return str(first.dtype).removeprefix("torch."), shape, size, first.is_cuda


@dataclass(eq=False)
class _Pending:
    sequence: int
    cuda: bool
    any_source_of: list[int] | None  # the group's ranks, for a receive that takes from whoever sends
    has_future: bool = False  # and the future writes down the end
    waited_from: float | None = None


class _Recorder:
    """What `start` begins and `stop` ends. Nothing in here may break the job: an error of its own stops the recording."""

    def __init__(self, writer: journal.Journal) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.journal = writer
        self.paused = 0  # depth of `paused` blocks
        self.over = False
        self._sequence = itertools.count()
        self._pending: weakref.WeakKeyDictionary[Any, _Pending] = weakref.WeakKeyDictionary()  # by Work
        self._newest: deque[Any] = deque(maxlen=4)  # works that are kept until the caller holds them: Python then sees the same
        self._cuda: list[tuple[int, Any]] = []  # (sequence, event behind the collective)
        self._cuda_zero: tuple[Any, float] | None = None  # an event, and the time at which it completed

    def fail(self, error: Exception) -> None:
        """Stop recording because of `error`."""
        self.over = True
        self.journal.write("problem", f"the recorder stopped: {type(error).__name__}: {error}")

    def issued(self, operator: _Operator, arguments: tuple[Any, ...], group_at: int, blocks: bool) -> _Pending | None:
        """Write down that `operator` is being issued; `blocks` says that the caller goes on when it is done, not before."""
        start = time.perf_counter()
        try:
            ranks = self._dist.get_process_group_ranks(self._dist.ProcessGroup.unbox(arguments[group_at]))
            peer = None if operator.peer is None else ranks[arguments[operator.peer]]
            sequence = next(self._sequence)
            source = learner_line(sys._getframe(1))
            dtype, shape, size, cuda = _payload(operator, arguments)
            self.journal.issue(sequence, operator.op, ranks, dtype, shape, size, start, source, peer)
            if cuda and self._cuda_zero is None:
                zero = _cuda_event()
                zero.synchronize()
                self._cuda_zero = zero, time.perf_counter()
        except Exception as error:
            self.fail(error)
            return None
        any_source_of = ranks if operator.op == "recv" and operator.peer is None else None
        return _Pending(sequence, cuda, any_source_of, waited_from=start if blocks else None)

    def returned(self, pending: _Pending, result: Any) -> None:
        """Arrange that the end of the operation that returned `result` is written down."""
        try:
            boxed = result[-1] if isinstance(result, tuple) else result
            if boxed is None:  # monitored_barrier
                self._done(pending)
                return
            work = self._dist.Work.unbox(boxed)
            self._pending[work] = pending
            future = None
            if pending.cuda or pending.waited_from is None:  # otherwise Python's wait for it follows at once
                with suppress(RuntimeError):  # gloo's send, receive and reduce_scatter have none
                    future = work.get_future()
            if future is None:
                self._newest.append(work)
            else:
                pending.has_future = True
                future.add_done_callback(lambda future, work=work: self._completed(pending, future))  # keeps the work as well
            self._write_cuda_ends()
        except Exception as error:
            self.fail(error)

    def wait(self, original: Callable[..., bool], work: Any, *arguments: Any, **keywords: Any) -> bool:
        """Stand in for `Work.wait`: note when waiting began and, for a work without a future, when it ended."""
        pending = self._pending.pop(work, None)
        if pending is not None and pending.waited_from is None:
            pending.waited_from = time.perf_counter()
        result = original(work, *arguments, **keywords)
        if pending is not None and not pending.has_future:
            try:
                self._done(pending, work)
                if work in self._newest:
                    self._newest.remove(work)
            except Exception as error:
                self.fail(error)
        return result

    def _completed(self, pending: _Pending, future: Any) -> None:
        """Called by the future; on CUDA as soon as the work is enqueued, with current streams that wait for it."""
        if self.over:
            return
        try:
            future.value()
        except Exception:  # the collective failed: it has no end
            return
        if pending.cuda:
            self._cuda.append((pending.sequence, _cuda_event()))
        else:
            self._done(pending)

    def _done(self, pending: _Pending, work: Any = None) -> None:
        end = time.perf_counter()
        peer = pending.any_source_of[work._source_rank()] if pending.any_source_of else None
        self.journal.done(pending.sequence, end, pending.waited_from, peer)

    def _write_cuda_ends(self) -> None:
        while self._cuda and self._cuda_zero and self._cuda[0][1].query():
            sequence, event = self._cuda.pop(0)
            zero, zero_time = self._cuda_zero
            self.journal.done(sequence, zero_time + zero.elapsed_time(event) / 1000)

    def close(self) -> None:
        """Write the ends that are known by now and close the file."""
        if not self.over:
            self._write_cuda_ends()
        self.over = True
        self._newest.clear()


def _cuda_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_recorder: _Recorder | None = None
_library: Any = None  # torch drops the kernels when this is collected


def _install() -> None:
    """Put a recording kernel before each c10d operator; raise where this torch does not have what that takes."""
    global _library
    import torch
    import torch.distributed as dist

    here = torch._C.DispatchKey.BackendSelect
    library = torch.library.Library("c10d", "IMPL")

    def register(name: str, operator: _Operator) -> None:
        overload = getattr(torch.ops.c10d, name).default
        names = [argument.name for argument in overload._schema.arguments]
        group_at = names.index("process_group")
        async_at = names.index("async_op") if "async_op" in names else len(names)

        def kernel(keyset: Any, *arguments: Any) -> Any:
            recorder = _recorder
            pending = None
            if recorder is not None and not recorder.over and not recorder.paused:
                # torch leaves out trailing arguments that have their default, which is async_op=True
                blocks = name == "monitored_barrier_" or arguments[async_at : async_at + 1] == (False,)
                pending = recorder.issued(operator, arguments, group_at, blocks)
            result = overload.redispatch(keyset.remove(here), *arguments)
            if pending is not None:
                recorder.returned(pending, result)
            return result

        library.impl(name, kernel, here.name, with_keyset=True)

    try:
        for name, operator in _OPERATORS.items():
            register(name, operator)
    except Exception:
        library._destroy()
        raise
    _library = library

    original_wait = dist.Work.wait

    def wait(work: Any, *arguments: Any, **keywords: Any) -> bool:
        recorder = _recorder
        if recorder is None or recorder.over:
            return original_wait(work, *arguments, **keywords)
        return recorder.wait(original_wait, work, *arguments, **keywords)

    dist.Work.wait = functools.wraps(original_wait)(wait)


def start(path: str, rank: int) -> None:
    """Record from now on what this process issues into the file `path`, for global rank `rank`, until `stop`.

    Call it when the default process group exists. Where this torch's internals do not fit, nothing is recorded, the file says
    why, and the job is not disturbed. Raises RuntimeError if this process records already.
    """
    global _recorder
    if journal.current is not None:
        raise RuntimeError("this process records already: call collectives.stop() before the next collectives.start()")
    journal.current = journal.Journal(path, rank)
    try:
        if _library is None:
            _install()
        _recorder = _Recorder(journal.current)
    except Exception as error:
        import torch

        reason = f"{type(error).__name__}: {error}"
        journal.current.write("problem", f"collectives were not recorded: torch {torch.__version__} does not fit ({reason})")


def stop() -> None:
    """End what `start` began; without it nothing happens."""
    global _recorder
    if _recorder is not None:
        _recorder.close()
        _recorder = None
    if journal.current is not None:
        journal.current.close()
        journal.current = None


@contextmanager
def paused() -> Iterator[None]:
    """Do not record what this process issues inside the block."""
    recorder = _recorder
    if recorder is None:
        yield
        return
    recorder.paused += 1
    try:
        yield
    finally:
        recorder.paused -= 1


@dataclass(frozen=True)
class Recorded:
    """What one rank's file holds. `problem` says why collectives are missing, None where none are."""

    collectives: tuple[Collective, ...] = ()
    regions: tuple[Region, ...] = ()
    problem: str | None = None


def read(path: str, rank: int) -> Recorded:
    """Return what the rank `rank` wrote into `path`, also one that was killed while writing. Needs no torch."""
    try:
        events = journal.events(path)
    except FileNotFoundError:
        return Recorded(problem=f"rank {rank} recorded nothing: it did not come to the point where the recorder starts")
    done = {event[1]: event[2:] for event in events if event[0] == "done"}
    collectives = []
    for sequence, op, group, dtype, shape, size, begin, source, peer in (event[1:] for event in events if event[0] == "issue"):
        end, waited_from, sender = done.get(sequence, (None, None, None))
        peer = sender if peer is None else peer
        collectives.append(
            Collective(
                rank,
                sequence,
                op,
                tuple(group),
                dtype,
                tuple(shape),
                size,
                begin,
                end,
                source,
                peer=peer,
                waited_from=waited_from,
            )
        )
    return Recorded(
        collectives=tuple(sorted(collectives, key=lambda collective: collective.sequence)),
        regions=tuple(Region(rank, *event[1:]) for event in events if event[0] == "region"),
        problem=next((event[1] for event in events if event[0] == "problem"), None),
    )
