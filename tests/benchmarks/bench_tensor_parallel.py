"""When two tensor-parallel ranks decode faster than one, and whether a rank's share and the α–β fit of the link predict it."""

from __future__ import annotations

import copy
import statistics
import time

from .framework import Findings, Row, at_most, benchmark, shown

BATCHES = [1, 4, 16, 64, 256, 1024]  # sequences decoded together
SIZES = [2**power for power in range(10, 22)]  # of the all-reduces that the link is fitted to, in bytes
STEPS = 5  # in a sample
PRODUCTS = 2  # of matrices, before each of those all-reduces: in a step none follows right after another


@benchmark
def decode(repeats: int) -> Findings:
    """A decode step of tiny-ernie: whole on one rank, a rank's share of it, and split over two, taking turns; one thread each."""
    from helpers import launch, models
    from helpers.predict.links import fit_link

    config = models.config("tiny-ernie")
    results = launch(steps, repeats, ranks=2, timeout=1800, record=False, backend="gloo").results
    slower = [
        {key: [max(pair) for pair in zip(*(result[place][key] for result in results), strict=True)] for key in results[0][place]}
        for place in (0, 1)
    ]
    times, reduced = slower
    link = fit_link(SIZES, [statistics.median(reduced[size]) for size in SIZES])
    rows, errors, ratios = [], [], {}
    for batch in BATCHES:
        whole, share, both = (tuple(times[way, batch]) for way in ("whole", "share", "both"))
        sending = 2 * config.num_hidden_layers * link.seconds(4 * config.hidden_size * batch)
        errors.append(100 * abs((statistics.median(share) + sending) / statistics.median(both) - 1))
        ratios[batch] = statistics.median(w / b for w, b in zip(whole, both, strict=True))
        rows += [Row(f"{batch} sequences, 1 rank", whole), Row(f"{batch} sequences, 2 ranks", both)]
        rows.append(Row(f"{batch} sequences, predicted for 2 ranks", tuple(s + sending for s in share)))
    speed = ", ".join(f"{ratio:.2f} at {batch}" for batch, ratio in ratios.items())
    return Findings(
        rows,
        [
            at_most("error of the predicted times, median over batch sizes", statistics.median(errors), 50, "%"),
            shown("two ranks are slower than one for one sequence", ratios[1] < 1),
        ],
        f"Two ranks decode {speed} sequences times as fast as one",
        [
            repr(link),
            f"samples of {STEPS} steps, the slower rank counts; the share is a model of half the heads and half the MLP under "
            f"the same plan, and each all-reduce that was fitted came after {PRODUCTS} products of matrices (taken off)",
        ],
    )


def steps(repeats: int) -> tuple[dict[tuple[str, int], list[float]], dict[int, list[float]]]:
    """On each rank: seconds of a step by (way, batch), and of an all-reduce by bytes; rounds of all, one after the other."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from transformers import AutoModelForCausalLM

    from helpers import models, shard_plan

    torch.set_num_threads(1)
    whole, both = (models.load("tiny-ernie")[0] for _ in range(2))
    half = copy.deepcopy(whole.config)
    half.num_attention_heads, half.num_key_value_heads = half.num_attention_heads // 2, half.num_key_value_heads // 2
    half.intermediate_size //= 2
    plan = {key: style for key, style in shard_plan.published_plan(whole).items() if ".layers." in key}
    shard_plan.apply(both, plan, init_device_mesh("cpu", (2,)))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    share = shard_plan.apply(AutoModelForCausalLM.from_config(half).eval(), plan, DeviceMesh.from_group(alone, "cpu"))
    ways = {"whole": whole, "share": share, "both": both}
    times: dict[tuple[str, int], list[float]] = {(way, batch): [] for way in ways for batch in BATCHES}
    reduced: dict[int, list[float]] = {size: [] for size in SIZES}
    square = torch.ones(256, 256)
    with torch.no_grad():
        for turn in range(-1, repeats):  # the first one warms up
            for (way, batch), found in times.items():
                ids = torch.zeros(batch, 1, dtype=torch.long)
                waits = way == "whole" and dist.get_rank() > 0
                dist.barrier()
                start = time.perf_counter()
                for _ in range(0 if waits else STEPS):
                    ways[way](ids, use_cache=False)
                found += [(time.perf_counter() - start) / STEPS] * (turn >= 0)
            for size, found in reduced.items():
                tensor = torch.ones(size // 4)
                dist.barrier()
                start = time.perf_counter()
                for _ in range(STEPS):
                    for _ in range(PRODUCTS):
                        square @ square
                work = time.perf_counter() - start
                dist.barrier()
                start = time.perf_counter()
                for _ in range(STEPS):
                    for _ in range(PRODUCTS):
                        square @ square
                    dist.all_reduce(tensor)
                found += [(time.perf_counter() - start - work) / STEPS] * (turn >= 0)
    return times, reduced
