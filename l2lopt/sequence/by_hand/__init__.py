"""Sequence layers with hand-derived backward passes: the loop's numbers at about the speed of the products.

`plan` looks a cell up; `run` has the signature of `loop.run`. Every pass is a `Sweep`: `Recurrent`, a pointwise part
(`pointwise`) behind a feed that brings h to the gates (`full`, `highway`), or one of the `scans`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from l2lopt.cells import Cell, CellState
from l2lopt.sequence.by_hand.function import ByHand, Call
from l2lopt.sequence.by_hand.plans import plan


def run(
    cell: Cell,
    x: Tensor,
    state: CellState,
    lengths: Tensor | None = None,
    reverse: bool = False,
    fold: bool | None = None,
    through: Callable[..., tuple[Tensor, ...]] = ByHand.apply,
) -> tuple[Tensor, CellState]:
    """What `loop.run` gives, for a cell that `plan` knows and at least one step of one sequence.

    Under autocast the products are in its precision, states and sums in the weights' own. Beside the steps a call costs
    about a millisecond. On a GPU it is the same operations, none of which reads a number back, as a CUDA graph demands.

    Args:
        cell: as in `loop.run`, like the arguments that follow.
        x: [T, N, *batch].
        state: name → [size, *batch].
        lengths: [*batch] or None.
        reverse: from the last step to the first.
        fold: see `plan`; None folds on a GPU.
        through: how the pass is applied; takes what `ByHand.apply` takes.
    """
    sweep = plan(cell, x.is_cuda if fold is None else fold)
    assert not isinstance(sweep, str)
    kind, batch, weights = x.device.type, x.shape[2:], dict(cell.named_parameters())
    autocast = torch.is_autocast_enabled(kind)
    first = next(iter(weights.values()))
    dtype = torch.get_autocast_dtype(kind) if autocast else first.dtype
    flat = None if lengths is None else lengths.reshape(-1)
    names = tuple(state)
    call = Call(sweep, cell, names, tuple(weights), flat, reverse, autocast, dtype)
    states = (value.movedim(0, -1).reshape(-1, value.shape[0]) for value in state.values())
    rows = x.movedim(1, -1).reshape(x.shape[0], -1, x.shape[1])
    outputs, *final = through(call, rows, *states, *weights.values())
    shaped = (value.unflatten(0, batch) if batch else value[0] for value in final)
    output = outputs.unflatten(1, batch) if batch else outputs[:, 0]
    return output.movedim(-1, 1), {name: value.movedim(-1, 0) for name, value in zip(names, shaped, strict=True)}


__all__ = ["plan", "run"]
