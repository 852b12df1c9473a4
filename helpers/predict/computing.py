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

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from helpers.predict.activations import end_bytes, saved_by_layer
from helpers.predict.architecture import Architecture, Parameter
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
    products = sum(
        2 * rank.tokens * n * k * times for n, k, times in _products(rank.shape, rank.shape.is_sparse(layer), rank.layout.tp)
    )
    return products + _attention_flops(rank)


def head_flops(rank: Rank) -> float:
    """Operations of the output matrix over a micro-batch on one rank."""
    return 2 * rank.tokens * rank.vocabulary * rank.shape.hidden


def rate_of(machines: Machines, part: str, flops: float) -> float:
    """FLOP/s measured for a part of so many operations: between two measured sizes on a line in the logarithm of size."""
    found = sorted((size, rate) for name, size, rate in machines.rates if name == part)
    found = found or sorted((size, rate) for _, size, rate in machines.rates)
    if flops <= found[0][0]:
        return found[0][1]
    for (low, slow), (high, fast) in itertools.pairwise(found):
        if flops <= high:
            return slow + (fast - slow) * math.log(flops / low) / math.log(high / low)
    return found[-1][1]


def layer_seconds(rank: Rank, layer: int, machines: Machines) -> Passes:
    """Seconds of one layer for one micro-batch, at the machine's full rates: `efficiency` is the caller's."""
    code, checkpointing, tokens = rank.code, rank.workload.checkpointing, rank.tokens
    core = _attention_flops(rank)
    eager = rank.workload.attention == "eager"
    if machines.rates:
        flops = layer_flops(rank, layer)
        forward = flops / rate_of(machines, "shard" if rank.layout.tp > 1 else "layer", flops)
        return Passes(forward, forward * (checkpointing == "full"), 2 * forward)
    products = [*_products(rank.shape, rank.shape.is_sparse(layer), rank.layout.tp)]
    forward = sum(_product(tokens, n, k, machines) * times for n, k, times in products)
    backward = sum((_product(tokens, k, n, machines) + _product(n, k, tokens, machines)) * times for n, k, times in products)
    attention = core / (machines.matmul_flops if eager else machines.attention_flops)
    streamed = tokens * saved_by_layer(rank, layer) / machines.memory_bandwidth
    once = forward + attention + _FORWARD * streamed
    if checkpointing == "full":
        again = once
    elif checkpointing == "selective":
        again = forward / 2 if code.saves_some_products else attention
    else:
        again = 0.0
    return Passes(once, again, backward + attention * (2 if eager else 2.5) + _BACKWARD * streamed)


def head_seconds(rank: Rank, machines: Machines) -> Passes:
    """Seconds of the output matrix, logits and loss on the last stage."""
    if not rank.last:
        return Passes()
    if machines.rates:
        flops = head_flops(rank)
        rate = rate_of(machines, "head", flops)
        return Passes(flops / rate, 0.0, 2 * flops / rate)
    width, hidden, tokens = rank.vocabulary, rank.shape.hidden, rank.tokens
    backward = _product(tokens, hidden, width, machines) + _product(width, hidden, tokens, machines)
    streamed = (end_bytes(rank) + tokens * width * rank.width.compute) / machines.memory_bandwidth
    return Passes(_product(tokens, width, hidden, machines) + _FORWARD * streamed, 0.0, backward + _BACKWARD * streamed)


def _attention_flops(rank: Rank) -> float:
    seen = rank.workload.sequence * (1 if rank.workload.attention == "eager" else 0.5)
    return 4 * rank.tokens * seen * rank.shape.query / rank.layout.tp


@lru_cache(maxsize=1024)
def _products(shape: Architecture, sparse: bool, tp: int) -> tuple[tuple[float, float, float], ...]:
    """Outputs, inputs and how often of each matrix product of a layer on one rank; an expert counts by the tokens it sees."""
    layer = next((each for each in range(shape.layers) if shape.is_sparse(each) is sparse), 0)
    found = []
    for each in shape.layer_parameters(layer):
        if each.linear:
            found.append(_shape(shape, each, tp))
    return tuple(found)


def _shape(shape: Architecture, each: Parameter, tp: int) -> tuple[float, float, float]:
    hidden, heads = shape.hidden, min(tp, shape.kv_heads)
    if each.name.startswith("experts"):
        width = shape.expert_intermediate / tp
        rows = (width * (1 + shape.gated), hidden) if each.name.endswith("up") else (hidden, width)
        return (*rows, float(shape.experts_per_token))
    if each.split == "row":
        return hidden, each.elements / hidden / tp, 1.0
    return each.elements / hidden / (heads if each.split == "kv" else tp if each.split == "column" else 1), hidden, 1.0


def _product(rows: float, columns: float, depth: float, machines: Machines) -> float:
    """Seconds of one matrix product of rows × depth by depth × columns."""
    seconds = 2 * rows * columns * depth / machines.matmul_flops
    cores = machines.gpu.multiprocessors
    if not cores:
        return seconds
    tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    used = rows * columns / (_TILE[0] * _TILE[1] * cores)
    return seconds * math.ceil(tiles / cores) / used
