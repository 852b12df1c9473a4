"""How long a plan takes."""

from __future__ import annotations

import time

from .framework import Findings, at_most, benchmark, interleaved

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


@benchmark
def large(repeats: int) -> Findings:
    """Seconds of `predict.plan` for 70 billion parameters on 1,024 GPUs, by goal."""
    from helpers import predict

    machines = predict.machines("H100-SXM", 1024)
    job = predict.Workload(1024, 4096, precision="mixed", implementation="megatron")

    def timed(goal: str) -> float:
        start = time.perf_counter()
        assert predict.plan(LLAMA_70B, machines, job, goal).candidates
        return time.perf_counter() - start

    timed("fits")  # reads the data files
    rows = interleaved({goal: lambda goal=goal: timed(goal) for goal in predict.GOALS}, repeats).rows()
    slowest = max(row.median for row in rows)
    return Findings(
        rows,
        [at_most("seconds of a plan for 1,024 GPUs, slowest goal", slowest, 2, "s")],
        f"A plan for 1,024 GPUs takes at most {slowest:.2f} s",
    )
