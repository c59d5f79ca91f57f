"""Every scheduler of torch scales the update."""

from functools import partial

import laws
import pytest
import torch
from descent import LSTM, descend, start
from implementations import normal
from torch.optim import lr_scheduler, swa_utils

from l2lopt import LearnedOptimizer, optimisers


@pytest.mark.parametrize("rule", [partial(optimisers.adam, 0.01), LSTM], ids=["adam", "the recipe"])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("schedulers", [(), ("StepLR",), ("StepLR", "ReduceLROnPlateau")], ids=str)
def test_it_goes_downhill(rule, contiguous, schedulers):
    """A weight and a bias of one layer, by closure, with one or more schedulers; the recipe begins near Adam's way."""
    weight = torch.nn.Parameter(normal(10, 5, 2).float()[..., 0])
    weight = torch.nn.Parameter(weight.detach().contiguous()) if contiguous else weight
    bias, x = torch.nn.Parameter(normal(10, seed=1).float()), normal(5, seed=2).float()
    assert weight.is_contiguous() == contiguous
    optimizer = LearnedOptimizer([weight, bias], rule())
    on_top = [scheduled(each, optimizer) for each in schedulers]

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).square().sum()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure).item()
        for scheduler in on_top:
            scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    assert closure().item() < first


SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 3},
    "ExponentialLR": {"gamma": 0.8},
    "PolynomialLR": {"total_iters": 4},
    "CosineAnnealingLR": {"T_max": 6},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False},
    "ReduceLROnPlateau": {"patience": 0, "threshold": 10.0},
    "SequentialLR": {"milestones": [3]},
    "ChainedScheduler": {},
    "SWALR": {"swa_lr": 0.01, "anneal_epochs": 3},
}


def scheduled(name, optimizer):
    if name in ("SequentialLR", "ChainedScheduler"):
        inner = [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.7)]
        made = getattr(lr_scheduler, name)
        return made(optimizer, inner, **SCHEDULERS[name]) if name == "SequentialLR" else made(inner, optimizer)
    return getattr(swa_utils if name == "SWALR" else lr_scheduler, name)(optimizer, **SCHEDULERS[name])


def test_every_scheduler_is_in_the_table():
    base = lr_scheduler.LRScheduler
    there = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type) and issubclass(kind, base)}
    assert there - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_scale_the_update(name):
    """Those that move the momentum as well need `cycle_momentum=False`: our rules have no such option."""
    ours, theirs = start(), start()
    pairs = [
        (ours, LearnedOptimizer(ours.values(), optimisers.SGD(1.0), lr=0.05)),
        (theirs, torch.optim.SGD(theirs.values(), lr=0.05)),
    ]
    rates = []
    for params, optimizer in pairs:
        scheduler = scheduled(name, optimizer)
        rates.append([])
        for step in range(8):
            descend(params, optimizer, [step])
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1
    laws.assert_close(dict(ours), dict(theirs))
