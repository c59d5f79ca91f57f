"""Evaluation: paired problems, tuned baselines, honest intervals."""

import itertools
import math
from typing import ClassVar

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
from l2lopt.evaluation import comparison, free_runs
from l2lopt.evaluation.comparison import interval
from l2lopt.evaluation.free_runs import record_steps, run_free
from l2lopt.evaluation.settings import Baseline, EvaluationSettings, half_decades
from l2lopt.evaluation.tuned_runs import OptimiserRun, TunedRun, reading_time
from l2lopt.optimisee import Optimisee, evaluate_rows, init_rows
from l2lopt.optimisers import SGD, NormalisedMuon, Optimiser


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
        **{"seeds": 3, "steps": 12, "horizons": [5, 12], "tuning_seeds": 2, "baselines": baselines, "multipliers": []}
        | changes
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
        for split in ("train", "test"):  # all splits of a quadratic are one
            assert result.chosen["sgd"][split][horizon] == TunedRun(min(finite, key=finite.get), 12)
    reported = {seed_of("evaluation", 5, index) for index in range(3)}
    assert not reported & set(tuning)


class Apart(Optimisee):
    """(w − target)², the target another one on each split; keeps what it was asked for."""

    targets: ClassVar = {"train": 1.0, "inner": 1.0, "heldout": 0.2, "test": 0.2}

    def __init__(self):
        self.trained, self.evaluated = set(), set()

    def init(self, seed):
        return {"w": torch.zeros((), dtype=torch.float64)}, {}

    def batch(self, split, seed, step):
        self.trained.add((seed, split))
        return torch.tensor(self.targets[split], dtype=torch.float64)

    def evaluation_batches(self, split, seed):
        self.evaluated.add((seed, split))
        yield torch.tensor(self.targets[split], dtype=torch.float64), 1

    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch), aux

    def evaluate(self, params, aux, batch):
        return (params["w"] - batch).square()


def test_each_split_has_a_rate_of_its_own_chosen_on_samples_that_nobody_reports():
    """One step from 0: rate 0.5 arrives at the training target, 0.1 at that of the held-out samples."""
    task = Apart()
    baseline = Baseline(optimiser="sgd", rates=[0.05, 0.1, 0.3, 0.5, 0.8])
    result = comparison.evaluate({}, task, settings(steps=1, horizons=[1], baselines=[baseline]), seed=5)
    assert {split: chosen[1].rate for split, chosen in result.chosen["sgd"].items()} == {"train": 0.5, "test": 0.1}
    assert {(row.split, row.horizon): row.mean for row in result.table} == {
        ("train", 1): pytest.approx(0.0, abs=1e-12),
        ("test", 1): pytest.approx(0.0, abs=1e-12),
    }
    tuning = {seed_of("tuning", 5, index) for index in range(2)}
    reported = {seed_of("evaluation", 5, index) for index in range(3)}
    checked = {(0, "heldout")}  # that there are such samples
    assert task.trained == {(seed, "inner") for seed in tuning} | {(seed, "train") for seed in reported}
    assert task.evaluated - checked == {
        *((seed, split) for seed in tuning for split in ("inner", "heldout")),
        *((seed, split) for seed in reported for split in ("train", "test")),
    }


def test_a_problem_without_held_out_samples_is_refused_before_any_run():
    mlp = optimisees.make("mlp", heldout=0.0)
    with pytest.raises(
        UserError, match=r"evaluation: expected held-out samples .*; raise heldout, or give single rates"
    ):
        comparison.evaluate({}, mlp, settings())
    one = settings(baselines=[Baseline(optimiser="sgd", rates=[0.1])])
    assert comparison.evaluate({}, mlp, one).chosen == {}


def test_a_single_multiplier_is_nothing_to_tune(quadratic):
    result = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings(multipliers=[3.0], baselines=[]))
    assert {row.optimiser for row in result.table} == {"mine"}


def test_rows_of_one_problem_are_evaluated_on_one_copy_of_its_samples(monkeypatch):
    """As a grid of rates has them; each to what it is by itself."""
    task, seeds = optimisees.make("mlp", hidden=[3], dtype="float64", evaluation_samples=50), [4, 9, 4, 4]
    layout, params, aux = init_rows(task, seeds)
    params = params + 0.1 * torch.arange(4, dtype=torch.float64)[:, None]
    expected = [evaluate_rows(task, layout, "heldout", [s], params[k : k + 1], aux) for k, s in enumerate(seeds)]
    asked, plain = [], task.evaluation_batches
    monkeypatch.setattr(task, "evaluation_batches", lambda split, seed: asked.append(seed) or plain(split, seed))
    monkeypatch.setattr("l2lopt.optimisee.stack", None)
    found = evaluate_rows(task, layout, "heldout", seeds, params, aux)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-12, atol=0)
    assert asked == [4, 9]


def test_a_learned_optimiser_has_a_second_row_at_its_best_multiplier(quadratic):
    multipliers = [0.1, 1.0, 3.0]
    result = comparison.evaluate(
        {"mine": SGD(0.01)}, quadratic, settings(multipliers=multipliers, baselines=[]), seed=2
    )
    grid = [Baseline(optimiser="sgd", rates=[0.01 * each for each in multipliers])]
    tuned = comparison.evaluate({}, quadratic, settings(baselines=grid), seed=2)
    names = {"mine": "mine", "sgd": "mine, multiplier tuned"}
    for row in tuned.rows:
        other = next(one for one in result.rows if one.optimiser == names["sgd"] and one[2:5] == row[2:5])
        assert other.loss == pytest.approx(row.loss, rel=1e-12)
    chosen = result.chosen["mine, multiplier tuned"]["train"]
    assert {h: 0.01 * run.rate for h, run in chosen.items()} == pytest.approx(
        {h: run.rate for h, run in tuned.chosen["sgd"]["train"].items()}
    )
    assert "mine" not in result.chosen
    assert result.cut == ["mine, multiplier tuned"]
    assert {row.kind for row in result.table} == {"learned"}


def test_an_optimiser_that_knows_its_end_runs_to_each_horizon(quadratic):
    """Untuned, as a learned rule or as a baseline: at every horizon the run that was told of that end."""
    single = Baseline(optimiser="normalised-muon", rates=[0.03])
    harness = optimisers.make("normalised-muon")
    result = comparison.evaluate({"mine": harness}, quadratic, settings(baselines=[single]), seed=3)
    seeds = [seed_of("evaluation", 3, index) for index in range(3)]
    for horizon in (5, 12):
        told = run_free(harness, quadratic, seeds, [0, horizon], total_steps=horizon).losses["train"][1]
        for name in ("mine", "normalised-muon"):
            row = next(r for r in result.table if (r.optimiser, r.horizon, r.split) == (name, horizon, "train"))
            assert row.mean == pytest.approx(float(told.mean()), rel=1e-12)
    assert result.cut == ["mine", "normalised-muon"]


def test_runs_may_be_told_of_a_later_end(quadratic):
    harness = optimisers.make("normalised-muon")
    whole = run_free(harness, quadratic, [3], [4, 12]).losses["train"][0]
    assert torch.equal(run_free(harness, quadratic, [3], [4], total_steps=12).losses["train"][0], whole)
    assert not torch.equal(run_free(harness, quadratic, [3], [4]).losses["train"][0], whole)


def test_a_baselines_curve_is_the_run_tuned_for_the_next_horizon(quadratic):
    result = comparison.evaluate({}, quadratic, settings(), seed=1)
    seed = seed_of("evaluation", 1, 0)
    for row in result.rows:
        if row.optimiser == "sgd" and row.split == "train" and row.seed == 0:
            rate = result.chosen["sgd"]["train"][5 if row.step <= 5 else 12].rate
            assert row.loss == pytest.approx(by_hand(quadratic, rate, seed, row.step)[row.step], rel=1e-9)


def test_of_chosen_runs_only_what_is_shown_is_evaluated(quadratic, monkeypatch):
    """Each split once at each recorded step, however many runs share the curve; tuning reads the horizons alone."""
    asked = []

    def evaluate(task, layout, split, seeds, params, aux):
        asked.append((split, len(seeds)))
        return evaluate_rows(task, layout, split, seeds, params, aux)

    monkeypatch.setattr(free_runs, "evaluate_rows", evaluate)
    adamw = settings().baselines[1:]
    result = comparison.evaluate({}, quadratic, settings(baselines=adamw))
    assert [len(set(by_horizon.values())) for by_horizon in result.chosen["adamw"].values()] == [2, 2]
    assert asked.count(("train", 3)) == asked.count(("test", 3)) == len(record_steps(12, [5, 12]))
    # Runs of 5 and 12 steps for all rates and seeds, read at 5, and at 5 and 12.
    assert asked.count(("inner", 6)) == asked.count(("heldout", 6)) == 3


@pytest.mark.parametrize(("each", "told"), [(2.0, True), (0.01, False)])
def test_evaluations_that_take_much_of_the_time_are_told_once(quadratic, monkeypatch, caplog, each, told):
    """Every stretch of steps and every evaluation of both splits takes the same time, long or short."""
    monkeypatch.setattr(free_runs, "_since", lambda start, like: each)
    with caplog.at_level("INFO", logger="l2lopt"):
        comparison.evaluate({}, quadratic, settings(baselines=settings().baselines[:1]))
    lines = [record.getMessage() for record in caplog.records if "evaluations took" in record.getMessage()]
    assert len(lines) == told
    assert all(line.startswith("sgd: ") for line in lines)


def test_the_time_of_evaluations_is_that_of_all_runs():
    """Of 2 runs of 10 steps at 3 s, 1 of them for evaluations, and of one run of 4 steps at 5 s."""
    some = free_runs.Curves([0, 10], {}, torch.zeros(2), 2.0, 1.0)
    other = free_runs.Curves([4], {}, torch.zeros(1), 5.0)
    assert reading_time([some, other]) == (20.0, 80.0)
    assert reading_time([]) == (0, 0)


def test_every_recorded_step_has_every_seed_once(quadratic):
    result = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings())
    keys = [row[:5] for row in result.rows]
    steps = record_steps(12, [5, 12])
    assert len(set(keys)) == len(keys) == 3 * 2 * 3 * len(steps)


def test_fewer_readings_show_fewer_steps_of_the_same_runs(quadratic):
    """Steps 1, 3 and 12 are three over a little more than a decade; 5 is a horizon."""
    whole = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings())
    fewer = comparison.evaluate({"mine": SGD(0.01)}, quadratic, settings(readings=3))
    assert {row.step for row in fewer.rows} == {0, 1, 3, 5, 12}
    assert set(fewer.rows) <= set(whole.rows)


def test_a_schedule_with_an_end_tries_the_ends_of_later_horizons(quadratic):
    result = comparison.evaluate({}, quadratic, settings())
    for chosen in result.chosen["adamw"].values():
        assert chosen[5].length in (5, 12)
        assert chosen[12].length == 12


def test_a_rate_at_the_edge_of_its_grid_is_reported(quadratic):
    result = comparison.evaluate(
        {}, quadratic, settings(baselines=[Baseline(optimiser="sgd", rates=[1e-6, 1e-5, 1e-4])])
    )
    assert len(result.warnings) == 4  # two horizons, two splits
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
    *tuned, harness = EvaluationSettings().baselines
    assert harness.rates == [NormalisedMuon().lr]
    for baseline in tuned:
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
    run = OptimiserRun("learned", {"train": steps, "test": steps}, torch.tensor([2.5, 2.5]), 0.0)
    assert {row.diverged for row in comparison.compare({"rule": run}, [5]).table} == {1}


def free_run(*ends, kind="learned"):
    losses = {0: torch.full((len(ends),), 2.3), 5: torch.tensor(ends)}
    return OptimiserRun(kind, {"train": losses, "test": losses}, losses[0], 0.0)


def test_an_infinite_loss_makes_the_mean_infinite():
    """As a loss that is not a number does; the difference to the best baseline as well."""
    for end in (math.inf, math.nan):
        runs = {"rule": free_run(0.5, end, 0.2), "adam": free_run(0.3, 0.3, 0.3, kind="baseline")}
        for line in comparison.compare(runs, [5]).table[::2]:
            assert (line.optimiser, line.mean, line.difference, line.diverged) == ("rule", math.inf, math.inf, 1)


def test_every_run_behind_a_mean_counts_among_the_diverged():
    parts = [free_run(5.0, 5.0, math.nan), free_run(0.1, 0.1, 0.1), free_run(0.1, 0.1, 0.1)]
    result = comparison.compare({"rule": free_run(1.7, 1.7, 1.7)}, [5], {"rule": parts})
    assert {line.diverged for line in result.table} == {3}


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
    grid = baseline.model_copy(update={"rates": [0.01, 0.02]})
    found = comparison.evaluate({}, quadratic, settings(baselines=[grid]))
    assert found.chosen[optimiser]["train"][12].length == 12


def test_a_schedule_of_its_own_ends_at_the_horizon():
    choice = {"name": "scheduled", "optimiser": "momentum", "shape": "linear"}
    built = Baseline(optimiser=choice, rates=[0.1], schedule="cosine").build(0.1, 40)
    assert (built.shape, built.warm_up, built.total, built.optimiser.lr) == ("linear", 2, 40, 0.1)
    constant = Baseline(optimiser={**choice, "total": 7}, rates=[0.1]).build(0.1, 40)
    assert (constant.warm_up, constant.total) == (0, 7)


@pytest.mark.parametrize("optimiser", [SGD(0.1), lambda params: torch.optim.SGD([p for _, p in params], lr=0.1)])
def test_progress_is_told_between_two_readings_once_a_second(quadratic, optimiser, monkeypatch):
    """By a clock of which a step takes four tenths of a second: a run may take hours, and is read seldom."""
    ticks = itertools.count()
    monkeypatch.setattr(free_runs.time, "monotonic", lambda: 0.2 * next(ticks))
    told = []
    curves = run_free(optimiser, quadratic, [0], [0, 40], report=lambda *args: told.append(args))
    between = [(done, figures) for _, done, total, figures in told if done < total]
    assert len(between) > 5
    assert all(figures["train"] == float(curves.losses["train"][0]) for _, figures in between)
    assert [done for done, _ in between] == sorted({done for done, _ in between})
    assert told[-1][1:] == (40, 40, {split: float(values[-1]) for split, values in curves.losses.items()})
    monkeypatch.setattr(free_runs.time, "monotonic", lambda: 0.0)
    told.clear()
    run_free(optimiser, quadratic, [0], [0, 40], report=lambda *args: told.append(args))
    assert [done for _, done, _, _ in told] == [0, 40]
