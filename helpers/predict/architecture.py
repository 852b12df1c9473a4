"""The shape of a causal language model, read from the attributes of its config; no model and no torch needed.

The counts follow the modelling code of transformers 5 and are compared with real models on the meta device in
tests/test_predict.py. A config that is not understood is refused with what is missing, never guessed at.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from helpers import record

__all__ = ["Architecture", "Parameter", "architecture"]

FACTS = record.data("predict")


@dataclass(frozen=True)
class Parameter:
    """One weight tensor. `split` is what tensor parallelism divides it by: "column", "row", "kv" heads, "vocabulary", "none".

    `inputs` is the width of what a linear layer reads, 0 for other tensors: quantisation and autocast's 16-bit copies apply to
    linear layers only. transformers holds the matrices of all `experts` of a layer in one tensor.
    """

    name: str
    elements: int
    split: str = "none"
    inputs: int = 0
    experts: int = 1


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder, in elements; `intermediate` is the MLP width of dense layers, `expert_intermediate` of experts."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    activation: str = "gelu"
    gated: bool = True
    norm: str = "rms"  # "layer" has a bias and is one fused kernel
    norms: int = 2  # in a layer
    qk_norm: bool = False
    fused_qkv: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    positions: int = 0  # rows of a learned position table
    embedding_norm: bool = False
    dropout: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0  # an expert that every token visits
    shared_gate: bool = False
    router_bias: bool = False
    dense_layers: frozenset[int] = frozenset()  # of a mixture of experts
    own_rotary_tables: bool = False  # each layer spreads cosine and sine anew (ERNIE)

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads; the same for values."""
        return self.kv_heads * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return bool(self.experts) and layer not in self.dense_layers

    def layer_parameters(self, layer: int) -> list[Parameter]:
        """The weights of one decoder layer."""
        return list(_layer(self, self.is_sparse(layer)))

    def embedding_parameters(self) -> list[Parameter]:
        """The token table, learned positions and their norm."""
        found = [Parameter("embedding", self.vocabulary * self.hidden, "vocabulary")]
        found += [Parameter("positions", self.positions * self.hidden)] * bool(self.positions)
        return found + self._norm() * self.embedding_norm

    def head_parameters(self, copy_of_tied: bool = False) -> list[Parameter]:
        """The last norm and the output matrix; a tied one counts only where it lives on another rank than the embedding."""
        if self.tied and not copy_of_tied:
            return self._norm()
        return self._norm() + _linear("head", self.hidden, self.vocabulary, self.head_bias, "vocabulary")

    def parameters(self) -> list[Parameter]:
        """All weights of the model, a tied matrix once."""
        layers = [each for layer in range(self.layers) for each in self.layer_parameters(layer)]
        return [*self.embedding_parameters(), *layers, *self.head_parameters()]

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return sum(each.elements for each in self.parameters())

    def _norm(self) -> list[Parameter]:
        return [Parameter("norm", self.hidden)] * (2 if self.norm == "layer" else 1)

    def _attention(self) -> list[Parameter]:
        hidden, query, bias = self.hidden, self.query, self.qkv_bias
        if self.fused_qkv:
            found = _linear("qkv", hidden, 3 * query, bias, "column")
        else:
            found = _linear("q", hidden, query, bias, "column")
            found += _linear("k", hidden, self.key, bias, "kv") + _linear("v", hidden, self.key, bias, "kv")
        return (
            found + _linear("o", query, hidden, self.output_bias, "row") + [Parameter("norm", self.head_dim)] * 2 * self.qk_norm
        )

    def _mlp(self, width: int) -> list[Parameter]:
        wide = _linear("up", self.hidden, width, self.mlp_bias, "column") * (2 if self.gated else 1)
        return wide + _linear("down", width, self.hidden, self.mlp_bias, "row")

    def _experts(self) -> list[Parameter]:
        hidden, count, width = self.hidden, self.experts, self.expert_intermediate
        found = [Parameter("router", hidden * count)] + [Parameter("router.bias", count)] * self.router_bias
        found += [
            Parameter("experts.up", count * (1 + self.gated) * hidden * width, "column", hidden, count),
            Parameter("experts.down", count * hidden * width, "row", width, count),
        ]
        if self.shared_intermediate:
            found += self._mlp(self.shared_intermediate) + [Parameter("shared_gate", hidden)] * self.shared_gate
        return found


@lru_cache(maxsize=64)
def _layer(shape: Architecture, sparse: bool) -> list[Parameter]:
    """The weights of a layer; worked out once, because a plan asks for them thousands of times."""
    mlp = shape._experts() if sparse else shape._mlp(shape.intermediate)
    return shape._norm() * shape.norms + shape._attention() + mlp


def _linear(name: str, inputs: int, outputs: int, bias: bool, split: str) -> list[Parameter]:
    found = [Parameter(name, inputs * outputs, split, inputs)]
    return found + [Parameter(f"{name}.bias", outputs, "none" if split == "row" else split)] * bias


def architecture(config: Any) -> Architecture:
    """Read the shape from a transformers config, a mapping or any object with its attributes.

    Raises ValueError where the config is of a design that is not covered, or lacks what the arithmetic needs.
    """
    if isinstance(config, Architecture):
        return config
    config = SimpleNamespace(**config) if isinstance(config, Mapping) else config
    family = getattr(config, "model_type", "") or ""
    if hasattr(config, "text_config") and not hasattr(config, "hidden_size"):
        raise ValueError(f"{family or 'this'} is a model of text and images: pass its text_config to predict the language model")
    for attribute, reason in FACTS["not_covered"].items():
        if getattr(config, attribute, None):
            raise ValueError(f"{family or 'this config'} sets {attribute}: {reason}, and predict would be wrong")
    if family not in FACTS["families"] and not hasattr(config, "rms_norm_eps"):
        raise ValueError(
            f"model_type {family!r} is neither one of {', '.join(FACTS['families'])} nor like Llama (no rms_norm_eps): "
            "what its layers hold is not known here"
        )
    read = _read(config, "attributes", family)
    if family == "opt":
        projected = getattr(config, "word_embed_proj_dim", read["hidden"]) != read["hidden"]
        if projected or not getattr(config, "do_layer_norm_before", True):
            raise ValueError("OPT with projected embeddings or norms after each block (opt-350m) is not covered")
    experts, positions = read.pop("experts", 0), read.pop("positions", 0)
    if family in _MORE_POSITIONS:
        read["positions"] = positions + _MORE_POSITIONS[family]
    if experts > 1:
        read |= {"experts": experts} | _mixture(_read(config, "experts", family), read["layers"], read["intermediate"])
    read["dropout"] = read.get("dropout", 0) > 0
    whole = {"kv_heads": read["heads"], "head_dim": read["hidden"] // read["heads"]}
    return Architecture(family=family, **whole | read | FACTS["families"].get(family, {}))


_MORE_POSITIONS = {"gpt2": 0, "opt": 2}  # families with a table of positions, and its rows beyond the length: for padding


def _read(config: Any, table: str, family: str) -> dict[str, Any]:
    """The fields of a table in data/predict.yaml that the config gives. Raises ValueError where one that is needed is missing."""
    found = {}
    for field, names in FACTS[table].items():
        given = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        if given:
            found[field] = given[0]
        elif field == "intermediate" and family in ("gpt2", "gptj", "bloom"):
            found[field] = 4 * found["hidden"]
        elif field in FACTS["needed"] and (field != "positions" or family in _MORE_POSITIONS):
            what = FACTS["needed"][field]
            raise ValueError(f"the config has no {what}: looked for {', '.join(names)} (model_type {family!r})")
    return found


def _mixture(read: dict[str, Any], layers: int, intermediate: int) -> dict[str, Any]:
    """The widths of experts, and the layers that have none."""
    width, last, step = read.get("width", intermediate), read.get("last", -1), read.get("step", 1)
    sparse = range(read.get("first", 0), layers if last < 0 else last + 1)
    dense = {layer for layer in range(layers) if layer not in sparse or (layer + 1) % step}
    return {
        "experts_per_token": read["experts_per_token"],
        "expert_intermediate": width,
        "shared_intermediate": read.get("shared_width") or read.get("shared_experts", 0) * width,
        "dense_layers": frozenset(dense | set(read.get("dense_layers", []))),
    }
