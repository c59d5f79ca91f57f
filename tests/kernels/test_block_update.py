"""Blockwise with the fast step and the hand-written way back, against the reference and the tape."""

import laws
import pytest
import torch
from implementations import LEARNED, OPTIMISERS, each, problem, with_statistics_constant

from l2lopt import kernels, optimisers
from l2lopt.meta_training import Targets, inner_steps
from l2lopt.optimisee import flat_loss
from l2lopt.threads import cpu_threads
from l2lopt.types import BlockUpdate, Carry, Layout
from l2lopt.unrolls import Blockwise, Taped
from optimisees import mlp

DIRECTION = "coordinatewise direction-and-magnitude"


def fast(rule, backend="cpu", **options):
    """The problem with the fast update of the same rule."""
    task, optimiser = problem(rule, **options), OPTIMISERS[rule]()
    return task._replace(update=kernels.block_update(optimiser, backend), phi=optimiser.phi())


@pytest.mark.parametrize("mixture", ["next batch", "next batch and heldout"])
@pytest.mark.parametrize("rule", each(LEARNED))
def test_equals_the_tape(rule, mixture):
    ours = laws.run(Blockwise(), fast(rule, mixture=mixture))
    tape = laws.run(Taped(), with_statistics_constant(problem(rule, mixture=mixture)))
    laws.assert_close(vars(ours), vars(tape), 1e-10)


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
    tape = laws.run(Taped(), with_statistics_constant(plain))
    largest = max(value.abs().max() for value in tape.gradient.values())
    for name, value in tape.gradient.items():
        assert (ours.gradient[name] - value).abs().max() <= 1e-5 * largest


@pytest.mark.parametrize(
    "options", [{}, {"truncation": 2}, {"block": 7}, {"share": 0.4}, {"record": "bfloat16"}], ids=str
)
@pytest.mark.parametrize("seeds", [3, (3, 4)], ids=["run", "rows"])
def test_is_what_the_reference_is_under_every_option(options, seeds):
    ours, plain = (
        laws.run(Blockwise(**options), task) for task in (fast(DIRECTION, seeds=seeds), problem(DIRECTION, seeds=seeds))
    )
    laws.assert_close(vars(ours), vars(plain), 1e-10)


@pytest.mark.parametrize("rule", ["coordinatewise gated", DIRECTION])
def test_changes_nothing(rule):
    laws.assert_unroll_changes_nothing(Blockwise(2), fast(rule))


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
    assert not isinstance(kernels.block_update(optimiser), BlockUpdate)
    assert isinstance(fast("coordinatewise gated").update, BlockUpdate)
    assert not isinstance(fast("coordinatewise gated", "reference").update, BlockUpdate)


def test_a_plan_of_the_fast_way():
    task = fast(DIRECTION)
    plan = Blockwise().plan(*task[:4], task.steps, 100)
    assert plan.window == 100
