"""The laws of unrolls for those that patch a module: single runs of a loss that knows its module."""

import subprocess
import sys
import weakref

import laws
import pytest
from implementations import (
    LEARNED,
    MIXTURES,
    MODULE_ESTIMATORS,
    OPTIMISERS,
    SAMPLED,
    crossed,
    module_optimisee,
    problem,
)
from torch import nn

from l2lopt import estimators
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.types import ModuleLoss
from l2lopt.estimators import Backprop
from l2lopt.estimators.higher import _patched
from l2lopt.optimisee import Optimisee, flat_loss
from optimisees import Quadratic

exact = pytest.mark.parametrize(
    ("order", "make"), [pytest.param(*row, id=label) for label, row in MODULE_ESTIMATORS.items()]
)
each_module_unroll = pytest.mark.parametrize(
    "make", [pytest.param(make, id=label) for label, (_, make) in MODULE_ESTIMATORS.items()]
)
DIRECTION = "coordinatewise direction-and-magnitude"


def run_of(optimiser=DIRECTION, optimisee="mlp", mixture="next batch and heldout", length=3):
    return problem(optimiser, optimisee, mixture, seeds=1, length=length)


@exact
@pytest.mark.parametrize(("rule", "objective"), crossed(LEARNED, ["loss", "log-loss"]))
def test_meta_gradient_is_exact(order, make, objective, rule):
    laws.assert_meta_gradient_is_exact(make(objective=objective), run_of(rule), order, objective)


@exact
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("optimisee", SAMPLED)
def test_meta_gradient_is_exact_with_running_statistics_and_masks(order, make, optimisee, mixture):
    laws.assert_meta_gradient_is_exact(make(), run_of(DIRECTION, optimisee, mixture), order, "loss")


class Twice(nn.Module):
    """One layer at two places, with one weight and one set of running statistics."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(18, 18), nn.BatchNorm1d(18), nn.Tanh())
        self.again, self.head = self.block, nn.Linear(18, 3)

    def forward(self, x):
        return self.head(self.again(self.block(x.flatten(1))))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(18, 18), nn.Linear(18, 18, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x.flatten(1)).tanh())


@exact
@pytest.mark.parametrize("model", [Twice, Tied])
def test_layers_and_weights_may_be_shared(order, make, model):
    """The oracle, and with it the running statistics after both passes."""
    task, single = module_optimisee(model), run_of("coordinatewise additive", "module with batch norm")
    params, aux = task.init(1)
    layout = Layout.of(params)
    theta = layout.ravel(params)
    state = OPTIMISERS["coordinatewise additive"]().init(layout, (), like=theta)
    carry = single.carry._replace(params=theta, aux=aux, state=state)
    single = single._replace(loss=flat_loss(task, layout), carry=carry)
    laws.assert_meta_gradient_is_exact(make(), single, order, "loss")
    laws.assert_runs_the_inner_loop(make(), single)


@each_module_unroll
@pytest.mark.parametrize("objective", ["loss", "log-loss"])
def test_finite_differences_agree(make, objective):
    single = run_of("coordinatewise additive", "module with batch norm")
    laws.assert_finite_differences_agree(make(objective=objective), single)


@each_module_unroll
@pytest.mark.parametrize(("rule", "mixture"), crossed(OPTIMISERS, ["next batch", "heldout"]))
def test_runs_the_inner_loop(make, rule, mixture):
    laws.assert_runs_the_inner_loop(make(), run_of(rule, "module with batch norm", mixture))


@each_module_unroll
@pytest.mark.parametrize("length", [1, 3])
def test_pieces_make_the_whole(make, length):
    laws.assert_pieces_make_the_whole(make(), run_of(optimisee="module with dropout", length=5), length)


@each_module_unroll
@pytest.mark.parametrize("length", [1, 2, 9])
def test_truncation_sums_pieces(make, length):
    single = run_of("coordinatewise additive", "module with batch norm", length=5)
    laws.assert_truncation_sums_pieces(make(window=length), make(), single, length)


@each_module_unroll
@pytest.mark.parametrize("rule", ["sgd", DIRECTION])
def test_empty_unroll_gives_zeros(make, rule):
    laws.assert_empty_unroll_gives_zeros(make(), run_of(rule))


@each_module_unroll
@pytest.mark.parametrize("optimisee", ["module with batch norm", "module with dropout"])
def test_changes_nothing(make, optimisee):
    """Not the module either: its parameters and buffers stay."""
    single = run_of(optimisee=optimisee)
    before = laws.clone(single.loss.parts.module.state_dict(keep_vars=False))
    laws.assert_estimator_changes_nothing(make(window=2), single)
    laws.assert_same(dict(single.loss.parts.module.state_dict()), dict(before))


@each_module_unroll
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("objective", ["loss", "log-loss"])
def test_divergence_is_data(make, bad, objective):
    single = run_of(mixture="next batch")
    last = single.steps[-1]
    spoilt = last._replace(batch=last.batch | {"inputs": last.batch["inputs"] * bad})
    result = laws.run(make(objective=objective), single._replace(steps=[*single.steps[:-1], spoilt]))
    assert result.finite is False
    assert not result.losses[-1].isfinite()


def test_agrees_with_taped_to_rounding():
    single = run_of(optimisee="module with dropout2d")
    patched, taped = (laws.run(unroll, single) for unroll in (estimators.Higher(), Backprop(2)))
    laws.assert_close(patched.gradient, taped.gradient)
    laws.assert_close((patched.value, patched.losses, patched.carry), (taped.value, taped.losses, taped.carry))


def test_only_the_last_weights_are_kept():
    """The library would keep those of every call, for its own optimisers."""
    single = run_of("sgd")
    loss, seen = _patched(single.loss), []
    for _ in range(3):
        theta = single.carry.params.clone()
        seen.append(weakref.ref(theta))
        loss(theta, single.carry.aux, single.steps[0].batch)
        del theta
    assert [ref() is None for ref in seen] == [True, True, False]


def test_a_module_loss_is_the_flat_loss():
    for seeds in (1, (1, 2)):
        task = problem("sgd", "module with dropout", seeds=seeds)
        assert isinstance(task.loss, ModuleLoss)
        assert task.loss.layout == task.carry.state.layout
        args = (task.carry.params, task.carry.aux, task.steps[0].batch)
        laws.assert_same(task.loss(*args), task.loss.flat(*args))


def test_an_optimisee_offers_no_parts_unless_it_says_so():
    assert Quadratic(4).module_parts() is None
    assert Quadratic.module_parts is Optimisee.module_parts
    assert not isinstance(problem("sgd", "quadratic").loss, ModuleLoss)


@each_module_unroll
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            lambda: problem("sgd", "quadratic", seeds=1),
            "loss: expected a ModuleLoss, found function: .*; use .*backprop",
        ),
        (
            lambda: problem("sgd", "mlp", seeds=(1, 2)),
            r"expected a single run, \[n\], found \[2, .*one run; use .*backprop",
        ),
    ],
    ids=["loss", "rows"],
)
def test_what_cannot_be_patched_is_refused(make, task, message):
    with pytest.raises(UserError, match=message):
        laws.run(make(), task())


@pytest.mark.parametrize("options", [{"window": 0}, {"order": 1}, {"objective": "logloss"}], ids=str)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        estimators.make("higher", **options)


@pytest.mark.slow
def test_the_library_is_imported_on_use_and_without_warnings():
    """In an interpreter of its own, as only the first import compiles; -B and no cache, so that it does."""
    code = """
import sys, warnings
from l2lopt.estimators import higher
assert "higher" not in sys.modules
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    higher.library()
assert "higher" in sys.modules and not caught, [str(w.message) for w in caught]
"""
    options = ["-B", "-X", "pycache_prefix=/nonexistent"]
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
