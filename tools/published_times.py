"""Rows of tests/data/published.csv that are times: steps, throughputs, tokens, collectives, each with what `predict` says of it.

What is taken from the table instead of predicted, and therefore not scored: the bus bandwidths in data/hardware.yaml that come
from its rows, the network's rate of one source, and one efficiency for each source and GPU from the row with the fewest
operations; for collectives it is the seconds of issuing one, for decoding those of a small kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import published
from published import Line

from helpers import predict
from helpers.predict import Machines

GB = 10**9
GPUS = {"USP": "H100-SXM", "USPC": "H100-SXM", "BL": "A100-80-SXM", "KO": "A100-80-SXM", "TT": "H100-SXM", "GF": "A100-80-SXM",
        "AC": "Titan-RTX", "CA": "A100-40-SXM", "CH": "H200-SXM"}  # fmt: skip
CONSTANTS = {
    "CA-20a": "gave the bus bandwidth of A100 in data/hardware.yaml",
    "CA-20b": "gave the bus bandwidth of A100 in data/hardware.yaml",
    "CH-31": "gave the bus bandwidth of H200 in data/hardware.yaml",
    "GF-01": "gave what a small kernel takes, Machines.kernel_seconds",
    "USPC-04": "gives the rate of this source's network",
}
REASONS = {
    "NI": "two cards of PCIe with a bridge that reach a third of its rate; data/hardware.yaml has no figures of them",
    "HP": "an encoder, no causal language model",
    "AC-01b": "kernels of eager Python that start more slowly than a small model's work",
    "AC-06b": "copies from pageable host memory, at about half of what pinned memory reaches",
    "CA-06": "of middling size: measured above what NCCL's own model says",
    "CA-10": "of middling size: measured above what NCCL's own model says",
}


def machines_of(row: dict[str, str]) -> Machines | None:
    """Return the machines of a row: its GPU's figures, and what the row says of its memory and network."""
    prefix = published.source_of(row["id"])
    if prefix not in GPUS:
        return None
    found = predict.machines(GPUS[prefix], int(row["gpus"]))
    if prefix in ("USP", "USPC"):
        return replace(found, inter_bandwidth=published.value("USPC-04") * GB / 8)
    stated = re.search(r"\(([\d.]+)GB/s", row["link_inter"]) or re.search(r"([\d.]+)GB/s/GPU", row["link_inter"])
    if stated:
        found = replace(found, inter_bandwidth=float(stated.group(1)) * GB)
    memory = re.search(r"([\d.]+)TB/s", row["gpu_type"])
    if memory:
        share = float(memory.group(1)) * 1000 / found.gpu.memory_bandwidth_gb_per_s
        found = replace(found, memory_bandwidth=found.memory_bandwidth * share)
    if "float8" in row["dtype"]:  # twice the 16-bit rate: NVIDIA H100 data sheet
        found = replace(found, matmul_flops=2 * found.matmul_flops)
    return found


def step(row: dict[str, str], efficiency: float) -> predict.StepTime:
    """Return the predicted training step of a row by a code of that efficiency."""
    found = machines_of(row)
    assert found is not None
    machines = replace(found, efficiency=efficiency)
    return predict.step_time(published.model_config(row), published.workload_of(row), published.layout_of(row), machines)


def tokens_of(row: dict[str, str]) -> int:
    """Return the tokens of a training step of all replicas."""
    workload = published.workload_of(row)
    return workload.batch * workload.sequence * workload.micro_batches * published.layout_of(row).dp


def seconds_of(row: dict[str, str]) -> float:
    """Return the published seconds of a training step."""
    value = float(row["value"])
    if row["metric"] == "step_time":
        return value
    return tokens_of(row) / (value * published.layout_of(row).ranks)


def operations(row: dict[str, str]) -> float:
    """Return a step's operations up to a factor: what "smallest row" means."""
    return tokens_of(row) * predict.architecture(published.model_config(row)).parameter_count


def efficiency_of(row: dict[str, str]) -> float:
    """Return the efficiency that makes the prediction of a row what was published."""
    low, high = 0.02, 2.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step(row, middle).total > seconds_of(row) else (low, middle)
    return low


def training() -> Iterator[Line]:
    """Yield step times, throughputs and utilisations."""
    rows = [row for row in published.rows() if row["metric"] in ("step_time", "tokens_per_s_per_gpu", "mfu", "samples_per_s")]
    smallest: dict[str, dict[str, str]] = {}
    for row in rows:
        prefix = published.source_of(row["id"])
        if row["metric"] != "mfu" and prefix in GPUS:
            best = smallest.setdefault(prefix, row)
            smallest[prefix] = min(best, row, key=lambda each: (operations(each), int(each["gpus"])))
    shares = {prefix: efficiency_of(row) for prefix, row in smallest.items()}
    for row in rows:
        prefix = published.source_of(row["id"])
        if prefix not in GPUS:
            yield published.line(row, "", None, REASONS[prefix])
            continue
        found = step(row, shares[prefix])
        predicted = {"step_time": found.total, "tokens_per_s_per_gpu": found.tokens_per_second_per_gpu}.get(row["metric"])
        if predicted is None:
            predicted = 100 * model_operations(row) / found.total / int(row["gpus"]) / 312e12
        gave = row is smallest[prefix]
        yield published.line(
            row, "" if gave else "training", predicted, f"gives this source's efficiency, {shares[prefix]:.2f}" if gave else ""
        )


def model_operations(row: dict[str, str]) -> float:
    """Operations of a step as Korthikanti et al. count them for utilisation: all attention scores, nothing run again."""
    shape = predict.architecture(published.model_config(row))
    h, s = shape.hidden, published.workload_of(row).sequence
    return 72 * tokens_of(row) * shape.layers * h * h * (1 + s / (6 * h) + shape.vocabulary / (12 * h * shape.layers))


def decoding() -> Iterator[Line]:
    """Yield seconds a token, tokens a second, and seconds of loading."""
    rows = {row["id"]: row for row in published.rows()}
    loads = [row for row in rows.values() if row["metric"] == "load_time"]
    rate = None
    for row in loads:  # bytes over the rate of the first, which isn't scored
        weights = 2 * predict.architecture(published.model_config(row)).parameter_count
        gave, rate = rate is None, rate or weights / float(row["value"])
        yield published.line(
            row, "" if gave else "loading", weights / rate, "gives the rate of this source's disk" if gave else ""
        )
    for row in rows.values():
        if row["metric"] not in ("decode_tokens_per_s", "s_per_token"):
            continue
        machines = machines_of(row)
        assert machines is not None
        offloaded = float(rows[row["id"][:-1] + "e"]["value"]) * GB if row["id"].startswith("AC") else 0.0
        workload = predict.Workload(
            1, 32, training=False, precision="int8" if "int8" in row["dtype"] else "bf16", new_tokens=200, implementation="vllm"
        )
        layout = predict.Layout(tp=int(row["tp"]))
        seconds = predict.decode_latency(published.model_config(row), workload, layout, machines, offloaded=offloaded)
        predicted = 1 / seconds if row["metric"] == "decode_tokens_per_s" else seconds
        gave = CONSTANTS.get(row["id"], "")
        yield published.line(row, "" if gave else "decode", predicted, gave or REASONS.get(row["id"], ""))


def collectives() -> Iterator[Line]:
    """Yield times and bus bandwidths of collectives."""
    issuing: dict[str, float] = {}  # by source: seconds to issue one, and the measurement that gave them
    gave: dict[str, str] = {}
    for row in (row for row in published.rows() if row["kind"] == "collective"):
        prefix, measurement, machines = published.source_of(row["id"]), row["id"][:-1], machines_of(row)
        if machines is None:
            yield published.line(row, "", None, REASONS[prefix])
            continue
        op = re.search(r"collective=(\w+)", row["other"]).group(1)  # type: ignore[union-attr]
        stated = re.search(r"size_bytes=(\d+)", row["other"])
        size, ranks = int(stated.group(1)) if stated else 256 * 2**20, int(row["gpus"])
        seconds = predict.collective_time(op, size, ranks, machines)
        reason = CONSTANTS.get(row["id"], "")
        if row["metric"] == "time" and prefix not in issuing:
            issuing[prefix], gave[prefix] = float(row["value"]) * 1e-6 - seconds, measurement
            reason = f"gives what issuing a collective costs, {1e6 * issuing[prefix]:.0f} µs"
        elif gave.get(prefix) == measurement:
            reason = "the row that gives what issuing costs"
        elif row["completeness"] != "full":
            reason = reason or "not complete"
        seconds += issuing.get(prefix, 0.0)
        moved = size * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
        predicted = 1e6 * seconds if row["metric"] == "time" else moved / seconds / GB
        yield published.line(row, "" if reason else "collectives", predicted, reason or REASONS.get(measurement, ""))
