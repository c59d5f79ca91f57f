"""Backpropagation through a window by hand, against autograd through the reference's own steps."""

import laws
import pytest
import torch
from implementations import FOLDED, INPUTS, RULES, normal, seeded
from oracles import replayed
from torch import nn

from l2lopt import cells, optimisers
from l2lopt.kernels.replay import replay
from l2lopt.types import Layout, Window

BAD = float("nan"), float("inf"), -float("inf"), 1e200


def learned(cell="lstm", rule="additive", names=("log-and-sign",), sizes=(3, 3)):
    """A small learned optimiser, its parameters random and its steps large enough to matter."""
    made = RULES[rule]()
    names = dict.fromkeys([*names, *made.needs])
    choice = {"name": FOLDED[cell]} if isinstance(FOLDED[cell], str) else FOLDED[cell]
    network = cells.make(**choice, input_size=sizes[0], hidden_size=sizes[1])
    optimiser = seeded(optimisers.Coordinatewise({name: INPUTS[name]() for name in names}, network, made))
    if hasattr(made, "log_scale"):
        nn.init.constant_(made.log_scale, 0.15)
    return optimiser


def window(optimiser, length=5, batch=(), size=7, bad=True, dtype=torch.float64, offset=0):
    """A window of a block in the middle of a larger vector, after two steps, with gradients that are not finite."""
    layout = Layout(("a", "b", "c"), ((size,), (4,), (3,)))
    part = Layout(layout.names, ((size - 2 if size > 2 else size,), (min(2, max(size - 2, 0)),), (0,)))
    kept = torch.tensor([*range(part.sizes[0]), *range(size, size + part.sizes[1])])
    optimiser.to(dtype)
    params, total = normal(*batch, layout.size, seed=1).to(dtype), length + 2
    grads = (normal(total, *batch, layout.size, seed=2) * torch.logspace(-8, 1, layout.size)).to(dtype)
    if bad:
        for t, value in zip((2, 3, 5, 6), BAD, strict=True):
            grads[t : t + 1, ..., t % 3 :: 3] = value
    losses, sources = normal(total, *batch, seed=3).exp().to(dtype), normal(length, *batch, len(kept), seed=4).to(dtype)
    state, shared, start = optimiser.init(layout, batch, like=params), [], None
    with torch.no_grad():
        for t in range(total):
            if t == 2:
                coordinates = {name: value[..., kept] for name, value in state.coordinates.items()}
                start = state._replace(layout=part, coordinates=coordinates), params[..., kept]
            update, state = optimiser.update(grads[t], state, params, losses[t])
            params = params + update
            shared.append(state.shared)
    return Window(*start, grads[2:, ..., kept], sources, losses[2:], shared[2:])


def assert_is_autograds(optimiser, window, tolerance=1e-10):
    wanted = replayed(optimiser, optimiser.phi(), window)
    actual = replay(optimiser, optimiser.phi(), window)
    laws.assert_close(actual, wanted, tolerance)
    return wanted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cell", FOLDED)
def test_equals_autograd_for_every_cell_and_rule(cell, rule):
    optimiser = learned(cell, rule, INPUTS)
    for length in (1, 2, 5):
        assert_is_autograds(optimiser, window(optimiser, length, (2,)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", INPUTS)
def test_equals_autograd_for_every_input_and_rule(name, rule):
    optimiser = learned("lstm", rule, [name])
    assert_is_autograds(optimiser, window(optimiser))
