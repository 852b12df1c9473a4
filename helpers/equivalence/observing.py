"""`observe`: what one rank takes down of its training step, to be compared with other numbers of ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Observation:
    """What one rank saw of one step. Tensors are whole (sharded ones gathered), on the CPU, FP32."""

    loss: float | None
    tokens: float | None
    gradients: dict[str, Any]
    parameters: dict[str, Any]
    epochs: tuple[tuple[Hashable, ...], ...]
    draws: tuple[float, ...] | None
    outputs: Any


def observe(
    model: Any,
    *,
    loss: Any = None,
    tokens: float | None = None,
    samples: Sequence[Any] | None = None,
    draws: Any = None,
    outputs: Any = None,
) -> Observation:
    """Take down what this rank's step did; call it after `optimizer.step()`, before gradients are cleared.

    Arguments:
        model: the module, wrapped or not.
        loss: this rank's loss, the mean over its own tokens (or samples).
        tokens: how many tokens (or samples) that mean is over; needed where ranks have unequal numbers of them.
        samples: ids of the samples this rank trained on, in order; a list of such lists for several epochs.
        draws: random numbers this rank used for augmentation, if any.
        outputs: a tensor (of any shape) that must be the same on every number of ranks.
    """
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    epochs = samples if samples and isinstance(samples[0], (list, tuple)) else [samples or ()]
    return Observation(
        None if loss is None else float(loss.detach() if hasattr(loss, "detach") else loss),
        tokens,
        {name: _whole(p.grad) for name, p in named.items() if p.grad is not None},
        {name: _whole(p) for name, p in named.items()},
        tuple(tuple(_plain(sample) for sample in epoch) for epoch in epochs),
        None if draws is None else tuple(float(x) for x in _plain_list(draws)),
        None if outputs is None else _whole(outputs),
    )


def _whole(tensor: Any) -> Any:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().cpu().clone()


def _plain(value: Any) -> Hashable:
    return value.item() if hasattr(value, "item") else value


def _plain_list(values: Any) -> list[Any]:
    return values.flatten().tolist() if hasattr(values, "flatten") else list(values)
