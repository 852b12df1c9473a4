"""Whether two numbers describe a link: the α–β fit against sizes it has not seen."""

from __future__ import annotations

import statistics
import time

from .framework import Findings, Row, at_least, benchmark

SAMPLES = 20  # all-reduces a size
SIZES = [2**power for power in range(10, 27)]


@benchmark
def held_out(repeats: int) -> Findings:
    """All-reduces of 2 ranks from 1 KiB to 64 MiB: every second size is fitted, the others are predicted."""
    from helpers import launch
    from helpers.predict.links import fit_link

    rows, shares = [], []
    for _ in range(repeats):
        run = launch(all_reduce_times, ranks=2, record=False, timeout=300)
        measured = [max(times) for times in zip(*run.results, strict=True)]
        link = fit_link(SIZES[::2], measured[::2])
        errors = [abs(link.seconds(size) / time - 1) for size, time in zip(SIZES[1::2], measured[1::2], strict=True)]
        shares.append(100 * sum(error <= 0.3 for error in errors) / len(errors))
        rows.append(errors)
    by_size = [Row(f"error at {size:,} B", tuple(100 * errors[i] for errors in rows), "%") for i, size in enumerate(SIZES[1::2])]
    share = statistics.median(shares)
    return Findings(
        by_size,
        [at_least("sizes kept out of the fit that are predicted within 30 %", share, 70, "%")],
        f"{share:.0f} % of the sizes kept out of the fit are predicted within 30 %",
        [f"medians of {SAMPLES} all-reduces a size"],
    )


def all_reduce_times() -> list[float]:
    """On each rank: the median seconds of an all-reduce, by size."""
    import torch
    import torch.distributed as dist

    medians = []
    for size in SIZES:
        tensor, samples = torch.ones(size // 4), []
        for _ in range(SAMPLES + 3):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            samples.append(time.perf_counter() - start)
        medians.append(statistics.median(samples[3:]))
    return medians
