"""Numbers of groups, to their coordinates."""

import pytest
import torch

from l2lopt.core.groupings import FEW, LONG
from l2lopt.core.layout import Layout


@pytest.mark.parametrize("sizes", [(2, 3), (1,) * (FEW + 1), (LONG,) * (FEW + 1), (0, 4), ()])
@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_number_of_a_tensor_reaches_its_coordinates(sizes, batch, gradient):
    """By copies or by an index, which is chosen by the sizes and by whether a gradient goes back."""
    layout = Layout(tuple(map(str, range(len(sizes)))), tuple((size,) for size in sizes))
    groups = torch.randn(*batch, len(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = layout.tensors.spread(groups.requires_grad_(gradient))
    index = [tensor for tensor, size in enumerate(sizes) for _ in range(size)]
    assert torch.equal(found, groups[..., index])
    if gradient and sizes:
        (back,) = torch.autograd.grad(found.sum(), groups)
        assert torch.equal(back, torch.tensor(sizes, dtype=torch.float64).expand(*batch, -1))
