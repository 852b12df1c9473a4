"""The shape of a causal language model, read from the attributes of its config; no model and no torch needed.

The counts follow the modelling code of transformers 5 and are compared with real models on the meta device in
tests/test_predict.py. A config that is not understood is refused with what is missing, never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

__all__ = ["Architecture", "Parameter", "architecture"]

FACTS = yaml.safe_load((Path(__file__).parents[2] / "data" / "predict.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Parameter:
    """One weight tensor. `split` is what tensor parallelism divides it by: "column", "row", "kv" heads, "vocabulary", "none"."""

    name: str
    elements: int
    split: str = "none"
    linear: bool = False  # the weight of a linear layer: what quantisation and autocast's 16-bit copies apply to


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
    tied: bool
    activation: str
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
        return found + [Parameter("embedding_norm", each) for each in self._norm(self.hidden) * self.embedding_norm]

    def head_parameters(self, copy_of_tied: bool = False) -> list[Parameter]:
        """The last norm and the output matrix; a tied one counts only where it lives on another rank than the embedding."""
        found = [Parameter("final_norm", each) for each in self._norm(self.hidden)]
        if not self.tied or copy_of_tied:
            found += [Parameter("head", self.vocabulary * self.hidden, "vocabulary", linear=True)]
            found += [Parameter("head.bias", self.vocabulary, "vocabulary")] * self.head_bias
        return found

    def parameters(self) -> list[Parameter]:
        """All weights of the model, a tied matrix once."""
        layers = [each for layer in range(self.layers) for each in self.layer_parameters(layer)]
        return [*self.embedding_parameters(), *layers, *self.head_parameters()]

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return sum(each.elements for each in self.parameters())

    def _norm(self, width: int) -> list[int]:
        return [width] if self.norm == "rms" else [width, width]

    def _mlp(self, width: int) -> list[Parameter]:
        names = ("gate", "up") if self.gated else ("up",)
        return [each for name in names for each in _linear(name, self.hidden, width, self.mlp_bias, "column")] + _linear(
            "down", width, self.hidden, self.mlp_bias, "row"
        )


@lru_cache(maxsize=64)
def _layer(shape: Architecture, sparse: bool) -> list[Parameter]:
    """The weights of a layer; worked out once, because a plan asks for them thousands of times."""
    h, norm = shape.hidden, shape._norm(shape.hidden)
    found = [Parameter(f"norm{index}", each) for index in range(shape.norms) for each in norm]
    if shape.fused_qkv:
        found += _linear("qkv", h, 3 * shape.query, shape.qkv_bias, "column")
    else:
        found += _linear("q", h, shape.query, shape.qkv_bias, "column")
        found += _linear("k", h, shape.key, shape.qkv_bias, "kv") + _linear("v", h, shape.key, shape.qkv_bias, "kv")
    found += _linear("o", shape.query, h, shape.output_bias, "row")
    if shape.qk_norm:
        found += [Parameter("q_norm", shape.head_dim), Parameter("k_norm", shape.head_dim)]
    if not sparse:
        return found + shape._mlp(shape.intermediate)
    found += [Parameter("router", h * shape.experts)] + [Parameter("router.bias", shape.experts)] * shape.router_bias
    found += [  # transformers holds all experts of a layer in two tensors
        Parameter("experts.up", shape.experts * (1 + shape.gated) * h * shape.expert_intermediate, "column", linear=True),
        Parameter("experts.down", shape.experts * h * shape.expert_intermediate, "row", linear=True),
    ]
    if shape.shared_intermediate:
        found += shape._mlp(shape.shared_intermediate) + [Parameter("shared_gate", h)] * shape.shared_gate
    return found


def _linear(name: str, inputs: int, outputs: int, bias: bool, split: str) -> list[Parameter]:
    found = [Parameter(name, inputs * outputs, split, linear=True)]
    return found + [Parameter(f"{name}.bias", outputs, "none" if split == "row" else split)] * bias


_MISSING = object()


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

    def read(what: str, *names: str, default: Any = _MISSING) -> Any:
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return value
        if default is _MISSING:
            raise ValueError(f"the config has no {what}: looked for {', '.join(names)} (model_type {family!r})")
        return default

    hidden = read("hidden size", "hidden_size", "n_embd")
    heads = read("number of attention heads", "num_attention_heads", "n_head")
    layers = read("number of layers", "num_hidden_layers", "n_layer")
    intermediate = read(
        "MLP width",
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        default=4 * hidden if family in ("gpt2", "gptj", "bloom") else _MISSING,
    )
    traits: dict[str, Any] = {
        "qkv_bias": read("", "attention_bias", "use_bias", "enable_bias", default=False),
        "output_bias": read("", "attention_bias", "use_bias", "enable_bias", default=False),
        "mlp_bias": read("", "mlp_bias", "use_bias", "enable_bias", default=False),
        **FACTS["families"].get(family, {}),
    }
    if family == "gpt2":
        traits["positions"] = read("number of positions", "n_positions", "max_position_embeddings")
    if family == "opt":
        if getattr(config, "word_embed_proj_dim", hidden) != hidden or not getattr(config, "do_layer_norm_before", True):
            raise ValueError("OPT with projected embeddings or norms after each block (opt-350m) is not covered")
        traits["positions"] = read("number of positions", "max_position_embeddings") + 2  # two rows of padding
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=read("", "num_key_value_heads", default=heads),
        head_dim=read("", "head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocabulary=read("vocabulary size", "vocab_size"),
        tied=read("", "tie_word_embeddings", default=False),
        activation=read("activation", "hidden_act", "hidden_activation", "activation_function", default="gelu"),
        dropout=read("", "resid_pdrop", "hidden_dropout", "dropout", default=0) > 0,
        **traits,
        **_experts(config, read, layers, intermediate),
    )


def _experts(config: Any, read: Any, layers: int, intermediate: int) -> dict[str, Any]:
    """The mixture of experts that the config describes; nothing where it describes none."""
    experts = read("", "num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts", default=0)
    if experts < 2:
        return {}
    width = read("", "moe_intermediate_size", default=intermediate)
    shared = read("", "shared_expert_intermediate_size", default=0)
    shared = shared or read("", "moe_num_shared_experts", "n_shared_experts", default=0) * width
    first, last = read("", "moe_layer_start_index", default=0), read("", "moe_layer_end_index", default=layers - 1)
    last = layers - 1 if last < 0 else last
    every = read("", "decoder_sparse_step", "moe_layer_interval", default=1)
    dense = set(read("", "mlp_only_layers", default=[])) | set(range(first)) | set(range(last + 1, layers))
    dense |= {layer for layer in range(layers) if (layer + 1) % every}
    return {
        "experts": experts,
        "experts_per_token": read("experts per token", "num_experts_per_tok", "moe_k"),
        "expert_intermediate": width,
        "shared_intermediate": shared,
        "dense_layers": frozenset(dense),
    }
