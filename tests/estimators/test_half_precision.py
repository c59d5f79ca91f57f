"""Problems in bfloat16, whose sums would stop growing at 256 times a term: those of estimators do not."""

import laws
import pytest
import torch
from implementations import DETERMINISTIC_ESTIMATORS, RANDOM_ESTIMATORS, Problem, each

from l2lopt import optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.estimators import EvolutionStrategies


def halved(dtype: torch.dtype = torch.bfloat16) -> Problem:
    """A run of ten steps whose first target is 1,000 and the others below 1."""
    rule = optimisers.make("coordinatewise", hidden_size=2, inputs=["log-and-sign"], rule="gated").to(dtype)
    params, layout = torch.ones(3, dtype=dtype), Layout(("all",), ((3,),))
    far, near = torch.tensor(1000.0, dtype=dtype), torch.tensor(0.0, dtype=dtype)

    def loss(theta, aux, batch):
        return batch + 0.5 * theta.square().mean(-1), aux

    steps = [InnerStep(near, (Target(far if index == 0 else near, 1.0),)) for index in range(10)]
    return Problem(rule.update_with, loss, rule.phi(), Carry(params, {}, rule.init(layout, like=params)), steps)


@pytest.mark.parametrize("make", each(DETERMINISTIC_ESTIMATORS | RANDOM_ESTIMATORS, factories=True))
def test_the_meta_loss_is_the_sum_of_the_losses(make):
    task = halved()
    result = laws.run(make(), task)
    last, _ = task.loss(result.carry.params, {}, task.steps[-1].batch)
    wanted = 1000 + result.losses[2:].double().sum() + last.double()
    assert result.value.dtype == torch.float32
    assert result.value.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert {piece.dtype for piece in result.gradient.values()} == {torch.bfloat16}


def test_evolution_sees_small_differences_of_large_losses():
    half, single = (
        torch.cat([piece.flatten().float() for piece in laws.run(EvolutionStrategies(8, 0.3), task).gradient.values()])
        for task in (halved(), halved(torch.float32))
    )
    assert torch.cosine_similarity(half, single, dim=0) > 0.7
