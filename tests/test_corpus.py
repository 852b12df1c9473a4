"""The grammar is unambiguous, its probabilities are exact, and what is drawn from it follows them."""

import itertools
import math
import random
import statistics
import subprocess
import sys
from collections import Counter
from functools import cache

import likelihood
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import corpus, models

START = "SENTENCE"


def derivations(sentence: str) -> tuple[int, float]:
    """Number of derivations of a sentence and their total probability, by trying every rule everywhere."""
    words = sentence.split()

    @cache
    def spans(symbol: str, begin: int) -> dict[int, tuple[int, float]]:  # end -> number of derivations, probability
        if symbol not in corpus.rules():
            return {begin + 1: (1, 1.0)} if begin < len(words) and words[begin] == symbol else {}
        found: dict[int, tuple[int, float]] = {}
        for probability, expansion in corpus.rules()[symbol]:
            ends = {begin: (1, probability)}
            for item in expansion:
                further: dict[int, tuple[int, float]] = {}
                for middle, (ways, share) in ends.items():
                    for end, (more_ways, more_share) in spans(item, middle).items():
                        old_ways, old_share = further.get(end, (0, 0.0))
                        further[end] = (old_ways + ways * more_ways, old_share + share * more_share)
                ends = further
            for end, (ways, share) in ends.items():
                old_ways, old_share = found.get(end, (0, 0.0))
                found[end] = (old_ways + ways, old_share + share)
        return found

    return spans(START, 0).get(len(words), (0, 0.0))


def first_and_follow() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The textbook sets of every symbol, by iteration to a fixed point; "" in FIRST marks a symbol that may be empty."""
    rules = corpus.rules()
    first: dict[str, set[str]] = {symbol: set() for symbol in rules}
    follow: dict[str, set[str]] = {symbol: set() for symbol in rules}
    follow[START].add(corpus.END)

    def size() -> int:
        return sum(map(len, [*first.values(), *follow.values()]))

    before = -1
    while size() != before:
        before = size()
        for symbol, rule in ((symbol, rule) for symbol, row in rules.items() for rule in row):
            first[symbol] |= first_of(rule.expansion, first)
            for place, item in enumerate(rule.expansion):
                if item in rules:
                    rest = first_of(rule.expansion[place + 1 :], first)
                    follow[item] |= (rest - {""}) | (follow[symbol] if "" in rest else set())
    return first, follow


def first_of(expansion, first):
    found = set()
    for item in expansion:
        begin = first.get(item, {item})
        found |= begin - {""}
        if "" not in begin:
            return found
    return found | {""}


def test_probabilities_of_each_symbol_add_up_to_one():
    for symbol, row in corpus.rules().items():
        assert math.fsum(rule.probability for rule in row) == pytest.approx(1, abs=1e-12), symbol
        assert min(rule.probability for rule in row) > 0, symbol


def test_grammar_is_ll1_hence_unambiguous():
    """If the next word always leaves one rule, a derivation has no second choice anywhere: every LL(1) grammar is unambiguous."""
    first, follow = first_and_follow()
    assert next(iter(corpus.rules())) == START
    for symbol, row in corpus.rules().items():
        choices = [first_of(rule.expansion, first) for rule in row]
        ahead = [(words - {""}) | (follow[symbol] if "" in words else set()) for words in choices]
        for one, other in itertools.combinations(ahead, 2):
            assert not one & other, f"{symbol}: the next word {sorted(one & other)} does not decide"


def test_size_of_the_language():
    assert len(likelihood.vocabulary()) == 276
    assert all(word not in corpus.rules() for word in likelihood.vocabulary())
    assert likelihood.vocabulary() == tuple(sorted(likelihood.vocabulary()))


@pytest.mark.parametrize(
    "sentence",
    ["the dog sleeps", "today the children help the dog", "Anna says that these dogs find two apples and many birds sing"],
)
def test_sentences_that_parse(sentence):
    assert likelihood.parses(sentence)
    assert derivations(sentence)[0] == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "",
        "the dog",
        "the dog sleep",  # number
        "the dogs whom Anna sees sleeps",  # number across a relative clause
        "the zebra sleeps",  # a word that is not in the vocabulary
        "the dog sleeps sleeps",
        "the dog sleeps MANNER",  # a symbol is not a word
        "the dog sleeps </s>",  # nor is the end
    ],
)
def test_what_is_no_sentence(sentence):
    assert not likelihood.parses(sentence)
    assert likelihood.log_probability(sentence) == -math.inf


def test_one_derivation_and_its_exact_probability():
    for sentence in corpus.sentences(150, seed=11):
        ways, probability = derivations(sentence)
        assert ways == 1, sentence
        assert likelihood.log_probability(sentence) == pytest.approx(math.log(probability), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_recogniser_agrees_with_trying_every_rule(seed, data):
    words = corpus.sentences(1, seed=seed)[0].split()
    place = data.draw(st.integers(0, len(words) - 1))
    change = data.draw(st.sampled_from(["drop", "double", "replace", "swap"]))
    if change == "drop":
        del words[place]
    elif change == "double":
        words.insert(place, words[place])
    elif change == "replace":
        words[place] = data.draw(st.sampled_from(likelihood.vocabulary()))
    else:
        random.Random(seed).shuffle(words)
    sentence = " ".join(words)
    ways, probability = derivations(sentence)
    assert likelihood.parses(sentence) == (ways == 1)
    if ways:
        assert likelihood.log_probability(sentence) == pytest.approx(math.log(probability), abs=1e-9)


@pytest.mark.parametrize("prefix", ["", "the", "the old dogs whom", "Anna says that these dogs find two apples"])
def test_probabilities_of_all_that_may_follow_add_up_to_one(prefix):
    place = len(prefix.split())
    following = [likelihood.token_log_probabilities(f"{prefix} {word}")[place] for word in likelihood.vocabulary()]
    following.append(likelihood.token_log_probabilities(prefix)[place])  # the end of the sentence
    assert math.fsum(map(math.exp, following)) == pytest.approx(1, abs=1e-9)


def test_token_log_probabilities_add_up():
    sentence = "the dogs whom Anna sees sleep"
    tokens = likelihood.token_log_probabilities(sentence)
    assert len(tokens) == len(sentence.split()) + 1
    assert math.fsum(tokens) == likelihood.log_probability(sentence)


def test_sampled_words_follow_the_probabilities():
    drawn = corpus.sentences(4000, seed=2)
    begins = Counter(sentence.split()[0] for sentence in drawn)
    for word, times in begins.most_common(12):
        expected = len(drawn) * math.exp(likelihood.token_log_probabilities(word)[0])
        assert abs(times - expected) < 5 * math.sqrt(expected), word


def test_entropy_equals_what_sampling_approaches():
    drawn = corpus.sentences(6000, seed=3)
    entropy = corpus.entropy()
    surprise = [-likelihood.log_probability(sentence) for sentence in drawn]
    tokens = [len(sentence.split()) + 1 for sentence in drawn]
    for measured, exact in ((surprise, entropy.per_sentence), (tokens, entropy.tokens_per_sentence)):
        assert abs(statistics.mean(measured) - exact) < 4 * statistics.stdev(measured) / math.sqrt(len(drawn))
    assert entropy.per_token == pytest.approx(entropy.per_sentence / entropy.tokens_per_sentence)
    assert entropy.per_token == pytest.approx(2.3526, abs=1e-4)
    assert likelihood.nll(drawn) == pytest.approx(sum(surprise) / sum(tokens))


def test_a_seed_means_the_same_sentences_everywhere():
    assert corpus.sentences(2, seed=1) == ["yesterday the teacher sleeps well in the river", "today the children help the dog"]
    assert corpus.sentences(3, seed=7)[:2] == corpus.sentences(2, seed=7)
    assert corpus.sentences(5, seed=0) != corpus.sentences(5, seed=1)


def test_nll_refuses_what_has_no_likelihood():
    with pytest.raises(ValueError, match="'the dog sleep' is not a sentence"):
        likelihood.nll(["the dog sleeps", "the dog sleep"])
    with pytest.raises(ValueError, match="at least one"):
        likelihood.nll([])


def test_batch_holds_the_sentences_of_its_seed():
    _, tokenizer = models.load("tiny-ernie")
    ids, labels = corpus.batch(tokenizer, 6, seed=4)
    texts = corpus.sentences(6, seed=4)
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    assert ids.shape == labels.shape == (6, max(len(text.split()) for text in texts) + 2)
    assert (ids[:, 0] == tokenizer.bos_token_id).all()
    assert ((ids == tokenizer.eos_token_id).sum(dim=1) == 1).all()
    padding = ids == tokenizer.pad_token_id
    assert padding.any()
    assert (labels[padding] == -100).all()
    assert (labels[~padding] == ids[~padding]).all()


def test_batch_of_a_given_length_is_cut_or_padded():
    _, tokenizer = models.load("tiny-ernie")
    whole = corpus.batch(tokenizer, 6, seed=4)
    cut = corpus.batch(tokenizer, 6, seed=4, length=5)
    wide = corpus.batch(tokenizer, 6, seed=4, length=40)
    assert (cut.input_ids == whole.input_ids[:, :5]).all()
    assert (cut.labels == whole.labels[:, :5]).all()
    assert wide.input_ids.shape == (6, 40)
    assert (wide.labels[:, whole.labels.shape[1] :] == -100).all()
    assert not (corpus.batch(tokenizer, 6, seed=5, length=40).input_ids == wide.input_ids).all()


@pytest.mark.parametrize(("count", "length"), [(0, None), (2, 1)])
def test_batch_refuses_sizes_without_meaning(count, length):
    _, tokenizer = models.load("tiny-ernie")
    with pytest.raises(ValueError, match="count ≥ 1 and length ≥ 2"):
        corpus.batch(tokenizer, count, length=length)


def test_importing_loads_no_framework():
    code = "import sys, helpers.corpus, helpers.models; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
