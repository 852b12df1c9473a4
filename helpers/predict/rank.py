"""One rank of a layout: which layers and weights it holds. What `memory` and `step_traffic` both start from."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from helpers.predict.architecture import Architecture, Parameter, architecture
from helpers.predict.layout import IMPLEMENTATIONS, PRECISIONS, Implementation, Layout, Precision, Workload

__all__ = ["Rank", "rank_of", "stages"]


@dataclass(frozen=True)
class Rank:
    """A rank of pipeline stage `stage`, which runs `layers`. Shares are of 1; `tokens` those of one micro-batch."""

    shape: Architecture
    workload: Workload
    layout: Layout
    stage: int
    layers: range

    @property
    def code(self) -> Implementation:
        return IMPLEMENTATIONS[self.workload.implementation]

    @property
    def width(self) -> Precision:
        return PRECISIONS[self.workload.precision]

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream: FP32 under autocast."""
        return 4 if self.workload.precision == "autocast" else self.width.compute

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def tokens(self) -> float:
        return self.workload.batch * self.workload.sequence / self.layout.cp

    @property
    def unsplit(self) -> float:
        """The rank's share of tensors that are not split over heads or MLP columns."""
        return 1 / self.layout.tp if self.layout.sequence_parallel else 1

    @property
    def vocabulary(self) -> float:
        """The rank's share of the vocabulary, in entries."""
        return self.shape.vocabulary / (self.layout.tp if self.code.vocabulary_parallel else 1)

    def elements(self, found: list[Parameter]) -> list[float]:
        """How many elements of each weight the rank holds."""
        tp, vocabulary = self.layout.tp, self.shape.vocabulary / self.vocabulary
        parts = {"none": 1, "column": tp, "row": tp, "kv": min(tp, self.shape.kv_heads), "vocabulary": vocabulary}
        return [each.elements / parts[each.split] for each in found]

    @property
    def ends(self) -> list[Parameter]:
        """The weights outside the layers; a tied output matrix on a stage of its own is a copy."""
        head = self.shape.head_parameters(copy_of_tied=self.layout.pp > 1) if self.last else []
        return [*(self.shape.embedding_parameters() if self.first else []), *head]

    @cached_property
    def held(self) -> list[Parameter]:
        """All weights that the rank's stage holds."""
        return [each for layer in self.layers for each in self.shape.layer_parameters(layer)] + self.ends


def rank_of(config: Any, workload: Workload, layout: Layout | None, stage: int = 0) -> Rank:
    """Return the rank of one stage. Raises ValueError where heads or layers cannot be divided as `layout` says."""
    shape, layout = architecture(config), layout or Layout()
    if shape.heads % layout.tp:
        raise ValueError(f"{shape.heads} attention heads cannot be divided among {layout.tp} tensor-parallel ranks")
    if shape.kv_heads % layout.tp and layout.tp % shape.kv_heads:
        raise ValueError(f"{shape.kv_heads} key-value heads and tp={layout.tp}: one must be a multiple of the other")
    cut = stages(shape, layout.pp, by_cost=IMPLEMENTATIONS[workload.implementation].stages_by_cost)
    return Rank(shape, workload, layout, stage, cut[stage])


def stages(config: Any, pp: int, *, by_cost: bool = False) -> list[range]:
    """Return each pipeline stage's layers: equal counts, the first stages taking what is over.

    `by_cost` cuts where the running sum of multiplications passes each stage's share, the output matrix counted as nanotron does.
    """
    shape = architecture(config)
    if pp > shape.layers:
        raise ValueError(f"{pp} pipeline stages for {shape.layers} layers: each stage needs at least one layer")
    bounds = [stage * (shape.layers // pp) + min(stage, shape.layers % pp) for stage in range(pp + 1)]
    if by_cost:
        layer = 4 * shape.query * shape.hidden + 3 * shape.intermediate * shape.hidden
        share = (shape.layers * layer + shape.vocabulary * shape.hidden) / pp
        bounds = [min(math.ceil(stage * share / layer), shape.layers) for stage in range(pp)] + [shape.layers]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]
