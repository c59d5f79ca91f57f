"""The classes of `torch.optim` by name."""

import pytest
import torch

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
