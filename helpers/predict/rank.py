"""One rank of a layout: which layers and weights it holds. What `memory` and `step_traffic` both start from."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from helpers.predict.architecture import Architecture, Parameter, architecture
from helpers.predict.layout import IMPLEMENTATIONS, PRECISIONS, Implementation, Layout, Precision, Workload

__all__ = ["Rank", "rank_of", "stages", "undivided"]


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
    def state(self) -> float:
        """Bytes of optimiser state for each parameter; 8-bit moments have a scale per block of 256."""
        moments = {"adamw": 2 * self.width.moment, "adamw8bit": 2 * (1 + 4 / 256), "sgd": 0, "momentum": 4}
        return moments[self.workload.optimizer]

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
    def parts(self) -> dict[str, float]:
        """Into how many parts tensor parallelism cuts a weight, by `Parameter.split`."""
        tp = self.layout.tp
        vocabulary = tp if self.code.vocabulary_parallel else 1
        return {"none": 1, "column": tp, "row": tp, "kv": min(tp, self.shape.kv_heads), "vocabulary": vocabulary}

    @property
    def vocabulary(self) -> float:
        """The rank's share of the vocabulary, in entries."""
        return self.shape.vocabulary / self.parts["vocabulary"]

    def elements(self, found: list[Parameter]) -> float:
        """How many elements of these weights the rank holds."""
        parts = self.parts
        return sum(each.elements / parts[each.split] for each in found)

    def stored(self, found: list[Parameter]) -> float:
        """Bytes of these weights on the rank in inference: an 8-bit format is for linear layers without the output matrix."""
        parts, width = self.parts, self.width.weight
        wide = max(width, 2)
        return sum(
            (width if each.inputs and each.split != "vocabulary" else wide) * each.elements / parts[each.split] for each in found
        )

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
    """Return the rank of one stage. Raises ValueError for another stage, or heads or layers that `layout` cannot divide."""
    shape, layout = architecture(config), layout or Layout()
    if not 0 <= stage < layout.pp:
        raise ValueError(f"stage {stage}: a pipeline of {layout.pp} has stages 0 to {layout.pp - 1}")
    if shape.heads % layout.tp:
        raise ValueError(f"{shape.heads} attention heads cannot be divided among {layout.tp} tensor-parallel ranks")
    if shape.kv_heads % layout.tp and layout.tp % shape.kv_heads:
        raise ValueError(f"{shape.kv_heads} key-value heads and tp={layout.tp}: one must be a multiple of the other")
    cut = stages(shape, layout.pp, by_cost=IMPLEMENTATIONS[workload.implementation].stages_by_cost)
    return Rank(shape, workload, layout, stage, cut[stage])


def undivided(config: Any, tp: int, implementation: str = "transformers") -> dict[str, int]:
    """Return what `tp` tensor-parallel ranks would have to cut into unequal parts, by name, with its size; empty: all divides.

    transformers' plans cut the matrix of each key-value head; other codes can also repeat heads. vLLM pads the vocabulary to 64.
    """
    shape, vocabulary = architecture(config), 0
    widths = [shape.intermediate] * any(not shape.is_sparse(layer) for layer in range(shape.layers))
    widths += [shape.expert_intermediate, shape.shared_intermediate]
    if IMPLEMENTATIONS[implementation].vocabulary_parallel:
        vocabulary = 64 * math.ceil(shape.vocabulary / 64) if implementation == "vllm" else shape.vocabulary
    repeated = implementation != "transformers" and tp % shape.kv_heads == 0
    sizes = {
        "attention heads": shape.heads,
        "key-value heads": 0 if repeated else shape.kv_heads,
        "MLP columns": next((width for width in widths if width % tp), 0),
        "vocabulary entries": vocabulary,
    }
    return {what: size for what, size in sizes.items() if size % tp}


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
