"""PyTorch's recurrent layers as stacks of ours, with their weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from l2lopt.cells import LSTM, Cell
from l2lopt.errors import UserError
from l2lopt.sequence.stack import Stack

CONVERSIONS: dict[type[nn.RNNBase], Callable[[nn.RNNBase, dict[str, Tensor]], Cell]] = {}
"""PyTorch's class → a cell from the module (for its options) and one direction's weights: `weight_ih` [gM, N],
`weight_hh` [gM, M], `bias_ih` and `bias_hh` [gM], zeros where the module has no biases. A new cell gets one line."""


def from_torch(module: nn.RNNBase) -> Stack:
    """A stack that computes what `module` does: the same call, copies of its weights, its dropout and layout.

    A module without biases gets biases of zero, which train.

    Raises:
        UserError: for a class that has no conversion yet, and for `proj_size`.
    """
    if type(module) not in CONVERSIONS:
        known = ", ".join(sorted(f"nn.{kind.__name__}" for kind in CONVERSIONS))
        remedy = f"choose one of {known}"
        raise UserError("from_torch", expected="a layer with a conversion", found=type(module).__name__, remedy=remedy)
    if module.proj_size:
        remedy = "build the layer without projections"
        raise UserError("from_torch: proj_size", expected="0", found=str(module.proj_size), remedy=remedy)
    convert, directions = CONVERSIONS[type(module)], ["", "_reverse"][: 1 + module.bidirectional]
    layers = [
        [convert(module, _weights(module, f"_l{layer}{direction}")) for direction in directions]
        for layer in range(module.num_layers)
    ]
    stack = Stack(layers, dropout=module.dropout, batch_first=module.batch_first)
    return stack.train(module.training)


def _weights(module: nn.RNNBase, suffix: str) -> dict[str, Tensor]:
    """Copies of one direction's weights."""
    given = {name: p.detach().clone() for name, p in module.named_parameters() if name.endswith(suffix)}
    weights = {name.removesuffix(suffix): value for name, value in given.items()}
    zeros = weights["weight_ih"].new_zeros(len(weights["weight_ih"]))
    return {"bias_ih": zeros, "bias_hh": zeros} | weights


def _lstm(module: nn.RNNBase, weights: dict[str, Tensor]) -> Cell:
    """Our gates lie in PyTorch's order; its two biases only ever act as their sum."""
    cell = LSTM(weights["weight_ih"].shape[1], module.hidden_size).to(weights["weight_ih"])
    with torch.no_grad():
        cell.weight_x.copy_(weights["weight_ih"])
        cell.weight_h.copy_(weights["weight_hh"])
        cell.bias.copy_(weights["bias_ih"] + weights["bias_hh"])
    return cell


CONVERSIONS[nn.LSTM] = _lstm
