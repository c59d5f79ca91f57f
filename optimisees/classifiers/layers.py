"""Activations, normalisations and initial values that small networks choose from by name."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import nn

from l2lopt.core.errors import above_0

Activation: TypeAlias = Literal["sigmoid", "relu", "tanh", "gelu", "silu"]
Norm: TypeAlias = Literal["none", "batch", "layer"]
Initialisation: TypeAlias = Literal["default", "he", "orthogonal"]
ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def normalisation(norm: Norm, features: int, images: bool = False) -> list[nn.Module]:
    """The layers that normalise `features` numbers, or channels of images; none for "none".

    "batch" is batch norm, over the samples. "layer" is layer norm, over a sample's features; of images it is over
    channels and pixels together with a gain and a bias for each channel (group norm of one group).
    """
    if norm == "batch":
        return [nn.BatchNorm2d(features) if images else nn.BatchNorm1d(features)]
    if norm == "layer":
        return [nn.GroupNorm(1, features) if images else nn.LayerNorm(features)]
    return []


def initialise(model: nn.Module, initialisation: Initialisation, gain: float) -> nn.Module:
    """Draws the weights of linear layers and convolutions anew, and multiplies them by a factor.

    Args:
        model: Model, changed in place.
        initialisation: "default" keeps PyTorch's values, weights from U(±1/√fan-in); "he" takes N(0, 2/fan-in) (He et
            al. 2015) and "orthogonal" orthonormal rows or columns (Saxe et al. 2014), both with biases of 0.
        gain: Factor on these weights, above 0; biases are left.
    """
    above_0("initialisation", gain=gain)
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            if initialisation == "he":
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            elif initialisation == "orthogonal":
                nn.init.orthogonal_(layer.weight)
            if initialisation != "default" and layer.bias is not None:
                nn.init.zeros_(layer.bias)
            if gain != 1:
                with torch.no_grad():
                    layer.weight.mul_(gain)
    return model


def perceptron(
    sizes: Sequence[int],
    activation: Activation,
    dtype: torch.dtype,
    norm: Norm = "none",
    initialisation: Initialisation = "default",
    gain: float = 1.0,
) -> nn.Module:
    """Linear layers between numbers of features, with normalisation and activation after each but the last.

    Args:
        sizes: Number of inputs, of each hidden layer's units, and of outputs.
        activation: Name of the function between the layers.
        dtype: Data type of the parameters.
        norm: Normalisation of the hidden layers before the activation; under "batch" they have no bias.
        initialisation: Initial values; see `initialise`.
        gain: Factor on the initial weights.
    """
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(pairwise(sizes), 2):
        last = index == len(sizes)
        layers.append(nn.Linear(fan_in, fan_out, bias=last or norm != "batch", dtype=dtype))
        if not last:
            layers += [*(layer.to(dtype) for layer in normalisation(norm, fan_out)), ACTIVATIONS[activation]()]
    return initialise(nn.Sequential(*layers), initialisation, gain)
