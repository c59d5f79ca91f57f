"""The small convolutional network of Andrychowicz et al. 2016, on the bundled digits unless told otherwise."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from l2lopt.core.errors import UserError
from optimisees.classifiers.sources import source
from optimisees.module import ModuleOptimisee


def convnet(
    channels: Sequence[int] = (16, 16, 16),
    hidden: int = 32,
    batch_norm: bool = True,
    dataset: str = "digits",
    data: str | None = None,
    download: bool = False,
    evaluation_samples: int | None = None,
    batch_size: int = 128,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """Images → (3×3 convolution, batch norm, ReLU, 2×2 max-pooling) for each of `channels` → `hidden` → classes.

    Three stages of 16 and 32 hidden units as in the paper's CIFAR-10 network: 5,722 parameters on the digits of 8×8.

    Args:
        channels: Number of channels of each stage; each halves the image, so that the digits allow three at most.
        hidden: Units of the fully connected layer.
        batch_norm: Whether batch normalisation follows each convolution, which then has no bias.
        dataset: "digits", or images as for `images.load`: "mnist", "cifar10", "svhn", a folder.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        batch_size: Samples a step; of the digits there are 1,300 to train on.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
    """
    kind = getattr(torch, dtype)
    task = source(dataset, kind, data, download, device)
    colours, height, width = task.shape
    most = min(height, width).bit_length() - 1
    if not 1 <= len(channels) <= most or min(channels) < 1:
        expected = f"one to {most} positive numbers"
        raise UserError("convnet: channels", expected=expected, found=str(list(channels)), remedy="change the value")
    if hidden < 1:
        raise UserError("convnet: hidden", expected="at least 1", found=str(hidden), remedy="change the value")

    def factory() -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, task.shape)]
        for fan_in, fan_out in zip((colours, *channels), channels, strict=False):
            layers.append(nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=not batch_norm))
            layers += [nn.BatchNorm2d(fan_out)] if batch_norm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        pixels = (height >> len(channels)) * (width >> len(channels))
        layers += [nn.Flatten(), nn.Linear(pixels * channels[-1], hidden), nn.ReLU(), nn.Linear(hidden, task.classes)]
        return nn.Sequential(*layers).to(kind)

    return task.classifier(factory, batch_size, heldout, evaluation_samples)
