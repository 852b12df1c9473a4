"""What goes wrong where ranks hold parts of one model: each function looks at one quantity and names the cause that it shows."""

from __future__ import annotations

from typing import Any

from helpers.equivalence import origins
from helpers.equivalence.joining import TOLERANCE, alike, different, distance, joined, least, model_copies, outputs, parts
from helpers.equivalence.judging import FACTOR_TOLERANCE, Finding
from helpers.equivalence.observing import Observation


def of_nan(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """A value that is no finite number in gradients, losses or outputs; `first_nan` tells where it arose."""
    first = origins.origin(many)
    marred = [
        rank
        for rank, seen in enumerate(many)
        if not all(each.isfinite().all() for each in seen.gradients.values()) or seen.loss != seen.loss
    ]
    if first is None and not marred:
        return []
    catching = [rank for rank, seen in enumerate(many) if seen.origin and first and rank != first.rank] or marred
    evidence = str(first) if first else "where it arose was not watched: observe(nan=…) with first_nan"
    alone = "" if origins.origin(few) or first is None else f"; not on {len(few)} rank{'s' * (len(few) > 1)}"
    others = f"; ranks with it afterwards: {', '.join(map(str, catching))}" if catching else ""
    mend = "Look at the inputs of that layer in that batch on that rank; later layers, batches and ranks only pass it on"
    return [Finding("a NaN arises", evidence + others + alone, mend)]


def of_shards(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """Parts of parameters that are too few, too many, doubled, or in another order than in the whole parameter."""
    reference = {name: copies[0].tensor for name, copies in joined(few, "parameters").items()}
    held = {name for seen in many for name in seen.parameters}
    if lost := sorted(set(reference) - held):
        unknown = sorted(held - set(reference))
        evidence = f"{_several(lost)} on none of {len(many)} ranks" + (f"; unknown there: {_several(unknown)}" if unknown else "")
        return [
            Finding(
                "parameters are missing",
                evidence,
                "Give each layer to a stage; name them as the whole model does: observe(rename=…)",
            )
        ]
    for name, wanted in reference.items():
        cut = next((seen.cuts[name] for seen in many if name in seen.cuts), None)
        if cut is not None:
            for group in parts(many, "parameters", name):
                pieces = [many[rank].parameters[name] for rank in group]
                if found := _adds_up(name, wanted, pieces, group, cut):
                    return found
            continue
        for rank, seen in enumerate(many):
            if name not in seen.parameters:
                continue
            if seen.parameters[name].shape != wanted.shape:
                shapes = f"{tuple(seen.parameters[name].shape)} on rank {rank}, {tuple(wanted.shape)} on few ranks"
                raise ValueError(f'{name} is {shapes}: if it is a part, say so: observe(mesh=…, shards={{"{name}": dim}})')
            if name in seen.dealt and rank == 0:
                dim, count = seen.dealt[name]
                pieces = list(seen.parameters[name].chunk(count, dim))
                if found := _adds_up(name, wanted, pieces, list(range(len(pieces))), dim):
                    return found
    return []


def _adds_up(name: str, wanted: Any, pieces: list[Any], ranks: list[int], dim: int) -> list[Finding]:
    sizes = [piece.shape[dim] for piece in pieces]
    whole = wanted.shape[dim]
    told = f"{name}: ranks {', '.join(map(str, ranks))} hold {' + '.join(map(str, sizes))} of {whole} along dim {dim}"
    if sum(sizes) < whole:
        return [Finding("shards are missing", told, "Divide without a rest, or give the rest to a rank, as torch.chunk does")]
    if sum(sizes) > whole:
        return [Finding("shards overlap", told, "Each rank keeps only its own part: chunk(tp, dim)[rank]")]
    slices = wanted.split(sizes, dim)
    holds = []
    for own, piece in enumerate(pieces):
        errors = [distance(piece, part) for part in slices]
        nearest = min(range(len(errors)), key=errors.__getitem__)
        holds.append(nearest if errors[nearest] < 0.5 * errors[own] else own)
    if holds == sorted(set(holds)):
        return []
    told = f"{name}: ranks {', '.join(map(str, ranks))} hold the parts {', '.join(map(str, holds))} along dim {dim}"
    if len(set(holds)) < len(holds):
        lost = sorted(set(range(len(holds))) - set(holds))
        return [
            Finding(
                "shards overlap",
                f"{told}; nobody holds {_several(lost)}",
                "Cut by the rank in its TP group, not by a fixed place",
            )
        ]
    return [Finding("shards are in another order", told, "Order parts by the rank in the TP group (on a mesh: get_local_rank)")]


def of_layers(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """The first layer whose output differs; a constant shift along a bias is that bias, added on several ranks."""
    reference, seen = outputs(few, many)
    order = [name for name in reference if name in seen]
    agree = 0
    for name in order:
        wanted = reference[name]
        worst = max(seen[name], key=lambda copy: distance(copy.tensor, wanted))
        error = distance(worst.tensor, wanted)
        if error <= TOLERANCE:
            agree += 1
            continue
        if shift := _bias(few, name, worst.tensor, wanted):
            return [shift]
        if name:
            where = f"first in {name}, by {error:.1e} of its size, on rank {worst.ranks[0]}; before it {agree} agree"
            return [Finding("outputs differ", where, "Look at this layer: its split, its all-reduce, what it takes from others")]
    return []


def _bias(few: list[Observation], layer: str, seen: Any, wanted: Any) -> Finding | None:
    if seen.shape != wanted.shape or seen.ndim < 2:
        return None
    rows = (seen - wanted).flatten(0, -2)
    shift = rows.mean(0)
    if (rows - shift).norm() > 1e-2 * rows.norm():
        return None
    for name, (copy, *_) in joined(few, "parameters").items():
        bias = copy.tensor
        if bias.shape != shift.shape or not name.endswith("bias") or not bias.norm():
            continue
        times = ((shift @ bias) / (bias @ bias)).item()
        cosine = ((shift @ bias) / (shift.norm() * bias.norm())).item()
        if cosine > 0.95 and round(times) >= 1:  # the step has moved the bias a little since
            evidence = f"outputs{f' of {layer}' if layer else ''} are off by {times:.2f} · {name}, the same for every row"
            mend = "Add the bias of a row-wise layer after the all-reduce, or on one rank only"
            return Finding("a bias is added on every rank", evidence, mend)
    return None


def of_inputs(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """Ranks that hold one copy of the model together work on the same samples."""
    for group in alike(many, "tp") if many[0].place else []:
        for what in ("epochs", "draws"):
            seen = [each for rank in group if any(each := getattr(many[rank], what) or ())]
            if len(set(seen)) > 1:
                evidence = f"ranks {_several(group)} share a model and have different {what.replace('epochs', 'samples')}"
                mend = "Choose samples and seeds by the place on the axis dp, not by the rank: num_replicas=dp, rank=place on dp"
                return [Finding("ranks of one model see different samples", evidence, mend)]
    return []


def of_rates(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """Learning rates, step by step, as planned (or as on few ranks)."""
    for rank, seen in enumerate(many):
        rates, planned = seen.rates, seen.planned or few[0].rates
        if rates is None or planned is None or _close(rates, planned):
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(rates, planned, strict=False)) if not _close((a,), (b,))),
            min(len(rates), len(planned)),
        )
        told = f"rank {rank}, optimiser step {at}: {', '.join(f'{rate:.3g}' for rate in rates[at : at + 3]) or 'none'}"
        told += f"; right: {', '.join(f'{rate:.3g}' for rate in planned[at : at + 3]) or 'none'}"
        if pace := _pace(rates, planned):
            mend = "Call scheduler.step() once per optimiser step, not per micro-batch and not once for each rank"
            speed = f"{pace:g} times too often" if pace > 1 else f"{1 / pace:g} times too seldom"
            return [Finding(f"the learning-rate schedule is stepped {speed}", told, mend)]
        ratios = {round(a / b, 4) for a, b in zip(rates, planned, strict=False) if b}
        if len(ratios) == 1 and len(rates) == len(planned):
            return [
                Finding(
                    f"the learning rate is multiplied by {ratios.pop():g}",
                    told,
                    "Scale it by the number of ranks only on purpose, and on all of them",
                )
            ]
        return [Finding("the learning-rate schedule differs", told, "The same schedule on every rank and on any number of ranks")]
    return []


def _close(rates: tuple[float, ...], planned: tuple[float, ...]) -> bool:
    return len(rates) == len(planned) and all(
        abs(a - b) <= 1e-6 * max(abs(a), abs(b)) for a, b in zip(rates, planned, strict=True)
    )


def _pace(rates: tuple[float, ...], planned: tuple[float, ...]) -> float | None:
    """k where each step has the rate planned for k times its number (or up to k steps later), and enough are known to tell."""
    for pace in [2, 3, 4, 6, 8, 12, 16, 32, 1 / 2, 1 / 3, 1 / 4, 1 / 8]:
        for late in range(int(pace) + 1):
            places = [(rate, int(i * pace) + late) for i, rate in enumerate(rates)]
            known = [(rate, planned[place]) for rate, place in places if place < len(planned)]
            if len({wanted for _, wanted in known}) > 1 and all(_close((rate,), (wanted,)) for rate, wanted in known):
                return pace
    return None


def of_copies(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """Gradients of parameters that several ranks of one model hold whole: parts of the right one where nobody summed them."""
    reference, seen = joined(few, "gradients"), joined(many, "gradients")
    for axis, what, mend in (
        (
            "pp",
            "tied",
            "Sum them: all_reduce the gradient of the shared matrix over the first and the last stage before the step",
        ),
        (
            "tp",
            "replicated",
            "all_reduce them over the TP group, or in backward the input of column-wise layers, where all before it is wrong",
        ),
    ):
        parted = []
        for name, copies in seen.items():
            apart = different(copies, least(reference))
            places = {many[copy.ranks[0]].place.get(axis) for copy in apart}
            if len(apart) < 2 or name not in reference or len(places) < 2:
                continue
            total = sum(copy.tensor for copy in apart)
            if distance(total, reference[name][0].tensor, least(reference)) <= FACTOR_TOLERANCE:
                parted.append(name)
        if parted:
            evidence = f"{_several(parted)}: ranks have different gradients that together give the right one"
            return [Finding(f"gradients of {what} parameters are not summed", evidence, mend)]
    return []


def of_random(many: list[Observation]) -> list[Finding]:
    """Dropout masks of replicated activations are the same on all ranks of a TP group, those of sharded ones differ."""
    for group in alike(many, "tp"):
        seen = [many[rank] for rank in group]
        if len(group) < 2 or any("tp" not in each.place for each in seen):
            continue
        for kind in ("default", "same", "own"):
            prints = [each.random[kind] for each in seen if kind in each.random]
            if len(prints) < 2 or (kind == "default" and not any(each.drops for each in seen)):
                continue
            told = ", ".join(f"rank {rank} {each}" for rank, each in zip(group, prints, strict=False))
            if kind != "own" and len(set(prints)) > 1:
                mend = "Seed by the place on dp, not by the rank: what is replicated must be dropped alike in a TP group"
                return [Finding("dropout masks differ where they must be the same", f"random state ({kind}): {told}", mend)]
            if kind == "own" and len(set(prints)) < len(prints):
                mend = "Draw masks of sharded activations from a generator seeded with seed + place on tp"
                return [Finding("dropout masks are the same where they must differ", f"random state ({kind}): {told}", mend)]
    return []


def of_sampled(many: list[Observation]) -> list[Finding]:
    """Ranks of one copy of the model generate the same tokens."""
    groups = model_copies(many) if any(seen.place for seen in many) else [list(range(len(many)))]
    for group in groups:
        texts = {rank: many[rank].sampled for rank in group if many[rank].sampled is not None}
        if len(set(texts.values())) > 1:
            first, other = next((a, b) for a in texts for b in texts if texts[a] != texts[b])
            at = _parting(texts[first] or (), texts[other] or ())
            evidence = f"ranks {first} and {other} part at token {at}: {_at(texts[first], at)} and {_at(texts[other], at)}"
            mend = "Seed the sampler alike on all ranks of a model, or sample on one and broadcast the token"
            return [Finding("sampled tokens differ between ranks", evidence, mend)]
    return []


def of_texts(few: list[Observation], many: list[Observation]) -> list[Finding]:
    """Many ranks generate the tokens that few do; asked where nothing else differs."""
    wanted, found = few[0].sampled, many[0].sampled
    if wanted is not None and found is not None and len(wanted) == len(found) and wanted != found:
        at = _parting(wanted, found)
        evidence = f"from token {at} on: {_at(found, at)}, on {len(few)} {_at(wanted, at)}"
        return [
            Finding(f"sampled tokens differ from those on {len(few)}", evidence, "Compare outputs and the seed before sampling")
        ]
    return []


def _parting(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _at(tokens: tuple[int, ...] | None, place: int) -> str:
    return str(tokens[place]) if tokens and place < len(tokens) else "the end"


def _several(things: list[Any]) -> str:
    return ", ".join(map(str, things[:3])) + (f" and {len(things) - 3} more" if len(things) > 3 else "")
