"""The choice between eager and compiled steps."""

from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import optimisees
from l2lopt.evaluation.settings import Baseline, EvaluationSettings
from l2lopt.evaluation.step_backend import MOST, WORTH, StepBackend, group_size, step_backend


@given(st.lists(st.integers(0, 200), min_size=1, max_size=3).filter(any))
def test_no_other_group_size_makes_less_work(counts):
    def work(size):
        return sum(ceil(count / size) * (size + 2) for count in counts)

    size = group_size(counts)
    assert 1 <= size <= min(MOST, max(counts))
    assert all(work(size) <= work(other) for other in range(1, min(MOST, max(counts)) + 1))


@pytest.fixture(scope="module")
def quadratic():
    return optimisees.make("quadratic", size=2)


def chosen(task, optimiser="adam", rates=(0.1,), schedule="constant", **changes):
    baseline = Baseline(optimiser=optimiser, rates=list(rates), schedule=schedule)
    return step_backend(baseline.contestant(), task, EvaluationSettings(horizons=[100], **changes))


def test_auto_compiles_where_there_are_enough_steps(quadratic):
    few, many = {"seeds": 10, "steps": WORTH - 1}, {"seeds": 10, "steps": WORTH}
    assert chosen(quadratic, **few) == StepBackend("eager", None)
    assert chosen(quadratic, **many) == StepBackend("compile", 10)
    assert chosen(quadratic, **many, backend="eager") == StepBackend("eager", None)
    assert chosen(quadratic, **few, backend="compile") == StepBackend("compile", 10)
    assert chosen(quadratic, **few, rows=2) == StepBackend("compile", 2)  # five groups, each of so many steps


def test_tuning_counts(quadratic):
    """Five seeds at two rates, 2,000 steps; then 10 seeds once for each split and horizon, 2 · (100 + 2,000) steps."""
    assert chosen(quadratic, rates=[0.1, 1.0], seeds=10, steps=2000, tuning_seeds=5) == StepBackend("compile", 10)
    assert chosen(quadratic, seeds=10, steps=2000, tuning_seeds=5) == StepBackend("eager", None)


def test_classes_of_torch_and_other_devices_stay_eager(quadratic):
    assert chosen(quadratic, "torch.optim:SGD", steps=WORTH) == StepBackend("eager", None)

    class Elsewhere(type(quadratic)):
        def init(self, seed):
            return {"theta": torch.zeros(2, device="meta")}, {}

    assert chosen(Elsewhere(size=2), steps=WORTH) == StepBackend("eager", None)
    assert chosen(Elsewhere(size=2), steps=WORTH, seeds=10, backend="compile") == StepBackend("compile", 10)
