"""Notebook 05: answers, hints, checks, and wrong answers with the message each gets."""

import torch
import torch.distributed as dist

from helpers import launch, pipeline
from helpers.exercises import Exercise, Wrong, as_number

RANKS = 4  # in the check of 05.3


def check_micro_batches(answer):
    given, answer = answer, as_number(answer)
    if answer is None or answer % 1:
        raise Wrong(f"The answer is a whole number of micro-batches; yours is {given!r}.")
    if answer == 70:
        raise Wrong("70 comes from 7/m ≤ 0.1. The bubble is a share of all the time, idle time included: 7/(m + 7).")
    if answer == 72:
        raise Wrong("72 comes from 8/(m + 8). A pipeline of 8 stages fills in 7 steps: p − 1 stands in both places.")
    bubble = 7 / (max(answer, 0) + 7)
    if bubble > 0.1:
        raise Wrong(f"With {answer} micro-batches {bubble:.1%} of the time is idle: more are needed.")
    if answer > 63:
        raise Wrong(f"{answer} are enough ({bubble:.1%} idle), but fewer would be: look for the smallest.")
    return "7/(63 + 7) is exactly one tenth: nine micro-batches for each step that the pipeline needs to fill."


def my_order(rank, ranks, micro_batches):
    ahead = ranks - rank  # forward passes before the first backward pass
    order = [f"F{number}" for number in range(ahead)]
    for number in range(micro_batches):
        order.append(f"B{number}")
        if ahead + number < micro_batches:
            order.append(f"F{ahead + number}")
    return order


def _texts(order):
    """An order written as a tuple, a generator or with operations of `pipeline`, as a list of texts."""
    return order if isinstance(order, (str, dict)) or not hasattr(order, "__iter__") else [str(each) for each in order]


def check_order(answer):
    for ranks, count in ((3, 7), (4, 4)):
        given = [_texts(answer(rank, ranks, count)) for rank in range(ranks)]
        wanted = {f"{kind}{number}" for kind in "FB" for number in range(count)}
        for rank, order in enumerate(given):
            if not isinstance(order, list):
                raise Wrong(f'Return a list of texts such as ["F0", "B0"]; for rank {rank} yours returned {order!r}.')
            missing, extra = sorted(wanted - set(order)), sorted(set(order) - wanted)
            twice = sorted({each for each in order if order.count(each) > 1})
            if missing or extra or twice:
                found = {"is missing": missing, "does not belong there": extra, "comes twice": twice}
                said = "; ".join(f"{', '.join(each)} {what}" for what, each in found.items() if each)
                raise Wrong(f"Rank {rank} of {ranks} with {count} micro-batches, {order}: {said}.")
        try:
            placed = pipeline.place(given)
        except ValueError as error:
            raise Wrong(f"With {ranks} ranks and {count} micro-batches {error}. Your lists: {given}") from None
        for rank, order in enumerate(given):
            if (most := pipeline.in_flight(order)) > ranks - rank:
                raise Wrong(
                    f"Rank {rank} of {ranks} keeps the activations of {most} micro-batches, of {ranks - rank} in 1F1B: after "
                    f"{ranks - rank} forward passes go backward before each further forward pass."
                )
        least = 3 * ranks * (ranks - 1)
        if (idle := pipeline.idle(placed)) > least:
            raise Wrong(
                f"It runs, and with {ranks} ranks and {count} micro-batches {idle} slots are idle, {least} by the formula: rank "
                f"r starts with ranks − r forward passes, so that early ranks run ahead, and micro-batches keep their order."
            )
    return "Nobody waits more than the formula says, and rank r keeps at most p − r micro-batches."


def all_forward_first(rank, ranks, micro_batches):
    return [f"{kind}{number}" for kind in "FB" for number in range(micro_batches)]


def no_head_start(rank, ranks, micro_batches):
    return [f"{kind}{number}" for number in range(micro_batches) for kind in "FB"]


def last_one_first(rank, ranks, micro_batches):
    order = my_order(rank, ranks, micro_batches)
    return order if rank < ranks - 1 else order[2:4] + order[:2] + order[4:]


def backward_before_forward(rank, ranks, micro_batches):
    return [f"{kind}{number}" for number in range(micro_batches) for kind in "BF"]


def forgot_the_end(rank, ranks, micro_batches):
    return my_order(rank, ranks, micro_batches)[:-1]


def sum_tied(gradient):
    ends = dist.new_group([0, dist.get_world_size() - 1])  # a group is made by all ranks, whoever is in it
    if gradient is not None:
        dist.all_reduce(gradient, group=ends)


def check_tied(answer):
    shape, last = (30, 8), RANKS - 1

    def job():
        rank = dist.get_rank()
        gradient = torch.full(shape, float(rank + 1)) if rank in (0, last) else None
        new_group, calls = dist.new_group, []

        def counted(*args, **kwargs):
            calls.append(not kwargs.get("use_local_synchronization"))  # that way members alone may make a group
            return new_group(*args, **kwargs)

        dist.new_group = counted
        try:
            answer(gradient)
        finally:
            dist.new_group = new_group
        return gradient, sum(calls)

    run = launch(job, ranks=RANKS, backend="gloo", timeout=8)
    ends = [run.results[rank][0] for rank in (0, last)]
    made = [calls for _, calls in run.results]
    if any(end.shape != shape or (end != end[0, 0]).any() for end in ends):
        raise Wrong("The gradient is a matrix: all of it has to be the sum, and keep its shape.")
    values = [end[0, 0].item() for end in ends]
    handed = {c.rank for c in run.collectives if c.bytes >= 4 * shape[0] * shape[1]}
    if values == [1.0, RANKS]:
        raise Wrong("Both gradients are what they were: the sum has to stand in gradient itself, in place.")
    if values == [(1 + RANKS) / 2] * 2:
        raise Wrong("That is the mean. One matrix used twice: its gradient is the sum of both uses.")
    if values[0] != values[1]:
        raise Wrong(
            f"The first rank holds {values[0]:g} everywhere, the last {values[1]:g}: both must hold the sum, {RANKS + 1}."
        )
    if values[0] != 1 + RANKS:
        raise Wrong(f"Both ends hold {values[0]:g}; gradients of 1 and {RANKS} add up to {RANKS + 1}.")
    if between := sorted(handed - {0, last}):
        raise Wrong(
            f"The sums are right, but ranks {between} took part with a gradient that they do not have. Make a group of the first "
            f"and the last rank (dist.new_group, called by every rank) and all-reduce in that."
        )
    if len(set(made)) > 1:
        callers = [rank for rank in range(RANKS) if made[rank] == max(made)]
        raise Wrong(
            f"The sums are right, but only ranks {callers} called dist.new_group. Every rank makes every group, member or not: "
            "the next group would be made out of step, and hang. (The all-reduce is the members' alone.)"
        )
    return "Both ends hold the sum, and the ranks between sent nothing."


def everybody(gradient):
    mine = torch.zeros(30, 8) if gradient is None else gradient
    dist.all_reduce(mine)


def members_alone(gradient):
    if gradient is not None:
        dist.all_reduce(gradient, group=dist.new_group([0, dist.get_world_size() - 1]))


def the_mean(gradient):
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if gradient is not None:
        dist.all_reduce(gradient, group=ends)
        gradient /= 2


def not_in_place(gradient):
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if gradient is not None:
        total = gradient.clone()
        dist.all_reduce(total, group=ends)
        gradient = total


def one_way(gradient):
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        dist.send(gradient, 0)
    elif dist.get_rank() == 0:
        other = torch.empty_like(gradient)
        dist.recv(other, last)
        gradient += other


def one_row(gradient):
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if gradient is not None:
        dist.all_reduce(gradient[0], group=ends)


def check_bytes(answer):
    right = {"tensor": 24 * 2 * 4096 * 2, "pipeline": 4096 * 2}
    if not isinstance(answer, dict) or set(answer) != set(right) or None in map(as_number, answer.values()):
        raise Wrong(f'The answer is a dict of two whole numbers, {{"tensor": …, "pipeline": …}}; yours is {answer!r}.')
    for name, given in ((name, as_number(each)) for name, each in answer.items()):
        if given == 2 * right[name]:
            raise Wrong(
                f"{name}: {given:,} is twice the right number. BF16 has 2 bytes, and one pass over a prompt goes forward only."
            )
        if name == "tensor" and given == right["tensor"] // 2:
            raise Wrong("tensor: a layer needs two all-reduces, one after attention and one after the MLP.")
        if name == "tensor" and given == right["tensor"] // 24:
            raise Wrong("tensor: that is one layer; all 24 do it.")
        if name == "pipeline" and given in (24 * 4096 * 2, 12 * 4096 * 2):
            raise Wrong("pipeline: within a stage nothing is sent. Hidden states leave the first GPU once, after its last layer.")
        if given != right[name]:
            raise Wrong(f"{name}: {given:,} B is not it. Count the messages of one token, and multiply by hidden size × 2 bytes.")
    return "393,216 B against 8,192 B a token: 48 times as much, so over a slow link the pipeline it is."


EXERCISES = [
    Exercise(
        "05.1",
        "micro-batches for at most 10 % idle on 8 stages",
        answer=63,
        hints=["The bubble is (p − 1)/(m + p − 1) with p = 8.", "7/(m + 7) ≤ 1/10."],
        check=check_micro_batches,
        wrong=[
            (70, "share of all the time"),
            (72, "p − 1 stands"),
            (62, "more are needed"),
            (64, "fewer would be"),
            (6.3, "whole"),
        ],
    ),
    Exercise(
        "05.2",
        "the order of one rank in 1F1B",
        answer=my_order,
        hints=[
            "Rank r starts with ranks − r forward passes: the last rank with one, the first with as many as there are ranks.",
            "Then one backward pass, one forward pass, in turn, while forward passes are left; then the backward passes.",
        ],
        check=check_order,
        wrong=[
            (all_forward_first, "keeps the activations of 7 micro-batches"),
            (no_head_start, "early ranks run ahead"),
            (last_one_first, "keep their order"),
            (backward_before_forward, "waits for ever: B0 needs"),
            (forgot_the_end, "is missing"),
        ],
    ),
    Exercise(
        "05.3",
        "sum the gradients of a tied matrix over stages",
        answer=sum_tied,
        hints=[
            "dist.new_group([0, last]) makes a group of two ranks; all ranks have to call it.",
            "Only members call the all-reduce: those whose gradient is not None.",
        ],
        check=check_tied,
        wrong=[
            (everybody, "ranks [1, 2] took part"),
            (the_mean, "That is the mean"),
            (members_alone, "Every rank makes every group"),
            (not_in_place, "in place"),
            (one_way, "both must hold the sum"),
            (one_row, "all of it"),
        ],
    ),
    Exercise(
        "05.4",
        "bytes a token over a slow link: tensor parallelism or pipeline",
        answer={"tensor": 393216, "pipeline": 8192},
        hints=[
            "Section 9: two all-reduces a layer, against one send at the boundary.",
            "One message carries the hidden state of the token: 4,096 numbers of 2 bytes.",
        ],
        check=check_bytes,
        wrong=[
            ({"tensor": 196608, "pipeline": 8192}, "two all-reduces"),
            ({"tensor": 393216, "pipeline": 98304}, "within a stage"),
            ({"tensor": 786432, "pipeline": 8192}, "twice the right number"),
            ({"tensor": 16384, "pipeline": 8192}, "that is one layer"),
            (48, "dict of two"),
        ],
    ),
]
