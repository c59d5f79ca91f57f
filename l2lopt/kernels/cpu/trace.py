"""The numbers that a window's replay records of its steps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Params


class Trace(NamedTuple):
    """T steps of P coordinates, the batch axes among them. Step t goes from index t to index t + 1.

    Every tensor is cut into steps once: to take a part of a tensor costs as much as a small operation on it.

    Attributes:
        z: The arguments of the first product, [F + M + 1, P]: features, h and ones; one more at the end for h.
        hidden: h, a part [M, P] of each of `z`.
        features: Each input's features by name, parts [T, size, P] of `z`.
        params: θ [P] before each step and after the last.
        grads: Gradients [P], 0 where they are not finite.
        finite: A mask [P] for each step that skips some coordinates, None for the others.
        activities: `rules.activity` [P] of each step, None for steps at which it is 1 throughout.
        numbers: The steps' numbers, from 1 at an optimiser's first update.
        outputs: The network's outputs, [outputs, P].
        output_rows: The rows [P] of each of `outputs`.
        adjoints: The adjoints of `outputs`, 0 where a coordinate is skipped.
        adjoint_rows: The rows [P] of each of `adjoints`.
    """

    z: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    features: Params
    params: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    finite: list[Tensor | None]
    activities: list[Tensor | None]
    numbers: Sequence[int]
    outputs: tuple[Tensor, ...]
    output_rows: list[tuple[Tensor, ...]]
    adjoints: tuple[Tensor, ...]
    adjoint_rows: list[tuple[Tensor, ...]]

    def restore(self, t: int, before: Tensor, after: Tensor) -> None:
        """Gives the coordinates that step t skips their values `before` [..., P] in `after`."""
        finite = self.finite[t]
        if finite is not None:
            torch.where(finite, after, before, out=after)

    def active(self, t: int, values: Tensor) -> Tensor:
        """Values [P] times the activity of step t."""
        activity = self.activities[t]
        return values if activity is None else values * activity

    def part(self, t: int, adjoint: Tensor) -> tuple[Tensor, Tensor | None]:
        """An adjoint [..., P] in two parts: of the coordinates of step t, and of those it skips (None: of none)."""
        finite = self.finite[t]
        if finite is None:
            return adjoint, None
        # `where` and not a product with the mask: 0 times an adjoint that is not finite is NaN.
        return adjoint.where(finite, 0.0), adjoint.where(~finite, 0.0)
