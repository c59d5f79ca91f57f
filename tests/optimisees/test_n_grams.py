"""Kneser-Ney models against hand-made counts and the definition in plain Python."""

import math
import random
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest

from optimisees.language.n_grams import KneserNey

EOS = 0


def lines(seed, tokens, words):
    """A text whose lines end in `EOS`."""
    source = random.Random(seed)
    return [source.choice([EOS, *range(1, words)]) for _ in range(tokens - 1)] + [EOS]


def histories(text):
    """Each token after all that its history may hold: from the latest line's end on."""
    history = [EOS]
    for token in text:
        yield tuple(history), token
        history = [EOS] if token == EOS else [*history, token]


class Plain:
    """The definition of `KneserNey` with dictionaries of tuples."""

    def __init__(self, text, size, order):
        self.size, self.order = size, order
        raw = defaultdict(Counter)
        for history, token in histories(text):
            for n in range(1, min(order, len(history) + 1) + 1):
                raw[n][(*history[len(history) - n + 1 :], token)] += 1
        self.counts = {n: dict(raw[n]) for n in range(1, order + 1) if raw[n]}
        for n in range(1, max(self.counts)):
            before = Counter(gram[1:] for gram in raw[n + 1])
            self.counts[n] = {gram: (raw[n][gram] if n > 1 and gram[0] == EOS else 0) + before[gram] for gram in raw[n]}
        self.discounts = {n: self.discount(Counter(own.values())) for n, own in self.counts.items()}

    @staticmethod
    def discount(m):
        if not all(m[k] for k in (1, 2, 3, 4)):
            return [0, Fraction(1, 2), Fraction(1, 2), Fraction(1, 2)]
        y = Fraction(m[1], m[1] + 2 * m[2])
        found = [1 - 2 * y * Fraction(m[2], m[1]), 2 - 3 * y * Fraction(m[3], m[2]), 3 - 4 * y * Fraction(m[4], m[3])]
        return [0, *(min(max(d, 0), k) for k, d in enumerate(found, 1))]

    def probability(self, history, token):
        value = Fraction(1, self.size)
        for n, counts in self.counts.items():
            if len(history) < n - 1:
                break
            own = history[len(history) - n + 1 :]
            after = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == own}
            total = sum(after.values())
            if not total:
                break
            taken = {w: self.discounts[n][min(count, 3)] for w, count in after.items()}
            left = after.get(token, 0) - taken.get(token, 0)
            value = (left + sum(taken.values()) * value) / total
        return value


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize(("tokens", "words"), [(1, 3), (7, 3), (60, 4), (400, 5)])
def test_is_the_definition(order, tokens, words):
    train, test = lines(1, tokens, words), lines(2, 30, words + 1)
    oracle = Plain(train, words + 1, order)
    expected = [float(oracle.probability(history, token)) for history, token in histories(test)]
    model = KneserNey(np.array(train), words + 1, EOS, order)
    found = model.probabilities(np.array(test))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    mean = sum(math.log(p) for p in expected) / len(expected)
    assert model.perplexity(np.array(test)) == pytest.approx(math.exp(-mean), rel=1e-12)


def test_a_toy_corpus_by_hand():
    """Lines "a b" and "a c" (a 1, b 2, c 3, and 4 never seen); every discount is ½, as some m_k is 0.

    Different tokens before a: 1 (a line's end), b: 1, c: 1, the end: 2, of 5 in all, so P_1(a) = ½/5 + 4·½/5·⅕ = 0.18,
    and P_1(the end) = 1.5/5 + 0.08 = 0.38. After a: b once, c once of two, so P_2(b | a) = ½/2 + 2·½/2·P_1(b) = 0.34.
    After b only an end, so any other token has half of its P_1.
    """
    model = KneserNey(np.array([1, 2, 0, 1, 3, 0]), 5, EOS, 2)
    found = model.probabilities(np.array([1, 2, 2, 4, 0]))
    opening = 1.5 / 2 + 0.5 / 2 * 0.18  # a opened both lines
    np.testing.assert_allclose(found, [opening, 0.34, 0.09, 0.04, 0.38], rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("history", [[], [1], [2, 3], [1, 2, 3, 4], [1, 0], [4, 2], [5], [5, 1]])
def test_probabilities_sum_to_1(order, history):
    model = KneserNey(np.array(lines(3, 200, 5)), 6, EOS, order)
    total = sum(model.probabilities(np.array([*history, token]))[-1] for token in range(6))
    assert total == pytest.approx(1, rel=1e-12)
