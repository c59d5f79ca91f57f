"""The state of a stack in the form that callers see: PyTorch's form if there is one, else one mapping per cell.

For cells whose state is h: a tensor h [L·D, B, M], as for `nn.GRU`. With h and c: a pair of tensors, as for `nn.LSTM`.
For any other cell, or sizes that differ between layers: a list of L·D mappings, name → [B, size], layer by layer, the
forward direction first. A list of mappings is accepted for every cell. A single sequence has no axis B.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from l2lopt.cells import CellState
from l2lopt.core.errors import UserError

StackState: TypeAlias = Tensor | tuple[Tensor, Tensor] | Sequence[Mapping[str, Tensor]]

REMEDY = "give the state in the form the layer returns it, or None for the initial state"


def join(states: Sequence[CellState]) -> StackState:
    """The states of the cells, each name → [size, *batch], in the form for callers."""
    outside = [{name: value.movedim(0, -1) for name, value in state.items()} for state in states]
    names = _torch_names(states)
    if names is None:
        # Copies, as those in PyTorch's form are: a T-LSTM's state is the last input itself.
        return [{name: value.clone() for name, value in state.items()} for state in outside]
    h, *c = (torch.stack([state[name] for state in outside]) for name in names)
    return (h, c[0]) if c else h


def split(state: StackState, initial: Sequence[CellState]) -> list[CellState]:
    """The inverse of `join`.

    Args:
        state: State in the form for callers.
        initial: Initial state of each cell, for names and shapes.

    Raises:
        UserError: For another form, other names, other shapes or, outside autocast, another precision.
    """
    names = _torch_names(initial)
    parts: list[Mapping[str, Tensor]]
    if _is_mappings(state):
        parts = list(state)
    elif names is None:
        raise _error(f"a list of {len(initial)} mappings", _describe(state))
    else:
        given: list[object] = [state] if isinstance(state, Tensor) else list(state)
        tensors = [part for part in given if isinstance(part, Tensor)]
        if not len(tensors) == len(given) == len(names):
            raise _error(f"the tensors {', '.join(names)}" if len(names) > 1 else "one tensor h", _describe(state))
        for name, tensor in zip(names, tensors, strict=True):
            shape = [len(initial), *initial[0][name].movedim(0, -1).shape]
            if list(tensor.shape) != shape:
                raise _error(f"{name} of shape {shape}", f"{list(tensor.shape)}")
        parts = [dict(zip(names, layer, strict=True)) for layer in zip(*tensors, strict=True)]
    if len(parts) != len(initial):
        raise _error(f"one mapping for each of {len(initial)} cells", str(len(parts)))
    for index, (part, blank) in enumerate(zip(parts, initial, strict=True)):
        shapes = {name: list(value.movedim(0, -1).shape) for name, value in blank.items()}
        found = {name: list(value.shape) for name, value in part.items()}
        if found.keys() != shapes.keys() or any(found[name] != shape for name, shape in shapes.items()):
            raise _error(f"the shapes {shapes} for cell {index}", str(found))
        _check_precision(part, blank)
    return [{name: value.movedim(-1, 0) for name, value in part.items()} for part in parts]


def _check_precision(part: Mapping[str, Tensor], blank: CellState) -> None:
    """Refuses a state that has not the precision of x; under autocast it may have that of the weights."""
    for name, value in part.items():
        wanted = blank[name].dtype
        if value.dtype != wanted and not torch.is_autocast_enabled(value.device.type):
            expected, found = f"{wanted}, as x is", f"{name} of {value.dtype}"
            raise UserError("state", expected=expected, found=found, remedy="convert it, or x")


def _torch_names(states: Sequence[CellState]) -> tuple[str, ...] | None:
    """The names of the tensors in PyTorch's form; None if these cells have none."""
    names = next((names for names in (("h",), ("h", "c")) if states[0].keys() == set(names)), None)
    if names is None or any(state.keys() != states[0].keys() for state in states):
        return None
    # Compared one by one, and in no set: sizes that are symbols, as under `torch.export`, have no hash.
    first = states[0][names[0]].shape
    return names if all(state[name].shape == first for state in states for name in names) else None


def _is_mappings(state: object) -> TypeGuard[Sequence[Mapping[str, Tensor]]]:
    return isinstance(state, list | tuple) and bool(state) and all(isinstance(part, Mapping) for part in state)


def _describe(state: object) -> str:
    if isinstance(state, Tensor):
        return f"a tensor of shape {list(state.shape)}"
    if isinstance(state, list | tuple):
        return f"{len(state)} of {', '.join(sorted({type(part).__name__ for part in state})) or 'nothing'}"
    return type(state).__name__


def _error(expected: str, found: str) -> UserError:
    return UserError("state", expected=expected, found=found, remedy=REMEDY)
