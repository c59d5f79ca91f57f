"""The root mean square of each tensor's directions, measured and divided by block by block."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Size, Tensor

from l2lopt.core.layout import Layout
from l2lopt.kernels.cpu.block import Segments
from l2lopt.kernels.recorded import root_of
from l2lopt.optimisers.rules import DIRECTION


class RootMeanSquare:
    """Per row and tensor, over a flat vector of all rows' coordinates.

    Args:
        layout: Layout of a row.
        batch: Axes of the rows.
        by_fan_in: Whether the root of the fan-in multiplies it, see `rules.root_mean_square`.
    """

    def __init__(self, layout: Layout, batch: Size, by_fan_in: bool) -> None:
        self._layout, self._batch, self._by_fan_in = layout, batch, by_fan_in
        self._segments = Segments(layout.sizes * prod(batch))

    def squares(self, start: int, directions: Tensor) -> list[tuple[int, float]]:
        """The sums of squares of a block's directions [B], each with the number of its segment."""
        # A block is short enough for its own dtype; the sum over many blocks is not, see `total`.
        return [(index, float(torch.dot(part, part))) for index, part in self._parts(start, directions)]

    def total(self, squares: Iterable[tuple[int, float]], like: Tensor) -> Tensor:
        """The root mean squares [*batch, tensors], the blocks' sums added in double precision and in their order."""
        sums = [0.0] * len(self._segments.ends)
        for index, value in squares:
            sums[index] += value
        squares = torch.tensor(sums, dtype=torch.float64).view(*self._batch, len(self._layout.sizes))
        means = self._layout.tensors.mean_of_sums(DIRECTION, squares)
        return root_of(means, self._layout, self._by_fan_in).to(like.dtype)

    def multiply(self, start: int, directions: Tensor, factors: list[float]) -> None:
        """Multiplies each segment by its factor."""
        for index, part in self._parts(start, directions):
            part.mul_(factors[index])

    def _parts(self, start: int, directions: Tensor) -> list[tuple[int, Tensor]]:
        within = list(self._segments.within(start, directions.shape[0]))
        parts = directions.split_with_sizes([size for _, size in within])
        return [(index, part) for (index, _), part in zip(within, parts, strict=True)]
