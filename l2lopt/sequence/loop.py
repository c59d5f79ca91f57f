"""The plain loop of one cell over time: the reference for every faster pass, all of which have its signature."""

from collections.abc import Mapping

import torch
from torch import Tensor

from l2lopt.cells import Cell, CellState
from l2lopt.core.errors import UserError


def run(
    cell: Cell, x: Tensor, state: CellState, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, CellState]:
    """Applies a cell to all time steps, features on the second axis.

    Of sequence b the first `lengths[b]` steps count: after them its output is zero and its state unchanged, and the
    values of the padding, even NaN, reach neither outputs nor gradients.

    Args:
        cell: Any cell.
        x: Inputs, [T, N, *batch].
        state: name → [size, *batch], the state before the first step.
        lengths: Whole numbers in [0, T], [*batch]; None for T everywhere.
        reverse: Whether the cell runs from the last step to the first; a padded sequence starts at its own last step.

    Returns:
        The outputs [T, M, *batch], ordered like x in either direction, and the state after the last step.

    Raises:
        UserError: For a cell whose first step does not give what it should.
    """
    alive = None
    if lengths is not None:
        steps = torch.arange(x.shape[0], device=x.device)
        alive = steps.view(-1, *[1] * lengths.dim()) < lengths
        # Zeros instead of the padding, before any step: NaN · 0 is NaN, so masking the gradient later would not do.
        x = torch.where(alive.unsqueeze(1), x, 0.0)
    inputs = x.unbind(0)
    outputs: list[Tensor] = []
    for t in reversed(range(len(inputs))) if reverse else range(len(inputs)):
        result = cell(inputs[t], state)
        if not outputs:
            _check_step(cell, inputs[t], state, result)
        output, following = result
        if alive is not None:
            output = torch.where(alive[t], output, 0.0)
            following = {name: torch.where(alive[t], value, state[name]) for name, value in following.items()}
        outputs.append(output)
        state = following
    # `torch.stack` refuses an empty list.
    if not outputs:
        return x.new_zeros(0, cell.hidden_size, *x.shape[2:]), state
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _check_step(cell: Cell, x: Tensor, state: CellState, result: object) -> None:
    """Refuses a step that does not give the output [M, *batch] and a state such as it got: a new cell's mistake."""
    sizes = {name: tuple(value.shape) for name, value in state.items()}
    expected, found = (
        f"the output {[cell.hidden_size, *x.shape[1:]]} and the state {sizes}",
        f"a {type(result).__name__}",
    )
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        output, following = result
        found = f"an output {list(output.shape)} and the state a {type(following).__name__}"
        if isinstance(following, Mapping):
            after = {name: tuple(value.shape) for name, value in following.items()}
            same = after.keys() == sizes.keys() and all(after[name] == size for name, size in sizes.items())
            if same and tuple(output.shape) == (cell.hidden_size, *x.shape[1:]):
                return
            found = f"an output {list(output.shape)} and the state {after}"
    raise UserError(f"{type(cell).__name__}: forward", expected=expected, found=found, remedy="mend what it returns")
