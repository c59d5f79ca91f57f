"""Recurrent layers over any cell. `make(cell, input_size, hidden_size, ...)` builds one as `nn.LSTM` is built.

`run` applies one cell to all time steps, by a hand-derived pass if the cell has one; `loop.run` is the plain reference.
"""

from collections.abc import Mapping

from l2lopt import cells
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
    """A `Stack` of one kind of cell, built and called like `nn.LSTM(input_size, hidden_size, num_layers, ...)`.

    Biases are an option of some cells; for `device` and `dtype` there is `.to(...)`.

    Example:
        >>> import torch
        >>> from l2lopt import sequence
        >>> layer = sequence.make("gru", 3, 5, num_layers=2, bidirectional=True)
        >>> output, h = layer(torch.randn(11, 4, 3))      # [T, B, N], like nn.GRU
        >>> output.shape, h.shape
        (torch.Size([11, 4, 10]), torch.Size([4, 4, 5]))

    Args:
        cell: Name of a cell, or a mapping of its name and options.
        input_size: N.
        hidden_size: M, in each direction.
        num_layers: Number of layers, at least 1.
        output_size: M of the last layer, in each direction, if it differs (a language model that ties its embedding
            has the sizes 400 → 1150 → 1150 → 400); None takes `hidden_size`.
        bidirectional: Whether each layer has a second cell for the reverse direction; layers above the first then read
            2M features.
        batch_first: Whether the batch is the first axis of inputs and outputs, [B, T, ·] instead of [T, B, ·].
        dropout: Probability p in [0, 1) of dropout between layers; a single layer has none.
        weight_drop: Weight of the cells → probability p in [0, 1) of weight drop, see `Stack`.
        backend: Pass over time: "auto", "fast" or "loop", see `backends.run`.

    Raises:
        UserError: For an unknown cell, option or backend, and for numbers out of range.
    """
    if num_layers < 1:
        raise UserError("num_layers", expected="at least 1", found=str(num_layers), remedy="give a positive number")
    directions = 1 + bidirectional
    sizes = [hidden_size] * (num_layers - 1) + [hidden_size if output_size is None else output_size]
    below = [input_size] + [directions * size for size in sizes[:-1]]
    layers = [
        [cells.build(cell, n, m, with_pairs=True) for _ in range(directions)] for n, m in zip(below, sizes, strict=True)
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
