"""Choose a layout: enumerate what divides and fits, order it by a goal, say why the rest was left out.

What is divided: GPUs into dp × tp × pp; attention heads, MLP columns (and the vocabulary, where the code splits it) by tp; layers
by pp; the sequences of a step into dp × micro-batches × their size. What fits: `memory` of the fullest stage in the GPU's memory
less a reserve for what `memory` does not know (CUDA context, NCCL buffers, workspaces, fragmentation). The order: `step_time`,
in serving `decode_latency`.

Not tried, because it cannot be better: checkpointing where the same layout fits without, and the optimiser in host memory where
checkpointing is enough. Not tried, because few codes run it: tensor parallelism across hosts, ZeRO 2 and 3 in a pipeline, uneven
stages (but where the code cuts by cost), fewer micro-batches than stages.

Known misses: room and time for an optimiser on the CPU (only its bytes over the host link count); what `memory` and `step_time`
miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from helpers.predict.architecture import Architecture, architecture
from helpers.predict.layout import IMPLEMENTATIONS, Layout, Workload, divisors
from helpers.predict.machines import Machines
from helpers.predict.memory import Memory, kv_bytes_per_token, memory
from helpers.predict.plans import Candidate, Plan, Rejection, counted, described
from helpers.predict.timing import decode_latency, step_time

__all__ = ["GOALS", "plan", "problem"]

GOALS = ("throughput", "latency", "cost", "fits")
RESERVE = 0.1


def plan(
    config: Any,
    machines: Machines,
    workload: Workload,
    goal: str = "throughput",
    *,
    reserve: float = RESERVE,
    price_per_gpu_hour: float | None = None,
) -> Plan:
    """Return the layouts of a job that divide and fit, best first.

    `workload` is the whole job: batch × micro_batches sequences in one optimiser step, in serving `batch` sequences at a time.
    How they are spread, the micro-batch and the checkpointing are chosen; precision, optimiser and implementation are kept.

    goal: "throughput" (tokens a second) and "latency" (seconds of a step, in serving of a decode step) use all GPUs, or, where
    they cannot be divided, the largest part of them that can; "cost" (GPU time a token) and "fits" (fewest GPUs) also parts.
    A part is a divisor of the GPUs, in one host or in whole hosts. `reserve` is the share of a GPU's memory that is kept free.

    A plan without candidates says why. Raises ValueError for a config that is not understood, an unknown goal and a reserve that
    is not in 0 … 1.
    """
    if goal not in GOALS:
        raise ValueError(f"goal {goal!r}: choose one of {', '.join(GOALS)}")
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve {reserve}: the share of a GPU's memory that stays free, from 0 to below 1")
    search = _Search(architecture(config), machines, workload, _room(machines, reserve))
    found: list[Candidate] = []
    least, worse = float("inf"), 0
    for ranks in _parts(machines, ascending=goal in ("cost", "fits")):
        more = list(search.candidates(ranks))
        found += more
        if more and goal != "cost":
            break
        best = min((each.worth(goal) for each in more), default=float("inf"))
        worse = worse + 1 if found and best >= least else 0
        least = min(least, best)
        if worse == 2:  # twice as many GPUs, then four times: each token costs more
            break
    found.sort(key=lambda each: _score(each, goal))
    return Plan(goal, machines, workload, search.room, reserve, tuple(found), search.rejections, price_per_gpu_hour)


def problem(config: Any, machines: Machines, layout: Layout, workload: Workload, *, reserve: float = RESERVE) -> str:
    """Return why `plan` leaves a layout out, or "" where it divides and fits; `workload` is that of one data-parallel rank."""
    search = _Search(architecture(config), machines, workload, _room(machines, reserve))
    if layout.ranks > machines.gpus:
        return f"GPUs: {layout.ranks} ranks, {machines.gpus} GPUs"
    found = [f"{reason}: {why}" for reason, why in search.undivided(layout)]
    if not found and layout.pp > 1 and workload.training and workload.micro_batches < layout.pp:
        found = [f"{_IDLE}: {counted(workload.micro_batches, 'micro-batch')}, {layout.pp} stages"]
    if not found and (needed := search.need(layout, workload).peak) > search.room:
        found = [f"{_MEMORY}: {search.short(layout, workload, needed)}"]
    return "; ".join(found)


_MEMORY, _IDLE, _BATCH = "does not fit", "a pipeline that is never full", "the batch is not divided"


def _room(machines: Machines, reserve: float) -> int:
    return int((machines.memory_bytes or 0) * (1 - reserve))


def _parts(machines: Machines, ascending: bool) -> list[int]:
    """How many GPUs a layout may use: divisors of all, within a host or whole hosts."""
    whole = [each for each in divisors(machines.gpus) if each <= machines.per_node or each % machines.per_node == 0]
    return whole if ascending else whole[::-1]


def _moved(layout: Layout, needed: Memory) -> int:
    """Bytes that a rank sends over its host link in a step: the gradients of what it updates, and the new weights back."""
    weights = needed.parameters // (layout.shards if layout.zero in (1, 2) else 1)
    return weights + needed.gradients // (layout.shards if layout.zero == 1 else 1)


def _score(each: Candidate, goal: str) -> tuple[float, ...]:
    """Smaller is better; equal ones in the order of GPUs, memory, ZeRO stage."""
    return (each.worth(goal), each.layout.ranks, each.worth("throughput"), each.memory.peak, each.layout.zero)


@dataclass
class _Search:
    shape: Architecture
    machines: Machines
    workload: Workload
    room: int
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)  # reason: (how many, the first of them)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """What was left out, the most frequent reason first."""
        ordered = sorted(self.left_out.items(), key=lambda item: -item[1][0])
        return tuple(Rejection(reason, count, example) for reason, (count, example) in ordered)

    def candidates(self, ranks: int) -> Iterator[Candidate]:
        """Everything that runs on `ranks` GPUs."""
        for layout in self.layouts(ranks):
            if not self.workload.training:
                for work in self.served(layout):
                    seconds = decode_latency(self.shape, work, layout, self.machines)
                    yield Candidate(layout, work, self.need(layout, work), seconds, self.workload.batch)
                continue
            for work, offload in self.trained(layout):
                needed = self.need(layout, work, offload)
                moved = _moved(layout, needed) if offload else 0
                time = step_time(self.shape, work, layout, self.machines, offloaded=moved)
                yield Candidate(layout, work, needed, time.total, time.tokens, time, moved)

    def layouts(self, ranks: int) -> Iterator[Layout]:
        """Layouts of exactly `ranks` GPUs that divide the model."""
        training, code = self.workload.training, IMPLEMENTATIONS[self.workload.implementation]
        for tp in divisors(ranks):
            for pp in divisors(ranks // tp) if training else [1]:
                split = tp > 1 and training and code.vocabulary_parallel and self.workload.sequence % tp == 0
                layout = Layout(dp=ranks // tp // pp, tp=tp, pp=pp, sequence_parallel=split)
                if reasons := self.undivided(layout):
                    self.leave_out(reasons[0][0], reasons[0][1])
                    continue
                for zero in (0, 1, 2, 3)[: 2 if pp > 1 else 4] if training and layout.dp > 1 else (0,):
                    yield replace(layout, zero=zero)

    def undivided(self, layout: Layout) -> list[tuple[str, str]]:
        """(reason, why) of everything that a layout would have to cut and cannot."""
        shape, tp, pp, name = self.shape, layout.tp, layout.pp, self.workload.implementation
        code, host = IMPLEMENTATIONS[name], min(self.machines.per_node, layout.ranks)
        widths = [shape.intermediate] * any(not shape.is_sparse(layer) for layer in range(shape.layers))
        widths += [width for width in (shape.expert_intermediate, shape.shared_intermediate) if width]
        copied = name != "transformers" and tp % shape.kv_heads == 0  # its plans cut each key-value head's matrix
        narrow = next((width for width in widths if width % tp), 0)
        padded = name == "vllm" or not code.vocabulary_parallel
        tests = {
            "tensor parallelism across hosts": (host % tp, f"tp {tp} with {host} GPUs a host"),
            "attention heads are not divided": (shape.heads % tp, f"{shape.heads} by tp {tp}"),
            "key-value heads are not divided": (shape.kv_heads % tp and not copied, f"{shape.kv_heads} by tp {tp}"),
            "MLP columns are not divided": (narrow, f"{narrow:,} by tp {tp}"),
            "the vocabulary is not divided": (not padded and shape.vocabulary % tp, f"{shape.vocabulary:,} by tp {tp}"),
            "layers are not divided": (
                pp > shape.layers or (shape.layers % pp and not code.stages_by_cost),
                f"{shape.layers} by pp {pp}",
            ),
            "ZeRO 2 and 3 in a pipeline": (pp > 1 and layout.zero > 1, f"pp {pp} with ZeRO {layout.zero}"),
        }
        return [(reason, why) for reason, (wrong, why) in tests.items() if wrong]

    def trained(self, layout: Layout) -> Iterator[tuple[Workload, bool]]:
        """(what one data-parallel rank works on, whether its optimiser is offloaded): micro-batches that fit, small to large."""
        sequences = self.workload.batch * self.workload.micro_batches
        if sequences % layout.dp:
            self.leave_out(_BATCH, f"{sequences:,} sequences by dp {layout.dp}")
            return
        sizes, levers = divisors(sequences // layout.dp), self.levers
        for place, size in enumerate(sizes):
            count = sequences // layout.dp // size
            if layout.pp > 1 and count < layout.pp:
                self.leave_out(_IDLE, f"{counted(count, 'micro-batch')}, {layout.pp} stages", len(sizes) - place)
                return
            work = replace(self.workload, batch=size, micro_batches=count)
            while levers:  # what is too large for this size is so for larger ones
                work, offload = replace(work, checkpointing=levers[0][0]), levers[0][1]
                if self.need(layout, work, offload).peak <= self.room:
                    yield work, offload
                    break
                levers = levers[1:]
            else:
                needed = self.need(layout, work, True).peak
                self.leave_out(_MEMORY, self.short(layout, work, needed, True), len(sizes) - place)
                return

    @property
    def levers(self) -> list[tuple[str, bool]]:
        """What makes a step smaller, each slower than the one before: (checkpointing, whether the optimiser is offloaded)."""
        code = IMPLEMENTATIONS[self.workload.implementation]
        kinds = ["none", *["selective"] * (code.saves_some_products or self.workload.attention == "eager"), "full"]
        return [(kind, offload) for offload in (False, True) for kind in kinds]

    def served(self, layout: Layout) -> Iterator[Workload]:
        """What one replica answers at a time; the cache of all its sequences has to fit."""
        if self.workload.batch < layout.dp:
            self.leave_out(_BATCH, f"{self.workload.batch:,} sequences for {layout.dp} replicas")
            return
        work = replace(self.workload, batch=math.ceil(self.workload.batch / layout.dp))
        if (needed := self.need(layout, work).peak) <= self.room:
            yield work
        else:
            self.leave_out(_MEMORY, self.short(layout, work, needed))

    def need(self, layout: Layout, work: Workload, offload: bool = False) -> Memory:
        """Memory of the fullest rank: the first or the last stage, as no other has more layers or micro-batches in flight."""
        stages = range(layout.pp) if self.shape.experts else {0, layout.pp - 1}
        found = max((memory(self.shape, work, layout, stage=stage) for stage in stages), key=lambda each: each.peak)
        if work.implementation == "vllm" and not work.training:  # vLLM takes what is left: here what the sequences need of it
            cache = kv_bytes_per_token(self.shape, precision=work.precision, tp=layout.tp)
            cache *= work.batch * (work.sequence + work.new_tokens)
            found = replace(found, kv_cache=cache, peak=found.peak + cache)
        if offload:
            away = found.optimizer_state + found.master_weights
            found = replace(found, optimizer_state=0, master_weights=0, peak=found.peak - away)
        return found

    def short(self, layout: Layout, work: Workload, needed: int, offload: bool = False) -> str:
        """What does not fit, in words."""
        return f"{described(layout, work, offload)}: {needed / 2**30:.3g} GiB of {self.room / 2**30:.3g}"

    def leave_out(self, reason: str, example: str, count: int = 1) -> None:
        """Note combinations that are not possible."""
        before, first = self.left_out.get(reason, (0, example))
        self.left_out[reason] = before + count, first
