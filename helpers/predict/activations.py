"""What the forward pass leaves for backward, in bytes, on one rank.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023 (fused kernels,
tensor and sequence parallelism, selective and full checkpointing; its 34·s·b·h + 5·a·s²·b a layer is `layer_bytes` for GPT with
dropout); Dao et al., "FlashAttention", NeurIPS 2022 (attention in one kernel keeps q, k, v, its output and one FP32 number a
row and head instead of scores). For transformers: derived from its modelling files, tensor by tensor, and equal to what
autograd's saved_tensors_hooks see (tests/test_predict.py).

Known misses: dropout masks are one byte an element as on a GPU; experts count as evenly visited and their autocast copies are
left out; partial rotary embedding (phi) keeps a little more; GPT-2's eager softmax stays in 16 bits, this counts FP32.
"""

from typing import Any

from helpers.predict.layout import Layout, Workload
from helpers.predict.rank import Rank, rank_of

__all__ = ["checkpoint_bytes", "end_bytes", "layer_bytes", "saved_by_layer"]

_KEPT = {"relu": 1, "gelu_new": 5}  # tensors of the MLP's width without a gate: relu keeps its result, tanh GELU in Python 5


def layer_bytes(config: Any, workload: Workload, layout: Layout | None = None, *, layer: int = 0) -> float:
    """Return the bytes that one token of one layer leaves for backward on one rank, without checkpointing."""
    return saved_by_layer(rank_of(config, workload, layout), layer)


def saved_by_layer(rank: Rank, layer: int) -> float:
    """Bytes a token of what one layer saves."""
    shape, code, compute, tp = rank.shape, rank.code, rank.width.compute, rank.layout.tp
    sparse = shape.is_sparse(layer)
    readers = [1 if shape.fused_qkv else 3, 2 if shape.gated and not sparse else 1]  # linear layers that read each norm's output
    readers = [sum(readers)] if shape.norms == 1 else readers
    copies = sum(readers) if rank.workload.precision == "autocast" else len(readers)  # autocast casts it for each anew
    found = rank.unsplit * (shape.norms * _norm(rank) + copies * compute * shape.hidden + 2 * shape.hidden * shape.dropout)
    if rank.layout.sequence_parallel and code.keeps_gathered:
        found += 2 * compute * shape.hidden * (1 - 1 / tp)
    if shape.qk_norm:
        wide = shape.query + shape.key
        found += ((0 if code.fused else 4) * wide + compute * wide + 4 * (shape.heads + shape.kv_heads)) / tp
    expanded = code.expands_keys or (rank.workload.attention == "eager" and rank.workload.checkpointing != "selective")
    keys = shape.query if expanded else shape.key
    found += compute * 2 * (shape.query / tp + keys / min(tp, keys // shape.head_dim))
    if rank.workload.attention == "sdpa":
        found += 4 * shape.heads / tp
    elif rank.workload.checkpointing != "selective":
        softmax = compute + (1 + compute) * shape.dropout if code.fused else 4 + (compute if compute < 4 else 0)
        found += softmax * shape.heads * rank.workload.sequence / rank.layout.cp / tp
    if code.copies_attention_output and rank.workload.batch > 1:
        found += compute * shape.query / tp
    kept = 4 if shape.gated else _KEPT.get(shape.activation, 2)  # gate, its activation, up, product; or input and result
    if not sparse:
        return found + kept * compute * shape.intermediate / tp
    routed = shape.experts_per_token * (kept * shape.expert_intermediate + 2 * shape.hidden)  # input and output of each expert
    choice = 4 * shape.experts + 40 * shape.experts_per_token  # the router's probabilities, indices and weights
    return found + (compute * (routed + kept * shape.shared_intermediate) + choice) / tp


def _norm(rank: Rank) -> float:
    """A norm's input and statistics; in Python also the FP32 input, so that normed copy and reciprocal root stay."""
    shape, residual = rank.shape, rank.residual
    if rank.code.fused or shape.norm == "layer":
        return residual * shape.hidden + (2 * residual if shape.norm == "layer" else 4)
    return (4 + residual) * shape.hidden + 4


def rotary_tables(rank: Rank) -> float:
    """Bytes of the cosines and sines that a layer makes for itself in FP32, whatever the batch."""
    return 8 * rank.shape.head_dim * rank.workload.sequence * rank.shape.own_rotary_tables


def checkpoint_bytes(rank: Rank) -> float:
    """Bytes a token that a checkpointed layer keeps: its input; torchtitan's selective kind also every second product.

    Of the products q, k, v, o, gate, up, down those are q, v, gate and down; attention's output is kept too.
    """
    shape, found = rank.shape, rank.residual * rank.shape.hidden * rank.unsplit
    if rank.workload.checkpointing == "full":
        return found
    split = 2 * shape.query + shape.key + shape.intermediate
    return found + rank.width.compute * (split / rank.layout.tp + shape.hidden * rank.unsplit)


def end_bytes(rank: Rank) -> float:
    """Bytes that a micro-batch leaves outside the layers: token ids, last norm, log-softmax, labels, the output handed on."""
    shape, tokens = rank.shape, rank.tokens
    found = tokens * (8 + _norm(rank) * shape.embedding_norm) if rank.first else 0.0
    if not rank.last:
        return found + tokens * rank.residual * shape.hidden * rank.unsplit
    found += tokens * rank.unsplit * (_norm(rank) + rank.width.compute * shape.hidden)
    if not (shape.own_rotary_tables or shape.positions or shape.norm == "layer"):
        found += 2 * rank.residual * shape.head_dim * rank.workload.sequence
    return found + tokens * (4 * rank.vocabulary + 8) + 4
