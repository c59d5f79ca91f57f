"""Scores against plain loops over numbers, and their laws."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from l2lopt.evaluation import scores

INF = math.inf
few = settings(max_examples=25, deadline=None)
anything = st.floats(width=32)
losses = st.one_of(st.floats(-1e3, 1e3), st.just(INF))
matrices = arrays.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=losses)


def draws_for(values, resamples=50, seed=0):
    return scores.seed_draws(*values.shape, resamples, torch.Generator().manual_seed(seed))


def crossing(steps, values, target):
    """The oracle of `steps_to_target`: one curve, from left to right."""
    for index, (step, value) in enumerate(zip(steps, values, strict=True)):
        if value <= target:
            if index == 0 or values[index - 1] == INF:
                return step
            before = steps[index - 1]
            share = (values[index - 1] - target) / (values[index - 1] - value)
            return before + share * (step - before)
    return INF


def trimmed_mean(values):
    cut = int(0.25 * len(values))
    kept = sorted(values)[cut : len(values) - cut]
    return INF if INF in kept else math.fsum(kept) / len(kept)


@few
@given(st.lists(anything, min_size=1, max_size=6))
def test_what_is_not_finite_is_infinite(row):
    found = scores.finite_or_infinite(torch.tensor(row)).tolist()
    assert found == [value if math.isfinite(value) else INF for value in row]


@few
@given(st.lists(losses, min_size=2, max_size=6))
@example([1e-12, 1e-13, 0.0, -1e-13, -3.0, -5.0, -1e300, INF])
def test_logarithms_keep_the_order_of_losses_of_either_sign(row):
    found = scores.log_losses(torch.tensor(row, dtype=torch.float64)).tolist()
    for (one, log), (other, log_of_other) in itertools.pairwise(sorted(zip(row, found, strict=True))):
        assert log <= log_of_other
        assert log < log_of_other or one == other or abs(one - other) < 1e-10 * max(1, abs(one))
    for loss, log in zip(row, found, strict=True):
        assert log == (pytest.approx(math.log(loss)) if 1e-12 < loss < INF else log)
        assert (log == INF) == (loss == INF)


def test_a_matrix_of_losses_is_in_the_order_of_the_steps():
    steps, found = scores.loss_matrix({10: torch.tensor([1.0, math.nan]), 0: torch.tensor([2.0, 3.0])})
    assert steps.tolist() == [0, 10]
    assert found.tolist() == [[2, 3], [1, INF]]


@pytest.mark.parametrize(
    ("final", "at_0", "first", "expected"),
    [
        (1.0, 2.0, 2.0, False),
        (3.0, 2.0, 2.0, True),
        (math.nan, 2.0, 2.0, True),
        (INF, 2.0, 2.0, True),
        (2.0, 2.0, 2.0, False),
        (3.0, 9.0, 2.0, True),  # a network with batch norm has any loss in test mode before its first step
        (3.0, 2.0, 9.0, True),
        (3.0, math.nan, 4.0, False),
    ],
)
def test_a_run_has_diverged_where_it_ends_above_its_beginning(final, at_0, first, expected):
    by_step = {0: torch.tensor([at_0]), 5: torch.tensor([final])}
    assert scores.diverged(by_step, torch.tensor([first])).tolist() == [expected]
    without = {5: torch.tensor([final])}
    assert scores.diverged(without, torch.tensor([min(first, at_0)])).tolist() == [not final <= min(first, at_0)]


@few
@given(st.lists(losses, min_size=1, max_size=8), st.floats(-1e3, 1e3))
def test_steps_to_a_target_are_those_of_a_walk_along_the_curve(values, target):
    steps = [0, 1, 2, 4, 8, 16, 32, 64][: len(values)]
    curve = torch.tensor(steps).double(), torch.tensor(values, dtype=torch.float64)
    found = float(scores.steps_to_target(*curve, target))
    assert found == pytest.approx(crossing(steps, values, target), abs=1e-9)
    expected = 0 if found == INF else steps[-1] / max(found, 1)
    assert float(scores.speed_up(*curve, target, steps[-1])) == pytest.approx(expected)


@few
@given(arrays.arrays(np.float64, (5, 3), elements=losses), st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3))
def test_many_curves_at_once_are_each_by_itself(curves, targets):
    steps = torch.arange(5).double()
    together = scores.steps_to_target(steps, torch.tensor(curves), torch.tensor(targets, dtype=torch.float64))
    for column, target in enumerate(targets):
        assert float(together[column]) == float(scores.steps_to_target(steps, torch.tensor(curves[:, column]), target))


@few
@given(st.lists(losses, min_size=2, max_size=8), st.floats(-1e3, 1e3), st.floats(0, 10))
def test_an_easier_target_is_never_reached_later(values, target, easier):
    steps, curve = torch.arange(len(values)).double(), torch.tensor(values, dtype=torch.float64)
    hard, easy = (scores.steps_to_target(steps, curve, goal) for goal in (target, target + easier))
    assert easy <= hard + 1e-9


def test_normalised_losses():
    targets = torch.tensor([0.5, 0.5, 0.75, 0.25], dtype=torch.float64)
    found = scores.normalised(torch.tensor([0.5, 2.5, 0.25, math.nan]), targets, room=2.0)
    assert found.tolist() == [0, 1, -0.25, INF]


@few
@given(st.lists(losses, min_size=1, max_size=25))
def test_interquartile_means_are_trimmed_means(values):
    found = float(scores.interquartile_mean(torch.tensor(values, dtype=torch.float64)))
    assert found == pytest.approx(trimmed_mean(values), abs=1e-9)
    if INF not in values:
        assert found == pytest.approx(stats.trim_mean(values, 0.25), abs=1e-9)


@few
@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_the_interquartile_mean_of_a_constant_is_the_constant(value, count):
    values = torch.full((2, count), value, dtype=torch.float64)
    found = scores.interquartile_interval(values, scores.drawn(values, draws_for(values)))
    assert list(found) == pytest.approx([value] * 3)


@few
@given(matrices, st.randoms())
def test_nothing_depends_on_the_order_of_tasks_or_seeds(values, random):
    tasks, columns = list(range(len(values))), list(range(values.shape[1]))
    random.shuffle(tasks)
    random.shuffle(columns)
    one, other = torch.tensor(values), torch.tensor(values[tasks][:, columns])
    thresholds = torch.linspace(-1e3, 1e3, 7).double()
    for score in (
        lambda found: scores.interquartile_mean(found.flatten()),
        lambda found: scores.performance_profile(found.flatten(), thresholds),
        lambda found: scores.probability_of_improvement(found, torch.zeros_like(found)),
    ):
        torch.testing.assert_close(score(one), score(other))


@few
@given(arrays.arrays(np.float64, st.integers(1, 9), elements=losses), st.lists(losses, min_size=1, max_size=6))
def test_profiles_fall_and_are_shares(values, thresholds):
    thresholds = sorted(thresholds)
    found = scores.performance_profile(torch.tensor(values), torch.tensor(thresholds, dtype=torch.float64)).tolist()
    assert found == [pytest.approx(sum(v >= t for v in values) / len(values)) for t in thresholds]
    assert found == sorted(found, reverse=True)


@few
@given(matrices, st.floats(-100, 100))
def test_probabilities_of_improvement_count_pairs(values, shift):
    other = np.where(np.arange(values.shape[1]) % 2 == 0, values, shift)
    shares = []
    for row, rival in zip(values.tolist(), other.tolist(), strict=True):
        pairs = [1.0 if x < y else 0.5 if x == y else 0.0 for x, y in itertools.product(row, rival)]
        shares.append(statistics.fmean(pairs))
    a, b = torch.tensor(values), torch.tensor(other)
    found = float(scores.probability_of_improvement(a, b))
    assert found == pytest.approx(statistics.fmean(shares))
    assert found + float(scores.probability_of_improvement(b, a)) == pytest.approx(1)


@few
@given(matrices, st.integers(0, 5))
def test_intervals_are_those_of_a_loop_over_the_draws(values, seed):
    matrix = torch.tensor(values)
    draws = draws_for(matrix, resamples=41, seed=seed)
    again = sorted(
        trimmed_mean([values[task][k] for task, row in enumerate(draw) for k in row]) for draw in draws.tolist()
    )
    found = scores.interquartile_interval(matrix, scores.drawn(matrix, draws))
    assert list(found)[1:] == pytest.approx([again[1], again[39]], abs=1e-9)


@few
@given(matrices)
def test_duels_count_tasks(values):
    rival = np.roll(values, 1, axis=0)
    a, b = torch.tensor(values), torch.tensor(rival)
    found = scores.duel(a, b, draws_for(a))
    pairs = [(sum(x), sum(y)) for x, y in zip(values.tolist(), rival.tolist(), strict=True)]
    close = sum(math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-6) for x, y in pairs)
    assert abs(found.below.value - sum(x < y for x, y in pairs)) <= close
    assert abs(found.above - sum(x > y for x, y in pairs)) <= close
    assert found.tasks == len(values)
    assert 0 <= found.below.low <= found.below.high <= len(values)
    draws = draws_for(a)
    chances = sorted(scores.probability_of_improvement(scores.drawn(a, draws), scores.drawn(b, draws)).tolist())
    assert list(found.improvement)[1:] == pytest.approx([chances[1], chances[48]])
    back = scores.duel(b, a, draws_for(a))
    assert (back.below.value, back.above) == (found.above, found.below.value)


def test_draws_stay_within_their_task_and_follow_the_generator():
    values = torch.arange(12.0).view(3, 4)
    draws = draws_for(values, resamples=200)
    assert (scores.drawn(values, draws) // 4 == torch.arange(3.0)[:, None]).all()
    assert (draws == draws_for(values, resamples=200)).all()
    assert (draws != draws_for(values, resamples=200, seed=1)).any()
    assert draws.flatten().bincount().min() > 2400 / 4 * 0.85


def test_the_interval_covers_the_mean_as_often_as_it_says():
    """Of 200 samples of 30 tasks with one seed's noise each, about 95 % of the intervals hold the true value 0."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        values = torch.randn(10, 12, generator=generator, dtype=torch.float64)
        draws = scores.seed_draws(10, 12, 200, generator)
        found = scores.interquartile_interval(values, scores.drawn(values, draws))
        hits += found.low <= 0 <= found.high
    assert 180 <= hits <= 198
