"""Whole tensors from what ranks hold of them: parts along "tp" are put together, stages of "pp" are united by name."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from helpers.equivalence.observing import Observation
from helpers.launching import Run

PARTS = ("tp", "pp")  # axes along which ranks hold one copy of the model together; along all others they hold copies
TOLERANCE = 1e-4  # relative, of norms, for FP32: sums in another order differ by 1e-7 to 1e-5


@dataclass(frozen=True)
class Copy:
    """One whole tensor and the ranks that hold it, each all of it or its part."""

    ranks: tuple[int, ...]
    tensor: Any


class Side:
    """One of the two runs that are compared: what each rank saw, and all copies of each whole tensor.

    `tolerance`, and that `of_outputs`, is `TOLERANCE`, or for coarser dtypes 4 × their rounding: 4e-3 for FP16, 3e-2 for BF16.
    `held` has the "gradients", "parameters" and "outputs" by name, in the order in which ranks name them.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seen: list[Observation] = run.results
        self.tolerance = max(TOLERANCE, *(4 * seen.rounding[0] for seen in self.seen))
        self.of_outputs = max(self.tolerance, *(4 * seen.rounding[1] for seen in self.seen))
        self.cuts = {name: dim for seen in self.seen for name, dim in seen.cuts.items()}
        self.held = {what: self._joined(what) for what in ("gradients", "parameters", "outputs")}

    def __len__(self) -> int:
        return len(self.seen)

    @property
    def placed(self) -> bool:
        """Whether ranks said where they stand; if not, each has its own copy of the model."""
        return any(seen.place for seen in self.seen)

    def alike(self, *apart: str) -> list[list[int]]:
        """Ranks in groups whose places differ in the axes `apart` only."""
        groups: dict[Any, list[int]] = {}
        for rank, seen in enumerate(self.seen):
            place = seen.place or {"rank": rank}
            groups.setdefault(frozenset(item for item in place.items() if item[0] not in apart), []).append(rank)
        return list(groups.values())

    def models(self) -> list[list[int]]:
        """The ranks of each copy of the model."""
        return self.alike(*PARTS)

    def holders(self, what: str, name: str) -> list[list[int]]:
        """The ranks that hold each copy of a tensor; of one that is cut along "tp" in order of their parts."""
        ranks = [rank for rank, seen in enumerate(self.seen) if name in getattr(seen, what)]
        if name not in self.cuts:
            return [[rank] for rank in ranks]
        groups = [[rank for rank in group if rank in ranks] for group in self.alike("tp")]
        return [sorted(group, key=lambda rank: self.seen[rank].place["tp"]) for group in groups if group]

    def _joined(self, what: str) -> dict[str, list[Copy]]:
        import torch

        found: dict[str, list[Copy]] = {}
        for name in dict.fromkeys(name for seen in self.seen for name in getattr(seen, what)):
            found[name] = []
            for group in self.holders(what, name):
                tensors = [getattr(self.seen[rank], what)[name] for rank in group]
                whole = torch.cat(tensors, self.cuts[name]) if name in self.cuts else tensors[0]
                found[name].append(Copy(tuple(group), whole))
        return found

    def first(self, what: str) -> dict[str, Any]:
        """The first copy of each tensor."""
        return {name: copies[0].tensor for name, copies in self.held[what].items()}

    def noise(self, what: str) -> float:
        """The norm below which one is noise beside the others (a key's bias has no gradient but rounding): 1 % of the largest."""
        return 1e-2 * max((tensor.norm().item() for tensor in self.first(what).values()), default=0.0) + 1e-30

    def samples(self, rank: int) -> tuple[Hashable, ...]:
        """What the copy of the model that this rank belongs to was trained on in the first epoch."""
        (model,) = (group for group in self.models() if rank in group)
        return next((samples for each in model if (samples := self.seen[each].epochs[0])), ())

    def rows(self, output: str) -> dict[Hashable, Any]:
        """The rows of an output by sample, where it has one for each."""
        found: dict[Hashable, Any] = {}
        for copy in self.held["outputs"][output]:
            samples = self.samples(copy.ranks[0])
            if copy.tensor.shape[:1] == (len(samples),):
                found.update(zip(samples, copy.tensor, strict=True))
        return found


def outputs(few: Side, many: Side) -> dict[str, list[tuple[Copy, Any]]]:
    """By name, each copy of an output on many ranks, and what it should be: where it has rows of its own samples, these."""
    import torch

    found: dict[str, list[tuple[Copy, Any]]] = {}
    for name, wanted in few.first("outputs").items():
        rows = few.rows(name)
        for copy in many.held["outputs"].get(name, ()):
            samples = many.samples(copy.ranks[0])
            own = samples and copy.tensor.shape[:1] != wanted.shape[:1] and rows.keys() >= set(samples)
            right = torch.stack([rows[sample] for sample in samples]) if own else wanted
            found.setdefault(name, []).append((copy, right))
    return found


def distance(a: Any, b: Any, least: float = 1e-30) -> float:
    """The norm of the difference over that of `b`, or of `least` where that is larger; infinite for other shapes or NaN."""
    if a.shape != b.shape:
        return float("inf")
    apart = (a - b).masked_fill(a == b, 0).norm().item() / max(b[b.isfinite()].norm().item(), least)
    return apart if apart == apart else float("inf")


def distances(few: Side, many: Side, what: str) -> dict[str, float]:
    """By name, how far the first copy on many ranks is from that on few."""
    seen, noise = many.first(what), few.noise(what)
    return {name: distance(seen[name], wanted, noise) for name, wanted in few.first(what).items() if name in seen}


def different(copies: Iterable[Copy], least: float) -> list[Copy]:
    """One copy of each value that occurs, to within `TOLERANCE` of its norm or of `least`."""
    found: list[Copy] = []
    for copy in copies:
        if all(distance(copy.tensor, other.tensor, least) > TOLERANCE for other in found):
            found.append(copy)
    return found
