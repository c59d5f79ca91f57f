"""The long short-term memory of Table I, eqs. 4-7 (Kuo et al., IJCNN 2020)."""

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, affine, uniform, zeros


class LSTM(Cell):
    """f, i, o = σ(W x + U h + b); a = tanh(W_A x + U_A h + b_A); c' = f∘c + i∘a; h' = o∘tanh c'.

    `weight_x` is W [4M, N], `weight_h` is U [4M, M], `bias` is b [4M], the rows in PyTorch's order i, f, a, o.
    4(MN + M² + M) numbers; h lies in (−1, 1). Initial values U(±1/√M).

    Args:
        input_size: N.
        hidden_size: M.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.weight_x = uniform(hidden_size, 4 * hidden_size, input_size)
        self.weight_h = uniform(hidden_size, 4 * hidden_size, hidden_size)
        self.bias = uniform(hidden_size, 4 * hidden_size)

    def initial_state(self, x: Tensor) -> CellState:
        """The state h = c = 0."""
        return {"h": zeros(self.hidden_size, x), "c": zeros(self.hidden_size, x)}

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        gates = affine(self.bias, (self.weight_x, x), (self.weight_h, state["h"]))
        i, f, a, o = gates.chunk(4)
        c = torch.sigmoid(f) * state["c"] + torch.sigmoid(i) * torch.tanh(a)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, {"h": h, "c": c}
