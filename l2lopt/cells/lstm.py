"""The long short-term memory of Table I, eqs. 18-21 (Kuo et al., IJCNN 2020), and its simplified core (22-26)."""

from typing import Literal

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, affine, shifted, uniform
from l2lopt.cells.highway import Core
from l2lopt.core.choices import checks_words


class LSTM(Cell):
    """f, i, o = σ(W x + U h + b); a = tanh(W_A x + U_A h + b_A); c' = f∘c + i∘a; h' = o∘tanh c'.

    `weight_x` is W [4M, N], `weight_h` is U [4M, M], `bias` is b [4M], the rows in PyTorch's order i, f, a, o.
    4(MN + M² + M) numbers, 4M more with two biases; h lies in (−1, 1). Initial values U(±1/√M).

    Args:
        input_size: N.
        hidden_size: M.
        biases: "one"; or "two" with a second, `bias_h` [4M], as in `torch.nn.LSTM`. Only the sum of both acts, but
            gradient descent moves it twice as fast.
    """

    recurrent_weights = ("weight_h",)

    @checks_words
    def __init__(self, input_size: int, hidden_size: int, biases: Literal["one", "two"] = "one") -> None:
        super().__init__(input_size, hidden_size, {"h": hidden_size, "c": hidden_size})
        self.weight_x = uniform(hidden_size, 4 * hidden_size, input_size)
        self.weight_h = uniform(hidden_size, 4 * hidden_size, hidden_size)
        self.bias = uniform(hidden_size, 4 * hidden_size)
        self.bias_h = uniform(hidden_size, 4 * hidden_size) if biases == "two" else None

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        self.check(x, state)
        # The biases are added first: a sum of 4M numbers, instead of one of 4M for every column.
        bias = self.bias if self.bias_h is None else self.bias + self.bias_h
        gates = affine(bias, (self.weight_x, x), (self.weight_h, state["h"]))
        i, f, a, o = gates.chunk(4)
        return _remember(f, i, o, torch.tanh(a), state["c"])


class LSTMCore(Core):
    """f, i, o = σ(W v); a = W_A x; c' = f∘c + i∘a; h' = o∘tanh c'.

    `weight_v` [3M, N] holds the rows f, i, o. 4MN numbers; with the IRC 4MN + NM + N, with the IHC 6MN + N² + N.
    `gate_bias` adds to f a bias that starts at 1.
    """

    gates = 3
    state = ("h", "c")

    def forward(self, v: Tensor, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        f, i, o = affine(None, (self.weight_v, v)).chunk(3)
        return _remember(shifted(f, self.gate_bias), i, o, affine(None, (self.weight_x, x)), state["c"])


def _remember(f: Tensor, i: Tensor, o: Tensor, a: Tensor, c: Tensor) -> tuple[Tensor, CellState]:
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * a
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, {"h": h, "c": c}
