"""The strongly typed LSTM of Table I, eqs. 36-39 (Kuo et al., IJCNN 2020), and its simplified core (40-44)."""

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, affine, constant, shifted, uniform
from l2lopt.cells.highway import Core


class TLSTM(Cell):
    """f, o = σ(W x_t + U x_{t−1} + b); a = W_A x_t + U_A x_{t−1} + b_A; c' = f∘c + (1−f)∘a; h' = o∘c'.

    `weight_x` is W [3M, N], `weight_before` is U [3M, N], `bias` is b [3M], the rows f, o, a. The state keeps
    x_{t−1}, zero before the first step. 3(2MN + M) numbers. Initial values U(±1/√M).

    Args:
        input_size: N.
        hidden_size: M.
        gate_bias: An extra trainable bias on f that starts at +1.
    """

    recurrent_weights = ("weight_before",)

    def __init__(self, input_size: int, hidden_size: int, gate_bias: bool = False) -> None:
        super().__init__(input_size, hidden_size, {"x": input_size, "c": hidden_size})
        self.weight_x = uniform(hidden_size, 3 * hidden_size, input_size)
        self.weight_before = uniform(hidden_size, 3 * hidden_size, input_size)
        self.bias = uniform(hidden_size, 3 * hidden_size)
        self.gate_bias = constant(gate_bias, 1.0, hidden_size)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h', the state x_t and c'."""
        self.check(x, state)
        f, o, a = affine(self.bias, (self.weight_x, x), (self.weight_before, state["x"])).chunk(3)
        h, c = _remember(shifted(f, self.gate_bias), o, a, state["c"])
        return h, {"x": x, "c": c}


class TLSTMCore(Core):
    """f, o = σ(W v); a = W_A x; c' = f∘c + (1−f)∘a; h' = o∘c'.

    `weight_v` [2M, N] holds the rows f, o. 3MN numbers; with the IRC 3MN + N + M (N = M, as the highway feeds back
    ω_V∘h with eq. 40's h_{t−1}; the authors' code feeds back x_{t−1}), with the IHC 4MN + N² + N + M.
    `gate_bias` adds to f a bias that starts at 1.
    """

    gates = 2
    state = ("h", "c")
    diagonal = True

    def forward(self, v: Tensor, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        f, o = affine(None, (self.weight_v, v)).chunk(2)
        h, c = _remember(shifted(f, self.gate_bias), o, affine(None, (self.weight_x, x)), state["c"])
        return h, {"h": h, "c": c}


def _remember(f: Tensor, o: Tensor, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    f = torch.sigmoid(f)
    c = f * c + (1 - f) * a
    return torch.sigmoid(o) * c, c
