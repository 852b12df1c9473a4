"""Notebook 02: answers, hints, checks, and wrong answers with the message each gets."""

import time

import torch.distributed as dist

from helpers import data_parallel, launch, models, predict
from helpers.exercises import Exercise, Wrong

RANKS = 3  # in the checks: not the number the notebook's later sections use
SEVEN = [f"item {number}" for number in range(7)]  # does not divide by the number of ranks


def in_order(items, work):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = [work(item) for item in items[rank::ranks]]  # may be empty: the rank still joins the gather
    handed_in = [None] * ranks if rank == 0 else None
    dist.gather_object(own, handed_in)
    if rank > 0:
        return None
    results = [None] * len(items)
    for source, part in enumerate(handed_in):
        results[source::ranks] = part
    return results


def check_in_order(job):
    def counted(items):
        calls = []

        def work(item):
            calls.append(item)
            return item.upper()

        return job(items, work), calls

    for items in (SEVEN, [], SEVEN[:2]):
        run = launch(counted, items, ranks=RANKS, backend="gloo", timeout=60)
        found, calls = [result for result, _ in run.results], [calls for _, calls in run.results]
        case, wanted = f"With {len(items)} items on {RANKS} ranks", [item.upper() for item in items]
        made = sum(map(len, calls))
        if made > len(items):
            raise Wrong(f"{case}, work was called {made} times: ranks did each other's work. A rank takes items[rank::ranks].")
        if found[0] is None:
            raise Wrong(f"{case}, rank 0 returned None; it is the one that returns the results.")
        if found[0] != wanted and sorted(map(str, found[0])) == sorted(wanted):
            raise Wrong(
                f"{case}, all results are there, in another order: {found[0]}. What a rank hands in is its own share only."
            )
        if found[0] != wanted:
            raise Wrong(f"{case}, rank 0 returned {found[0]}; it should return {wanted}.")
        if any(result is not None for result in found[1:]):
            raise Wrong(f"{case}, other ranks returned results too; only rank 0 needs them, so the others return None.")
    run = launch(counted, [letter * 1000 for letter in "abcdefg"], ranks=RANKS, backend="gloo", timeout=60)
    to_all = max((c.bytes for c in run.collectives if c.op in ("all_gather", "all_reduce", "broadcast")), default=0)
    if to_all > 1000:
        raise Wrong(
            f"The results are right, but they went to every rank: {to_all:,} B in one collective that all receive. "
            "Only rank 0 needs them: dist.gather_object(own, a list on rank 0 and None elsewhere)."
        )
    sent = [sum(c.bytes for c in run.collectives if c.rank == rank) for rank in range(RANKS)]
    return f"7, 0 and 2 items on {RANKS} ranks: each worked on once, in order, on rank 0 only; bytes by rank: {sent}."


def rank_after_rank(items, work):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    handed_in = [None] * ranks if rank == 0 else None
    dist.gather_object([work(item) for item in items[rank::ranks]], handed_in)
    return [result for part in handed_in for result in part] if rank == 0 else None


def everything_everywhere(items, work):
    results = [work(item) for item in items]
    return results if dist.get_rank() == 0 else None


def to_everybody(items, work):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    handed_in = [None] * ranks
    dist.all_gather_object(handed_in, [work(item) for item in items[rank::ranks]])
    results = [None] * len(items)
    for source, part in enumerate(handed_in):
        results[source::ranks] = part
    return results if rank == 0 else None


def returned_everywhere(items, work):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    handed_in = [None] * ranks
    dist.all_gather_object(handed_in, [work(item) for item in items[rank::ranks]])
    return [handed_in[number % ranks][number // ranks] for number in range(len(items))]


def batches_of(lengths, size):
    by_length = sorted(range(len(lengths)), key=lambda number: lengths[number])
    return [by_length[first : first + size] for first in range(0, len(by_length), size)]


def check_batches(make):
    every = [1 + len(text.split()) for text in data_parallel.prompts()]
    for lengths, size in ((every[:45], 4), (every, 8)):
        batches, count = make(list(lengths), size), len(lengths)
        numbers = sorted(number for batch in batches for number in batch)
        if numbers == sorted(lengths):
            raise Wrong("Your batches hold the lengths themselves; the answers are put back by prompt number, so return numbers.")
        if numbers != list(range(count)):
            missing = sorted(set(range(count)) - set(numbers))
            lost = f"{len(missing)} are missing (such as {missing[:3]})" if missing else "some come twice"
            raise Wrong(f"Of {count} prompts, {lost}. Every number must be in exactly one batch, the last ones too.")
        if max(map(len, batches)) > size:
            raise Wrong(f"A batch has {max(map(len, batches))} prompts; at most {size} were asked for.")
        least = -(-count // size)
        if len(batches) > least:
            raise Wrong(
                f"{len(batches)} batches where {least} would do: each costs its fixed time. Fill one before you start the next."
            )
        wasted = data_parallel.padding(lengths, batches).wasted
        if wasted > 0.2:
            raise Wrong(
                f"{wasted:.0%} of all positions are padding, at most 20 % is asked for. Which prompts fit one batch well?"
            )
    return f"{count} prompts in {len(batches)} batches of {size}: {wasted:.0%} padding."


def in_file_order(lengths, size):
    return [list(range(first, min(first + size, len(lengths)))) for first in range(0, len(lengths), size)]


def one_by_one(lengths, size):
    return [[number] for number in range(len(lengths))]


def without_the_last(lengths, size):
    by_length = sorted(range(len(lengths)), key=lambda number: lengths[number])
    return [by_length[first : first + size] for first in range(0, len(by_length) - size + 1, size)]


def lengths_themselves(lengths, size):
    ordered = sorted(lengths)
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


def largest_batch(config, budget, tokens, new):
    def peak(batch):
        workload = predict.Workload(batch=batch, sequence=tokens, training=False, new_tokens=new)
        return predict.memory(config, workload).peak

    batch = 0
    while peak(batch + 1) <= budget:
        batch += 1
    return batch


def check_largest_batch(answer):
    config, weights = models.config("tiny-ernie"), 4 * models.parameter_count("tiny-ernie")
    for mebibytes, tokens, new in ((40, 64, 256), (100, 500, 100), (13, 2000, 8)):
        budget = mebibytes * 2**20
        right, found = largest_batch(config, budget, tokens, new), answer(config, budget, tokens, new)
        if found == right:
            continue
        case = f"{mebibytes} MiB, prompts of {tokens} tokens, {new} new ones: your answer is {found}"
        if not isinstance(found, int):
            raise Wrong(f"{case}; a whole number of prompts is asked for.")
        if found == right + 1:
            raise Wrong(f"{case}, one too many: that batch no longer fits. Round down.")
        without_weights = largest_batch(config, budget + weights, tokens, new)
        if found == without_weights:
            raise Wrong(f"{case}, right if the weights took no room. They are {weights:,} B of the budget.")
        only_cache = (budget - weights) // (predict.kv_bytes_per_token(config, precision="fp32") * (tokens + new))
        if found == max(0, only_cache):
            raise Wrong(
                f"{case}, right if keys and values were all. A layer's widest moment comes on top; predict.memory knows it."
            )
        if found == largest_batch(config, budget, tokens, 1):
            raise Wrong(f"{case}, right without new tokens. Each new token adds its keys and values.")
        raise Wrong(f"{case}, {right} is right. Ask predict.memory for the peak of 1, 2, 3 … prompts.")
    return "Three budgets, one of them below the first prompt: the largest batch each time."


def one_too_many(config, budget, tokens, new):
    batch = 1
    while predict.memory(config, predict.Workload(batch=batch, sequence=tokens, training=False, new_tokens=new)).peak <= budget:
        batch += 1
    return batch


def without_new_tokens(config, budget, tokens, new):
    batch = 0
    while predict.memory(config, predict.Workload(batch=batch + 1, sequence=tokens, training=False, new_tokens=1)).peak <= budget:
        batch += 1
    return batch


def keys_and_values_only(config, budget, tokens, new):
    weights = 4 * predict.architecture(config).parameter_count
    return max(0, (budget - weights) // (predict.kv_bytes_per_token(config, precision="fp32") * (tokens + new)))


def weights_forgotten(config, budget, tokens, new):
    def room(batch):
        found = predict.memory(config, predict.Workload(batch=batch, sequence=tokens, training=False, new_tokens=new))
        return found.peak - found.parameters <= budget

    batch = 0
    while room(batch + 1):
        batch += 1
    return batch


def whoever_is_ready(count, work):
    own = {number: work(number) for number in data_parallel.WorkQueue("mine", count)}
    handed_in = [None] * dist.get_world_size()
    dist.all_gather_object(handed_in, own)
    results = {number: result for part in handed_in for number, result in part.items()}
    return [results[number] for number in range(count)]


COUNT, PATIENCE = 9, 8.0  # numbers, and the seconds for which a rank is stuck at most


def check_whoever_is_ready(job):
    def stuck():
        from torch.distributed.distributed_c10d import _get_default_store

        store, calls = _get_default_store(), []
        store.add("done", 0)

        def work(number):
            calls.append(number)
            if dist.get_rank() == 1 and len(calls) == 1:  # until all the others are done
                until = time.monotonic() + PATIENCE
                while store.add("done", 0) < COUNT - 1 and time.monotonic() < until:
                    time.sleep(0.005)
            store.add("done", 1)
            return number**2

        dist.barrier()
        if dist.get_rank() != 1:  # the one that gets stuck begins first
            time.sleep(0.2)
        return job(COUNT, work), calls

    run = launch(stuck, ranks=RANKS, backend="gloo", timeout=120)
    found, calls = [result for result, _ in run.results], [calls for _, calls in run.results]
    done, wanted = sorted(number for each in calls for number in each), [number**2 for number in range(COUNT)]
    by_rank = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
    if len(done) > len(set(done)):
        raise Wrong(f"Numbers were worked on more than once ({by_rank}). Each number belongs to the one rank that took it.")
    if done != list(range(COUNT)):
        raise Wrong(f"Not every number from 0 to {COUNT - 1} was worked on ({by_rank}).")
    if len(calls[1]) > 1:
        raise Wrong(
            f"Rank 1 was stuck with its first number, and still had {len(calls[1]) - 1} more to do ({by_rank}): dealt out before "
            'the start. Take the next number only when ready: for number in data_parallel.WorkQueue("mine", count).'
        )
    if any(result != wanted for result in found):
        rank = next(rank for rank, result in enumerate(found) if result != wanted)
        raise Wrong(f"Rank {rank} returned {found[rank]}; every rank should return {wanted}, in the order of the numbers.")
    return f"Rank 1 was stuck with one number, the others did the other {COUNT - 1} ({by_rank}); every rank has all, in order."


def dealt_out_before(count, work):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    handed_in = [None] * ranks
    dist.all_gather_object(handed_in, {number: work(number) for number in range(rank, count, ranks)})
    results = {number: result for part in handed_in for number, result in part.items()}
    return [results[number] for number in range(count)]


def only_my_own(count, work):
    return [work(number) for number in data_parallel.WorkQueue("mine", count)]


def all_of_them(count, work):
    return [work(number) for number in range(count)]


def check_efficiency(answer):
    if not isinstance(answer, (int, float)):
        raise Wrong(f"An efficiency is a number; yours is {answer!r}.")
    if abs(answer - 3) < 0.01:
        raise Wrong("3 is the speed-up. Efficiency sets it against the number of replicas.")
    if abs(answer - 315) < 0.5:
        raise Wrong("315 tokens a second is the throughput per rank. Set it against what one replica makes alone.")
    if abs(answer - 4 / 3) < 0.01:
        raise Wrong("The other way round: efficiency is what you got over what you hoped for.")
    if abs(answer - 0.75) > 0.005:
        raise Wrong(f"You found {answer}. Four times 420 tokens a second would be perfect; 1,260 were made.")
    return "1,260 of 4 × 420 tokens a second: 0.75, a speed-up of 3 with four replicas."


EXERCISES = [
    Exercise(
        "02.1",
        "shard items over ranks and gather the results in order",
        answer=in_order,
        hints=[
            "items[rank::ranks] is a rank's share; it may be empty, and then the rank must still take part in the collective.",
            "dist.gather_object(own, handed_in) with handed_in = [None] * ranks on rank 0 and None on the others.",
            "On rank 0 results[source::ranks] = part puts a rank's list back where its items came from.",
        ],
        check=check_in_order,
        wrong=[
            (rank_after_rank, "in another order"),
            (everything_everywhere, "did each other's work"),
            (to_everybody, "they went to every rank"),
            (returned_everywhere, "only rank 0 needs them"),
        ],
    ),
    Exercise(
        "02.2",
        "make batches that waste little on padding",
        answer=batches_of,
        hints=[
            "A batch is as long as its longest prompt: put prompts of similar length together.",
            "sorted(range(len(lengths)), key=lambda number: lengths[number]) are the numbers, short prompts first. Cut that.",
        ],
        check=check_batches,
        wrong=[
            (in_file_order, "of all positions are padding"),
            (one_by_one, "each costs its fixed time"),
            (without_the_last, "are missing"),
            (lengths_themselves, "the lengths themselves"),
        ],
    ),
    Exercise(
        "02.3",
        "predict the largest batch that fits a memory budget",
        answer=largest_batch,
        hints=[
            "predict.Workload(batch=…, sequence=…, training=False, new_tokens=…) describes the work of one rank.",
            "predict.memory(config, workload).peak is the most memory at one time, weights included. Raise the batch.",
        ],
        check=check_largest_batch,
        wrong=[
            (one_too_many, "one too many"),
            (without_new_tokens, "right without new tokens"),
            (keys_and_values_only, "widest moment comes on top"),
            (weights_forgotten, "if the weights took no room"),
        ],
    ),
    Exercise(
        "02.4",
        "share numbers among ranks as they become ready",
        answer=whoever_is_ready,
        hints=[
            'Each rank loops over data_parallel.WorkQueue("mine", count) and keeps {number: work(number)}.',
            "dist.all_gather_object(handed_in, own) gives every rank the dictionaries of all.",
        ],
        check=check_whoever_is_ready,
        wrong=[
            (dealt_out_before, "dealt out before the start"),
            (only_my_own, "every rank should return"),
            (all_of_them, "more than once"),
        ],
    ),
    Exercise(
        "02.5",
        "work out an efficiency",
        answer=0.75,
        hints=["Perfect would be four times what one replica makes.", "Efficiency = total / (ranks × throughput of one alone)."],
        check=check_efficiency,
        wrong=[(3, "is the speed-up"), (315, "per rank"), (1.3333, "other way round"), ("75 %", "is a number")],
    ),
]
