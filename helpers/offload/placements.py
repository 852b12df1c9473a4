"""Check where the parts of a model are to live, before anything is loaded; ranges of layers are written out.

The rules are those of accelerate 1.15; tests/test_offload.py shows what happens without the check.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helpers import machine

_RANGE = re.compile(r"(.*?)(\d+)-(\d+)")


@dataclass(frozen=True, repr=False)
class Problem:
    """Something wrong with a placement: the key, what is wrong with it, and what would be right."""

    key: Any
    reason: str
    mend: str

    def __repr__(self) -> str:
        return f"{self.key!r}: {self.reason}. Right: {self.mend}."


def device_map(model: Any, placement: Mapping[str, Any]) -> dict[str, Any]:
    """The map that accelerate takes: ranges written out, one key a module. `model` may be an empty one (on "meta").

    Raises ValueError naming every problem of the placement.
    """
    found = _Check(model, placement)
    if found.problems:
        raise ValueError("this placement cannot be used:\n" + "\n".join(f"  {each!r}" for each in found.problems))
    return found.devices


def problems(model: Any, placement: Mapping[str, Any], *, gpus: int | None = None) -> list[Problem]:
    """Return what is wrong with a placement; an empty list where nothing is. `gpus` judges it for a machine with so many."""
    return _Check(model, placement, gpus).problems


def tiers(model: Any, placement: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of parameters on each tier, tied ones once, in the dtype of `model`; raises what `device_map` raises."""
    found = device_map(model, placement)
    sizes: dict[str, int] = dict.fromkeys(map(str, found.values()), 0)
    shared = set(tied_modules(model)[1:])
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in shared:
            sizes[str(found[next(key for key in ancestors(name) if key in found)])] += tensor.nbytes
    return sizes


class _Check:
    """`problems` of a placement, and `devices`: the tier of each module that its keys name."""

    def __init__(self, model: Any, placement: Any, gpus: int | None = None) -> None:
        self.gpus = gpu_count() if gpus is None else gpus
        self.problems: list[Problem] = []
        self.devices: dict[str, Any] = {}
        self.modules = [name for name, _ in model.named_modules()]
        self.tensors = list(model.state_dict())
        if not isinstance(placement, Mapping) or not placement:
            strategy = "accelerate.infer_auto_device_map(model, max_memory=…) for what accelerate would choose"
            self._add(placement, "is no map from modules to tiers", f'{{"model.layers.0-3": "cpu", …}}, or {strategy}')
            return
        said: dict[str, Any] = {}  # module -> the key that named it
        for key, tier in placement.items():
            good = self._tier(key, tier)
            for name in self._expanded(key):
                other = next((said[each] for each in [name, *ancestors(name)] if each in said), None)
                other = next((said[each] for each in said if name in ["", *ancestors(each)]), None) if other is None else other
                if other is not None:
                    self._add(key, f"overlaps with {other!r}: {name or 'all'!r} is named by both", "each module in one key")
                said.setdefault(name, key)
                self.devices[name] = tier if good else None
        placed = {
            name: next((self.devices[each] for each in ancestors(name) if each in self.devices), ...) for name in self.tensors
        }
        self._whole(model, placed)

    def _add(self, key: Any, reason: str, mend: str) -> None:
        self.problems.append(Problem(key, reason, mend))

    def _tier(self, key: Any, tier: Any) -> bool:
        gpus = self.gpus
        number = int(tier[5:]) if isinstance(tier, str) and re.fullmatch(r"cuda:\d+", tier) else tier
        if isinstance(number, int) and not isinstance(number, bool):
            if not 0 <= number < gpus:
                have = f"0 to {gpus - 1}" if gpus > 1 else "0" if gpus else '"cpu" or "disk": there is no GPU here'
                self._add(key, f"GPU {tier!r} is not on this machine", have)
                return False
        elif tier not in ("cpu", "disk"):
            self._add(key, f"{tier!r} is no tier", 'the number of a GPU, "cpu" or "disk"')
            return False
        return True

    def _expanded(self, key: Any) -> list[str]:
        """The modules that a key names; none where there is a problem with it."""
        if not isinstance(key, str):
            self._add(key, "is no name of a module", 'text such as "model.layers.0-3"')
            return []
        match = _RANGE.fullmatch(key)
        if match is None or key in self.modules:
            return [key] if key in self.modules or self._unknown(key) else []
        stem, first, last = match[1], int(match[2]), int(match[3])
        numbered = [int(name[len(stem) :]) for name in self.modules if name.startswith(stem) and name[len(stem) :].isdigit()]
        if not numbered:
            return [key] if self._unknown(key, f"{stem}{first}") else []
        if first > last:
            self._add(key, "the range runs backwards", f"{f'{stem}{last}-{first}'!r}")
        elif last > max(numbered):
            self._add(key, f"goes beyond the last, {stem}{max(numbered)}", f"{f'{stem}{first}-{max(numbered)}'!r}")
        else:
            return [f"{stem}{number}" for number in range(first, last + 1)]
        return []

    def _unknown(self, key: str, single: str | None = None) -> bool:
        """Say what is wrong with a key that names no module; always False."""
        word = single or key
        if key in self.tensors:
            self._add(key, "names a tensor, and a tensor goes where its module goes", repr(key.rpartition(".")[0]))
        elif "*" in key or key.endswith("-"):
            self._add(key, "is no range: it has no end", '"model.layers.0-3", first and last included')
        else:
            ends = [name for name in self.modules if name.endswith(f".{word}")]
            near = ends or difflib.get_close_matches(word, self.modules, n=1, cutoff=0.7)
            what = "a range of modules" if single else "a module"
            self._add(key, f"there is no such {what[2:]} in this model", repr(near[0]) if near else "a name from named_modules()")
        return False

    def _whole(self, model: Any, placed: dict[str, Any]) -> None:
        """What only the map as a whole shows: modules left out, layers cut, ties, nothing but the disk."""
        layers = whole_modules(model)
        missing: dict[str, list[str]] = {}
        for name in (name for name, tier in placed.items() if tier is ...):
            layer = next((each for each in ancestors(name) if each in layers), None)
            missing.setdefault(layer or name.rpartition(".")[0], []).append(name)
        if missing:
            what = "has no tier (transformers would take the CPU, without a word)"
            self._add(", ".join(_as_ranges(list(missing))), what, "a key for each")
        for layer in layers:
            tiers_of = {str(tier) for name, tier in placed.items() if name.startswith(f"{layer}.") and tier not in (..., None)}
            if len(tiers_of) > 1:
                self._add(
                    layer, f"is cut: parts on {' and '.join(sorted(tiers_of))}, and its residual adds across", "one tier for it"
                )
        tied = tied_modules(model)
        held = [placed.get(f"{name}.weight", ...) for name in tied]
        if ... not in held and None not in held and tied:
            if len(set(held)) > 1:
                self._add(tied[1], f"shares its weight with {tied[0]!r}, which is on {held[0]!r}", f"both on {held[0]!r}")
            elif "disk" in held:
                self._add(tied[0], f"shares its weight with {tied[1]!r}: accelerate offloads it under one of the names only",
                          "both on a device or the CPU")  # fmt: skip
        if set(self.devices.values()) == {"disk"}:
            self._add("all", "is on the disk: accelerate needs one device to compute on", 'the norm at the end on "cpu"')


def gpu_count() -> int:
    return len(machine.gpus()) if machine.torch_cuda() else 0


def ancestors(name: str) -> list[str]:
    """The modules that `name` lies in, innermost first, and the root, ""."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]


def whole_modules(model: Any) -> list[str]:
    """The modules that may not be cut: the classes that the model's code names so."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    return [name for name, module in model.named_modules() if type(module).__name__ in whole]


def tied_modules(model: Any) -> list[str]:
    """The input embedding and the head where they share their weight, else nothing."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [name_of(model, end) for end in ends] if model.config.tie_word_embeddings and None not in ends else []


def name_of(model: Any, module: Any) -> str:
    return next(name for name, each in model.named_modules() if each is module)


def _as_ranges(names: list[str]) -> list[str]:
    """Neighbours such as a.0, a.1, a.2 as "a.0-2"."""
    joined: list[str] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        earlier = re.fullmatch(re.escape(stem) + r"\.(\d+)(?:-(\d+))?", joined[-1]) if joined and number.isdigit() else None
        if earlier and int(earlier[2] or earlier[1]) + 1 == int(number):
            joined[-1] = f"{stem}.{earlier[1]}-{number}"
        else:
            joined.append(name)
    return joined
