"""Placements: ranges, bad maps and their messages, what happens without the check; every template runs; evaluation."""

import contextlib
import io
import logging
import sys
from itertools import pairwise

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig
from transformers.utils import logging as transformers_logging

from helpers import machine, models, offload

FAST = 0 if machine.torch_cuda() and machine.gpus() else "cpu"
GOOD = {"model.embed_tokens": FAST, "model.layers.0-3": FAST, "model.norm": FAST, "lm_head": FAST}
PROMPT = [1, 20, 30, 40, 50]
TINY = str(models.folder("tiny-ernie"))


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny-ernie")[0]


@pytest.fixture(scope="module", autouse=True)
def _no_noise():
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    yield
    logging.getLogger("accelerate").setLevel(logging.NOTSET)
    transformers_logging.enable_progress_bar()


def changed(without=(), **tiers):
    """The good map without some keys and with others: `changed({"lm_head"}, head="disk")`."""
    return {key: tier for key, tier in GOOD.items() if key not in without} | tiers


LAYERS, HEAD, EMBEDDING = {"model.layers.0-3"}, {"lm_head"}, {"model.embed_tokens"}
PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
BAD = {  # name -> (map, the key it is about, what the message must say of it, the mend)
    "a strategy": ("auto", "auto", "is no map", "infer_auto_device_map"),
    "empty": ({}, {}, "is no map", "model.layers.0-3"),
    "unknown layer": (changed(LAYERS, **{"model.layers.0-2": FAST, "model.layers.7": FAST}), "model.layers.7", "no such module",
                      "model.layers"),
    "misspelt": (changed(LAYERS, **{"model.layer.0-3": FAST}), "model.layer.0-3", "no such range of modules", "model.layers.0"),
    "prefix left out": (changed(LAYERS, **{"layers.0-3": FAST}), "layers.0-3", "no such range", "model.layers.0"),
    "another model's names": (changed(LAYERS, **{"transformer.h.0-3": FAST}), "transformer.h.0-3", "no such range",
                              "named_modules"),
    "beyond the last": (changed(LAYERS, **{"model.layers.0-31": FAST}), "model.layers.0-31", "goes beyond the last",
                        "model.layers.0-3"),
    "backwards": (changed(LAYERS, **{"model.layers.3-0": FAST}), "model.layers.3-0", "runs backwards", "model.layers.0-3"),
    "no end": (changed(LAYERS, **{"model.layers.0-": FAST}), "model.layers.0-", "is no range", "first and last included"),
    "a star": (changed(LAYERS, **{"model.layers.*": FAST}), "model.layers.*", "is no range", "first and last included"),
    "not a name": (changed(LAYERS, **{"model.layers.0-2": FAST}) | {3: FAST}, 3, "is no name", "model.layers.0-3"),
    "a tensor": (changed({"model.norm"}, **{"model.norm.weight": FAST}), "model.norm.weight", "names a tensor", "model.norm"),
    "ranges overlap": (changed(LAYERS, **{"model.layers.0-2": FAST, "model.layers.2-3": "disk"}), "model.layers.2-3",
                       "overlaps with 'model.layers.0-2'", "in one key"),
    "inside another": (changed(**{"model.layers": FAST}), "model.layers", "overlaps with 'model.layers.0-3'", "in one key"),
    "all and a part": ({"": FAST, "model.layers.3": "disk"}, "model.layers.3", "overlaps with ''", "in one key"),
    "head left out": (changed(HEAD), "lm_head", "has no tier", "a key for each"),
    "layers left out": (changed(LAYERS, **{"model.layers.0-1": FAST}), "model.layers.2-3", "has no tier", "a key for each"),
    "a layer cut": (changed(LAYERS, **{"model.layers.0-2": FAST} | {f"model.layers.3.{part}": FAST for part in PARTS}
                            | {"model.layers.3.mlp": "disk"}), "model.layers.3", "is cut", "one tier"),
    "tie split": (changed(HEAD, lm_head="disk"), "lm_head", "shares its weight with 'model.embed_tokens'", "both on"),
    "tie on the disk": (changed(HEAD | EMBEDDING, **{"model.embed_tokens": "disk", "lm_head": "disk"}), "model.embed_tokens",
                        "under one of the names", "both on a device"),
    "only the disk": ({"": "disk"}, "all", "is on the disk", "the norm"),
    "no such GPU": (changed(HEAD, lm_head=99), "lm_head", "GPU 99 is not on this machine",
                    "0 to" if FAST == 0 else "no GPU here"),
    "a list as tier": (changed(HEAD, lm_head=["cpu"]), "lm_head", "['cpu'] is no tier", '"cpu"'),
    "far beyond the last": (changed(LAYERS, **{"model.layers.9-12": FAST}), "model.layers.9-12", "goes beyond the last",
                            "model.layers.0-3"),
    "no tier": (changed(HEAD, lm_head="gpu"), "lm_head", "'gpu' is no tier", '"disk"'),
    "a truth": (changed(HEAD, lm_head=True), "lm_head", "True is no tier", '"cpu"'),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_map_gets_its_own_message(name, tiny):
    placement, key, reason, mend = BAD[name]
    found = [problem for problem in offload.problems(tiny, placement) if problem.key == key]
    assert any(reason in problem.reason and mend in problem.mend for problem in found), offload.problems(tiny, placement)
    with pytest.raises(ValueError, match="this placement cannot be used") as error:
        offload.device_map(tiny, placement)
    assert reason in str(error.value)


def test_messages_tell_twenty_kinds_of_bad_maps_apart(tiny):
    found = [(key, offload.problems(tiny, placement)) for placement, key, _, _ in BAD.values()]
    assert len({(each.reason, each.mend) for key, problems in found for each in problems if each.key == key}) >= 20


@pytest.mark.parametrize("way", ["0:3", "0–3", "0..3", "[0-3]", "0,1,2,3", "0 - 3", "0-3.mlp"])
def test_ranges_written_in_other_ways_get_the_way_that_is_known(way, tiny):
    found = [each for each in offload.problems(tiny, changed(LAYERS, **{f"model.layers.{way}": FAST})) if way in str(each.key)]
    assert [each.mend for each in found] == ['"model.layers.0-3", first and last included']


def test_a_gpu_has_one_spelling(tiny):
    tied = {"model.embed_tokens": 0, "model.layers": "cuda:0", "model.norm": 0, "lm_head": "cuda:0"}
    assert offload.problems(tiny, tied, gpus=1) == []
    parts = dict(zip((f"model.layers.3.{part}" for part in PARTS), (0, "cuda:0", 0, "cuda:0"), strict=True))
    assert offload.problems(tiny, dict.fromkeys(set(GOOD) - LAYERS, 0) | {"model.layers.0-2": 0} | parts, gpus=1) == []


@pytest.mark.parametrize(
    ("places", "across"), [((0, 1), True), ((0, "cpu"), False), (("cpu", "disk"), False), ((1, "disk"), True)]
)
def test_a_residual_adds_across_only_where_two_devices_compute(places, across, tiny):
    parts = dict.fromkeys((f"model.layers.3.{part}" for part in PARTS), places[0]) | {"model.layers.3.mlp": places[1]}
    first = 0 if places != ("cpu", "disk") else "cpu"
    whole = {key: first for key in GOOD if key not in LAYERS} | {"model.layers.0-2": first}
    (found,) = offload.problems(tiny, whole | parts, gpus=2)
    assert found.key == "model.layers.3"
    assert found.reason.startswith("is cut: parts on ")
    assert ("residual" in found.reason) is across


def test_a_good_map_has_no_problem_and_its_ranges_are_written_out(tiny):
    assert offload.problems(tiny, GOOD) == []
    layers = {f"model.layers.{number}": FAST for number in range(4)}
    assert offload.device_map(tiny, GOOD) == {"model.embed_tokens": FAST, **layers, "model.norm": FAST, "lm_head": FAST}


@pytest.mark.parametrize(
    "placement",
    [
        {"": FAST},
        {"model": FAST, "lm_head": FAST},
        changed(LAYERS, **{"model.layers": "disk"}),
        changed(**{"model.rotary_emb": "cpu"}),
    ],
)
def test_maps_that_accelerate_takes_are_taken(placement, tiny, tmp_path):
    assert offload.problems(tiny, placement) == []
    model = offload.load(models.folder("tiny-ernie"), placement, tmp_path)
    assert torch.equal(model(torch.tensor([PROMPT])).logits.cpu(), tiny(torch.tensor([PROMPT])).logits)


def test_all_problems_are_found_at_once(tiny):
    found = offload.problems(tiny, {"model.layers.0-9": "gpu", "norm": FAST})
    assert {str(problem.key) for problem in found} >= {"model.layers.0-9", "norm"}
    assert len(found) >= 4


def test_a_map_can_be_judged_for_another_machine(tiny):
    two = changed(LAYERS, **{"model.layers.0-1": 0, "model.layers.2-3": "cuda:1"}) | dict.fromkeys(HEAD | EMBEDDING, 0)
    assert offload.problems(tiny, two, gpus=2) == []
    assert [problem.key for problem in offload.problems(tiny, two, gpus=1)] == ["model.layers.2-3"]


def test_an_empty_model_can_be_asked(tiny):
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(tiny.config)
    assert offload.problems(empty, GOOD) == []
    assert any("shares its weight" in problem.reason for problem in offload.problems(empty, BAD["tie split"][0]))


def unchecked(name, way, tiny, folder):
    """The model as `way` loads it by a bad map, ranges written out as a careful author would."""
    placement = {}
    for key, tier in BAD[name][0].items():
        stem, _, numbers = key.rpartition(".")
        first, dash, last = numbers.partition("-")
        placement |= dict.fromkeys((f"{stem}.{n}" for n in range(int(first), int(last) + 1)) if dash else [key], tier)
    with contextlib.redirect_stderr(io.StringIO()):
        if way == "transformers":
            return AutoModelForCausalLM.from_pretrained(TINY, device_map=placement, offload_folder=str(folder))
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(tiny.config)
        model.tie_weights()
        return load_checkpoint_and_dispatch(model, TINY, placement, offload_folder=str(folder))


@pytest.mark.parametrize(
    ("name", "way", "error"),
    [
        ("layers left out", "accelerate", "doesn't have any device set"),
        ("prefix left out", "accelerate", "doesn't have any device set"),
        ("all and a part", "accelerate", "on the meta device"),
        ("tie on the disk", "accelerate", "lm_head.weight"),
        ("tie split", "transformers", "lm_head.weight"),
        ("only the disk", "accelerate", "device disk is invalid"),
    ],
)
def test_without_the_check_it_fails_somewhere_inside(name, way, error, tiny, tmp_path):
    with pytest.raises(Exception, match=error):
        unchecked(name, way, tiny, tmp_path)(torch.tensor([PROMPT]))


@pytest.mark.parametrize("name", ["layers left out", "prefix left out", "head left out"])
def test_without_the_check_transformers_runs_what_is_missing_on_the_cpu(name, tiny, tmp_path):
    model = unchecked(name, "transformers", tiny, tmp_path)
    assert "cpu" in {each.device.type for each in model.parameters()}


def test_without_the_check_a_split_tie_is_lost(tiny, tmp_path):
    model = unchecked("tie split", "accelerate", tiny, tmp_path)
    model(torch.tensor([PROMPT]))
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.parametrize("name", offload.templates())
def test_every_template_is_valid_and_runs(name, tiny, tmp_path):
    made = offload.template(name)
    placement = made.placement(tiny)
    assert offload.problems(tiny, placement) == []
    model = offload.load(models.folder("tiny-ernie"), placement, tmp_path)
    assert torch.equal(model(torch.tensor([PROMPT])).logits.cpu(), tiny(torch.tensor([PROMPT])).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) or placement["lm_head"] not in ("cpu", "disk", 0)
    held = offload.tiers(tiny, placement)
    assert sum(held.values()) == 4 * models.parameter_count("tiny-ernie")
    assert len(made.use) > 30


SHAPES = {
    "GPT-2": GPT2Config(n_layer=5, n_embd=32, n_head=2, vocab_size=64, n_positions=16),
    "OPT": OPTConfig(
        hidden_size=32, num_hidden_layers=3, ffn_dim=64, num_attention_heads=2, vocab_size=64, word_embed_proj_dim=32
    ),
    "Llama": LlamaConfig(hidden_size=32, num_hidden_layers=7, intermediate_size=64, num_attention_heads=2, vocab_size=64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", offload.templates())
def test_templates_fit_other_decoders(name, shape, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape]).eval()
    placement = offload.template(name).placement(model)
    assert offload.problems(model, placement) == []
    assert sum(offload.tiers(model, placement).values()) == sum(each.nbytes for each in model.parameters())
    if name in ("three_tiers", "layers_on_disk"):
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(tmp_path / "model")
        loaded = offload.load(tmp_path / "model", placement, tmp_path / "disk")
        assert torch.equal(loaded(torch.tensor([[1, 2, 3]])).logits.cpu(), model(torch.tensor([[1, 2, 3]])).logits)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_templates_suit_machines_with_gpus(count, monkeypatch):
    monkeypatch.setattr(sys.modules["helpers.offload.templates"], "gpu_count", lambda: count)
    for layers in (2, 3, 4, 7, 12, 32):
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=layers, **shape))
        for name in offload.templates():
            placement = offload.template(name).placement(model)
            assert offload.problems(model, placement, gpus=count) == [], (name, layers)
            if name == "several_gpus":
                assert len({tier for key, tier in placement.items() if ".layers." in key}) == min(count, layers)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("use: x\nlayers: {fast: 1}\n", "embedding\n  Field required"),
        ("use: x\nembedding: fast\nrest: fast\nhead: fast\nnorm: cpu\nlayers: {fast: 1}\n", "norm\n  Extra inputs"),
        ("- 1\n", "should be a valid dictionary"),
        ("use: x\nembedding: fast\nrest: fast\nhead: fast\nlayers: {fast: 0.5}\n", "add up to 0.5"),
        (
            "use: x\nembedding: fast\nrest: fast\nhead: fast\nlayers: {fast: 2, disk: -1}\n",
            "disk\n  Input should be greater than 0",
        ),
        ("use: x\nembedding: fast\nrest: fast\nhead: fast\nlayers: fast\n", "layers\n  Input should be a valid dictionary"),
        (
            "use: x\nembedding: fast\nrest: nvme\nhead: fast\nlayers: {fast: 1}\n",
            "rest\n  Input should be 'fast', 'gpus', 'cpu' or 'disk' .*'nvme'",
        ),
        (
            "use: x\nembedding: fast\nrest: fast\nhead: fast\nlayers: {hot: 1}\n",
            "layers.hot.*\n  Input should be 'fast', 'gpus', 'cpu' or 'disk'",
        ),
    ],
)
def test_a_bad_template_says_what_is_wrong(page, said, tmp_path):
    (tmp_path / "mine.yaml").write_text(page)
    with pytest.raises(ValueError, match=said):
        offload.template("mine", tmp_path)


def test_an_unknown_template_is_refused():
    with pytest.raises(ValueError, match="there is no template 'fastest'; there are"):
        offload.template("fastest")


def test_evaluation_counts_tokens_memory_and_time(tiny, tmp_path):
    placement = offload.template("layers_on_disk").placement(tiny)
    found = offload.evaluate(offload.load(models.folder("tiny-ernie"), placement, tmp_path), [PROMPT, PROMPT[:3]], new_tokens=4)
    whole = offload.evaluate(tiny, [PROMPT, PROMPT[:3]], new_tokens=4)
    ids = tiny.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert found.tokens == whole.tokens
    assert list(found.tokens[0]) == ids[0, len(PROMPT) :].tolist()
    assert len(found.first_token) == 2
    assert len(found.per_token) == 6
    assert found.throughput == pytest.approx(8 / (sum(found.first_token) + sum(found.per_token)))
    assert min(found.per_token) <= found.percentile(0) <= found.latency <= found.percentile(90) <= max(found.per_token)
    held, layer = offload.tiers(tiny, placement), sum(each.nbytes for each in tiny.model.layers[0].parameters())
    if FAST == "cpu":
        assert held["cpu"] < found.peak["cpu"] < held["cpu"] + layer + 2**20  # never more than a layer's weights at a time
        assert whole.peak["cpu"] > sum(held.values())
    assert "tokens/s" in repr(found)


def test_before_each_token_something_can_be_done(tiny):
    calls = []
    offload.evaluate(tiny, [PROMPT], new_tokens=3, warmup=1, before=lambda: calls.append(0))
    assert len(calls) == 1 + 3 + 3  # warm-up, the timed pass, the pass that looks at memory
    assert offload.evaluate(tiny, [PROMPT], new_tokens=3, warmup=0, before=lambda: calls.append(0), memory=False).peak == {}
    assert len(calls) == 7 + 3


@pytest.mark.skipif(FAST != "cpu", reason="a GPU's allocator hands out more than tensors take")
def test_the_peak_is_that_of_the_longest_prompt_and_all_its_tokens(tiny):
    prompts = [PROMPT, list(range(3, 103))]
    peaks = [offload.evaluate(tiny, order, new_tokens=2).peak for order in (prompts, prompts[::-1])]
    assert peaks[0] == peaks[1]
    few, many = (offload.evaluate(tiny, [PROMPT], new_tokens=count, warmup=0).peak["cpu"] for count in (2, 80))
    assert many > few


@pytest.mark.parametrize(("prompts", "count"), [([], 4), ([[]], 4), ([PROMPT], 1)])
def test_nothing_to_evaluate_is_refused(prompts, count, tiny):
    with pytest.raises(ValueError, match="are needed"):
        offload.evaluate(tiny, prompts, new_tokens=count)


def test_what_is_offloaded_is_brought_once_and_let_go_again(tiny, tmp_path):
    placement = offload.template("half_on_disk").placement(tiny)
    model = offload.load(models.folder("tiny-ernie"), placement, tmp_path)
    for _ in range(2):
        offload.evict(tmp_path)
        size, seconds = offload.bring(model)
        assert size == offload.tiers(tiny, placement)["disk"]
        assert seconds > 0
    assert {each.device.type for each in model.model.layers[3].parameters()} == {"meta"}
    assert offload.bring(tiny) == (0, 0.0)


def test_ranges_are_named_as_ranges(tiny):
    missing = next(p for p in offload.problems(tiny, {"model.layers.1": FAST}) if "has no tier" in p.reason)
    assert missing.key == "model.embed_tokens, model.layers.0, model.layers.2-3, model.norm, lm_head"
    assert all(a < b for a, b in pairwise(sorted(offload.templates())))
