"""What goes wrong where ranks hold parts of one model: each function looks at one quantity and names the cause that it shows."""

import math
from typing import Any

from helpers.equivalence import origins
from helpers.equivalence.findings import Finding, finding, several
from helpers.equivalence.joining import Side, different, distance, outputs
from helpers.equivalence.judging import FACTOR_TOLERANCE

PACES = (2, 3, 4, 6, 8, 12, 16, 32, 1 / 2, 1 / 3, 1 / 4, 1 / 8)  # speeds of a schedule that are looked for


def of_nan(few: Side, many: Side) -> list[Finding]:
    """A value that is no finite number in gradients, parameters or losses; `first_nan` tells where it arose."""
    first, marred = origins.origin(many.seen), _marred(many)
    if not marred:
        return [finding("a NaN arises", f"on {len(few)} rank{'s' * (len(few) > 1)} only")] if _marred(few) else []
    evidence = str(first) if first else "where it arose was not watched: observe(nan=…) with first_nan"
    if others := [rank for rank in marred if first is None or rank != first.rank]:
        evidence += f"; ranks with it afterwards: {', '.join(map(str, others))}"
    if first and not origins.origin(few.seen):
        evidence += f"; not on {len(few)} rank{'s' * (len(few) > 1)}"
    return [finding("a NaN arises", evidence)]


def _marred(side: Side) -> list[int]:
    marred = []
    for rank, seen in enumerate(side.seen):
        trained = [seen.parameters[name] for name in seen.gradients if name in seen.parameters]  # a mask may be infinite
        finite = math.isfinite(seen.loss or 0) and all(each.isfinite().all() for each in (*seen.gradients.values(), *trained))
        marred += [rank] * bool(seen.origin or not finite)
    return marred


def of_inputs(few: Side, many: Side) -> list[Finding]:
    """Ranks that hold one copy of the model together work on the same samples."""
    for group in many.alike("tp"):
        for what, named in (("epochs", "samples"), ("draws", "draws")):
            seen = {each for rank in group if any(each := getattr(many.seen[rank], what) or ())}
            if len(seen) > 1:
                evidence = f"ranks {several(group)} share a model and have different {named}"
                return [finding("ranks of one model see different samples", evidence)]
    return []


def of_shards(few: Side, many: Side) -> list[Finding]:
    """Parts of parameters that are too few, too many, doubled, or in another order than in the whole parameter.

    Raises ValueError for a parameter that has another shape and is not said to be a part.
    """
    reference, held = few.first("parameters"), many.held["parameters"]
    if lost := sorted(reference.keys() - held.keys()):
        unknown = sorted(held.keys() - reference.keys())
        besides = f"; unknown there: {several(unknown)}" if unknown else ""
        return [finding("parameters are missing", f"{several(lost)} on none of {len(many)} ranks{besides}")]
    for name, wanted in reference.items():
        for group in many.holders("parameters", name):
            pieces, dim = [many.seen[rank].parameters[name] for rank in group], many.cuts.get(name)
            if dim is None and pieces[0].shape != wanted.shape:
                shapes = f"{tuple(pieces[0].shape)} on rank {group[0]}, {tuple(wanted.shape)} on few ranks"
                raise ValueError(f'{name} is {shapes}: if it is a part, say so: observe(mesh=…, shards={{"{name}": dim}})')
            if name in many.seen[group[0]].dealt:  # gathered already: cut again as it was
                dim, count = many.seen[group[0]].dealt[name]
                pieces, group = list(pieces[0].chunk(count, dim)), list(range(count))
            if dim is not None and (found := _adds_up(name, wanted, pieces, group, dim)):
                return [found]
    return []


def _adds_up(name: str, wanted: Any, pieces: list[Any], ranks: list[int], dim: int) -> Finding | None:
    sizes, whole = [piece.shape[dim] for piece in pieces], wanted.shape[dim]
    told = f"{name}: ranks {', '.join(map(str, ranks))} hold"
    if sum(sizes) != whole:
        fault = "shards are missing" if sum(sizes) < whole else "shards overlap"
        return finding(fault, f"{told} {' + '.join(map(str, sizes))} of {whole} along dim {dim}")
    slices, holds = wanted.split(sizes, dim), []
    for own, piece in enumerate(pieces):
        errors = [distance(piece, part) for part in slices]
        nearest = min(range(len(errors)), key=errors.__getitem__)
        holds.append(nearest if errors[nearest] < 0.5 * errors[own] else own)
    told += f" the parts {', '.join(map(str, holds))} along dim {dim}"
    if lost := sorted(set(range(len(holds))) - set(holds)):
        return finding("shards overlap", f"{told}; nobody holds {several(lost)}")
    return finding("shards are in another order", told) if holds != sorted(holds) else None


def of_layers(few: Side, many: Side) -> list[Finding]:
    """The first layer whose output differs; a constant shift along a bias is that bias, added on several ranks."""
    agree = 0
    for name, pairs in outputs(few, many).items():
        worst, wanted = max(pairs, key=lambda pair: distance(pair[0].tensor, pair[1]))
        error = distance(worst.tensor, wanted)
        if error <= many.of_outputs:
            agree += 1
        elif shift := _bias(few, name, worst.tensor, wanted):
            return [shift]
        elif name:
            where = f"first in {name}, by {error:.1e} of its size, on rank {worst.ranks[0]}; before it {agree} agree"
            return [finding("outputs differ", where)]
    return []


def _bias(few: Side, layer: str, seen: Any, wanted: Any) -> Finding | None:
    if seen.shape != wanted.shape or seen.ndim < 2:
        return None
    rows = (seen - wanted).flatten(0, -2)
    shift = rows.mean(0)
    if (rows - shift).norm() > 1e-2 * rows.norm():
        return None
    for name, bias in few.first("parameters").items():
        if bias.shape != shift.shape or not name.endswith("bias") or not bias.norm():
            continue
        times = ((shift @ bias) / (bias @ bias)).item()
        cosine = ((shift @ bias) / (shift.norm() * bias.norm())).item()
        if cosine > 0.95 and round(times) >= 1:  # the step has moved the bias a little since
            where = f" of {layer}" if layer else ""
            return finding(
                "a bias is added on every rank", f"outputs{where} are off by {times:.2f} · {name}, the same for every row"
            )
    return None


def of_rates(few: Side, many: Side) -> list[Finding]:
    """Learning rates, step by step, as planned (or as on few ranks)."""
    for rank, seen in enumerate(many.seen):
        rates, planned = seen.rates, seen.planned or few.seen[0].rates
        if rates is None or planned is None or _close(rates, planned):
            continue
        at = next(step for step in range(len(rates) + 1) if not _close(rates[step : step + 1], planned[step : step + 1]))
        shown = (", ".join(f"{rate:.3g}" for rate in some[at : at + 3]) or "none" for some in (rates, planned))
        evidence = f"rank {rank}, optimiser step {at}: {'; right: '.join(shown)}"
        pace = _pace(rates, planned)
        if pace is not None and pace > 1:
            return [finding("the learning-rate schedule is stepped {pace} times too often", evidence, pace=f"{pace:g}")]
        if pace is not None:
            return [finding("the learning-rate schedule is stepped {pace} times too seldom", evidence, pace=f"{1 / pace:g}")]
        ratios = {round(a / b, 4) for a, b in zip(rates, planned, strict=False) if b}
        if len(ratios) == 1 and len(rates) == len(planned):
            return [finding("the learning rate is multiplied by {factor}", evidence, factor=f"{ratios.pop():g}")]
        return [finding("the learning-rate schedule differs", evidence)]
    return []


def _close(rates: tuple[float, ...], planned: tuple[float, ...]) -> bool:
    pairs = zip(rates, planned, strict=False)
    return len(rates) == len(planned) and all(abs(a - b) <= 1e-6 * max(abs(a), abs(b)) for a, b in pairs)


def _pace(rates: tuple[float, ...], planned: tuple[float, ...]) -> float | None:
    """k where each step has the rate planned for k times its number (or up to k steps later), and enough are known to tell."""
    for pace in PACES:
        for late in range(int(pace) + 1):
            places = [int(step * pace) + late for step in range(len(rates))]
            wanted = tuple(planned[place] for place in places if place < len(planned))
            if len(set(wanted)) > 1 and _close(rates[: len(wanted)], wanted):
                return pace
    return None


def of_copies(few: Side, many: Side) -> list[Finding]:
    """Gradients of parameters that several ranks of one model hold whole: parts of the right one where nobody summed them."""
    reference, noise, close = few.first("gradients"), few.noise("gradients"), max(FACTOR_TOLERANCE, many.tolerance)
    for axis, what in (("pp", "tied"), ("tp", "replicated")):
        parted = []
        for name, wanted in reference.items():
            apart = different(many.held["gradients"].get(name, ()), noise)
            places = {many.seen[copy.ranks[0]].place.get(axis) for copy in apart}
            if len(places) > 1 and distance(sum(copy.tensor for copy in apart), wanted, noise) <= close:
                parted.append(name)
        if parted:
            evidence = f"{several(parted)}: ranks have different gradients that together give the right one"
            return [finding(f"gradients of {what} parameters are not summed", evidence)]
    return []


def of_random(few: Side, many: Side) -> list[Finding]:
    """Dropout masks of replicated activations are the same on all ranks of a TP group, those of sharded ones differ."""
    for group in many.alike("tp"):
        for kind in ("default", "same", "own") if len(group) > 1 else ():
            prints = {rank: many.seen[rank].random[kind] for rank in group if kind in many.seen[rank].random}
            if kind == "default" and not any(many.seen[rank].drops for rank in group):
                continue
            evidence = f"random state ({kind}): {', '.join(f'rank {rank} {each}' for rank, each in prints.items())}"
            unlike = len(set(prints.values()))
            if kind != "own" and unlike > 1:
                return [finding("dropout masks differ where they must be the same", evidence)]
            if kind == "own" and unlike < len(prints):
                return [finding("dropout masks are the same where they must differ", evidence)]
    return []
