"""Dynamic batching in front of replicas that are plain functions."""

import asyncio
import threading

import pytest

from helpers.batching import Batcher, Job, Refused, ReplicaLost


def echo(jobs):
    return [job.tokens for job in jobs]


def jobs(*numbers):
    return [Job([number], 1) for number in numbers]


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def held():
    """A replica that computes once it is released; an event that says that it has a batch, and one that releases it."""
    started, release = threading.Event(), threading.Event()

    def replica(batch):
        started.set()
        assert release.wait(60)
        return echo(batch)

    return replica, started, release


def test_answers_come_in_the_order_of_the_question_however_they_were_batched():
    batches = []

    def replica(batch):
        batches.append(len(batch))
        return echo(batch)

    async def work():
        batcher = Batcher([replica, replica], batch_size=4, max_wait=0.01, bound=100)
        found = await asyncio.gather(*(batcher.answer(jobs(*range(number, number + 7))) for number in range(0, 70, 7)))
        batcher.close()
        return found, sum(batcher.served)

    found, served = run(work())
    assert found == [[[n] for n in range(number, number + 7)] for number in range(0, 70, 7)]
    assert served == sum(batches) == 70
    assert max(batches) <= 4


def test_what_waits_together_travels_together_and_a_lone_prompt_does_not_wait_for_ever():
    batches = []

    def replica(batch):
        batches.append(len(batch))
        return echo(batch)

    async def work():
        batcher = Batcher([replica], batch_size=8, max_wait=0.05, bound=100)
        await batcher.answer(jobs(*range(20)))
        await batcher.answer(jobs(1))
        batcher.close()

    run(work())
    assert batches == [8, 8, 4, 1]


def test_replicas_work_at_the_same_time():
    both = threading.Barrier(2, timeout=30)  # broken unless two batches are computed together

    def replica(batch):
        both.wait()
        return echo(batch)

    async def work():
        batcher = Batcher([replica, replica], batch_size=1, max_wait=0, bound=10)
        found = await batcher.answer(jobs(1, 2, 3, 4))
        batcher.close()
        return found, batcher.served

    assert run(work()) == ([[1], [2], [3], [4]], [2, 2])


def test_a_full_queue_refuses_and_takes_again_when_there_is_room():
    replica, started, release = held()

    async def work():
        batcher = Batcher([replica], batch_size=1, max_wait=0, bound=3)
        first = asyncio.create_task(batcher.answer(jobs(0)))
        await asyncio.to_thread(started.wait, 60)  # the replica has taken it
        waiting = asyncio.create_task(batcher.answer(jobs(1, 2, 3)))
        await asyncio.sleep(0)
        assert batcher.waiting == 3
        with pytest.raises(Refused, match="queue is full: 3 prompts wait and 3 may") as refusal:
            await batcher.answer(jobs(4))
        with pytest.raises(Refused, match="4 prompts in one request, but 3 may wait") as never:
            await batcher.answer(jobs(5, 6, 7, 8))
        release.set()
        assert await first == [[0]]
        assert await waiting == [[1], [2], [3]]
        assert await batcher.answer(jobs(4)) == [[4]]
        batcher.close()
        return refusal.value.status, never.value.status

    assert run(work()) == (429, 422)


def test_prompts_that_come_one_by_one_fill_a_batch_before_another_replica_gets_any():
    sizes = []

    def replica(batch):
        sizes.append(len(batch))
        return echo(batch)

    async def work():
        batcher = Batcher([replica, replica], batch_size=8, max_wait=50, bound=100)
        asked = []
        for number in range(8):
            asked.append(asyncio.create_task(batcher.answer(jobs(number))))
            while batcher.accepted <= number or batcher.waiting:
                await asyncio.sleep(0)  # until a replica has taken it
        found = await asyncio.gather(*asked)
        batcher.close()
        return found

    assert run(work()) == [[[number]] for number in range(8)]
    assert sizes == [8]


def test_who_has_gone_does_not_end_the_replica():
    replica, started, release = held()

    async def work():
        batcher = Batcher([replica], batch_size=1, max_wait=0, bound=10)
        gone = asyncio.create_task(batcher.answer(jobs(0)))
        await asyncio.to_thread(started.wait, 60)
        gone.cancel()
        release.set()
        found = await batcher.answer(jobs(1))
        batcher.close()
        return found

    assert run(work()) == [[1]]


def test_a_batch_that_fails_is_answered_500_and_the_next_one_is_computed():
    def replica(batch):
        if batch[0].tokens == [13]:
            raise MemoryError("too large")
        return echo(batch)

    async def work():
        batcher = Batcher([replica], batch_size=1, max_wait=0, bound=10)
        with pytest.raises(Refused, match="rank 0 failed on this batch: MemoryError: too large") as refusal:
            await batcher.answer(jobs(13))
        assert await batcher.answer(jobs(14)) == [[14]]
        batcher.close()
        return refusal.value.status

    assert run(work()) == 500


def test_when_a_replica_is_lost_others_finish_what_they_have_and_the_rest_is_refused():
    started, release = threading.Event(), threading.Event()

    def survivor(batch):
        started.set()
        assert release.wait(60)
        return echo(batch)

    def lost(batch):
        assert started.wait(60)
        raise ReplicaLost("connection closed")

    async def work():
        batcher = Batcher([survivor, lost], batch_size=1, max_wait=0, bound=10)
        asked = [asyncio.create_task(batcher.answer(jobs(number))) for number in range(5)]
        await batcher.ended.wait()
        with pytest.raises(Refused, match="rank 1 has ended: connection closed"):
            await batcher.answer(jobs(9))
        release.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        batcher.close()
        return found

    first, *others = run(work())
    assert first == [[0]]
    assert [refusal.status for refusal in others] == [503] * 4


def test_time_is_up_for_what_waits_but_not_for_what_is_computed():
    replica, started, release = held()

    async def work():
        batcher = Batcher([replica], batch_size=1, max_wait=0, bound=10)
        asked = [asyncio.create_task(batcher.answer(jobs(number))) for number in range(3)]
        await asyncio.to_thread(started.wait, 60)
        batcher.refuse("ending")
        release.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        batcher.close()
        return found

    first, *others = run(work())
    assert first == [[0]]
    assert [(refusal.status, str(refusal)) for refusal in others] == [(503, "ending")] * 2
