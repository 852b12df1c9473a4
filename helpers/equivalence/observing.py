"""`observe`: what one rank takes down of its training step, to be compared with other numbers of ranks."""

import fnmatch
import hashlib
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helpers.equivalence.naming import Rename, renamed
from helpers.equivalence.origins import Origin, Watch


@dataclass(frozen=True, repr=False)
class Observation:
    """What one rank saw of one step. Tensors are on the CPU in FP32, whole unless `cuts` names them."""

    loss: float | None
    tokens: float | None
    gradients: dict[str, Any]
    parameters: dict[str, Any]
    epochs: tuple[tuple[Hashable, ...], ...]
    draws: tuple[float, ...] | None
    outputs: dict[str, Any]  # a single tensor has the name ""
    place: dict[str, int]  # this rank's coordinates: {"dp": 0, "tp": 1}
    cuts: dict[str, int]  # name -> dim of which this rank holds its part
    dealt: dict[str, tuple[int, int]]  # of gathered DTensors: name -> (dim, parts)
    random: dict[str, str]  # fingerprints: "default", "same", "own"
    drops: bool  # whether dropout is active
    sampled: tuple[int, ...] | None
    rates: tuple[float, ...] | None
    planned: tuple[float, ...] | None
    origin: Origin | None
    steps: int | None  # of the optimiser; None where nobody said or counted them
    rounding: tuple[float, float]  # the least that is added to 1, by dtype: of parameters and gradients, of outputs
    ended: float  # when `observe` was called, in seconds of `time.perf_counter`

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.4g}, "
        return f"Observation({loss}{len(self.gradients)} gradients)"


def observe(
    model: Any,
    *,
    loss: Any = None,
    tokens: float | None = None,
    samples: Any = None,
    draws: Any = None,
    outputs: Any = None,
    mesh: Any = None,
    shards: Mapping[str, int] | None = None,
    rename: Rename | None = None,
    random: Mapping[str, Any] | None = None,
    sampled: Any = None,
    rates: Sequence[float] | None = None,
    planned: Sequence[float] | None = None,
    nan: Watch | None = None,
    steps: int | None = None,
) -> Observation:
    """Take down what this rank's step did; call it after `optimizer.step()`, before gradients are cleared.

    Arguments:
        model: the module, wrapped or not; of a pipeline this rank's stage.
        loss: this rank's loss, the mean over its own tokens (or samples). In a pipeline the last stage's; None on the others.
        tokens: how many tokens (or samples) that mean is over; needed where ranks have unequal numbers of them.
        samples: ids of the samples this rank trained on, in order, a sequence or tensor; a list of lists for several epochs.
        draws: random numbers this rank used for augmentation, if any.
        outputs: a tensor (of any shape) that must be the same on every number of ranks, or several by name, such as those of
            `layers`. None on ranks that have none.
        mesh: where this rank stands if ranks hold parts of the model: a `DeviceMesh` with named axes, or coordinates such as
            {"dp": 0, "tp": 1}. Axes are "tp", "pp" and, for copies of the model, any other name.
        shards: which plain tensors (parameters, outputs) are this rank's part along the axis "tp", by patterns of names:
            {"*.up.weight": 0}: rows of the whole, in order of the ranks. DTensors are gathered without being named here.
        rename: how names begin in this stage, and how in the whole model: {"layers.0.": "layers.2."}.
        random: generators, masks or numbers that ranks of one TP group must have alike ("same": dropout after an all-reduce)
            or each for itself ("own": dropout on sharded activations). The default generator's state is taken down anyway.
        sampled: token ids that were generated; ranks with the same place but for "tp" and "pp" must have the same.
        rates: the learning rate of each optimiser step; planned: what they should have been.
        nan: what `with first_nan(model) as nan` gave.
        steps: how many optimiser steps the job made, which exchanges of gradients are counted against. Not needed where there are
            `rates`, or where torch's optimisers step and `compare` counts.

    Raises ValueError for `shards` without an axis "tp", for a pattern that matches nothing, for unknown keys of `random`, and for
    two parameters that `rename` gives one name though they differ in shape.
    """
    import torch
    from torch.distributed.tensor import DTensor

    ended, place, named = time.perf_counter(), _coordinates(mesh), _named(model, rename)
    given = outputs if isinstance(outputs, Mapping) else {"": outputs}
    seen = {renamed(name, rename): tensor for name, tensor in given.items() if tensor is not None}
    if shards and "tp" not in place:
        raise ValueError(
            f'shards {dict(shards)} needs to know which part this rank has: mesh={{"tp": rank}} or a mesh with axis "tp"'
        )
    cuts = {}
    for pattern, dim in (shards or {}).items():
        matches = fnmatch.filter([*named, *seen], pattern)
        if not matches:
            raise ValueError(f"shards: no parameter or output matches {pattern!r}; there are {', '.join([*named][:5])} …")
        cuts.update({name: dim for name in matches if not isinstance(named.get(name), DTensor)})
    if unknown := set(random or ()) - {"same", "own"}:
        raise ValueError(f'random has {", ".join(sorted(unknown))}; it knows "same" and "own"')
    states = [each for p in named.values() for each in (p, p.grad) if each is not None]
    ids = [] if samples is None else samples.tolist() if hasattr(samples, "tolist") else list(samples)
    epochs = ids if ids and isinstance(ids[0], (list, tuple)) else [ids]
    return Observation(
        loss=_plain(loss),
        tokens=tokens,
        gradients={name: whole(p.grad) for name, p in named.items() if p.grad is not None},
        parameters={name: whole(p) for name, p in named.items()},
        epochs=tuple(_values(epoch) for epoch in epochs),
        draws=None if draws is None else _values(draws),
        outputs={name: whole(tensor) for name, tensor in seen.items()},
        place=place,
        cuts=cuts,
        dealt={name: cut for name, p in named.items() if isinstance(p, DTensor) and (cut := _dealt(p))},
        random={kind: fingerprint(each) for kind, each in {"default": torch.get_rng_state(), **(random or {})}.items()},
        drops=any(type(m).__name__.endswith("Dropout") and m.training and getattr(m, "p", 0) > 0 for m in model.modules()),
        sampled=None if sampled is None else _values(sampled),
        rates=None if rates is None else _values(rates),
        planned=None if planned is None else _values(planned),
        origin=nan.found if nan else None,
        steps=len(rates) if steps is None and rates is not None else steps,
        rounding=(_rounding(states), _rounding(seen.values())),
        ended=ended,
    )


def fingerprint(value: Any) -> str:
    """Eight letters that two generators in the same state, or two equal tensors or lists of numbers, share."""
    import torch

    state = value.get_state() if isinstance(value, torch.Generator) else torch.as_tensor(value)
    state = state.detach().cpu().contiguous()
    return hashlib.sha256(state.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def whole(tensor: Any) -> Any:
    """The gathered tensor, on the CPU, FP32, on its own."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().cpu().clone()


def _coordinates(mesh: Any) -> dict[str, int]:
    if mesh is None or isinstance(mesh, Mapping):
        return {axis: int(place) for axis, place in (mesh or {}).items()}
    if not mesh.mesh_dim_names:
        raise ValueError('the axes of this mesh have no names: init_device_mesh(…, mesh_dim_names=("dp", "tp"))')
    return dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))


def _named(model: Any, rename: Rename | None) -> dict[str, Any]:
    """Parameters by their names in the whole model; of two with one name on one rank (a tied matrix), the first."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        first = found.setdefault(renamed(name, rename), parameter)
        if first.shape != parameter.shape:
            raise ValueError(f"rename gives {name} {tuple(parameter.shape)} a name that {tuple(first.shape)} has already")
    return found


def _dealt(parameter: Any) -> tuple[int, int] | None:
    """(dim, parts) of a DTensor that one axis of its mesh splits."""
    split = [(each.dim, parameter.device_mesh.size(axis)) for axis, each in enumerate(parameter.placements) if each.is_shard()]
    return split[0] if len(split) == 1 else None


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _values(values: Any) -> tuple[Any, ...]:
    """The values of a list or tensor, flat, as plain numbers or texts."""
    return tuple(map(_plain, values.flatten() if hasattr(values, "flatten") else values))


def _rounding(tensors: Iterable[Any]) -> float:
    import torch

    return max((torch.finfo(each.dtype).eps for each in tensors if each.is_floating_point()), default=0.0)
