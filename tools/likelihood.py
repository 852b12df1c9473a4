"""How likely the grammar of `helpers.corpus` makes a sentence, exactly: what a model's loss is compared with.

The grammar is LL(1), so each sentence has one derivation. All figures are in nats; the end of a sentence counts as a token, the
beginning does not, because it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

from helpers.corpus import END, rules


@cache
def vocabulary() -> tuple[str, ...]:
    """The words that sentences are made of, in alphabetical order, without the end of sentence."""
    return tuple(sorted({item for row in rules().values() for rule in row for item in rule.expansion if item not in rules()}))


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


def token_log_probabilities(sentence: str) -> list[float]:
    """log P(token | tokens before it) for each word of `sentence` and for its end: one number more than it has words.

    A word that the grammar does not allow at its place gets minus infinity, and the list stops there.
    """
    found: list[float] = []
    stack: tuple[str, ...] = (END, next(iter(rules())))
    for word in [*sentence.split(), END]:
        moves = _moves(stack)
        if word not in moves:
            return [*found, -math.inf]
        probability, stack = moves[word]
        found.append(math.log(probability))
    return found


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
    tokens: list[float] = []
    for text in texts:
        tokens += token_log_probabilities(text)
        if tokens[-1] == -math.inf:
            raise ValueError(f"{text!r} is not a sentence of the grammar, so its likelihood is zero; `parses` tells them apart")
    if not tokens:
        raise ValueError("nll needs at least one sentence")
    return -math.fsum(tokens) / len(tokens)
