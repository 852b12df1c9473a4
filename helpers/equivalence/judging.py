"""What a difference between few ranks and many means: each function looks at one quantity and names the faults that it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from helpers.equivalence.joining import PARTS, TOLERANCE, different, distance, joined, least, model_copies, outputs
from helpers.equivalence.observing import Observation
from helpers.launching import Run

FACTOR_TOLERANCE = 1e-3  # relative: how close a ratio is to an exact factor


@dataclass(frozen=True)
class Finding:
    """One silent fault: what it is, what shows it, and the mend."""

    fault: str
    evidence: str
    mend: str


def of_samples(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """Each copy of the model has its own samples, another order in each epoch, and its own augmentation."""
    few, many = _one_of_each_copy(few), _one_of_each_copy(many)
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


def _one_of_each_copy(observations: list[Observation]) -> list[Observation]:
    """Of the ranks that hold a copy of the model together, the first that names samples."""
    copies = [[observations[rank] for rank in group] for group in model_copies(observations)]
    return [next((seen for seen in copy if seen.epochs[0] or seen.draws), copy[0]) for copy in copies]


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
        held = joined(many, what)
        apart = set()
        for name, copies in held.items():
            holders = {rank for copy in copies for rank in copy.ranks}
            stages = {many[rank].place.get("pp") for rank in holders}
            if len(holders) < sum(seen.place.get("pp") in stages for seen in many) or len(different(copies, least(held))) > 1:
                apart.add(name)
        if apart:
            part = f"all {len(apart)}" if len(apart) == len(held) else f"{len(apart)} of {len(held)}"
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
    reference, seen = _first(few, "gradients"), _first(many, "gradients")
    noise = least(joined(few, "gradients"))
    shared = [name for name in reference if name in seen and reference[name].norm() > 0]
    lost = sorted(set(reference) - set(seen))
    found = []
    if lost:
        found.append(
            Finding("gradients are missing", f"{', '.join(lost[:3])} have none on {large} ranks", "They are unused there")
        )
    if not shared:
        return found
    errors_by_name = {name: distance(seen[name], reference[name], noise) for name in shared}
    error = max(errors_by_name.values())
    errors["gradients"] = error
    if error <= TOLERANCE:
        before, after = _first(few, "parameters"), _first(many, "parameters")
        tiny = least(joined(few, "parameters"))
        errors["parameters"] = max((distance(after[name], before[name], tiny) for name in before), default=0.0)
        if errors["parameters"] > TOLERANCE:
            found.append(
                Finding(
                    "parameters differ although gradients agree",
                    f"by {errors['parameters']:.1e} after the step",
                    "The optimiser steps differently: learning rate scaled by the number of ranks, or clipping of a local norm",
                )
            )
        return found
    wrong = [name for name, its in errors_by_name.items() if its > TOLERANCE]
    dots = sum((seen[n] * reference[n]).sum().item() for n in wrong)
    ratio = dots / sum(reference[n].square().sum().item() for n in wrong)
    rest = max(distance(seen[name], reference[name] * ratio, noise * abs(ratio)) for name in wrong)
    if rest <= max(TOLERANCE, FACTOR_TOLERANCE) and (len(wrong) == len(shared) or many[0].place):
        which = "all of them" if len(wrong) == len(shared) else f"{len(wrong)} of {len(shared)} ({', '.join(wrong[:3])})"
        return [*found, _factor(ratio, small, large, which)]
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


def _first(observations: list[Observation], what: str) -> dict[str, Any]:
    return {name: copies[0].tensor for name, copies in joined(observations, what).items()}


def _factor(ratio: float, small: int, large: int, which: str) -> Finding:
    world = large / small
    causes = {
        world: (f"W = {world:g}", "summed over ranks, not averaged: divide by the world size, or use DDP, which averages"),
        1 / world: (f"1/W = 1/{world:g}", "averaged twice, or a loss that each rank divides by the global number as well"),
    }
    for factor, (name, cause) in causes.items():
        if abs(ratio / factor - 1) < FACTOR_TOLERANCE:
            return Finding(f"gradients are off by the factor {name}", f"{which}, ratio {ratio:.4f}", cause[0].upper() + cause[1:])
    nearest = round(ratio) if ratio >= 1 else 1 / max(1, round(1 / max(ratio, 1e-12)))
    exact = f"{nearest:.4g}" if abs(ratio / nearest - 1) < FACTOR_TOLERANCE else f"{ratio:.4g}"
    return Finding(
        f"gradients are off by the factor {exact}",
        f"{which}, ratio {ratio:.4f}",
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
    few, many = ([seen for seen in side if seen.loss is not None] for side in (few, many))
    if not few or not many:
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
    reference, seen = outputs(few, many)
    shared = [(seen[name], reference[name]) for name in reference if name in seen]
    if not shared:
        return []
    errors["outputs"] = max(distance(copy.tensor, wanted) for copies, wanted in shared for copy in copies)
    if errors["outputs"] <= TOLERANCE:
        return []
    return [
        Finding(
            "outputs differ",
            f"by {errors['outputs']:.1e} of their size",
            "The sharded computation is another one; layers(model) as outputs names the layer",
        )
    ]


def of_exchanges(run: Run, many: list[Observation]) -> list[Finding]:
    """Gradients need to cross the wire once a step, however many micro-batches it has."""
    size = sum(4 * gradient.numel() for gradient in many[0].gradients.values())
    own = [many[0].place.get(axis) for axis in PARTS]
    group = tuple(rank for rank, seen in enumerate(many) if [seen.place.get(axis) for axis in PARTS] == own)
    if len(group) < 2 or (many[0].dealt and not many[0].place):
        return []
    sums = [c for c in run.collectives if c.rank == 0 and c.op == "all_reduce" and c.bytes >= 1024]
    handed = sum(each.bytes for each in sums if each.group == group or not many[0].place)
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
