"""Records every collective, send and receive a rank issues, whoever does it: DDP, DTensor, FSDP2, pipelining, the learner.

The recorder overrides the kernels of torch's `c10d` operators at the dispatch key `BackendSelect`, the one place that all
of them pass. That place is not documented, so each torch version is tested before it is admitted; where it does not fit,
the job runs unrecorded and `Recorded.problem` says why.

`end` is known where torch tells it:

* gloo's asynchronous collectives except reduce_scatter: when the work's future completes, waited for or not;
* gloo's send, receive and reduce_scatter have no future: when the wait for them returns, so None where nobody waits;
* collectives that block: when they return;
* on CUDA: when a CUDA event behind the collective has completed; written with the next collective or at `stop`.

`waited_from` is None for what C++ waits for (DDP's reducer, the all_reduce and all_gather of DTensor) and for what nobody
has waited for yet.

`source` is None for what a thread without a line of the learner's issues: callbacks (PowerSGD's second and third all_reduce)
and, on CUDA, the backward pass.
"""

import functools
import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from helpers.measuring import journal
from helpers.measuring.journal import Recorded, read
from helpers.measuring.operators import OPERATORS, Operator, payload, tensors_of
from helpers.measuring.sources import learner_line

__all__ = ["Recorded", "paused", "read", "start", "stop"]


@dataclass(eq=False)
class _Pending:
    sequence: int
    operator: Operator
    ranks: list[int]  # of the group
    cuda: bool
    blocks: bool  # the caller goes on when the operation is done, not before
    has_future: bool = False  # and the future writes down the end


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
        self._storages: dict[int, _Pending] = {}  # by output storage: reduce_scatters without a future that C++ waits for
        self._cuda: deque[tuple[int, Any]] = deque()  # (sequence, event behind the collective)
        self._cuda_zero: tuple[Any, float] | None = None  # an event, and the time at which it completed

    def fail(self, error: Exception) -> None:
        """Stop recording because of `error`."""
        self.over = True
        self.journal.write("problem", f"the recorder stopped: {type(error).__name__}: {error}")

    def issued(self, operator: Operator, arguments: tuple[Any, ...], group_at: int, blocks: bool) -> _Pending | None:
        """Write down that `operator` is being issued; `blocks` says that the caller goes on when it is done, not before."""
        start = time.perf_counter()
        try:
            ranks = self._dist.get_process_group_ranks(self._dist.ProcessGroup.unbox(arguments[group_at]))
            peer = None if operator.peer is None else ranks[arguments[operator.peer]]
            sequence = next(self._sequence)
            waited_from = start if blocks else None
            source = learner_line(sys._getframe(1))
            self.journal.issue(sequence, operator.op, ranks, *payload(operator, arguments), start, source, peer, waited_from)
            cuda = any(tensor.is_cuda for tensor in tensors_of(arguments[0]))
            if cuda and self._cuda_zero is None:
                zero = _cuda_event()
                zero.synchronize()
                self._cuda_zero = zero, time.perf_counter()
            return _Pending(sequence, operator, ranks, cuda, blocks)
        except Exception as error:
            self.fail(error)
            return None

    def returned(self, pending: _Pending, arguments: tuple[Any, ...], result: Any) -> None:
        """Arrange that the end of the operation that returned `result` is written down."""
        try:
            boxed = result[-1] if isinstance(result, tuple) else result
            if boxed is None:  # monitored_barrier
                self._done(pending)
                return
            work = self._dist.Work.unbox(boxed)
            self._pending[work] = pending
            future = None
            if pending.cuda or not pending.blocks:  # otherwise Python's wait for it follows at once
                with suppress(RuntimeError):  # gloo's send, receive and reduce_scatter have none
                    future = work.get_future()
            if future is None:
                self._newest.append(work)
                if pending.operator.op == "reduce_scatter" and not pending.blocks:
                    self._storages[_storage(tensors_of(arguments[0])[0])] = pending
            else:
                pending.has_future = True
                future.add_done_callback(functools.partial(self._completed, pending, work))
            self._write_cuda_ends()
        except Exception as error:
            self.fail(error)

    def waits(self, work: Any) -> _Pending | None:
        """Note that the rank begins to wait for `work`, where that is not done yet."""
        pending = self._pending.pop(work, None)
        return None if pending is not None and pending.has_future and work.is_completed() else self._begin(pending)

    def waits_for_storage(self, tensor: Any) -> _Pending | None:
        """Note that C++ begins to wait for the operation whose output is `tensor`."""
        return self._begin(self._storages.pop(_storage(tensor), None)) if self._storages else None

    def _begin(self, pending: _Pending | None) -> _Pending | None:
        if pending is not None and not pending.blocks:
            self.journal.write("wait", pending.sequence, time.perf_counter())
        return pending

    def waited(self, pending: _Pending, work: Any = None) -> None:
        """Write the end of an operation that has been waited for, unless its future does."""
        try:
            if not pending.has_future:
                self._done(pending, work)
            if work in self._newest:
                self._newest.remove(work)
        except Exception as error:
            self.fail(error)

    def _completed(self, pending: _Pending, work: Any, future: Any) -> None:
        """Called by the future, which keeps `work`; on CUDA as soon as it is enqueued, with current streams that wait for it."""
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
        any_source = pending.operator.op == "recv" and pending.operator.peer is None
        self.journal.write("done", pending.sequence, end, pending.ranks[work._source_rank()] if any_source else None)

    def _write_cuda_ends(self) -> None:
        while self._cuda and self._cuda_zero:
            sequence, event = self._cuda.popleft()
            if not event.query():
                self._cuda.appendleft((sequence, event))
                return
            zero, zero_time = self._cuda_zero
            self.journal.write("done", sequence, zero_time + zero.elapsed_time(event) / 1000, None)

    def close(self) -> None:
        """Write the ends that are known by now and close the file."""
        if not self.over:
            self._write_cuda_ends()
        self.over = True
        self._newest.clear()


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def _cuda_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_recorder: _Recorder | None = None
_libraries: tuple[Any, ...] = ()  # torch drops the kernels when these are collected


def _install() -> None:
    """Put recording kernels before torch's own; raise where this torch does not have what that takes."""
    global _libraries
    import torch
    import torch.distributed as dist

    here = torch._C.DispatchKey.BackendSelect
    collective = torch.library.Library("c10d", "IMPL")
    functional = torch.library.Library("_c10d_functional", "IMPL")
    work_class: Any = dist.Work
    original_wait = work_class.wait
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default

    def register(name: str, operator: Operator) -> None:
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
            if recorder is not None and pending is not None:
                recorder.returned(pending, arguments, result)
            return result

        collective.impl(name, kernel, here.name, with_keyset=True)

    def wait(work: Any, *arguments: Any, **keywords: Any) -> bool:
        recorder = _recorder
        pending = None if recorder is None or recorder.over else recorder.waits(work)
        result = original_wait(work, *arguments, **keywords)
        if recorder is not None and pending is not None:
            recorder.waited(pending, work)
        return result

    def wait_for_tensor(keyset: Any, tensor: Any) -> Any:
        recorder = _recorder
        pending = None if recorder is None or recorder.over else recorder.waits_for_storage(tensor)
        result = wait_tensor.redispatch(keyset.remove(here), tensor)
        if recorder is not None and pending is not None:
            recorder.waited(pending)
        return result

    try:
        for name, operator in OPERATORS.items():
            register(name, operator)
        functional.impl("wait_tensor", wait_for_tensor, here.name, with_keyset=True)
    except Exception:
        collective._destroy()
        functional._destroy()
        raise
    work_class.wait = functools.wraps(original_wait)(wait)
    _libraries = collective, functional


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
        if not _libraries:
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
