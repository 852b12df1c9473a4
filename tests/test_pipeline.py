"""Stages equal to the unsplit model, schedules against the published formulas, the recorded order of events."""

import itertools
import re
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from helpers import launch, machine, models, pipeline, plots, widgets
from helpers.measuring import clock

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
ROWS, LENGTH, MICRO_BATCHES = 8, 24, 4


def token_ids():
    return torch.randint(10, 300, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def job(schedule, parts):
    """One step: logits and loss of the last stage, all gradients under their names in the whole model."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), machine.device()
    model, _ = models.load("tiny-ernie")
    module = pipeline.Stage(model, parts, rank)
    stage = pipeline.RecordedStage(module, rank, world, device)
    ids = token_ids()

    def loss_of(logits, targets):
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (ROWS * LENGTH)

    runner = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_of, scale_grads=False)
    losses = []
    with clock.region("step"):
        inputs = [ids[:, :-1]] if rank == 0 else []
        logits = runner.step(*inputs, target=ids[:, 1:] if stage.is_last else None, losses=losses if stage.is_last else None)
    ends = dist.new_group([0, world - 1])
    for tied in (module.embedding, module.head):
        if tied is not None:
            dist.all_reduce(tied.weight.grad, group=ends)
    first = parts[rank].start
    names = {name: re.sub(r"layers\.(\d+)", lambda found: f"layers.{first + int(found[1])}", name) for name in gradients(module)}
    return logits, sum(map(float, losses)), {names[name]: gradient for name, gradient in gradients(module).items()}


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.fixture(scope="module")
def whole():
    torch.set_num_threads(1)
    model, _ = models.load("tiny-ernie")
    ids = token_ids()
    logits = model(input_ids=ids[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.item(), gradients(model)


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("GPipe", [range(2), range(2, 4)]),
        ("1F1B", [range(3), range(3, 4)]),
        ("GPipe", [range(2), range(2, 3), range(3, 4), range(4, 4)]),
        ("1F1B", [range(1), range(1, 2), range(2, 3), range(3, 4)]),
    ],
)
def test_output_and_gradients_are_those_of_the_unsplit_model(whole, schedule, parts):
    logits, loss, right = whole
    run = launch(job, schedule, parts, ranks=len(parts), backend="gloo", timeout=120)
    torch.testing.assert_close(run.results[-1][0], logits, rtol=0, atol=1e-5)
    assert run.results[-1][1] == pytest.approx(loss, abs=1e-5)
    found = {}
    for _, _, gradient in run.results:
        for name, value in gradient.items():
            name = re.sub(r"^body\.", "model.", name).replace("embedding.weight", "model.embed_tokens.weight")
            name = name.replace("head.weight", "model.embed_tokens.weight")
            assert torch.equal(found.setdefault(name, value), value)  # the tied matrix has the same gradient on both ends
    assert found.keys() == right.keys()
    for name, value in found.items():
        assert (value - right[name]).norm() < 1e-5 * right[name].norm(), name

    order = pipeline.recorded(run)
    planned = pipeline.order(schedule, len(parts), MICRO_BATCHES)
    assert [[str(each) for each in row] for row in order] == [[str(each) for each in row] for row in planned]
    slots = pipeline.place([[str(each) for each in row] for row in order])  # the recorded order of events, in slots
    p, m = len(parts), MICRO_BATCHES
    assert pipeline.idle(slots) == 3 * p * (p - 1)
    assert pipeline.bubble(slots) == (p - 1) / (m + p - 1)
    for row in order:
        assert all(first.end <= second.start for first, second in itertools.pairwise(row))


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 8), st.integers(0, 24), st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_is_that_of_the_formula(schedule, p, more, forward, backward):
    m = p + more
    placed = pipeline.place(pipeline.order(schedule, p, m), {"F": forward, "B": backward})
    busy = p * m * (forward + backward)
    assert Fraction(pipeline.idle(placed), busy + pipeline.idle(placed)) == Fraction(p - 1, m + p - 1)
    kept = [pipeline.in_flight(row) for row in placed]
    assert kept == [m] * p if schedule == "GPipe" else kept == [p - rank for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16)])
def test_interleaving_halves_the_idle_slots_and_zero_bubble_leaves_fewer(p, m):
    inter, zero, plain = (pipeline.place(pipeline.order(name, p, m)) for name in ("Interleaved1F1B", "ZBVZeroBubble", "1F1B"))
    assert pipeline.bubble(inter) == pytest.approx((p - 1) / (2 * m + p - 1))  # two stages a rank
    assert pipeline.bubble(zero) < pipeline.bubble(inter) < pipeline.bubble(plain)
    for placed, parts in ((inter, 2), (zero, 3)):
        assert sum(map(len, placed)) == parts * 2 * p * m  # every operation once


def test_times_and_messages_move_what_depends_on_them():
    placed = pipeline.place([["F0", "F1"], ["F0", "F1"]], lambda each: 2 if each.stage else 1, message=0.5)
    assert [(each.start, each.end) for each in placed[1]] == [(1.5, 3.5), (3.5, 5.5)]
    assert [(each.start, each.end) for each in placed[0]] == [(0, 1), (1, 2)]


def test_what_stays_on_a_rank_needs_no_message():
    ((first, second),) = pipeline.place([["F0", pipeline.Operation("F", 0, 1)]], {"F": 1}, message=5)
    assert (first.end, second.start, second.end) == (1, 1, 2)


def test_activations_are_kept_until_the_gradient_of_the_weights():
    assert pipeline.in_flight(["F0", "I0", "F1", "W0"]) == 2
    assert pipeline.in_flight(["F0", "I0", "W0", "F1"]) == 1


def test_an_order_that_cannot_run_names_who_waits_for_what():
    with pytest.raises(ValueError, match="rank 0 waits for ever: B0 needs the gradient of micro-batch 0 from stage 1"):
        pipeline.place([["F0", "B0", "F1", "B1"], ["F1", "B1", "F0", "B0"]])
    with pytest.raises(ValueError, match=r"'forward 0' is no operation: write \"F0\""):
        pipeline.place([["forward 0"]])


def test_wrong_schedules_are_refused():
    with pytest.raises(ValueError, match="4 ranks and 3 micro-batches: 1F1B needs at least as many micro-batches as ranks"):
        pipeline.order("1F1B", 4, 3)
    with pytest.raises(ValueError, match="choose one of GPipe, 1F1B"):
        pipeline.order("gpipe", 4, 4)
    with pytest.raises(ValueError, match=r"2\.0 ranks and 4 micro-batches: both must be whole numbers"):
        pipeline.order("GPipe", 2.0, 4)


def test_what_has_no_times_or_no_duration_is_refused():
    for measure in (pipeline.idle, pipeline.bubble):
        for placed in (pipeline.order("1F1B", 2, 4), [["F0", "B0"]], [[]]):
            with pytest.raises(ValueError, match="no times yet"):
                measure(placed)
    with pytest.raises(ValueError, match="leaves out B"):
        pipeline.place([["F0", "B0"]], {"F": 1})
    with pytest.raises(ValueError, match="'X' is no operation"):
        pipeline.in_flight(["F0", "X"])


@given(st.lists(st.integers(1, 9), min_size=4, max_size=9), st.integers(2, 4))
def test_no_other_cut_has_a_cheaper_costliest_stage(costs, stages):
    layers = len(costs) - 2
    if stages > layers:
        with pytest.raises(ValueError, match="at most one a layer"):
            pipeline.balance(costs, stages)
        return
    parts = pipeline.balance(costs, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))

    def worst(ends):
        bounds = [0, *ends, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    def cuts(left, first):
        return [()] if not left else [(end, *rest) for end in range(first, len(costs)) for rest in cuts(left - 1, end + 1)]

    least = min(worst(ends) for ends in cuts(stages - 1, 2))
    assert worst([part.stop + 1 for part in parts[:-1]]) == least


def test_a_large_vocabulary_weighs_as_much_as_layers():
    shape = models.config("ernie-0.3b")
    costs = pipeline.costs(shape)
    assert costs[0] == 0
    assert costs[-1] == shape.vocab_size * shape.hidden_size
    assert pipeline.balance(costs, 2) == [range(13), range(13, 18)]
    experts = transformers.MixtralConfig(num_local_experts=4)
    with pytest.raises(ValueError, match="the work of 4 experts depends on the tokens"):
        pipeline.costs(experts)


@pytest.mark.parametrize("size", [2, 5, 10])
def test_a_thousand_layers_are_cut_too(size):
    assert pipeline.balance([0] + [1] * 1000 + [0], 1000 // size) == [range(i, i + size) for i in range(0, 1000, size)]


def test_of_equal_cuts_the_one_with_earlier_ends_is_taken():
    assert pipeline.balance([0, 3, 1, 1, 3, 0], 3) == [range(1), range(1, 3), range(3, 4)]
    assert pipeline.balance([0, 2, 0, 2, 0], 2) == [range(1), range(1, 3)]


def test_what_cannot_be_cut_is_refused():
    model, _ = models.load("tiny-ernie", weights="random")
    with pytest.raises(ValueError, match="together they must be the layers 0 to 3"):
        pipeline.Stage(model, [range(2), range(3, 4)], 0)
    other = transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9, n_positions=8)
    )
    with pytest.raises(ValueError, match="GPT2Model has no embed_tokens, layers, norm"):
        pipeline.Stage(other, [range(1)], 0)


def small(kind, **settings):
    """A random model of 4 layers whose values are large enough for every fault to show."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    tokens = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = {**sizes, **tokens, "num_key_value_heads": 2, **settings}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),  # windows in layers 2 and 3 only
        ("Gemma2", {"sliding_window": 4}),  # logits have a soft limit
        ("Exaone4", {"sliding_window": 4}),
        ("Cohere", {}),  # logits are scaled
        ("Cohere2", {"sliding_window": 4}),
        ("Granite", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    ],
)
def test_layers_that_differ_and_scaled_logits_are_those_of_the_whole_model(kind, settings):
    parts = [range(1), range(1, 4), range(4, 4)]
    model, ids = small(kind, **settings), torch.arange(1, 25).view(2, 12)
    right = model(ids).logits
    right.square().sum().backward()
    stages = [pipeline.Stage(small(kind, **settings), parts, index) for index in range(3)]
    state = ids
    for stage in stages:
        state = stage(state)
    torch.testing.assert_close(state, right, rtol=1e-4, atol=1e-5)
    state.square().sum().backward()
    for part, stage in zip(parts, stages, strict=True):
        for place, layer in enumerate(part):
            expected = dict(model.base_model.layers[layer].named_parameters())
            for name, parameter in stage.body.layers[place].named_parameters():
                difference = (parameter.grad - expected[name].grad).norm()
                assert difference <= 1e-4 * expected[name].grad.norm(), f"{name} of layer {layer}"
    caches = [transformers.DynamicCache() for _ in parts]
    with torch.no_grad():
        for state in ids.split([6, 5, 1], dim=1):
            for stage, cache in zip(stages, caches, strict=True):
                state = stage(state, cache)
    torch.testing.assert_close(state, right[:, -1:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (
            "Granite",
            {"embedding_multiplier": 2.0},
            r"stage 1 of GraniteModel is not .* something else .*'embedding_multiplier': 2",
        ),
        ("NanoChat", {}, "stage 0 of NanoChatModel is not .* something else"),  # it normalises before its first layer
        ("Qwen3Next", {}, "stage 0 of Qwen3NextModel is not .* no attribute 'self_attn'"),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_model_that_does_more_than_to_run_its_layers_is_refused_on_every_rank(kind, settings, said, index):
    with pytest.raises(ValueError, match=said):
        pipeline.Stage(small(kind, **settings), [range(1), range(1, 4)], index)


def test_a_model_stays_in_the_mode_that_it_was_in():
    for training in (False, True):
        stage = pipeline.Stage(small("Llama").train(training), [range(4)], 0)
        assert stage.body.layers[0].training is training


def test_each_stage_keeps_its_own_keys_and_values():
    ids = token_ids()[:1, :6]
    model, _ = models.load("tiny-ernie")
    with torch.no_grad():
        right = model(input_ids=ids).logits
        parts = [range(1), range(1, 4)]
        stages = [pipeline.Stage(models.load("tiny-ernie")[0], parts, index) for index in range(2)]
        caches = [transformers.DynamicCache(), transformers.DynamicCache()]
        for piece in ids.split([4, 1, 1], dim=1):
            for stage, cache in zip(stages, caches, strict=True):
                piece = stage(piece, cache)
    torch.testing.assert_close(piece, right[:, -1:], rtol=0, atol=1e-4)
    assert [len(cache.layers) for cache in caches] == [1, 3]
    assert {cache.get_seq_length() for cache in caches} == {6}


def test_a_run_without_steps_is_refused():
    run = launch(lambda: None, ranks=1, backend="gloo")
    with pytest.raises(ValueError, match='rank 0 has 0 regions "step"'):
        pipeline.recorded(run)


def test_the_picture_has_a_box_per_operation_and_says_what_is_idle():
    def draw(schedule="1F1B", ranks=4, micro_batches=8):
        return plots.schedule(pipeline.place(pipeline.order(schedule, ranks, micro_batches)), f"{schedule}, {ranks} ranks")

    explorer = widgets.explore(draw, schedule=list(pipeline.SCHEDULES), ranks=(2, 6), micro_batches=(1, 12))
    assert explorer.controls["schedule"].value == "1F1B"
    assert len(explorer.figure.axes[0].patches) == 2 * 4 * 8
    assert explorer.figure.finding.startswith("27.3 % of all ranks' time is idle: rank 0 idle 27 %")
    explorer.controls["micro_batches"].value = 2
    assert "1F1B needs at least as many micro-batches as ranks" in explorer.problem.value
    explorer.controls["schedule"].value = "ZBVZeroBubble"
    assert explorer.problem.value == ""
    assert len(explorer.figure.axes[0].patches) == 3 * 2 * 4 * 2


def test_a_stage_keeps_what_the_learner_does_with_the_model():
    parts = [range(2), range(2, 4)]
    frozen, _ = models.load("tiny-ernie")
    frozen.train().model.layers[0].eval()
    first = pipeline.Stage(frozen, parts, 0)
    assert [layer.training for layer in first.body.layers] == [False, True]

    last = pipeline.Stage(models.load("tiny-ernie")[0], [[0, 1], [2, 3]], 1)  # parts may be lists
    last.head = torch.nn.Linear(256, 7)
    assert last(torch.randn(1, 4, 256)).shape == (1, 4, 7)

    broken, _ = models.load("tiny-ernie")
    with torch.no_grad():
        broken.model.layers[3].mlp.down_proj.weight[0, 0] = torch.nan  # a NaN is no reason to refuse
    assert pipeline.Stage(broken, parts, 1)(torch.randn(1, 4, 256)).isnan().any()

    empty = models.load("tiny-ernie", device="meta")[0]
    assert pipeline.Stage(empty, parts, 0).embedding.weight.is_meta  # without numbers there is nothing to compare


def test_a_model_that_is_refused_is_left_as_it_was(monkeypatch):
    model, _ = models.load("tiny-ernie")
    model.train()
    monkeypatch.setattr(type(model.model.norm), "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.Stage(model, [range(2), range(2, 4)], 0)
    assert model.training
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
