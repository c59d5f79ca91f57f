"""The controls of a hierarchical rule over a run, against constants by hand and against a plain loop."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.seeding import generator
from l2lopt.evaluation.controls_over_time import controls_over_time
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers.controls import CONTROLS

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4), "embed.weight": (5, 3), "lm_head.weight": (5, 3)}
KINDS = {
    "matrix": ("a.weight", "b.weight"),
    "vector": ("a.bias",),
    "embedding": ("embed.weight",),
    "head": ("lm_head.weight",),
}


class Noisy(Optimisee):
    """Half the mean square distance of all tensors from noise: a tensor of every kind."""

    def init(self, seed):
        source = generator("start", seed)
        return {name: torch.randn(s, generator=source, dtype=torch.float64) for name, s in SHAPES.items()}, {}

    def batch(self, split, seed, step):
        source = generator("noise", seed, step)
        return {name: torch.randn(s, generator=source, dtype=torch.float64) for name, s in SHAPES.items()}

    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch), aux

    def evaluate(self, params, aux, batch) -> Tensor:
        return sum((params[name] - batch[name]).square().mean() for name in SHAPES) / 2


OUTPUTS = {"step": -0.7, "decay": 1.9, "mix": 0.8, "sign": -0.1, "slow": 0.3, "momentum": -0.6}


def limited(output, bound):
    return bound * math.tanh(output / bound)


def by_hand(mix):
    """Unit and value of each control, from the bounds that the documentation of the rule gives."""
    angle = math.degrees(limited(OUTPUTS["mix"], math.pi / 2))
    logit = 1 - 1 / (1 + math.exp(-(2 * OUTPUTS["mix"] + 4)))
    return {
        "step": ("factor", math.exp(limited(OUTPUTS["step"], math.log(4)))),
        "decay": ("factor", math.exp(limited(OUTPUTS["decay"], math.log(16)))),
        "mix": ("degrees", angle) if mix == "angle" else ("share", logit),
        "sign": ("degrees", math.degrees(limited(OUTPUTS["sign"], 0.25))),
        "slow": ("degrees", math.degrees(limited(OUTPUTS["slow"], math.pi / 2))),
        "momentum": ("share", math.tanh(OUTPUTS["momentum"])),
    }


@pytest.mark.parametrize("mix", ["angle", "logit"])
def test_a_head_that_is_its_bias_gives_constants(mix):
    rule = optimisers.make("hierarchical", cell="none", hidden_size=2, controls=list(CONTROLS), mix=mix).double()
    with torch.no_grad():
        rule.head.bias.copy_(torch.tensor([OUTPUTS[name] for name in CONTROLS]))
    curves = controls_over_time(rule, Noisy(), 3, [0])
    assert [(one.control, one.kind) for one in curves] == [(name, kind) for name in CONTROLS for kind in KINDS]
    for curve in curves:
        unit, value = by_hand(mix)[curve.control]
        assert (curve.unit, curve.steps.tolist()) == (unit, [1, 2, 3])
        for part in (curve.mean, curve.low, curve.high):
            assert part.tolist() == pytest.approx([value] * 3, rel=1e-6)


def test_means_and_bands_are_over_the_tensors_of_a_kind_of_all_runs(monkeypatch):
    """Against a plain loop over steps, run by run, in which the controls are listened to where they are made."""
    rule, problem, seeds, steps = optimisers.make("hierarchical", head_scale=3.0).double(), Noisy(), [3, 5], 4
    reports = []
    curves = controls_over_time(rule, problem, steps, seeds, report=lambda *event: reports.append(event[:3]))
    assert reports == [("controls", step, steps) for step in range(1, steps + 1)]
    heard, steered = {seed: [] for seed in seeds}, rule.steered

    def listened(*args):
        found, memory = steered(*args)
        heard[seed].append(found.tolist())
        return found, memory

    monkeypatch.setattr(rule, "steered", listened, raising=False)
    for seed in seeds:
        params, _ = problem.init(seed)
        layout = Layout.of(params)
        theta = layout.ravel(params)
        state = rule.init(layout, like=theta, total_steps=steps)
        for step in range(steps):
            theta = theta.detach().requires_grad_()
            loss, _ = problem.loss(layout.unravel(theta), {}, problem.batch("train", seed, step))
            (gradient,) = torch.autograd.grad(loss, theta)
            with torch.no_grad():
                update, state = rule.update(gradient, state, theta, loss=loss.detach())
                theta = theta + update
    names = list(SHAPES)
    for curve in curves:
        index = rule.controls.index(curve.control)
        for step in range(steps):
            values = [heard[seed][step][index][names.index(name)] for seed in seeds for name in KINDS[curve.kind]]
            shown = math.exp if curve.unit == "factor" else math.degrees
            wanted = [shown(sum(values) / len(values)), shown(min(values)), shown(max(values))]
            found = [part[step] for part in (curve.mean, curve.low, curve.high)]
            assert found == pytest.approx(wanted, rel=1e-7)
    assert any(np.ptp(curve.mean) > 0.01 for curve in curves)
    assert all((curve.low < curve.high).all() for curve in curves)


def test_a_rule_without_controls_is_refused():
    with pytest.raises(UserError, match=r"expected a hierarchical rule.*found one called 'coordinatewise'"):
        controls_over_time(optimisers.make("coordinatewise"), Noisy(), 3, [0])
