"""Rows of tests/data/published.csv: the workload and layout that each describes, and what `predict` says of those about memory.

Scored are peaks of allocated memory in training, weights, and key-value caches (from predicted weights and the row's published
activation and non-torch memory). What measures something else (memory reserved, the whole device, a placement, overheads of
libraries) stands apart and is not scored.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from helpers.predict import Layout, Workload, kv_bytes_per_token, memory

DATA = Path(__file__).parent.parent / "tests" / "data"
GIB, GB, MIB = 2**30, 10**9, 2**20
CUDA_CONTEXT = {"BL": 1573 * MIB, "HP": 1343 * MIB}  # as those sources state it: their readings are of the device
IMPLEMENTATION = {"USP": "nanotron", "BL": "megatron-deepspeed", "KO": "megatron", "TT": "torchtitan", "VL": "vllm", "VK": "vllm"}
REASONS = {
    "USP-0023b": "contradicts its source: the same micro-batch of 16 on TP=8 is listed there with 38.3 GB on one node, and "
    "replicas under ZeRO-0 add nothing",
    "VK-13d": "max_num_batched_tokens and max_num_seqs are not in the row; 9.4 GiB needs about ten times the tokens assumed",
    "VK-17d": "vLLM's older engine on a T4 sorts all logits (values, 64-bit indices, sums) where the newer one samples without",
}
APART = {
    "peak_gpu_memory_reserved": "reserved by the allocator, more than allocated",
    "gpu_memory_nvml": "the whole device: CUDA context and reserved memory included",
    "non_torch_per_gpu": "CUDA context and NCCL's buffers: no arithmetic of the model",
    "gpu0": "a placement by accelerate over two cards and the host",
    "gpu1": "a placement by accelerate over two cards and the host",
    "cpu_offload": "a placement by accelerate over two cards and the host",
}


@dataclass(frozen=True)
class Line:
    """One row: predicted and published in the row's own unit; `group` names what it is scored with, "" where it is not."""

    id: str
    kind: str
    metric: str
    group: str
    predicted: float | None
    published: float
    unit: str
    reason: str

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or not self.published else self.predicted / self.published - 1


@lru_cache(maxsize=1)
def rows() -> list[dict[str, str]]:
    """Return all rows of the published table."""
    with (DATA / "published.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def source_of(id: str) -> str:
    """Return the short name of the source that an id begins with."""
    return id.split("-")[0]


def value(id: str) -> float:
    """Return what the row of that id publishes."""
    return next(float(row["value"]) for row in rows() if row["id"] == id)


def line(row: dict[str, str], group: str, predicted: float | None, reason: str) -> Line:
    """Return a row with its prediction."""
    return Line(row["id"], row["kind"], row["metric"], group, predicted, float(row["value"]), row["unit"], reason)


def model_config(row: dict[str, str]) -> dict[str, Any] | None:
    """Return the shape of a row's model, or None for one that is no causal language model."""
    return _configs().get(row["model"].split(" (L")[0].strip()) or _configs().get(row["model"].split(" h")[0])


@lru_cache(maxsize=1)
def _configs() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((DATA / "model_configs.yaml").read_text(encoding="utf-8"))


def _option(row: dict[str, str], name: str, default: int) -> int:
    found = re.search(rf"{name}=(\d+)", f"{row['other']}; {row['note']}")
    return int(found.group(1)) if found else default


def workload_of(row: dict[str, str]) -> Workload:
    """Return the workload that a row describes."""
    code = IMPLEMENTATION[re.match("[A-Z]+", row["id"]).group()]  # type: ignore[union-attr]
    sequence = int(row["seq_len"])
    if code == "vllm":
        newer = row["id"].startswith("VL")
        tokens = _option(row, "max_num_batched_tokens", sequence)
        precision = "int8" if "compressed" in row["dtype"] else row["dtype"]
        return Workload(
            _option(row, "max_num_seqs", 1024 if newer else 256), sequence, training=False, precision=precision,
            batched_tokens=max(tokens, 2048), implementation=code,
        )  # fmt: skip
    precision = {"nanotron": "mixed_fp32_gradients", "torchtitan": "fsdp_mixed"}.get(code, "mixed")
    checkpointing = next((kind for kind in ("full", "selective") if row["checkpointing"].startswith(kind)), "none")
    attention = "eager" if code.startswith("megatron") else "sdpa"  # FlashAttention came later
    return Workload(
        int(row["micro_batch"]), sequence, micro_batches=int(row["grad_accum"]), precision=precision, attention=attention,
        checkpointing=checkpointing, implementation=code,
    )  # fmt: skip


def layout_of(row: dict[str, str]) -> Layout:
    """Return the layout that a row describes."""
    zero = 3 if "FSDP" in row["zero_stage"] else int(row["zero_stage"] or 0)
    sizes = {axis: int(row[axis] or 1) for axis in ("dp", "tp", "pp", "cp")}
    stated = "sequence-parallel" in row["other"] or "sequence parallel" in row["checkpointing"]
    sequence = (stated and sizes["tp"] > 1) or "TT" in row["id"]
    return Layout(**sizes, zero=zero, sequence_parallel=sequence)


def _cache(row: dict[str, str], rows: dict[str, dict[str, str]], weights: float, config: dict[str, Any]) -> float:
    """Tokens, blocks or GiB of cache: what was requested less predicted weights, published activation and published overhead."""
    own = row["id"][:-1]
    total = _stated(r"\(([\d.]+) GiB visible\)", row["gpu_type"])
    share = _stated(r"gpu_memory_utilization=([\d.]+)", row["other"])
    activation = float(rows[own + "d"]["value"])
    overhead = float(rows[own + "e"]["value"]) if own + "e" in rows else _stated(r"non-torch ([\d.]+) GiB", row["note"])
    left = total * share * GIB - weights - (activation + overhead) * GIB
    tokens = left / kv_bytes_per_token(config, tp=int(row["tp"]))
    return {"kv_cache_tokens": tokens, "num_gpu_blocks": tokens / 16, "kv_cache_gib_per_gpu": left / GIB}[row["metric"]]


def _stated(pattern: str, text: str) -> float:
    return float(re.search(pattern, text).group(1))  # type: ignore[union-attr]


def memory_lines() -> Iterator[Line]:
    """Yield every row about memory with its prediction."""
    found_rows = {row["id"]: row for row in rows() if row["kind"] in ("memory", "kvcache")}
    for row in found_rows.values():
        metric, config, prefix = row["metric"], model_config(row), source_of(row["id"])
        group, predicted, reason = "", None, APART.get(metric, "")
        if config is None:
            yield line(row, "", None, f"{reason}; an encoder, no causal language model")
            continue
        if prefix == "AC":
            yield line(row, "", None, reason)
            continue
        found = memory(config, workload_of(row), layout_of(row))
        weights = found.parameters + 2 * config.get("extra_parameters", 0) / int(row["tp"] or 1)
        if metric == "peak_gpu_memory":
            group = "training peak"
            predicted = (found.peak + CUDA_CONTEXT.get(prefix, 0)) / (GB if row["unit"].startswith("GB") else GIB)
        elif metric == "peak_gpu_memory_reserved":
            predicted = found.peak / GIB
        elif metric == "weights_per_gpu":
            group, predicted = "weights", weights / GIB
        elif metric == "activation_peak_per_gpu":
            hidden = 4 * (workload_of(row).batched_tokens or 0) * (config.get("hidden_size") or config["n_embd"])
            group, predicted = "serving activation", max(found.activations, found.logits + found.loss + hidden) / GIB
        elif row["kind"] == "kvcache":
            group, predicted = "KV cache", _cache(row, found_rows, weights, config)
        yield line(row, group, predicted, REASONS.get(row["id"], reason))
