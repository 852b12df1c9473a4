"""Names of parameters and layers as the whole, unwrapped model has them."""

from collections.abc import Mapping, Sequence

Rename = Mapping[str, str]  # how names begin in this stage -> how they begin in the whole model


def renamed(name: str, rename: Rename | None) -> str:
    """The name without what DDP and torch.compile put before it, then with the longest beginning that `rename` knows replaced."""
    bare = (name + ".").replace("_orig_mod.", "").removeprefix("module.")
    known = rename or {}
    start = max((each for each in known if bare.startswith(each)), key=len, default="")
    return (known.get(start, "") + bare.removeprefix(start)).removesuffix(".")


def stage_names(parts: Sequence[range], index: int, tied: bool = True) -> dict[str, str]:
    """For `rename`: what the parameters of `pipeline.Stage(model, parts, index)` are called in the whole model."""
    names = {f"body.layers.{place}.": f"model.layers.{layer}." for place, layer in enumerate(parts[index])}
    head = "model.embed_tokens." if tied else "lm_head."
    return names | {"embedding.": "model.embed_tokens.", "body.": "model.", "head.": head}
