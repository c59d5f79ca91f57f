"""The coupled gated recurrent unit on pairs of sequences (Compagnon et al. 2021).

"Sequence metric learning as synchronization of recurrent neural networks".
"""

import torch
from torch import Tensor

from l2lopt.cells.cell import Cell, CellState, affine, uniform
from l2lopt.cells.gru import reset_after
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params


class CoupledGRU(Cell):
    """Two sequences, left and right, through the same weights; axis 1 of x [N, 2, ...] is the side.

    For each side r, z = σ(W x + b + U h + b_h) and h̃ = tanh(W_n x + b_n + r∘(U_n h + b_hn)); together
    c = σ(U_c (h^L + h^R) + 2 b_c), h̄^L = (1−c)∘h̃^L + c∘h̃^R and the mirror for R; h' = z∘h + (1−z)∘h̄.
    b_c is added twice, once with each side. Exchanged sides give exchanged outputs, equal sides equal ones.

    `weight_x` is W [3M, N] and `bias` is b [3M], the rows in PyTorch's order r, z, n; `weight_h` is U [4M, M] and
    `bias_h` [4M], the rows r, z, n, c. 3MN + 4M² + 7M numbers, 3(MN + M² + 2M) uncoupled. Initial values U(±1/√M).

    Args:
        input_size: N.
        hidden_size: M.
        coupled: Whether the sides exchange their candidates; without it c = 0, the siamese form, which is
            `torch.nn.GRUCell` on each side.
        least_coupling: Bound b in [0, 1) that c stays above: c = b + (1−b) σ(…). With 0, as published, training may
            close c, which leaves the siamese form.

    Raises:
        UserError: For a bound out of range, and for one of the siamese form.
    """

    recurrent_weights = ("weight_h",)

    def __init__(self, input_size: int, hidden_size: int, coupled: bool = True, least_coupling: float = 0.0) -> None:
        super().__init__(input_size, hidden_size, {"h": hidden_size})
        if not 0 <= least_coupling < 1 or (least_coupling and not coupled):
            expected = "from 0 to below 1" if coupled else "0 without coupling"
            found, remedy = str(least_coupling), "change the value"
            raise UserError("coupled-gru: least_coupling", expected=expected, found=found, remedy=remedy)
        self.coupled, self.least_coupling, rows = coupled, least_coupling, 4 if coupled else 3
        self.weight_x = uniform(hidden_size, 3 * hidden_size, input_size)
        self.weight_h = uniform(hidden_size, rows * hidden_size, hidden_size)
        self.bias = uniform(hidden_size, 3 * hidden_size)
        self.bias_h = uniform(hidden_size, rows * hidden_size)

    def check(self, x: Tensor, state: CellState | None = None) -> None:
        """Refuses whatever `Cell.check` refuses, and an x without the axis of the two sides."""
        super().check(x, state)
        if x.dim() < 2 or x.shape[1] != 2:
            remedy = "stack left and right on axis 1: torch.stack((left, right), 1)"
            raise UserError("coupled-gru: x", expected="[N, 2, ...]", found=f"shape {tuple(x.shape)}", remedy=remedy)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step: x [N, 2, ...] to the output h' [M, 2, ...]."""
        self.check(x, state)
        h = state["h"]
        from_h = affine(self.bias_h, (self.weight_h, h))
        z, candidate = reset_after(affine(self.bias, (self.weight_x, x)), from_h[: 3 * self.hidden_size])
        candidate = torch.tanh(candidate)
        if self.coupled:
            # Summed after the product, which gives U_c (h^L + h^R) + 2 b_c, so that c shares the product of the gates.
            c = _share(from_h[3 * self.hidden_size :], self.least_coupling)
            candidate = (1 - c) * candidate + c * candidate.flip(1)
        z = torch.sigmoid(z)
        h = z * h + (1 - z) * candidate
        return h, {"h": h}


def coupling(weights: Params, h: Tensor, least: float = 0.0) -> Tensor:
    """The share c of the other side's candidate, one for both sides, [M, 1, ...], from the states before a step.

    Args:
        weights: Parameters of a coupled `CoupledGRU`.
        h: States of both sides, [M, 2, ...].
        least: The cell's `least_coupling`.
    """
    rows = weights["weight_h"].shape[1]
    return _share(affine(weights["bias_h"][-rows:], (weights["weight_h"][-rows:], h)), least)


def _share(a: Tensor, least: float) -> Tensor:
    """C from both sides' arguments a [M, 2, ...]."""
    c = torch.sigmoid(a.sum(1, keepdim=True))
    return least + (1 - least) * c if least else c
