"""The gated recurrent unit of Table I, eqs. 1-3 (Kuo et al., IJCNN 2020), its other conventions and core (13-17)."""

from typing import Literal

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, activated, affine, constant, shifted, uniform
from l2lopt.cells.highway import Core
from l2lopt.core.choices import checks_words


class GRU(Cell):
    """i, r = σ(W x + U h + b); a = tanh(W_A x + U_A (r∘h) + b_A); h' = (1−i)∘h + i∘a.

    `weight_x` is W [3M, N], `weight_h` is U [3M, M], `bias` is b [3M], the rows in PyTorch's order r, i, a.
    3(MN + M² + M) numbers, 3M fewer without bias and 3M more with two. Initial values U(±1/√M).

    Publications disagree on three points, so each is an option. `torch.nn.GRUCell` is update="kept", reset="after",
    biases="two".

    Args:
        input_size: N.
        hidden_size: M.
        update: Meaning of i: "new", the weight of the candidate, as above; "kept", the weight of the old state,
            h' = i∘h + (1−i)∘a.
        reset: Place of r: "before" the matrix product, as above; "after" it, a = tanh(W_A x + b_A + r∘(U_A h)).
        biases: "none"; "one", b; "two", with a second, `bias_h` [3M], added to each product with U (and therefore
            multiplied by r where reset="after").
        gate_bias: An extra trainable bias on i that starts on the side of the old state: at −1 for update="new", at +1
            for "kept".
        activation: Function of the candidate a: "tanh"; "relu" (Irsoy and Cardie 2014); "linear", none (eq. 9).
    """

    recurrent_weights = ("weight_h",)

    @checks_words
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        update: Literal["new", "kept"] = "new",
        reset: Literal["before", "after"] = "before",
        biases: Literal["none", "one", "two"] = "one",
        gate_bias: bool = False,
        activation: Literal["tanh", "relu", "linear"] = "tanh",
    ) -> None:
        super().__init__(input_size, hidden_size, {"h": hidden_size})
        self.update, self.reset, self.activation = update, reset, activation
        self.weight_x = uniform(hidden_size, 3 * hidden_size, input_size)
        self.weight_h = uniform(hidden_size, 3 * hidden_size, hidden_size)
        self.bias = None if biases == "none" else uniform(hidden_size, 3 * hidden_size)
        self.bias_h = uniform(hidden_size, 3 * hidden_size) if biases == "two" else None
        self.gate_bias = constant(gate_bias, -1.0 if update == "new" else 1.0, hidden_size)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        self.check(x, state)
        h, from_x = state["h"], affine(self.bias, (self.weight_x, x))
        if self.reset == "after":
            i, a = reset_after(from_x, affine(self.bias_h, (self.weight_h, h)))
        else:
            i, a = self._reset_before(from_x, h)
        a = activated(self.activation, a)
        i = torch.sigmoid(shifted(i, self.gate_bias))
        h = (1 - i) * h + i * a if self.update == "new" else i * h + (1 - i) * a
        return h, {"h": h}

    def _reset_before(self, from_x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [2 * self.hidden_size, self.hidden_size]
        gates_x, a_x = from_x.split(sizes)
        # Two products: r and i need h alone, but a needs r∘h.
        weight, weight_a = self.weight_h.split(sizes)
        bias, bias_a = (None, None) if self.bias_h is None else self.bias_h.split(sizes)
        r, i = (gates_x + affine(bias, (weight, h))).chunk(2)
        return i, a_x + affine(bias_a, (weight_a, torch.sigmoid(r) * h))


def reset_after(from_x: Tensor, from_h: Tensor) -> tuple[Tensor, Tensor]:
    """The arguments of the update gate and the candidate, from W x + b and U h + b_h [3M, ...] in the rows r, i, a."""
    (r_x, i_x, a_x), (r_h, i_h, a_h) = from_x.chunk(3), from_h.chunk(3)
    return i_x + i_h, a_x + torch.sigmoid(r_x + r_h) * a_h


class GRUCore(Core):
    """i, r = σ(W v); a = W_A x; h' = (1−i)∘h + i∘(r∘a).

    `weight_v` [2M, N] holds the rows i, r. 3MN numbers; with the IRC 3MN + NM + N, with the IHC 5MN + N² + N.
    `gate_bias` adds to i a bias that starts at −1.
    """

    gates = 2
    state = ("h",)
    bias_start = -1.0

    def forward(self, v: Tensor, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        i, r = affine(None, (self.weight_v, v)).chunk(2)
        i, a = torch.sigmoid(shifted(i, self.gate_bias)), affine(None, (self.weight_x, x))
        h = (1 - i) * state["h"] + i * (torch.sigmoid(r) * a)
        return h, {"h": h}
