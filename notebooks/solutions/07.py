"""Notebook 07: answers, hints, checks, and wrong answers with the message each gets."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers import launch
from helpers.exercises import Exercise, Wrong, as_number
from helpers.measuring import memory

RANKS = 3  # in the checks: not the number that the notebook shows
BUDGET = 90 * 2**20  # bytes of the first exercise
LEAST_ROWS = 4  # sequences in a micro-batch there
ALLOWED = {"micro_batches": (1, 2, 4, 8), "checkpointing": ("none", "full"), "chunks": (1, 2, 4, 8, 16)}


def training_run(micro_batches, checkpointing, chunks):
    """The given run: 8 sequences of 64 tokens, 16,384 vocabulary entries. Returns (memory, multiplications, loss)."""
    from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = Ernie4_5ForCausalLM(Ernie4_5Config(**shape, intermediate_size=384, vocab_size=16_384, use_cache=False)).train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(0, 16_384, (8, 64))

    def of_chunk(hidden, targets):
        return F.cross_entropy(model.lm_head(hidden), targets, reduction="sum")

    def loss_of(rows):
        hidden, targets = model.model(input_ids=rows).last_hidden_state[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
        if chunks == 1:
            return of_chunk(hidden, targets) / len(targets)
        return sum(checkpoint(of_chunk, *part, use_reentrant=False) for part in parts) / len(targets)

    def step():
        optimizer.zero_grad()
        total = 0.0
        for rows in ids.chunk(micro_batches):
            loss = loss_of(rows) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    step()
    with memory.track(model, optimizer) as use:
        step()
    with FlopCounterMode(display=False) as counted:
        loss = step()
    return use, counted.get_total_flops(), loss


def check_fit(answer):
    if not isinstance(answer, dict) or set(answer) != set(ALLOWED):
        raise Wrong(f"The answer is a dictionary with the keys {', '.join(ALLOWED)}; yours is {answer!r}.")
    for name, choices in ALLOWED.items():
        if answer[name] not in choices:
            raise Wrong(f"{name} is {answer[name]!r}; choose one of {', '.join(map(str, choices))}.")
    answer = {name: choices[choices.index(answer[name])] for name, choices in ALLOWED.items()}  # 8 for 8.0
    if 8 // answer["micro_batches"] < LEAST_ROWS:
        raise Wrong(
            f"{answer['micro_batches']} micro-batches of {8 // answer['micro_batches']} sequences: the run asks for at least "
            f"{LEAST_ROWS} in one pass, because small ones leave the device idle."
        )
    use, work, loss = launch(training_run, **answer, ranks=1, backend="gloo", timeout=60).results[0]
    mebibytes = {name: size / 2**20 for name, size in use.at_peak.items()}
    if use.peak > BUDGET:
        parts = ", ".join(f"{name} {size:.0f}" for name, size in sorted(mebibytes.items(), key=lambda each: -each[1]))
        raise Wrong(
            f"Your run needs {use.peak / 2**20:.0f} MiB, the budget is {BUDGET / 2**20:.0f} MiB. At the peak there are (MiB): "
            f"{parts}. Logits and what the loss makes of them (under other) are tokens × 16,384 entries: cut those first."
        )
    _, plain_work, plain_loss = launch(training_run, 1, "none", 1, ranks=1, backend="gloo", timeout=60).results[0]
    added = 100 * (work / plain_work - 1)
    if abs(loss / plain_loss - 1) > 1e-5:
        raise Wrong(f"The loss is {loss:.6f} instead of {plain_loss:.6f}.")
    if answer["checkpointing"] == "full":
        raise Wrong(
            f"It fits in {use.peak / 2**20:.0f} MiB, with {added:.0f} % more multiplications. The layers' activations are not "
            "what is large in this run: leave them, and recompute the logits only."
        )
    if answer["micro_batches"] > 1:
        raise Wrong(
            f"It fits in {use.peak / 2**20:.0f} MiB, but one pass over all 8 sequences fits as well: fewer, larger passes."
        )
    return f"{use.peak / 2**20:.0f} MiB of {BUDGET / 2**20:.0f}, same loss, {added:.0f} % more multiplications, one pass."


def accumulate_sharded(model, batches):
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        (model(batch).square().mean() / len(batches)).backward()


def _batches(rank):
    return list(torch.randn(4, 4, 40, generator=torch.Generator().manual_seed(rank)))


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 10))


def check_accumulation(answer):
    def job():
        model = fully_shard(_network())
        answer(model, _batches(dist.get_rank()))
        grads = [parameter.grad for parameter in model.parameters()]
        if any(not hasattr(grad, "full_tensor") for grad in grads):
            return None
        return torch.cat([grad.full_tensor().flatten() for grad in grads])

    run = launch(job, ranks=RANKS, backend="gloo", timeout=30)
    if run.results[0] is None:
        raise Wrong("There is no sharded gradient: the last micro-batch must synchronise, so that each rank gets its shard.")
    network = _network()
    for rank in range(RANKS):
        for batch in _batches(rank):
            (network(batch).square().mean() / (4 * RANKS)).backward()
    right, own = torch.cat([parameter.grad.flatten() for parameter in network.parameters()]), run.results[0]
    if (own - 4 * right).norm() < 1e-3 * own.norm():
        raise Wrong("The gradient is exactly 4 times too large: backward adds up, so divide each of the 4 losses by 4.")
    if (own - right).norm() > 1e-4 * right.norm():
        raise Wrong("The gradient is not that of the mean over all four batches of all ranks. Use every batch, once.")
    count = sum(c.rank == 0 and c.op == "reduce_scatter" for c in run.collectives)
    if count != 1:
        raise Wrong(
            f"The gradient is right, but gradients crossed the wire {count} times. set_requires_gradient_sync(False) before the "
            "first three micro-batches keeps them whole on each rank: that is ZeRO-1's trade, memory for traffic."
        )
    return "Right gradient, one reduce-scatter for four micro-batches."


def synchronised_each_time(model, batches):
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()


def never_synchronised(model, batches):
    model.set_requires_gradient_sync(False)
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()


def not_divided(model, batches):
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        model(batch).square().mean().backward()


def shard_bytes(shapes, ranks):
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) * 4 for shape in shapes)


def check_shards(answer):
    shapes = [(10, 7), (5,), (64, 3), (RANKS, 11), (2, 100)]

    def job():
        model = nn.Module()
        for number, shape in enumerate(shapes):
            setattr(model, f"weight{number}", nn.Parameter(torch.zeros(shape)))
        fully_shard(model)
        with memory.track(model) as use:
            pass
        return use.parameters

    measured, own = launch(job, ranks=RANKS, backend="gloo", timeout=30).results[0], answer(shapes, RANKS)
    given, own = own, as_number(own)
    if own is None:
        raise Wrong(f"Return a number of bytes; yours is {given!r}.")
    whole = sum(math.prod(shape) for shape in shapes) * 4
    if own == whole:
        raise Wrong(f"{own:,} B is the whole model; each of the {RANKS} ranks holds a part of every tensor.")
    if abs(own - whole / RANKS) <= 1:
        raise Wrong(
            f"{own:,.0f} B is 1/{RANKS} of all; a rank holds {measured:,} B. FSDP2 cuts every tensor along its first dimension, "
            f"and {RANKS} ranks do not divide each of them: the parts are rounded up."
        )
    if own != measured:
        raise Wrong(
            f"{own:,} B; FSDP2 holds {measured:,} B on each of {RANKS} ranks. Cut the first dimension of each tensor, and round "
            "up, not down; an FP32 number has 4 bytes."
        )
    return f"{measured:,} B on each of {RANKS} ranks, padding included; 1/{RANKS} of the model would be {whole / RANKS:,.0f} B."


def a_third(shapes, ranks):
    return sum(math.prod(shape) for shape in shapes) * 4 / ranks


def rounded_down(shapes, ranks):
    return sum(shape[0] // ranks * math.prod(shape[1:]) * 4 for shape in shapes)


def whole_model(shapes, ranks):
    return sum(math.prod(shape) for shape in shapes) * 4


def chunked_mean(head, hidden, targets, chunks):
    def of_chunk(hidden, targets):
        return F.cross_entropy(head(hidden), targets, reduction="sum")

    parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(checkpoint(of_chunk, *part, use_reentrant=False) for part in parts) / len(targets)


def check_chunks(answer):
    tokens, vocabulary, chunks = 50, 400, 4

    def job():
        torch.manual_seed(0)
        head, hidden = nn.Linear(16, vocabulary, bias=False), torch.randn(tokens, 16, requires_grad=True)
        targets = torch.randint(0, vocabulary, (tokens,))
        F.cross_entropy(head(hidden), targets).backward()
        right = (F.cross_entropy(head(hidden), targets).item(), head.weight.grad.clone())
        head.weight.grad = None
        with memory.track(head, head=head) as use:
            loss = answer(head, hidden, targets, chunks)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                return loss.detach() if isinstance(loss, torch.Tensor) else loss
            loss.backward()
        return loss.item(), head.weight.grad, right, use

    found = launch(job, ranks=1, backend="gloo", timeout=30).results[0]
    if not isinstance(found, tuple) or len(found) != 4:
        raise Wrong(f"Return the mean as a tensor of one number, with its history for backward; yours is {found!r}.")
    loss, gradient, (right, right_gradient), use = found
    if not abs(loss - right) <= 1e-5 * right:
        raise Wrong(
            f"The loss is {loss:.5f}, that of all tokens at once {right:.5f}. {tokens} tokens in {chunks} chunks are not equal "
            "parts: add the sums and divide once by the number of tokens."
        )
    if gradient is None or (gradient - right_gradient).norm() > 1e-4 * right_gradient.norm():
        raise Wrong("The loss is right, the gradient is not: every chunk has to be part of it.")
    one = math.ceil(tokens / chunks) * vocabulary * 4
    if use.logits > one:
        raise Wrong(
            f"Loss and gradient are right, but {use.logits:,} B of logits exist at one time; one chunk has {one:,} B. Call head "
            "on each chunk, not on all tokens."
        )
    if use.activations > one:
        raise Wrong(
            f"The logits come by chunks, but {use.activations:,} B are kept for backward: each chunk's log-softmax waits there. "
            "Checkpoint each chunk, so that backward makes it again."
        )
    return f"Same loss and gradient; {use.logits:,} B of logits at one time instead of {tokens * vocabulary * 4:,} B."


def mean_of_means(head, hidden, targets, chunks):
    def of_chunk(hidden, targets):
        return F.cross_entropy(head(hidden), targets)

    parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(checkpoint(of_chunk, *part, use_reentrant=False) for part in parts) / chunks


def kept_log_softmax(head, hidden, targets, chunks):
    parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(F.cross_entropy(head(h), t, reduction="sum") for h, t in parts) / len(targets)


def all_logits(head, hidden, targets, chunks):
    return F.cross_entropy(head(hidden), targets)


def without_history(head, hidden, targets, chunks):
    return F.cross_entropy(head(hidden), targets).item()


def check_state(answer):
    given, answer = answer, as_number(answer)
    if answer is None:
        raise Wrong(f"The answer is a number of bytes; yours is {given!r}.")
    right = 2 * 7e9 * (1 + 4 / 256)
    for value, message in {
        56e9: "That is AdamW's usual state: two FP32 numbers a parameter. Here each takes one byte.",
        28e9: "That is two bytes for each moment. Eight bits are one byte.",
        7e9: "AdamW keeps two moments for each parameter.",
        14e9: "Almost: each block of 256 numbers also has an FP32 scale, for each of the two moments.",
    }.items():
        if abs(answer / value - 1) < 1e-3:
            raise Wrong(message)
    if abs(answer / right - 1) > 1e-3:
        raise Wrong(f"{answer:,.0f} B is not it: two moments, one byte each, and 4 bytes of scale for every 256 of them.")
    return f"{right:,.0f} B, against 56,000,000,000 B in FP32."


EXERCISES = [
    Exercise(
        "07.1",
        "fit a training run into 90 MiB with the least time lost",
        answer={"micro_batches": 1, "checkpointing": "none", "chunks": 8},
        hints=[
            "512 tokens × 16,384 entries × 4 bytes: how large are the logits of a pass? The loss makes three more of that size.",
            "Recomputing logits by chunks costs one more product with the output matrix; recomputing layers a forward pass.",
        ],
        check=check_fit,
        wrong=[
            ({"micro_batches": 1, "checkpointing": "none", "chunks": 1}, "the budget is"),
            ({"micro_batches": 1, "checkpointing": "full", "chunks": 1}, "cut those first"),
            ({"micro_batches": 2, "checkpointing": "full", "chunks": 1}, "the budget is"),
            ({"micro_batches": 1, "checkpointing": "full", "chunks": 8}, "recompute the logits only"),
            ({"micro_batches": 8, "checkpointing": "none", "chunks": 1}, "leave the device idle"),
            ({"micro_batches": 2, "checkpointing": "none", "chunks": 8}, "fewer, larger passes"),
        ],
    ),
    Exercise(
        "07.2",
        "accumulate on sharded gradients, one reduce-scatter",
        answer=accumulate_sharded,
        hints=[
            "FSDP2 has no no_sync: model.set_requires_gradient_sync(False) does it.",
            "Before the last micro-batch, switch it on again; the shards then hold the sum of all of them.",
        ],
        check=check_accumulation,
        wrong=[
            (synchronised_each_time, "crossed the wire 4 times"),
            (never_synchronised, "no sharded gradient"),
            (not_divided, "exactly 4 times too large"),
        ],
    ),
    Exercise(
        "07.3",
        "bytes of FSDP2's shards, padding included",
        answer=shard_bytes,
        hints=[
            "Each tensor is cut along its first dimension into equal parts.",
            "Equal parts of 10 rows for 3 ranks have 4 rows.",
        ],
        check=check_shards,
        wrong=[(a_third, "rounded up"), (rounded_down, "not down"), (whole_model, "the whole model")],
    ),
    Exercise(
        "07.4",
        "a loss whose logits exist one chunk at a time",
        answer=chunked_mean,
        hints=[
            'F.cross_entropy(..., reduction="sum") of each chunk; divide once, by the number of targets.',
            "checkpoint(function, *tensors, use_reentrant=False) keeps the tensors, not what is made of them.",
        ],
        check=check_chunks,
        wrong=[
            (mean_of_means, "are not equal"),
            (kept_log_softmax, "log-softmax waits"),
            (all_logits, "Call head"),
            (without_history, "history"),
        ],
    ),
    Exercise(
        "07.5",
        "bytes of 8-bit AdamW state for 7 billion parameters",
        answer=14.21875e9,
        hints=["Two moments of one byte each.", "And 4 bytes for every block of 256, for each moment."],
        check=check_state,
        wrong=[(56e9, "one byte"), (28e9, "Eight bits"), (14e9, "FP32 scale"), (7e9, "two moments"), (math.nan, "is a number")],
    ),
]
