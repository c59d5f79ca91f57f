"""The FastGRNN of Table I, eqs. 45-47 (Kuo et al., IJCNN 2020), and its simplified core (48-51)."""

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, affine, constant, shifted, uniform
from l2lopt.cells.highway import Core


class FastGRNN(Cell):
    """f = σ(W_F x + U_F h + b_F); a = tanh(W_A x + U_A h + b_A); h' = f∘h + (β(1−f) + κ)∘a.

    `weight_x` is W [2M, N], `weight_h` is U [2M, M], `bias` is b [2M], the rows f, a; β = σ(`beta`) and κ = σ(`kappa`)
    are scalars. 2(MN + M² + M) + 2 numbers. Initial values U(±1/√M).

    Args:
        input_size: N.
        hidden_size: M.
        gate_bias: An extra trainable bias on f that starts at +1.
    """

    recurrent_weights = ("weight_h",)

    def __init__(self, input_size: int, hidden_size: int, gate_bias: bool = False) -> None:
        super().__init__(input_size, hidden_size, {"h": hidden_size})
        self.weight_x = uniform(hidden_size, 2 * hidden_size, input_size)
        self.weight_h = uniform(hidden_size, 2 * hidden_size, hidden_size)
        self.bias = uniform(hidden_size, 2 * hidden_size)
        self.beta = uniform(hidden_size)
        self.kappa = uniform(hidden_size)
        self.gate_bias = constant(gate_bias, 1.0, hidden_size)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        self.check(x, state)
        f, a = affine(self.bias, (self.weight_x, x), (self.weight_h, state["h"])).chunk(2)
        f = torch.sigmoid(shifted(f, self.gate_bias))
        share = torch.sigmoid(self.beta) * (1 - f) + torch.sigmoid(self.kappa)
        h = f * state["h"] + share * torch.tanh(a)
        return h, {"h": h}


class FastGRNNCore(Core):
    """f = σ(W_F v); a = W_A x; h' = f∘h + β(1−f)∘a.

    β = σ(`beta`), and there is no κ. 2MN + 1 numbers; with the IRC 2MN + NM + N + 1, with the IHC 4MN + N² + N + 1.
    `gate_bias` adds to f a bias that starts at 1.
    """

    gates = 1
    state = ("h",)

    def __init__(self, input_size: int, hidden_size: int, gate_bias: bool = False) -> None:
        super().__init__(input_size, hidden_size, gate_bias)
        self.beta = uniform(hidden_size)

    def forward(self, v: Tensor, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        f = torch.sigmoid(shifted(affine(None, (self.weight_v, v)), self.gate_bias))
        h = f * state["h"] + torch.sigmoid(self.beta) * (1 - f) * affine(None, (self.weight_x, x))
        return h, {"h": h}
