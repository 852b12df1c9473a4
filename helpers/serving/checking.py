"""What cannot work is found before anything starts: shapes against ranks, context against cache, memory, cores, GPUs."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import psutil

from helpers import machine, model_files, models
from helpers.predict import Layout, Workload, kv_bytes_per_token, memory
from helpers.predict.architecture import Architecture, architecture
from helpers.serving.settings import BIND, GIB, Settings, on_cpu

PADDING = 64  # vLLM pads the vocabulary to a multiple of it before it is divided among ranks
BLOCK = {"cpu": 128, "cuda": 16}  # tokens in a block of the KV cache
PROCESS = 0.5  # GiB of each process besides weights, cache and activations: the ranks, a scheduler a replica, the server
LONGEST_FOLDER = 54  # characters: a socket's path has 107, of which the server's own folder and vLLM's names take 53
UTILIZATION = 0.92  # share of a GPU's memory that vLLM takes where it is not told


def check(model_or_config: Any = None, tensor_parallel: int = 1, **settings: Any) -> list[str]:
    """What of the settings (those of `serve`) cannot work with this model on this machine, each as a sentence; empty: fine.

    `model_or_config` is a name, a folder or a config; None is the notebooks' default model. Takes a second or less.
    Raises TypeError for a setting that does not exist.
    """
    chosen = Settings(tensor_parallel=tensor_parallel, **settings)
    given = isinstance(model_or_config, str | os.PathLike) or model_or_config is None
    name = (os.fspath(model_or_config) if model_or_config else models.default_name()) if given else ""
    config = config_of(name) if given else model_or_config
    config = SimpleNamespace(**config) if isinstance(config, Mapping) else config
    numbers = ("tensor_parallel", "replicas", "max_num_batched_tokens", "max_model_len", "max_num_seqs", "kv_cache_gib")
    found = [
        f"{each} is {value!r}; it must be above 0"
        for each in numbers
        if (value := getattr(chosen, each)) is not None and not value > 0
    ]
    if found:
        return found
    found = [*_context(config, chosen), *_steps(chosen), *_folder(), *(_cores(chosen) if on_cpu() else _gpus(chosen))]
    try:
        shape = architecture(config)
    except ValueError:  # of a design that is not covered here: vLLM judges it
        return found
    problems = _division(shape, chosen.tensor_parallel)
    return [*problems, *found, *([] if problems else _room(shape, config, chosen))]


def kv_cache_tokens(config: Any, gib: float, precision: str = "bf16", block_size: int | None = None, tp: int = 1) -> int:
    """How many tokens' keys and values fit into `gib` GiB on each of `tp` ranks, in whole blocks (None: this machine's size).

    vLLM's log gives the same number where max_model_len is a multiple of the block size.
    """
    block = block_size or BLOCK["cpu" if on_cpu() else "cuda"]
    return int(gib * GIB // (block * kv_bytes_per_token(config, precision=precision, tp=tp))) * block


def kv_cache_bytes(config: Any, settings: Settings) -> int | None:
    """The bytes of each rank's KV cache to ask for: what is set, on the CPU at least 1 GiB; None leaves it to vLLM."""
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    if not on_cpu() or settings.gpu_memory_utilization is not None:
        return None
    try:
        each = kv_bytes_per_token(config, precision=precision(config, settings.dtype), tp=settings.tensor_parallel)
    except ValueError:
        return GIB
    longest = settings.max_model_len or int(getattr(config, "max_position_embeddings", 0))
    return max(GIB, each * _whole_blocks(longest))


def precision(config: Any, dtype: str) -> str:
    """The number format in which a server keeps weights and cache: "fp32", "bf16" or "fp16"."""
    if dtype == "auto":  # float32 weights are taken down to bfloat16
        stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        return "fp16" if str(stored).removeprefix("torch.") == "float16" else "bf16"
    return {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}.get(dtype, "bf16")


def _division(shape: Architecture, tp: int) -> list[str]:
    """Sizes that `tp` ranks cannot share."""
    fitting = [degree for degree in range(1, shape.heads + 1) if not _indivisible(shape, degree)]
    return [f"{each}; this model can have tensor_parallel {', '.join(map(str, fitting))}" for each in _indivisible(shape, tp)]


def _indivisible(shape: Architecture, tp: int) -> list[str]:
    found = []
    if shape.heads % tp:
        found.append(f"{shape.heads} attention heads cannot be divided among tensor_parallel={tp} ranks")
    if max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
        what = "divided among" if shape.kv_heads > tp else "repeated evenly on"
        found.append(f"{shape.kv_heads} KV heads cannot be {what} tensor_parallel={tp} ranks")
    padded = _up(shape.vocabulary, PADDING)
    if padded % tp:
        found.append(
            f"a vocabulary of {shape.vocabulary:,} (padded to {padded:,}) cannot be divided among tensor_parallel={tp} ranks"
        )
    if shape.intermediate % tp:
        found.append(f"an MLP width of {shape.intermediate:,} cannot be divided among tensor_parallel={tp} ranks")
    return found


def _context(config: Any, settings: Settings) -> list[str]:
    most = getattr(config, "max_position_embeddings", None)
    if settings.max_model_len and most and settings.max_model_len > most:
        return [f"max_model_len is {settings.max_model_len:,}, and the model was made for {most:,} positions; at most that"]
    return []


def _steps(settings: Settings) -> list[str]:
    if settings.max_num_batched_tokens is None:
        return []
    sequences = settings.max_num_seqs or (128 * settings.tensor_parallel if on_cpu() else 256)  # vLLM's own choice, at least
    if settings.max_num_batched_tokens >= sequences:
        return []
    return [
        f"max_num_batched_tokens is {settings.max_num_batched_tokens:,}, less than a token for each of {sequences:,} requests "
        f"in a step; give max_num_seqs={settings.max_num_batched_tokens} or fewer too"
    ]


def _folder() -> list[str]:
    """Whether the sockets through which vLLM's processes talk can have a path in the folder for temporary files."""
    folder = tempfile.gettempdir()
    if len(folder) <= LONGEST_FOLDER:
        return []
    return [
        f"the folder for temporary files, {folder}, has a path of {len(folder)} characters; vLLM's sockets below it leave "
        f"room for {LONGEST_FOLDER}; right: TMPDIR=/tmp before Python starts"
    ]


def _cores(settings: Settings) -> list[str]:
    """Whether VLLM_CPU_OMP_THREADS_BIND, where somebody set it, names cores that exist, for as many ranks as there are."""
    text = (settings.env or {}).get(BIND, os.environ.get(BIND))
    right = 'leave it unset, or give one list for each rank, such as "0|1"'
    if text is None or text == "nobind":
        return []
    if text == "auto":
        nodes = _numa_nodes()
        short = settings.tensor_parallel > nodes
        return [f'{BIND}="auto" gives each rank a NUMA node: {settings.tensor_parallel} ranks, {nodes} nodes; {right}'] * short
    lists, existing = text.split("|"), os.sched_getaffinity(0)
    try:
        cores = {core for each in lists for part in each.split(",") for core in _range(part)}
    except ValueError:
        return [f"{BIND} is {text!r}, which is no list of cores; {right}"]
    found = []
    if len(lists) < settings.ranks:
        found.append(f"{BIND} is {text!r}: cores for {len(lists)} of {settings.ranks} ranks; {right}")
    if strange := sorted(cores - existing):
        named = ", ".join(map(str, strange))
        found.append(f"{BIND} is {text!r}, but this process may not use core {named}, only {min(existing)} to {max(existing)}")
    return found


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def _numa_nodes() -> int:
    try:
        return sum(each.startswith("node") and each[4:].isdigit() for each in os.listdir("/sys/devices/system/node")) or 1
    except OSError:
        return 1


def _gpus(settings: Settings) -> list[str]:
    seen = len(machine.gpus())
    if settings.ranks <= seen:
        return []
    return [f"{settings.tensor_parallel} × {settings.replicas} ranks need a GPU each, and {seen} may be used here"]


def _room(shape: Architecture, config: Any, settings: Settings) -> list[str]:
    """One request of the longest length against the cache, and all that is asked for against what is free."""
    kind = precision(config, settings.dtype)
    asked = kv_cache_bytes(config, settings)
    longest = settings.max_model_len or int(getattr(config, "max_position_embeddings", 0))
    sequences, batched = settings.max_num_seqs or 128, settings.max_num_batched_tokens or 2048
    workload = Workload(min(sequences, batched), 1, training=False, precision=kind, batched_tokens=batched, implementation="vllm")
    rank = memory(shape, workload, Layout(tp=settings.tensor_parallel)).peak
    found = []
    if asked is not None:
        fits = kv_cache_tokens(shape, asked / GIB, kind, tp=settings.tensor_parallel)
        if _whole_blocks(longest) > fits:
            need = _whole_blocks(longest) * kv_bytes_per_token(shape, precision=kind, tp=settings.tensor_parallel) / GIB
            found.append(
                f"max_model_len of {longest:,} tokens needs {need:.3g} GiB of KV cache on each rank, and {asked / GIB:.3g} GiB "
                f"hold {fits:,} tokens; right: max_model_len={fits} at most, or kv_cache_gib={math.ceil(need * 1000) / 1000:g}"
            )
    if on_cpu():
        free = min(psutil.virtual_memory().available, machine.memory())
        share = settings.gpu_memory_utilization
        each = asked + rank if asked is not None else machine.memory() * (UTILIZATION if share is None else share)
        total, where = settings.ranks * each + (settings.ranks + settings.replicas + 1) * PROCESS * GIB, "in memory"
    else:
        free, whole = _gpu_memory(settings.ranks)
        share = settings.gpu_memory_utilization or UTILIZATION
        each = asked + rank if asked is not None else whole * share
        total, where = each, "on the fullest GPU"
    if total > free:
        found.append(
            f"{settings.ranks} {'rank' if settings.ranks == 1 else 'ranks'} would take {total / GIB:.1f} GiB ("
            f"{rank / GIB:.2g} GiB of weights and activations each, the KV cache, the processes), and {free / GIB:.1f} GiB are "
            f"free {where}; right: a smaller kv_cache_gib, gpu_memory_utilization or model, fewer ranks, or less else in memory"
        )
    elif asked is None and rank > each:
        found.append(f"weights and activations take {rank / GIB:.2f} GiB of each rank's {each / GIB:.2f} GiB; no cache is left")
    return found


def _gpu_memory(count: int) -> tuple[int, int]:
    """Bytes free on the fullest of the first `count` GPUs, and bytes that the smallest has; 0 where there are none."""
    import pynvml

    pynvml.nvmlInit()
    try:
        infos = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)) for gpu in machine.gpus()[:count]]
    finally:
        pynvml.nvmlShutdown()
    return min((info.free for info in infos), default=0), min((info.total for info in infos), default=0)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _whole_blocks(tokens: int) -> int:
    return _up(tokens, BLOCK["cpu" if on_cpu() else "cuda"])


def config_of(name: str) -> Any:
    """A model's config as its file has it, since transformers takes seconds to be imported."""
    if name == model_files.ERNIE and not model_files.at_hand(model_files.HUB_IDS[name]):
        return models.config(name)
    file = model_files.find(name, complete=False) / "config.json"
    return SimpleNamespace(**json.loads(file.read_text(encoding="utf-8")))
