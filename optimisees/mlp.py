"""A multilayer perceptron on the bundled digits, the small task of Andrychowicz et al. 2016 at scikit-learn's size."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from l2lopt.errors import UserError
from optimisees.datasets import digits
from optimisees.module import ModuleOptimisee, accuracy

_ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh}


def mlp(
    hidden: Sequence[int] = (20,),
    activation: Literal["sigmoid", "relu", "tanh"] = "sigmoid",
    batch_size: int = 128,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """64 pixels → hidden layers → 10 classes, cross-entropy; 1,510 parameters with one hidden layer of 20.

    Args:
        hidden: the hidden layers' sizes.
        activation: between the layers.
        batch_size: samples a step, of 1,300.
        heldout: the share of training samples held out of the inner steps of meta-training.
        dtype: of data and parameters.
        device: where they live.
    """
    if any(size < 1 for size in hidden):
        raise UserError("mlp: hidden", expected="positive sizes", found=str(list(hidden)), remedy="change the value")
    kind = getattr(torch, dtype)
    sizes = (64, *hidden, 10)

    def factory() -> nn.Module:
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out, dtype=kind), _ACTIVATIONS[activation]()]
        return nn.Sequential(*layers[:-1])

    criterion, metrics = nn.functional.cross_entropy, {"accuracy": accuracy}
    return ModuleOptimisee(factory, criterion, digits(kind), batch_size, heldout, device, metrics=metrics)
