"""Meta-gradients of the exact unrolls against `torch.func`, finite differences and each other's pieces."""

import laws
import pytest
import torch
from implementations import (
    DETERMINISTIC_ESTIMATORS,
    EXACT_ESTIMATORS,
    LEARNED,
    MIXTURES,
    OPTIMISERS,
    crossed,
    each,
    problem,
)

from l2lopt import estimators
from l2lopt.core.errors import UserError
from l2lopt.estimators import Backprop

exact = pytest.mark.parametrize("name", EXACT_ESTIMATORS)
each_unroll = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name) for name, make in DETERMINISTIC_ESTIMATORS.items()]
)
DIRECTION = "coordinatewise direction-and-magnitude"


@exact
@pytest.mark.parametrize(("rule", "mixture", "objective"), crossed(LEARNED, MIXTURES, ["loss", "log-loss"]))
def test_meta_gradient_is_exact(name, objective, rule, mixture):
    order, make = EXACT_ESTIMATORS[name]
    laws.assert_meta_gradient_is_exact(make(objective=objective), problem(rule, mixture=mixture), order, objective)


@exact
@pytest.mark.parametrize("optimisee", ["quadratic", "module with batch norm", "module with dropout2d"])
@pytest.mark.parametrize("seeds", [3, (3, 4)], ids=["run", "rows"])
def test_meta_gradient_is_exact_on_every_kind_of_optimisee(name, optimisee, seeds):
    order, make = EXACT_ESTIMATORS[name]
    task = problem(DIRECTION, optimisee, seeds=seeds, length=3)
    laws.assert_meta_gradient_is_exact(make(), task, order, "loss")


@pytest.mark.parametrize("name", [name for name, (order, _) in EXACT_ESTIMATORS.items() if order == 2])
@pytest.mark.parametrize(("rule", "objective"), crossed(LEARNED, ["loss", "log-loss"]))
def test_finite_differences_agree(name, objective, rule):
    unroll = EXACT_ESTIMATORS[name][1](objective=objective)
    laws.assert_finite_differences_agree(unroll, problem(rule, "quadratic", seeds=1, length=3))


def test_first_order_drops_what_second_order_keeps():
    task = problem()
    first, second = (laws.run(Backprop(order), task) for order in (1, 2))
    laws.assert_close(first.value, second.value)
    assert any((first.gradient[name] - second.gradient[name]).abs().max() > 1e-6 for name in task.phi)


@exact
@pytest.mark.parametrize("objective", ["loss", "log-loss"])
def test_the_loss_and_the_parameters_are_inputs_too(name, objective):
    """The loss a constant in first order; the parameters a variable in both."""

    def update(phi, g, state, params, loss, after=None):
        return -(phi["rate"] * loss[..., None].sigmoid() * g + phi["decay"] * params.tanh()), state

    order, make = EXACT_ESTIMATORS[name]
    phi = {"rate": torch.tensor(0.3).double(), "decay": torch.tensor(0.1).double()}
    task = problem("sgd")._replace(update=update, phi=phi)
    laws.assert_meta_gradient_is_exact(make(objective=objective), task, order, objective)


@each_unroll
@pytest.mark.parametrize(("rule", "mixture"), crossed(OPTIMISERS, ["next batch", "heldout"]))
def test_runs_the_inner_loop(make, rule, mixture):
    laws.assert_runs_the_inner_loop(make(), problem(rule, "module with batch norm", mixture, length=3))


@each_unroll
@pytest.mark.parametrize("rule", each(LEARNED))
def test_rows_average(make, rule):
    laws.assert_rows_average(make(), problem(rule, seeds=(2, 5, 6)), [problem(rule, seeds=s) for s in (2, 5, 6)])


@each_unroll
@pytest.mark.parametrize("length", [1, 3])
def test_pieces_make_the_whole(make, length):
    laws.assert_pieces_make_the_whole(make(), problem(length=5), length)


@each_unroll
@pytest.mark.parametrize(("rule", "length"), crossed(LEARNED, [2, 9, 3]))
def test_truncation_sums_pieces(make, rule, length):
    laws.assert_truncation_sums_pieces(make(window=length), make(), problem(rule, length=5), length)


@each_unroll
@pytest.mark.parametrize(("rule", "seeds"), crossed({"sgd": None} | LEARNED, [1, (1, 2)]))
def test_empty_unroll_gives_zeros(make, rule, seeds):
    laws.assert_empty_unroll_gives_zeros(make(), problem(rule, seeds=seeds))


@each_unroll
def test_changes_nothing(make):
    laws.assert_estimator_changes_nothing(make(window=2), problem(DIRECTION))


@each_unroll
@pytest.mark.parametrize(("bad", "objective"), [(float("inf"), "log-loss"), (float("nan"), "loss")])
@pytest.mark.parametrize("rule", each({"sgd": None} | LEARNED))
def test_divergence_is_data(make, rule, bad, objective):
    laws.assert_divergence_is_data(make(objective=objective), problem(rule, mixture="next batch"), bad)


@each_unroll
@pytest.mark.parametrize(
    ("change", "targets"),
    [(lambda a: a / 0, False), (lambda a: (a - a.detach()).square().sqrt(), True)],
    ids=["parameters", "gradient"],
)
def test_finite_looks_at_parameters_and_gradient_too(make, change, targets):
    task = problem("sgd", length=1)
    steps = task.steps if targets else [task.steps[0]._replace(targets=())]

    def update(phi, g, state, params, loss, after=None):
        return change(phi["a"]) * torch.ones_like(params), state

    result = laws.run(make(), task._replace(update=update, phi={"a": torch.ones(()).double()}, steps=steps))
    assert result.value.isfinite()
    assert result.finite is False


@each_unroll
def test_steps_are_read_once_and_in_order(make):
    task = problem()
    laws.assert_same(vars(make()(*task[:4], iter(task.steps))), vars(laws.run(make(), task)))


@each_unroll
def test_steps_without_targets_add_nothing(make):
    """The meta-loss of the last step alone still differentiates through all steps."""
    task = problem()
    late = task._replace(steps=[*(step._replace(targets=()) for step in task.steps[:-1]), task.steps[-1]])
    order = next((order for order, other in EXACT_ESTIMATORS.values() if other is make), 1)
    laws.assert_meta_gradient_is_exact(make(), late, order, "loss")
    silent = laws.run(make(), task._replace(steps=[step._replace(targets=()) for step in task.steps]))
    assert silent.value == 0
    laws.assert_same(silent.gradient, {name: torch.zeros_like(value) for name, value in task.phi.items()})


@pytest.mark.parametrize("options", [{"window": 0}, {"order": 3}, {"objective": "logloss"}], ids=str)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        estimators.make("backprop", **options)


def test_earlier_spellings_in_configs_are_read():
    for name in ("taped", "backprop"):
        made = estimators.make(name, truncation=3)
        assert isinstance(made, Backprop)
        assert made.window == 3
    assert estimators.make("blockwise", truncation=3).window == 3
