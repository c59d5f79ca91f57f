"""A small descent that the tests of `LearnedOptimizer` share: three tensors on a loss with many minima."""

from functools import partial

import pytest
import torch
from implementations import OPTIMISERS, each, normal

from l2lopt import LearnedOptimizer, optimisers

SHAPES = {"matrix": (3, 2), "scalar": (), "vector": (4,)}
LSTM = partial(optimisers.make, "coordinatewise", hidden_size=3)
"""A rule from its description, as files have it."""
RULES = {"adam": partial(optimisers.adam, 0.01)} | {
    label: OPTIMISERS[f"coordinatewise {label}"] for label in ("additive", "direction-and-magnitude")
}
each_optimiser = pytest.mark.parametrize("rule", each(OPTIMISERS, factories=True))


def start(dtype=torch.float64, seed=7):
    return {
        name: torch.nn.Parameter(normal(*shape, seed=seed + k).to(dtype))
        for k, (name, shape) in enumerate(SHAPES.items())
    }


def descend(params, optimizer, steps, without=lambda step: (), scheduler=None):
    """Steps on a bumpy loss; `without(step)` names the parameters that it leaves out."""
    for step in steps:
        optimizer.zero_grad()
        loss = bumpy({name: value for name, value in params.items() if name not in without(step)}, step)
        loss.backward()
        optimizer.step(loss=loss) if isinstance(optimizer, LearnedOptimizer) else optimizer.step()
        if scheduler:
            scheduler.step()
    return {name: value.detach().clone() for name, value in params.items()}


def bumpy(params, step):
    return sum((value.square() + torch.cos(3 * value + 0.1 * step)).sum() for value in params.values())
