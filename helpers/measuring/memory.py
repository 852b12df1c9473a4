"""Memory instruments for use inside a rank: tensors by category, and the process as the operating system sees it.

Why these mechanisms: saved-tensor hooks and an operator-level ledger are exact in bytes and tell the categories apart; the
profiler's totals agree with them; the resident size of a process is what the machine gives, with the allocator's own share.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch

from helpers.measuring.ledger import Ledger, is_fake, plain_tensors

# glibc then gives every block of 64 KiB or more back as soon as it is freed; both are read when a process starts
HOST_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass
class MemoryUse:
    """Bytes of tensors inside `track`. Each category is its own maximum; they need not have come at one time.

    `other`, and all of `at_peak`, are the parts of `peak`: what there was when there was most.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0  # kept for backward: neither inputs nor parameters, each storage once
    recomputation: int = 0  # the same, made again in backward by activation checkpointing
    logits: int = 0  # as the output layer returns them
    kv_cache: int = 0  # as the model returns it
    other: int = 0  # inputs, buffers, gradients of activations, temporaries
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    allocated: int | None = None  # CUDA: the most that the caching allocator had handed out, rounded up to its blocks
    reserved: int | None = None  # CUDA: the most that it held from the driver

    def __repr__(self) -> str:
        rows = [(each.name, getattr(self, each.name)) for each in fields(self)]
        lines = [f"{name:<16}{value / 2**20:>12,.2f} MiB" for name, value in rows if isinstance(value, int) and value]
        return "\n".join(lines) or "nothing measured yet"


@contextmanager
def track(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    head: Any = None,
    device: torch.device | str | None = None,
) -> Iterator[MemoryUse]:
    """Measure the tensors of the block; the figures are there when it is left.

    Arguments:
        model: its parameters, gradients, inputs, activations and KV cache are told apart; DDP, FSDP2 and DTensor models too.
        optimizer: its state is told apart.
        head: the module whose output are the logits; None is the output layer of a transformers model.
        device: count tensors on this kind of device; None is that of the first parameter.

    Exact for eager code, also under a FakeTensorMode, which has shapes but no memory. Each operator takes some 50 µs longer:
    measure time apart from memory.
    """
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    parameters = list(inner.parameters())
    held = plain_tensors(parameters)
    place = torch.device(device or (held[0].device if held else "cpu"))
    on_gpu = place.type == "cuda" and torch.cuda.is_available()
    if head is None and hasattr(inner, "get_output_embeddings"):
        head = cast(Any, inner).get_output_embeddings()

    ledger, use = Ledger(place, fake=any(is_fake(tensor) for tensor in held)), MemoryUse()

    def mark_states(*_: Any) -> None:
        ledger.mark([parameter.grad for parameter in parameters], "gradients")
        ledger.mark(dict(optimizer.state) if optimizer is not None else {}, "optimizer_state")

    def mark_cache(module: Any, arguments: Any, output: Any) -> None:
        layers = getattr(getattr(output, "past_key_values", None), "layers", ())
        if not torch.is_grad_enabled():  # otherwise autograd keeps keys and values: they are activations
            ledger.mark([(layer.keys, layer.values) for layer in layers], "kv_cache")

    ledger.mark(list(inner.buffers()), "other")
    ledger.mark(parameters, "parameters")
    mark_states()
    handles = [
        inner.register_forward_pre_hook(lambda _, arguments, keywords: ledger.give((arguments, keywords)), with_kwargs=True),
        inner.register_forward_hook(mark_cache),
    ]
    handles += [
        parameter.register_post_accumulate_grad_hook(lambda parameter: ledger.mark(parameter.grad, "gradients"))
        for parameter in parameters
        if parameter.requires_grad
    ]
    if head is not None:
        handles.append(head.register_forward_hook(lambda module, arguments, output: ledger.mark(output, "logits")))
    if optimizer is not None:
        handles += [optimizer.register_step_pre_hook(mark_states), optimizer.register_step_post_hook(mark_states)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place)
    try:
        with ledger:
            yield use
    finally:
        for handle in handles:
            handle.remove()
    mark_states()
    if on_gpu:
        use.allocated, use.reserved = torch.cuda.max_memory_allocated(place), torch.cuda.max_memory_reserved(place)
    use.peak, use.at_peak = ledger.peak, dict(ledger.at_peak)
    for category, size in ledger.most.items():
        setattr(use, category, size)
    use.other = use.at_peak.get("other", 0)


@dataclass
class HostUse:
    """Resident bytes of this process: before, at most within, and after the block of `host`; None until it is left.

    `note` says why the figures are not to be trusted.
    """

    before: int = 0
    peak: int | None = None
    after: int | None = None
    note: str | None = None


@contextmanager
def host() -> Iterator[HostUse]:
    """Measure the resident size of this process in the block. Linux only.

    The C library keeps freed memory, which made the peak of a training step 13–88 % too large. A process that was started
    with `HOST_ENVIRONMENT` gives it back: `launch(job, ranks=1, env=memory.HOST_ENVIRONMENT)`. Raises OSError where the
    operating system does not tell.
    """
    use = HostUse()
    missing = [name for name, value in HOST_ENVIRONMENT.items() if os.environ.get(name) != value]
    if missing:
        use.note = f"started without {' and '.join(missing)}: freed memory may count; pass env=memory.HOST_ENVIRONMENT to launch"
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    except OSError:  # it is read-only, or not there
        use.note = "this system does not let a process reset its peak: it is the peak since the process started"
    use.before = _resident("VmRSS")
    try:
        yield use
    finally:
        use.peak, use.after = _resident("VmHWM"), _resident("VmRSS")


def _resident(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status does not say {name}: this system does not tell the resident size of a process")
    return int(match[1]) * 1024
