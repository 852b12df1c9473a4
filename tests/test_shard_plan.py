"""Plans are judged before they run: what `check` says of a plan is what real ranks then do with it.

All plans, right and broken, run on two ranks in one job (`outcomes`): logits and gradients are compared with the whole model's.
"""

import math
import random
import re
from collections import Counter

import pytest

from helpers import launch, models, plots, predict, shard_plan

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 128, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}
CLASSES = {
    "ernie": ("Ernie4_5Config", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "phi3": ("Phi3Config", {}),  # q, k, v and gate, up in one matrix each
    "gpt_neox": ("GPTNeoXConfig", {}),  # q, k, v in one matrix, head by head
    "phi": ("PhiConfig", {}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "olmo2": ("Olmo2Config", {}),  # norms over all heads
    "gpt2": ("GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "opt": ("OPTConfig", OPT),
}
BATCH, TOKENS, NEW = 2, 12, 5
PHASES = ("forward", "training", "gradients")


def config(name, **changes):
    import transformers

    kind, own = CLASSES[name]
    return getattr(transformers, kind)(**{**SIZES, **own, **changes})


def build(name, **changes):
    """A model with weights large enough that every wrong product shows; the same on every rank."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config(name, **changes)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model


def plan_of(name, edits=None, **changes):
    """The shipped plan with some keys (by their ends) given another style, or none where that is None."""
    plan = shard_plan.published_plan(config(name, **changes))
    for end, style in (edits or {}).items():
        keys = [key for key in plan if key.endswith(end)] or [end]
        for key in keys:
            plan[key] = style
            if style is None:
                del plan[key]
    return plan


def run_plans(cases, generates):
    """Job: for each (name, changes, plan) how far the split model is from the whole one, and what this rank holds of it.

    Returns, per case, by phase the largest difference as a share of the largest value or the error's text, and "held": shapes.
    A barrier follows each phase: recorded collectives are told apart by them.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.arange(3, 3 + BATCH * TOKENS).view(BATCH, TOKENS)

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def apart(found, wanted, scale):
        return (found - wanted).abs().max().item() / scale if found.shape == wanted.shape else math.inf

    def phases(name, changes, plan):
        reference, model = build(name, **changes), build(name, **changes)
        wanted = reference(ids).logits
        wanted.logsumexp(-1).sum().backward()
        gradients = {key: parameter.grad for key, parameter in reference.named_parameters()}
        steepest = max(gradient.abs().max().item() for gradient in gradients.values())
        shard_plan.apply(model, plan, mesh)

        def forward():
            with torch.no_grad():
                return apart(model(ids).logits, wanted, wanted.abs().max().item())

        def training():
            found = model(ids).logits
            found.logsumexp(-1).sum().backward()
            return apart(found, wanted, wanted.abs().max().item())

        def slopes():
            return max(apart(whole(each.grad), gradients[key], steepest) for key, each in model.named_parameters())

        def text():
            options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            return float(not torch.equal(model.generate(ids, **options), reference.generate(ids, **options)))

        yield (
            "held",
            lambda: {
                key: tuple((each.to_local() if isinstance(each, DTensor) else each).shape)
                for key, each in model.named_parameters()
            },
        )
        yield from (("forward", forward), ("training", training), ("gradients", slopes))
        if generates:
            yield "text", text

    found = []
    for case in cases:
        outcome = {}
        try:
            for phase, work in phases(*case):
                try:
                    outcome[phase] = work()
                except (RuntimeError, ValueError, IndexError, AttributeError) as error:
                    outcome[phase] = f"{type(error).__name__}: {error}"
                if phase != "held":
                    dist.barrier()
        except ValueError as error:  # apply refuses
            outcome["forward"] = f"{type(error).__name__}: {error}"
        found.append(outcome)
        dist.barrier()
    return found


def severity(outcomes):
    """What the ranks' outcomes amount to: "error" where one raised, "silent" where a number is wrong, None where all is right."""
    values = [outcome[phase] for outcome in outcomes for phase in PHASES if phase in outcome]
    if any(isinstance(value, str) for value in values):
        return "error"
    return "silent" if max(values) > 1e-4 else None


# name of the defect: (architecture, changes to the configuration, edits of the shipped plan, severity, end of the key, in the
# reason)
BROKEN = {
    "q left whole, the published ERNIE plan": ("ernie", {}, {"q_proj": None}, "error", "q_proj",
        "left whole while k_proj and v_proj are"),
    "k and v left whole": ("ernie", {}, {"k_proj": None, "v_proj": None}, "silent", "k_proj", "left whole while q_proj is split"),
    "k left whole": ("ernie", {}, {"k_proj": None}, "silent", "k_proj", "left whole while q_proj and v_proj are split"),
    "o left whole": ("ernie", {}, {"o_proj": None}, "error", "o_proj", "takes its whole input"),
    "gate left whole": ("ernie", {}, {"gate_proj": None}, "error", "gate_proj", "left whole while up_proj is split"),
    "down left whole": ("ernie", {}, {"down_proj": None}, "error", "down_proj", "gate_proj and up_proj give a part"),
    "column-wise feeding column-wise": ("ernie", {}, {"down_proj": "colwise"}, "error", "down_proj",
        "column-wise feeding column-wise"),
    "key-value heads": ("ernie", {"num_key_value_heads": 1}, {}, "error", "k_proj", "key-value heads: 1"),
    "query heads": ("ernie", {"num_attention_heads": 9, "num_key_value_heads": 3}, {}, "error", "q_proj", "9 query heads"),
    "tied, only the output split": ("ernie", {}, {"embed_tokens": None}, "error", "embed_tokens", "one tensor with lm_head"),
    "tied, only the embedding split": ("ernie", {}, {"lm_head": None}, "error", "embed_tokens", "lm_head is left whole"),
    "tied, split two ways": ("ernie", {}, {"embed_tokens": "colwise_gather_output"}, "error", "embed_tokens",
        "over the columns and"),
    "q whole, k and v split": (
        "ernie", {"num_key_value_heads": 4}, {"q_proj": None, "o_proj": "rowwise_split_input"}, "silent", "q_proj", "not theirs",
    ),
    "k and v left whole, as many heads as q": (
        "llama", {"num_key_value_heads": 8}, {"k_proj": None, "v_proj": None}, "error", "v_proj", "shapes do not fit",
    ),
    "row-wise first": ("llama", {}, {"q_proj": "rowwise"}, "error", "q_proj", "its input is whole"),
    "row-wise after whole layers": ("llama", {}, {"gate_proj": None, "up_proj": None}, "error", "down_proj", "give the whole"),
    "part into the residual": ("phi3", {}, {"down_proj": "colwise"}, "error", "down_proj", "the residual stream is whole"),
    "output not gathered": ("llama", {}, {"lm_head": "colwise"}, "silent", "lm_head", "logits of its part"),
    "output row-wise": ("llama", {}, {"lm_head": "rowwise"}, "error", "lm_head", "its input is whole"),
    "ids taken for a part": ("llama", {}, {"model.embed_tokens": "rowwise"}, "silent", "embed_tokens", "looked up 2 times"),
    "columns of the embedding": ("qwen2", {}, {"model.embed_tokens": "colwise"}, "error", "embed_tokens", "columns are split"),
    "vocabulary": ("llama", {"vocab_size": 127}, {}, "error", "lm_head", "127 columns"),
    "intermediate size": ("llama", {"intermediate_size": 97}, {}, "error", "gate_proj", "97 columns"),
    "a norm split": ("llama", {}, {"model.norm": "rowwise"}, "error", "model.norm", "needs the whole of its dimension"),
    "a norm's gradient twice": (
        "llama", {}, {"model.layers.*.input_layernorm": "replicated_with_grad_allreduce"}, "silent", "input_layernorm",
            "counted 2 times",
    ),
    "a norm as in sequence parallelism": (
        "qwen2", {}, {"model.layers.*.input_layernorm": "sequence_parallel"}, "silent", "input_layernorm", "counted 2 times",
    ),
    "bias of a row-wise layer": (
        "llama", {"attention_bias": True}, {"model.layers.*.self_attn.o_proj.bias": "colwise"}, "error", "o_proj.bias",
            "added once",
    ),
    "a weight, not its module": (
        "llama", {}, {"o_proj": None, "model.layers.*.self_attn.o_proj.weight": "rowwise"}, "error", "o_proj.weight",
            "names a tensor",
    ),
    "a module without weights": (
        "llama", {}, {"gate_proj": None, "up_proj": None, "down_proj": None, "model.layers.*.mlp": "colwise"}, "error", ".mlp",
        "without weights of its own",
    ),
    "a sum too many": ("qwen2", {}, {"model.layers.*.mlp": "all_reduce"}, "silent", ".mlp", "counted 2 times"),
    "packed halves of a plain layer": ("llama", {}, {"gate_proj": "packed_colwise"}, "silent", "gate_proj", "not fused"),
    "qwen without k and v": ("qwen2", {}, {"k_proj": None, "v_proj": None}, "silent", "v_proj",
        "left whole while q_proj is split"),
    "norms of heads": ("qwen3", {}, {"q_norm": None, "k_norm": None}, "silent", "q_norm", "the rank's own heads only"),
    "norms of heads that all ranks have": (
        "qwen3", {}, {f"{each}_proj": "colwise_gather_output" for each in "qkv"} | {"o_proj": "rowwise_split_input"}, "silent",
            "q_norm",
        "counted 2 times",
    ),
    "norms over all heads": (
        "olmo2", {}, {f"{each}_proj": "colwise" for each in "qkv"} | {"o_proj": "rowwise"}, "error", "q_norm",
            "over all 64 columns",
    ),
    "fused q, k, v": ("phi3", {}, {"qkv_proj": "colwise", "o_proj": "rowwise"}, "error", "qkv_proj",
        "one matrix holds q, k and v"),
    "fused gate and up": (
        "phi3", {}, {"gate_up_proj": "colwise", "down_proj": "rowwise"}, "silent", "gate_up_proj", "one matrix holds gate and up",
    ),
    "fused by heads, cut across": ("gpt_neox", {}, {"query_key_value": "packed_colwise"}, "silent", "query_key_value",
        "head by head"),
    "gathered, then row-wise": ("phi3", {}, {"down_proj": "rowwise"}, "error", "down_proj", "gate_up_proj give the whole"),
    "dense left whole": ("gpt_neox", {}, {"attention.dense": None}, "error", "attention.dense", "takes its whole input"),
    "code that counts all heads": (
        "opt", {}, {f"model.decoder.layers.*.self_attn.{each}_proj": "rowwise" if each == "out" else "colwise"
                    for each in ("q", "k", "v", "out")}, "silent", "self_attn", "number of all heads",
    ),
    "fused in a transposed matrix": (
        "gpt2", {}, {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"}, "error", "c_attn",
            "q, k and v",
    ),
}  # fmt: skip
# right, though not as shipped: (architecture, changes, edits, what the warnings speak of)
UNUSUAL = {
    "attention gathered": ("ernie", {"num_key_value_heads": 1}, {f"{each}_proj": "colwise_gather_output" for each in "qkv"}
                           | {"o_proj": "rowwise_split_input"}, []),
    "attention left whole on purpose": ("ernie", {"num_key_value_heads": 1}, {f"{each}_proj": None for each in "qkvo"}, []),
    "MLP left whole": ("llama", {}, {"gate_proj": None, "up_proj": None, "down_proj": None}, ["holds and computes all of it"]),
    "output row-wise with a whole input": ("llama", {}, {"lm_head": "rowwise_split_input"}, []),
    "embedding by vocabulary": ("llama", {}, {"model.embed_tokens": "embedding_rowwise"}, []),
    "embedding by columns": ("llama", {}, {"model.embed_tokens": "colwise_gather_output"}, []),
    "tied, both by columns": ("ernie", {}, {"embed_tokens": "colwise_gather_output", "lm_head": "rowwise_split_input"}, []),
    "pieces of unequal size": ("phi3", {"intermediate_size": 97}, {}, ["cannot be divided evenly"]),
    "rows of unequal size": ("llama", {"vocab_size": 127}, {"lm_head": None, "model.embed_tokens": "embedding_rowwise"},
                             ["cannot be divided evenly"]),
    "packed halves of what is fused": ("phi3", {}, {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}, []),
    "a bias with its module's style": ("llama", {"attention_bias": True}, {"model.layers.*.self_attn.o_proj.bias": "rowwise"},
        []),
    "a container beside its modules": ("llama", {}, {"model.layers.*.mlp": "colwise"}, ["without weights of its own"]),
    "transposed matrices": ("gpt2", {}, {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"},
                            ["transposed"] * 2),
}  # fmt: skip
SHIPPED = [
    ("ernie", {}), ("ernie", {"use_bias": True}), ("ernie", {"tie_word_embeddings": False}), ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("qwen3", {}), ("phi3",
        {}),
    ("gpt_neox", {}), ("phi", {}), ("glm4", {}), ("olmo2", {}),
]  # fmt: skip
STYLES = [None, "colwise", "colwise", "rowwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "packed_colwise"]


def some_plans(count, seed=3):
    """Shipped plans with one block, or one or two keys, given other styles at random."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(["ernie", "llama", "qwen3", "phi3", "gpt_neox", "olmo2"])
        plan = plan_of(name)
        block = draw.choice(["attn|attention", "mlp"])
        some = (
            draw.sample(list(plan), draw.choice([1, 2]))
            if draw.random() < 0.5
            else [key for key in plan if re.search(block, key)]
        )
        for key in some:
            plan[key] = draw.choice(STYLES) if "norm" not in key else plan[key]
        yield name, {}, {key: style for key, style in plan.items() if style}


def split_at_barriers(run):
    """Lists of (operation, bytes) of rank 0, one for each stretch between two barriers."""
    stretches = [[]]
    for each in run.collectives:
        if each.rank == 0 and each.op == "barrier":
            stretches.append([])
        elif each.rank == 0:
            stretches[-1].append((each.op, each.bytes))
    return [Counter(stretch) for stretch in stretches]


RANDOM = list(some_plans(40))


@pytest.fixture(scope="module")
def outcomes():
    """By number or name of a case, what both ranks found."""
    table = {**BROKEN, **UNUSUAL}
    cases = [(name, changes, plan_of(name, edits, **changes)) for name, changes, edits, *_ in table.values()] + RANDOM
    run = launch(run_plans, cases, generates=False, ranks=2, timeout=400)
    return dict(zip([*table, *range(len(RANDOM))], zip(*run.results, strict=True), strict=True))


@pytest.fixture(scope="module", params=[2, 4])
def shipped(request):
    """(ranks, cases, outcomes by case, recorded collectives by case and phase) of the plans that transformers ships."""
    ranks = request.param
    cases = [
        (name, {**changes, "num_key_value_heads": ranks})
        for name, changes in (SHIPPED if ranks == 2 else [SHIPPED[0], *SHIPPED[6:8]])
    ]
    run = launch(run_plans, [(*case, plan_of(case[0], **case[1])) for case in cases], generates=True, ranks=ranks, timeout=400)
    stretches = split_at_barriers(run)
    recorded = [stretches[5 * number : 5 * number + 5] for number in range(len(cases))]
    return ranks, cases, list(zip(*run.results, strict=True)), recorded


@pytest.mark.parametrize("defect", BROKEN)
def test_check_finds_what_a_run_shows(defect, outcomes):
    name, changes, edits, wanted, key, words = BROKEN[defect]
    problems = shard_plan.check(config(name, **changes), plan_of(name, edits, **changes), 2)
    found = [each for each in problems if each.key.endswith(key) and words in each.reason]
    assert found, problems
    assert found[0].severity == wanted
    assert severity(outcomes[defect]) == wanted, outcomes[defect]


@pytest.mark.parametrize("case", UNUSUAL)
def test_plans_that_are_right_get_warnings_at_most(case, outcomes):
    name, changes, edits, words = UNUSUAL[case]
    problems = shard_plan.check(config(name, **changes), plan_of(name, edits, **changes), 2)
    assert [each.severity for each in problems] == ["warning"] * len(words), problems
    assert all(word in each.reason for word, each in zip(words, problems, strict=True))
    assert severity(outcomes[case]) is None, outcomes[case]


def test_check_and_ranks_agree_on_random_plans(outcomes):
    judged = [
        (
            bool({each.severity for each in shard_plan.check(config(name), plan, 2)} - {"warning"}),
            bool(severity(outcomes[number])),
        )
        for number, (name, _, plan) in enumerate(RANDOM)
    ]
    assert [number for number, (said, ran) in enumerate(judged) if said != ran] == []
    assert {said for said, _ in judged} == {True, False}


def test_shipped_plans_pass_and_give_the_logits_gradients_and_text_of_the_whole_model(shipped):
    ranks, cases, found, _ = shipped
    for (name, changes), by_rank in zip(cases, found, strict=True):
        assert shard_plan.check(config(name, **changes), plan_of(name, **changes), ranks) == [], name
        for outcome in by_rank:
            assert max(outcome[phase] for phase in PHASES) <= 1e-5, (name, outcome)
            assert outcome["text"] == 0, name


def test_recorded_collectives_are_the_predicted_ones(shipped):
    ranks, cases, _, recorded = shipped
    for (name, changes), (forward, training, _, text, rest) in zip(cases, recorded, strict=True):
        shape, plan = config(name, **changes), plan_of(name, **changes)

        def counts(phase, tokens, shape=shape, plan=plan):
            return Counter(shard_plan.traffic(shape, plan, ranks, batch=BATCH, tokens=tokens, phase=phase).counts)

        assert forward == counts("forward", TOKENS), name  # putting the plan into effect moved nothing
        assert training == counts("training", TOKENS), name
        assert text == counts("prefill", TOKENS) + counts("decode", NEW - 1), name
        assert not rest


def test_ranks_hold_what_shards_says(shipped, outcomes):
    ranks, cases, found, _ = shipped
    rows = [
        (name, changes, plan_of(name, **changes), ranks, by_rank) for (name, changes), by_rank in zip(cases, found, strict=True)
    ]
    for case in ("pieces of unequal size", "rows of unequal size", "packed halves of what is fused", "tied, both by columns"):
        name, changes, edits, _ = UNUSUAL[case]
        rows.append((name, changes, plan_of(name, edits, **changes), 2, outcomes[case]))
    for name, changes, plan, tp, by_rank in rows:
        said = shard_plan.shards(config(name, **changes), plan, tp)
        held = [outcome["held"] for outcome in by_rank]
        assert [row.name for row in said.rows] == list(held[0])
        assert [{row.name: row.shapes[rank] for row in said.rows} for rank in range(tp)] == held
        assert said.parameters == tuple(sum(map(math.prod, shapes.values())) for shapes in held)
        assert said.bytes == tuple(4 * count for count in said.parameters)
        assert said.whole == models.parameter_count(config(name, **changes))


def test_too_few_key_value_heads_are_refused_with_the_valid_degrees_and_both_mends_work():
    """Four ranks, two key-value heads: gathered attention, or every head held twice."""

    def job():
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        mesh, ids = init_device_mesh("cpu", (4,)), torch.arange(3, 27).view(2, 12)
        wanted = build("ernie")(ids).logits

        def apart(model, plan):
            with torch.no_grad():
                return (shard_plan.apply(model, plan, mesh)(ids).logits - wanted).abs().max().item()

        twice, state = build("ernie", num_key_value_heads=4), build("ernie").state_dict()
        for key in state:
            if "k_proj" in key or "v_proj" in key:
                state[key] = state[key].view(2, 8, -1).repeat_interleave(2, 0).flatten(0, 1)
        twice.load_state_dict(state)
        try:
            refused = apart(build("ernie"), plan_of("ernie"))
        except RuntimeError as error:
            refused = str(error)
        return refused, apart(build("ernie"), gathered), apart(twice, plan_of("ernie"))

    gathered = plan_of("ernie", {f"{each}_proj": "colwise_gather_output" for each in "qkv"} | {"o_proj": "rowwise_split_input"})
    problems = shard_plan.check(config("ernie"), plan_of("ernie"), 4)
    assert {each.key.split(".")[-1] for each in problems} == {"k_proj", "v_proj"}
    assert all(each.severity == "error" and "tp one of 1, 2;" in each.mend for each in problems)
    assert shard_plan.check(config("ernie"), gathered, 4) == []
    assert shard_plan.check(config("ernie", num_key_value_heads=4), plan_of("ernie"), 4) == []
    for refused, by_gathering, by_repeating in launch(job, ranks=4, timeout=120).results:
        assert "is invalid for input of size" in refused
        assert max(by_gathering, by_repeating) < 1e-4


def test_random_state_warns_because_ranks_part():
    def job():
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh, ids, found = init_device_mesh("cpu", (2,)), torch.arange(3, 27).view(2, 12), {}
        dropping = shard_plan.apply(build("gpt_neox", hidden_dropout=0.3), plan_of("gpt_neox"), mesh).train()
        drawing = shard_plan.apply(build("ernie"), plan_of("ernie"), mesh)
        for seeds in ("one", "own"):
            torch.manual_seed(dist.get_rank() if seeds == "own" else 7)
            with torch.no_grad():
                found[f"dropout, {seeds}"] = dropping.base_model(ids).last_hidden_state.tolist()
            torch.manual_seed(dist.get_rank() if seeds == "own" else 7)
            options = {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
            found[f"sampling, {seeds}"] = drawing.generate(ids, **options).tolist()
        return found

    first, second = launch(job, ranks=2, timeout=120).results
    assert {what for what in first if first[what] == second[what]} == {"dropout, one", "sampling, one"}
    (problem,) = shard_plan.check(config("gpt_neox", hidden_dropout=0.3), plan_of("gpt_neox"), 2)
    assert (problem.severity, problem.key) == ("warning", "config.hidden_dropout")
    drawing = build("ernie")
    drawing.generation_config.do_sample = True
    (problem,) = shard_plan.check(drawing, plan_of("ernie"), 2)
    assert (problem.severity, problem.key) == ("warning", "generation_config.do_sample")


ARTICLE = {"layers.*.self_attn.k_proj": "colwise", "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
           "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise",
               "layers.*.mlp.down_proj": "rowwise"}  # fmt: skip


def test_keys_that_match_nothing_are_named_with_the_nearest_that_would():
    problems = shard_plan.check(config("ernie"), ARTICLE, 2)
    assert [(each.key, each.mend) for each in problems[:6]] == [(key, repr(f"model.{key}")) for key in ARTICLE]
    assert [each.key for each in problems[6:]] == ["model.layers.*.self_attn.q_proj"]
    misspelt = plan_of("llama", {"q_proj": None, "model.layers.*.self_attn.q_porj": "colwise"})
    (problem,) = shard_plan.check(config("llama"), misspelt, 2)  # the slip alone, not all that would follow from it
    assert problem.mend == "'model.layers.*.self_attn.q_proj'"
    numbered = plan_of("llama", {"model.layers.0.self_attn.q_proj": "colwise"})
    (problem,) = shard_plan.check(config("llama"), numbered, 2)
    assert (problem.key, problem.mend) == ("model.layers.0.self_attn.q_proj", "'model.layers.*.self_attn.q_proj'")
    (problem,) = shard_plan.check(config("llama"), plan_of("llama", {"up_proj": "collwise"}) | {"nothing.like.it": "colwise"}, 2)[
        1:2
    ]
    assert (problem.key, problem.severity) == ("nothing.like.it", "error")


def test_styles_that_do_not_exist_are_named_with_the_nearest_that_does():
    problem = shard_plan.check(config("llama"), plan_of("llama", {"up_proj": "collwise"}), 2)[0]
    assert repr(problem).startswith("error: model.layers.*.mlp.up_proj: transformers has no style 'collwise'. Right: 'colwise'.")


def test_transformers_merges_a_dictionary_with_its_own_plan_and_refuses_unknown_keys():
    def job():
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        def load(plan):
            return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan=plan, tp_size=2))

        folder, ids = models.folder("tiny-ernie"), torch.arange(3, 27).view(2, 12)
        without_q = {f"model.{key}": style for key, style in ARTICLE.items()}
        with torch.no_grad():
            apart = (load(without_q)(ids).logits - models.load("tiny-ernie")[0](ids).logits).abs().max().item()
        try:
            load(ARTICLE)
        except ValueError as error:
            return apart, str(error)

    for apart, refused in launch(job, ranks=2, timeout=120).results:
        assert apart < 1e-4
        assert "match nothing in Ernie4_5ForCausalLM" in refused


def test_one_rank_splits_nothing_and_none_is_no_number_of_ranks():
    import torch

    assert shard_plan.check(config("ernie"), plan_of("ernie"), 1) == []
    assert shard_plan.traffic(config("ernie"), plan_of("ernie"), 1).count == 0
    assert shard_plan.shards(config("ernie"), plan_of("ernie"), 1).parameters == (models.parameter_count(config("ernie")),)
    for ask in (shard_plan.check, shard_plan.shards, shard_plan.traffic):
        for tp in (0, -1, 2.0, "2", None):
            with pytest.raises(ValueError, match="it must be a whole number, at least 1"):
                ask(config("ernie"), {}, tp)
        for plan in (None, "colwise", [("lm_head", "colwise")], {1: "colwise"}):
            with pytest.raises(TypeError, match="a plan is a dictionary"):
                ask(config("ernie"), plan, 2)
        for model in ("ernie", torch.nn.Linear(2, 2), None):
            with pytest.raises(TypeError, match="a model or a configuration of transformers, not for"):
                ask(model, {}, 2)


def test_a_model_without_a_head_is_checked_too():
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        body = AutoModel.from_config(config("llama"))
    assert shard_plan.check(body, shard_plan.published_plan(body), 2) == []


def test_every_degree_that_divides_a_size_is_listed():
    (problem, *_) = shard_plan.check(config("llama", vocab_size=3 * 97), plan_of("llama"), 2)
    assert problem.mend == "tp one of 1, 3, 97, 291"


def test_problems_show_themselves_one_a_line():
    assert repr(shard_plan.check(config("ernie"), plan_of("ernie"), 2)) == "no problem found"
    shown = repr(shard_plan.check(config("ernie"), plan_of("ernie"), 4)).splitlines()
    assert len(shown) == 2
    assert shown[0].startswith(
        "error: model.layers.*.self_attn.k_proj: key-value heads: 2, which 4 ranks cannot share. Right: tp one"
    )


def test_a_layers_traffic_is_what_predict_computes_from_the_shape():
    shape, ends = config("llama"), ("lm_head", "embed_tokens")
    plan = {key: style for key, style in plan_of("llama").items() if not key.endswith(ends)}
    found = shard_plan.traffic(shape, plan, 2, batch=BATCH, tokens=TOKENS, phase="training")
    wanted = predict.step_traffic(shape, predict.Workload(BATCH, TOKENS), predict.Layout(tp=2))
    assert found.count == sum(each.count for each in wanted)
    assert found.bytes == sum(each.count * each.bytes for each in wanted)
    layer = found.per_layer()
    assert sum(each.count for _, each in layer) * SIZES["num_hidden_layers"] == found.count == 2 * (2 + 5)
    assert repr(found).splitlines()[-1] == "14 collectives, 86,016 B handed over by each rank"


@pytest.mark.parametrize(
    ("plan", "phase", "message"),
    [
        ({}, "backward", "phase 'backward': choose one of forward, training, prefill, decode"),
        ({"layers.*.mlp": "colwise"}, "forward", "matches no module"),
        ({"model.layers.*.mlp.up_proj": "grouped_gemm"}, "forward", "does not know what 'grouped_gemm' sends"),
    ],
)
def test_traffic_refuses_what_it_cannot_count(plan, phase, message):
    with pytest.raises(ValueError, match=message):
        shard_plan.traffic(config("llama"), plan, 2, phase=phase)


def test_shards_show_what_a_rank_holds():
    shown = repr(shard_plan.shards(config("llama"), plan_of("llama"), 2))
    assert re.search(r"model\.layers\.\*\.mlp\.down_proj\.weight +2 × 64×96 +rowwise +rank 0 holds 64×48", shown)
    found = shard_plan.shards(config("llama"), plan_of("llama"), 2)
    assert found["lm_head.weight"].shapes == ((64, 64), (64, 64))
    assert found["model.norm.weight"].style is None
    assert list(found) == [row.name for row in found.rows]
    assert "lm_head.weight" in found
    assert "lm_head" not in found
    with pytest.raises(KeyError, match=r"no parameter 'lm_head'; .* such as 'model.embed_tokens.weight'"):
        found["lm_head"]


def test_a_plan_is_drawn_with_a_piece_for_each_rank():
    found = shard_plan.shards(config("ernie"), plan_of("ernie"), 2)
    figure, held = plots.shard_plan(found), found.parameters[0]
    assert figure.finding == f"2 ranks: each holds {held:,} of {found.whole:,} parameters ({held / found.whole:.1%})"
    assert "q_proj colwise" in figure.alt
    assert "embed_tokens embedding_rowwise" in figure.alt
    pieces = [patch for patch in figure.axes[0].patches if patch.get_width() and patch.get_height()]
    assert len(pieces) == 2 * 8  # seven matrices of a layer and the embedding, which is the output matrix too
    assert plots.shard_plan(found).png() == figure.png()
