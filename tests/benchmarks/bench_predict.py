"""Steps of tiny-ernie as predicted with what the calibration found, against the same steps run: DP, TP, PP and both of two."""

from __future__ import annotations

import statistics
import time
from typing import Any

from .framework import Findings, Row, at_most, benchmark

SEQUENCE = 64
BATCHES = (4, 16)  # sequences of a data-parallel rank, or of all where there is one
MICRO_BATCHES = 4  # of the pipeline, each of BATCHES sequences
STEPS = 5


@benchmark
def steps(repeats: int) -> Findings:
    """Error of predicted steps: DP=2, TP=2, PP=2, and DP=2 × TP=2 on more ranks than cores."""
    from helpers import calibration, launch, models, predict

    config = models.config("tiny-ernie")
    rows, errors = [], []
    for ranks, ways in ((2, ("dp", "tp", "pp")), (4, ("dp×tp",))):
        found: dict[tuple[str, int], tuple[list[float], list[float]]] = {
            (way, batch): ([], []) for way in ways for batch in BATCHES
        }
        for _ in range(repeats):
            here = calibration.measure(config, ranks=ranks, sequence=SEQUENCE, batches=BATCHES)
            for (way, batch), (predicted, measured) in found.items():
                workload, layout = job(way, batch)
                predicted.append(predict.step_time(config, workload, layout, here).total)
                measured.append(max(launch(train, way, batch, ranks=ranks, record=False, timeout=300).results))
        for (way, batch), (predicted, measured) in found.items():
            crowded = ", more ranks than cores" * (ranks > 2)
            rows.append(Row(f"{way}, {batch} × {SEQUENCE} tokens, measured{crowded}", tuple(measured)))
            rows.append(Row(f"{way}, {batch} × {SEQUENCE} tokens, predicted{crowded}", tuple(predicted)))
            errors.append(100 * abs(statistics.median(predicted) / statistics.median(measured) - 1))
    half = statistics.median(errors)
    return Findings(
        rows,
        [at_most("error of predicted steps, median", half, 25, "%")],
        f"Half of the predicted steps are within {half:.0f} % of the measured ones",
        [
            f"medians of {STEPS} steps, the slowest rank counts; calibrated anew before each round",
            f"pipelines: 1F1B, {MICRO_BATCHES} micro-batches of so many sequences",
        ],
    )


def job(way: str, batch: int) -> tuple[Any, Any]:
    """Workload and layout of one way."""
    from helpers.predict import Layout, Workload

    layouts = {"dp": Layout(dp=2), "tp": Layout(tp=2), "pp": Layout(pp=2), "dp×tp": Layout(dp=2, tp=2)}
    return Workload(batch, SEQUENCE, micro_batches=MICRO_BATCHES if way == "pp" else 1), layouts[way]


def train(way: str, batch: int) -> float:
    """On each rank: the median seconds of an optimiser step."""
    import torch
    import torch.distributed as dist
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from helpers import models, pipeline, predict, shard_plan

    model, _ = models.load("tiny-ernie")
    model.train()
    count = MICRO_BATCHES * batch if way == "pp" else batch
    ids = torch.randint(10, 300, (count, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    plan = {key: style for key, style in shard_plan.published_plan(model).items() if ".layers." in key}
    if way == "tp":
        model = shard_plan.apply(model, plan, init_device_mesh("cpu", (2,)))
    elif way == "dp×tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = replicate(shard_plan.apply(model, plan, mesh["tp"]), device_mesh=mesh["dp"])
    elif way == "pp":
        rank = dist.get_rank()
        model = pipeline.Stage(model, predict.stages(model.config, 2), rank)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(
            stage, MICRO_BATCHES, lambda logits, wanted: cross_entropy(logits.flatten(0, 1), wanted.flatten())
        )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    trained = DistributedDataParallel(model) if way == "dp" else model
    samples = []
    for _ in range(STEPS + 2):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        if way == "pp":
            schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == 1 else None)
        else:
            cross_entropy(trained(input_ids=inputs, use_cache=False).logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])
