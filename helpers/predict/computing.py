"""Seconds that one rank computes for one micro-batch: matrix products, attention, and what streams through memory between.

Sources
* operations: 2 a weight and token forward, twice that backward (Kaplan et al., "Scaling Laws for Neural Language Models", 2020);
  attention 4·s·width a token, a causal mask halves it in one-kernel attention, whose backward pass is 2.5 times the forward one
  (Dao, "FlashAttention-2", 2023); eager attention computes all scores.
* a matrix product on a GPU runs in waves of 256 × 128 tiles over its multiprocessors; the last wave is rarely full (NVIDIA,
  "Matrix Multiplication Background User's Guide", 2023).
* between products: what `memory` says is saved was written and read once; backward reads it, writes and reads its gradient.
* a measured machine (`Machines.rates`): everything in a layer at the rate measured for layers of that size.

Known misses: other tile sizes and split reductions that libraries choose for small products; torch.compile's fusions; power
limits; experts count as evenly loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from helpers.predict.activations import end_bytes, saved_by_layer
from helpers.predict.machines import Machines
from helpers.predict.rank import Rank

__all__ = ["Passes", "head_flops", "head_seconds", "layer_flops", "layer_seconds", "rate_of"]

_TILE = (256, 128)
_FORWARD, _BACKWARD = 2, 3  # times that what is saved passes through memory


@dataclass(frozen=True)
class Passes:
    """Seconds of the forward pass, of what checkpointing runs again, and of the backward pass."""

    forward: float = 0.0
    again: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.again + other.again, self.backward + other.backward)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.forward * times, self.again * times, self.backward * times)

    @property
    def total(self) -> float:
        return self.forward + self.again + self.backward


def layer_flops(rank: Rank, layer: int) -> float:
    """Operations of one layer's forward pass over a micro-batch on one rank, attention included."""
    products = sum(2 * rank.tokens * n * k * times for n, k, times in _products(rank, layer))
    return products + _attention_flops(rank)


def head_flops(rank: Rank) -> float:
    """Operations of the output matrix over a micro-batch on one rank."""
    return 2 * rank.tokens * rank.vocabulary * rank.shape.hidden


def rate_of(machines: Machines, part: str, flops: float) -> float:
    """FLOP/s measured for a part of so many operations: between two measured sizes on a line in the logarithm of size."""
    import numpy as np

    sizes, rates = zip(*sorted((size, rate) for name, size, rate in machines.rates if name == part), strict=True)
    return float(np.interp(math.log(flops), np.log(sizes), rates))


def layer_seconds(rank: Rank, layer: int, machines: Machines) -> Passes:
    """Seconds of one layer for one micro-batch, at the machine's full rates: `efficiency` is the caller's."""
    checkpointing, eager = rank.workload.checkpointing, rank.workload.attention == "eager"
    if machines.rates:
        part = "shard" if rank.layout.tp > 1 else "layer"
        return _measured(machines, part, layer_flops(rank, layer), again=checkpointing == "full")
    forward, backward = _matrices(_products(rank, layer), rank.tokens, machines)
    attention = _attention_flops(rank) / (machines.matmul_flops if eager else machines.attention_flops)
    streamed = rank.tokens * saved_by_layer(rank, layer) / machines.memory_bandwidth
    once = forward + attention + _FORWARD * streamed
    selective = forward / 2 if rank.code.saves_some_products else attention
    again = {"none": 0.0, "selective": selective, "full": once}[checkpointing]
    return Passes(once, again, backward + attention * (2 if eager else 2.5) + _BACKWARD * streamed)


def head_seconds(rank: Rank, machines: Machines) -> Passes:
    """Seconds of the output matrix, logits and loss on the last stage."""
    if not rank.last:
        return Passes()
    if machines.rates:
        return _measured(machines, "head", head_flops(rank))
    forward, backward = _matrices([(rank.vocabulary, rank.shape.hidden, 1)], rank.tokens, machines)
    streamed = (end_bytes(rank) + rank.tokens * rank.vocabulary * rank.width.compute) / machines.memory_bandwidth
    return Passes(forward + _FORWARD * streamed, 0.0, backward + _BACKWARD * streamed)


def _measured(machines: Machines, part: str, flops: float, again: bool = False) -> Passes:
    forward = flops / rate_of(machines, part, flops)
    return Passes(forward, forward * again, 2 * forward)


def _attention_flops(rank: Rank) -> float:
    seen = rank.workload.sequence * (1 if rank.workload.attention == "eager" else 0.5)
    return 4 * rank.tokens * seen * rank.shape.query / rank.layout.tp


def _products(rank: Rank, layer: int) -> list[tuple[float, float, int]]:
    """Outputs, inputs and how often of each matrix product of a layer on one rank; an expert counts by the tokens it sees."""
    found = []
    for each in rank.shape.layer_parameters(layer):
        if each.inputs:
            outputs, parts = each.elements / each.inputs / each.experts, rank.parts[each.split]
            times = rank.shape.experts_per_token if each.experts > 1 else 1
            rows = each.split == "row"
            found.append((outputs, each.inputs / parts, times) if rows else (outputs / parts, each.inputs, times))
    return found


def _matrices(products: list[tuple[float, float, int]], tokens: float, machines: Machines) -> tuple[float, float]:
    """Seconds of matrix products forward, and backward for the gradients of inputs and weights."""
    forward = backward = 0.0
    for outputs, inputs, times in products:
        forward += times * _product(tokens, outputs, inputs, machines)
        backward += times * (_product(tokens, inputs, outputs, machines) + _product(outputs, inputs, tokens, machines))
    return forward, backward


def _product(rows: float, columns: float, depth: float, machines: Machines) -> float:
    """Seconds of one matrix product of rows × depth by depth × columns."""
    seconds = 2 * rows * columns * depth / machines.matmul_flops
    cores = machines.gpu.multiprocessors
    if not cores:
        return seconds
    tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    used = rows * columns / (_TILE[0] * _TILE[1] * cores)
    return seconds * math.ceil(tiles / cores) / used
