"""Pipeline parallelism beside the lesson: a causal language model cut into stages, schedules as operations, their idle time.

Running a schedule is the work of `torch.distributed.pipelining`. An operation is written as "F3" (forward of micro-batch 3),
"B3" (backward), and in zero-bubble schedules "I3" and "W3" (the parts of backward for inputs and for weights).
Sources: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021 (1F1B, interleaving, the bubble); Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from helpers.measuring import clock
from helpers.predict.architecture import architecture

if TYPE_CHECKING:
    from helpers.launching.results import Run

SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}  # torch's name -> stages on each rank
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # backward multiplies twice as much as forward


class Operation(NamedTuple):
    """Work on one micro-batch in one stage; `start` and `end` in slots or seconds once it is placed."""

    kind: str  # "F", "B", "I" or "W"
    micro_batch: int
    stage: int
    start: float = 0
    end: float = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Order = Sequence[Sequence[Operation | str]]  # by rank; a text such as "F0" is an operation of the stage with the rank's number


class Stage(nn.Module):
    """Stage `index` of a causal language model of which stage i runs the layers `parts[i]`.

    The first stage takes token ids (B, T), the others hidden states (B, T, H); the last returns logits (B, T, V), the others
    hidden states. `cache`, a transformers `DynamicCache` of this stage's own, grows by keys and values of these T positions.
    A tied matrix stands as a copy on the first stage (`embedding`) and on the last (`head`): their gradients are to be summed.
    The model is taken apart: use it no more. Made for models laid out like Llama (ERNIE, Qwen …); stages are compared with the
    whole model on 16 tokens. Raises ValueError for `parts` that are not all layers in order, and for a model not equal to them.
    """

    def __init__(self, model: Any, parts: Sequence[range], index: int) -> None:
        super().__init__()
        body, count, kind = model.base_model, model.config.num_hidden_layers, type(model.base_model).__name__
        if [layer for part in parts for layer in part] != list(range(count)):
            raise ValueError(f"parts {list(parts)}: together they must be the layers 0 to {count - 1}, each once and in order")
        if missing := [name for name in ("embed_tokens", "layers", "norm") if not hasattr(body, name)]:
            raise ValueError(f"{kind} has no {', '.join(missing)}: only models laid out like Llama are cut here")
        parts = [range(*ends) for ends in itertools.pairwise(itertools.accumulate(map(len, parts), initial=0))]
        whole, modes = dict(body.named_children()), {each: each.training for each in model.modules()}
        try:
            if not body.embed_tokens.weight.is_meta:  # which holds no numbers
                self._compare(model.eval(), whole, parts)
        finally:
            for each, mode in modes.items():
                each.training = mode
        self._cut(model, whole, parts[index], index == 0, index == len(parts) - 1)

    def _compare(self, model: Any, whole: Mapping[str, Any], parts: Sequence[range]) -> None:
        """Raise ValueError where a stage does not compute what its layers do in the whole model."""
        body, kind = model.base_model, type(model.base_model).__name__
        states = [torch.arange(16, device=body.embed_tokens.weight.device)[None] % model.config.vocab_size]
        modules = (*body.layers, body.norm)  # what each of them takes, from the token ids to the logits
        hooks = [each.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for each in modules]
        try:
            with torch.no_grad():
                states.append(model(states[0], use_cache=False).logits)
        finally:
            for hook in hooks:
                hook.remove()
        for number, part in enumerate(parts):
            right = states[-1 if number == len(parts) - 1 else part.stop + 1]
            try:
                self._cut(model, whole, part, number == 0, number == len(parts) - 1)
                found = self(states[0 if number == 0 else part.start + 1]).detach()
                atol = 0.01 * float(right.nan_to_num(0, 0, 0).abs().max())
                torch.testing.assert_close(found, right, rtol=0, atol=atol, equal_nan=True, msg="it computes something else")
            except Exception as error:
                odd = {k: v for k, v in vars(model.config).items() if re.search("multiplier|scal", k) and v not in (None, 1)}
                raise ValueError(f"stage {number} of {kind} is not what it is in the whole model: {error} {odd or ''}") from error

    def _cut(self, model: Any, whole: Mapping[str, Any], part: range, first: bool, last: bool) -> None:
        body, self.first, self.last = model.base_model, first, last
        body.config = copy.deepcopy(model.config)
        for name, value in vars(model.config).items():  # such as layer_types, looked up by a layer's place in the body
            if isinstance(value, list) and len(value) == len(whole["layers"]):
                setattr(body.config, name, value[part.start : part.stop])
        body.layers = nn.ModuleList(whole["layers"][layer] for layer in part)
        for place, layer in enumerate(body.layers):
            layer.self_attn.layer_idx = place  # where its keys and values stand in this stage's cache
        body.norm = whole["norm"] if last else nn.Identity()
        body.embed_tokens = self.embedding = whole["embed_tokens"] if first else None
        self.head, self.body = model.get_output_embeddings() if last else None, body
        self._runs = (model if last else body,)  # the model, as it may scale logits; in a tuple, as it is no submodule

    def forward(self, inputs: torch.Tensor, cache: Any = None) -> torch.Tensor:
        given = {"input_ids" if self.first else "inputs_embeds": inputs}
        if self.last:
            self._runs[0].set_output_embeddings(self.head)  # which may have been replaced
        output = self._runs[0](**given, past_key_values=cache, use_cache=cache is not None)
        return output.logits if self.last else output.last_hidden_state


class RecordedStage(PipelineStage):
    """torch's `PipelineStage` that notes each operation as a region "F0", "B0" … of `run.regions`."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with clock.region(f"F{fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with clock.region(f"B{bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def costs(config: Any) -> list[int]:
    """Return what [embedding, layer 0, layer 1, …, output matrix] cost: the list that `balance` divides.

    They are multiplications a token, without lookups and attention's scores. Raises ValueError for mixtures of experts.
    """
    shape = architecture(config)
    if shape.experts:
        raise ValueError(f"the work of {shape.experts} experts depends on the tokens: write such costs down yourself")
    layers = [shape.layer_parameters(layer) for layer in range(shape.layers)]
    groups = [[], *layers, shape.head_parameters(copy_of_tied=True)]
    return [sum(each.elements for each in group if each.inputs) for group in groups]


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Return the layers of each stage such that the costliest stage costs least; of equal cuts, the one with earlier ends.

    `costs` as from `costs`: embedding, layers, output matrix. The last stage may be the output matrix alone. Raises ValueError
    where there are fewer layers than stages.
    """
    layers = len(costs) - 2
    if not isinstance(stages, int) or not 1 <= stages <= layers:
        raise ValueError(f"{stages!r} stages for {layers} layers: at least 1 stage, and at most one a layer")
    total = np.concatenate([[0], np.cumsum(costs)])
    stage = total - total[:, None]  # [first, end]: what a stage of the items first … end − 1 costs
    first, end = np.indices(stage.shape)
    stage = np.where((end > first) & (end > 1), stage, np.inf)  # at least one item, and a layer beside the embedding
    least = stage[:, -1]  # [first]: of all stages from there on, the costliest; at first there is one
    cuts = []  # for each number of stages left, [first]: where its stage ends
    for _ in range(stages - 1):
        costliest = np.maximum(stage, least)
        cuts.append(costliest.argmin(axis=1))
        least = costliest.min(axis=1)
    ends = [0]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    bounds = [0, *(each - 1 for each in ends[1:]), layers]  # item 0 is the embedding
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def order(schedule: str, ranks: int, micro_batches: int) -> list[list[Operation]]:
    """Return what each rank does in which order in one of the `SCHEDULES`; those with several stages a rank as torch plans them.
    Raises ValueError for an unknown name and for numbers that the schedule does not take: 1F1B needs micro_batches ≥ ranks.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if not isinstance(ranks, int) or not isinstance(micro_batches, int):
        raise ValueError(f"{ranks!r} ranks and {micro_batches!r} micro-batches: both must be whole numbers")
    if ranks < 1 or micro_batches < (ranks if schedule == "1F1B" else 1):
        needed = "at least as many micro-batches as ranks" if schedule == "1F1B" else "at least one of each"
        raise ValueError(f"{ranks} ranks and {micro_batches} micro-batches: {schedule} needs {needed}")
    if SCHEDULES[schedule] > 1:
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

        plan = get_schedule_ops(schedule, ranks, micro_batches, SCHEDULES[schedule])
        texts = [[match for each in row if (match := re.fullmatch(r"(\d+)([FBIW])(\d+)", str(each)))] for row in plan]
        return [[Operation(match[2], int(match[3]), int(match[1])) for match in row] for row in texts]
    rows = []
    for rank in range(ranks):
        ahead = micro_batches if schedule == "GPipe" else ranks - rank  # forward passes before the first backward pass
        row = [Operation("F", batch, rank) for batch in range(ahead)]
        for batch in range(micro_batches):
            row.append(Operation("B", batch, rank))
            row += [Operation("F", ahead + batch, rank)] * (ahead + batch < micro_batches)
        rows.append(row)
    return rows


def place(
    orders: Order, seconds: Mapping[str, float] | Callable[[Operation], float] = SLOTS, *, message: float = 0
) -> list[list[Operation]]:
    """Return the operations with their times: each starts as soon as its rank is free and its inputs are there.

    F needs the F of the stage before, B (or I) its own F and the B (or I) of the stage behind, W its own I. `seconds` is what
    an operation takes, by kind or by a function of it; an input from another rank comes `message` later.
    Raises ValueError for a text that is no operation, for one that `seconds` leaves out, and for an order in which ranks wait
    for each other for ever.
    """
    rows = [[_operation(each, rank) for each in row] for rank, row in enumerate(orders)]
    takes = seconds if callable(seconds) else lambda each: seconds[each.kind]
    if not callable(seconds) and (missing := {each.kind for row in rows for each in row} - set(seconds)):
        raise ValueError(f"seconds {dict(seconds)} leaves out {', '.join(sorted(missing))}: what takes how long, such as {SLOTS}")
    last = max((each.stage for row in rows for each in row), default=0)
    made: dict[tuple[str, int, int], tuple[float, int]] = {}  # (what, micro-batch, stage) -> (when, on which rank)
    placed: list[list[Operation]] = [[] for _ in rows]
    waiting = [deque(row) for row in rows]
    while any(waiting):
        ready = [rank for rank, row in enumerate(waiting) if row and made.keys() >= set(_inputs(row[0], last))]
        if not ready:
            rank = next(rank for rank, row in enumerate(waiting) if row)
            what, batch, stage = next(need for need in _inputs(waiting[rank][0], last) if need not in made)
            needs = f"{waiting[rank][0]} needs the {what} of micro-batch {batch} from stage {stage}"
            raise ValueError(f"rank {rank} waits for ever: {needs}")
        for rank in ready:
            each = waiting[rank].popleft()
            inputs = [made[need] for need in _inputs(each, last)]
            free = placed[rank][-1].end if placed[rank] else 0
            start = max([free, *(when + message * (where != rank) for when, where in inputs)])
            end = start + takes(each)
            placed[rank].append(each._replace(start=start, end=end))
            made[{"F": "output", "W": "weights"}.get(each.kind, "gradient"), each.micro_batch, each.stage] = end, rank
    return placed


def idle(placed: Sequence[Sequence[Operation]]) -> float:
    """Return slots or seconds of all ranks, up to the last end, without work; ValueError for operations without times."""
    return len(placed) * _span(placed) - sum(each.end - each.start for row in placed for each in row)


def bubble(placed: Sequence[Sequence[Operation]]) -> float:
    """Return the share of all ranks' time that is `idle`: (p − 1)/(m + p − 1) for GPipe and 1F1B with p equal stages."""
    return idle(placed) / (len(placed) * _span(placed))


def in_flight(row: Sequence[Operation | str]) -> int:
    """Return the most micro-batches of one rank whose forward pass is done and whose backward pass is not: activations kept."""
    now = most = 0
    for each in row:
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[_operation(each, 0).kind]
        most = max(most, now)
    return most


def recorded(run: Run, step: int = -1) -> list[list[Operation]]:
    """Return what each rank did in one of the regions "step" of a run, in the order and with the seconds recorded.

    The operations are regions of a `RecordedStage` with the rank's number; time 0 is when the first rank began the step.
    Raises ValueError where a rank has no such step.
    """
    regions = sorted(run.regions, key=lambda each: each.start)
    steps = []
    for rank in range(run.ranks):
        own = [each for each in regions if each.rank == rank and each.name == "step"]
        if not -len(own) <= step < len(own):
            raise ValueError(f'rank {rank} has {len(own)} regions "step": put clock.region("step") around schedule.step')
        steps.append(own[step])
    zero = min(each.start for each in steps)
    found: list[list[Operation]] = [[] for _ in steps]
    for each in regions:
        whole = steps[each.rank]
        if whole.start <= each.start < whole.end and re.fullmatch(r"[FB]\d+", each.name):
            operation = _operation(each.name, each.rank)
            found[each.rank].append(operation._replace(start=each.start - zero, end=each.end - zero))
    return found


def _span(placed: Sequence[Sequence[Operation]]) -> float:
    ends = [getattr(each, "end", 0) for row in placed for each in row]
    if not any(ends):
        raise ValueError("these operations have no times yet: idle time is that of place(order(…)), or of recorded(run)")
    return max(ends)


def _operation(given: Operation | str, rank: int) -> Operation:
    if isinstance(given, Operation):
        return given
    match = re.fullmatch(r"([FBIW])(\d+)", str(given))
    if match is None:
        raise ValueError(f'{given!r} is no operation: write "F0" for the forward pass of micro-batch 0, "B0" for its backward')
    return Operation(match[1], int(match[2]), rank)


def _inputs(each: Operation, last: int) -> list[tuple[str, int, int]]:
    """What must exist before an operation: (what, micro-batch, stage)."""
    if each.kind == "F":
        return [("output", each.micro_batch, each.stage - 1)] if each.stage else []
    own, behind = ("gradient", each.micro_batch, each.stage), ("gradient", each.micro_batch, each.stage + 1)
    return [own] if each.kind == "W" else [("output", each.micro_batch, each.stage), *([behind] if each.stage < last else [])]
