"""The classes of `torch.optim` by name."""

import inspect

import pytest
import torch

from l2lopt import UserError
from l2lopt.core import registry
from l2lopt.torch_optim.registry import TORCH


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_classes_are_made_by_name(name):
    param = torch.nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2)
    optimizer = TORCH[name](lr=0.125)([param])
    optimizer.step(lambda: torch.ones(()))
    assert f"torch.optim.{type(optimizer).__name__}" == name
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert not torch.equal(param, torch.ones(2, 2))


def test_options_are_those_of_torchs_signature():
    """All but those that the training loop decides; a list does for a tuple, and a wrong type is refused."""
    made = registry.build(TORCH, "optimiser", {"name": "torch.optim.Adam", "lr": 0.5, "betas": [0.8, 0.9]})
    assert made([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["betas"] == (0.8, 0.9)
    with pytest.raises(UserError, match=r"torch.optim.Adam'.*betas"):
        registry.make(TORCH, "optimiser", "torch.optim.Adam", betas="high")
    with pytest.raises(UserError, match=r"capturable"):
        registry.make(TORCH, "optimiser", "torch.optim.Adam", capturable=True)
    given = inspect.signature(torch.optim.Adam).parameters
    taken = inspect.signature(TORCH["torch.optim.Adam"]).parameters
    assert set(given) - set(taken) == {"params", "differentiable", "capturable"}
    assert all(taken[name].default == given[name].default for name in taken)
