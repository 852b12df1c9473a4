"""Names of parameters and layers as the whole, unwrapped model has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Rename = Callable[[str], str] | Mapping[str, str]


def renamed(name: str, rename: Rename | None) -> str:
    """The name without what DDP and torch.compile put before it, then as `rename`, a function or beginnings, says."""
    bare = (name + ".").replace("_orig_mod.", "").removeprefix("module.")
    if callable(rename):
        return rename(bare.removesuffix("."))
    start = max((each for each in rename or () if bare.startswith(each)), key=len, default="")
    return ((rename or {}).get(start, "") + bare[len(start) :]).removesuffix(".")


def stage_names(parts: Sequence[range], index: int, tied: bool = True) -> dict[str, str]:
    """For `rename`: what the parameters of `pipeline.Stage(model, parts, index)` are called in the whole model."""
    names = {f"body.layers.{place}.": f"model.layers.{layer}." for place, layer in enumerate(parts[index])}
    head = "model.embed_tokens." if tied else "lm_head."
    return names | {"embedding.": "model.embed_tokens.", "body.": "model.", "head.": head}
