"""What cannot work is found before anything starts: shapes against ranks, context against cache, memory, cores, GPUs."""

import json
import math
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import psutil

from helpers import machine, model_files, models
from helpers.predict import Architecture, Layout, Workload, architecture, kv_bytes_per_token, memory, undivided
from helpers.serving.settings import BIND, GIB, Settings, on_cpu

BLOCK = {"cpu": 128, "cuda": 16}  # tokens in a block of the KV cache
PROCESS = 0.5  # GiB of each process besides weights, cache and activations: the ranks, a scheduler a replica, the server
UTILIZATION = 0.92  # share of a GPU's memory that vLLM takes where it is not told
_ABOVE_ZERO = (
    "tensor_parallel", "replicas", "max_num_batched_tokens", "max_model_len", "max_num_seqs", "kv_cache_gib",
    "gpu_memory_utilization",
)  # fmt: skip


def check(model_or_config: Any = None, tensor_parallel: int = 1, **settings: Any) -> list[str]:
    """What of the settings (those of `serve`) cannot work with this model on this machine, each as a sentence; empty: fine.

    `model_or_config` is a name, a folder or a config; None is the notebooks' default model. Takes a second or less.
    Raises TypeError for a setting that does not exist.
    """
    chosen, config = Settings(tensor_parallel=tensor_parallel, **settings), config_of(model_or_config)
    given = {name: getattr(chosen, name) for name in _ABOVE_ZERO}
    if wrong := {name: value for name, value in given.items() if value is not None and value <= 0}:
        return [f"{name} is {value!r}; it must be above 0" for name, value in wrong.items()]
    found = [*_lengths(config, chosen), *(_cores(chosen) if on_cpu() else _gpus(chosen))]
    try:
        shape = architecture(config)
    except ValueError:  # of a design that is not covered here: vLLM judges it
        return found
    if uneven := undivided(shape, tensor_parallel, "vllm"):
        fitting = [str(degree) for degree in range(1, shape.heads + 1) if not undivided(shape, degree, "vllm")]
        ranks = f"tensor_parallel={tensor_parallel} ranks; this model can have tensor_parallel {', '.join(fitting)}"
        return [*(f"{size:,} {what} cannot be divided among {ranks}" for what, size in uneven.items()), *found]
    return [*found, *_cache(shape, config, chosen), *_memory(shape, config, chosen)]


def kv_cache_tokens(config: Any, gib: float, precision: str = "bf16", block_size: int | None = None, tp: int = 1) -> int:
    """How many tokens' keys and values fit into `gib` GiB on each of `tp` ranks, in whole blocks (None: this machine's size).

    vLLM's log gives the same number where max_model_len is a multiple of the block size.
    """
    block = block_size or _block()
    return int(gib * GIB // (block * kv_bytes_per_token(config, precision=precision, tp=tp))) * block


def kv_cache_bytes(config: Any, settings: Settings) -> int | None:
    """The bytes of each rank's KV cache to ask for: what is set, on the CPU at least 1 GiB; None leaves it to vLLM."""
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    if not on_cpu() or settings.gpu_memory_utilization is not None:
        return None
    try:
        return max(GIB, _longest_request(config, config, settings)[1])
    except ValueError:
        return GIB


def precision(config: Any, dtype: str) -> str:
    """The number format in which a server keeps weights and cache: "fp32", "bf16" or "fp16"."""
    if dtype == "auto":  # float32 weights are taken down to bfloat16
        stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        return "fp16" if str(stored).removeprefix("torch.") == "float16" else "bf16"
    return {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}.get(dtype, "bf16")


def config_of(model: Any) -> Any:
    """A model's config as its file has it, since transformers takes seconds to be imported; a config is its own."""
    if not isinstance(model, str | os.PathLike | None):
        return SimpleNamespace(**model) if isinstance(model, Mapping) else model
    name = os.fspath(model or models.default_name())
    if name == model_files.ERNIE and not model_files.at_hand(model_files.HUB_IDS[name]):
        return models.config(name)
    file = model_files.find(name, complete=False) / "config.json"
    return SimpleNamespace(**json.loads(file.read_text(encoding="utf-8")))


def _lengths(config: Any, settings: Settings) -> list[str]:
    """A request against the model's positions, a step against its requests."""
    found = []
    longest, positions = settings.max_model_len or 0, _positions(config)
    if positions and longest > positions:
        found.append(f"max_model_len is {longest:,}, and the model was made for {positions:,} positions; at most that")
    tokens = settings.max_num_batched_tokens
    sequences = settings.max_num_seqs or (128 * settings.tensor_parallel if on_cpu() else 256)  # vLLM's own choice, at least
    if tokens and tokens < sequences:
        found.append(
            f"max_num_batched_tokens is {tokens:,}, less than a token for each of {sequences:,} requests "
            f"in a step; give max_num_seqs={tokens} or fewer too"
        )
    return found


def _cores(settings: Settings) -> list[str]:
    """Whether VLLM_CPU_OMP_THREADS_BIND, where somebody set it, names cores that exist, for as many ranks as there are."""
    text = (settings.env or {}).get(BIND, os.environ.get(BIND, "auto"))
    right = 'leave it unset, or give one list for each rank, such as "0|1"'
    if text in ("nobind", "auto"):
        return []
    lists, existing = text.split("|"), os.sched_getaffinity(0)
    cores: set[int] = set()
    try:
        for part in ",".join(lists).split(","):
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        return [f"{BIND} is {text!r}, which is no list of cores; {right}"]
    found = []
    if len(lists) < settings.ranks:
        found.append(f"{BIND} is {text!r}: cores for {len(lists)} of {settings.ranks} ranks; {right}")
    if strange := sorted(cores - existing):
        named = ", ".join(map(str, strange))
        found.append(f"{BIND} is {text!r}, but this process may not use core {named}, only {min(existing)} to {max(existing)}")
    return found


def _gpus(settings: Settings) -> list[str]:
    seen = len(machine.gpus())
    if settings.ranks <= seen:
        return []
    return [f"{settings.tensor_parallel} × {settings.replicas} ranks need a GPU each, and {seen} may be used here"]


def _cache(shape: Architecture, config: Any, settings: Settings) -> list[str]:
    """One request of the longest length against the cache."""
    asked = kv_cache_bytes(config, settings)
    tokens, needed = _longest_request(shape, config, settings)
    if asked is None or needed <= asked:
        return []
    fits = kv_cache_tokens(shape, asked / GIB, precision(config, settings.dtype), tp=settings.tensor_parallel)
    return [
        f"max_model_len of {tokens:,} tokens needs {needed / GIB:.3g} GiB of KV cache on each rank, and {asked / GIB:.3g} GiB "
        f"hold {fits:,} tokens; right: max_model_len={fits} at most, or kv_cache_gib={math.ceil(needed / GIB * 1000) / 1000:g}"
    ]


def _memory(shape: Architecture, config: Any, settings: Settings) -> list[str]:
    """All that is asked for against what is free."""
    sequences, batched = settings.max_num_seqs or 128, settings.max_num_batched_tokens or 2048
    kind = precision(config, settings.dtype)
    workload = Workload(min(sequences, batched), 1, training=False, precision=kind, batched_tokens=batched, implementation="vllm")
    held = memory(shape, workload, Layout(tp=settings.tensor_parallel)).peak
    asked, ranks = kv_cache_bytes(config, settings), settings.ranks
    free, whole = _cpu_memory() if on_cpu() else _gpu_memory(ranks)
    each = whole * (settings.gpu_memory_utilization or UTILIZATION) if asked is None else asked + held
    total, where = each, "on the fullest GPU"
    if on_cpu():
        total, where = ranks * each + (ranks + settings.replicas + 1) * PROCESS * GIB, "in memory"
    if total > free:
        return [
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} would take {total / GIB:.1f} GiB ("
            f"{held / GIB:.2g} GiB of weights and activations each, the KV cache, the processes), and {free / GIB:.1f} GiB are "
            f"free {where}; right: a smaller kv_cache_gib, gpu_memory_utilization or model, fewer ranks, or less else in memory"
        ]
    if held > each:
        return [f"weights and activations take {held / GIB:.2f} GiB of each rank's {each / GIB:.2f} GiB; no cache is left"]
    return []


def _cpu_memory() -> tuple[int, int]:
    """Bytes free and bytes in all."""
    return min(psutil.virtual_memory().available, machine.memory()), machine.memory()


def _gpu_memory(count: int) -> tuple[int, int]:
    """Bytes free on the fullest of the first `count` GPUs, and bytes that the smallest has; 0 where there are none."""
    import pynvml

    pynvml.nvmlInit()
    try:
        infos = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)) for gpu in machine.gpus()[:count]]
    finally:
        pynvml.nvmlShutdown()
    return min((info.free for info in infos), default=0), min((info.total for info in infos), default=0)


def _longest_request(shape: Any, config: Any, settings: Settings) -> tuple[int, int]:
    """Tokens of the longest request, and the bytes that its whole blocks take in the KV cache of a rank."""
    tokens, kind = settings.max_model_len or _positions(config), precision(config, settings.dtype)
    return tokens, _up(tokens, _block()) * kv_bytes_per_token(shape, precision=kind, tp=settings.tensor_parallel)


def _positions(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", 0))


def _block() -> int:
    return BLOCK["cpu" if on_cpu() else "cuda"]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
