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

SLOW = ("cpu", "disk")
_RANGE = re.compile(r"(.*?)(\d+)-(\d+)")
_OTHER_RANGE = re.compile(r"(.*?)[\[(]?\d+\s*[^\w\s]+\s*\d.*")  # 0:3, 0..3, [0-3], 0,1,2, 0-3.mlp and the like


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
    return _usable(model, placement).devices


def problems(model: Any, placement: Mapping[str, Any], *, gpus: int | None = None) -> list[Problem]:
    """Return what is wrong with a placement; an empty list where nothing is. `gpus` judges it for a machine with so many."""
    return _Check(model, placement, gpus).problems


def tiers(model: Any, placement: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of parameters on each tier, tied ones once, in the dtype of `model`; raises what `device_map` raises."""
    tier_of = _usable(model, placement).tier_of
    sizes: dict[str, int] = dict.fromkeys(map(str, tier_of.values()), 0)
    shared = tied_modules(model)[1:]
    for name, tensor in model.state_dict().items():
        module = name.rpartition(".")[0]
        if module not in shared:
            sizes[str(tier_of[module])] += tensor.nbytes
    return sizes


def _usable(model: Any, placement: Any) -> _Check:
    found = _Check(model, placement)
    if found.problems:
        raise ValueError("this placement cannot be used:\n" + "\n".join(f"  {each!r}" for each in found.problems))
    return found


class _Check:
    """`problems` of a placement; `devices`, its keys written out; `tier_of`, each module's tier, None where it is wrong."""

    def __init__(self, model: Any, placement: Any, gpus: int | None = None) -> None:
        self.gpus = gpu_count() if gpus is None else gpus
        self.problems: list[Problem] = []
        self.devices: dict[str, Any] = {}
        self.tier_of: dict[str, Any] = {}
        self.modules = [name for name, _ in model.named_modules()]
        self.tensors = list(model.state_dict())
        if not isinstance(placement, Mapping) or not placement:
            strategy = "accelerate.infer_auto_device_map(model, max_memory=…) for what accelerate would choose"
            self._add(placement, "is no map from modules to tiers", f'{{"model.layers.0-3": "cpu", …}}, or {strategy}')
            return
        said: dict[str, Any] = {}  # module -> the key that named it, or one that it lies in
        for key, tier in placement.items():
            good = self._tier(key, tier)
            for name in self._expanded(key):
                inside = [each for each in self.modules if within(each, name)]
                if taken := [said[each] for each in inside if each in said]:
                    self._add(key, f"overlaps with {taken[0]!r}: {name or 'all'!r} is named by both", "each module in one key")
                self.devices[name] = tier
                said = dict.fromkeys(inside, key) | said
                self.tier_of |= dict.fromkeys(inside, spelt(tier) if good else None)
        self._whole(model)

    def _add(self, key: Any, reason: str, mend: str) -> None:
        self.problems.append(Problem(key, reason, mend))

    def _tier(self, key: Any, tier: Any) -> bool:
        """Whether a tier is one of this machine; says so where it is not."""
        place = spelt(tier)
        if place not in SLOW and not (type(place) is int and place >= 0):
            self._add(key, f"{tier!r} is no tier", 'the number of a GPU, "cpu" or "disk"')
        elif type(place) is int and place >= self.gpus:
            have = f"a GPU from 0 to {self.gpus - 1}" if self.gpus else '"cpu" or "disk": there is no GPU here'
            self._add(key, f"GPU {tier!r} is not on this machine", have)
        else:
            return True
        return False

    def _expanded(self, key: Any) -> list[str]:
        """The modules that a key names; none where there is a problem with it."""
        if key in self.modules:
            return [key]
        if not isinstance(key, str):
            self._add(key, "is no name of a module", 'text such as "model.layers.0-3"')
            return []
        if key in self.tensors:
            self._add(key, "names a tensor, and a tensor goes where its module goes", repr(key.rpartition(".")[0]))
            return []
        if "*" in key or key.endswith("-"):
            self._add(key, "is no range: it has no end", '"model.layers.0-3", first and last included')
            return []
        match = _RANGE.fullmatch(key)
        stem, first, last = (match[1], int(match[2]), int(match[3])) if match else (key, 0, 0)
        end = max((int(name[len(stem) :]) for name in self.modules if re.fullmatch(re.escape(stem) + r"\d+", name)), default=-1)
        other = _OTHER_RANGE.fullmatch(key)
        if end < 0 and other and any(re.fullmatch(re.escape(other[1]) + r"\d+", name) for name in self.modules):
            self._add(key, "is no range in the way ranges are written here", f'"{other[1]}0-3", first and last included')
        elif not match or end < 0:
            word, what = (f"{stem}{first}", "range of modules") if match else (key, "module")
            near = [name for name in self.modules if name.endswith(f".{word}")]
            near = near or difflib.get_close_matches(word, self.modules, n=1, cutoff=0.7)
            self._add(key, f"there is no such {what} in this model", repr(near[0]) if near else "a name from named_modules()")
        elif first > last:
            self._add(key, "the range runs backwards", f"{f'{stem}{last}-{first}'!r}")
        elif last > end:
            self._add(key, f"goes beyond the last, {stem}{end}", f"{f'{stem}{first if first <= end else 0}-{end}'!r}")
        else:
            return [f"{stem}{number}" for number in range(first, last + 1)]
        return []

    def _whole(self, model: Any) -> None:
        """What only the map as a whole shows: modules left out, layers cut, ties, nothing but the disk."""
        holders = dict.fromkeys(name.rpartition(".")[0] for name in self.tensors)  # modules with tensors of their own, in order
        layers = whole_modules(model)
        gpus = [str(place) for place in map(spelt, self.devices.values()) if place not in SLOW]
        main = gpus[0] if gpus else "cpu"  # what lies on the CPU or the disk computes there
        missing = [name for name in holders if name not in self.tier_of]
        whole = {name: next((layer for layer in layers if within(name, layer)), name) for name in missing}
        if missing:
            named = ", ".join(_as_ranges(list(dict.fromkeys(whole.values()))))
            self._add(named, "has no tier (refused, or all goes to the CPU, without a word)", "a key for each")
        for layer in layers:
            parts = {str(self.tier_of.get(name)) for name in holders if within(name, layer)} - {"None"}
            if len(parts) > 1:
                across = ", and its residual adds across" if len({main if part in SLOW else part for part in parts}) > 1 else ""
                self._add(layer, f"is cut: parts on {' and '.join(sorted(parts))}{across}", "one tier for it")
        held = {name: self.tier_of.get(name) for name in tied_modules(model)}
        if held and None not in held.values():
            (first, tier), (second, other) = held.items()
            if tier != other:
                self._add(second, f"shares its weight with {first!r}, which is on {tier!r}", f"both on {tier!r}")
            elif tier == "disk":
                reason = f"shares its weight with {second!r}: accelerate offloads it under one of the names only"
                self._add(first, reason, "both on a device or the CPU")
        if self.devices and all(tier == "disk" for tier in self.devices.values()):
            self._add("all", "is on the disk: accelerate needs one device to compute on", 'the norm at the end on "cpu"')


def gpu_count() -> int:
    return len(machine.gpus()) if machine.torch_cuda() else 0


def spelt(tier: Any) -> Any:
    """A tier in one spelling: the number of the GPU for "cuda:1"; anything that is no text as it is."""
    match = re.fullmatch(r"cuda:(0|[1-9]\d*)", tier) if isinstance(tier, str) else None
    return int(match[1]) if match else tier


def within(name: str, module: str) -> bool:
    """Whether a module is another one or lies in it."""
    return f"{name}.".startswith(f"{module}.") or not module


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
