"""The leaky form, eqs. 6-8 (Kuo et al., IJCNN 2020): the memory of a Hopfield network in discrete time."""

from typing import Literal

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, activated, affine, column, uniform
from l2lopt.core.choices import checks_words


class Leaky(Cell):
    """h' = (1−ξ)∘h + ξ∘a; a = tanh(W_A x + U_A h + b_A), ξ = σ(raw).

    It is Euler's method with step ξ for dh/dt = −h + a (eqs. 4-5), and the GRU of eqs. 1-3 is the case in which ξ is
    the gate i and U_A sees r∘h. The paper leaves ξ > 0 open; here it lies in (0, 1), where a step never passes a.

    `weight_x` is W_A [M, N], `weight_h` is U_A [M, M], `bias` is b_A [M], `step` is raw [M]. MN + M² + 2M numbers, and
    MN + M with recurrent=False. Initial values U(±1/√M), so that ξ is about ½.

    Args:
        input_size: N.
        hidden_size: M.
        step: Number of values of ξ: "vector", one for each unit (eq. 7); "scalar", one for all (eq. 6).
        activation: Function of the candidate a: "tanh" (eq. 2) or "linear", none (eqs. 9 and 14).
        recurrent: Whether a has U_A h and b_A (eq. 11); without, a is a function of W_A x alone (eqs. 12 and 14).

    Example:
        >>> import torch
        >>> from l2lopt import cells
        >>> cell = cells.make("leaky", 3, 5, activation="linear", recurrent=False)
        >>> x = torch.randn(3, 7)
        >>> output, state = cell(x, cell.initial_state(x))
        >>> torch.allclose(output, torch.sigmoid(cell.step)[:, None] * (cell.weight_x @ x), atol=1e-6)
        True
    """

    @checks_words
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step: Literal["vector", "scalar"] = "vector",
        activation: Literal["tanh", "linear"] = "tanh",
        recurrent: bool = True,
    ) -> None:
        super().__init__(input_size, hidden_size, {"h": hidden_size})
        self.activation = activation
        self.weight_x = uniform(hidden_size, hidden_size, input_size)
        self.weight_h = uniform(hidden_size, hidden_size, hidden_size) if recurrent else None
        self.bias = uniform(hidden_size, hidden_size) if recurrent else None
        self.step = uniform(hidden_size, hidden_size if step == "vector" else 1)

    @property
    def recurrent_weights(self) -> tuple[str, ...]:
        """U_A, if there is one."""
        return () if self.weight_h is None else ("weight_h",)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step; the output is h'."""
        self.check(x, state)
        h, products = state["h"], [(self.weight_x, x)]
        if self.weight_h is not None:
            products.append((self.weight_h, h))
        a = activated(self.activation, affine(self.bias, *products))
        xi = column(torch.sigmoid(self.step), h)
        h = (1 - xi) * h + xi * a
        return h, {"h": h}
