"""The bubble of a pipeline with one core a stage, against its formula, and what the rest is made of."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING

from .framework import Findings, Row, at_most, benchmark

if TYPE_CHECKING:
    from helpers.launching.results import Run
    from helpers.pipeline import Operation

STAGES = 2
COUNTS = (2, 4, 8)  # micro-batches
ROWS, LENGTH = 4, 128  # of a micro-batch
LAYERS_A_STAGE = 2


@benchmark
def bubble(repeats: int) -> Findings:
    """Idle share of 2 stages on a core each, GPipe and 1F1B, against (p − 1)/(m + p − 1); the rest from measured parts."""
    from helpers import launch, pipeline

    plan = [(schedule, count) for schedule in ("GPipe", "1F1B") for count in COUNTS]
    run = launch(train, plan, repeats, ranks=STAGES, timeout=900, backend="gloo")
    messages, turns = run.results[0], list(enumerate(plan * repeats, len(plan)))  # the first round warms up
    gaps = []  # between forward passes of rank 0 in GPipe, where nothing is waited for: what the library takes
    for number, (schedule, count) in turns:
        first = pipeline.recorded(run, number)[0][:count]
        gaps += [after.start - before.end for before, after in itertools.pairwise(first) if schedule == "GPipe"]
    message, gap = statistics.median(messages), statistics.median(gaps)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {kind: [] for kind in plan}
    for number, kind in turns:
        rows = pipeline.recorded(run, number)
        found[kind].append((pipeline.bubble(rows), explained(run, rows, message, gap)))
    table, claims = [], []
    for (schedule, count), samples in found.items():
        formula = (STAGES - 1) / (count + STAGES - 1)
        name = f"{schedule}, {count} micro-batches"
        measured, parts = (tuple(100 * each[place] for each in samples) for place in (0, 1))
        rest = tuple(whole - part for whole, part in zip(measured, parts, strict=True))
        table += [
            Row(f"{name}, idle", measured, "%"),
            Row(f"{name}, from its parts", parts, "%"),
            Row(f"{name}, rest", rest, "%"),
        ]
        off = abs(statistics.median(measured) / 100 - formula)
        claims.append(at_most(f"{name}: measured bubble from the formula's {formula:.3f}", off, 0.15))
        claims.append(at_most(f"{name}: idle share that its parts leave open", abs(statistics.median(rest)) / 100, 0.05))
    worst = max(claim.measured for claim in claims[::2])
    return Findings(
        table,
        claims,
        f"{STAGES} stages: the bubble is within {worst:.2f} of its formula",
        [
            f"stages of {LAYERS_A_STAGE} layers, micro-batches of {ROWS} × {LENGTH} tokens, one thread a stage",
            "its parts: the order of operations, each as long as recorded, the loss, messages, the library between operations",
            f"a message takes {1e3 * message:.2f} ms, the library {1e3 * gap:.2f} ms between two operations",
        ],
    )


def explained(run: Run, rows: list[list[Operation]], message: float, gap: float) -> float:
    """The bubble of the same order from the recorded times of operations and losses, a message's seconds and those between."""
    from helpers import pipeline

    losses = [each.end - each.start for each in run.regions if each.name == "loss"]
    loss, last = statistics.median(losses), len(rows) - 1
    seconds = {(each.stage, str(each)): each.end - each.start for row in rows for each in row}

    def takes(each: Operation) -> float:
        return seconds[each.stage, str(each)] + gap + loss * (each.kind == "F" and each.stage == last)

    placed = pipeline.place([[str(each) for each in row] for row in rows], takes, message=message)
    span = max(row[-1].end for row in placed)
    return 1 - sum(seconds.values()) / (len(rows) * span)


def train(plan: list[tuple[str, int]], rounds: int) -> list[float]:
    """On each rank: a round that warms up, then `rounds` rounds of one step of each kind; seconds of messages, from rank 0."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
    from transformers import AutoModelForCausalLM

    from helpers import models, pipeline
    from helpers.measuring import clock

    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = models.config("tiny-ernie")
    shape.num_hidden_layers = LAYERS_A_STAGE * world
    torch.manual_seed(0)
    parts = [range(start, start + LAYERS_A_STAGE) for start in range(0, shape.num_hidden_layers, LAYERS_A_STAGE)]
    module = pipeline.Stage(AutoModelForCausalLM.from_config(shape), parts, rank)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with clock.region("loss"):
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    runners = {}
    for schedule, count in plan:
        stage = pipeline.RecordedStage(module, rank, world, torch.device("cpu"))
        runners[schedule, count] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[schedule](stage, count, loss_of)
    found = []
    for _ in range(rounds + 1):
        for (_, count), runner in runners.items():
            ids = torch.randint(10, 300, (ROWS * count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
            dist.barrier()
            with clock.region("step"):
                runner.step(*([ids[:, :-1]] if rank == 0 else []), target=ids[:, 1:] if rank == world - 1 else None)
        hidden = torch.zeros(ROWS, LENGTH, shape.hidden_size)
        dist.barrier()
        begin = time.perf_counter()
        if rank < 2:  # there and back
            (dist.send if rank == 0 else dist.recv)(hidden, 1 - rank)
            (dist.recv if rank == 0 else dist.send)(hidden, 1 - rank)
        found.append((time.perf_counter() - begin) / 2)
    return found[1:]
