"""What a window's replay by hand keeps of its steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.types import Params


class Trace(NamedTuple):
    """T steps of P coordinates, the batch axes among them; step t goes from index t to index t + 1.

    Attributes:
        rows: what the first product of each step takes, [T + 1, F + M + 1, P]: features, h and 1; the last has h only.
        hidden: h, the part [T + 1, M, P] of `rows`.
        c: the cell's memory, [T + 1, M, P].
        features: each input's by its name, parts [T, size, P] of `rows`.
        params: θ, [T + 1, P].
        grads: [T, P], 0 where they are not finite.
        finite: [P] for each step in which some coordinates are skipped, None for the others.
        outputs: the network's, [T, outputs, P].
        slopes: the adjoint of `outputs`, 0 where a coordinate was skipped.
    """

    rows: Tensor
    hidden: Tensor
    c: Tensor
    features: Params
    params: Tensor
    grads: Tensor
    finite: list[Tensor | None]
    outputs: Tensor
    slopes: Tensor

    def keep(self, t: int, before: Tensor, after: Tensor) -> None:
        """Gives the coordinates that step t skips their values from `before` [..., P], in `after`."""
        finite = self.finite[t]
        if finite is not None:
            torch.where(finite, after, before, out=after)

    def part(self, t: int, adjoint: Tensor) -> tuple[Tensor, Tensor | None]:
        """An adjoint [..., P] in two parts: what step t acts on, and what passes by it (None: nothing does)."""
        finite = self.finite[t]
        if finite is None:
            return adjoint, None
        return adjoint.where(finite, 0.0), adjoint.where(~finite, 0.0)
