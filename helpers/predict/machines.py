"""What a job runs on: `Machines`, GPUs in hosts with the rates that they reach; and how long a collective takes on them.

Sources: data/hardware.yaml for figures of GPUs, each with its source. Where no measurement is on file for a GPU, the share of
its data sheet's rate that the nearest measured one reaches is taken (`_SHARES`). Time of a collective: NCCL's tuning model
(data/predict.yaml, nccl): base + steps × latency of the slowest link + bytes / bandwidth for each protocol of ring and tree,
the fastest counts; on a machine that was measured, its own links (helpers.calibration).

Known misses: reduction inside the NVLink switch (SHARP) exceeds the ring's bandwidth; several groups that share a host's network
adapters reach less than their share; NCCL's corrections for trees of middling size; what issuing costs where one process drives
all GPUs.
"""

import math
from dataclasses import dataclass
from typing import Any

from helpers.hardware import Hardware, gpu
from helpers.predict.architecture import FACTS
from helpers.predict.links import Link
from helpers.predict.traffic import ALGORITHMS

__all__ = ["Machines", "collective_time", "machines"]

# Share of the data sheet's rate that is reached where nothing is measured: matmul H100 794 / 989, attention H100 346 / 794,
# streaming GH200 3,315 / 4,000 (BabelStream's triad, UoB-HPC/BabelStream issue 194), bus H200 368 / 450, host link 55 / 63
_SHARES = {"matmul": 0.80, "attention": 0.44, "memory": 0.83, "bus": 0.82, "host": 0.87}
_MICRO = 1e-6
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send", "recv")


@dataclass(frozen=True)
class Machines:
    """`gpus` devices in hosts of `per_node`. Rates are those reached, per device, in B/s or FLOP/s: `machines` finds them.

    matmul_flops: of large 16-bit matrix products; attention_flops: of one-kernel attention.
    memory_bandwidth: of kernels that stream, such as an optimiser step.
    bus_bandwidth: of a collective inside a host; inter_bandwidth: of one device's share of the network, per direction.
    host_bandwidth: from host memory to a device. memory_bytes: of a device.
    kernel_seconds: that a small kernel takes beside its bytes while decoding (gpt-fast README, Llama 2 7B on one A100).
    efficiency: share of those rates that a training code keeps up (the middle one of four codes, tools/predict_report.py).
    overlaps: whether collectives run beside computing.
    rates: measured (part, FLOPs of its forward pass, FLOP/s); part is "layer", "shard" (of a layer under tensor parallelism) or
        "head"; they count for everything in it, forward and backward, and replace matmul_flops. Of the parts "update" and
        "update of shards" it is (part, bytes, B/s).
    links: measured (operation, ranks, Link); they replace bandwidths.
    """

    gpu: Hardware
    gpus: int
    per_node: int
    matmul_flops: float
    attention_flops: float
    memory_bandwidth: float
    bus_bandwidth: float
    inter_bandwidth: float
    host_bandwidth: float
    memory_bytes: int
    kernel_seconds: float = 5.3e-6
    efficiency: float = 0.74
    overlaps: bool = True
    rates: tuple[tuple[str, float, float], ...] = ()
    links: tuple[tuple[str, int, Link], ...] = ()

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.per_node < 1:
            raise ValueError(f"{self.gpus} GPUs in hosts of {self.per_node}: at least one of each")
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name} is {value}: it must not be below 0")


def machines(name: str, gpus: int, per_node: int = 8, **rates: Any) -> Machines:
    """Return `gpus` GPUs by their name in data/hardware.yaml, as in "H100-SXM"; `rates` replace what is on file.

    Rates are those measured where on file, else a share of what is specified. Raises KeyError for an unknown name.
    """
    found = gpu(name)
    matmul = (found.matmul_bf16_tflops or _SHARES["matmul"] * (found.bf16_tflops or found.fp16_tflops or 0)) * 1e12
    bus = found.all_reduce_bus_gb_per_s or _SHARES["bus"] * (found.nvlink_gb_per_s or found.pcie_gb_per_s)
    known: dict[str, Any] = {
        "matmul_flops": matmul,
        "attention_flops": (found.attention_bf16_tflops or 0) * 1e12 or _SHARES["attention"] * matmul,
        "memory_bandwidth": _SHARES["memory"] * found.memory_bandwidth_gb_per_s * 1e9,
        "bus_bandwidth": bus * 1e9,
        "inter_bandwidth": (found.nic_gb_per_s or found.pcie_gb_per_s) * 1e9,
        "host_bandwidth": (found.host_to_device_gb_per_s or _SHARES["host"] * found.pcie_gb_per_s) * 1e9,
        "memory_bytes": found.memory_bytes,
    }
    return Machines(found, gpus, per_node, **known | rates)


def collective_time(op: str, size_bytes: float, ranks: int, machines: Machines, *, stride: int = 1) -> float:
    """Return the seconds of one collective over `ranks` devices that lie `stride` apart; `size_bytes` as `traffic` counts them.

    `op` is "all_reduce", "all_gather", "reduce_scatter", "send" or "recv". Of the devices between two members the others are
    taken to be busy with collectives of their own: each has its share of the network. Raises ValueError for another operation.
    """
    if op not in _OPERATIONS:
        raise ValueError(f"operation {op!r}: collective_time knows {', '.join(_OPERATIONS)}")
    if ranks < 2 or not size_bytes:
        return 0.0
    op = "send" if op == "recv" else op
    measured = {count: link for name, count, link in machines.links if name == op}
    if measured:
        return measured[min(measured, key=lambda count: abs(count - ranks))].seconds(size_bytes)
    inside = max(1, min(ranks, machines.per_node // stride))
    nodes = math.ceil(ranks / inside)
    moved, *_, steps = ALGORITHMS[op]["direct" if op == "send" else "ring"](ranks)
    shared = 1 if op == "send" else inside  # network adapters that work on it in each host
    bandwidth = machines.bus_bandwidth if nodes == 1 else min(machines.bus_bandwidth, shared * machines.inter_bandwidth)
    near = "nvlink" if machines.gpu.nvlink_gb_per_s else "pcie"
    across = 2 * nodes if op == "all_reduce" and nodes > 1 else min(nodes - 1, steps)
    times = []
    for each in FACTS["nccl"]["ring"].values():
        latency = each["base"] + (steps - across) * each[near] + across * each["net"]
        times.append(latency * _MICRO + moved * size_bytes / (each["share"] * bandwidth))
    for each in FACTS["nccl"]["tree"].values() if op == "all_reduce" and nodes > 1 else ():
        latency = each["base"] + 2 * ((inside - 1) * each[near] + math.log2(nodes) * each["net"])
        times.append(latency * _MICRO + 2 * size_bytes / (each["share"] * bandwidth))
    return min(times)
