"""The collectives of one training step, or of answering one batch of prompts: which axis, how many, how large, when.

Sources: data parallelism and ZeRO 1–3: Rajbhandari et al., SC 2020, section 7; tensor parallelism: Shoeybi et al.,
"Megatron-LM", 2019 (2 all-reduces a layer forward, 2 backward); sequence parallelism: Korthikanti et al., MLSys 2023 (each
all-reduce becomes a reduce-scatter and an all-gather of the same bytes); pipelines: Narayanan et al., SC 2021. For
transformers' plans on DTensor the backward pass all-reduces the input gradient of each column-wise layer for itself: q, k, v,
gate and up make 5 a layer.

Known misses: DDP's own 128 bytes and bucket boundaries (the bytes are right, their number is the buckets'); buffers that DDP
broadcasts; gradient norms; collectives of a few bytes in the parallel loss; FSDP2's padding of shards that do not divide.
"""

from dataclasses import dataclass
from typing import Any

from helpers.predict.layout import Layout, Workload
from helpers.predict.rank import Rank, rank_of

__all__ = ["Exchange", "step_traffic"]


@dataclass(frozen=True)
class Exchange:
    """`count` operations of `bytes` each over the `ranks` of one mesh axis; `bytes` as a recorded `Collective` counts them."""

    axis: str  # "dp", "tp", "pp", "cp"
    op: str
    count: int
    bytes: int
    ranks: int
    when: str  # "forward", "backward", "update"; in inference "prefill", "decode"


def step_traffic(config: Any, workload: Workload, layout: Layout, *, stage: int = 0) -> list[Exchange]:
    """Return what one rank of pipeline stage `stage` takes part in during one optimiser step, all micro-batches together.

    For inference: one batch of prompts (prefill) and the passes for the tokens after the first new one (decode). Rows that would
    move nothing are left out.
    """
    rank = rank_of(config, workload, layout, stage)
    if workload.training:
        found = _layers(rank, rank.tokens, workload.micro_batches, "forward")
        found += _layers(rank, rank.tokens, workload.micro_batches, "backward") + _data(rank)
    else:
        found = _layers(rank, workload.batched_tokens or rank.tokens, 1, "prefill")
        found += _layers(rank, workload.batch, max(0, workload.new_tokens - 1), "decode")
    return [each for each in found if each.count and each.bytes and each.ranks > 1]


def _layers(rank: Rank, tokens: float, passes: int, when: str) -> list[Exchange]:
    """Tensor, context and pipeline parallelism in `passes` passes over the stage's layers."""
    shape, workload, layout, code = rank.shape, rank.workload, rank.layout, rank.code
    back, compute, depth = when == "backward", rank.width.compute, len(rank.layers) * passes
    hidden, split = tokens * shape.hidden * compute, layout.sequence_parallel
    found = []

    def add(axis: str, op: str, count: int, size: float) -> None:
        found.append(Exchange(axis, op, count, round(size), getattr(layout, axis), when))

    again = 2 * depth * (back and workload.checkpointing == "full")  # the forward pass of each layer is run again
    separate = (1 if shape.fused_qkv else 3) + (2 if shape.gated else 1)
    regions = again + depth * (separate if back and workload.implementation == "transformers" and not split else 2)
    if split:  # backward gathers the inputs of column-wise layers again where they were not kept
        add("tp", "all_gather", regions + 2 * depth * (back and not code.keeps_gathered), hidden)
    add("tp", "reduce_scatter" if split else "all_reduce", regions, hidden)
    if code.vocabulary_parallel:  # the embedding's sum over ranks; backward: the gradient of the output matrix's input
        add("tp", "reduce_scatter" if split else "all_reduce", passes * (rank.last if back else rank.first), hidden)
        add("tp", "all_gather", passes * rank.last * (not workload.training), workload.batch * shape.vocabulary * compute)
    blocks = 2 * tokens * shape.key * compute / layout.tp  # keys and values, backward their gradients too, go round a ring
    add("cp", "send", depth * (layout.cp - 1), blocks * (1 + back))
    part = 1 / layout.tp if code.splits_messages else rank.unsplit
    received = passes * (not (rank.last if back else rank.first))
    add("pp", "recv", received, hidden * part)
    add("pp", "send", passes * (not (rank.first if back else rank.last)), hidden * part)
    add("tp", "all_gather", received * (code.splits_messages and not split), hidden)
    return found


def _data(rank: Rank) -> list[Exchange]:
    """Gradients and, from ZeRO 1 on, weights over the data-parallel ranks."""
    zero, passes, width = rank.layout.zero, rank.workload.micro_batches, rank.width
    whole = rank.elements(rank.held)
    layer = rank.elements(rank.shape.layer_parameters(rank.layers[-1])) if rank.layers else 0.0
    root, inner = whole - layer * len(rank.layers), len(rank.layers) * passes
    rows: list[tuple[str, int, float, str]] = [("all_reduce", 1, whole * width.gradient, "backward")]
    if zero in (1, 2):
        rows = [
            ("reduce_scatter", passes if zero == 2 else 1, whole * width.gradient, "backward"),
            ("all_gather", 1, whole * width.weight, "update"),
        ]
    if zero == 3:  # the root's weights stay gathered until its gradients are ready, those of layers do not
        rows = [("all_gather", passes, root * width.compute, "forward")]
        rows += [("all_gather", inner, layer * width.compute, when) for when in ("forward", "backward")]
        rows += [
            ("reduce_scatter", inner, layer * width.gradient, "backward"),
            ("reduce_scatter", passes, root * width.gradient, "backward"),
        ]
    return [Exchange("dp", op, count, round(size), rank.layout.shards, when) for op, count, size, when in rows]
