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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from helpers.measuring import journal
from helpers.measuring.journal import Recorded, read
from helpers.measuring.operators import OPERATORS, Operator, payload, tensors_of
from helpers.measuring.sources import learner_lines

__all__ = ["Recorded", "read", "start", "stop"]


@dataclass(eq=False)
class _Pending:
    sequence: int
    operator: Operator
    ranks: list[int]  # of the group
    cuda: bool
    blocks: bool  # the caller goes on when the operation is done, not before
    has_future: bool = False  # and the future writes down the end


def _harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """An error of the recorder's own must not break the job: it ends the recording, and the method returns None."""

    @functools.wraps(method)
    def guarded(recorder: "_Recorder", *arguments: Any) -> Any:
        global _recorder
        try:
            return method(recorder, *arguments)
        except Exception as error:
            _recorder = None
            recorder.journal.write("problem", f"the recorder stopped: {type(error).__name__}: {error}")
            return None

    return guarded


class _Recorder:
    """Writes down what one process issues, from `start` to `stop`."""

    def __init__(self, writer: journal.Journal) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.journal = writer
        self._sequence = itertools.count()
        self._pending: weakref.WeakKeyDictionary[Any, _Pending] = weakref.WeakKeyDictionary()  # by Work
        self._newest: deque[Any] = deque(maxlen=4)  # works that are kept until the caller holds them: Python then sees the same
        self._storages: dict[int, _Pending] = {}  # by output storage: reduce_scatters without a future that C++ waits for
        self._futures: dict[_Pending, Any] = {}  # those that have not called back
        self._cuda: deque[tuple[int, Any]] = deque()  # (sequence, event behind the collective)
        self._cuda_zero: tuple[Any, float] | None = None  # an event, and the time at which it completed

    @_harmless
    def issued(self, operator: Operator, arguments: tuple[Any, ...], group_at: int, blocks: bool) -> _Pending:
        """Write down that `operator` is being issued; `blocks` says that the caller goes on when it is done, not before."""
        start = time.perf_counter()
        ranks = self._dist.get_process_group_ranks(self._dist.ProcessGroup.unbox(arguments[group_at]))
        peer = None if operator.peer is None else ranks[arguments[operator.peer]]
        sequence = next(self._sequence)
        lines = learner_lines(sys._getframe(1))
        self.journal.write(
            "issue",
            sequence,
            operator.op,
            tuple(ranks),
            *payload(operator, arguments),
            start,
            None,
            lines[0] if lines else None,
            peer,
            start if blocks else None,
            tuple(lines[1:]),
        )
        cuda = any(tensor.is_cuda for tensor in tensors_of(arguments[0]))
        if cuda and self._cuda_zero is None:
            zero = _cuda_event()
            zero.synchronize()
            self._cuda_zero = zero, time.perf_counter()
        return _Pending(sequence, operator, ranks, cuda, blocks)

    @_harmless
    def returned(self, pending: _Pending, arguments: tuple[Any, ...], result: Any) -> None:
        """Arrange that the end of the operation that returned `result` is written down."""
        boxed = result[-1] if isinstance(result, tuple) else result
        if boxed is None:  # monitored_barrier
            self._done(pending)
            return
        work = self._dist.Work.unbox(boxed)
        self._pending[work] = pending
        if pending.cuda or not pending.blocks:  # otherwise Python's wait for it follows at once
            with suppress(RuntimeError):  # gloo's send, receive and reduce_scatter have no future
                self._futures[pending] = work.get_future()
                self._futures[pending].add_done_callback(functools.partial(self._completed, pending, work))
                pending.has_future = True
        if not pending.has_future:
            self._newest.append(work)
            if pending.operator.op == "reduce_scatter" and not pending.blocks:
                self._storages[_storage(tensors_of(arguments[0])[0])] = pending
        self._write_cuda_ends()

    def waits(self, work: Any) -> _Pending | None:
        """Note that the rank begins to wait for `work`; None where there is no end to write down afterwards."""
        pending = self._pending.pop(work, None)
        if pending is None or (pending.has_future and work.is_completed()):
            return None
        return self._begin(pending)

    def waits_for_storage(self, tensor: Any) -> _Pending | None:
        """Note that C++ begins to wait for the operation whose output is `tensor`."""
        pending = self._storages.pop(_storage(tensor), None) if self._storages else None
        return self._begin(pending) if pending else None

    def _begin(self, pending: _Pending) -> _Pending:
        if not pending.blocks:
            self.journal.write("wait", pending.sequence, time.perf_counter())
        return pending

    @_harmless
    def waited(self, pending: _Pending, work: Any = None) -> None:
        """Write the end of an operation that has been waited for, unless its future does."""
        if not pending.has_future:
            self._done(pending, work)
        if work in self._newest:
            self._newest.remove(work)

    @_harmless
    def _completed(self, pending: _Pending, work: Any, future: Any) -> None:
        """Called by the future, which keeps `work`; on CUDA as soon as it is enqueued, with current streams that wait for it."""
        try:
            future.value()
        except Exception:  # the collective failed: it has no end
            del self._futures[pending]
            return
        if pending.cuda:
            self._cuda.append((pending.sequence, _cuda_event()))
        else:
            self._done(pending)
        del self._futures[pending]

    def _done(self, pending: _Pending, work: Any = None) -> None:
        end = time.perf_counter()
        any_source = pending.operator.op == "recv" and pending.operator.peer is None
        self.journal.write("done", pending.sequence, end, pending.ranks[work._source_rank()] if any_source else None)

    def finish(self) -> None:
        """Write the ends that are not written yet: a future lets C++, which waits for it, go on before it calls back."""
        limit = time.perf_counter() + 2  # it has done so by then, also where the cores are busy
        while any(future.done() for future in list(self._futures.values())) and time.perf_counter() < limit:
            time.sleep(0.001)
        self._write_cuda_ends()

    @_harmless
    def _write_cuda_ends(self) -> None:
        while self._cuda and self._cuda_zero:
            sequence, event = self._cuda.popleft()  # taken first: another thread may do the same
            if not event.query():
                self._cuda.appendleft((sequence, event))
                return
            zero, zero_time = self._cuda_zero
            self.journal.write("done", sequence, zero_time + zero.elapsed_time(event) / 1000, None)


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
            recorder, pending = _recorder, None
            if recorder:
                # torch leaves out trailing arguments that have their default, which is async_op=True
                blocks = name == "monitored_barrier_" or arguments[async_at : async_at + 1] == (False,)
                pending = recorder.issued(operator, arguments, group_at, blocks)
            result = overload.redispatch(keyset.remove(here), *arguments)
            if recorder and pending:
                recorder.returned(pending, arguments, result)
            return result

        collective.impl(name, kernel, here.name, with_keyset=True)

    @functools.wraps(original_wait)
    def wait(work: Any, *arguments: Any, **keywords: Any) -> bool:
        recorder = _recorder
        pending = recorder.waits(work) if recorder else None
        result = original_wait(work, *arguments, **keywords)
        if recorder and pending:
            recorder.waited(pending, work)
        return result

    def wait_for_tensor(keyset: Any, tensor: Any) -> Any:
        recorder = _recorder
        pending = recorder.waits_for_storage(tensor) if recorder else None
        result = wait_tensor.redispatch(keyset.remove(here), tensor)
        if recorder and pending:
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
    work_class.wait = wait
    _libraries = collective, functional


def start(path: str) -> None:
    """Record from now on what this process issues into the file `path`, until `stop`; `read` gives it back.

    Call it when the default process group exists. Where this torch's internals do not fit, nothing is recorded, the file says
    why, and the job is not disturbed. Raises RuntimeError if this process records already.
    """
    global _recorder
    if journal.current is not None:
        raise RuntimeError("this process records already: call collectives.stop() before the next collectives.start()")
    journal.current = journal.Journal(path)
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
        _recorder.finish()
        _recorder = None
    if journal.current is not None:
        journal.current.close()
        journal.current = None
