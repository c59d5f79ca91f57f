"""The simple recurrent unit of Table I, eqs. 27-30 (Kuo et al., IJCNN 2020), and its simplified core (31-35)."""

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, affine, column, constant, same_size, shifted, uniform
from l2lopt.cells.highway import Core


class SRU(Cell):
    """f, p = σ(W x + ω∘c + b); a = W_A x; c' = f∘c + (1−f)∘a; h' = p∘c' + (1−p)∘x.

    `weight_x` is W and W_A [3M, N] in the rows f, p, a; `weight_c` is ω [2M] and `bias` is b [2M] in the rows f, p.
    3MN + 4M numbers. h' adds x and c element by element, so N = M. Initial values U(±1/√M).

    Args:
        input_size: N.
        hidden_size: M = N.
        gate_bias: Two extra trainable biases, one on f that starts at +1 and, `highway_bias`, one on p that starts at
            −1.
    """

    recurrent_weights = ("weight_c",)

    def __init__(self, input_size: int, hidden_size: int, gate_bias: bool = False) -> None:
        super().__init__(input_size, hidden_size, {"c": hidden_size})
        same_size("sru", input_size, hidden_size)
        self.weight_x = uniform(hidden_size, 3 * hidden_size, input_size)
        self.weight_c = uniform(hidden_size, 2 * hidden_size)
        self.bias = uniform(hidden_size, 2 * hidden_size)
        self.gate_bias = constant(gate_bias, 1.0, hidden_size)
        self.highway_bias = constant(gate_bias, -1.0, hidden_size)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h', the state c' alone."""
        self.check(x, state)
        c = state["c"]
        # The recurrence of this cell is element-wise, so x alone takes part in the one product.
        f, p, a = affine(None, (self.weight_x, x)).chunk(3)
        f, p = (
            shifted(gate + column(weight, c) * c, bias)
            for gate, weight, bias in zip((f, p), self.weight_c.chunk(2), self.bias.chunk(2), strict=True)
        )
        h, c = _remember(shifted(f, self.gate_bias), shifted(p, self.highway_bias), a, c, x)
        return h, {"c": c}


class SRUCore(Core):
    """f, p = σ(W v); a = W_A x; c' = f∘c + (1−f)∘a; h' = p∘c' + (1−p)∘x, N = M.

    `weight_v` [2M, N] holds the rows f, p. 3MN numbers; with the IRC 3MN + N + M, with the IHC 4MN + N² + N + M.
    `gate_bias` adds biases to f, from +1, and, `highway_bias`, to p, from −1.
    """

    gates = 2
    state = ("h", "c")
    diagonal = True
    adds_x = True

    def __init__(self, input_size: int, hidden_size: int, gate_bias: bool = False) -> None:
        super().__init__(input_size, hidden_size, gate_bias)
        self.highway_bias = constant(gate_bias, -1.0, hidden_size)

    def forward(self, v: Tensor, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        f, p = affine(None, (self.weight_v, v)).chunk(2)
        a = affine(None, (self.weight_x, x))
        h, c = _remember(shifted(f, self.gate_bias), shifted(p, self.highway_bias), a, state["c"], x)
        return h, {"h": h, "c": c}


def _remember(f: Tensor, p: Tensor, a: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    f, p = torch.sigmoid(f), torch.sigmoid(p)
    c = f * c + (1 - f) * a
    return p * c + (1 - p) * x, c
