"""Notebook 03: answers, hints, checks, and wrong answers with the message each gets."""

import contextlib
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers import launch
from helpers.exercises import Exercise, Wrong

RANKS = 3  # in the checks: not the number that the notebook shows
WIDTH = 300  # of the layers in the checks: wide enough that gradients stand out among DDP's own small messages


def accumulate_quietly(model, batches):
    for number, batch in enumerate(batches):
        quiet = model.no_sync() if number < len(batches) - 1 else contextlib.nullcontext()
        with quiet:  # forward inside: there DDP decides whether it will synchronise
            (model(batch).square().mean() / len(batches)).backward()


def _batches(rank):
    return list(torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(rank)))


def _network():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 4)


def check_accumulation(answer):
    def job():
        model = DDP(_network())
        answer(model, _batches(dist.get_rank()))
        return None if model.module.weight.grad is None else model.module.weight.grad.clone()

    run = launch(job, ranks=RANKS, backend="gloo", timeout=20)
    if run.results[0] is None:
        raise Wrong("There is no gradient in model's parameters: call backward() on each loss.")
    network = _network()
    for rank in range(RANKS):
        for batch in _batches(rank):
            (network(batch).square().mean() / (4 * RANKS)).backward()
    right, own = network.weight.grad, run.results[0]
    bytes_of_one = 4 * sum(p.numel() for p in network.parameters())
    handed = sum(c.bytes for c in run.collectives if c.rank == 0 and c.op == "all_reduce" and c.bytes > 1024)
    if any(not torch.allclose(own, other) for other in run.results):
        raise Wrong("The gradients differ between ranks: the last micro-batch must synchronise, so it stays outside no_sync.")
    if (own - 4 * right).norm() < 1e-3 * own.norm():
        raise Wrong("The gradient is exactly 4 times too large: backward adds up, so divide each of the 4 losses by 4.")
    if (own - right).norm() > 1e-4 * right.norm():
        raise Wrong("The gradient is not that of the mean over all four batches of all ranks. Use every batch, once.")
    if handed > 1.5 * bytes_of_one:
        raise Wrong(
            f"The gradient is right, but your ranks handed over {handed:,} B: {handed / bytes_of_one:.0f} synchronisations "
            "instead of one. DDP decides in the forward pass whether to synchronise: the first three belong into no_sync, forward"
            " included."
        )
    return f"Right gradient, and {handed:,} B handed over: every number once instead of four times."


def every_time(model, batches):
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()


def backward_only(model, batches):
    for number, batch in enumerate(batches):
        loss = model(batch).square().mean() / len(batches)
        with model.no_sync() if number < 3 else contextlib.nullcontext():
            loss.backward()


def not_divided(model, batches):
    for number, batch in enumerate(batches):
        with model.no_sync() if number < 3 else contextlib.nullcontext():
            model(batch).square().mean().backward()


def never_synchronised(model, batches):
    with model.no_sync():
        for batch in batches:
            (model(batch).square().mean() / len(batches)).backward()


def weighted_loss(model, rows):
    count = torch.tensor(float(len(rows)))
    dist.all_reduce(count)  # rows of all ranks together
    return model(rows).square().sum() * dist.get_world_size() / count  # DDP divides by the world size again


def check_weighting(answer):
    counts = [2, 5, 11]

    def job():
        rows = torch.randn(sum(counts), 8, generator=torch.Generator().manual_seed(3)).split(counts)[dist.get_rank()]
        torch.manual_seed(0)
        model = DDP(nn.Linear(8, 1))
        loss = answer(model, rows)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return "no loss"
        loss.backward()
        return model.module.weight.grad.clone()

    run = launch(job, ranks=RANKS, backend="gloo", timeout=20)
    if isinstance(run.results[0], str):
        raise Wrong("Return the loss: one number, as a tensor, with its history, so that backward can be called on it.")
    rows = torch.randn(sum(counts), 8, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    network = nn.Linear(8, 1)
    network(rows).square().mean().backward()
    own, right = run.results[0], network.weight.grad
    ratio = ((own * right).sum() / right.square().sum()).item()
    if (own - right * ratio).norm() < 1e-3 * own.norm() and abs(ratio - 1) > 1e-3:
        factor = f"{ratio:.3g} times the right one"
        raise Wrong(
            f"The gradient is {factor}, on every weight. DDP divides the sum over ranks by the world size, {RANKS}: undo that."
        )
    if (own - right).norm() > 1e-4 * right.norm():
        raise Wrong(
            f"A mean of means: ranks with {counts} rows count the same, though one row should count as much as any other. Sum "
            f"this rank's losses, and divide by the number of rows of all ranks."
        )
    return "One row counts as much as any other, whichever rank holds it."


def plain_mean(model, rows):
    return model(rows).square().mean()


def forgot_world_size(model, rows):
    count = torch.tensor(float(len(rows)))
    dist.all_reduce(count)
    return model(rows).square().sum() / count


def a_number(model, rows):
    return model(rows).square().mean().item()


def check_ring_bytes(answer):
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(f"The answer is a number of bytes; yours is {answer!r}.")
    right = 2 * 7 / 8 * 7e9 * 2
    for factor, message in {
        7e9: "7e9 is the number of gradients. In BF16 each has 2 bytes, and a ring sends 2(n − 1)/n of the tensor.",
        14e9: "That is what each GPU *hands over*. What it sends is 2(n − 1)/n of it: once round to sum, once round to share.",
        28e9: "Twice the tensor is the limit for very many ranks. With 8 it is 2 · 7/8 of it.",
        49e9: "BF16 has 2 bytes, not 4.",
        12.25e9: "That is half of it: a ring sums in n − 1 rounds and shares the result in n − 1 more.",
    }.items():
        if abs(answer / factor - 1) < 1e-3:
            raise Wrong(message)
    if abs(answer / right - 1) > 0.01:
        raise Wrong(f"{answer:,.0f} B is not it: 7e9 gradients of 2 bytes, and 2(n − 1)/n of that for n = 8.")
    return f"{right:,.0f} B: 24.5 GB from each GPU, in every step, whatever the batch."


def my_samples(total, epoch):
    same_on_all_ranks = torch.Generator().manual_seed(epoch)  # the seed is the epoch, not the rank
    order = torch.randperm(total, generator=same_on_all_ranks).tolist()
    return order[dist.get_rank() :: dist.get_world_size()]


def check_samples(answer):
    total = 20

    def job():
        return [list(answer(total, epoch)) for epoch in (0, 1)]

    run = launch(job, ranks=RANKS, backend="gloo", timeout=20)
    for epoch in (0, 1):
        dealt = [part[epoch] for part in run.results]
        seen = sorted(sample for part in dealt for sample in part)
        missed, twice = set(range(total)) - set(seen), len(seen) - len(set(seen))
        if missed or twice or len(seen) != total:
            raise Wrong(
                f"In epoch {epoch} {len(missed)} samples were missed and {twice} seen twice. All ranks must shuffle with the "
                f"same seed and then take different places: order[rank::world_size]."
            )
        if max(map(len, dealt)) - min(map(len, dealt)) > 1:
            raise Wrong(f"The ranks got {[len(part) for part in dealt]} samples; counts may differ by one.")
    if all(part[0] == part[1] for part in run.results):
        raise Wrong("Both epochs have the same order: let the epoch be (part of) the seed.")
    if all(sorted(part[0]) == part[0] for part in run.results):
        raise Wrong("The samples come in order: shuffle them, with the same seed on all ranks.")
    return "Every sample on exactly one rank, in another order each epoch."


def seed_of_the_rank(total, epoch):
    order = list(range(total))
    random.Random(100 * epoch + dist.get_rank()).shuffle(order)
    return order[dist.get_rank() :: dist.get_world_size()]


def same_each_epoch(total, epoch):
    order = list(range(total))
    random.Random(0).shuffle(order)
    return order[dist.get_rank() :: dist.get_world_size()]


def dropped_rest(total, epoch):
    order = list(range(total))
    random.Random(epoch).shuffle(order)
    each = total // dist.get_world_size()
    return order[dist.get_rank() * each : (dist.get_rank() + 1) * each]


def not_shuffled(total, epoch):
    order = list(range(total))
    return (order if epoch == 0 else order[::-1])[dist.get_rank() :: dist.get_world_size()]


EXERCISES = [
    Exercise(
        "03.1",
        "four micro-batches, one synchronisation",
        answer=accumulate_quietly,
        hints=[
            "model.no_sync() is a context: inside it a forward and backward pass stays on this rank.",
            "The last micro-batch runs outside it, and takes what was accumulated along.",
            "backward adds to the gradients: divide each loss by the number of micro-batches.",
        ],
        check=check_accumulation,
        wrong=[
            (every_time, "4 synchronisations instead"),
            (backward_only, "forward included"),
            (not_divided, "exactly 4 times too large"),
            (never_synchronised, "must synchronise"),
        ],
    ),
    Exercise(
        "03.2",
        "a loss for ranks with unequal numbers of rows",
        answer=weighted_loss,
        hints=["All-reduce the number of rows.", "sum of this rank's losses / rows of all ranks, times the world size."],
        check=check_weighting,
        wrong=[(plain_mean, "A mean of means"), (forgot_world_size, "undo that"), (a_number, "with its history")],
    ),
    Exercise(
        "03.3",
        "bytes that each GPU sends for 7 billion gradients",
        answer=24.5e9,
        hints=["Two bytes each.", "A ring sends 2(n − 1)/n of the tensor (notebook 01)."],
        check=check_ring_bytes,
        wrong=[
            (14e9, "hands over"),
            (28e9, "is the limit"),
            (49e9, "2 bytes, not 4"),
            (7e9, "number of gradients"),
            ("24 GB", "is a number"),
        ],
    ),
    Exercise(
        "03.4",
        "deal out samples for an epoch",
        answer=my_samples,
        hints=[
            "Same shuffle on every rank, then every n-th.",
            "torch.randperm(total, generator=torch.Generator().manual_seed(epoch)) shuffles the same way on every rank.",
        ],
        check=check_samples,
        wrong=[
            (seed_of_the_rank, "with the same seed"),
            (same_each_epoch, "same order"),
            (dropped_rest, "were missed"),
            (not_shuffled, "come in order"),
        ],
    ),
]
