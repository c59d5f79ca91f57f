"""A run of coordinates that is worked on at once, and what of a row or a tensor lies in it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from l2lopt.core.layout import Params

WIDTH = 4096
"""Coordinates per block: many beside the 1 µs that an operation costs, few enough for its buffers to stay in cache."""


class Block(NamedTuple):
    """B neighbours in the flat vector of all rows' coordinates.

    Attributes:
        start: The first one's place in it.
        grads: [B], finite.
        params: θ, [B].
        before: The state by name, [B] or [M, B].
        after: The same after the step; the same memory where the state may be overwritten.
        update: [B].
    """

    start: int
    grads: Tensor
    params: Tensor
    before: Params
    after: Params
    update: Tensor

    def blocks(self, start: int, size: int) -> "list[Block]":
        """`size` of its coordinates from `start` on, in pieces of at most `WIDTH`."""
        if size == self.update.shape[0] <= WIDTH:
            return [self]
        sizes = [min(WIDTH, size - done) for done in range(0, size, WIDTH)]

        def cut(value: Tensor) -> tuple[Tensor, ...]:
            # All pieces by one call: a view alone costs as much as a small operation.
            return value.narrow(-1, start, size).split_with_sizes(sizes, -1)

        before = {key: cut(value) for key, value in self.before.items()}
        after = {key: cut(value) for key, value in self.after.items()}
        flat = zip(cut(self.grads), cut(self.params), cut(self.update), strict=True)
        return [
            Block(
                start + k * WIDTH,
                grads,
                params,
                {key: pieces[k] for key, pieces in before.items()},
                {key: pieces[k] for key, pieces in after.items()},
                update,
            )
            for k, (grads, params, update) in enumerate(flat)
        ]


class Segments:
    """The flat vector cut into runs that follow one another, such as rows, or the tensors of each row.

    Args:
        sizes: Coordinates per segment.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self.ends = list(accumulate(sizes))

    def within(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Each segment that meets [start, start + size) and how many of these coordinates it holds."""
        stop, index = start + size, bisect_right(self.ends, start)
        while start < stop:
            end = min(self.ends[index], stop)
            # An empty tensor ends where the one before it does, and holds nothing.
            if end > start:
                yield index, end - start
            start, index = end, index + 1
