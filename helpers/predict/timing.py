"""Seconds of one optimiser step and of one decoded token, from shapes, layouts and the rates of machines.

Formulas
* a stage's micro-batch: helpers/predict/computing.py, divided by `efficiency`, and its tensor- and context-parallel collectives
  (`step_traffic`, `collective_time`), which are waited for.
* a pipeline of stages that take t₁ … t_p for a micro-batch: m × the slowest + what the others take once: (m + p − 1)·t where
  all are alike (Narayanan et al., SC 2021); a stage waits for each micro-batch's hidden state and for its gradient.
* gradients over data-parallel ranks after the last micro-batch: waited for, or beside the backward pass where the code overlaps
  them: then what exceeds it stays, and the last bucket (Li et al., "PyTorch Distributed", VLDB 2020); ZeRO 3: beside forward and
  backward passes, all but one layer's (Zhao et al., "PyTorch FSDP", VLDB 2023).
* update: bytes of gradient, weight, master and moments that the optimiser reads and writes, over the memory's bandwidth.
* decoding: weights and key-value cache of each stage pass once through memory, or its operations take longer, and two
  all-reduces a layer (Pope et al., "Efficiently Scaling Transformer Inference", MLSys 2023).

Range and errors: `make predict-report` compares with published measurements. Known misses: interleaved pipeline stages,
overlapped pipeline messages, allocator retries near full memory, stragglers, loading of data, and what machines.py and
computing.py miss.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace
from typing import Any

from helpers.predict.architecture import architecture
from helpers.predict.computing import Passes, head_seconds, layer_seconds
from helpers.predict.layout import Layout, Workload
from helpers.predict.machines import Machines, collective_time
from helpers.predict.memory import kv_bytes_per_token
from helpers.predict.rank import Rank, rank_of
from helpers.predict.step import Exchange, step_traffic

__all__ = ["StepTime", "decode_latency", "step_time", "time_to_first_token", "tokens_per_second"]

KERNELS = {True: 10, False: 40}  # a layer starts in a forward pass: fused or compiled code; Python expressions


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


def step_time(
    config: Any,
    workload: Workload,
    layout: Layout,
    machines: Machines,
    *,
    efficiency: float | None = None,
    offloaded: float = 0.0,
) -> StepTime:
    """Return the seconds of one optimiser step.

    `efficiency` is the share of the machine's rates that the training code keeps up while computing; None takes the machine's.
    `offloaded`: bytes that each rank moves over its host link in a step. Raises ValueError for a layout that cannot be, that has
    more ranks than the machines have devices, or for a workload that does not train.
    """
    if not workload.training:
        raise ValueError("step_time is for training; decode_latency and time_to_first_token are for inference")
    if layout.ranks > machines.gpus:
        raise ValueError(f"{layout.ranks} ranks on {machines.gpus} devices: a layout has at most one rank a device")
    shape, share = architecture(config), machines.efficiency if efficiency is None else efficiency
    passes, found = workload.micro_batches, []
    for stage, alike in _kinds(shape, workload, layout):
        rank = rank_of(shape, workload, layout, stage)
        computing = _stage_seconds(rank, machines) * (1 / share)
        moved = step_traffic(shape, workload, layout, stage=stage)
        waits = {axis: _wait(moved, layout, machines, axis) / passes for axis in ("tp", "cp", "pp")}
        found.append((rank, computing, moved, waits, alike))
    rank, computing, moved, waits, _ = max(found, key=lambda each: _one(each[1], each[3]))
    others = sum(_one(each[1], each[3]) * each[4] for each in found) - _one(computing, waits)
    held, moved = max(((each[0], each[2]) for each in found), key=lambda each: sum(each[0].elements(each[0].held)))
    return StepTime(
        compute=(computing.forward + computing.backward) * passes,
        recompute=computing.again * passes,
        tensor_parallel=waits["tp"] * passes,
        context_parallel=waits["cp"] * passes,
        pipeline_bubble=others,
        pipeline_exchange=waits["pp"] * passes,
        data_parallel=_exposed(held, moved, computing, machines),
        update=_update_seconds(held, machines),
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
    return _answer(config, workload, layout, machines, workload.batch, offloaded)


def time_to_first_token(config: Any, workload: Workload, layout: Layout, machines: Machines) -> float:
    """Return the seconds from `batch` prompts of `sequence` tokens to the first new token of each. Errors as `decode_latency`."""
    return _answer(config, workload, layout, machines, workload.batch * workload.sequence, 0.0)


def _answer(config: Any, workload: Workload, layout: Layout, machines: Machines, tokens: int, offloaded: float) -> float:
    """One pass of `tokens` tokens through all stages."""
    shape, total = architecture(config), float(offloaded / machines.host_bandwidth)
    asked = replace(workload, training=False, new_tokens=2, batched_tokens=None, micro_batches=1)
    context = workload.sequence + workload.new_tokens / 2
    when = "decode" if tokens == workload.batch else "prefill"
    for stage in range(layout.pp):
        rank = rank_of(shape, asked, layout, stage)
        share = len(rank.layers) / shape.layers
        linear = [(each.linear and each.split != "vocabulary", each) for each in rank.held if each.name != "embedding"]
        sizes = rank.elements([each for _, each in linear])
        widths = [rank.width.weight if quantised else max(rank.width.weight, 2) for quantised, _ in linear]
        weights = sum(size * width for size, width in zip(sizes, widths, strict=True))
        if shape.tied and rank.last and layout.pp == 1:
            weights += shape.vocabulary * shape.hidden * max(rank.width.weight, 2) / (shape.vocabulary / rank.vocabulary)
        cache = share * kv_bytes_per_token(shape, precision=workload.precision, tp=layout.tp) * workload.batch * context
        flops = 2 * tokens * sum(sizes)
        started = len(rank.layers) * KERNELS[rank.code.fused] * machines.kernel_seconds
        total += max((weights + cache) / machines.memory_bandwidth, flops / machines.matmul_flops) + started
        moved = [each for each in step_traffic(shape, asked, layout, stage=stage) if each.when == when]
        total += sum(_seconds(each, layout, machines) for each in moved if each.op != "recv")
    return total


def _kinds(shape: Any, workload: Workload, layout: Layout) -> list[tuple[int, int]]:
    """One stage of each kind, and how many there are of it: first, last, and by number of layers."""
    kinds: dict[tuple[Any, ...], int] = {}
    count: Counter[tuple[Any, ...]] = Counter()
    for stage in range(layout.pp):
        rank = rank_of(shape, workload, layout, stage)
        kind = (rank.first, rank.last, len(rank.layers), sum(shape.is_sparse(each) for each in rank.layers))
        kinds.setdefault(kind, stage)
        count[kind] += 1
    return [(stage, count[kind]) for kind, stage in kinds.items()]


def _stage_seconds(rank: Rank, machines: Machines) -> Passes:
    """Computing of one micro-batch on one stage; adding its gradients to those of earlier micro-batches included."""
    sparse = Counter(rank.shape.is_sparse(each) for each in rank.layers)
    total = head_seconds(rank, machines)
    for kind, count in sparse.items():
        layer = next(each for each in rank.layers if rank.shape.is_sparse(each) is kind)
        total += layer_seconds(rank, layer, machines) * count
    if rank.workload.micro_batches > 1 and not machines.rates:  # what is measured has added them
        added = sum(rank.elements(rank.held)) * (2 * rank.width.gradient + rank.width.compute)
        total += Passes(backward=added / machines.memory_bandwidth)
    return total


def _one(computing: Passes, waits: dict[str, float]) -> float:
    return computing.total + sum(waits.values())


def _stride(axis: str, layout: Layout) -> int:
    """How far apart the members of an axis lie: tensor parallelism innermost, then context, data, pipeline parallelism."""
    return {"tp": 1, "cp": layout.tp, "dp": layout.tp, "pp": layout.tp * layout.cp * layout.dp}[axis]


def _seconds(each: Exchange, layout: Layout, machines: Machines) -> float:
    return each.count * collective_time(each.op, each.bytes, each.ranks, machines, stride=_stride(each.axis, layout))


def _wait(moved: list[Exchange], layout: Layout, machines: Machines, axis: str) -> float:
    """Seconds of one axis in the whole step; a message counts where it is received."""
    skipped = "send" if axis == "pp" else ""
    return sum(_seconds(each, layout, machines) for each in moved if each.axis == axis and each.op != skipped)


def _exposed(rank: Rank, moved: list[Exchange], computing: Passes, machines: Machines) -> float:
    """Seconds of data parallelism that aren't hidden behind computing."""
    layout, passes = rank.layout, rank.workload.micro_batches
    times: defaultdict[str, float] = defaultdict(float)
    for each in moved:
        if each.axis == "dp":
            times[each.when] += _seconds(each, layout, machines)
    if not (machines.overlaps and rank.code.overlaps):
        return sum(times.values())
    beside = {"forward": computing.forward * passes, "backward": (computing.again + computing.backward) * passes}
    if layout.zero < 2:  # only the last micro-batch's gradients are summed over ranks
        beside["backward"] /= passes
    shown = {when: max(times[when] - beside[when], times[when] / max(1, len(rank.layers))) for when in beside}
    return sum(shown.values()) + times["update"]


def _update_seconds(rank: Rank, machines: Machines) -> float:
    """Seconds of the optimiser on one rank: bytes that it reads and writes over a measured bandwidth or the memory's."""
    part = "update of shards" if rank.layout.tp > 1 else "update"
    bandwidth = next((rate for name, _, rate in machines.rates if name == part), machines.memory_bandwidth)
    layout, width = rank.layout, rank.width
    moments = {"adamw": 4.0 * width.moment, "adamw8bit": 4.0, "sgd": 0.0, "momentum": 8.0}[rank.workload.optimizer]
    kept = 2 * width.master if width.master else width.weight
    shard = layout.shards if layout.zero else 1
    return sum(rank.elements(rank.held)) / shard * (width.gradient + moments + kept + width.weight) / bandwidth
