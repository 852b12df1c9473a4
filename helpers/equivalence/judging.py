"""What a difference between few ranks and many means: each function looks at one quantity and names the faults that it shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from helpers.equivalence.observing import Observation
from helpers.launching import Run

TOLERANCE = 1e-4  # relative, of norms: FP32 sums in another order differ by 1e-7 to 1e-5
FACTOR_TOLERANCE = 1e-3  # relative: how close a ratio is to an exact factor


@dataclass(frozen=True)
class Finding:
    """One silent fault: what it is, what shows it, and the mend."""

    fault: str
    evidence: str
    mend: str


def _distance(a: Any, b: Any) -> float:
    scale = max(b.norm().item(), 1e-30)
    return (a - b).norm().item() / scale if a.shape == b.shape else math.inf


def of_samples(few: list[Observation], many: list[Observation]) -> list[Finding]:
    found = []
    for epoch, (reference, seen) in enumerate(zip(_pooled(few), _pooled(many), strict=False)):
        missed, extra = Counter(reference) - Counter(seen), Counter(seen) - Counter(reference)
        if missed or extra:
            evidence = f"epoch {epoch}: {sum(missed.values())} samples missed, {sum(extra.values())} seen too often"
            examples = ", ".join(map(repr, list(missed or extra)[:3]))
            mend = "Give each rank its own part (DistributedSampler, or [rank::world_size]), and pad or drop on purpose"
            same = len(many) > 1 and all(m.epochs == many[0].epochs for m in many)
            fault = "every rank trains on the same samples" if same else "samples are missed or repeated"
            found.append(Finding(fault, f"{evidence}, for example {examples}", mend))
            break
    if len(many[0].epochs) > 1 and len(few[0].epochs) > 1:
        stuck = all(len(set(m.epochs)) == 1 for m in many)
        if stuck and _shuffled(many):
            found.append(
                Finding(
                    "the same order in every epoch",
                    f"{len(many[0].epochs)} epochs of each rank are identical, although the order is shuffled",
                    "Call sampler.set_epoch(epoch) at the start of each epoch",
                )
            )
    drawn = [m.draws for m in many if m.draws]
    if len(drawn) > 1 and all(draws == drawn[0] for draws in drawn):
        found.append(
            Finding(
                "the same random augmentation on every rank",
                f"all {len(drawn)} ranks drew {len(drawn[0])} identical numbers",
                "Seed augmentation with the rank: seed + rank (data loader workers: in worker_init_fn too)",
            )
        )
    return found


def _pooled(observations: list[Observation]) -> list[list[Hashable]]:
    return [[sample for o in observations for sample in o.epochs[e]] for e in range(len(observations[0].epochs))]


def _shuffled(observations: list[Observation]) -> bool:
    """Whether a rank's samples, if they have an order, come in another one."""
    for observation in observations:
        try:
            if any(list(epoch) != sorted(epoch) for epoch in observation.epochs):  # type: ignore[type-var]
                return True
        except TypeError:
            continue
    return False


def of_replicas(many: list[Observation]) -> list[Finding]:
    """Gradients and parameters must be the same on all ranks after a synchronised step."""
    for what in ("gradients", "parameters"):
        first = getattr(many[0], what)
        apart = {
            name
            for other in many[1:]
            for name in first.keys() | getattr(other, what).keys()
            if name not in first
            or name not in getattr(other, what)
            or _distance(getattr(other, what)[name], first[name]) > TOLERANCE
        }
        if apart:
            part = f"all {len(apart)}" if len(apart) == len(first) else f"{len(apart)} of {len(first)}"
            cause = "no_sync over the last micro-batch, parameters outside DDP, or a rank that skipped its step"
            if what == "parameters":
                cause = "ranks started from different values, or stepped with different learning rates"
            return [
                Finding(
                    f"{what} differ between ranks",
                    f"{part} {what} ({', '.join(sorted(apart)[:3])}) are not the same on every rank",
                    f"They were not synchronised: {cause}",
                )
            ]
    return []


def of_gradients(
    few: list[Observation], many: list[Observation], small: int, large: int, errors: dict[str, float]
) -> list[Finding]:
    reference, seen = few[0].gradients, many[0].gradients
    shared = [name for name in reference if name in seen and reference[name].norm() > 0]
    lost = sorted(set(reference) - set(seen))
    found = []
    if lost:
        found.append(
            Finding("gradients are missing", f"{', '.join(lost[:3])} have none on {large} ranks", "They are unused there")
        )
    if not shared:
        return found
    error = max(_distance(seen[name], reference[name]) for name in shared)
    errors["gradients"] = error
    if error <= TOLERANCE:
        errors["parameters"] = max((_distance(many[0].parameters[n], p) for n, p in few[0].parameters.items()), default=0.0)
        if errors["parameters"] > TOLERANCE:
            found.append(
                Finding(
                    "parameters differ although gradients agree",
                    f"by {errors['parameters']:.1e} after the step",
                    "The optimiser steps differently: learning rate scaled by the number of ranks, or clipping of a local norm",
                )
            )
        return found
    dots = sum((seen[n] * reference[n]).sum().item() for n in shared)
    ratio = dots / sum(reference[n].square().sum().item() for n in shared)
    rest = max(_distance(seen[name], reference[name] * ratio) for name in shared)
    if rest <= max(TOLERANCE, FACTOR_TOLERANCE):
        return [*found, _factor(ratio, small, large)]
    counts = [m.tokens for m in many]
    if None not in counts and len(set(counts)) > 1:
        return [*found, _mean_of_means(many, error)]
    return [
        *found,
        Finding(
            "gradients differ",
            f"by {error:.1e} of their size, by no constant factor (nearest {ratio:.3g})",
            "Look at the samples of each rank, at losses that are means over unequal numbers (give observe(tokens=…)), "
            "and at layers that mix samples, such as batch normalisation",
        ),
    ]


def _factor(ratio: float, small: int, large: int) -> Finding:
    world = large / small
    causes = {
        world: (f"W = {world:g}", "summed over ranks, not averaged: divide by the world size, or use DDP, which averages"),
        1 / world: (f"1/W = 1/{world:g}", "averaged twice, or a loss that each rank divides by the global number as well"),
    }
    for factor, (name, cause) in causes.items():
        if abs(ratio / factor - 1) < FACTOR_TOLERANCE:
            return Finding(
                f"gradients are off by the factor {name}", f"all of them, ratio {ratio:.4f}", cause[0].upper() + cause[1:]
            )
    nearest = round(ratio) if ratio >= 1 else 1 / max(1, round(1 / max(ratio, 1e-12)))
    exact = f"{nearest:.4g}" if abs(ratio / nearest - 1) < FACTOR_TOLERANCE else f"{ratio:.4g}"
    return Finding(
        f"gradients are off by the factor {exact}",
        f"all of them, ratio {ratio:.4f}",
        "A constant factor comes from accumulation: divide the loss of each of k micro-batches by k, on any number of ranks",
    )


def _mean_of_means(many: list[Observation], error: float) -> Finding:
    counts = [m.tokens for m in many]
    return Finding(
        "a mean of means over unequal counts",
        f"ranks average over {', '.join(map(str, counts))} tokens, and the gradients are off by {error:.1e}",
        "Weight each rank's loss: multiply it by world_size × its tokens / all tokens before backward",
    )


def of_losses(few: list[Observation], many: list[Observation], errors: dict[str, float]) -> list[Finding]:
    if any(o.loss is None for o in [*few, *many]):
        return []
    reference, seen = _mean_loss(few), _mean_loss(many)
    errors["loss"] = abs(seen - reference) / max(abs(reference), 1e-30)
    unequal = len({m.tokens for m in many}) > 1 or len({len(m.epochs[0]) for m in many}) > 1
    if errors["loss"] <= TOLERANCE or (unequal and many[0].tokens is None):
        return []
    return [
        Finding(
            "the loss differs", f"{seen:.6g} on {len(many)} ranks, {reference:.6g} on {len(few)}", "Compare the samples first"
        )
    ]


def _mean_loss(observations: list[Observation]) -> float:
    weights = [1.0 if o.tokens is None else o.tokens for o in observations]
    return sum((o.loss or 0.0) * w for o, w in zip(observations, weights, strict=True)) / sum(weights)


def of_outputs(few: list[Observation], many: list[Observation], errors: dict[str, float]) -> list[Finding]:
    if few[0].outputs is None or many[0].outputs is None:
        return []
    errors["outputs"] = max(_distance(m.outputs, few[0].outputs) for m in many)
    if errors["outputs"] <= TOLERANCE:
        return []
    return [Finding("outputs differ", f"by {errors['outputs']:.1e} of their size", "The sharded computation is another one")]


def of_exchanges(run: Run, many: list[Observation]) -> list[Finding]:
    """Gradients need to cross the wire once a step, however many micro-batches it has."""
    size = sum(4 * g.numel() for g in many[0].gradients.values())
    handed = sum(c.bytes for c in run.collectives if c.rank == 0 and c.op == "all_reduce" and c.bytes >= 1024)
    times = handed / size if size else 0
    if times < 1.9:
        return []
    return [
        Finding(
            f"gradients were exchanged {times:.0f} times in one step",
            f"{handed:,} B of all-reduce for {size:,} B of gradients",
            "Accumulate inside no_sync, forward pass included: DDP decides in the forward pass whether it will synchronise",
        )
    ]
