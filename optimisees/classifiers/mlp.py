"""A multilayer perceptron, the small task of Andrychowicz et al. 2016; on the bundled digits unless told otherwise."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import nn

from l2lopt.core.errors import UserError
from optimisees.classifiers.sources import source
from optimisees.module import ModuleOptimisee

_ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh}


def mlp(
    hidden: Sequence[int] = (20,),
    activation: Literal["sigmoid", "relu", "tanh"] = "sigmoid",
    dataset: str = "digits",
    data: str | None = None,
    download: bool = False,
    evaluation_samples: int | None = None,
    batch_size: int = 128,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """Pixels → hidden layers → classes, cross-entropy; 1,510 parameters on digits with one hidden layer of 20.

    Args:
        hidden: The hidden layers' sizes.
        activation: Name of the function between the layers.
        dataset: "digits", or images as for `images.load`: "mnist", "cifar10", "svhn", a folder.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        batch_size: Samples a step; of the digits there are 1,300 to train on.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
    """
    if any(size < 1 for size in hidden):
        raise UserError("mlp: hidden", expected="positive sizes", found=str(list(hidden)), remedy="change the value")
    kind = getattr(torch, dtype)
    task = source(dataset, kind, data, download, device)
    sizes = (prod(task.shape), *hidden, task.classes)

    def factory() -> nn.Module:
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out, dtype=kind), _ACTIVATIONS[activation]()]
        return nn.Sequential(*layers[:-1])

    return task.classifier(factory, batch_size, heldout, evaluation_samples)
