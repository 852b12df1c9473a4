"""What a second replica gives, what a work queue gives on unequal prompts, and the server beside a plain loop."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .framework import Findings, Row, at_least, at_most, benchmark, interleaved, shown

ROOT = Path(__file__).parents[2]
BATCH = 8  # prompts in a batch
NEW_TOKENS = 12
POSITIONS = 640  # in a batch of the work queue


@benchmark
def efficiency(repeats: int) -> Findings:
    """Tokens a second of 2 ranks with 1 thread each, against 2 × 1 rank with 1 thread: pairs in the same ranks."""
    from helpers import launch

    rows, claims, notes = [], [], []
    least = {"tiny-ernie": 0.70, "ernie-0.3b": 0.80}
    for name, options in {"tiny-ernie": {}, "ernie-0.3b": {"weights": "random", "dtype": "bfloat16"}}.items():
        pairs = launch(alone_and_together, name, options, repeats, ranks=2, timeout=900, record=False, backend="gloo").results[0]
        rows += [Row(f"{name}, {way}", tuple(pair[place] for pair in pairs)) for place, way in enumerate(("alone", "both"))]
        of_pairs = [100 * alone / both for alone, both in pairs]
        rows.append(Row(f"{name}, efficiency", tuple(of_pairs), "%"))
        median = statistics.median(of_pairs)
        claims.append(at_least(f"efficiency of 2 ranks, {name}, median of pairs", median, 100 * least[name], "%"))
        claims.append(at_most(f"efficiency of 2 ranks, {name}: a lone rank is not slower than a pair", median, 105, "%"))
        notes.append(f"{name}: {BATCH} prompts of 32 tokens, {NEW_TOKENS} new ones")
        if median > 100:  # nothing in the job explains it: the same work, the same thread
            notes.append(f"{name}: one rank alone was slower than beside a second one; the machine serves a lone core worse")
    texts = ", ".join(f"{claim.measured:.0f} %" for claim in claims[::2])
    return Findings(rows, claims, f"Two ranks work with an efficiency of {texts} (tiny-ernie, the 0.3B shape)", notes)


def alone_and_together(name: str, options: dict[str, str], pairs: int) -> list[tuple[float, float]]:
    """On each rank: seconds of a batch on rank 0 alone and on both, taking turns at being first."""
    import torch
    import torch.distributed as dist

    from helpers import models

    torch.set_num_threads(1)
    model, _ = models.load(name, **options)  # type: ignore[arg-type]
    ids = torch.randint(10, 300, (BATCH, 32))

    def seconds(both: bool) -> float:
        dist.barrier()
        begin = time.perf_counter()
        if both or dist.get_rank() == 0:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        dist.barrier()
        return time.perf_counter() - begin

    seconds(True)
    found = []
    for number in range(pairs):
        pair = {both: seconds(both) for both in ((True, False) if number % 2 else (False, True))}
        found.append((pair[False], pair[True]))
    return found


@benchmark
def distribution(repeats: int) -> Findings:
    """The prompts of data/prompts.jsonl on 2 ranks: contiguous shares against a queue of sorted batches, in the same ranks."""
    from helpers import launch

    rounds = launch(both_ways, repeats, ranks=2, timeout=900, record=False, backend="gloo").results[0]
    rows = [Row(way, tuple(each[way] for each in rounds)) for way in ("contiguous", "dynamic")]
    gain = statistics.median(each["contiguous"] / each["dynamic"] for each in rounds)
    return Findings(
        [*rows, Row("contiguous / dynamic, by round", tuple(each["contiguous"] / each["dynamic"] for each in rounds), "×")],
        [at_least("a work queue against contiguous shares, median of rounds", gain, 1.3, "×")],
        f"A work queue of sorted batches is {gain:.1f} times as fast as contiguous shares",
    )


def both_ways(rounds: int) -> list[dict[str, float]]:
    """On each rank: by way of dealing out, seconds until the last rank is done."""
    import torch
    import torch.distributed as dist

    from helpers import data_parallel, models

    torch.set_num_threads(1)
    model, tokenizer = models.load("tiny-ernie")
    rows = tokenizer(data_parallel.prompts()[::2]).input_ids

    def batches(numbers: list[int]) -> list[list[int]]:
        return [numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)]

    half = len(rows) // 2
    own = batches(list(range(half * dist.get_rank(), half * (dist.get_rank() + 1))))
    in_order: list[list[int]] = []  # batches of neighbours in length: at most BATCH prompts and POSITIONS positions
    for number in sorted(range(len(rows)), key=lambda number: -len(rows[number])):
        fits = bool(in_order) and (len(in_order[-1]) + 1) * len(rows[in_order[-1][0]]) <= POSITIONS
        if fits and len(in_order[-1]) < BATCH:
            in_order[-1].append(number)
        else:
            in_order.append([number])

    def work(mine: Iterator[list[int]]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for batch in mine:
            data_parallel.complete(model, [rows[number] for number in batch], [4] * len(batch))
        dist.barrier()
        return time.perf_counter() - begin

    def dynamic(turn: int) -> Iterator[list[int]]:
        return (in_order[number] for number in data_parallel.WorkQueue(f"round {turn}", len(in_order)))

    work(iter(own[:1]))
    return [{"contiguous": work(iter(own)), "dynamic": work(dynamic(turn))} for turn in range(rounds)]


@benchmark
def server(repeats: int) -> Findings:
    """96 requests at once: the server with 2 ranks beside a plain loop over generate, one prompt after the other."""
    from helpers import data_parallel, load_generator, models

    prompts = data_parallel.prompts(96)
    model, tokenizer = models.load("tiny-ernie")
    texts: list[str] = []

    def plain_loop() -> float:
        begin = time.perf_counter()
        found = [data_parallel.complete(model, [tokenizer(prompt).input_ids], [NEW_TOKENS])[0] for prompt in prompts]
        texts[:] = tokenizer.batch_decode(found, skip_special_tokens=True)
        return time.perf_counter() - begin

    plain_loop()
    right = []
    with two_ranks() as url:
        load_generator.send(url, prompts, model="tiny-ernie", max_tokens=NEW_TOKENS)

        def serve() -> dict[str, float]:
            load = load_generator.send(url, prompts, model="tiny-ernie", max_tokens=NEW_TOKENS, expected=texts)
            right.append(len(load.right) == len(prompts))
            return {"server, all answered": load.seconds, "server, median latency": load.percentile(50)}

        contenders: dict[str, Callable] = {"plain loop, all answered": plain_loop, "server": serve}
        timed = interleaved(contenders, repeats)
    times = timed["plain loop, all answered"].median / timed["server, all answered"].median
    return Findings(
        timed.rows(),
        [shown("every request got the text that one process gives", all(right))],
        f"The server with 2 ranks answers 96 requests {times:.1f} times as fast as a plain loop",
        ["the plain loop has this process to itself and as many threads as torch takes"],
    )


@contextmanager
def two_ranks() -> Iterator[str]:
    """The address of a server with 2 ranks."""
    from helpers import server_process

    port = server_process.free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(ROOT / "helpers" / "inference_server.py")]
    command += ["--model_name", "tiny-ernie", "--batch_size", "16", "--max_length", "2048", "--port", str(port)]
    meet = {"PET_MASTER_PORT": str(server_process.free_port())}
    with server_process.started(command, f"http://127.0.0.1:{port}", env=meet) as running:
        yield running.url
