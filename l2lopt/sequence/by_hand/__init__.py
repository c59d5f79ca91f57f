"""Hand-derived forward and backward passes over time: the loop's results at about the cost of its matrix products.

`plan` finds the pass of a cell; `run` has the signature of `loop.run`. Every pass is a `Sweep`: either `Recurrent`, the
element-wise part of a cell (`pointwise`) behind a feed that brings h to the gates (`full`, `highway`), or one of the
`scans`.
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
    """`loop.run` for a cell that `plan` knows, with at least one step of one sequence.

    Under autocast matrix products have its precision, states and sums that of the weights. A call costs about a
    millisecond beside its steps. The operations are the same on a GPU; none reads a number back to the CPU, which a
    CUDA graph would not allow.

    Args:
        cell: Cell to run.
        x: Inputs, [T, N, *batch].
        state: name → [size, *batch], the state before the first step.
        lengths: Number of steps of each sequence, [*batch]; None for T everywhere.
        reverse: Whether the cell runs from the last step to the first.
        fold: Whether to fold an IRC cell, see `plan`; None folds on a GPU.
        through: Function with the arguments of `ByHand.apply` that applies the pass.
    """
    sweep = plan(cell, x.is_cuda if fold is None else fold)
    assert not isinstance(sweep, str)
    # One parameter may be two of the cell's weights, each of which the pass asks for by its name.
    kind, batch, weights = x.device.type, x.shape[2:], dict(cell.named_parameters(remove_duplicate=False))
    # One weight stands for all: `backends.refusal` lets no cell through whose weights have several precisions.
    first = next(iter(weights.values()))
    # Which leaves float64 as it is.
    autocast = torch.is_autocast_enabled(kind) and first.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if autocast else first.dtype
    flat = None if lengths is None else lengths.reshape(-1)
    names = tuple(state)
    call = Call(sweep, cell, names, tuple(weights), flat, reverse, autocast, dtype)
    # All batch axes become one, so a pass knows [T, B, N] and [B, size] only; without batch axes B is 1.
    states = (value.movedim(0, -1).reshape(-1, value.shape[0]) for value in state.values())
    rows = x.movedim(1, -1).reshape(x.shape[0], -1, x.shape[1])
    outputs, *final = through(call, rows, *states, *weights.values())
    shaped = (value.unflatten(0, batch) if batch else value[0] for value in final)
    output = outputs.unflatten(1, batch) if batch else outputs[:, 0]
    return output.movedim(-1, 1), {name: value.movedim(-1, 0) for name, value in zip(names, shaped, strict=True)}


__all__ = ["plan", "run"]
