"""The modules of a causal language model that a plan can name, and what each style of transformers does to one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Plan = Mapping[str, str]


@dataclass(frozen=True)
class Style:
    """What a style splits, and whether a module's input and output are whole on every rank or a part of the last dimension."""

    split: str  # "columns": of the output; "packed": the same in each half; "rows": of the input; "none"
    takes_part: bool = False
    gives_part: bool = False


WHOLE = Style("none")
STYLES = {  # of transformers 5, for linear layers and embeddings; transformers/distributed/tensor_parallel.py
    "colwise": Style("columns", gives_part=True),
    "colwise_gather_output": Style("columns"),
    "colwise_rep": Style("columns"),
    "packed_colwise": Style("packed", gives_part=True),
    "rowwise": Style("rows", takes_part=True),
    "rowwise_split_input": Style("rows"),
    "rowwise_rep": Style("rows"),
    "embedding_rowwise": Style("rows"),
    "replicate": WHOLE,
}
SUMMED = "replicated_with_grad_allreduce"
NORM_STYLES = (SUMMED, "sequence_parallel")  # the gradients of all ranks are added up
ROLES = {
    "q": ("q_proj", "query"),
    "k": ("k_proj", "key"),
    "v": ("v_proj", "value"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"),
    "o": ("o_proj", "out_proj", "dense", "c_proj"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "fc_in", "w3"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "fc_out", "w2"),
}


@dataclass(frozen=True)
class Part:
    """All modules of the same key, one in each layer: `module` is the first of `count`."""

    key: str
    module: Any
    count: int

    @cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The weights of the first module itself, without those of modules in it."""
        return list(self.module.parameters(recurse=False))

    @cached_property
    def kind(self) -> str:
        """ "linear", "embedding", "norm", "container" (no weights of its own), or the name of another class."""
        import torch

        name = type(self.module).__name__
        for kind, base in (("linear", torch.nn.Linear), ("embedding", torch.nn.Embedding)):
            if isinstance(self.module, base):
                return kind
        return "container" if not self.parameters else "norm" if name.endswith("Norm") else name

    @property
    def inputs(self) -> int:
        """Columns that it takes; of an embedding its rows."""
        return self.parameters[0].shape[0 if self.kind == "embedding" else -1]

    @property
    def outputs(self) -> int:
        """Columns that it gives."""
        return self.parameters[0].shape[-1 if self.kind == "embedding" else 0]

    @property
    def group(self) -> str:
        """Key of the module around it."""
        return self.key.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The last word of its key."""
        return self.key.rpartition(".")[2]

    def divided(self, style: Style) -> int:
        """The size that `style` divides among ranks; 0 where it divides none."""
        if style.split == "none" or self.kind not in ("linear", "embedding"):
            return 0
        return self.inputs if style.split == "rows" else self.outputs


@dataclass(frozen=True)
class Block:
    """An attention or an MLP of linear layers: the part around them, those that open it by role, the one that closes it."""

    around: Part
    opening: dict[str, Part]
    closing: Part
    attention: bool


class Anatomy:
    """The parts of a model by key, built from a configuration on the meta device (no weights) or read from a model."""

    def __init__(self, config_or_model: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

        if isinstance(config_or_model, PreTrainedConfig):
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config_or_model)
        elif isinstance(config_or_model, PreTrainedModel):
            self.model = config_or_model
        else:
            raise TypeError(f"a plan is for a model or a configuration of transformers, not for {type(config_or_model).__name__}")
        self.config = self.model.config.get_text_config()
        self.heads: int = getattr(self.config, "num_attention_heads", None) or 1
        self.kv_heads: int = getattr(self.config, "num_key_value_heads", None) or self.heads
        self.own: dict[str, str] = dict(self.model.tp_plan or {})

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Every module by its key; that of the model itself is empty."""
        found: dict[str, list[Any]] = {}
        for name, module in self.model.named_modules():
            found.setdefault(generic(name), []).append(module)
        return {key: Part(key, modules[0], len(modules)) for key, modules in found.items()}

    @cached_property
    def ends(self) -> tuple[Part | None, Part | None]:
        """(embedding, output matrix); None where the model has no such module."""
        found = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedding, head = (next((part for part in self.parts.values() if part.module is module), None) for module in found)
        return embedding, head

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """By the key of the module around it, every attention and MLP of which both ends are found."""
        layers: dict[str, dict[str, Part]] = {}
        for part in self.parts.values():
            if part.kind in ("linear", "Conv1D"):
                layers.setdefault(part.group, {})[part.last] = part
        found = {}
        for group, members in layers.items():
            roles = {role: members[word] for role, words in ROLES.items() for word in reversed(words) if word in members}
            if "q" in roles:
                roles.pop("qkv", None)  # layers of two kinds under one key
            for closing, openers in (("down", ("gate", "up", "gate_up")), ("o", ("q", "k", "v", "qkv"))):
                opening = {role: part for role, part in roles.items() if role in openers}
                if opening and closing in roles:
                    found[group] = Block(self.parts[group], opening, roles[closing], attention=closing == "o")
        return found


def generic(name: str) -> str:
    """A module's key: numbers between dots become `*`, as transformers looks names up in a plan."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def refuse(plan: Plan, tp: int) -> None:
    """Raise TypeError for a plan that is no dictionary with texts as keys, ValueError for a `tp` that is no number of ranks."""
    if not isinstance(plan, Mapping) or not all(isinstance(key, str) for key in plan):
        raise TypeError(f'a plan is a dictionary such as {{"model.layers.*.mlp.up_proj": "colwise"}}; this is {plan!r}')
    if not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp is {tp!r}: it must be a whole number, at least 1")


def published_plan(config_or_model: Any) -> dict[str, str]:
    """The plan that transformers ships for this architecture, with the keys that match its modules; {} where it ships none."""
    return Anatomy(config_or_model).own
