"""What recording collectives costs a training step."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

from .framework import Findings, Row, at_most, benchmark, shown

PAIRS_A_SAMPLE = 8
WARM_UP = 4  # steps
SEQUENCES, TOKENS = 4, 64  # of a rank's batch


@benchmark
def step(repeats: int) -> Findings:
    """A DDP step of a 3 M-parameter ERNIE on 2 ranks, recorded and not: pairs of steps in the same ranks."""
    from helpers import launch

    run = launch(paired_steps, repeats * PAIRS_A_SAMPLE, ranks=2, timeout=300, record=False)
    parameters = run.results[0]["parameters"]
    pairs = [tuple(map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*(r["pairs"] for r in run.results), strict=True)]
    recorded, plain = zip(*pairs, strict=True)
    extra = [100 * (on / off - 1) for on, off in pairs]
    return Findings(
        [Row("recorded", recorded), Row("not recorded", plain), Row("recording adds, by pair", tuple(extra), "%")],
        [
            at_most("recording a DDP step, median of pairs", statistics.median(extra), 5, "%"),
            shown("recorded steps have collectives, the others none", all(result["as_meant"] for result in run.results)),
        ],
        f"Recording adds {statistics.median(extra):.1f} % to a DDP step of {parameters / 1e6:.1f} M parameters",
        [f"{parameters:,} parameters; a rank's batch is {SEQUENCES} × {TOKENS} tokens; the slower rank counts"],
    )


def paired_steps(count: int, warm_up: int = WARM_UP) -> dict[str, Any]:
    """On each rank: `count` pairs (seconds of a recorded step, seconds of a plain one), taking turns at being first."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from helpers import models
    from helpers.measuring import collectives

    model, _ = models.load("tiny-ernie", weights="random")
    wrapped = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, TOKENS), generator=generator)

    def seconds() -> float:
        dist.barrier()
        begin = time.perf_counter()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    for _ in range(warm_up):
        seconds()
    pairs, counts = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path, pair = os.path.join(folder, str(number)), {}
            for recording in (True, False) if number % 2 else (False, True):
                if recording:
                    collectives.start(path)
                pair[recording] = seconds()
                if recording:
                    _take_out()
                    counts.append(len(collectives.read(path, dist.get_rank()).collectives))
            pairs.append((pair[True], pair[False]))
    as_meant = all(
        number == counts[0] > 1 for number in counts
    )  # a step has the same collectives each time, the barrier included
    return {"parameters": sum(p.numel() for p in model.parameters()), "pairs": pairs, "as_meant": as_meant}


def _take_out() -> None:
    """Stop recording and remove the recorder's kernels too: a plain step then runs what torch came with."""
    import torch.distributed as dist

    from helpers.measuring import collectives

    collectives.stop()
    for library in collectives._libraries:
        library._destroy()
    collectives._libraries = ()
    work_class: Any = dist.Work
    work_class.wait = work_class.wait.__wrapped__
