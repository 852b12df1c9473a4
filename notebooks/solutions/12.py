"""Notebook 12: answers, hints, checks, and wrong answers with the message each gets."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from helpers import launch, predict
from helpers.exercises import Exercise, Wrong, as_number
from helpers.predict import Layout, Workload

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
HIDDEN, WIDE, ROWS = 12, 24, 4  # of the block in 12.4: no size that the notebook shows


def _whole(answer, names):
    """The answer's numbers as ints, or why it has none."""
    if not isinstance(answer, dict) or set(names) - set(answer):
        raise Wrong(f"The answer is a dictionary with the keys {', '.join(names)}; yours is {answer!r}.")
    numbers = {name: as_number(answer[name]) for name in names}
    for name, number in numbers.items():
        if number is None or number != int(number) or number < (name != "zero"):
            raise Wrong(f"{name} is {answer[name]!r}: it must be a whole number.")
    return {name: int(number) for name, number in numbers.items()}


def check_choice(answer):
    sizes, sequences = _whole(answer, ("dp", "tp", "pp", "zero", "micro_batch")), 256
    kind = answer.get("checkpointing", "none")
    if sizes["zero"] > 3 or kind not in ("none", "full"):
        raise Wrong(f'zero is 0, 1, 2 or 3 and checkpointing "none" or "full"; yours are {sizes["zero"]} and {kind!r}.')
    layout = Layout(dp=sizes["dp"], tp=sizes["tp"], pp=sizes["pp"], zero=sizes["zero"])
    if layout.ranks != 16:
        raise Wrong(f"dp × tp × pp is {layout.ranks}; there are 16 GPUs, and all of them are to work.")
    if sequences % (layout.dp * sizes["micro_batch"]):
        raise Wrong(
            f"{sequences} sequences are not divided: dp {layout.dp} × micro_batch {sizes['micro_batch']} = "
            f"{layout.dp * sizes['micro_batch']} sequences at a time leave a rest."
        )
    machines = predict.machines("H100-SXM", 16)
    passes = sequences // layout.dp // sizes["micro_batch"]
    work = Workload(sizes["micro_batch"], 4096, micro_batches=passes, precision="fsdp_mixed", checkpointing=kind)
    if why := predict.problem(LLAMA_8B, machines, layout, work):
        raise Wrong(f"This one is left out: {why}. predict.memory(…) shows which part is large; zero=3 divides all states by dp.")
    best = predict.plan(LLAMA_8B, machines, Workload(sequences, 4096, precision="fsdp_mixed")).best
    rate = predict.step_time(LLAMA_8B, work, layout, machines).tokens_per_second
    if rate < 0.9 * best.tokens_per_second:
        raise Wrong(
            f"It divides and fits, with {rate:,.0f} tokens/s predicted, {rate / best.tokens_per_second:.0%} of what is possible; "
            f"90 % are asked. Look at predict.step_time(…): what does it spend that another layout would not (recompute, "
            f"tensor_parallel, pipeline_bubble)?"
        )
    return f"It divides, fits and makes {rate:,.0f} tokens/s as predicted, {rate / best.tokens_per_second:.0%} of the best."


REFUSED = {  # what is wrong -> (layout, work of one data-parallel rank)
    "A": (Layout(tp=8), Workload(1, 2048, precision="bf16", micro_batches=64)),
    "B": (Layout(dp=8), Workload(16, 2048, precision="fsdp_mixed", micro_batches=1)),
    "C": (Layout(pp=4, dp=2), Workload(1, 2048, precision="bf16", micro_batches=64)),
    "D": (Layout(pp=2, dp=4), Workload(8, 512, precision="bf16", micro_batches=1)),
}
REASONS = {"A": "heads", "B": "memory", "C": "layers", "D": "bubble"}
_WHY = {
    "A": "2 key-value heads are not divided by tp 8, and 16 heads would be",
    "B": "every part is divided, but the log-softmax over 103,424 entries for 16 × 2,048 tokens alone is 12.6 GiB",
    "C": "18 layers are not divided by 4 stages",
    "D": "one micro-batch and two stages: one of them always waits",
}


def check_reasons(answer):
    if not isinstance(answer, dict) or set(answer) != set(REASONS):
        raise Wrong(
            f'The answer is a dictionary with a word for each of A, B, C and D, as in {{"A": "memory", …}}; not {answer!r}.'
        )
    for name, word in answer.items():
        if word not in REASONS.values():
            raise Wrong(f"{name} is {word!r}; the words are {', '.join(sorted(REASONS.values()))}.")
    wrong = [name for name in REASONS if answer[name] != REASONS[name]]
    if wrong:
        name = wrong[0]
        layout, work = REFUSED[name]
        size = f"dp {layout.dp}, tp {layout.tp}, pp {layout.pp}, {work.micro_batches} × {work.batch} × {work.sequence} tokens"
        raise Wrong(
            f'{len(wrong)} of 4 are not the reason. Look at {name} again ({size}): is it "{answer[name]}"? Count what tp divides '
            f"(16 heads, 2 key-value heads), what pp divides (18 layers), who waits for whom, and then the bytes."
        )
    return "; ".join(f"{name}: {why}" for name, why in _WHY.items()) + "."


def seconds_a_token(parameters, cache_bytes, bandwidth, tp):
    return (2 * parameters + cache_bytes) / tp / bandwidth


def check_floor(answer):
    for parameters, cache, bandwidth, tp in ((8.03e9, 0, 1.4e12, 1), (70.6e9, 10e9, 2.3e12, 8), (0.36e9, 2e9, 0.2e12, 2)):
        given = answer(parameters, cache, bandwidth, tp)
        found, right = as_number(given), seconds_a_token(parameters, cache, bandwidth, tp)
        if found is None:
            raise Wrong(f"The function returns a number of seconds; yours returned {given!r}.")
        where = f"{parameters / 1e9:g} B parameters, {cache / 1e9:g} GB of cache, {bandwidth / 1e9:,.0f} GB/s, tp {tp}"
        for value, message in {
            right * tp: "That is one device alone. With tp each reads its part of weights and cache, all at the same time.",
            right / 2 if not cache else -1.0: "One byte a parameter: BF16 has two.",
            2 * right if not cache else -1.0: "Four bytes a parameter: BF16 has two.",
            2 * parameters / tp / bandwidth: "The cache is missing: keys and values of all earlier tokens are read as well.",
            (2 * parameters / tp + cache) / bandwidth: "The cache is divided too: each rank holds its heads' keys and values.",
            1 / right: "That is tokens a second; seconds a token are asked.",
        }.items():
            if math.isclose(found, value, rel_tol=1e-3) and not math.isclose(value, right, rel_tol=1e-3):
                raise Wrong(f"{where}: {message}")
        if not math.isclose(found, right, rel_tol=1e-3):
            raise Wrong(f"{where}: {found:.3g} s is not it. Bytes that are read once for a token, divided by what reads them.")
    return "A floor: no kernel, no exchange and no scheduler has been counted yet."


def floor_alone(parameters, cache_bytes, bandwidth, tp):
    return (2 * parameters + cache_bytes) / bandwidth


def floor_in_fp32(parameters, cache_bytes, bandwidth, tp):
    return (4 * parameters + cache_bytes) / tp / bandwidth


def floor_without_cache(parameters, cache_bytes, bandwidth, tp):
    return 2 * parameters / tp / bandwidth


def rate_instead(parameters, cache_bytes, bandwidth, tp):
    return tp * bandwidth / (2 * parameters + cache_bytes)


def run_plan(mesh, up, down, parts, summed):
    for x in parts:
        y = summed(torch.relu(x @ up) @ down, mesh.get_group("tp"))  # the ranks of a TP group hold parts of the sum
        (y.square().mean() / len(parts)).backward()  # gradients add up over the micro-batches
    for weight in (up, down):  # once a step, with those that hold the same part
        dist.all_reduce(weight.grad, group=mesh.get_group("dp"))
        weight.grad /= mesh["dp"].size()


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor, group):
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


def check_run(answer):
    replicas, tp, count = 3, 2, 3

    def job():
        mesh = init_device_mesh("cpu", (replicas, tp), mesh_dim_names=("dp", "tp"))
        mine, place = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()
        whole = [torch.randn(HIDDEN, WIDE), torch.randn(WIDE, HIDDEN)]  # seed 0: alike on all ranks
        rows = torch.randn(replicas, count, ROWS, HIDDEN)
        up = whole[0].chunk(tp, 1)[mine].clone().requires_grad_()
        down = whole[1].chunk(tp, 0)[mine].clone().requires_grad_()
        answer(mesh, up, down, list(rows[place]), _Summed.apply)
        for weight in whole:
            weight.requires_grad_()
        (torch.relu(rows @ whole[0]) @ whole[1]).square().mean().backward()
        right = whole[0].grad.chunk(tp, 1)[mine], whole[1].grad.chunk(tp, 0)[mine]
        missing = up.grad is None or down.grad is None
        ratios = (
            None if missing else [(mine.grad.norm() / aim.norm()).item() for mine, aim in zip((up, down), right, strict=True)]
        )
        near = not missing and all(
            torch.allclose(mine.grad, aim, rtol=1e-4, atol=1e-6) for mine, aim in zip((up, down), right, strict=True)
        )
        return near, ratios

    run = launch(job, ranks=replicas * tp, backend="gloo", timeout=30)
    groups = {"tp": {(0, 1), (2, 3), (4, 5)}, "dp": {(0, 2, 4), (1, 3, 5)}}
    own = [c for c in run.collectives if c.rank == 0]
    sums = {axis: [c for c in own if c.group in groups[axis]] for axis in groups}
    weights = 4 * 2 * HIDDEN * WIDE // tp
    strangers = [c for c in own if c.group not in groups["tp"] | groups["dp"] and c.op != "barrier" and c.bytes >= 4]
    if strangers:
        raise Wrong(
            f"You exchanged over the ranks {list(strangers[0].group)}: they hold different parts of the model and different "
            f'samples. Activations are summed over the axis "tp", gradients over "dp".'
        )
    near, ratios = [found[0] for found in run.results], [found[1] for found in run.results]
    if None in ratios:
        raise Wrong(
            "A weight has no gradient: call backward on the loss of each micro-batch; up.grad and down.grad then hold it."
        )
    traffic = sum(c.bytes for c in sums["dp"])
    if not sums["tp"]:
        raise Wrong("Nothing was summed over tp: each rank took its own part of the block's output for the whole.")
    if not all(near):
        factors = [ratio for row in ratios for ratio in row]
        if max(factors) - min(factors) < 1e-3 and abs(factors[0] - 1) > 1e-3:
            raise Wrong(
                f"All gradients are {factors[0]:.3g} times what they should be: {replicas} replicas and {count} micro-batches "
                f"each make a mean, so divide by their numbers."
            )
        raise Wrong(
            "The gradients are not those of the mean over all samples: sum the outputs over tp before the loss, gradients over "
            "dp after the last micro-batch (a sum in between is summed again later)."
        )
    if traffic > weights:
        raise Wrong(
            f"The values are right, but rank 0 handed over {traffic:,} B of gradients, {traffic / weights:.0f} times what is "
            f"needed: let them add up over the micro-batches, then sum once."
        )
    if len(sums["tp"]) != count:
        raise Wrong(f"The values are right, with {len(sums['tp'])} sums over tp; {count} micro-batches need {count}.")
    sent = sum(c.bytes for c in sums["tp"])
    return f"Right gradients: {count} sums of activations over tp ({sent:,} B), gradients once over dp ({traffic:,} B)."


def run_and_sum_each(mesh, up, down, parts, summed):
    totals = [torch.zeros_like(up), torch.zeros_like(down)]
    for x in parts:
        y = summed(torch.relu(x @ up) @ down, mesh.get_group("tp"))
        found = torch.autograd.grad(y.square().mean() / len(parts), (up, down))
        for total, gradient in zip(totals, found, strict=True):
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=mesh.get_group("dp"))
            total += gradient / mesh["dp"].size()
    up.grad, down.grad = totals


def run_without_tp(mesh, up, down, parts, summed):
    for x in parts:
        ((torch.relu(x @ up) @ down).square().mean() / len(parts)).backward()
    for weight in (up, down):
        dist.all_reduce(weight.grad, group=mesh.get_group("dp"))
        weight.grad /= mesh["dp"].size()


def run_over_all(mesh, up, down, parts, summed):
    for x in parts:
        y = summed(torch.relu(x @ up) @ down, mesh.get_group("tp"))
        (y.square().mean() / len(parts)).backward()
    for weight in (up, down):
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()


def run_undivided(mesh, up, down, parts, summed):
    for x in parts:
        y = summed(torch.relu(x @ up) @ down, mesh.get_group("tp"))
        y.square().mean().backward()
    for weight in (up, down):
        dist.all_reduce(weight.grad, group=mesh.get_group("dp"))


EXERCISES = [
    Exercise(
        "12.1",
        "choose a layout for 8 billion parameters on 16 GPUs",
        answer={"dp": 16, "tp": 1, "pp": 1, "zero": 3, "micro_batch": 1, "checkpointing": "none"},
        hints=[
            "FP32 weights, gradients and two moments are 16 bytes a parameter: 128 GB. Which axis, which stage divides them?",
            "The fewer exchanges the better: dp 16 with ZeRO 3 exchanges beside computing. Then find the micro-batch that fits.",
        ],
        check=check_choice,
        wrong=[
            ({"dp": 16, "tp": 1, "pp": 1, "zero": 0, "micro_batch": 1}, "does not fit"),
            ({"dp": 8, "tp": 1, "pp": 1, "zero": 3, "micro_batch": 1}, "dp × tp × pp is 8"),
            ({"dp": 16, "tp": 1, "pp": 1, "zero": 3, "micro_batch": 3}, "leave a rest"),
            ({"dp": 1, "tp": 16, "pp": 1, "zero": 0, "micro_batch": 1}, "tensor parallelism across hosts"),
            ({"dp": 2, "tp": 8, "pp": 1, "zero": 3, "micro_batch": 1, "checkpointing": "full"}, "of what is possible"),
            ({"dp": 16}, "with the keys"),
        ],
    ),
    Exercise(
        "12.2",
        "say why four layouts are left out",
        answer=dict(REASONS),
        hints=[
            "tp divides heads and key-value heads, pp divides layers; a pipeline needs micro-batches; memory comes last.",
            "predict.problem(models.config('ernie-0.3b'), predict.machines('L4', 8), Layout(…), Workload(…)) says it.",
        ],
        check=check_reasons,
        wrong=[
            ({"A": "memory", "B": "memory", "C": "layers", "D": "bubble"}, "Look at A again"),
            ({"A": "heads", "B": "bubble", "C": "layers", "D": "memory"}, "2 of 4"),
            ({"A": "heads"}, "a word for each"),
            ({"A": "heads", "B": "memory", "C": "layers", "D": "network"}, "the words are"),
        ],
    ),
    Exercise(
        "12.3",
        "the least time for one token",
        answer=seconds_a_token,
        hints=[
            "Which bytes does a device read from its memory to make one token?",
            "All weights (2 bytes each) and the cache, divided over tp devices, each with its bandwidth.",
        ],
        check=check_floor,
        wrong=[
            (floor_alone, "one device alone"),
            (floor_in_fp32, "Four bytes a parameter"),
            (floor_without_cache, "The cache is missing"),
            (rate_instead, "tokens a second"),
        ],
    ),
    Exercise(
        "12.4",
        "run a plan: dp × tp with micro-batches",
        answer=run_plan,
        hints=[
            "Forward: the ranks of a TP group hold parts of a sum. Backward adds to .grad by itself.",
            "After the loop: all_reduce each weight's gradient over dp and divide by its size; divide each loss by len(parts).",
        ],
        check=check_run,
        wrong=[
            (run_and_sum_each, "3 times what is needed"),
            (run_without_tp, "Nothing was summed over tp"),
            (run_over_all, "hold different parts of the model"),
            (run_undivided, "9 times what they should be"),
        ],
    ),
]
