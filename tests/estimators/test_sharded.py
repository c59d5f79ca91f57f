"""Meta-gradients of a run whose parameters lie across two processes, against the tape in one."""

from functools import partial

import laws
import processes
import pytest
import torch
from implementations import DOUBLES, OPTIMISERS, Problem, normal
from torch import distributed

from l2lopt.core.errors import UserError
from l2lopt.core.groupings import Shards
from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.estimators import Backprop, Blockwise

WHOLE = Layout(("matrix", "vector", "scalars"), ((4, 3), (5,), (1,)))
CUTS = {0: (3, 2, 1), 1: (1, 3, 0)}
"""Rank → rows of each tensor that lie there, the last one all in the first process."""
LEFT_OUT = {0: (4, 5, 1), 1: (0, 0, 0)}
"""The same where a process has nothing."""
RULES = [*DOUBLES, "coordinatewise direction-and-magnitude by fan-in"]


def total(values):
    """The sum over both processes."""
    values = values.clone()
    distributed.all_reduce(values)
    return values


def places(rank, cuts=CUTS, names=WHOLE.names):
    """Which coordinates lie in a process, of the vector that has these tensors one after the other."""
    found, first = [], 0
    for name, shape, size, mine, others in zip(
        WHOLE.names, WHOLE.shapes, WHOLE.sizes, cuts[rank], cuts[0], strict=True
    ):
        if name in names:
            low = first + (0 if rank == 0 else others * (size // shape[0]))
            found.append(torch.arange(low, low + mine * (size // shape[0])))
            first += size
    return torch.cat(found)


def task(rule, here, layout, summed):
    """Four steps on a sum over coordinates; a process has the loss of all and the gradient of its own."""

    def loss(params, aux, batch):
        own = ((params - batch[here]).square() * (1 + batch[here].abs())).sum(-1)
        return own + (summed(own.detach()) - own.detach()), aux

    batches = [normal(WHOLE.size, seed=step) for step in range(5)]
    steps = [InnerStep(batches[t], (Target(batches[t + 1], 1.0),)) for t in range(4)]
    params = normal(WHOLE.size, seed=9)[here]
    carry = Carry(params, {}, rule.init(layout, like=params))
    return Problem(rule.update_with, loss, rule.phi(), carry, steps)


def sharded(rank, label, block, cuts=CUTS):
    shapes = tuple((mine, *shape[1:]) for mine, shape in zip(cuts[rank], WHOLE.shapes, strict=True))
    # Cut along the first axis: every row lies in one process, and a column in both.
    here = places(rank, cuts)

    def gather(names, values):
        size = sum(size for name, size in zip(WHOLE.names, WHOLE.sizes, strict=True) if name in names)
        return total(values.new_zeros(size).index_copy(0, places(rank, cuts, names), values))

    def part(names, values):
        return values[places(rank, cuts, names)]

    shards = Shards(WHOLE.shapes, total, None, total, gather, part)
    rule = (OPTIMISERS | DOUBLES)[label]()
    ours = laws.run(
        Blockwise(block=block),
        task(rule, here, Layout(WHOLE.names, shapes, shards, WHOLE.fan_ins), total),
    )
    alone = laws.run(Backprop(), task(rule, torch.arange(WHOLE.size), WHOLE, lambda value: value))
    assert any(piece.abs().max() > 1e-6 for piece in alone.gradient.values())
    laws.assert_close([ours.value, ours.gradient, ours.losses], [alone.value, alone.gradient, alone.losses], 1e-10)
    laws.assert_close(ours.carry.params, alone.carry.params[here])


def refused(rank):
    shapes = tuple((mine, *shape[1:]) for mine, shape in zip(CUTS[rank], WHOLE.shapes, strict=True))
    layout = Layout(WHOLE.names, shapes, Shards(WHOLE.shapes, total, None, total))
    with pytest.raises(
        UserError, match="orthogonalised: expected whole tensors, found tensors that lie across processes"
    ):
        laws.run(Blockwise(), task(DOUBLES["orthogonalised input"](), places(rank), layout, total))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [1, 7, 8192])
def test_processes_give_the_tapes_meta_gradient(rule, block):
    processes.run(partial(sharded, label=rule, block=block), 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_process_without_coordinates_waits_for_nobody(rule):
    processes.run(partial(sharded, label=rule, block=7, cuts=LEFT_OUT), 2, timeout=60.0)


@pytest.mark.slow
def test_a_function_of_whole_tensors_that_nobody_can_gather_is_refused():
    processes.run(refused, 2)
