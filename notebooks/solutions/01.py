"""Notebook 01: answers, hints, checks, and wrong answers with the message each gets."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers import launch
from helpers.exercises import Exercise, Wrong

RANKS = 3  # in the checks: not the number that the notebook shows

NEEDS = {
    "gradients of data parallelism": "all_reduce",
    "a layer split by columns, then one split by rows": "all_reduce",
    "handing activations to the next pipeline stage": "send",
    "sharded gradients: each rank keeps its part of the sum": "reduce_scatter",
    "sharded weights: each rank needs all of them for a moment": "all_gather",
}
BECAUSE = {
    "gradients of data parallelism": "every rank must apply the same sum, so the sum has to be on every rank.",
    "a layer split by columns, then one split by rows": "each rank ends with a partial sum of the whole output.",
    "handing activations to the next pipeline stage": "two ranks are concerned, not all: one gives, one takes.",
    "sharded gradients: each rank keeps its part of the sum": "sum, but keep only your part: half an all-reduce.",
    "sharded weights: each rank needs all of them for a moment": "nothing is summed: parts are put together on every rank.",
}


def check_needs(answer):
    if not isinstance(answer, dict) or set(answer) != set(NEEDS):
        raise Wrong("Keep the dictionary with its five questions; only the values are yours to fill in.")
    wrong = [question for question in NEEDS if answer[question] != NEEDS[question]]
    if wrong:
        raise Wrong(f"{len(wrong)} of 5 to think over. For example “{wrong[0]}”: not {answer[wrong[0]]!r}; {BECAUSE[wrong[0]]}")
    return "All five. The rest of the course is these operations, in different places and sizes."


def ring_reduce_scatter(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = [piece.clone() for piece in tensor.chunk(n)]
    for step in range(1, n):
        outgoing, place = pieces[(rank - step) % n], (rank - step - 1) % n
        arrived = torch.empty_like(pieces[place])
        sending = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        pieces[place] += arrived
    return pieces[rank]


def check_ring(job):
    size = 6 * RANKS

    def run_it():
        return job(torch.arange(size, dtype=torch.float32) * 10 ** dist.get_rank())

    run = launch(run_it, ranks=RANKS, timeout=10)
    total = torch.arange(size, dtype=torch.float32) * sum(10**rank for rank in range(RANKS))
    other = sorted({c.op for c in run.collectives} - {"send", "recv"})
    if other:
        raise Wrong(f"Your ranks called {', '.join(other)}. Build it from dist.send, dist.isend and dist.recv only.")
    sends = [[c for c in run.collectives if c.op == "send" and c.rank == rank] for rank in range(RANKS)]
    sent, needed = [sum(c.bytes for c in own) for own in sends], 4 * size * (RANKS - 1) // RANKS
    for rank, result in enumerate(run.results):
        if not isinstance(result, torch.Tensor):
            raise Wrong(f"Rank {rank} returned {result!r}; each rank returns a tensor, its piece of the sum.")
        if result.numel() == size and torch.equal(result, total):
            raise Wrong(
                f"Rank {rank} returned the whole sum, {size} numbers; it keeps only piece {rank}, {size // RANKS} numbers."
            )
        expected = total.chunk(RANKS)[rank]
        shifted = [r for r in range(RANKS) if torch.equal(result, total.chunk(RANKS)[r])]
        if shifted and shifted != [rank]:
            raise Wrong(
                f"Rank {rank} returned piece {shifted[0]} of the sum, not piece {rank}: start the ring one piece earlier."
            )
        if result.shape != expected.shape or not torch.allclose(result, expected):
            raise Wrong(f"Rank {rank} returned {result.tolist()}; piece {rank} of the sum is {expected.tolist()}.")
    if set(sent) != {needed}:
        raise Wrong(
            f"The values are right, but the ranks sent {', '.join(map(str, sent))} bytes; each rank of a ring needs {needed}: "
            f"pass one piece a round, summed."
        )
    for rank, own in enumerate(sends):
        if len(peers := sorted({c.peer for c in own})) > 1:
            raise Wrong(
                f"The values are right, but rank {rank} sent to ranks {' and '.join(map(str, peers))}: "
                f"in a ring each sends to its neighbour only."
            )
    return f"Right values, and each rank sent {needed} bytes: (n − 1)/n of its {4 * size}, the least there is."


def whole_tensors_around(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(passing)
        sending = dist.isend(passing, (rank + 1) % n)
        dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        total, passing = total + arrived, arrived
    return total.chunk(n)[rank]


def star(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    if rank:
        dist.send(tensor, 0)
        dist.recv(mine := torch.empty_like(tensor.chunk(n)[0]), 0)
        return mine
    total = tensor.clone()
    for other in range(1, n):
        dist.recv(arrived := torch.empty_like(tensor), other)
        total += arrived
    for other in range(1, n):
        dist.send(total.chunk(n)[other].clone(), other)
    return total.chunk(n)[0]


def straight_to_the_owners(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = [piece.clone() for piece in tensor.chunk(n)]
    others = [other for other in range(n) if other != rank]
    sending = [dist.isend(pieces[other], other) for other in others]
    for other in others:
        dist.recv(arrived := torch.empty_like(pieces[rank]), other)
        pieces[rank] = pieces[rank] + arrived
    for work in sending:
        work.wait()
    return pieces[rank]


def library_call(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()]


def neighbours_piece(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = [piece.clone() for piece in tensor.chunk(n)]
    for step in range(n - 1):
        outgoing, place = pieces[(rank - step) % n], (rank - step - 1) % n
        arrived = torch.empty_like(pieces[place])
        sending = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        pieces[place] += arrived
    return pieces[(rank + 1) % n]


def everybody_sends_first(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = [piece.clone() for piece in tensor.chunk(n)]
    dist.recv(arrived := torch.empty_like(pieces[0]), (rank - 1) % n)
    dist.send(pieces[rank], (rank + 1) % n)
    return arrived


def split_mlp(x, w1, w2):
    n, rank = dist.get_world_size(), dist.get_rank()
    out = F.relu(x @ w1.chunk(n, dim=1)[rank]) @ w2.chunk(n, dim=0)[rank]  # a partial sum of the whole output
    dist.all_reduce(out)
    return out


def check_mlp(job):
    generator = torch.Generator().manual_seed(3)
    x, w1, w2 = (torch.randn(shape, generator=generator) for shape in ((5, 8), (8, 12), (12, 8)))
    run = launch(lambda: job(x, w1, w2), ranks=RANKS, timeout=10)
    right = F.relu(x @ w1) @ w2
    calls = [c for c in run.collectives if c.rank == 0]
    for rank, result in enumerate(run.results):
        if not isinstance(result, torch.Tensor) or result.shape != right.shape:
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else result
            raise Wrong(f"Rank {rank} returned {shape!r}; the output is a tensor of shape {tuple(right.shape)}.")
        if torch.allclose(result, RANKS * right, rtol=1e-4, atol=1e-4):
            raise Wrong(
                f"The output is {RANKS} times too large: every rank computed all of it, and the all-reduce added the copies."
            )
        if not torch.allclose(result, right, rtol=1e-4, atol=1e-4):
            raise Wrong(
                f"Rank {rank}'s output is off by up to {(result - right).abs().max():.3g}. Split w1 by columns and w2 by the "
                f"same rows: then relu sees whole sums, and the partial outputs add up."
            )
    if not calls:
        raise Wrong("The output is right, but the ranks exchanged nothing: each multiplied with the whole matrices. Split them.")
    if [c.op for c in calls] != ["all_reduce"] or calls[0].bytes != right.numel() * 4:
        told = ", ".join(f"{c.op} of {c.bytes} B" for c in calls)
        raise Wrong(f"The output is right, but rank 0 took part in {told}; one all_reduce of {right.numel() * 4} B is enough.")
    return f"One all-reduce of {calls[0].bytes} B, a third of each matrix on each rank, and the same output."


def gathered_in_the_middle(x, w1, w2):
    n, rank = dist.get_world_size(), dist.get_rank()
    own = F.relu(x @ w1.chunk(n, dim=1)[rank])
    parts = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(parts, own)
    return torch.cat(parts, dim=1) @ w2


def rows_first(x, w1, w2):
    n, rank = dist.get_world_size(), dist.get_rank()
    half = x[:, : 8 // n * n].chunk(n, dim=1)[rank] @ w1[: 8 // n * n].chunk(n, dim=0)[rank]
    out = F.relu(half) @ w2
    dist.all_reduce(out)
    return out


def summed_copies(x, w1, w2):
    out = F.relu(x @ w1) @ w2
    dist.all_reduce(out)
    return out


def nothing_split(x, w1, w2):
    return F.relu(x @ w1) @ w2


def check_milliseconds(answer):
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(f"The answer is a number of milliseconds; yours is {answer!r}.")
    transfer = 64e6 / 50e9 * 1e3
    if abs(answer - (2 + 0.03 + transfer)) < 0.01:
        raise Wrong("You counted the whole backward. Two devices split the batch: each computes half of it, 1 ms.")
    if abs(answer - (1 + transfer)) < 0.005:
        raise Wrong("Close: α is missing. Every all-reduce pays it, 0.03 ms here.")
    if abs(answer - 1) < 0.005:
        raise Wrong("That is the computing alone. The gradients have to be summed before the step is done.")
    if abs(answer - (1 + 0.03 + transfer)) >= 0.005:
        raise Wrong(f"{answer} ms is not it: half of the backward, plus α, plus 64e6 / 50e9 seconds. Mind the units.")
    return "1 + 0.03 + 1.28 = 2.31 ms: slower than one device's 2 ms. The second device loses, until the batch grows."


EXERCISES = [
    Exercise(
        "01.1",
        "name the operation that each parallelism needs",
        answer=NEEDS,
        hints=["Ask of each: are numbers summed, or only put together?", "Then: does everybody need the result, or only a part?"],
        check=check_needs,
        wrong=[
            (NEEDS | {"gradients of data parallelism": "all_gather"}, "same sum"),
            (NEEDS | {"handing activations to the next pipeline stage": "all_reduce"}, "two ranks are concerned"),
            (NEEDS | {"sharded gradients: each rank keeps its part of the sum": "all_reduce"}, "half an all-reduce"),
        ],
    ),
    Exercise(
        "01.2",
        "a ring reduce-scatter from sends and receives",
        answer=ring_reduce_scatter,
        hints=[
            "n − 1 rounds; in each, send a piece to the right, receive one from the left and add it to your own copy of it.",
            "Clone the pieces first: tensor.chunk(n) gives views of the learner's tensor.",
            "To end with piece r, rank r sends piece (r − 1) mod n in the first round.",
        ],
        check=check_ring,
        wrong=[
            (whole_tensors_around, "sent 144, 144, 144 bytes; each rank of a ring needs 48"),
            (star, "sent 48, 72, 72 bytes; each rank of a ring needs 48"),
            (straight_to_the_owners, "rank 0 sent to ranks 1 and 2: in a ring each sends to its neighbour only"),
            (library_call, "called all_reduce"),
            (neighbours_piece, "start the ring one piece earlier"),
            (everybody_sends_first, "the job failed"),
        ],
    ),
    Exercise(
        "01.3",
        "a tensor-parallel MLP with one collective",
        answer=split_mlp,
        hints=["Columns of w1, rows of w2: w.chunk(n, dim=…).", "What each rank computes is a partial sum of the whole output."],
        check=check_mlp,
        wrong=[
            (gathered_in_the_middle, "one all_reduce of 160 B is enough"),
            (rows_first, "relu sees whole sums"),
            (summed_copies, "3 times too large"),
            (nothing_split, "exchanged nothing"),
        ],
    ),
    Exercise(
        "01.4",
        "predict a step on two devices",
        answer=2.31,
        hints=["Half of the computing, all of the all-reduce.", "64e6 bytes / 50e9 bytes per second = 1.28 ms."],
        check=check_milliseconds,
        wrong=[
            (1, "computing alone"),
            (2.28, "α is missing"),
            (3.31, "whole backward"),
            (0.00231, "Mind the units"),
            ("2 ms", "is a number"),
        ],
    ),
]
