"""Latency of a token with all layers on the disk, predicted from bytes and bandwidth, with the page cache warm and dropped."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from .framework import DoesNotRun, Findings, Row, at_most, benchmark, interleaved, shown

PROMPT = [list(range(10, 42))]
LAYERS = 8  # of the shape of ERNIE-4.5-0.3B, in BF16: 216 MiB


@benchmark
def disk_rung(repeats: int) -> Findings:
    """A token's latency with all layers on the disk against latency in memory + bytes ÷ rate of bringing them, cached and not."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from helpers import models, offload

    logging.disable_progress_bar()
    shape = models.config("ernie-0.3b")
    shape.num_hidden_layers, shape.vocab_size, shape.dtype = LAYERS, 1024, torch.bfloat16
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        place, away = Path(folder), Path(folder) / "away"
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(place / "model")
        reference = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16)
        maps = {name: offload.template(name).placement(reference) for name in ("in_memory", "layers_on_disk")}
        inside = offload.load(place / "model", maps["in_memory"], place / "nothing")
        outside = offload.load(place / "model", maps["layers_on_disk"], away)
        size = offload.tiers(reference, maps["layers_on_disk"])["disk"]
        tokens = set()

        def token(model: torch.nn.Module, cold: bool) -> float:
            if cold and not offload.evict(away):
                raise DoesNotRun("this system does not drop files from its page cache")
            before = (lambda: offload.evict(away)) if cold else None
            found = offload.evaluate(model, PROMPT, new_tokens=4, memory=False, before=before)
            tokens.add(found.tokens)
            return found.latency

        def bring(cold: bool) -> float:
            if cold and not offload.evict(away):
                raise DoesNotRun("this system does not drop files from its page cache")
            return offload.bring(outside)[1]

        bring(False)
        timed = interleaved(
            {
                "token, all in memory": lambda: token(inside, False),
                "bring all layers, page cache warm": lambda: bring(False),
                "token, all layers on disk, page cache warm": lambda: token(outside, False),
                "bring all layers, dropped from the page cache": lambda: bring(True),
                "token, all layers on disk, dropped before each token": lambda: token(outside, True),
            },
            repeats,
        )
    rows = timed.rows()
    memory, warm_bring, warm, cold_bring, cold = (Row(row.name, row.samples).median for row in rows)
    errors = {"page cache warm": (memory + warm_bring) / warm - 1, "dropped": (memory + cold_bring) / cold - 1}
    claims = [
        at_most(f"predicted latency from the measured, {name}", abs(off), 0.35) for name, off in errors.items() if off == off
    ]
    worst = max((abs(off) for off in errors.values() if off == off), default=float("nan"))
    return Findings(
        rows,
        [*claims, shown("the same tokens in memory and from the disk", len(tokens) == 1)],
        f"disk rung: latency predicted within {100 * worst:.0f} %",
        [
            f"{size:,} B on the disk; rates {size / warm_bring / 1e9:.2f} GB/s warm, {size / cold_bring / 1e9:.2f} GB/s dropped",
            "predicted = median latency in memory + median time of bringing all offloaded weights without computing, which is"
            " bytes over the rate of accelerate's own path (read, copy, place), in the same state of the page cache",
            "dropped: posix_fadvise(DONTNEED) on every file, before each token; below it a virtual disk's host may still cache",
            f"spread of a warm token {100 * statistics.pstdev(rows[2].samples) / warm:.0f} %",
        ],
    )
