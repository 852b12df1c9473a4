"""The modules of a causal language model that a plan can name, and what each style of transformers does to one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
class Parameter:
    """One weight tensor of a model: its full name, whole shape and bytes of an element."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int


@dataclass(frozen=True)
class Part:
    """All modules of the same key, one in each layer; sizes are those of the first. `parameters` are those of all of them."""

    key: str
    kind: str  # "linear", "embedding", "norm", "container", or the name of another class
    inputs: int  # of an embedding its rows
    outputs: int
    count: int
    parameters: tuple[Parameter, ...]

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


class Anatomy:
    """The parts of a model by key, built from a configuration on the meta device (no weights) or read from a model."""

    def __init__(self, config_or_model: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

        model = config_or_model
        if not isinstance(model, (PreTrainedModel, PreTrainedConfig)):
            raise TypeError(f"a plan is for a model or a configuration of transformers, not for {type(model).__name__}")
        if not isinstance(model, PreTrainedModel):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config_or_model)
        self.model: PreTrainedModel = model
        self.config = model.config.get_text_config()
        self.heads: int = getattr(self.config, "num_attention_heads", None) or 1
        self.kv_heads: int = getattr(self.config, "num_key_value_heads", None) or self.heads
        self.own: dict[str, str] = dict(model.tp_plan or {})

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Every module by its key, the model itself left out."""
        found: dict[str, list[tuple[str, Any]]] = {}
        for name, module in self.model.named_modules():
            if name:
                found.setdefault(generic(name), []).append((name, module))
        return {key: _part(key, modules) for key, modules in found.items()}

    @cached_property
    def ends(self) -> tuple[Part | None, Part | None]:
        """(embedding, output matrix); None where the model has no such module."""
        names = {id(module): name for name, module in self.model.named_modules()}
        found = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedding, head = (self.parts.get(generic(names.get(id(module), ""))) for module in found)
        return embedding, head

    @property
    def tied(self) -> bool:
        """Whether embedding and output matrix are one tensor."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def source(self, key: str) -> str:
        """The code of the class of a module."""
        return next(inspect.getsource(type(module)) for name, module in self.model.named_modules() if generic(name) == key)

    @cached_property
    def groups(self) -> dict[str, dict[str, Part]]:
        """Linear layers by the key of the module around them and their role in attention or MLP, where both ends are found."""
        gathered: dict[str, dict[str, Part]] = {}
        for part in self.parts.values():
            if part.kind in ("linear", "Conv1D"):
                gathered.setdefault(part.group, {})[part.last] = part
        found = {}
        for group, members in gathered.items():
            roles = {role: members[word] for role, words in ROLES.items() for word in reversed(words) if word in members}
            attention, mlp = {"q", "k", "v", "qkv"} & set(roles), {"gate", "up", "gate_up"} & set(roles)
            kept = (attention | {"o"} if attention else set()) | (mlp | {"down"} if mlp else set())
            kept -= {"qkv"} if "q" in kept else set()  # layers of two kinds under one key
            roles = {role: part for role, part in roles.items() if role in kept}
            if ("o" in roles and attention) or ("down" in roles and mlp):
                found[group] = roles
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


def _part(key: str, modules: list[tuple[str, Any]]) -> Part:
    import torch

    first = modules[0][1]
    parameters = tuple(
        Parameter(f"{name}.{own}", tuple(tensor.shape), tensor.element_size())
        for name, module in modules
        for own, tensor in module.named_parameters(recurse=False)
    )
    inputs = outputs = parameters[0].shape[-1] if parameters and parameters[0].shape else 0
    if isinstance(first, torch.nn.Linear):
        kind, inputs, outputs = "linear", first.in_features, first.out_features
    elif isinstance(first, torch.nn.Embedding):
        kind, inputs, outputs = "embedding", first.num_embeddings, first.embedding_dim
    elif parameters and type(first).__name__.endswith("Norm"):
        kind = "norm"
    else:
        kind = type(first).__name__ if parameters else "container"
    return Part(key, kind, inputs, outputs, len(modules), parameters)
