"""Sentences drawn from a grammar with known probabilities, so that the best reachable loss is a known number.

`data/corpus/grammar.yaml` holds the grammar. It is LL(1): the next word alone decides which rule is used, so each sentence has
exactly one derivation and `log_probability` is exact. All figures are in nats (natural logarithms); the end of a sentence
counts as a token, the beginning does not, because it is given.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

GRAMMAR = Path(__file__).resolve().parent.parent / "data" / "corpus" / "grammar.yaml"
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
    page = yaml.safe_load(GRAMMAR.read_text(encoding="utf-8"))
    found = {
        symbol: tuple(Rule(probability, tuple(expansion.split())) for expansion, probability in expansions.items())
        for symbol, expansions in page["rules"].items()
    }
    for symbol, row in page["words"].items():
        words = row.split()
        weights = [rank ** -page["zipf_exponent"] for rank in range(1, len(words) + 1)]
        found[symbol] = tuple(Rule(weight / math.fsum(weights), (word,)) for weight, word in zip(weights, words, strict=True))
    return {page["start"]: found.pop(page["start"])} | found


@cache
def vocabulary() -> tuple[str, ...]:
    """The words that sentences are made of, in alphabetical order, without the end of sentence."""
    return tuple(sorted({item for row in rules().values() for rule in row for item in rule.expansion if item not in rules()}))


def sentences(count: int, *, seed: int = 0) -> list[str]:
    """`count` sentences drawn independently from the grammar; the same seed gives the same sentences on every machine."""
    generator = random.Random(seed)
    return [" ".join(_words(generator)) for _ in range(count)]


def _words(generator: random.Random) -> Iterator[str]:
    stack, ladders = [next(iter(rules()))], _ladders()
    while stack:
        symbol = stack.pop()
        if symbol in ladders:
            ladder, row = ladders[symbol]
            stack.extend(reversed(row[min(bisect(ladder, generator.random()), len(row) - 1)].expansion))
        else:
            yield symbol


@cache
def _ladders() -> dict[str, tuple[list[float], tuple[Rule, ...]]]:
    return {symbol: (list(accumulate(rule.probability for rule in row)), row) for symbol, row in rules().items()}


@cache
def _moves(stack: tuple[str, ...]) -> dict[str, tuple[float, tuple[str, ...]]]:
    """What may come when `stack` (last first) is still to be written: word -> its probability, and the stack after it."""
    if not stack:
        return {}
    *rest, top = stack
    if top not in rules():
        return {top: (1.0, tuple(rest))}
    return {
        word: (rule.probability * probability, after)
        for rule in rules()[top]
        for word, (probability, after) in _moves((*rest, *reversed(rule.expansion))).items()
    }


def _walk(words: Iterable[str]) -> Iterator[tuple[dict[str, tuple[float, tuple[str, ...]]], str]]:
    """Each word with the moves that were open before it; stops after the first word that is not among them."""
    stack: tuple[str, ...] = (END, next(iter(rules())))
    for word in words:
        moves = _moves(stack)
        yield moves, word
        if word not in moves:
            return
        stack = moves[word][1]


def distributions(prefix: str) -> list[dict[str, float]]:
    """What the grammar allows in place of each word of `prefix`, and after its last: word -> probability.

    One entry more than `prefix` has words; END is among the words where a sentence may end.
    Raises ValueError for a prefix that no sentence begins with.
    """
    words, result = prefix.split(), []
    for moves, word in _walk([*words, END]):
        result.append({word: probability for word, (probability, _) in moves.items()})
        if word not in moves and len(result) <= len(words):
            raise ValueError(
                f"no sentence begins with {prefix!r}: {word!r} is not possible there, {next(iter(moves), None)!r} would be"
            )
    return result


def token_log_probabilities(sentence: str) -> list[float]:
    """log P(token | tokens before it) for each word of `sentence` and for its end: one number more than it has words.

    A word that the grammar does not allow at its place gets minus infinity, and the list stops there.
    """
    return [math.log(moves[word][0]) if word in moves else -math.inf for moves, word in _walk([*sentence.split(), END])]


def log_probability(sentence: str) -> float:
    """Natural logarithm of the probability that the grammar gives this sentence, end included; minus infinity for no sentence."""
    return math.fsum(token_log_probabilities(sentence))


def parses(sentence: str) -> bool:
    """Whether `sentence` (words separated by spaces) is a sentence of the grammar."""
    return log_probability(sentence) > -math.inf


def nll(texts: Iterable[str]) -> float:
    """Mean negative log-likelihood of these sentences under the grammar, in nats per token: no model can expect to do better.

    Raises ValueError for an empty list and for a text that is not a sentence of the grammar.
    """
    tokens = []
    for text in texts:
        tokens += token_log_probabilities(text)
        if tokens[-1] == -math.inf:
            raise ValueError(
                f"{text!r} is not a sentence of the grammar, so its likelihood is zero; corpus.parses tells them apart"
            )
    if not tokens:
        raise ValueError("nll needs at least one sentence")
    return -math.fsum(tokens) / len(tokens)


@cache
def entropy() -> Entropy:
    """Entropy of the corpus, computed from the grammar's probabilities and not from a sample.

    The entropy of a sentence is the sum over symbols of (expected number of uses) × (entropy of the choice of its expansion);
    expected uses solve a linear system (U. Grenander, "Syntax-controlled probabilities", 1967). Nats per token is
    the entropy of a sentence divided by its expected length, what a mean over many tokens converges to.
    """
    import numpy as np

    symbols = list(rules())
    index = {symbol: position for position, symbol in enumerate(symbols)}
    uses = np.zeros((len(symbols), len(symbols)))  # uses[i, j]: expected number of symbol j in one expansion of symbol i
    words, choice = np.zeros(len(symbols)), np.zeros(len(symbols))
    for symbol, row in rules().items():
        for probability, expansion in row:
            choice[index[symbol]] -= probability * math.log(probability)
            for item in expansion:
                if item in index:
                    uses[index[symbol], index[item]] += probability
                else:
                    words[index[symbol]] += probability
    expected = np.linalg.solve(np.eye(len(symbols)) - uses.T, np.eye(len(symbols))[0])
    per_sentence, tokens = float(expected @ choice), float(expected @ words) + 1
    return Entropy(per_sentence / tokens, per_sentence, tokens)


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
