"""Retrieval, Figure 1's curve and time warping against their definitions."""

import math
from collections import Counter

import laws
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2lopt.core.errors import UserError
from optimisees.metric.retrieval import neighbour_curve, retrieval
from optimisees.metric.time_warping import all_warped, warped

from implementations import normal  # isort: skip


def made(n=30, seed=0):
    source = torch.Generator().manual_seed(seed)
    labels, subjects = torch.randint(4, (n,), generator=source), torch.randint(3, (n,), generator=source)
    points = normal(n, 2, seed=seed) + labels[:, None]
    return torch.cdist(points, points), labels, subjects


@pytest.mark.parametrize("seed", [0, 1])
def test_retrieval_is_its_definition(seed):
    distances, labels, subjects = made(seed=seed)
    found = retrieval(distances, labels, subjects, (1, 3))
    hits, right, precisions = Counter(), Counter(), []
    for q in range(30):
        others = [n for n in range(30) if subjects[n] != subjects[q]]
        ranking = [int(labels[n]) for n in sorted(others, key=lambda n: float(distances[q, n]))]
        for k in (1, 3):
            hits[k] += int(labels[q]) in ranking[:k]
            votes = Counter(ranking[:k])
            right[k] += min(votes, key=lambda label: (-votes[label], label)) == labels[q]
        places = [place for place, label in enumerate(ranking, 1) if label == labels[q]]
        precisions += [sum(rank / place for rank, place in enumerate(places, 1)) / len(places)] if places else []
    assert found.recall == {k: hits[k] / 30 for k in (1, 3)}
    assert found.accuracy == {k: right[k] / 30 for k in (1, 3)}
    assert found.mean_average_precision == pytest.approx(sum(precisions) / len(precisions))
    assert found.recall[1] == found.accuracy[1]


def test_the_own_subject_is_left_out():
    """Each window's twin is its own subject's, and so of no help."""
    distances = torch.tensor([[0.0, 0.1, 5, 6], [0.1, 0, 5, 6], [5, 5, 0, 0.1], [6, 6, 0.1, 0]])
    found = retrieval(distances, torch.tensor([0, 0, 1, 0]), torch.tensor([1, 1, 2, 2]), (1,))
    assert found.recall == {1: 0.25}
    alone = retrieval(distances, torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 2, 2]), (1,))
    assert (alone.recall, math.isnan(alone.mean_average_precision)) == ({1: 0.0}, True)
    with pytest.raises(UserError, match="expected 3 windows of subjects other than 1, found 2"):
        retrieval(distances, torch.tensor([0, 0, 1, 0]), torch.tensor([1, 1, 2, 2]), (3,))


def test_the_curve_is_its_definition():
    distances, _, _ = made()
    curve = neighbour_curve(distances)
    others = [[float(distances[i, j]) for j in range(30) if i != j] for i in range(30)]
    low, high = min(map(min, others)), max(map(max, others))
    for k in (1, 2, 17, 29):
        expected = sum((d - low) / (high - low) for row in others for d in sorted(row)[:k]) / (30 * k)
        assert curve[k - 1].item() == pytest.approx(expected)
    assert len(curve) == 29
    assert neighbour_curve(torch.ones(4, 4)).tolist() == [0.0] * 3


def test_the_curve_of_samples_scaled_each_by_itself():
    distances, _, _ = made()
    distances[7] *= 50  # of one sample alone: a row's own scale takes it out
    curve = neighbour_curve(distances, "each")
    total = 0.0
    for row in ([float(distances[i, j]) for j in range(30) if j != i] for i in range(30)):
        total += sum((d - min(row)) / (max(row) - min(row)) for d in sorted(row)[:17])
    assert curve[16].item() == pytest.approx(total / (30 * 17))
    assert curve[0] == 0
    assert neighbour_curve(torch.ones(4, 4), "each").tolist() == [0.0] * 3


def textbook(x, y, band):
    """The recursion cell by cell; x and y [channels, T]."""
    steps = x.shape[1]
    best = {(-1, -1): 0.0}
    for i in range(steps):
        for j in range(max(0, i - band), min(steps, i + band + 1)):
            before = min(best.get(cell, float("inf")) for cell in ((i - 1, j), (i, j - 1), (i - 1, j - 1)))
            best[i, j] = before + float((x[:, i] - y[:, j]).square().sum())
    return best[steps - 1, steps - 1] ** 0.5


@given(steps=st.integers(1, 9), band=st.integers(0, 10), seed=st.integers(0, 1000))
def test_time_warping_is_the_recursion(steps, band, seed):
    x, y = normal(2, 3, 2, steps, seed=seed)
    found = warped(x, y, band)
    assert found.tolist() == pytest.approx([textbook(a, b, band) for a, b in zip(x, y, strict=True)])
    assert warped(y, x, band).tolist() == pytest.approx(found.tolist())


def test_time_warping_without_a_band_is_euclidean_and_of_all_pairs_in_batches():
    x = normal(5, 2, 7)
    laws.assert_close(all_warped(x, 0), torch.cdist(x.flatten(1), x.flatten(1)), 1e-10)
    seen = []
    found = all_warped(x, 3, lambda stage, done, total, figures: seen.append((done, total)), size=4)
    assert seen == [(4, 10), (8, 10), (10, 10)]
    laws.assert_close(found[1, 3], warped(x[1:2], x[3:4], 3)[0])
    assert torch.equal(found, found.T)
    with pytest.raises(UserError, match="time warping: band"):
        warped(x, x, -1)


def test_a_distance_that_rounds_below_0_is_0():
    distances, labels, subjects = made(seed=0)
    below = torch.where(distances < distances.median(), -1e-7, distances)
    found = retrieval(below, labels, subjects, (1, 3))
    assert found.recall == retrieval(below.clamp(min=0), labels, subjects, (1, 3)).recall
