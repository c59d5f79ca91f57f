"""The forecast of costs: every optimiser by its own step, whatever the clock says."""

from dataclasses import dataclass

import pytest
import torch

from l2lopt.evaluation.free_runs import Curves
from l2lopt.evaluation.settings import Baseline
from l2lopt.experiments import build, config, cost_forecast
from l2lopt.experiments.cost_forecast import PlannedRun, forecast, format_duration
from l2lopt.optimisers import SGD, Coordinatewise, Scheduled

CONFIG = {
    "optimisee": {"name": "quadratic", "size": 3},
    "optimiser": {"name": "coordinatewise", "hidden_size": 2},
    "unroll": {"length": 4},
    "meta": {"updates": 6, "batch": 2, "validate_every": 3},
    "validation": {"seeds": 2, "horizons": [2, 5]},
    "evaluation": {
        "seeds": 3,
        "steps": 10,
        "horizons": [4],
        "tuning_seeds": 2,
        "baselines": [
            {"optimiser": "sgd", "rates": [0.1, 1.0]},
            {"optimiser": "adam", "rates": [0.01, 0.1, 1.0], "schedule": "cosine"},
            {"optimiser": "torch.optim:LBFGS", "rates": [1.0]},
        ],
    },
}
STEP = {"learned": 1e6, "sgd": 1.0, "adam": 10.0, "torch.optim:LBFGS": 100.0}


@dataclass
class Clock:
    """Free runs that take the time the table says."""

    asked: list
    forms: list

    def run_free(self, optimiser, optimisee, seeds, record, splits=(), backend="eager"):
        optimiser = optimiser.optimiser if isinstance(optimiser, Scheduled) else optimiser
        name = "learned" if isinstance(optimiser, Coordinatewise) else "sgd" if isinstance(optimiser, SGD) else None
        name = name or ("adam" if isinstance(optimiser, torch.nn.Module) else optimiser.name)
        self.asked.append(name)
        self.forms.append((name, len(seeds), backend))
        return Curves([], {}, torch.zeros(1), STEP[name] * (1.0 if backend == "eager" else 0.25))


@pytest.fixture
def clock(monkeypatch):
    found = Clock([], [])
    monkeypatch.setattr(cost_forecast, "run_free", found.run_free)
    monkeypatch.setattr(cost_forecast.kernels, "fuse", lambda optimiser, backend: optimiser)
    monkeypatch.setattr(cost_forecast, "_seconds", lambda work, enough=0: 0.0)  # evaluations and unrolls are free
    return found


def test_every_baseline_has_its_own_cost(clock):
    """Runs of 10 steps: 3 reported, and 2 problems for each rate, with a cosine at every horizon, 4 and 10."""
    settings = config.load(CONFIG)
    costs = {one.name: forecast([PlannedRun(settings, one)])["baselines"] for one in settings.evaluation.baselines}
    expected = {
        "sgd": 1.0 * (3 * 10 + 2 * 2 * 10),
        "adam": 10.0 * (3 * (4 + 10) + 2 * 3 * (4 + 10)),
        "torch.optim:LBFGS": 100.0 * 3 * 10,  # a single rate is not tuned
    }
    assert costs == pytest.approx(expected)
    clock.asked.clear()
    whole = forecast([PlannedRun(settings, one) for one in settings.evaluation.baselines])
    assert whole["baselines"] == pytest.approx(sum(expected.values()))
    assert clock.asked.count("sgd") == clock.asked.count("learned") == 2  # measured once, after a first try


def test_long_work_is_timed_once_and_other_work_again(monkeypatch):
    ticks = iter([0.0, 7.0, 7.0, 20.0, 26.0, 26.0, 28.0])
    monkeypatch.setattr(cost_forecast.time, "perf_counter", lambda: next(ticks))
    calls = []
    assert cost_forecast._seconds(lambda: calls.append("long"), enough=7.0) == 7
    assert cost_forecast._seconds(lambda: calls.append("short"), enough=7.0) == 2
    assert calls == ["long", "short", "short"]


def test_a_second_row_has_its_multipliers_tuned(clock):
    settings = config.load(CONFIG, ["evaluation.multipliers=[0.1, 1.0, 10.0]"])
    for tuned, cost in ((False, 3 * 10), (True, 2 * 3 * 10 + 2 * 3 * 10)):
        assert forecast([PlannedRun(settings, None, tuned=tuned)])["free runs"] == pytest.approx(1e6 * cost)


def test_an_optimiser_that_takes_part_as_it_is_has_its_own_cost(clock, monkeypatch):
    """Nothing is unrolled for it; the harness runs to each horizon, 4 and 10."""
    monkeypatch.setattr(cost_forecast, "_unrolled", None)
    settings = config.load(CONFIG)
    given = {"name": "sgd", "lr": 0.1}, {"name": "normalised-muon"}
    for choice, cost in zip(given, (1.0 * 3 * 10, 10.0 * 3 * (4 + 10)), strict=True):
        assert forecast([PlannedRun(settings, None, given=choice)])["free runs"] == pytest.approx(cost)


def test_steps_that_will_be_compiled_are_timed_so(clock):
    """Four times as quick here, in groups as large as theirs; validations are eager, and so are classes of torch."""
    settings = config.load(CONFIG, ["evaluation.backend='compile'"])
    runs = [PlannedRun(settings, None, 1.0), *(PlannedRun(settings, one) for one in settings.evaluation.baselines)]
    costs = forecast(runs)
    assert costs["free runs"] == pytest.approx(0.25 * 1e6 * 3 * 10)
    assert costs["meta-training"] == pytest.approx(3 * 2 * 5 * 1e6)
    assert costs["baselines"] == pytest.approx(0.25 * (70 + 10 * 126) + 100 * 3 * 10)
    # Rows of the groups: all three problems; four runs at two rates with three reported; six at three with three.
    forms = {("learned", 3, "compile"), ("learned", 3, "eager"), ("sgd", 4, "compile"), ("adam", 3, "compile")}
    assert set(clock.forms) == {*forms, ("torch.optim:LBFGS", 3, "eager")}


def test_without_anything_to_tune_no_held_out_sample_is_asked_for(clock):
    settings = config.load(
        {**CONFIG, "optimisee": {"name": "mlp", "hidden": [2], "heldout": 0.0}},
        ["evaluation.multipliers=[]", "evaluation.baselines=[{optimiser='sgd', rates=[0.1]}]"],
    )
    assert forecast([PlannedRun(settings, settings.evaluation.baselines[0])])["baselines"] == pytest.approx(3 * 10)


def test_meta_seeds_share_a_measurement_and_a_rest_costs_its_share(clock):
    one, other = (config.load(CONFIG, [f"seed={seed}", f"label='{seed}'"]) for seed in (0, 1))
    costs = forecast([PlannedRun(one, None, 1.0), PlannedRun(other, None, 0.25)])
    assert clock.asked == ["learned", "learned"]
    assert costs["free runs"] == pytest.approx(2 * 1e6 * 3 * 10)
    assert costs["meta-training"] == pytest.approx(1.25 * 3 * 2 * 5 * 1e6)  # three validations, unrolls are free
    assert costs["baselines"] == 0


def test_each_problem_of_meta_training_and_validation_costs_its_own(monkeypatch):
    """One that stands there twice is measured once; seconds are the sizes of the problems."""
    changes = [
        "trained_on=[{name='quadratic', size=5}, {name='quadratic', size=5}, {name='quadratic', size=8}]",
        "validation.on=[{name='quadratic', size=7}, {name='quadratic', size=9}]",
    ]
    unrolled, ran = [], []

    def unroll(experiment, seed, optimisee):
        unrolled.append(optimisee.size)
        return float(optimisee.size)

    def run_free(optimiser, optimisee, seeds, record, splits=(), backend="eager"):
        ran.append(optimisee.size)
        return Curves([], {}, torch.zeros(1), float(optimisee.size))

    monkeypatch.setattr(cost_forecast, "_unrolled", unroll)
    monkeypatch.setattr(cost_forecast, "run_free", run_free)
    monkeypatch.setattr(cost_forecast, "_seconds", lambda work, enough=0: 0.0)
    costs = forecast([PlannedRun(config.load(CONFIG, changes), None, 1.0)])
    assert (unrolled, ran) == ([5, 8], [3, 3, 7, 7, 9, 9])  # each after a first try
    # Six updates of two unrolls of four steps; three validations of two seeds on two problems, five steps.
    assert costs["meta-training"] == pytest.approx(6 * 2 * 4 * 6 + 3 * 2 * 2 * 5 * 8)
    assert costs["free runs"] == pytest.approx(3 * 10 * 3)


def test_the_clock_itself(monkeypatch):
    """Without the table of times: some positive number for every kind of step."""
    settings = config.load(CONFIG)
    costs = cost_forecast.measure_costs(build.build(settings), [Baseline(optimiser="torch.optim:Adam", rates=[0.1])])
    assert min(costs.learned, costs.unrolled, *costs.evaluations.values(), *costs.baselines.values()) > 0
    assert set(costs.baselines) == {"torch.optim:Adam"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5 s"),
        (9.94, "9.9 s"),
        (110, "110 s"),
        (119, "119 s"),
        (120, "2.0 min"),
        (6000, "100 min"),
        (7200, "2.0 h"),
    ],
)
def test_durations_are_whole_numbers_or_two_digits(seconds, text):
    assert format_duration(seconds) == text
