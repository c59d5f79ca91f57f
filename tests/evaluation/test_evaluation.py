"""Evaluation: paired problems, tuned baselines, honest intervals."""

import math

import numpy as np
import oracles
import pytest
import torch
from scipy import stats

import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.seeding import seed_of
from l2lopt.evaluation import comparison
from l2lopt.evaluation.comparison import TunedRun, interval
from l2lopt.evaluation.free_runs import record_steps, run_free
from l2lopt.evaluation.settings import Baseline, EvaluationSettings, half_decades
from l2lopt.optimisers import SGD, Optimiser


class Diverging(Optimiser):
    """Adds NaN from its third update on."""

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        return SGD(0.1).init(layout, batch, like=like)._replace(shared={"step": torch.zeros(())})

    def update(self, grads, state, params, *, loss=None):
        step = state.shared["step"] + 1
        change = torch.where(step > 2, torch.nan, torch.zeros_like(grads))
        return change, state._replace(shared={"step": step})


def settings(**changes):
    baselines = [
        Baseline(optimiser="sgd", rates=[1e-3, 1e-2, 1e-1]),
        Baseline(optimiser="adamw", rates=[1e-2, 1e-1, 1.0], schedule="cosine"),
    ]
    return EvaluationSettings(
        **{"seeds": 3, "steps": 12, "horizons": [5, 12], "tuning_seeds": 2, "baselines": baselines} | changes
    )


@pytest.fixture(scope="module")
def quadratic():
    return optimisees.make("quadratic", size=4, dtype="float64")


def by_hand(optimisee, rate, seed, steps, splits=("train",)):
    """The losses of plain gradient descent on one quadratic, from the definition."""
    params, _ = optimisee.init(seed)
    theta, losses = params["theta"].clone(), []
    for step in range(steps + 1):
        matrix, target = optimisee.batch("train", seed, step)
        residual = matrix @ theta - target
        losses.append(float(residual @ residual))
        theta = theta - rate * 2 * matrix.T @ residual
    return losses


def test_a_free_run_is_gradient_descent_row_by_row(quadratic):
    run = run_free(SGD(0.01), quadratic, [3, 4], [0, 1, 6])
    for row, seed in enumerate([3, 4]):
        losses = by_hand(quadratic, 0.01, seed, 6)
        assert run.losses["train"][:, row].tolist() == pytest.approx([losses[0], losses[1], losses[6]], rel=1e-10)
    assert run.steps == [0, 1, 6]


def test_every_optimiser_starts_from_the_same_problems(quadratic):
    result = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings())
    starts = {
        name: [row.loss for row in result.rows if row.optimiser == name and row.step == 0 and row.split == "train"]
        for name in ("mine", "sgd", "adamw")
    }
    assert starts["mine"] == starts["sgd"] == starts["adamw"]
    assert len(starts["mine"]) == 3


def test_rates_are_the_best_of_the_grid_on_seeds_that_are_not_reported(quadratic):
    result = comparison.evaluate({}, quadratic, settings(), seed=5)
    tuning = [seed_of("tuning", 5, index) for index in range(2)]
    for horizon in (5, 12):
        means = {
            rate: np.mean([by_hand(quadratic, rate, seed, horizon)[horizon] for seed in tuning])
            for rate in (1e-3, 1e-2, 1e-1)
        }
        finite = {rate: mean if math.isfinite(mean) else math.inf for rate, mean in means.items()}
        assert result.chosen["sgd"][horizon] == TunedRun(min(finite, key=finite.get), 12)
    reported = {seed_of("evaluation", 5, index) for index in range(3)}
    assert not reported & set(tuning)


def test_a_baselines_curve_is_the_run_tuned_for_the_next_horizon(quadratic):
    result = comparison.evaluate({}, quadratic, settings(), seed=1)
    seed = seed_of("evaluation", 1, 0)
    for row in result.rows:
        if row.optimiser == "sgd" and row.split == "train" and row.seed == 0:
            rate = result.chosen["sgd"][5 if row.step <= 5 else 12].rate
            assert row.loss == pytest.approx(by_hand(quadratic, rate, seed, row.step)[row.step], rel=1e-9)


def test_every_recorded_step_has_every_seed_once(quadratic):
    result = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings())
    keys = [row[:5] for row in result.rows]
    steps = record_steps(12, [5, 12])
    assert len(set(keys)) == len(keys) == 3 * 2 * 3 * len(steps)


def test_a_schedule_with_an_end_tries_the_ends_of_later_horizons(quadratic):
    result = comparison.evaluate({}, quadratic, settings())
    assert result.chosen["adamw"][5].length in (5, 12)
    assert result.chosen["adamw"][12].length == 12


def test_a_rate_at_the_edge_of_its_grid_is_reported(quadratic):
    result = comparison.evaluate(
        {}, quadratic, settings(baselines=[Baseline(optimiser="sgd", rates=[1e-6, 1e-5, 1e-4])])
    )
    assert len(result.warnings) == 2
    assert all("sgd" in warning and "upper end" in warning for warning in result.warnings)


def test_divergence_is_counted_and_not_dropped(quadratic):
    result = comparison.evaluate({"bad": Diverging()}, quadratic, settings())
    bad = [row for row in result.table if row.optimiser == "bad"]
    assert all(row.diverged == 3 and row.mean == math.inf for row in bad)
    assert sum(math.isnan(row.loss) for row in result.rows if row.optimiser == "bad") > 0


def test_the_difference_is_paired_with_the_best_baseline(quadratic):
    result = comparison.evaluate({"mine": SGD(0.005)}, quadratic, settings())
    losses = {
        name: np.array([r.loss for r in result.rows if (r.optimiser, r.step, r.split) == (name, 12, "train")])
        for name in ("mine", "sgd", "adamw")
    }
    line = next(r for r in result.table if (r.optimiser, r.horizon, r.split) == ("mine", 12, "train"))
    assert line.versus == min(("sgd", "adamw"), key=lambda name: losses[name].mean())
    test = stats.ttest_rel(losses["mine"], losses[line.versus]).confidence_interval()
    assert (line.difference_low, line.difference_high) == pytest.approx(tuple(test), rel=1e-6)


def test_interval_is_students():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    expected = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    assert interval(values)[1:] == pytest.approx(expected)
    assert math.isnan(interval(values[:1])[1])


def test_default_grids_have_at_least_seven_half_decades():
    for baseline in EvaluationSettings().baselines:
        ratios = np.diff(np.log10(baseline.rates))
        assert len(baseline.rates) >= 8
        assert ratios == pytest.approx(0.5, abs=0.005)
    assert half_decades(0.01, 3) == [0.01, 0.0316, 0.1]


@pytest.mark.parametrize("steps", [1, 2, 9, 1000])
def test_recorded_steps_hold_both_ends_and_the_horizons(steps):
    record = record_steps(steps, [steps])
    assert record[0] == 0
    assert record[-1] == steps
    assert record == sorted(set(record))


def test_a_horizon_beyond_the_run_is_refused(quadratic):
    with pytest.raises(UserError, match="at most 12"):
        comparison.evaluate({}, quadratic, settings(horizons=[100]))


def test_a_run_without_numbers_is_not_gone_on_with(quadratic, monkeypatch):
    steps, plain = [], quadratic.loss
    monkeypatch.setattr(quadratic, "loss", lambda *args: steps.append(1) or plain(*args))
    run = run_free(SGD(torch.tensor([1e100, 1e-3], dtype=torch.float64)), quadratic, [3, 4], [0, 5, 40])
    assert len(steps) == 40  # the other row is a number still
    assert run.losses["train"].isnan().tolist() == [[False, False], [True, False], [True, False]]
    alone = run_free(SGD(1e100), quadratic, [3], [0, 5, 40])
    assert len(steps) < 40 + 10
    assert alone.losses["train"].isnan().tolist() == [[False], [True], [True]]


@pytest.mark.parametrize("rows", [1, 2])
def test_groups_of_rows_change_nothing(quadratic, rows):
    """A group is a run by itself: single rows take the plain pass, and rates go with their rows."""
    whole = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings())
    parts = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings(rows=rows))
    assert parts.chosen == whole.chosen
    assert [row[:5] for row in parts.rows] == [row[:5] for row in whole.rows]
    assert [row.loss for row in parts.rows] == pytest.approx([row.loss for row in whole.rows], rel=1e-12)


def test_two_optimisers_of_one_name_are_refused(quadratic):
    with pytest.raises(UserError, match="a name for each"):
        comparison.evaluate({"sgd": SGD(0.1)}, quadratic, settings())


def test_a_learned_optimiser_runs_on_the_digits():
    mlp = optimisees.make("mlp")
    learned = optimisers.make("coordinatewise")
    result = comparison.evaluate({"learned": learned}, mlp, settings(baselines=[]))
    assert all(math.isfinite(row.loss) for row in result.rows)
    assert {row.versus for row in result.table} == {""}


def test_a_run_that_ends_above_its_first_training_loss_has_diverged():
    """Before its first step a network with batch norm has a test-mode loss of any size."""
    steps = {0: torch.tensor([40.0, 40.0]), 5: torch.tensor([3.0, 1.0])}
    run = comparison.OptimiserRun("learned", {"train": steps, "test": steps}, torch.tensor([2.5, 2.5]), 0.0)
    assert {row.diverged for row in comparison.compare({"rule": run}, [5]).table} == {1}


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "normalised-adam"])
def test_a_cosine_is_for_any_optimiser(quadratic, optimiser):
    """Its updates fall to nothing at the horizon, after a warm-up over a twentieth of it."""
    baseline = Baseline(optimiser=optimiser, rates=[0.01], schedule="cosine")
    layout, theta = Layout(("theta",), ((4,),)), torch.ones(4, dtype=torch.float64)
    sizes = {}
    for schedule in ("cosine", "constant"):
        rule = baseline.model_copy(update={"schedule": schedule}).build(0.01, 40)
        state, sizes[schedule] = rule.init(layout, like=theta), []
        for _ in range(41):
            change, state = rule.update(torch.ones_like(theta), state, theta)
            sizes[schedule].append(float(change.norm()))
    ratios = [one / other for one, other in zip(sizes["cosine"], sizes["constant"], strict=True)]
    assert ratios == pytest.approx([oracles.warm_up_cosine(step, 2, 40) for step in range(41)], abs=1e-15)
    assert comparison.evaluate({}, quadratic, settings(baselines=[baseline])).chosen[optimiser][12].length == 12


def test_a_schedule_of_its_own_ends_at_the_horizon():
    choice = {"name": "scheduled", "optimiser": "momentum", "shape": "linear"}
    built = Baseline(optimiser=choice, rates=[0.1], schedule="cosine").build(0.1, 40)
    assert (built.shape, built.warm_up, built.total, built.optimiser.lr) == ("linear", 2, 40, 0.1)
    constant = Baseline(optimiser={**choice, "total": 7}, rates=[0.1]).build(0.1, 40)
    assert (constant.warm_up, constant.total) == (0, 7)
