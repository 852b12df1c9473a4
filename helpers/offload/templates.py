"""Placements for any decoder, read from data/templates/placement/*.yaml."""

import math
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, PositiveFloat, field_validator

from helpers.offload.placements import gpu_count, name_of, whole_modules, within

TEMPLATES = Path(__file__).parents[2] / "data" / "templates" / "placement"
Tier = Literal["fast", "gpus", "cpu", "disk"]  # the first GPU (or the CPU's memory), all GPUs in equal parts, the CPU, the disk


class Template(BaseModel, frozen=True, extra="forbid"):
    """A placement for any decoder: `layers` are shares of its layers by tier, first layers first; `rest` is all that is neither
    layer, embedding nor head. `use` says when it is the right one."""

    use: str
    embedding: Tier
    layers: dict[Tier, PositiveFloat]
    rest: Tier
    head: Tier

    @field_validator("layers")
    @classmethod
    def _whole(cls, shares: dict[Tier, float]) -> dict[Tier, float]:
        if not math.isclose(sum(shares.values()), 1):
            raise ValueError(f"the shares of layers add up to {sum(shares.values()):g}; they must add up to 1")
        return shares

    def placement(self, model: Any) -> dict[str, Any]:
        """The placement for `model` on this machine, its layers as ranges."""
        gpus: list[Any] = [*range(gpu_count())] or ["cpu"]
        places: dict[str, list[Any]] = {"fast": gpus[:1], "gpus": gpus, "cpu": ["cpu"], "disk": ["disk"]}
        placed: dict[str, Any] = {
            name_of(model, model.get_input_embeddings()): places[self.embedding][0],
            name_of(model, model.get_output_embeddings()): places[self.head][0],
        }
        layers = [name for name in whole_modules(model) if name.rpartition(".")[2].isdigit()]
        covered = [*placed, *layers]
        stem, cut, end = layers[0].rpartition(".")[0], 0, 0.0
        for tier, share in self.layers.items():
            for place in places[tier]:
                end += share / len(places[tier]) * len(layers)
                first, cut = cut, round(end)
                if cut > first:
                    placed[f"{stem}.{first}-{cut - 1}"] = place
        owners = sorted({name.rpartition(".")[0] for name in model.state_dict()})
        rest = [name for name in owners if not any(within(name, each) for each in covered)]
        return placed | dict.fromkeys(rest, places[self.rest][0])


def templates() -> list[str]:
    """The names of the templates in data/templates/placement."""
    return sorted(file.stem for file in TEMPLATES.glob("*.yaml"))


def template(name: str, folder: Path = TEMPLATES) -> Template:
    """Read one template. Raises ValueError for one that does not exist, and naming the field that is wrong."""
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"there is no template {name!r}; there are {', '.join(templates())}")
    return Template.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
