"""The plain loop of one cell over time: the reference of every faster way, which has the same signature."""

import torch
from torch import Tensor

from l2lopt.cells import Cell, CellState


def run(
    cell: Cell, x: Tensor, state: CellState, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, CellState]:
    """All time steps of `cell`, features on the second axis.

    Sequence b takes its first `lengths[b]` steps and no other: beyond them its output is zero, its state stays as it
    is, and whatever the padding holds (NaN too) reaches neither values nor gradients.

    Args:
        cell: the step, any cell.
        x: inputs [T, N, *batch].
        state: name → [size, *batch], the state before the first step.
        lengths: whole numbers in [0, T], [*batch]; None stands for T everywhere.
        reverse: go from the last step to the first; a padded sequence starts at its own last step.

    Returns:
        The outputs [T, M, *batch], in the order of x either way, and the state after the last step taken.
    """
    alive = None
    if lengths is not None:
        steps = torch.arange(x.shape[0], device=x.device)
        alive = steps.view(-1, *[1] * lengths.dim()) < lengths
        x = torch.where(alive.unsqueeze(1), x, 0.0)
    inputs, outputs = x.unbind(0), []
    for t in reversed(range(len(inputs))) if reverse else range(len(inputs)):
        output, following = cell(inputs[t], state)
        if alive is not None:
            output = torch.where(alive[t], output, 0.0)
            following = {name: torch.where(alive[t], value, state[name]) for name, value in following.items()}
        outputs.append(output)
        state = following
    if not outputs:
        return x.new_zeros(0, cell.hidden_size, *x.shape[2:]), state
    return torch.stack(outputs[::-1] if reverse else outputs), state
