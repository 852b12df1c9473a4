"""Sentences drawn from a grammar with known probabilities, so that the best reachable loss is a known number.

`data/corpus/grammar.yaml` holds the grammar. It is LL(1): the next word alone decides which rule is used, so each sentence has
exactly one derivation (tools/likelihood.py finds it). All figures are in nats (natural logarithms); the end of a sentence
counts as a token, the beginning does not, because it is given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from helpers import record

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

END = "</s>"  # the token that ends each sentence
IGNORED = -100  # the label that PyTorch's cross entropy skips


class Rule(NamedTuple):
    """One expansion of a symbol and its probability among the expansions of that symbol."""

    probability: float
    expansion: tuple[str, ...]


class Entropy(NamedTuple):
    """What a perfect model's loss converges to: nats per token, nats per sentence, and tokens per sentence (end included)."""

    per_token: float
    per_sentence: float
    tokens_per_sentence: float


class Batch(NamedTuple):
    """Token ids and labels of `count` sentences, both int64 of shape (count, T); labels are -100 at padding."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@cache
def rules() -> dict[str, tuple[Rule, ...]]:
    """Every symbol of the grammar with its expansions; what is not a key is a word. The first symbol is the start."""
    page = record.data("corpus/grammar")
    found = {
        symbol: tuple(Rule(probability, tuple(expansion.split())) for expansion, probability in expansions.items())
        for symbol, expansions in page["rules"].items()
    }
    for symbol, row in page["words"].items():
        words = row.split()
        weights = [rank ** -page["zipf_exponent"] for rank in range(1, len(words) + 1)]
        found[symbol] = tuple(Rule(weight / math.fsum(weights), (word,)) for weight, word in zip(weights, words, strict=True))
    return {page["start"]: found.pop(page["start"])} | found


def sentences(count: int, *, seed: int = 0) -> list[str]:
    """`count` sentences drawn independently from the grammar; the same seed gives the same sentences on every machine."""
    generator = random.Random(seed)
    return [" ".join(_words(generator)) for _ in range(count)]


def _words(generator: random.Random) -> Iterator[str]:
    stack = [next(iter(rules()))]
    while stack:
        symbol = stack.pop()
        if symbol in rules():
            chosen = generator.choices(rules()[symbol], cum_weights=_cumulated(symbol))[0]
            stack.extend(reversed(chosen.expansion))
        else:
            yield symbol


@cache
def _cumulated(symbol: str) -> list[float]:
    return list(accumulate(rule.probability for rule in rules()[symbol]))


@cache
def entropy() -> Entropy:
    """Entropy of the corpus, computed from the grammar's probabilities and not from a sample.

    What a symbol costs, in nats or in words, is the sum over its expansions of probability × (what the choice and the symbols of
    the expansion cost): linear equations (U. Grenander, "Syntax-controlled probabilities", 1967), solved by repeating them. Nats
    per token is the entropy of a sentence divided by its expected length, what a mean over many tokens converges to.
    """
    nats, words = dict.fromkeys(rules(), 0.0), dict.fromkeys(rules(), 0.0)
    for _ in range(100):  # in the end each round leaves less than half of the error
        for symbol, row in rules().items():
            nats[symbol] = math.fsum(p * (sum(nats.get(item, 0) for item in expansion) - math.log(p)) for p, expansion in row)
            words[symbol] = math.fsum(p * sum(words.get(item, 1) for item in expansion) for p, expansion in row)
    start = next(iter(rules()))
    tokens = words[start] + 1  # the end of the sentence
    return Entropy(nats[start] / tokens, nats[start], tokens)


def batch(tokenizer: PreTrainedTokenizerBase, count: int, *, seed: int = 0, length: int | None = None) -> Batch:
    """`count` sentences as training data: `model(input_ids=ids, labels=labels).loss` is the mean nats per token.

    Each row is beginning of sentence, words, end of sentence, padding. T is `length`, or the longest row when `length` is None;
    longer rows are cut, which leaves their first tokens as likely as before. Give each rank its own `seed` for its own sentences.
    Padding stands on the right, where a causal model's earlier positions do not see it, so no attention mask is needed.
    """
    import torch

    if count < 1 or (length is not None and length < 2):
        raise ValueError(f"a batch needs count ≥ 1 and length ≥ 2 (one token to see, one to predict), got {count=}, {length=}")
    rows: Sequence[Sequence[int]] = tokenizer([f"{text} {tokenizer.eos_token}" for text in sentences(count, seed=seed)]).input_ids
    width = length or max(map(len, rows))
    ids = torch.full((count, width), tokenizer.pad_token_id)
    labels = torch.full((count, width), IGNORED)
    for position, row in enumerate(rows):
        kept = torch.tensor(row[:width])
        ids[position, : len(kept)] = labels[position, : len(kept)] = kept
    return Batch(ids, labels)
