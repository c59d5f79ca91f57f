"""Logistic regression on images, a convex problem; on the bundled digits unless told otherwise."""

from math import prod
from typing import Literal

import torch
from torch import nn

from l2lopt.core.choices import checks_words
from optimisees.classifiers.sources import source
from optimisees.module import ModuleOptimisee


@checks_words
def logistic_regression(
    dataset: str = "digits",
    data: str | None = None,
    download: bool = False,
    evaluation_samples: int | None = None,
    batch_size: int = 128,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
    size: int | None = None,
) -> ModuleOptimisee:
    """P(class | x) = softmax(W x + b), cross-entropy; 650 parameters on digits.

    W and b start at 0, as is usual for a convex problem: runs of different seeds differ in their batches alone.

    Args:
        dataset: "digits", or images as for `images.load`: "mnist", "cifar10", "svhn", a folder.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        batch_size: Samples a step.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
        size: Height and width that images are scaled to; none: as they are.
    """
    kind = getattr(torch, dtype)
    task = source(dataset, kind, data, download, device, size)

    def factory() -> nn.Module:
        layer = nn.Linear(prod(task.shape), task.classes, dtype=kind)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    return task.classifier(factory, batch_size, heldout, evaluation_samples)
