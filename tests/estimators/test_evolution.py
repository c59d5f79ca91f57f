"""Evolution strategies: the laws of any unroll, and the convergence of their mean."""

import math

import laws
import pytest
import torch
from implementations import EVOLUTION, RANDOM_ESTIMATORS, Problem, problem
from torch.utils import _pytree as pytree

from l2lopt import estimators, kernels, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, InnerStep, OptimiserState, Target, detach
from l2lopt.estimators import Backprop, EvolutionStrategies

each_estimator = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name) for name, make in RANDOM_ESTIMATORS.items()]
)

each_evolution = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in EVOLUTION.items()])


@each_estimator
@pytest.mark.parametrize("rule", ["sgd", "coordinatewise additive"])
def test_runs_the_inner_loop(make, rule):
    laws.assert_runs_the_inner_loop(make(), problem(rule, "module with batch norm", "heldout", length=3))


@each_estimator
@pytest.mark.parametrize("length", [1, 3])
def test_pieces_make_the_whole(make, length):
    laws.assert_pieces_make_the_whole(make(), problem(length=5), length)


@each_estimator
def test_changes_nothing(make):
    laws.assert_estimator_changes_nothing(make(), problem())


@each_estimator
def test_a_carry_has_memory_of_its_own(make):
    """And does not keep that of all perturbed runs from one call to the next."""
    carry = laws.run(make(), problem()).carry
    for value in pytree.tree_leaves(carry):
        assert not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() <= value.nbytes


@each_estimator
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_divergence_is_data(make, bad):
    laws.assert_divergence_is_data(make(), problem(mixture="next batch"), bad)


@each_estimator
def test_empty_unroll_gives_zeros(make):
    laws.assert_empty_unroll_gives_zeros(make(), problem())


@each_estimator
@pytest.mark.parametrize("objective", ["loss", "log-loss"])
def test_value_is_that_of_backpropagation(make, objective):
    task = problem(length=3)
    values = [laws.run(unroll, task).value for unroll in (make(objective=objective), Backprop(objective=objective))]
    laws.assert_close(*values)


@each_evolution
def test_a_floor_is_added_before_the_logarithm(make):
    task = problem(length=1)
    (step,) = task.steps
    value = laws.run(make(objective="log-loss", floor=0.3), task).value
    carry = laws.run(make(), task).carry
    terms = [
        target.weight * (task.loss(carry.params, carry.aux, target.batch)[0] + 0.3).log() for target in step.targets
    ]
    laws.assert_close(value, sum(terms).mean())


@each_estimator
def test_the_state_keeps_its_structure(make):
    """So that a checkpoint can hold it."""
    task = problem(length=2)
    before = make().init(task.carry, task.phi, 3)
    after = make()(*task[:4], task.steps, before).state
    assert torch.utils._pytree.tree_structure(before) == torch.utils._pytree.tree_structure(after)
    laws.assert_same(detach(after["calls"]), torch.tensor(1))


def learned_rate(length):
    """Gradient descent on one quadratic whose rate is e to the one meta-parameter: a smooth, curved meta-loss."""

    def update(phi, g, state, params, loss):
        return -phi["log_rate"].exp() * g, state

    task = problem("sgd", "quadratic", "next batch", seeds=0, length=length)
    return task._replace(update=update, phi={"log_rate": torch.tensor(-4.0, dtype=torch.float64)})


def sampled(unroll, task, length, seeds):
    """Mean and standard error of the summed estimates over a run cut into calls of `length` steps."""
    values = []
    for seed in range(seeds):
        carry, state, total = task.carry, unroll.init(task.carry, task.phi, seed), 0.0
        for start in range(0, len(task.steps), length):
            piece = unroll(task.update, task.loss, task.phi, carry, task.steps[start : start + length], state)
            carry, state, total = piece.carry, piece.state, total + piece.gradient["log_rate"].item()
        values.append(total)
    drawn = torch.tensor(values, dtype=torch.float64)
    return drawn.mean().item(), (drawn.std() / len(drawn) ** 0.5).item()


def exact(task, **options):
    return laws.run(Backprop(2, **options), task).gradient["log_rate"].item()


@each_evolution
def test_the_mean_converges_to_the_exact_gradient(make):
    task = learned_rate(3)
    mean, error = sampled(make(sigma=1e-3), task, 3, 150)
    wanted = exact(task)
    assert error < 0.1 * abs(wanted)
    assert abs(mean - wanted) < 4 * error


@pytest.mark.slow
def test_persistent_is_unbiased_under_truncation_where_backpropagation_is_not():
    task = learned_rate(6)
    wanted, truncated = exact(task), exact(task, window=2)
    mean, error = sampled(EvolutionStrategies(4, 1e-3, persistent=True), task, 2, 500)
    plain, plain_error = sampled(EvolutionStrategies(4, 1e-3), task, 2, 150)
    assert abs(mean - wanted) < 4 * error
    assert abs(truncated - wanted) > 8 * error
    assert abs(plain - wanted) > 8 * plain_error  # plain ES shares truncation's bias
    assert abs(plain - truncated) < 4 * plain_error + 1e-3 * abs(truncated)


@each_estimator
@pytest.mark.parametrize("rule", ["coordinatewise direction-and-magnitude", "per-tensor network that steers"])
def test_some_runs_at_a_time_are_all_of_them(make, rule):
    """Whatever the number of runs side by side, in the first call and the next one."""
    task = problem(rule, "module with batch norm", length=4)
    results = []
    for unroll in (make(), make(rows=2)):
        first = unroll(*task[:4], task.steps[:2], unroll.init(task.carry, task.phi, 3))
        results.append(unroll(*task[:3], first.carry, task.steps[2:], first.state))
    laws.assert_close(*(result.gradient for result in results))
    laws.assert_close(*(result.losses for result in results))
    laws.assert_close(*(result.carry.params for result in results))


@each_estimator
def test_the_fused_rule_gives_the_same(make):
    rule = optimisers.make("coordinatewise").double()
    task = problem("coordinatewise additive", "module with batch norm", seeds=0)
    layout = task.carry.state.layout
    carry = task.carry._replace(state=rule.init(layout, like=task.carry.params))
    fused = kernels.block_update(rule)
    assert fused.row_steps is not None
    results = []
    for update in (rule.update_with, fused):
        unroll = make()
        first = unroll(update, task.loss, rule.phi(), carry, task.steps[:2], unroll.init(carry, rule.phi(), 3))
        results.append(unroll(update, task.loss, rule.phi(), first.carry, task.steps[2:], first.state))
    for part in ("value", "gradient", "losses"):
        torch.testing.assert_close(*(getattr(result, part) for result in results), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [{"pairs": 0}, {"rows": 0}, {"sigma": 0.0}, {"floor": -1.0}, {"floor": 1.0}, {"objective": "logloss"}],
    ids=str,
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        estimators.make("es", **options)


@pytest.mark.parametrize("name", ["es", "pes", "mixed"])
def test_a_call_without_state_is_refused(name):
    task = problem()
    with pytest.raises(UserError, match="pass what init gives"):
        estimators.make(name)(*task)


@each_estimator
def test_a_rule_that_looks_at_numbers_is_refused_in_one_line(make):
    task = problem()

    def branching(phi, grads, state, params, *, loss=None):
        update, state = task.update(phi, grads, state, params, loss=loss)
        return (update if grads.abs().max() > 0 else 2 * update), state

    with pytest.raises(UserError, match=r"optimiser: expected an update that torch.func.vmap runs.*torch\.where"):
        laws.run(make(), task._replace(update=branching))


@each_estimator
def test_a_model_that_looks_at_numbers_is_refused_in_one_line(make):
    task = problem()

    def branching(params, aux, batch):
        value, aux = task.loss(params, aux, batch)
        return (value if params.sum() > 0 else 2 * value), aux

    with pytest.raises(UserError, match=r"model: expected a model that torch.func.vmap runs.*data-dependent"):
        laws.run(make(), task._replace(loss=branching))


def diverging(level):
    """One step from θ = 1 to 1 + 2 φ, with φ = 0.1: the loss is infinite where θ is above the level."""
    theta, layout = torch.ones(1, dtype=torch.float64), Layout(("all",), ((1,),))

    def update(phi, g, state, params, loss):
        return phi["rate"] * g, state

    def loss(params, aux, batch):
        value = params.square().mean(-1)
        return value + torch.where(params.detach().mean(-1) > level, math.inf, 0.0), aux

    carry = Carry(theta, {}, OptimiserState(layout, {}, {}, {}))
    phi = {"rate": torch.tensor(0.1, dtype=torch.float64)}
    return Problem(update, loss, phi, carry, [InnerStep((), (Target((), 1.0),))])


@pytest.mark.parametrize("kind", ["es", "pes"])
def test_a_member_that_diverges_counts_as_a_clipped_one(kind):
    estimator = estimators.make(kind, pairs=16, sigma=0.01, shaping="standardised")
    with_all, one_diverges = (laws.run(estimator, diverging(level)) for level in (9.0, 1.21))
    assert with_all.finite
    assert one_diverges.finite
    assert one_diverges.gradient["rate"] > 0  # uphill is where members diverge
    assert not laws.run(estimators.make(kind, pairs=16, sigma=0.01), diverging(1.21)).finite
    assert not laws.run(estimator, diverging(1.1)).finite  # φ's own run as well


def test_how_differences_are_standardised():
    inf, nan = math.inf, math.nan
    plus = torch.tensor([1.0, 5.0, inf, 1.0, inf, nan, 1.0, nan])
    minus = torch.tensor([3.0, 1.0, 1.0, inf, inf, 1.0, nan, nan])
    estimator = EvolutionStrategies(8, 0.5, shaping="standardised")
    size = 10**0.5  # the finite differences are -2 and 4
    wanted = torch.tensor([-2 / size, 4 / size, 3.0, -3.0, 0.0, 3.0, -3.0, 0.0])
    torch.testing.assert_close(estimator._shaped(plus, minus, 4), 4 * 0.5 * wanted)
    torch.testing.assert_close(estimator._shaped(plus[2:], minus[2:], 4), 4 * 0.5 * wanted[2:])


def test_persistent_estimates_go_back_to_the_first_window():
    """A meta-parameter that acts on the first of three windows alone, and a meta-loss of the last one alone.

    The estimate of the third window is then ε₁ (ε₁ + ε₂ + ε₃) times the gradient over σ², and 0 in the mean for one
    that has forgotten the first window's ε₁.
    """

    def update(phi, g, state, params, loss):
        step = state.shared["step"]
        rate = torch.where(step == 0, phi["log_rate"].exp(), 0.01)
        return -rate * g, state._replace(shared={"step": step + 1})

    task = problem("adam", "quadratic", "next batch", seeds=0, length=3)
    steps = [*(step._replace(targets=()) for step in task.steps[:2]), task.steps[2]]
    phi = {"log_rate": torch.tensor(-4.0, dtype=torch.float64)}
    task = task._replace(update=update, phi=phi, steps=steps)
    pairs, wanted = 100, exact(task)
    mean, _ = sampled(estimators.make("pes", pairs=pairs, sigma=1e-3), task, 1, 2)
    # Four standard errors: the variance of one pair is 4 times the square of the gradient.
    assert abs(mean - wanted) < 4 * abs(wanted) * (4 / (2 * pairs)) ** 0.5
