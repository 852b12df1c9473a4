"""What each rank holds under a plan, and putting a plan into effect on a model in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helpers.shard_plan.anatomy import STYLES, WHOLE, Anatomy, Plan, generic, refuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shard:
    """One parameter: its whole shape, its style in the plan (None: whole on every rank), and by rank the shape held."""

    name: str
    shape: tuple[int, ...]
    style: str | None
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int


@dataclass(frozen=True)
class Shards(Mapping[str, Shard]):
    """What the ranks of a plan hold, by the parameter's name; a tied matrix counts once."""

    rows: tuple[Shard, ...]
    tp: int

    @property
    def parameters(self) -> tuple[int, ...]:
        """How many parameters each rank holds."""
        return tuple(sum(math.prod(row.shapes[rank]) for row in self.rows) for rank in range(self.tp))

    @property
    def bytes(self) -> tuple[int, ...]:
        """Bytes of the parameters that each rank holds."""
        return tuple(sum(math.prod(row.shapes[rank]) * row.element_bytes for row in self.rows) for rank in range(self.tp))

    @property
    def whole(self) -> int:
        """Parameters of the unsharded model."""
        return sum(math.prod(row.shape) for row in self.rows)

    def __getitem__(self, name: str) -> Shard:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no parameter {name!r}; names are those of named_parameters(), such as {self.rows[0].name!r}")

    def __iter__(self) -> Iterator[str]:
        return (row.name for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """One line for each kind of parameter, the layers together, and the totals."""
        lines = Counter((generic(row.name), row.style or "whole", row.shape, row.shapes[0]) for row in self.rows)
        width = max(len(key) for key, *_ in lines)
        rows = [
            f"{key:<{width}}  {count:>3} × {_size(shape):<12} {style:<22} rank 0 holds {_size(held)}"
            for (key, style, shape, held), count in lines.items()
        ]
        totals = [
            f"rank {rank}: {count:,} of {self.whole:,} parameters, {size:,} B"
            for rank, (count, size) in enumerate(zip(self.parameters, self.bytes, strict=True))
        ]
        return "\n".join(rows + totals)


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def shards(config_or_model: Any, plan: Plan, tp: int) -> Shards:
    """Return what each of `tp` ranks will hold of every parameter. Nothing is allocated for a configuration.

    A dimension that does not divide is cut as torch.chunk cuts it: equal parts, the last ranks getting less or nothing.
    """
    refuse(plan, tp)
    anatomy = Anatomy(config_or_model)
    rows = []
    for name, parameter in anatomy.model.named_parameters():
        part, shape = anatomy.parts[generic(name.rpartition(".")[0])], tuple(parameter.shape)
        style = plan.get(generic(name), plan.get(part.key))
        dim = _split_dim(style, part.kind, name, len(shape))
        shapes = tuple(_cut(shape, dim, tp, rank) for rank in range(tp))
        rows.append(Shard(name, shape, style if dim is not None else None, shapes, parameter.element_size()))
    return Shards(tuple(rows), tp)


def _split_dim(style: str | None, kind: str, name: str, dims: int) -> int | None:
    """The dimension of a parameter that a style splits, as transformers/distributed/tensor_parallel.py does; None: whole."""
    how = {"packed_rowwise": "rows", "grouped_gemm": "experts"}.get(style or "") or STYLES.get(style or "", WHOLE).split
    if how in ("columns", "packed"):
        return 1 if kind == "embedding" else max(dims - 2, 0)
    if how == "rows":
        return 0 if kind == "embedding" else None if dims == 1 and name.endswith("bias") else dims - 1
    return 0 if how == "experts" else None


def _cut(shape: tuple[int, ...], dim: int | None, tp: int, rank: int) -> tuple[int, ...]:
    if dim is None:
        return shape
    most = -(-shape[dim] // tp)
    return (*shape[:dim], max(0, min(most, shape[dim] - rank * most)), *shape[dim + 1 :])


def apply(model: PreTrainedModel, plan: Plan, mesh: DeviceMesh) -> PreTrainedModel:
    """Split a model in memory over the one-dimensional `mesh` as `plan` says and return it. No collective is issued.

    The plan is taken as it is: unlike `from_pretrained`, nothing is merged with the model's own plan and keys that match nothing
    are passed over, so that a broken plan breaks as it would when split by hand. The styles are those of transformers. Every rank
    must hold the same whole weights. Tied weights stay one tensor, split as the embedding is. Raises ValueError for a style that
    transformers does not have, and where it cannot gather what does not divide.
    """
    from transformers.integrations.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, dict(plan))
    model.tie_weights(recompute_mapping=False)
    return model
