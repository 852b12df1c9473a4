"""Notebook 00: answers, hints, checks, and wrong answers with the message each gets."""

import torch
import torch.distributed as dist

from helpers import launch
from helpers.exercises import Exercise, Wrong

RANKS = 3  # in the check of 00.1: not the number the notebook shows, so that a total worked out for it does not pass


def sum_of_squares():
    total = torch.tensor((dist.get_rank() + 1) ** 2)  # 1, 4, 9 … a different number on each rank
    dist.all_reduce(total)  # now the sum, on every rank
    return total.item()


def check_sum_of_squares(job):
    run = launch(job, ranks=RANKS)
    own, total = [(rank + 1) ** 2 for rank in range(RANKS)], sum((rank + 1) ** 2 for rank in range(RANKS))
    if any(result is None for result in run.results):
        raise Wrong("A rank returned None. End the function with return, so that run.results has its number.")
    results = [int(result) for result in run.results]
    if results == own:
        raise Wrong(f"The ranks returned {results}: each its own square. dist.all_reduce(tensor) puts the sum into the tensor.")
    if results == [sum(rank**2 for rank in range(RANKS))] * RANKS:
        raise Wrong(f"Every rank returned {results[0]}, the sum of rank². Ranks count from 0: contribute (rank + 1) ** 2.")
    if results == [sum(range(1, RANKS + 1)) ** 2] * RANKS:
        raise Wrong(f"Every rank returned {results[0]}, the square of the sum. Square first, then all-reduce.")
    if results[0] == total and results != [total] * RANKS:
        raise Wrong(
            f"The ranks returned {results}: only rank 0 holds the total. dist.reduce sends it there, dist.all_reduce to all."
        )
    if results != [total] * RANKS:
        raise Wrong(f"On {RANKS} ranks the function returned {results}; every rank should return {total}.")
    if not any(collective.op == "all_reduce" for collective in run.collectives):
        raise Wrong(
            "The total is right, but no all-reduce was recorded: each rank worked it out alone. Contribute, then all-reduce."
        )
    sent = sum(collective.bytes for collective in run.collectives if collective.rank == 0)
    return f"On {RANKS} ranks every rank returned {total}, and each handed {sent} bytes to all-reduce."


def own_square():
    return (dist.get_rank() + 1) ** 2


def counted_from_zero():
    total = torch.tensor(dist.get_rank() ** 2)
    dist.all_reduce(total)
    return total.item()


def squared_too_late():
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item() ** 2


def only_on_rank_0():
    total = torch.tensor((dist.get_rank() + 1) ** 2)
    dist.reduce(total, dst=0)
    return total.item()


def worked_out_alone():
    return sum((rank + 1) ** 2 for rank in range(dist.get_world_size()))


def check_bytes(answer):
    def thousand_numbers():
        dist.all_reduce(torch.ones(1_000))

    if not isinstance(answer, (int, float)):
        raise Wrong(f"The answer is a number of bytes, for example 64; yours is {answer!r}.")
    recorded = launch(thousand_numbers, ranks=2).collectives[0].bytes
    if answer == 1_000:
        raise Wrong("1,000 is how many numbers there are. Each float32 number takes several bytes.")
    if answer == 2 * recorded:
        raise Wrong("Twice too many: the question is what one rank hands over, and a float32 number has 32 bits.")
    if answer != recorded:
        raise Wrong(f"You predicted {answer:,} bytes, {recorded:,} were recorded. How many bytes are 32 bits?")
    return f"Predicted {answer:,} bytes, recorded {recorded:,}: equal, on any machine."


EXERCISES = [
    Exercise(
        "00.1",
        "add up squares over ranks",
        answer=sum_of_squares,
        hints=[
            "dist.get_rank() says which rank this is; the first is 0.",
            "Put the square into a tensor, torch.tensor(…): collectives work on tensors, in place.",
            "dist.all_reduce(tensor) adds the tensors of all ranks; afterwards each rank has the sum. Return tensor.item().",
        ],
        check=check_sum_of_squares,
        wrong=[
            (own_square, "each its own square"),
            (counted_from_zero, "Ranks count from 0"),
            (squared_too_late, "Square first"),
            (only_on_rank_0, "only rank 0 holds the total"),
            (worked_out_alone, "no all-reduce was recorded"),
        ],
    ),
    Exercise(
        "00.2",
        "predict the bytes of an all-reduce of 1,000 float32 numbers",
        answer=4_000,
        hints=["A byte has 8 bits.", "float32 numbers have 32 bits: multiply the bytes of one by how many there are."],
        check=check_bytes,
        wrong=[
            (1_000, "how many numbers"),
            (8_000, "Twice too many"),
            (32_000, "How many bytes are 32 bits"),
            ("4 kB", "is a number of bytes"),
        ],
    ),
]
