"""What a window's replay by hand keeps of its steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.types import Params


class Trace(NamedTuple):
    """T steps of P coordinates, the batch axes among them. Step t goes from index t to index t + 1.

    Everything is cut into steps once: to take a part of a tensor costs as much as a small operation on it.

    Attributes:
        rows: what the first product of each step takes, [F + M + 1, P]: features, h and 1; one more at the end for h.
        hidden: h, the part [M, P] of each of `rows`.
        features: each input's by its name, parts [T, size, P] of `rows`.
        params: θ [P], T + 1 of them.
        grads: [P] each, 0 where they are not finite.
        finite: [P] for each step in which some coordinates are skipped, None for the others.
        outputs: the network's, [outputs, P] each.
        slopes: the adjoints of `outputs`, 0 where a coordinate is skipped.
    """

    rows: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    features: Params
    params: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    finite: list[Tensor | None]
    outputs: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]

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
