"""What the transcriptions of PyTorch's own tests share: every shipped rule, and PyTorch's means from the wheel."""

import sys
import unittest
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from hypothesis import settings
from torch import nn

from l2lopt import LearnedOptimizer, list_weights, optimisers

RATED = {name: {"name": name, "lr": 0.01} for name in optimisers.HAND_DESIGNED if name not in optimisers.UNTUNED}
RULES = {
    **{name: name for name in list_weights()},
    **RATED,
    **{name: {"name": name} for name in optimisers.UNTUNED},
    "scheduled": {"name": "scheduled", "optimiser": "momentum", "lr": 0.01, "warm_up": 2},
}
"""Label → every rule that ships."""
OPTIONS = {
    "lr": {"lr": 0.1},
    "tensor lr": {"lr": torch.tensor(0.1)},
    "weight_decay": {"weight_decay": 0.1},
    "max_update": {"max_update": 0.05},
    "fallback": {"fallback": "adam"},
    "state_dtype": {"state_dtype": "bfloat16"},
}
SOME = ("lstm", "normalised-muon")
"""Rules whose tests are run with every option."""
CASES = {label: partial(LearnedOptimizer, weights=weights) for label, weights in RULES.items()}
INPUTS = CASES | {
    f"{label} with {name}": partial(CASES[label], **options) for label in SOME for name, options in OPTIONS.items()
}
"""Label → what makes the optimiser of its parameters: PyTorch's `optim_inputs_func`."""
each_rule = pytest.mark.parametrize("make", [pytest.param(make, id=label) for label, make in CASES.items()])
each_input = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=label, marks=[] if label in CASES else pytest.mark.slow) for label, make in INPUTS.items()],
)


def tensors(contiguous=True):
    """A weight, a bias and an input, as PyTorch's tests have them."""
    torch.manual_seed(0)
    weight = torch.rand((10, 5)) if contiguous else torch.rand((10, 5, 2))[..., 0]
    bias = torch.rand(10) if contiguous else torch.rand((10, 2))[..., 0]
    return nn.Parameter(weight), nn.Parameter(bias), torch.rand(5)


def closure_of(optimizer, weight, bias, given):
    """The loss of PyTorch's tests."""

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(given) + bias).pow(2).sum()
        loss.backward()
        return loss

    return closure


@cache
def common_optimizers() -> ModuleType:
    """`torch.testing._internal.common_optimizers` of the installed wheel; three seconds for the first one who asks."""
    stub = ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]  # a module of our making
    absent = find_spec("expecttest") is None
    if absent:
        # It compares printed texts. PyTorch's tests derive from its class, and the wheel does not ask for it.
        sys.modules["expecttest"] = stub
    try:
        return import_module("torch.testing._internal.common_optimizers")
    finally:
        if absent:
            del sys.modules["expecttest"]
        settings.load_profile("l2lopt")  # on import it chooses a profile of its own for all property tests
