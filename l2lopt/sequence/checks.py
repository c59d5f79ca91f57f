"""Errors of a stack: cells whose sizes do not match, inputs of another shape."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from l2lopt.cells import Cell
from l2lopt.core.errors import UserError


def width(layer: Sequence[Cell]) -> int:
    """Number of features of a layer's output, over its directions."""
    return sum(cell.hidden_size for cell in layer)


def check_layers(layers: Sequence[Sequence[Cell]]) -> None:
    """Refuses layers of anything but cells, and those whose sizes do not match.

    Raises:
        UserError: For no layers, for anything but cells, for more than 2 cells or none in a layer, and for an input
            size that differs from the width of the layer below.
    """
    if not layers:
        raise UserError("layers", expected="at least one", found="none", remedy="give a layer")
    for i, layer in enumerate(layers):
        listed = isinstance(layer, Iterable)
        if others := [part for part in layer if not isinstance(part, Cell)] if listed else [layer]:
            found = f"a {type(others[0]).__name__}{' in it' if listed else ''}"
            remedy = "cells.make builds a cell, and a layer is a list of one or two"
            raise UserError(f"layers[{i}]", expected="a list of cells", found=found, remedy=remedy)
        if len(layer) not in (1, 2):
            remedy = "give a forward and perhaps a backward cell"
            raise UserError(f"layers[{i}]", expected="1 or 2 cells", found=str(len(layer)), remedy=remedy)
        size = width(layers[i - 1]) if i else layer[0].input_size
        for cell in layer:
            if cell.input_size != size:
                where, expected = f"layers[{i}]", f"cells of input size {size}"
                remedy = "match it to the layer below" if i else "give both directions the same input size"
                raise UserError(where, expected=expected, found=str(cell.input_size), remedy=remedy)


def check_input(x: Tensor, input_size: int) -> None:
    """Refuses inputs that are not [T, *batch, N].

    Raises:
        UserError: For another rank or number of features.
    """
    if x.dim() < 2:
        expected, remedy = "[T, B, N] or, for one sequence, [T, N]", "reshape the input"
        raise UserError("input", expected=expected, found=f"shape {list(x.shape)}", remedy=remedy)
    if x.shape[-1] != input_size:
        expected, remedy = f"{input_size} features on the last axis", "build the layer for this input size"
        raise UserError("input", expected=expected, found=str(x.shape[-1]), remedy=remedy)


def check_precision(x: Tensor, layer: nn.Module) -> None:
    """Refuses inputs whose precision is not that of the weights of the first layer; autocast makes them fit.

    Raises:
        UserError: For another precision.
    """
    kinds = {weight.dtype for weight in layer.parameters()}
    # Cells of several precisions, or without weights, know themselves what they take.
    if len(kinds) == 1 and x.dtype not in kinds and not torch.is_autocast_enabled(x.device.type):
        expected, remedy = f"{kinds.pop()}, as the weights are", "convert the input, or the layer by .to(...)"
        raise UserError("input", expected=expected, found=str(x.dtype), remedy=remedy)
