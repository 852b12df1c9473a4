"""Seconds of one optimiser step and of one decoded token, from shapes, layouts and the rates of machines.

Formulas
* a stage's micro-batch: helpers/predict/computing.py, divided by the machines' `efficiency`, and its tensor- and
  context-parallel collectives (`step_traffic`, `collective_time`), which are waited for.
* a pipeline of stages that take t₁ … t_p for a micro-batch: m × the slowest + what the others take once: (m + p − 1)·t where
  all are alike (Narayanan et al., SC 2021); a stage waits for each micro-batch's hidden state and for its gradient.
* gradients over data-parallel ranks after the last micro-batch: waited for, or beside the backward pass where the code overlaps
  them: then what exceeds it stays, and the last bucket (Li et al., "PyTorch Distributed", VLDB 2020); ZeRO 3: beside forward and
  backward passes, all but one layer's (Zhao et al., "PyTorch FSDP", VLDB 2023).
* update: bytes of gradient, weight, master and moments that the optimiser reads and writes, over the memory's bandwidth.
* decoding: weights and key-value cache of each stage pass once through memory, or its operations take longer, and two
  all-reduces a layer (Pope et al., "Efficiently Scaling Transformer Inference", MLSys 2023). Of E experts a token visits k: each
  is read with probability 1 − (1 − k/E)^batch, as if tokens were routed independently and evenly.

Range and errors: `make predict-report` compares with published measurements. Known misses: interleaved pipeline stages,
overlapped pipeline messages, allocator retries near full memory, stragglers, loading of data, and what machines.py and
computing.py miss.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

from helpers.predict.architecture import architecture
from helpers.predict.computing import Passes, head_seconds, layer_seconds
from helpers.predict.layout import Layout, Workload
from helpers.predict.machines import Machines, collective_time
from helpers.predict.memory import kv_bytes_per_token
from helpers.predict.rank import Rank, rank_of
from helpers.predict.step import Exchange, step_traffic

__all__ = ["StepTime", "decode_latency", "step_time", "tokens_per_second"]

# What a layer starts for one token. Compiled: 5 matrix products (one for queries, keys and values), attention, and 4 kernels of
# torch.compile (norm; rotation and cache; sum and norm; gate), counted in what torch 2.13 makes of a Llama layer on a CPU. Python
# expressions: the operations of transformers 5.19's Llama layer that compute, in BF16 (tests/test_timing.py counts them).
KERNELS = {True: 10, False: 40}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step by what they go to; `total` is their sum. `tokens` are those of the whole step."""

    compute: float = 0.0  # of the slowest stage, all its micro-batches
    recompute: float = 0.0  # forward passes that checkpointing runs again
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    pipeline_bubble: float = 0.0  # the slowest stage waits for the others to fill and drain
    pipeline_exchange: float = 0.0
    data_parallel: float = 0.0  # what isn't hidden behind computing
    update: float = 0.0  # the optimiser
    offload: float = 0.0  # over the host link
    tokens: int = 0
    gpus: int = 1

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("tokens", "gpus")}

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.tokens / self.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput divided by all devices of the layout."""
        return self.tokens_per_second / self.gpus

    def __repr__(self) -> str:
        shown = {**{name: each for name, each in self.parts.items() if each}, "total": self.total}
        lines = [f"{name:<18}{1e3 * each:>12,.2f} ms{each / self.total:>7.1%}" for name, each in shown.items()]
        return "\n".join(
            [*lines, f"{'tokens/s':<18}{self.tokens_per_second:>12,.0f}   {self.tokens_per_second_per_gpu:,.0f} a GPU"]
        )


def step_time(config: Any, workload: Workload, layout: Layout, machines: Machines, *, offloaded: float = 0.0) -> StepTime:
    """Return the seconds of one optimiser step.

    `offloaded`: bytes that each rank moves over its host link in a step. Raises ValueError for a layout that cannot be, that has
    more ranks than the machines have devices, or for a workload that does not train.
    """
    if not workload.training:
        raise ValueError("step_time is for training; decode_latency is for inference")
    if layout.ranks > machines.gpus:
        raise ValueError(f"{layout.ranks} ranks on {machines.gpus} devices: a layout has at most one rank a device")
    shape, passes = architecture(config), workload.micro_batches
    alike: dict[tuple[Any, ...], _Stage] = {}  # most stages differ in nothing but their place
    stages = []
    for number in range(layout.pp):
        rank = rank_of(shape, workload, layout, number)
        kind = rank.first, rank.last, len(rank.layers), sum(shape.is_sparse(each) for each in rank.layers)
        if kind not in alike:
            alike[kind] = _stage(rank, machines)
        stages.append(alike[kind])
    slowest = max(alike.values(), key=lambda stage: stage.seconds)
    fullest = max(alike.values(), key=lambda stage: stage.rank.elements(stage.rank.held))
    return StepTime(
        compute=(slowest.computing.forward + slowest.computing.backward) * passes,
        recompute=slowest.computing.again * passes,
        tensor_parallel=slowest.waits["tp"] * passes,
        context_parallel=slowest.waits["cp"] * passes,
        pipeline_bubble=sum(stage.seconds for stage in stages) - slowest.seconds,
        pipeline_exchange=slowest.waits["pp"] * passes,
        data_parallel=_exposed(fullest, slowest.computing, machines),
        update=_update_seconds(fullest.rank, machines),
        offload=offloaded / machines.host_bandwidth,
        tokens=workload.batch * workload.sequence * passes * layout.dp,
        gpus=layout.ranks,
    )


def tokens_per_second(config: Any, workload: Workload, layout: Layout, machines: Machines) -> float:
    """Return the tokens a second of all devices: of an optimiser step in training, of decoding otherwise."""
    if workload.training:
        return step_time(config, workload, layout, machines).tokens_per_second
    return workload.batch * layout.dp / decode_latency(config, workload, layout, machines)


def decode_latency(config: Any, workload: Workload, layout: Layout, machines: Machines, *, offloaded: float = 0.0) -> float:
    """Return the seconds of one decoding step: one new token for each of the `batch` sequences of a replica.

    The cache holds the prompt and half the new tokens. `offloaded`: bytes of weights that lie in host memory and cross the host
    link for every token. Raises ValueError for a layout that cannot be.
    """
    shape, total = architecture(config), offloaded / machines.host_bandwidth
    asked = replace(workload, training=False, new_tokens=2, batched_tokens=None, micro_batches=1)
    cached = workload.batch * (workload.sequence + workload.new_tokens / 2)
    cache = kv_bytes_per_token(shape, precision=workload.precision, tp=layout.tp) * cached / shape.layers
    chosen = shape.experts_per_token / max(1, shape.experts)  # share of the experts that a token visits
    idle = (1 - chosen) ** workload.batch  # share that no sequence's token visits
    for stage in range(layout.pp):
        rank = rank_of(shape, asked, layout, stage)
        head = shape.embedding_parameters()[:1] * (shape.tied and layout.pp == 1)
        read = [each for each in rank.held if each.name != "embedding"] + head
        experts = [each for each in read if each.experts > 1]
        streamed = rank.stored(read) - idle * rank.stored(experts) + cache * len(rank.layers)
        flops = 2 * workload.batch * (rank.elements(read) - (1 - chosen) * rank.elements(experts))
        total += max(streamed / machines.memory_bandwidth, flops / machines.matmul_flops)
        total += len(rank.layers) * KERNELS[rank.code.fused] * machines.kernel_seconds
        for each in step_traffic(shape, asked, layout, stage=stage):
            if each.when == "decode" and each.op != "recv":
                total += _seconds(each, layout, machines)
    return total


@dataclass(frozen=True)
class _Stage:
    """A pipeline stage: seconds of one micro-batch's computing and, by axis, of its collectives; all that is sent in a step."""

    rank: Rank
    computing: Passes
    waits: dict[str, float]
    moved: list[Exchange]

    @property
    def seconds(self) -> float:
        return self.computing.total + sum(self.waits.values())


def _stage(rank: Rank, machines: Machines) -> _Stage:
    passes, held = rank.workload.micro_batches, rank.elements(rank.held)
    computing = head_seconds(rank, machines)
    for sparse, count in Counter(rank.shape.is_sparse(each) for each in rank.layers).items():
        layer = next(each for each in rank.layers if rank.shape.is_sparse(each) is sparse)
        computing += layer_seconds(rank, layer, machines) * count
    if passes > 1 and not machines.rates:  # gradients are added to those of earlier micro-batches; what is measured has done so
        computing += Passes(backward=held * (2 * rank.width.gradient + rank.width.compute) / machines.memory_bandwidth)
    moved = step_traffic(rank.shape, rank.workload, rank.layout, stage=rank.stage)
    waits = {"tp": 0.0, "cp": 0.0, "pp": 0.0}
    for each in moved:
        if each.axis in waits and (each.axis, each.op) != ("pp", "send"):  # a message counts where it is received
            waits[each.axis] += _seconds(each, rank.layout, machines) / passes
    return _Stage(rank, computing * (1 / machines.efficiency), waits, moved)


def _seconds(each: Exchange, layout: Layout, machines: Machines) -> float:
    """Seconds of an exchange. Members of tensor parallelism are neighbours, then come context, data, pipeline parallelism."""
    stride = {"tp": 1, "cp": layout.tp, "dp": layout.tp, "pp": layout.tp * layout.cp * layout.dp}[each.axis]
    return each.count * collective_time(each.op, each.bytes, each.ranks, machines, stride=stride)


def _exposed(stage: _Stage, computing: Passes, machines: Machines) -> float:
    """Seconds of data parallelism that aren't hidden behind computing."""
    layout, passes = stage.rank.layout, stage.rank.workload.micro_batches
    times = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for each in stage.moved:
        if each.axis == "dp":
            times[each.when] += _seconds(each, layout, machines)
    if not (machines.overlaps and stage.rank.code.overlaps):
        return sum(times.values())
    beside = {"forward": computing.forward * passes, "backward": (computing.again + computing.backward) * passes}
    if layout.zero < 2:  # only the last micro-batch's gradients are summed over ranks
        beside["backward"] /= passes
    least = max(1, len(stage.rank.layers))  # one layer's part is never hidden
    return times["update"] + sum(max(times[when] - beside[when], times[when] / least) for when in beside)


def _update_seconds(rank: Rank, machines: Machines) -> float:
    """Seconds of the optimiser on one rank: bytes that it reads and writes over a measured bandwidth or the memory's."""
    part = "update of shards" if rank.layout.tp > 1 else "update"
    bandwidth = next((rate for name, _, rate in machines.rates if name == part), machines.memory_bandwidth)
    width, shards = rank.width, rank.layout.shards if rank.layout.zero else 1
    moved = width.gradient + 2 * int(rank.state)  # without the scales of 8-bit moments
    moved += 2 * (width.master or width.weight) + width.weight * bool(width.master)
    return rank.elements(rank.held) / shards * moved / bandwidth
