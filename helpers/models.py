"""Load or build a causal language model by name; files are checked and memory is counted before anything is loaded.

A name is "tiny-ernie" (shipped in `data/tiny_ernie`), "ernie-0.3b" (baidu/ERNIE-4.5-0.3B-PT), any other `owner/name` on the
Hugging Face hub, or the path of a folder. What is not shipped is looked for in the folder that the environment variable
WORKSHOP_MODELS_FOLDER names (as `owner/name` or `name` inside it), then in the local hub cache, then on the hub.
Weights are read from safetensors only, and code that comes with a model is never run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from helpers import machine, model_files
from helpers.model_files import ERNIE, HUB_IDS, TINY, TINY_FOLDER

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def default_name() -> str:
    """The model that notebooks use: WORKSHOP_MODEL, else "ernie-0.3b" where a GPU and its weights are at hand, else "tiny-ernie".

    A rank on the CPU sees no GPU while the kernel that started it may see one, so ask where the model is used.
    """
    if chosen := os.environ.get("WORKSHOP_MODEL"):
        return chosen
    if machine.device().type == "cuda" and (place := model_files.at_hand(HUB_IDS[ERNIE])):
        try:
            model_files.check(place)
        except (FileNotFoundError, ValueError):
            return TINY
        return ERNIE
    return TINY


def folder(name: str | None = None) -> Path:
    """The local folder with the weights and the tokenizer of `name` (None: the default), fetched from the hub if need be.

    Raises ValueError for a name that is neither known, nor a folder, nor `owner/name`, for a model that the hub does not have or
    does not give to everyone, and for weights that are not safetensors; FileNotFoundError when files are missing;
    ConnectionError when the hub is needed and does not answer.
    """
    return model_files.find(name or default_name(), complete=True)


def config(name: str | None = None) -> PreTrainedConfig:
    """The configuration of `name` (None: the default). That of "ernie-0.3b" needs no file.

    Raises what `folder` raises, and ValueError for an architecture that transformers does not know, that needs code from
    the model's repository, or that is no causal language model.
    """
    name = name or default_name()
    if name == ERNIE:
        from transformers import Ernie4_5Config

        return Ernie4_5Config()  # its defaults are ERNIE-4.5-0.3B
    return _config(model_files.find(name, complete=False))


def parameter_count(model: str | PreTrainedConfig | None = None) -> int:
    """How many parameters a model has, tied ones counted once, from its name or configuration; none is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    shape = config(model) if model is None or isinstance(model, str) else model
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(shape).parameters())


def load(
    name: str | None = None,
    *,
    weights: str = "pretrained",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model `name` (None: the default), in evaluation mode, and its tokenizer; the same call gives the same weights.

    weights: "pretrained", or "random" for the exact shape with weights drawn from `seed`, which needs only the configuration.
        Random weights come with tiny-ERNIE's tokenizer: its 1,024 ids are valid in every larger vocabulary.
    dtype: of the parameters; None keeps the stored one, and makes random weights float32.
    device: where the model goes; None is the CPU.

    torch's random state is left as it was. Raises what `folder` and `config` raise; ValueError for another `weights` or `dtype`;
    MemoryError, before anything is loaded, when the parameters do not fit.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, target, kept = name or default_name(), torch.device(device or "cpu"), _dtype(dtype)
    if weights == "random":
        place, shape = TINY_FOLDER, config(name)
        _check_memory(shape, kept or torch.float32, name, target)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(shape, dtype=kept or torch.float32).eval()
    elif weights == "pretrained":
        place = folder(name)
        shape = _config(place)
        _check_memory(shape, kept or shape.dtype or torch.float32, name, target)
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                place, config=shape, dtype=kept or "auto", use_safetensors=True, trust_remote_code=False, local_files_only=True
            )
    else:
        raise ValueError(f'weights is {weights!r}; it must be "pretrained" or "random"')
    return model.to(target), AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=True)


def _check_memory(shape: PreTrainedConfig, dtype: torch.dtype, name: str, target: torch.device) -> None:
    import torch

    needed = parameter_count(shape) * dtype.itemsize
    free = {"the CPU": min(psutil.virtual_memory().available, machine.memory())}
    if target.type == "cuda":
        free[str(target)] = torch.cuda.mem_get_info(target)[0]
    for where, available in free.items():
        if needed > available:
            raise MemoryError(
                f"the parameters of {name} in {dtype} take {needed / 2**30:.2f} GiB, and {where} has {available / 2**30:.2f} GiB "
                f'free: nothing was loaded. Right: a smaller model such as "{TINY}", dtype="bfloat16", or less else in memory.'
            )


def _config(place: Path) -> PreTrainedConfig:
    import transformers

    page = json.loads((place / "config.json").read_text(encoding="utf-8"))
    kind = page.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        if "auto_map" in page:
            raise ValueError(
                f"{place} needs code that came with it ({', '.join(sorted(page['auto_map'].values()))}) to build a model of type "
                f"{kind!r}, and such code is not run here. Right: a model whose architecture transformers itself has."
            )
        raise ValueError(
            f"{place / 'config.json'} says model_type {kind!r}, an architecture that transformers {transformers.__version__} "
            f'does not know. Right: a type it has, such as "ernie4_5" or "llama".'
        )
    found = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=True)
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    named = page.get("architectures") or ["CausalLM"]  # none named: take the type's word for it
    if type(found) not in causal or not any(re.search("CausalLM|LMHead|Conditional", name) for name in named):
        raise ValueError(
            f"{place} holds {', '.join(page.get('architectures') or [kind])}, which is no causal language model: "
            f"it does not predict the next token. "
            f'Right: a model whose config.json names an architecture ending in "ForCausalLM".'
        )
    return found


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f'dtype is {dtype!r}; it must be a floating-point dtype such as torch.float32 or "bfloat16", or None')
    return found


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A rank's standard error belongs to the job: transformers draws no bars in it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
