"""PyTorch's recurrent layers as stacks of ours, with their weights."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from l2lopt import cells
from l2lopt.cells import Cell
from l2lopt.core.errors import UserError
from l2lopt.sequence.stack import Stack

CONVERSIONS: dict[type[nn.RNNBase], Callable[[nn.RNNBase, dict[str, Tensor]], Cell]] = {}
"""PyTorch's class → a cell from the module (for its options) and one direction's weights: `weight_ih` [gM, N],
`weight_hh` [gM, M], `bias_ih` and `bias_hh` [gM], zeros where the module has no biases. A new cell gets one line."""


def from_torch(module: nn.RNNBase) -> Stack:
    """A stack that is called like `module` and computes the same, with copies of its weights.

    A module without biases becomes a stack with biases of zero, which are trained. Of an `nn.RNN`'s two biases the sum
    is copied into the one that ours has, which moves half as fast in training. Frozen weights stay frozen; biases that
    become one, only together. Of a weight that is pruned or parametrised (weight norm) the
    value is copied that it has now, without the mask or the norm. What the module calls `hx`, the stack calls `state`.

    Example:
        >>> import torch
        >>> from l2lopt import sequence
        >>> module, x = torch.nn.LSTM(3, 5, num_layers=2), torch.randn(11, 4, 3)
        >>> torch.allclose(sequence.from_torch(module)(x)[0], module(x)[0], atol=1e-6)
        True

    Args:
        module: An `nn.LSTM`, `nn.GRU` or `nn.RNN`; its dropout, layout and mode are copied too.

    Raises:
        UserError: For a class that has no conversion yet, and for `proj_size`.
    """
    kind = type_before_parametrizations(module)
    if kind not in CONVERSIONS:
        known = ", ".join(sorted(f"nn.{one.__name__}" for one in CONVERSIONS))
        remedy = f"choose one of {known}"
        raise UserError("from_torch", expected="a layer with a conversion", found=kind.__name__, remedy=remedy)
    if module.proj_size:
        remedy = "build the layer without projections"
        raise UserError("from_torch: proj_size", expected="0", found=str(module.proj_size), remedy=remedy)
    convert, directions = CONVERSIONS[kind], ["", "_reverse"][: 1 + module.bidirectional]
    layers = [
        [convert(module, _weights(module, f"_l{layer}{direction}")) for direction in directions]
        for layer in range(module.num_layers)
    ]
    stack = Stack(layers, dropout=module.dropout, batch_first=module.batch_first)
    return stack.train(module.training)


def _weights(module: nn.RNNBase, suffix: str) -> dict[str, Tensor]:
    """Copies of one direction's weights."""
    # The underscore in "_l0" keeps this layer apart from layer 10.
    names = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if module.bias else ())]
    # By attribute: a pruned or parametrised weight is no parameter of the module's own.
    given = {name: getattr(module, f"{name}{suffix}") for name in names}
    weights = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in given.items()}
    first = weights["weight_ih"]
    zeros = first.new_zeros(len(first), requires_grad=first.requires_grad)
    return {"bias_ih": zeros, "bias_hh": zeros} | weights


def _lstm(module: nn.RNNBase, weights: dict[str, Tensor]) -> Cell:
    """Our gates have PyTorch's order. Two biases act through their sum alone, but each is trained."""
    if not module.bias:
        return _filled(cells.make("lstm", *_sizes(weights)), _one_bias(weights))
    return _filled(cells.make("lstm", *_sizes(weights), biases="two"), _two_biases(weights))


def _gru(module: nn.RNNBase, weights: dict[str, Tensor]) -> Cell:
    """Both biases are needed: the reset gate multiplies one of them."""
    cell = cells.make("gru", *_sizes(weights), update="kept", reset="after", biases="two")
    return _filled(cell, _two_biases(weights))


def _rnn(module: nn.RNNBase, weights: dict[str, Tensor]) -> Cell:
    return _filled(cells.make("rnn", *_sizes(weights), activation=module.nonlinearity), _one_bias(weights))


def _sizes(weights: dict[str, Tensor]) -> tuple[int, int]:
    """N and M."""
    return weights["weight_ih"].shape[1], weights["weight_hh"].shape[1]


def _one_bias(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names, the biases summed."""
    bias = weights["bias_ih"] + weights["bias_hh"]
    return {"weight_x": weights["weight_ih"], "weight_h": weights["weight_hh"], "bias": bias}


def _two_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names."""
    return _one_bias(weights) | {"bias": weights["bias_ih"], "bias_h": weights["bias_hh"]}


def _filled(cell: Cell, values: dict[str, Tensor]) -> Cell:
    """The cell with these values, in their dtype and on their device, frozen where they are."""
    cell.to(values["weight_x"]).load_state_dict(values)
    for name, parameter in cell.named_parameters():
        parameter.requires_grad_(values[name].requires_grad)
    return cell


CONVERSIONS |= {nn.LSTM: _lstm, nn.GRU: _gru, nn.RNN: _rnn}
