"""Load a model by a placement, read what is on the disk, and measure how it generates: latency, throughput, memory."""

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

from helpers import machine, models, record
from helpers.measuring.clock import show, synchronize
from helpers.measuring.ledger import Ledger
from helpers.offload.placements import device_map


def load(folder: str | Path, placement: Mapping[str, Any], offload_folder: str | Path) -> Any:
    """The model in `folder` with its parts where `placement` says, in its stored dtype and evaluation mode, without gradients.

    What goes to the disk is copied into `offload_folder`, one file a tensor. Raises what `device_map` and `models.config` raise.
    """
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoModelForCausalLM

    config = models.config(str(folder))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.tie_weights()  # an empty model has lost its ties
    places = device_map(model, placement)
    # its progress bar has no switch; its note says that offloaded weights are on "meta"
    no_bar = mock.patch("accelerate.utils.modeling.is_tqdm_available", return_value=False)
    no_note = mock.patch.object(logging.getLogger("accelerate.big_modeling"), "disabled", True)
    with no_bar, no_note:
        model = load_checkpoint_and_dispatch(
            model, str(folder), places, offload_folder=str(offload_folder), skip_keys=model._skip_keys_device_placement
        )
    return model.eval().requires_grad_(False)


def bring(model: Any) -> tuple[int, float]:
    """(bytes, seconds) of bringing every offloaded weight once, as accelerate does for a token, without computing.

    What the page cache holds comes from there: see `evict`. (0, 0.0) where nothing is offloaded.
    """
    hooks = [(module, getattr(module, "_hf_hook", None)) for module in model.modules()]
    offloaded: list[tuple[Any, Any]] = [(module, hook) for module, hook in hooks if getattr(hook, "offload", False)]
    synchronize()
    size, start = 0, time.perf_counter()
    for module, hook in offloaded:
        hook.pre_forward(module)
        size += sum(each.nbytes for each in module.parameters(recurse=False))
        hook.post_forward(module, None)  # frees them
    synchronize()
    return size, time.perf_counter() - start if offloaded else 0.0


def evict(folder: str | Path) -> bool:
    """Drop the files in `folder` from the page cache, so that the next read goes to the disk. False where the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in Path(folder).iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # only what is written can be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What `evaluate` measured. Times in seconds, `peak` in bytes by device."""

    first_token: tuple[float, ...]  # one for each prompt: prompt in, first token out
    per_token: tuple[float, ...]  # one for each later token of all prompts
    tokens: tuple[tuple[int, ...], ...]  # generated, by prompt
    peak: dict[str, int] = field(default_factory=dict)

    @property
    def latency(self) -> float:
        """Median seconds of a token after the first."""
        return statistics.median(self.per_token)

    @property
    def throughput(self) -> float:
        """Generated tokens per second of all prompts, one after the other."""
        return sum(map(len, self.tokens)) / (sum(self.first_token) + sum(self.per_token))

    def percentile(self, percent: float) -> float:
        """Seconds within which `percent` of the tokens after the first came."""
        return float(numpy.percentile(self.per_token, percent))

    def __repr__(self) -> str:
        rows = [
            ("first token", show(statistics.median(self.first_token))),
            ("each later token", f"{show(self.latency)} (90 % within {show(self.percentile(90))})"),
            ("throughput", f"{self.throughput:.3g} tokens/s"),
            *((f"peak on {device}", f"{size / 2**20:,.1f} MiB") for device, size in self.peak.items()),
        ]
        return "\n".join(record.columns(rows))


def evaluate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 6,
    warmup: int = 1,
    before: Callable[[], Any] | None = None,
    memory: bool = True,
) -> Evaluation:
    """Generate greedily for each prompt (token ids) in turn; the clock waits for the device at each token.

    `warmup` tokens of the first prompt are generated untimed. `before` is called ahead of each forward pass, untimed. Memory is
    taken with the longest prompt in a pass of its own, which `memory=False` leaves out: on a GPU what its allocator handed out,
    on the CPU the tensors that exist at one time (offloaded weights while they are loaded; not the page cache). Raises
    ValueError for no prompts, or fewer than 2 new tokens.
    """
    if not prompts or not all(len(prompt) for prompt in prompts) or new_tokens < 2:
        raise ValueError(f"got {len(prompts)} prompts and new_tokens={new_tokens}; at least 1, none empty, and 2 are needed")
    ahead = before or (lambda: None)
    _generate(model, prompts[0], warmup, ahead)
    runs = [_generate(model, prompt, new_tokens, ahead) for prompt in prompts]
    return Evaluation(
        tuple(seconds[0] for _, seconds in runs),
        tuple(each for _, seconds in runs for each in seconds[1:]),
        tuple(tuple(tokens) for tokens, _ in runs),
        _peak(model, max(prompts, key=len), new_tokens, ahead) if memory else {},
    )


def _peak(model: Any, prompt: Sequence[int], new_tokens: int, before: Callable[[], Any]) -> dict[str, int]:
    """The most bytes at one time on each device that held any, over the prompt and its new tokens."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    ledger = Ledger(torch.device("cpu"))
    ledger.mark([*model.parameters(), *model.buffers()], "parameters")
    with ledger:
        _generate(model, prompt, new_tokens, before)
    peak = {f"cuda:{gpu}": torch.cuda.max_memory_allocated(gpu) for gpu in gpus} | {"cpu": ledger.peak}
    return {device: size for device, size in peak.items() if size}


@torch.no_grad()
def _generate(model: Any, prompt: Sequence[int], count: int, before: Callable[[], Any]) -> tuple[list[int], list[float]]:
    place = next((each.device for each in model.parameters() if each.device.type != "meta"), machine.device())
    ids, cache, tokens, seconds = torch.tensor([list(prompt)], device=place), None, [], []  # ids: (1, tokens)
    for _ in range(count):
        before()
        synchronize()
        start = time.perf_counter()
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens.append(int(output.logits[0, -1].argmax()))  # the number itself: the device has to be done
        seconds.append(time.perf_counter() - start)
        ids, cache = torch.tensor([[tokens[-1]]], device=place), output.past_key_values
    return tokens, seconds
