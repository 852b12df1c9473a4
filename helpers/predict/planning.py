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

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from helpers.predict.architecture import Architecture, architecture
from helpers.predict.layout import IMPLEMENTATIONS, Layout, Workload, divisors
from helpers.predict.machines import Machines
from helpers.predict.memory import Memory, kv_bytes_per_token, memory
from helpers.predict.plans import RESERVE, Candidate, Plan, Rejection, counted, described
from helpers.predict.rank import undivided
from helpers.predict.timing import decode_latency, step_time

__all__ = ["GOALS", "plan", "problem"]

GOALS = ("throughput", "latency", "cost", "fits")
_MEMORY, _IDLE, _BATCH = "does not fit", "a pipeline that is never full", "the batch is not divided"


def plan(config: Any, machines: Machines, workload: Workload, goal: str = "throughput") -> Plan:
    """Return the layouts of a job that divide and fit, best first.

    `workload` is the whole job: batch × micro_batches sequences in one optimiser step, in serving `batch` sequences at a time.
    How they are spread, the micro-batch and the checkpointing are chosen; precision, optimiser and implementation are kept.

    goal: "throughput" (tokens a second) and "latency" (seconds of a step, in serving of a decode step) use all GPUs, or, where
    they cannot be divided, the largest part of them that can; "cost" (GPU time a token) and "fits" (fewest GPUs) also parts.
    A part is a divisor of the GPUs, in one host or in whole hosts.

    A plan without candidates says why. Raises ValueError for a config that is not understood and for an unknown goal.
    """
    if goal not in GOALS:
        raise ValueError(f"goal {goal!r}: choose one of {', '.join(GOALS)}")
    search = _Search(architecture(config), machines, workload)
    parts = [each for each in divisors(machines.gpus) if each <= machines.per_node or each % machines.per_node == 0]
    found: list[Candidate] = []
    least, worse = float("inf"), 0
    for ranks in parts if goal in ("cost", "fits") else parts[::-1]:
        more = list(search.candidates(ranks))
        found += more
        if more and goal != "cost":
            break
        best = min((each.worth(goal) for each in more), default=float("inf"))
        worse = worse + 1 if found and best >= least else 0
        least = min(least, best)
        if worse == 2:  # twice as many GPUs, then four times: each token costs more
            break
    found.sort(key=lambda each: (each.layout.ranks, each.worth("throughput"), each.memory.peak, each.layout.zero))
    found.sort(key=lambda each: each.worth(goal))
    left_out = sorted(search.left_out.values(), key=lambda each: -each.count)
    return Plan(goal, machines, workload, search.room, tuple(found), tuple(left_out))


def problem(config: Any, machines: Machines, layout: Layout, workload: Workload) -> str:
    """Return why `plan` leaves a layout out, or "" where it divides and fits; `workload` is that of one data-parallel rank."""
    search = _Search(architecture(config), machines, workload)
    if layout.ranks > machines.gpus:
        return f"GPUs: {layout.ranks} ranks, {machines.gpus} GPUs"
    if why := search.not_divided(layout):
        return "; ".join(f"{reason}: {example}" for reason, example in why.items())
    if layout.pp > 1 and workload.training and workload.micro_batches < layout.pp:
        return f"{_IDLE}: {counted(workload.micro_batches, 'micro-batch')}, {layout.pp} stages"
    needed = search.need(layout, workload)
    return f"{_MEMORY}: {search.short(layout, workload, needed)}" if needed.peak > search.room else ""


@dataclass
class _Search:
    shape: Architecture
    machines: Machines
    workload: Workload
    left_out: dict[str, Rejection] = field(default_factory=dict)  # by reason

    @property
    def room(self) -> int:
        """Bytes of a GPU that may be used."""
        return int(self.machines.memory_bytes * (1 - RESERVE))

    def candidates(self, ranks: int) -> Iterator[Candidate]:
        """Everything that runs on `ranks` GPUs."""
        for layout in self.layouts(ranks):
            yield from self.trained(layout) if self.workload.training else self.served(layout)

    def layouts(self, ranks: int) -> Iterator[Layout]:
        """Layouts of exactly `ranks` GPUs that divide the model."""
        training, code = self.workload.training, IMPLEMENTATIONS[self.workload.implementation]
        for tp in divisors(ranks):
            for pp in divisors(ranks // tp) if training else [1]:
                split = tp > 1 and training and code.vocabulary_parallel and self.workload.sequence % tp == 0
                layout = Layout(dp=ranks // tp // pp, tp=tp, pp=pp, sequence_parallel=split)
                if why := self.not_divided(layout):
                    self.leave_out(*next(iter(why.items())))
                    continue
                for zero in range(2 if pp > 1 else 4) if training and layout.dp > 1 else [0]:
                    yield replace(layout, zero=zero)

    def not_divided(self, layout: Layout) -> dict[str, str]:
        """What a layout would have to cut and cannot: an example by reason."""
        layers, tp, pp, host = self.shape.layers, layout.tp, layout.pp, min(self.machines.per_node, layout.ranks)
        found = {}
        if host % tp:
            found["tensor parallelism across hosts"] = f"tp {tp} with {host} GPUs a host"
        for what, size in undivided(self.shape, tp, self.workload.implementation).items():
            found[f"{what} are not divided"] = f"{size:,} by tp {tp}"
        if pp > layers or (layers % pp and not IMPLEMENTATIONS[self.workload.implementation].stages_by_cost):
            found["layers are not divided"] = f"{layers} by pp {pp}"
        if pp > 1 and layout.zero > 1:
            found["ZeRO 2 and 3 in a pipeline"] = f"pp {pp} with ZeRO {layout.zero}"
        return found

    def trained(self, layout: Layout) -> Iterator[Candidate]:
        """Micro-batches that fit, small to large, each with the first lever that makes room for it."""
        sequences, levers = self.workload.batch * self.workload.micro_batches, self.levers
        if sequences % layout.dp:
            self.leave_out(_BATCH, f"{sequences:,} sequences by dp {layout.dp}")
            return
        sizes = divisors(sequences // layout.dp)
        for place, size in enumerate(sizes):
            count, left = sequences // layout.dp // size, len(sizes) - place
            if layout.pp > 1 and count < layout.pp:
                self.leave_out(_IDLE, f"{counted(count, 'micro-batch')}, {layout.pp} stages", left)
                return
            while True:
                checkpointing, offload = levers[0]
                work = replace(self.workload, batch=size, micro_batches=count, checkpointing=checkpointing)
                needed = self.need(layout, work, offload)
                if needed.peak <= self.room:
                    break
                levers = levers[1:]  # what is too large for this size is so for larger ones
                if not levers:
                    self.leave_out(_MEMORY, self.short(layout, work, needed, offload), left)
                    return
            moved = _moved(layout, needed) if offload else 0
            time = step_time(self.shape, work, layout, self.machines, offloaded=moved)
            yield Candidate(layout, work, needed, time.total, time.tokens, time, moved)

    @property
    def levers(self) -> list[tuple[str, bool]]:
        """What makes a step smaller, each slower than the one before: (checkpointing, whether the optimiser is offloaded)."""
        code = IMPLEMENTATIONS[self.workload.implementation]
        kinds = ["none", *["selective"] * (code.saves_some_products or self.workload.attention == "eager"), "full"]
        return [(kind, offload) for offload in (False, True) for kind in kinds]

    def served(self, layout: Layout) -> Iterator[Candidate]:
        """What one replica answers at a time; the cache of all its sequences has to fit."""
        if self.workload.batch < layout.dp:
            self.leave_out(_BATCH, f"{self.workload.batch:,} sequences for {layout.dp} replicas")
            return
        work = replace(self.workload, batch=math.ceil(self.workload.batch / layout.dp))
        needed = self.need(layout, work)
        if needed.peak > self.room:
            self.leave_out(_MEMORY, self.short(layout, work, needed))
            return
        yield Candidate(layout, work, needed, decode_latency(self.shape, work, layout, self.machines), self.workload.batch)

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

    def short(self, layout: Layout, work: Workload, needed: Memory, offload: bool = False) -> str:
        """What does not fit, in words."""
        return f"{described(layout, work, offload)}: {needed.peak / 2**30:.3g} GiB of {self.room / 2**30:.3g}"

    def leave_out(self, reason: str, example: str, count: int = 1) -> None:
        """Note combinations that are not possible."""
        before = self.left_out.get(reason, Rejection(reason, 0, example))
        self.left_out[reason] = replace(before, count=before.count + count)


def _moved(layout: Layout, needed: Memory) -> int:
    """Bytes that a rank sends over its host link in a step: the gradients of what it updates, and the new weights back."""
    weights = needed.parameters // (layout.shards if layout.zero in (1, 2) else 1)
    return weights + needed.gradients // (layout.shards if layout.zero == 1 else 1)
