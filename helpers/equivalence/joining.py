"""Whole tensors from what ranks hold of them: parts along "tp" are put together, stages of "pp" are united by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from helpers.equivalence.observing import Observation

PARTS = ("tp", "pp")  # axes along which ranks hold one copy of the model together; along all others they hold copies
TOLERANCE = 1e-4  # relative, of norms: FP32 sums in another order differ by 1e-7 to 1e-5


@dataclass(frozen=True)
class Copy:
    """One whole tensor and the ranks that hold it, each all of it or its part."""

    ranks: tuple[int, ...]
    tensor: Any


def distance(a: Any, b: Any, least: float = 1e-30) -> float:
    """The norm of the difference as a share of that of `b`, or of `least` where that is larger; infinite for other shapes."""
    scale = max(b.norm().item(), least)
    return (a - b).norm().item() / scale if a.shape == b.shape else float("inf")


def alike(observations: list[Observation], *apart: str) -> list[list[int]]:
    """Ranks in groups whose places differ in the axes `apart` only."""
    groups: dict[Any, list[int]] = {}
    for rank, seen in enumerate(observations):
        groups.setdefault(frozenset(item for item in seen.place.items() if item[0] not in apart), []).append(rank)
    return list(groups.values())


def model_copies(observations: list[Observation]) -> list[list[int]]:
    """The ranks of each copy of the model; without places, every rank has its own."""
    if not any(seen.place for seen in observations):
        return [[rank] for rank in range(len(observations))]
    return alike(observations, *PARTS)


def parts(observations: list[Observation], what: str, name: str) -> list[list[int]]:
    """Of a tensor cut along "tp": the holders of each copy, in order of their parts."""
    holds = [name in getattr(seen, what) for seen in observations]
    groups = [[rank for rank in group if holds[rank]] for group in alike(observations, "tp")]
    return [sorted(group, key=lambda rank: observations[rank].place["tp"]) for group in groups if group]


def joined(observations: list[Observation], what: str) -> dict[str, list[Copy]]:
    """All copies of each of the "gradients", "parameters" or "outputs", by name, in the order in which ranks name them."""
    found: dict[str, list[Copy]] = {}
    for name in dict.fromkeys(name for seen in observations for name in getattr(seen, what)):
        holders = [rank for rank, seen in enumerate(observations) if name in getattr(seen, what)]
        dim = observations[holders[0]].cuts.get(name)
        groups = [[rank] for rank in holders] if dim is None else parts(observations, what, name)
        found[name] = [
            Copy(tuple(group), _joined([getattr(observations[rank], what)[name] for rank in group], dim)) for group in groups
        ]
    return found


def outputs(few: list[Observation], many: list[Observation]) -> tuple[dict[str, Any], dict[str, list[Copy]]]:
    """Outputs on few ranks and on many. Where each copy of the model has rows of its own samples, they go in order of the ids."""
    reference = {name: copies[0].tensor for name, copies in joined(few, "outputs").items()}
    seen = joined(many, "outputs")
    for name, wanted in reference.items():
        rows = {seen[name][0].tensor.shape[:1]} if name in seen else set()
        if rows and wanted.ndim and rows != {wanted.shape[:1]}:
            before, after = _by_sample(few, joined(few, "outputs")[name]), _by_sample(many, seen[name])
            if before and after:
                reference[name], seen[name] = before[0].tensor, after
    return reference, seen


def _by_sample(observations: list[Observation], copies: list[Copy]) -> list[Copy]:
    """The rows of all samples, sorted by id, as often as a model's copy has them; empty where rows are not those of samples."""
    import torch

    groups = model_copies(observations)
    found = []
    for each in zip(*([copy for copy in copies if copy.ranks[0] in group] for group in groups), strict=False):
        ids = [next((s for rank in group if (s := observations[rank].epochs[0])), ()) for group in groups]
        flat: list[Any] = [sample for some in ids for sample in some]
        if [len(some) for some in ids] != [len(copy.tensor) for copy in each] or len(set(flat)) < len(flat):
            return []
        order = sorted(range(len(flat)), key=lambda row: flat[row])
        ranks = tuple(rank for copy in each for rank in copy.ranks)
        found.append(Copy(ranks, torch.cat([copy.tensor for copy in each])[order]))
    return found


def _joined(tensors: list[Any], dim: int | None) -> Any:
    import torch

    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim=dim or 0)


def least(held: dict[str, list[Copy]]) -> float:
    """The norm below which a gradient is noise beside the others (a key's bias has none but rounding): 1 % of the largest."""
    return 1e-2 * max((copies[0].tensor.norm().item() for copies in held.values()), default=0.0) + 1e-30


def different(copies: Iterable[Copy], least: float) -> list[Copy]:
    """One copy of each value that occurs, to within `TOLERANCE` of its norm or of `least`."""
    found: list[Copy] = []
    for copy in copies:
        if all(distance(copy.tensor, other.tensor, least) > TOLERANCE for other in found):
            found.append(copy)
    return found
