"""The plain recurrent network (Elman 1990)."""

from typing import Literal

from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, activated, affine, uniform
from l2lopt.core.choices import checks_words


class RNN(Cell):
    """h' = f(W x + U h + b).

    `weight_x` is W [M, N], `weight_h` is U [M, M], `bias` is b [M]: MN + M² + M numbers. Initial values U(±1/√M).

    Args:
        input_size: N.
        hidden_size: M.
        activation: f, "tanh" or "relu".
    """

    recurrent_weights = ("weight_h",)

    @checks_words
    def __init__(self, input_size: int, hidden_size: int, activation: Literal["tanh", "relu"] = "tanh") -> None:
        super().__init__(input_size, hidden_size, {"h": hidden_size})
        self.activation = activation
        self.weight_x = uniform(hidden_size, hidden_size, input_size)
        self.weight_h = uniform(hidden_size, hidden_size, hidden_size)
        self.bias = uniform(hidden_size, hidden_size)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        self.check(x, state)
        z = affine(self.bias, (self.weight_x, x), (self.weight_h, state["h"]))
        h = activated(self.activation, z)
        return h, {"h": h}
