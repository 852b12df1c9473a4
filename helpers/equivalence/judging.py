"""What a difference between few ranks and many means: each function looks at one quantity and names the faults that it shows."""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

from helpers.equivalence.findings import Finding, finding, several
from helpers.equivalence.joining import PARTS, Side, different, distance, distances, outputs
from helpers.equivalence.observing import Observation

FACTOR_TOLERANCE = 1e-3  # relative: how close a ratio is to an exact factor


def differences(few: Side, many: Side) -> dict[str, float]:
    """The largest relative difference of each quantity that both sides have."""
    found = {}
    for what in ("gradients", "parameters"):
        if errors := distances(few, many, what).values():
            found[what] = max(errors)
    reference, seen = _mean_loss(few), _mean_loss(many)
    if reference is not None and seen is not None:
        found["loss"] = abs(seen - reference) / max(abs(reference), 1e-30)
    if pairs := [pair for pairs in outputs(few, many).values() for pair in pairs]:
        found["outputs"] = max(distance(copy.tensor, right) for copy, right in pairs)
    return found


def _mean_loss(side: Side) -> float | None:
    """Weighted by tokens, where they are given; None where no rank has a loss."""
    pairs = [(seen.loss, 1.0 if seen.tokens is None else seen.tokens) for seen in side.seen if seen.loss is not None]
    return sum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None


def of_samples(few: Side, many: Side) -> list[Finding]:
    """Each copy of the model has its own samples, another order in each epoch, and its own augmentation."""
    before, after = _one_of_each_model(few), _one_of_each_model(many)
    found = []
    for epoch, (reference, seen) in enumerate(zip(_pooled(before), _pooled(after), strict=False)):
        missed, extra = Counter(reference) - Counter(seen), Counter(seen) - Counter(reference)
        if missed or extra:
            same = len(after) > 1 and all(each.epochs == after[0].epochs for each in after)
            fault = "every rank trains on the same samples" if same else "samples are missed or repeated"
            counts = f"{missed.total()} samples missed, {extra.total()} seen too often"
            examples = ", ".join(map(repr, list(missed or extra)[:3]))
            found.append(finding(fault, f"epoch {epoch}: {counts}, for example {examples}"))
            break
    epochs = min(len(before[0].epochs), len(after[0].epochs))
    shuffled = any(_shuffled(epoch) for each in after for epoch in each.epochs)
    if epochs > 1 and shuffled and all(len(set(each.epochs)) == 1 for each in after):
        evidence = f"{epochs} epochs of each rank are identical, although the order is shuffled"
        found.append(finding("the same order in every epoch", evidence))
    drawn = [each.draws for each in after if each.draws]
    if len(drawn) > 1 and len(set(drawn)) == 1:
        evidence = f"all {len(drawn)} ranks drew {len(drawn[0])} identical numbers"
        found.append(finding("the same random augmentation on every rank", evidence))
    return found


def _shuffled(epoch: Sequence[Any]) -> bool:
    try:
        return list(epoch) != sorted(epoch)
    except TypeError:  # samples that have no order
        return False


def _one_of_each_model(side: Side) -> list[Observation]:
    """Of the ranks that hold a copy of the model together, the first that names samples."""
    models = [[side.seen[rank] for rank in group] for group in side.models()]
    return [next((seen for seen in model if seen.epochs[0] or seen.draws), model[0]) for model in models]


def _pooled(observations: list[Observation]) -> list[list[Hashable]]:
    """Of each epoch, the samples of all."""
    return [[sample for part in parts for sample in part] for parts in zip(*(seen.epochs for seen in observations), strict=False)]


def of_replicas(few: Side, many: Side) -> list[Finding]:
    """Gradients and parameters must be the same on all ranks after a synchronised step."""
    for what in ("gradients", "parameters"):
        held, noise = many.held[what], many.noise(what)
        apart = []
        for name, copies in held.items():
            holders = {rank for copy in copies for rank in copy.ranks}
            stages = {many.seen[rank].place.get("pp") for rank in holders}
            absent = len(holders) < sum(seen.place.get("pp") in stages for seen in many.seen)
            if absent or len(different(copies, noise)) > 1:
                apart.append(name)
        if apart:
            part = f"all {len(apart)}" if len(apart) == len(held) else f"{len(apart)} of {len(held)}"
            evidence = f"{part} {what} ({', '.join(sorted(apart)[:3])}) are not the same on every rank"
            return [finding(f"{what} differ between ranks", evidence)]
    return []


def of_gradients(few: Side, many: Side) -> list[Finding]:
    """Which factor gradients are off by, if it is one, or whether unequal numbers of tokens explain the difference."""
    reference, seen = few.first("gradients"), many.first("gradients")
    lost = sorted(reference.keys() - seen.keys())
    found = [finding("gradients are missing", f"{several(lost)} have none on {len(many)} ranks")] if lost else []
    errors = {name: error for name, error in distances(few, many, "gradients").items() if reference[name].norm() > 0}
    wrong = [name for name, error in errors.items() if error > many.tolerance]
    if not wrong:
        return found
    error, noise = max(errors.values()), few.noise("gradients")
    ratio = sum((seen[name] * reference[name]).sum().item() for name in wrong)
    ratio /= sum(reference[name].square().sum().item() for name in wrong)
    rest = max(distance(seen[name], ratio * reference[name], abs(ratio) * noise) for name in wrong)
    tokens, close = [each.tokens for each in many.seen], max(FACTOR_TOLERANCE, many.tolerance)
    if rest <= close and (len(wrong) == len(errors) or many.placed):
        which = "all of them" if len(wrong) == len(errors) else f"{len(wrong)} of {len(errors)} ({', '.join(wrong[:3])})"
        found.append(_factor(ratio, len(many) / len(few), close, f"{which}, ratio {ratio:.4f}"))
    elif None not in tokens and len(set(tokens)) > 1 and not (of_replicas(few, many) or of_samples(few, many)):
        evidence = f"ranks average over {', '.join(map(str, tokens))} tokens, and the gradients are off by {error:.1e}"
        found.append(finding("a mean of means over unequal counts", evidence))
    else:
        found.append(finding("gradients differ", f"by {error:.1e} of their size, by no constant factor (nearest {ratio:.3g})"))
    return found


def _factor(ratio: float, world: float, close: float, evidence: str) -> Finding:
    if abs(ratio / world - 1) < close:
        return finding("gradients are off by the factor W = {factor}", evidence, factor=f"{world:g}")
    if abs(ratio * world - 1) < close:
        return finding("gradients are off by the factor 1/W = 1/{factor}", evidence, factor=f"{world:g}")
    times, parts = round(ratio), round(1 / ratio) if ratio > 1e-12 else 0
    near = f"1/{parts}" if abs(ratio * parts - 1) < close else f"{ratio:.4g}"
    shown = f"{times}" if abs(ratio - times) < close * times else near
    return finding("gradients are off by the factor {factor}", evidence, factor=shown)


def of_results(few: Side, many: Side) -> list[Finding]:
    """What else differs: the step, the mean loss (where ranks say what theirs are means over), the outputs."""
    errors, found = differences(few, many), []
    if errors.get("gradients", 1) <= many.tolerance < errors.get("parameters", 0):
        found.append(finding("parameters differ although gradients agree", f"by {errors['parameters']:.1e} after the step"))
    with_loss = [seen for seen in many.seen if seen.loss is not None]
    unequal = len({len(seen.epochs[0]) for seen in with_loss}) > 1
    if errors.get("loss", 0) > many.tolerance and not (unequal and with_loss[0].tokens is None):
        losses = f"{_mean_loss(many):.6g} on {len(with_loss)} ranks, {_mean_loss(few):.6g} on {len(few)}"
        found.append(finding("the loss differs", losses))
    if errors.get("outputs", 0) > many.of_outputs:
        found.append(finding("outputs differ", f"by {errors['outputs']:.1e} of their size"))
    return found


def of_exchanges(few: Side, many: Side) -> list[Finding]:
    """Gradients need to cross the wire once an optimiser step, however many micro-batches it has: values of any dtype count."""
    first, size = many.seen[0], _values_of_gradients(many)
    own = [first.place.get(axis) for axis in PARTS]
    group = tuple(rank for rank, seen in enumerate(many.seen) if [seen.place.get(axis) for axis in PARTS] == own)
    if not (size and first.steps) or len(group) < 2 or (first.dealt and not first.place):
        return []
    sums = [c for c in many.run.collectives if c.rank == 0 and c.op == "all_reduce" and c.group == group]
    handed = sum(prod(c.shape) for c in sums if c.bytes >= 1024)
    times = handed / size / first.steps
    if times < 1.9:
        return []
    evidence = f"optimiser steps: {first.steps}; {handed:,} values were summed, the gradients have {size:,}"
    return [finding("gradients were exchanged {times} times in one step", evidence, times=f"{times:.0f}")]


def traffic(side: Side) -> dict[str, tuple[int, int, float]]:
    """By operation, what rank 0 issued before `observe`: how many, their bytes, and their values over those of the gradients."""
    found: dict[str, tuple[int, int, float]] = {}
    size = _values_of_gradients(side) or float("inf")
    for each in side.run.collectives:
        if each.rank == 0 and each.start < side.seen[0].ended:
            count, handed, times = found.get(each.op, (0, 0, 0.0))
            found[each.op] = count + 1, handed + each.bytes, times + prod(each.shape) / size
    return found


def _values_of_gradients(side: Side) -> int:
    """How many values the gradients have that rank 0 computes: of parts along "tp" its own."""
    first = side.seen[0]
    dealt = first.dealt if "tp" in first.place else {}
    return sum(gradient.numel() // dealt.get(name, (0, 1))[1] for name, gradient in first.gradients.items())


def of_sampled(few: Side, many: Side) -> list[Finding]:
    """Ranks of one copy of the model generate the same tokens."""
    groups = many.models() if many.placed else [list(range(len(many)))]
    for group in groups:
        texts = {rank: many.seen[rank].sampled for rank in group if many.seen[rank].sampled is not None}
        first = next(iter(texts), 0)
        for other, text in texts.items():
            if text != texts[first]:
                at, one, another = _parting(texts[first], text)
                evidence = f"ranks {first} and {other} part at token {at}: {one} and {another}"
                return [finding("sampled tokens differ between ranks", evidence)]
    return []


def of_texts(few: Side, many: Side) -> list[Finding]:
    """Many ranks generate the tokens that few do; asked where nothing else differs."""
    wanted, seen = few.seen[0].sampled, many.seen[0].sampled
    if wanted is None or seen is None or len(wanted) != len(seen) or wanted == seen:
        return []
    at, right, wrong = _parting(wanted, seen)
    evidence = f"from token {at} on: {wrong}, on {len(few)} {right}"
    return [finding("sampled tokens differ from those on {few}", evidence, few=len(few))]


def _parting(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, str, str]:
    """The first place at which two texts differ, and what stands there in each."""
    one, other = ([*(text or ()), "the end"] for text in (a, b))
    at = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
    return at, str(one[at]), str(other[at])
