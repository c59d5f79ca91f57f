"""The contract of a recurrent cell: one time step, features on the first axis."""

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor, nn

from l2lopt.errors import UserError

CellState: TypeAlias = dict[str, Tensor]
"""Name → [M, ...]: what the cell hands from one time step to the next."""


class Cell(nn.Module, ABC):
    """One time step of a recurrent network, the same function for every column.

    Features lie on the first axis; whatever follows (batch, coordinates) is left as it is, and no column sees another.

    Args:
        input_size: N, features of the input.
        hidden_size: M, features of the output.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if size < 1:
                raise UserError(f"cell: {name}", expected="at least 1", found=str(size), remedy="give a positive size")
        self.input_size, self.hidden_size = input_size, hidden_size

    @abstractmethod
    def initial_state(self, x: Tensor) -> CellState:
        """The state before the first step, for columns like those of x [N, ...]."""

    @abstractmethod
    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step: x [N, ...] and the state to the output [M, ...] and the next state; neither is changed."""


def affine(bias: Tensor | None, *products: tuple[Tensor, Tensor]) -> Tensor:
    """Σ W x (+ b) over pairs of W [M, N] and x [N, ...]: [M, ...], each product added to the same sum."""
    shape = products[0][1].shape[1:]
    total = None if bias is None else bias[:, None]
    for weight, x in products:
        columns = x.reshape(x.shape[0], -1)
        total = weight @ columns if total is None else torch.addmm(total, weight, columns)
    assert total is not None
    return total.view(total.shape[0], *shape)


def zeros(size: int, x: Tensor) -> Tensor:
    """A state of zeros [size, ...] for the columns of x [N, ...]."""
    return x.new_zeros(size, *x.shape[1:])


def uniform(size: int, *shape: int) -> nn.Parameter:
    """A parameter drawn from U(±1/√size), PyTorch's initial values for recurrent layers."""
    return nn.Parameter(torch.empty(*shape).uniform_(-(size**-0.5), size**-0.5))
