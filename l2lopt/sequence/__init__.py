"""Layers over any cell. `make(cell, input_size, hidden_size, ...)` builds one as `nn.LSTM` is built.

`run` takes one cell through time, by hand-derived passes where there are any; `loop.run` is the plain reference.
"""

from collections.abc import Mapping

from l2lopt.cells import CELLS, PAIR_CELLS
from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.sequence.backends import backend, run
from l2lopt.sequence.deep_bidirectional_gru import deep_bidirectional_gru
from l2lopt.sequence.masks import Masks
from l2lopt.sequence.stack import Stack
from l2lopt.sequence.states import StackState
from l2lopt.sequence.torch_weights import CONVERSIONS, from_torch


def make(
    cell: registry.Choice,
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
    *,
    output_size: int | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    weight_drop: Mapping[str, float] | None = None,
    backend: str = "auto",
) -> Stack:
    """A `Stack` of one kind of cell, as `nn.LSTM(input_size, hidden_size, num_layers, ...)` is.

    Args:
        cell: the name of a cell, or a mapping of its name and options.
        input_size: N.
        hidden_size: M, in each direction.
        num_layers: at least 1.
        output_size: the last layer's M, in each direction, where it is another (a language model that ties its
            embedding goes 400 → 1150 → 1150 → 400); None stands for `hidden_size`.
        bidirectional: a second cell per layer goes backward; layers above the first then read 2M features.
        batch_first: see `Stack`.
        dropout: see `Stack`.
        weight_drop: see `Stack`.
        backend: see `Stack`.

    Raises:
        UserError: for an unknown cell, option or backend, and for numbers out of range.
    """
    if num_layers < 1:
        raise UserError("num_layers", expected="at least 1", found=str(num_layers), remedy="give a positive number")
    directions = 1 + bidirectional
    sizes = [hidden_size] * (num_layers - 1) + [hidden_size if output_size is None else output_size]
    below = [input_size] + [directions * size for size in sizes[:-1]]
    layers = [
        [registry.build(CELLS | PAIR_CELLS, "cell", cell, input_size=n, hidden_size=m) for _ in range(directions)]
        for n, m in zip(below, sizes, strict=True)
    ]
    return Stack(layers, dropout=dropout, weight_drop=weight_drop, batch_first=batch_first, backend=backend)


__all__ = [
    "CONVERSIONS",
    "Masks",
    "Stack",
    "StackState",
    "backend",
    "deep_bidirectional_gru",
    "from_torch",
    "make",
    "run",
]
