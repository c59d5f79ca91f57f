"""Blockwise with the fast step and the hand-written way back, against the reference and the tape."""

import laws
import pytest
import torch
from implementations import LEARNED, OPTIMISERS, each, problem, with_means_constant

from l2lopt import kernels, optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.seeding import generator
from l2lopt.core.types import Carry
from l2lopt.estimators import Backprop, Blockwise
from l2lopt.estimators.coordinate_sample import stratified
from l2lopt.estimators.window import BlockUpdate
from l2lopt.kernels.recorded import has_statistic_adjoint
from l2lopt.optimisee import flat_loss
from l2lopt.parallel.threads import cpu_threads
from l2lopt.training.inner_runs import inner_steps
from l2lopt.training.settings import Targets
from optimisees import mlp

DIRECTION = "coordinatewise direction-and-magnitude"
FUSED = {label: make for label, make in LEARNED.items() if kernels.refusal(make()) is None}
"""The learned rules with a fused step, which is optional."""


def fast(rule, backend="cpu", **options):
    """The problem with the fast update of the same rule."""
    task, optimiser = problem(rule, **options), OPTIMISERS[rule]()
    return task._replace(update=kernels.block_update(optimiser, backend), phi=optimiser.phi())


@pytest.mark.parametrize("mixture", ["next batch", "next batch and heldout"])
@pytest.mark.parametrize("rule", each(FUSED))
def test_equals_the_tape(rule, mixture):
    """With the adjoint of a mean, unless the network sees θ."""
    plain = problem(rule, mixture=mixture)
    plain = plain if has_statistic_adjoint(OPTIMISERS[rule]()) else with_means_constant(plain)
    laws.assert_close(
        vars(laws.run(Blockwise(), fast(rule, mixture=mixture))), vars(laws.run(Backprop(), plain)), 1e-10
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("truncation", [None, pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("rule", [DIRECTION, f"{DIRECTION} by fan-in"])
@pytest.mark.parametrize("seeds", [3, (3, 4)], ids=["run", "rows"])
def test_the_adjoint_of_a_mean_is_the_tapes(seeds, rule, truncation, backend):
    """By hand and on the tape, with blocks that cut tensors in two and gradients that are skipped."""
    options = {"optimisee": "module with batch norm", "mixture": "heldout", "seeds": seeds, "length": 5}
    task, plain = fast(rule, backend, **options), problem(rule, **options)

    def bad(task):
        def function(params, aux, batch):
            value, aux = task.loss(params, aux, batch)
            if any(batch is step.batch for step in task.steps[1::2]):
                part = params[..., 5:7]
                value = value + 0.0 * (part - part.detach()).sqrt().sum(-1)  # the derivative of √ at 0: two are NaN
            return value, aux

        return task._replace(loss=function)

    for spoilt in (False, True):
        ours, tape = (bad(each) if spoilt else each for each in (task, plain))
        ours, tape = laws.run(Blockwise(truncation, block=7), ours), laws.run(Backprop(window=truncation), tape)
        assert tape.finite
        assert bool(tape.carry.state.shared["skipped"].any()) == spoilt
        laws.assert_close(ours.gradient, tape.gradient, 1e-10)


@pytest.mark.parametrize("cell", ["lstm", "ihc-lstm"])
@pytest.mark.parametrize("rule", ["gated", "direction-and-magnitude"])
def test_equals_the_tape_in_float32(rule, cell):
    """To 1e-5 of the largest component, at the sizes that are used."""
    optimiser, task = optimisers.make("coordinatewise", cell=cell, rule=rule, seed=3), mlp()
    params, aux = task.init(0)
    layout = Layout.of(params)
    theta = layout.ravel(params)
    steps = list(inner_steps(task, Targets(next=0.5, heldout=0.5), 0, 0, 10))
    plain = problem()._replace(
        update=optimiser.update_with,
        loss=flat_loss(task, layout),
        phi=optimiser.phi(),
        carry=Carry(theta, aux, optimiser.init(layout, like=theta)),
        steps=steps,
    )
    ours = laws.run(Blockwise(block=500), plain._replace(update=kernels.block_update(optimiser)))
    tape = laws.run(Backprop(), plain)
    largest = max(value.abs().max() for value in tape.gradient.values())
    for name, value in tape.gradient.items():
        assert (ours.gradient[name] - value).abs().max() <= 1e-5 * largest


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"block": 7}, {"share": 0.4}, {"record": "bfloat16"}], ids=str)
@pytest.mark.parametrize("seeds", [3, (3, 4)], ids=["run", "rows"])
def test_is_what_the_reference_is_under_every_option(options, seeds):
    tasks = (fast(DIRECTION, backend, seeds=seeds) for backend in ("cpu", "reference"))
    ours, plain = (laws.run(Blockwise(**options), task) for task in tasks)
    # Of the recorded updates, which the fused way takes the adjoint of the mean from, bfloat16 keeps eight bits.
    tolerance = {**dict.fromkeys(vars(ours), 1e-10), "gradient": 2e-2 if "record" in options else 1e-10}
    for name, value in vars(ours).items():
        laws.assert_close(value, vars(plain)[name], tolerance[name])


@pytest.mark.parametrize("record", ["full", "bfloat16"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_plan_counts_the_updates_that_are_recorded(share, record):
    """Of each step the gradient and the update, and the last source; a rule without a statistic records no update."""
    for rule, kept in ((DIRECTION, 2), ("coordinatewise gated", 1)):
        task, unroll = fast(rule, mixture="next batch", length=6), Blockwise(window=4, record=record, share=share)
        plan = unroll.plan(*task[:4], task.steps, 6)
        unroll(*task[:4], task.steps, unroll.init(task.carry, task.phi, 0))
        assert plan.per_step == kept
        assert len(unroll.rows.made) == plan.vectors == 4 * kept + 1
        assert {row.numel() * row.element_size() for row in unroll.rows.made} == {plan.vector}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_mean_over_samples_of_coordinates_has_the_adjoint_of_a_mean(backend):
    """Over each of the six samples of two of four coordinates: the whole to rounding."""
    task = fast(DIRECTION, backend, optimisee="quadratic", seeds=3)
    whole, layout, drawn = laws.run(Blockwise(), task).gradient, task.carry.state.layout, {}
    assert layout.sizes == (4,)
    for seed in range(60):
        unroll = Blockwise(share=0.5)
        places, _ = stratified(layout, 0.5, generator("coordinates", seed, 0))
        result = unroll(*task[:4], task.steps, unroll.init(task.carry, task.phi, seed))
        drawn[tuple(places.tolist())] = result.gradient
    assert len(drawn) == 6
    laws.assert_close({name: sum(each[name] for each in drawn.values()) / 6 for name in whole}, whole, 1e-10)


@pytest.mark.parametrize("rule", ["coordinatewise gated", DIRECTION])
def test_changes_nothing(rule):
    laws.assert_estimator_changes_nothing(Blockwise(2), fast(rule))


def test_pieces_make_the_whole():
    laws.assert_pieces_make_the_whole(Blockwise(), fast("coordinatewise gated", length=5), 3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_divergence_is_data(bad):
    laws.assert_divergence_is_data(Blockwise(), fast("coordinatewise gated", mixture="next batch"), bad)


def test_nothing_depends_on_the_number_of_threads():
    results = []
    for threads in (1, 2, 3):
        with cpu_threads(threads):
            results.append(laws.run(Blockwise(block=3), fast(DIRECTION)))
            assert torch.get_num_threads() == threads
    laws.assert_same(vars(results[0]), vars(results[1]))
    laws.assert_same(vars(results[0]), vars(results[2]))


def test_where_nothing_is_fast_the_update_is_the_references():
    optimiser = OPTIMISERS["sgd"]()
    plain = kernels.block_update(optimiser), fast("coordinatewise gated", "reference").update
    assert all(update.update_ is update.update and update.replay is None for update in plain)
    assert isinstance(fast("coordinatewise gated").update, BlockUpdate)
    assert fast("coordinatewise gated").update.replay is not None


def test_a_plan_of_the_fast_way():
    task = fast(DIRECTION)
    plan = Blockwise().plan(*task[:4], task.steps, 100)
    assert plan.window == 100


def test_every_coordinatewise_rule_of_the_table_is_fused():
    assert {*FUSED} == {label for label in LEARNED if label.startswith("coordinatewise")}
