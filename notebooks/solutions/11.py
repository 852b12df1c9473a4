"""Notebook 11: answers, hints, checks, and wrong answers with the message each gets."""

import torch
import torch.distributed as dist
from torch import nn

from helpers import launch
from helpers.exercises import Exercise, Wrong

RANKS = (3, 4)  # in the checks: not the numbers that the notebook shows
FAULTS = {
    1: "collective-size",
    2: "one-rank-raised",
    3: "unused-parameter",
    4: "heads-not-divisible",
    5: "collective-conditional",
    6: "uneven-batches",
    7: "group-lists-differ",
    8: "send-recv-cycle",
}
WHY_NOT = {  # what to look at, for a patient whose fault was not named
    1: "SIGABRT comes from compiled code. How many numbers does each rank hand to all_reduce?",
    2: "The IndexError is the job's own, on one rank. What do the others do meanwhile?",
    3: "Read the first sentence of the error, then which of the two heads forward uses.",
    4: "2 heads of 32 on 4 ranks: how many columns of k_proj does each rank have?",
    5: "Which ranks come to the all_reduce?",
    6: "20 samples over 3 ranks: how many batches of 2 has each?",
    7: "Which lists of ranks does each rank pass to new_group?",
    8: "Both ranks run the same two lines. Who sends first?",
}
LOOKS = {
    9: "tokens per rank",
    10: "random numbers per rank",
    11: "learning rate per step",
    12: "outputs of a layer",
    13: "lines in the order of each rank",
    14: "values of every layer",
}
WHERE = {
    9: "A loss that is a mean over unequal numbers of rows: compare how many each rank has.",
    10: "The noise has one seed for all: compare what each rank drew.",
    11: "Data and gradients are right; what else decides how far the weights move?",
    12: "Nothing is trained here: compare what the layer gives on 1 rank and on 2.",
    13: "Both ranks issue two sums of one size. Only from where they issue them differs.",
    14: "Once it is in the gradients, all ranks have it. Look at every layer, in every batch, on every rank.",
}
SIGNS = {
    16: "threads × ranks against cores",
    17: "collectives a step",
    18: "waiting of the other rank",
    19: "time in load",
    20: "share of communication",
}
READ = {
    16: "Both ranks compute all the time, only slower: no share of the timeline changes. What was changed in the job?",
    17: "The bytes are the same and each all-reduce is short. How many are there?",
    18: "Rank 1 has more rows and is never late for itself. Who has to wait?",
    19: "Nobody waits in a collective for a batch that is loaded; only a region of your own shows it.",
    20: "The bytes of each layer's sum cross the slow link, on every rank.",
}


def judge_choices(answer, right, messages, what):
    if not isinstance(answer, dict) or set(answer) != set(right):
        raise Wrong(f"The answer is a dictionary with the keys {', '.join(map(str, right))}; yours is {answer!r}.")
    known = set(right.values()) | ({"out-of-memory", "port-in-use"} if right is FAULTS else set())
    for number, given in answer.items():
        if given not in known:
            raise Wrong(f"{number}: {given!r} is none of the choices: {', '.join(sorted(known))}.")
    for number, given in answer.items():
        if given != right[number]:
            raise Wrong(f"{number}: not {given!r}. {messages[number]}")
    return f"All {len(right)} {what}."


def check_faults(answer):
    return judge_choices(answer, FAULTS, WHY_NOT, "faults named")


def check_looks(answer):
    return judge_choices(answer, LOOKS, WHERE, "places to look at")


def check_signs(answer):
    return judge_choices(answer, SIGNS, READ, "signs")


def mean_score(batches):
    both = torch.tensor([sum(scores.sum().item() for scores in batches), float(sum(len(scores) for scores in batches))])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def check_mean(answer):
    def batches_of(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.rand(2 + (3 * rank + number) % 5, generator=generator) + rank for number in range(2 * rank % 5)]

    def job():
        return answer(batches_of(dist.get_rank()))

    for ranks in RANKS:
        right = torch.cat([scores for rank in range(ranks) for scores in batches_of(rank)]).mean().item()
        run = launch(job, ranks=ranks, backend="gloo", timeout=5)
        for rank, given in enumerate(run.results):
            if not isinstance(given, float) or not abs(given - right) <= 1e-4 * right:
                mend = "Each sample counts once, however large its batch: exchange sums and numbers of samples, and divide once."
                if rank > 0:
                    mend = "Rank 0 has it, but every rank returns the mean: they all need both sums."
                raise Wrong(f"On {ranks} ranks, rank {rank} returns {given!r}; the mean over all samples is {right:.5f}. {mend}")
        calls = [collective for collective in run.collectives if collective.rank == 0]
        if len(calls) != 1:
            raise Wrong(
                f"The value is right, but rank 0 issued {len(calls)} collectives ({', '.join(c.op for c in calls)}) where one is "
                "enough: sum and count travel in one tensor of two numbers."
            )
        if calls[0].bytes > 16:
            raise Wrong(f"The value is right, but {calls[0].bytes:,} B are handed over: two numbers are enough.")
    return f"Right on {' and '.join(map(str, RANKS))} ranks, one {calls[0].op} of {calls[0].bytes} B each."


def of_each_batch(batches):
    total = torch.tensor(0.0)
    for scores in batches:
        mean = scores.mean()
        dist.all_reduce(mean)
        total += mean / dist.get_world_size()
    return (total / len(batches)).item()


def of_the_ranks_means(batches):
    mean = torch.cat(batches).mean() if batches else torch.tensor(0.0)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


def in_two(batches):
    total = torch.tensor(float(sum(scores.sum().item() for scores in batches)))
    count = torch.tensor(float(sum(len(scores) for scores in batches)))
    dist.all_reduce(total)
    dist.all_reduce(count)
    return (total / count).item()


def on_rank_0(batches):
    both = torch.tensor([sum(scores.sum().item() for scores in batches), float(sum(len(scores) for scores in batches))])
    dist.reduce(both, 0)
    return (both[0] / both[1]).item()


ODD = {"rank": 3, "sums there": "longest"}


def check_odd(answer):
    if not isinstance(answer, dict) or set(answer) != set(ODD):
        raise Wrong(f"The answer is a dictionary with the keys {', '.join(ODD)}; yours is {answer!r}.")
    if answer["sums there"] not in ("tokens", "longest"):
        raise Wrong(f'"sums there" is "tokens" or "longest"; yours is {answer["sums there"]!r}.')
    if answer["rank"] not in range(5):
        raise Wrong(f"The ranks are 0 to 4; yours is {answer['rank']!r}.")
    if answer["rank"] != ODD["rank"]:
        raise Wrong(
            f'Rank {answer["rank"]} passes its lines as most others do. run = launch(night_report, ranks=5, backend="gloo"), '
            "then diagnosis.mismatch(run): one rank's line is not the others'."
        )
    if answer["sums there"] != ODD["sums there"]:
        raise Wrong("That is what the others sum there. Read the line of rank 3 in the first part of the mismatch.")
    return "Rank 3 sums longest where the others sum tokens: both figures of the report are mixtures, and nothing complained."


def row_wise_output(x, weight, bias):
    out = x @ weight.T
    dist.all_reduce(out)
    return out + bias


def check_row_wise(answer):
    rows, inputs, outputs = 5, 24, 7

    def job():
        torch.manual_seed(0)
        layer, x, rank, world = nn.Linear(inputs, outputs), torch.randn(rows, inputs), dist.get_rank(), dist.get_world_size()
        with torch.no_grad():
            part = answer(x.chunk(world, 1)[rank].clone(), layer.weight.chunk(world, 1)[rank].clone(), layer.bias.clone())
            return part, layer(x), layer.bias.clone()

    for ranks in RANKS:
        run = launch(job, ranks=ranks, backend="gloo", timeout=5)
        for rank, (given, right, bias) in enumerate(run.results):
            if not isinstance(given, torch.Tensor) or given.shape != right.shape:
                said = f"a {type(given).__name__}" if not isinstance(given, torch.Tensor) else tuple(given.shape)
                raise Wrong(f"Rank {rank} returns {said}; it must be a tensor of shape {tuple(right.shape)}.")
            if (given - right).norm() <= 1e-4 * right.norm():
                continue
            times = ((given - right).mean(0) @ bias / (bias @ bias)).item()
            if (given - right - round(times) * bias).norm() <= 1e-3 * right.norm():
                raise Wrong(
                    f"On {ranks} ranks the output is off by {round(times)} × bias: "
                    + ("each rank adds it before the sum." if times > 0 else "nobody adds it.")
                )
            raise Wrong(f"On {ranks} ranks, rank {rank}'s output is not the layer's: it is the sum of all ranks' x @ weight.T.")
        calls = [collective for collective in run.collectives if collective.rank == 0]
        if [(c.op, c.bytes) for c in calls] != [("all_reduce", rows * outputs * 4)]:
            said = ", ".join(f"{c.op} of {c.bytes} B" for c in calls) or "nothing"
            raise Wrong(f"The output is right, but rank 0 issued {said}: one all_reduce of {rows * outputs * 4} B is enough.")
    return f"Right on {' and '.join(map(str, RANKS))} ranks: one all-reduce, and the bias once."


def bias_on_each(x, weight, bias):
    out = x @ weight.T + bias
    dist.all_reduce(out)
    return out


def no_bias(x, weight, bias):
    out = x @ weight.T
    dist.all_reduce(out)
    return out


def gathered(x, weight, bias):
    pieces, parts = ([torch.empty_like(tensor) for _ in range(dist.get_world_size())] for tensor in (x, weight))
    dist.all_gather(pieces, x)
    dist.all_gather(parts, weight)
    return torch.cat(pieces, 1) @ torch.cat(parts, 1).T + bias


EXERCISES = [
    Exercise(
        "11.1",
        "name the faults of eight jobs that die or hang",
        answer=FAULTS,
        hints=[
            "1 to 4 say it themselves: read what the job does in the line that raised, on that rank.",
            "5 to 8: for each rank, write down what it issues, in order; where do the lists stop matching?",
        ],
        check=check_faults,
        wrong=[
            ({**FAULTS, 1: "out-of-memory"}, "How many numbers"),
            ({**FAULTS, 5: "uneven-batches"}, "come to the all_reduce"),
            ({**FAULTS, 6: "collective-conditional"}, "20 samples over 3 ranks"),
            ({**FAULTS, 8: "deadlock"}, "none of the choices"),
        ],
    ),
    Exercise(
        "11.2",
        "say where to look when nothing was raised",
        answer=LOOKS,
        hints=[
            "What does each job mean to do, and which quantity must then be the same on 1 rank and on 2?",
            "For 9 to 11 the argument of one_step names the line to read.",
        ],
        check=check_looks,
        wrong=[
            ({**LOOKS, 9: "learning rate per step", 11: "tokens per rank"}, "unequal numbers of rows"),
            ({**LOOKS, 13: "outputs of a layer", 12: "lines in the order of each rank"}, "Nothing is trained"),
        ],
    ),
    Exercise(
        "11.3",
        "know slow jobs by their record",
        answer=SIGNS,
        hints=[
            "Which of compute, communicate and wait grows, and on which rank?",
            "Two of the five do not change the shares at all: they need a count, or a region of your own.",
        ],
        check=check_signs,
        wrong=[
            ({**SIGNS, 16: "waiting of the other rank", 18: "threads × ranks against cores"}, "no share of the timeline changes"),
            ({**SIGNS, 19: "share of communication", 20: "time in load"}, "Nobody waits in a collective"),
        ],
    ),
    Exercise(
        "11.4",
        "the mean over unequal batches of all ranks, in one collective",
        answer=mean_score,
        hints=[
            "A collective inside the loop is issued as often as this rank has batches; how often do the others?",
            "A mean is a sum divided by a count: add up both, over the batches first and then over the ranks.",
        ],
        check=check_mean,
        wrong=[
            (of_each_batch, "did not return"),
            (of_the_ranks_means, "Each sample counts once"),
            (in_two, "where one is enough"),
            (on_rank_0, "every rank returns the mean"),
        ],
    ),
    Exercise(
        "11.5",
        "find the rank that passes its lines in another order",
        answer=ODD,
        hints=[
            'run = launch(night_report, ranks=5, backend="gloo") returns, so nothing was raised.',
            "diagnosis.mismatch(run) prints, for the first place that differs, each rank's line.",
        ],
        check=check_odd,
        wrong=[
            ({"rank": 0, "sums there": "longest"}, "as most others do"),
            ({"rank": 3, "sums there": "tokens"}, "what the others sum"),
        ],
    ),
    Exercise(
        "11.6",
        "a row-wise layer whose bias is added once",
        answer=row_wise_output,
        hints=[
            "The sum over ranks of x @ weight.T is the whole product.",
            "What is added before the sum is added once for each rank.",
        ],
        check=check_row_wise,
        wrong=[
            (bias_on_each, "before the sum"),
            (no_bias, "nobody adds it"),
            (gathered, "one all_reduce"),
        ],
    ),
]
