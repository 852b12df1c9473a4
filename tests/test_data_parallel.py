"""Prompts, padding, greedy batches and the shared queue."""

import json
import subprocess
import sys

import likelihood
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import data_parallel, launch, models


@pytest.fixture(scope="module")
def tiny():
    import torch

    torch.set_num_threads(1)
    return models.load("tiny-ernie")


def random_model():
    """The tiny model with random matrices: its choices depend on all it is given."""
    import torch

    model, _ = models.load("tiny-ernie")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def test_prompts_are_what_their_script_writes(tmp_path):
    script = data_parallel.PROMPTS.parents[1] / "tools" / "make_prompts.py"
    subprocess.run([sys.executable, script, "--file", tmp_path / "again.jsonl"], check=True, capture_output=True, timeout=120)
    assert (tmp_path / "again.jsonl").read_bytes() == data_parallel.PROMPTS.read_bytes()


def test_prompts_begin_sentences_of_the_grammar_and_their_lengths_have_a_long_tail():
    rows = [json.loads(line) for line in data_parallel.PROMPTS.read_text().splitlines()]
    lengths = sorted(row["words"] for row in rows)
    for row in rows:
        assert len(row["prompt"].split()) == row["words"]
        assert len(likelihood.token_log_probabilities(row["prompt"])) == row["words"] + 1  # every word is allowed at its place
    assert sum(lengths[-len(lengths) // 10 :]) > sum(lengths) / 2  # a tenth of the prompts has most of the words
    assert lengths[-1] > 20 * lengths[len(lengths) // 2]
    assert [row["id"] for row in rows] == list(range(len(rows)))
    longest = {source: max(row["words"] for row in rows if row["source"] == source) for source in ("note", "letter", "report")}
    assert all(row["words"] > longest["letter"] for row in rows if row["source"] == "report")


def test_prompts_are_counted():
    assert data_parallel.prompts(3) == data_parallel.prompts()[:3]
    assert data_parallel.prompts(0) == []
    with pytest.raises(ValueError, match=r"999 prompts asked for; prompts.jsonl has 256"):
        data_parallel.prompts(999)


def test_padding_counts_positions():
    found = data_parallel.padding([1, 2, 10], [[0, 1], [2]])
    assert found == (2 * 2 + 10, 13)
    assert found.wasted == pytest.approx(1 / 14)
    assert data_parallel.padding([], []).wasted == 0


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8))
def test_sorting_never_wastes_more_than_any_other_order_where_all_batches_are_full(lengths, size):
    numbers = list(range(len(lengths) // size * size))
    ordered = sorted(numbers, key=lambda number: lengths[number])[::-1]
    batches, better = ([row[i : i + size] for i in range(0, len(row), size)] for row in (numbers, ordered))
    assert data_parallel.padding(lengths, better).computed <= data_parallel.padding(lengths, batches).computed


def test_a_batch_gives_each_prompt_the_continuation_it_gets_alone(tiny):
    model, tokenizer = tiny
    rows = tokenizer([*data_parallel.prompts(6), "these children who wait in the garden"]).input_ids
    anything = random_model()  # what the trained one says does not depend on a word or two beside the prompt
    answers = [data_parallel.complete(anything, [row], [12])[0] for row in rows]
    assert data_parallel.complete(anything, rows, [12] * len(rows)) == answers
    alone = [data_parallel.complete(model, [row], [12])[0] for row in rows]
    assert data_parallel.complete(model, rows, [12] * len(rows)) == alone
    assert any(tokens[-1] == model.config.eos_token_id for tokens in alone)
    assert all(model.config.eos_token_id not in tokens[:-1] for tokens in alone)
    short = data_parallel.complete(model, rows, [1, 12, 3, 12, 12, 12, 12])  # each its own limit
    assert short[0] == alone[0][:1]
    assert short[2] == alone[2][:3]
    assert short[3:] == alone[3:]


def test_continuations_are_those_of_transformers(tiny):
    model, tokenizer = tiny
    text = "today the geese"
    wanted = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    assert data_parallel.complete(model, [tokenizer(text).input_ids], [12])[0] == wanted[0, 4:].tolist()


def test_what_cannot_be_completed_is_an_error_and_nothing_is_nothing(tiny):
    model, _ = tiny
    assert data_parallel.complete(model, [], []) == []
    with pytest.raises(ValueError, match=r"4,090 tokens and 7 new ones: .* at most 4,096"):
        data_parallel.complete(model, [[5], [5] * 4090], [1, 7])
    with pytest.raises(ValueError, match="at least 1 token"):
        data_parallel.complete(model, [[]], [1])


def test_a_text_ends_where_generate_ends_it():
    model = random_model()
    row = [5, 6, 7]
    text = data_parallel.complete(model, [row], [12])[0]
    model.generation_config.eos_token_id = [model.config.eos_token_id, text[3]]
    assert data_parallel.end_tokens(model) == {model.config.eos_token_id, text[3]}
    assert data_parallel.complete(model, [row, [8, 9]], [12, 12])[0] == text[: text.index(text[3]) + 1]
    model.generation_config.eos_token_id = None
    assert data_parallel.complete(model, [row], [12])[0][: len(text)] == text


def test_rows_that_fit_only_each_for_itself_are_completed_one_by_one():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=49, eos_token_id=49)).eval()
    model.generation_config.eos_token_id = None
    rows, new = [[1] * 30, [2] * 3], [2, 25]
    found = data_parallel.complete(model, rows, new)
    assert [len(tokens) for tokens in found] == new
    assert found == [data_parallel.complete(model, [row], [most])[0] for row, most in zip(rows, new, strict=True)]


def test_ranks_share_a_queue():
    def take():
        first = list(data_parallel.WorkQueue("first", 20))
        return first, list(data_parallel.WorkQueue("second", 2)), list(data_parallel.WorkQueue("none", 0))

    results = launch(take, ranks=3, timeout=120).results
    assert sorted(number for first, _, _ in results for number in first) == list(range(20))
    assert sorted(number for _, second, _ in results for number in second) == [0, 1]
    assert all(none == [] for _, _, none in results)
    assert all(first == sorted(first) for first, _, _ in results)
