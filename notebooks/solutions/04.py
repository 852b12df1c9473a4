"""Notebook 04: answers, hints, checks, and wrong answers with the message each gets."""

import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers import launch, shard_plan
from helpers.exercises import Exercise, Wrong, as_number

RANKS = 3  # in the checks: not the number that the notebook shows


def unseen_config():
    return LlamaConfig(hidden_size=96, num_attention_heads=12, num_key_value_heads=3, head_dim=8, intermediate_size=120,
                       num_hidden_layers=2, vocab_size=66, tie_word_embeddings=False, max_position_embeddings=64)  # fmt: skip


def check_repaired(answer):
    if not isinstance(answer, dict):
        raise Wrong(f"The answer is a dictionary from names to styles, such as the broken plan; yours is {answer!r}.")
    config = unseen_config()
    problems = [each for each in shard_plan.check(config, answer, RANKS) if each.severity != "warning"]
    if problems:
        first, rest = problems[0], len(problems) - 1
        raise Wrong(
            f"{first.key}: {first.reason}. Right: {first.mend}." + f" (And {rest} more; see shard_plan.check.)" * bool(rest)
        )
    whole = [row.name for row in shard_plan.shards(config, answer, RANKS).rows if ".layers.0." in row.name and row.style is None]
    left = [name for name in whole if "norm" not in name]
    if left:
        raise Wrong(
            f"Nothing in it is wrong, but every rank still holds the whole of {', '.join(left)}: split every matrix of a block."
        )

    @torch.no_grad()
    def job():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.arange(10)[None]
        right = model(ids).logits
        shard_plan.apply(model, answer, init_device_mesh("cpu", (RANKS,)))
        return (model(ids).logits - right).abs().max().item()

    error = max(launch(job, ranks=RANKS, backend="gloo", timeout=120).results)
    if error > 1e-4:
        raise Wrong(f"On {RANKS} ranks the logits are off by up to {error:.2f}: compare it with the plan of section 4.")
    return f"On {RANKS} ranks, with 12 query heads and 3 KV heads, the logits are those of the whole model."


def plan_of(**changes):
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
             "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
    styles = dict.fromkeys(names, "colwise") | {"o": "rowwise", "down": "rowwise"} | changes
    return {f"model.layers.*.{names[key]}": style for key, style in styles.items() if style}


def row_wise(x, weight, bias):
    y = x @ weight.T  # (rows, outputs), unfinished sums
    dist.all_reduce(y)
    return y + bias  # once, after the sum


def check_row_wise(answer):
    rows, inputs, outputs = 5, 4 * RANKS, 7
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in [(rows, inputs), (outputs, inputs), (outputs,)])

    def job():
        rank = dist.get_rank()
        return answer(x.chunk(RANKS, 1)[rank].clone(), weight.chunk(RANKS, 1)[rank].clone(), bias.clone())

    run = launch(job, ranks=RANKS, backend="gloo", timeout=20)
    right = x @ weight.T + bias
    for rank, own in enumerate(run.results):
        if not isinstance(own, torch.Tensor) or own.shape != right.shape:
            found = f"a tensor of {tuple(own.shape)}" if isinstance(own, torch.Tensor) else f"a {type(own).__name__}"
            raise Wrong(f"Rank {rank} returned {found} where a tensor of {tuple(right.shape)} was expected, on every rank.")
    sent = [c for c in run.collectives if c.rank == 0]
    own = run.results[0]
    if torch.allclose(own, right + (RANKS - 1) * bias, atol=1e-4):
        raise Wrong(f"The bias is in the result {RANKS} times: each rank added it to its unfinished sums. Add it after the sum.")
    if torch.allclose(own, right - bias, atol=1e-4):
        raise Wrong("The bias is missing: add it once, after the sum.")
    if not all(torch.allclose(result, right, atol=1e-4) for result in run.results):
        more = (
            "add up what the ranks have (all_reduce)" if not sent else "the result must be the sum over ranks, plus the bias once"
        )
        raise Wrong(f"The numbers are not x @ weight.T + bias of the whole x and weight: {more}.")
    if len(sent) != 1 or sent[0].bytes > right.numel() * 4:
        told = ", ".join(f"{c.op} of {c.bytes} B" for c in sent)
        raise Wrong(f"The numbers are right, but rank 0 took part in {told}. One all_reduce of {right.numel() * 4} B is enough.")
    return f"Right on {RANKS} ranks, with one {sent[0].op} of {sent[0].bytes} B."


def bias_on_every_rank(x, weight, bias):
    y = x @ weight.T + bias
    dist.all_reduce(y)
    return y


def never_summed(x, weight, bias):
    return x @ weight.T + bias


def forgot_the_bias(x, weight, bias):
    y = x @ weight.T
    dist.all_reduce(y)
    return y


def gathered_everything(x, weight, bias):
    xs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    weights = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(xs, x)
    dist.all_gather(weights, weight)
    return torch.cat(xs, 1) @ torch.cat(weights, 1).T + bias


def check_degrees(answer):
    given = [as_number(each) for each in answer] if hasattr(answer, "__iter__") and not isinstance(answer, dict) else [None]
    if None in given:
        raise Wrong(f"The answer is a list of numbers of ranks, such as [1, 3]; yours is {answer!r}.")
    found = sorted(set(given))
    if found == [1, 2, 4, 7, 14, 28]:
        raise Wrong("Those divide the 28 query heads. The 4 KV heads must be shared out too: 7 ranks cannot share 4.")
    if 8 in found:
        raise Wrong("8 divides the intermediate size and the vocabulary, but neither 28 query heads nor 4 KV heads.")
    if 1 not in found and found == [2, 4]:
        raise Wrong("1 is a number of ranks, too: the whole model on one.")
    if found != [1, 2, 4]:
        raise Wrong(f"Not {found}: a number must divide 28, 4 and 18,944; this plan leaves the vocabulary whole.")
    return "28 query heads allow 1, 2, 4, 7, 14, 28; the KV heads leave 1, 2, 4, and 18,944 divides by all of these."


def greedy_token(logits):
    n = dist.get_world_size()
    best = logits.argmax()  # the first of equals, among mine
    pair = torch.stack([logits[best].double(), best + dist.get_rank() * len(logits)])  # (logit, id): 16 bytes
    pairs = [torch.empty_like(pair) for _ in range(n)]
    dist.all_gather(pairs, pair)
    return int(max(pairs, key=lambda p: p[0].item())[1])  # max takes the first of equals: the lowest rank


def check_greedy(answer):
    words = 200
    cases = [torch.randn(words * RANKS, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    cases[0][[20, 450]] = 9.0  # equally likely, on two ranks
    cases[1][[130, 131]] = 9.0  # and on one

    def job():
        return [answer(case.chunk(RANKS)[dist.get_rank()].clone()) for case in cases]

    run = launch(job, ranks=RANKS, backend="gloo", timeout=20)
    right = [int(case.argmax()) for case in cases]
    for token in itertools.chain(*run.results):
        if isinstance(token, bool) or not isinstance(token, int):
            raise Wrong(
                f"Return an int on every rank, the id of the word; yours returned {token!r}. int(tensor) makes one of a tensor."
            )
    if any(result != run.results[0] for result in run.results):
        raise Wrong(f"The ranks chose {[result[2] for result in run.results]}: they must agree, so they must exchange something.")
    if run.results[0] == [token % words for token in right]:
        raise Wrong(f"A place among one rank's words is no id: rank r's words begin at r · {words} here.")
    if run.results[0] == [20 if number > 0 else right[0] for number in range(4)] or run.results[0][2:] != right[2:]:
        raise Wrong(f"Your token has not the largest logit of all {RANKS} ranks: expected {right[2]}, got {run.results[0][2]}.")
    if run.results[0] != right:
        raise Wrong(f"Of equally likely words take the first: expected {right[0]}, got {run.results[0][0]}.")
    sent = sum(c.bytes for c in run.collectives if c.rank == 0) // len(cases)
    if sent > 64:
        raise Wrong(
            f"The token is right, but a rank handed over {sent:,} B for it. Exchange the best logit of each rank and where it is."
        )
    return f"The right word on every rank, for {sent} B instead of the {4 * words * RANKS:,} B of all logits."


def own_words_only(logits):
    return int(logits.argmax())


def place_without_offset(logits):
    best = logits.argmax()
    pair = torch.stack([logits[best].double(), best.double()])
    pairs = [torch.empty_like(pair) for _ in range(dist.get_world_size())]
    dist.all_gather(pairs, pair)
    return int(max(pairs, key=lambda p: p[0].item())[1])


def all_logits(logits):
    pieces = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, logits)
    return int(torch.cat(pieces).argmax())


def last_of_equals(logits):
    best = logits.argmax()
    pair = torch.stack([logits[best].double(), best + dist.get_rank() * len(logits)])
    pairs = [torch.empty_like(pair) for _ in range(dist.get_world_size())]
    dist.all_gather(pairs, pair)
    return int(max(pairs[::-1], key=lambda p: p[0].item())[1])


def a_tensor(logits):
    return logits.argmax()


def check_milliseconds(answer):
    given, answer = answer, as_number(answer)
    if answer is None:
        raise Wrong(f"The answer is a number of milliseconds; yours is {given!r}.")
    for value, message in {
        1.2: "That is one all-reduce per layer. A block has two pairs of matrices: attention and MLP.",
        0.0024: "That is in seconds.",
        2400: "That is in microseconds.",
        19.2: "All 8 GPUs take part in the same all-reduce: it is not paid 8 times.",
        0.3: "The layers follow one another: 8 GPUs do not share the all-reduces out, each takes part in every one.",
    }.items():
        if abs(answer / value - 1) < 1e-3:
            raise Wrong(message)
    if abs(answer / 2.4 - 1) > 0.01:
        raise Wrong(f"{answer} ms is not it: two all-reduces in each of 80 layers, one after the other, 15 µs each.")
    return "160 all-reduces of 15 µs: 2.4 ms of every token, so at most 417 tokens per second, however fast the GPUs compute."


EXERCISES = [
    Exercise(
        "04.1",
        "repair a broken plan",
        answer={
            "model.layers.*.self_attn.q_proj": "colwise",
            "model.layers.*.self_attn.k_proj": "colwise",
            "model.layers.*.self_attn.v_proj": "colwise",
            "model.layers.*.self_attn.o_proj": "rowwise",
            "model.layers.*.mlp.gate_proj": "colwise",
            "model.layers.*.mlp.up_proj": "colwise",
            "model.layers.*.mlp.down_proj": "rowwise",
        },
        hints=[
            "print(shard_plan.check(config, broken, 2)) names what it finds, and what would be right.",
            "Three things: a name, a style, and a matrix that is missing.",
        ],
        check=check_repaired,
        wrong=[
            (plan_of(o="colwise"), "o_proj"),
            (plan_of(up=None), "up_proj"),
            (plan_of(k=None, v=None), "left whole"),
            (plan_of(gate=None, up=None, down=None), "every matrix"),
            ({key.removeprefix("model."): style for key, style in plan_of().items()}, "matches no module"),
            (["colwise"], "is a dictionary"),
        ],
    ),
    Exercise(
        "04.2",
        "a row-wise layer with a bias",
        answer=row_wise,
        hints=[
            "x @ weight.T with this rank's parts is an unfinished sum of the right shape.",
            "What is added before the sum is summed.",
        ],
        check=check_row_wise,
        wrong=[
            (bias_on_every_rank, "3 times"),
            (never_summed, "add up what the ranks have"),
            (forgot_the_bias, "bias is missing"),
            (gathered_everything, "is enough"),
        ],
    ),
    Exercise(
        "04.3",
        "valid numbers of ranks for 28 heads and 4 KV heads",
        answer=[1, 2, 4],
        hints=["A rank takes whole query heads and whole KV heads.", "A number must divide 28 and 4 and the intermediate size."],
        check=check_degrees,
        wrong=[
            ([1, 2, 4, 7, 14, 28], "7 ranks cannot share 4"),
            ([1, 2, 4, 8], "8 divides"),
            ([2, 4], "1 is a number"),
            (4, "a list of numbers"),
            (["1", 2, [4]], "a list of numbers"),
        ],
    ),
    Exercise(
        "04.4",
        "the likeliest word of a split vocabulary",
        answer=greedy_token,
        hints=[
            "Each rank can find the best of its own words. What must the others know of it?",
            "Two numbers: the logit and the id, which is the place plus rank · len(logits). All-gather the pair.",
            "A pair in one float64 tensor keeps both exact: a float32 holds whole numbers exactly up to 16,777,216 only.",
        ],
        check=check_greedy,
        wrong=[
            (own_words_only, "they must agree"),
            (place_without_offset, "is no id"),
            (all_logits, "handed over"),
            (last_of_equals, "take the first"),
            (a_tensor, "Return an int"),
        ],
    ),
    Exercise(
        "04.5",
        "milliseconds of all-reduces in a token",
        answer=2.4,
        hints=["How many all-reduces does a layer need, and does a layer wait for the one before?"],
        check=check_milliseconds,
        wrong=[
            (1.2, "two pairs"),
            (19.2, "not paid 8 times"),
            (0.3, "follow one another"),
            (0.0024, "in seconds"),
            ("2.4", "is a number"),
            (math.nan, "is a number"),
        ],
    ),
]
