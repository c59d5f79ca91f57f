"""Learned optimisers that have fast twins, and what is put to both: problems, runs and windows."""

import laws
import torch
from implementations import FOLDED, INPUTS, RULES, normal, seeded
from torch import nn

from l2lopt import cells, optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.estimators.exchange import Recorder
from l2lopt.estimators.window import Window
from l2lopt.optimisers import Coordinatewise

BAD = float("nan"), float("inf"), -float("inf"), 1e200


def reference(cell="lstm", items=tuple(INPUTS), rule="additive", dtype=torch.float64, size=5):
    """A small rule of the tables' labels, with a seeded φ that no gate is closed for."""
    network = optimisers.coordinatewise(cell=FOLDED[cell], hidden_size=size).cell
    optimiser = Coordinatewise({name: INPUTS[name]() for name in items}, network, RULES[rule]())
    seeded(optimiser, scale=0.3)
    if hasattr(optimiser.rule, "log_scale"):
        torch.nn.init.constant_(optimiser.rule.log_scale, 0.15)
    return optimiser.to(dtype)


def split(size):
    """A layout of three tensors, one of them empty, that no block ends with."""
    return Layout(("a", "b", "c"), ((size // 3,), (0,), (size - size // 3,)))


def problem(size, batch=(), dtype=torch.float64, steps=5):
    """Layout, gradients over many scales [steps, *batch, n], θ and losses."""
    gradients = silenced(normal(steps, *batch, size) * 10 ** (-3 * normal(size, seed=1).abs()))
    others = normal(*batch, size, seed=2), normal(steps, *batch, seed=3).abs()
    return split(size), gradients.to(dtype), *(other.to(dtype) for other in others)


def silenced(gradients):
    """Gradients [T, ..., n], 0 from the start or from a step on for some coordinates, and now and then for others."""
    for first, every in ((0, 7), (1, 5), (2, 3)):
        gradients[first:, ..., first + 1 :: every] = 0.0
    gradients[1::2, ..., 4::7] = 0.0
    return gradients


def rolled(update, state, gradients, params, losses):
    """What each step gives: the update, the state's coordinates and what is shared."""
    results = []
    with torch.no_grad():
        for grads, loss in zip(gradients, losses, strict=True):
            change, state = update(grads, state, params, loss=loss)
            params = params + change
            results.append(laws.clone((change, dict(sorted(state.coordinates.items())), state.shared)))
    return results


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


def window(optimiser, length=5, batch=(), size=7, bad=True, dtype=torch.float64):
    """A window of a part of two tensors of three, after two steps, with gradients that are not finite."""
    layout = Layout(("a", "b", "c"), ((size,), (4,), (3,)))
    first, second = size - 2 if size > 2 else size, min(2, max(size - 2, 0))
    kept = torch.tensor([*range(first), *range(size, size + second)], dtype=torch.int64)
    part, recorder, meetings = layout.select(kept), Recorder(layout.exchange), []
    optimiser.to(dtype)
    params, total = normal(*batch, layout.size, seed=1).to(dtype), length + 2
    grads = silenced(normal(total, *batch, layout.size, seed=2) * torch.logspace(-8, 1, layout.size))
    if bad:
        for t, value in zip((2, 3, 5, 6), BAD, strict=True):
            grads[t : t + 1, ..., t % 3 :: 3] = value
    grads = grads.to(dtype)
    losses, sources = normal(total, *batch, seed=3).exp().to(dtype), normal(length, *batch, len(kept), seed=4).to(dtype)
    trail = [(optimiser.init(layout, batch, like=params), params)]
    with torch.no_grad():
        for g, loss in zip(grads, losses, strict=True):
            state, params = trail[-1]
            meetings.append(recorder.begin())
            update, state = optimiser.update(g, state._replace(layout=layout.meeting(recorder)), params, loss=loss)
            trail.append((state, params + update))
    state, params = trail[2]
    coordinates = {name: value[..., kept] for name, value in state.coordinates.items()}
    state = OptimiserState(part, coordinates, {}, state.shared)
    return Window(state, params[..., kept], grads[2:, ..., kept], sources, losses[2:], meetings[2:])
