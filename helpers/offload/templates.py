"""Placements for any decoder, read from data/templates/placement/*.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from helpers.offload.placements import ancestors, gpu_count, name_of, whole_modules

TEMPLATES = Path(__file__).parents[2] / "data" / "templates" / "placement"
_ROLES = ("embedding", "rest", "head")
_TIERS = ("fast", "gpus", "cpu", "disk")  # the first GPU (or the CPU's memory), all GPUs in equal parts, the CPU, the disk


@dataclass(frozen=True)
class Template:
    """A placement for any decoder: `layers` are shares of its layers by tier, first layers first; `rest` is all that is neither
    layer, embedding nor head. `use` says when it is the right one."""

    name: str
    use: str
    embedding: str
    layers: dict[str, float]
    rest: str
    head: str

    def placement(self, model: Any) -> dict[str, Any]:
        """The placement for `model` on this machine, its layers as ranges."""
        gpus = gpu_count()
        places: dict[str, list[int | str]] = {
            "fast": [0 if gpus else "cpu"],
            "gpus": list(range(gpus)) or ["cpu"],
            "cpu": ["cpu"],
            "disk": ["disk"],
        }
        layers = [name for name in whole_modules(model) if name.rpartition(".")[2].isdigit()]
        ends = {"embedding": name_of(model, model.get_input_embeddings()), "head": name_of(model, model.get_output_embeddings())}
        placed: dict[str, Any] = {name: places[getattr(self, role)][0] for role, name in ends.items()}
        stem, cut, end = layers[0].rpartition(".")[0], 0, 0.0
        for tier, share in self.layers.items():
            for place in places[tier]:
                end += share / len(places[tier]) * len(layers)
                first, cut = cut, round(end)
                if cut > first:
                    placed[f"{stem}.{first}-{cut - 1}" if cut - first > 1 else f"{stem}.{first}"] = place
        owners = {name.rpartition(".")[0] for name in model.state_dict()}
        covered = {*ends.values(), *layers}
        rest = [name for name in sorted(owners) if not covered & {name, *ancestors(name)}]
        return placed | dict.fromkeys(rest, places[self.rest][0])


def templates() -> list[str]:
    """The names of the templates in data/templates/placement."""
    return sorted(file.stem for file in TEMPLATES.glob("*.yaml"))


def template(name: str, folder: Path = TEMPLATES) -> Template:
    """Read one template. Raises ValueError for one that does not exist, and naming the field that is wrong."""
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"there is no template {name!r}; there are {', '.join(templates())}")
    page = yaml.safe_load(file.read_text(encoding="utf-8"))
    fields = {"use", "layers", *_ROLES}
    if not isinstance(page, dict) or set(page) != fields:
        had = sorted(page) if isinstance(page, dict) else type(page).__name__
        raise ValueError(f"{file.name} has {had}; it needs exactly {', '.join(sorted(fields))}")
    shares = page["layers"]
    if not isinstance(shares, dict) or not all(isinstance(share, int | float) and share > 0 for share in shares.values()):
        raise ValueError(
            f"{file.name}: layers is {shares!r}; it must map tiers to shares above 0, as in {{fast: 0.5, disk: 0.5}}"
        )
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"{file.name}: the shares of layers add up to {sum(shares.values()):g}; they must add up to 1")
    for where, tier in [*((role, page[role]) for role in _ROLES), *(("layers", tier) for tier in shares)]:
        if tier not in _TIERS:
            raise ValueError(f"{file.name}: {where} has the tier {tier!r}; tiers are {', '.join(_TIERS)}")
    return Template(name, **page)
