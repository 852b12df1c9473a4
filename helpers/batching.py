"""Dynamic batching: prompts wait in a bounded queue, and each replica that is free takes as many as fit one batch.

Who computes is not known here: a replica is any function from a batch to its answers, on this rank or another.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

log = logging.getLogger("inference_server")


class Job(NamedTuple):
    """One prompt as it travels to a replica."""

    tokens: list[int]
    new_tokens: int


Answers = list[list[int]]
Replica = Callable[[list[Job]], Answers]


class ReplicaLost(Exception):
    """Raised by a replica that will answer nothing any more."""


class Refused(Exception):
    """A request that is not answered: an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Batcher:
    """The queue before the replicas; create and use it inside one event loop. `replicas` are called in threads.

    A batch that raises is answered 500, one whose replica is lost 503, and then all that waits and comes later too.
    """

    def __init__(self, replicas: Sequence[Replica], *, batch_size: int, max_wait: float, bound: int) -> None:
        self.accepted = 0  # prompts
        self.served = [0] * len(replicas)  # prompts, by rank
        self.lost = False  # a replica
        self.closed = ""  # why nothing is accepted any more
        self.ended = asyncio.Event()  # it is closed
        self._size, self._wait, self._bound = batch_size, max_wait, bound
        self._queue: asyncio.Queue[tuple[Job, asyncio.Future[list[int]]]] = asyncio.Queue()
        self._turn = asyncio.Lock()  # one replica collects at a time, so that batches fill before they spread
        self._tasks = [asyncio.create_task(self._serve(rank, replica)) for rank, replica in enumerate(replicas)]

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    async def answer(self, jobs: Sequence[Job]) -> Answers:
        """The continuations, in the order of `jobs`. Raises Refused: 422 (they never fit the queue), 429 (now), 503, 500."""
        if self.closed:
            raise Refused(503, self.closed)
        if len(jobs) > self._bound:
            raise Refused(422, f"{len(jobs)} prompts in one request, but {self._bound} may wait; send fewer at a time")
        if self.waiting + len(jobs) > self._bound:
            raise Refused(429, f"the queue is full: {self.waiting} prompts wait and {self._bound} may; ask again later")
        self.accepted += len(jobs)
        futures = [asyncio.get_running_loop().create_future() for _ in jobs]
        for pair in zip(jobs, futures, strict=True):
            self._queue.put_nowait(pair)
        return await asyncio.gather(*futures)

    async def _serve(self, rank: int, replica: Replica) -> None:
        while not self.lost:
            batch = await self._collect()
            answers: Sequence[list[int] | Refused]
            try:
                answers = await asyncio.to_thread(replica, [job for job, _ in batch])
                self.served[rank] += len(batch)
            except ReplicaLost as loss:
                self.lost = True
                self.refuse(f"rank {rank} has ended: {loss}")
                log.error("%s; what waits is answered 503, then the server exits", self.closed)
                answers = [Refused(503, self.closed)] * len(batch)
            except Exception as error:
                log.exception("a batch of %d failed on rank %d", len(batch), rank)
                answers = [Refused(500, f"rank {rank} failed on this batch: {type(error).__name__}: {error}")] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                _settle(future, answer)

    async def _collect(self) -> list[tuple[Job, asyncio.Future[list[int]]]]:
        async with self._turn:
            batch = [await self._queue.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait):
                    while len(batch) < self._size:
                        batch.append(await self._queue.get())
            return batch

    def end(self, reason: str) -> None:
        """Accept nothing from now on, for the first reason given; what was accepted is still answered."""
        self.closed = self.closed or reason
        self.ended.set()

    def refuse(self, reason: str) -> None:
        """Answer 503 to what waits and to what comes from now on."""
        self.end(reason)
        while not self._queue.empty():
            _settle(self._queue.get_nowait()[1], Refused(503, reason))

    def close(self) -> None:
        """End the tasks; nothing may wait any more."""
        for task in self._tasks:
            task.cancel()


def _settle(future: asyncio.Future[list[int]], answer: list[int] | Refused) -> None:
    if future.done():  # who asked has gone
        return
    if isinstance(answer, Refused):
        future.set_exception(answer)
    else:
        future.set_result(answer)
