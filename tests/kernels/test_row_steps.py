"""Compiled steps of perturbed rules against eager ones, and what evolution makes of whole runs."""

import laws
import pytest
import torch
from implementations import problem

import optimisees
from l2lopt import estimators, kernels, optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.optimisee import flat_loss
from l2lopt.training.inner_runs import inner_steps
from l2lopt.training.settings import Targets

RULES = {
    "hierarchical": lambda: optimisers.make("hierarchical", cell="none", hidden_size=3, head_scale=1.0),
    "lstm": lambda: optimisers.make("coordinatewise", hidden_size=3),
    "gru": lambda: optimisers.make("coordinatewise", cell="gru", hidden_size=3),
}


def begun(rule, steps=3):
    """A run of a small network in float64: loss, carry and steps, measured at the end alone."""
    task = optimisees.make("mlp", hidden=[3], dtype="float64", batch_size=8)
    params, aux = task.init(0)
    layout = Layout.of(params, task.roles())
    flat = layout.ravel(params)
    carry = Carry(flat, aux, rule.init(layout, like=flat, total_steps=steps))
    targets = Targets(next=0, end=1, end_heldout=3, end_batches=2)
    return flat_loss(task, layout), carry, list(inner_steps(task, targets, 0, 0, steps, steps))


@pytest.mark.parametrize("label", RULES)
@pytest.mark.parametrize("name", ["es", "pes"])
def test_compiled_evolution_is_the_eager_one(as_recorded, label, name):
    rule = RULES[label]().double()
    loss, carry, steps = begun(rule)
    update, results = kernels.block_update(rule), []
    for backend in ("eager", "compile", "compile"):
        es = estimators.make(name, pairs=2, sigma=0.1, backend=backend, objective="log-loss")
        results.append(es(update, loss, rule.phi(), carry, steps, es.init(carry, rule.phi(), 1)))
    assert len(as_recorded) == 1  # the second compiled run finds the first one's step
    for part in ("value", "gradient", "losses"):
        wanted, found, again = (getattr(result, part) for result in results)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
        laws.assert_same(again, found)


def test_batches_of_other_shapes_make_eager_steps(as_recorded):
    rule = RULES["hierarchical"]().double()
    loss, carry, steps = begun(rule)
    short = torch.utils._pytree.tree_map(lambda part: part[:5], steps[1].batch)
    steps[1] = InnerStep(short, (Target(short, 1.0),))
    update, results = kernels.block_update(rule), []
    for backend in ("eager", "compile"):
        es = estimators.make("es", pairs=2, backend=backend)
        results.append(es(update, loss, rule.phi(), carry, steps, es.init(carry, rule.phi(), 1)))
    assert len(as_recorded) == 1
    torch.testing.assert_close(results[1].gradient, results[0].gradient, rtol=1e-7, atol=1e-9)


def test_shaped_differences_have_one_size_whatever_the_loss_is():
    task = problem("coordinatewise additive", seeds=0)
    gradients = []
    for factor in (1.0, 1000.0):

        def loss(theta, aux, batch, factor=factor):
            value, aux = task.loss(theta, aux, batch)
            return factor * value, aux

        # The rule sees the same gradients: the factor is in the meta-loss alone.
        def update(phi, g, state, theta, *, loss=None, factor=factor):
            return task.update(phi, g / factor, state, theta, loss=None)

        es = estimators.make("es", pairs=3, shaping="standardised")
        gradients.append(es(update, loss, task.phi, task.carry, task.steps, es.init(task.carry, task.phi, 1)).gradient)
    laws.assert_close(*gradients, 1e-6)


def test_shaping_by_hand():
    es = estimators.EvolutionStrategies(4, 0.5, shaping="standardised")
    differences = torch.tensor([1.0, -1.0, 1.0, 9.0], dtype=torch.float64)
    size = (84 / 4) ** 0.5
    laws.assert_close(es._shaped(differences + 2, torch.full_like(differences, 2.0), 7), 7 * 0.5 * differences / size)
    outlier = torch.tensor([100.0] + 15 * [0.0], dtype=torch.float64)  # 4 times the root mean square
    assert float(es._shaped(outlier, torch.zeros_like(outlier), 1)[0]) == 0.5 * 3


def test_the_end_of_a_run_is_measured_once():
    """As a mean over batches that is not divided by the number of steps, and in the last unroll alone."""
    task = optimisees.make("mlp", hidden=[3], batch_size=8)
    targets = Targets(next=0, end_heldout=2, end_batches=4)
    whole = list(inner_steps(task, targets, 0, 0, 6, 6))
    assert [len(step.targets) for step in whole] == [0, 0, 0, 0, 0, 4]
    assert sum(target.weight for target in whole[-1].targets) / 6 == 2
    first, last = (list(inner_steps(task, targets, 0, start, 3, 6)) for start in (0, 3))
    assert [len(step.targets) for step in first] == [0, 0, 0]
    assert sum(target.weight for target in last[-1].targets) / 3 == 2
    laws.assert_same(last[-1].targets[0].batch, task.batch("heldout", 0, 5))
    laws.assert_same(whole[0].batch, task.batch("inner", 0, 0))
