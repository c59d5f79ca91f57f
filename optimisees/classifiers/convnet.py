"""The small convolutional network of Andrychowicz et al. 2016, on the bundled digits unless told otherwise."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0
from optimisees.classifiers.layers import Initialisation, Norm, initialise, normalisation
from optimisees.classifiers.sources import source
from optimisees.module import ModuleOptimisee


@checks_words
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
    size: int | None = None,
    norm: Norm | None = None,
    initialisation: Initialisation = "default",
    gain: float = 1.0,
) -> ModuleOptimisee:
    """Images → (3×3 convolution, batch norm, ReLU, 2×2 max-pooling) for each of `channels` → `hidden` → classes.

    Three stages of 16 and 32 hidden units as in the paper's CIFAR-10 network: 5,722 parameters on the digits of 8×8.

    Args:
        channels: Number of channels of each stage; each halves the image, so that the digits allow three at most.
        hidden: Units of the fully connected layer.
        batch_norm: Whether batch normalisation follows each convolution, which then has no bias; see `norm`.
        dataset: "digits", or images as for `images.load`: "mnist", "cifar10", "svhn", a folder.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        batch_size: Samples a step; of the digits there are 1,300 to train on.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
        size: Height and width that images are scaled to, such as 16 for CIFAR-10; none: as they are.
        norm: Normalisation after each convolution, which then has no bias: "batch", "layer" (over channels and pixels
            of a sample) or "none"; by default as `batch_norm` says.
        initialisation: Initial values: PyTorch's, "he" or "orthogonal"; see `layers.initialise`.
        gain: Factor on the initial weights.
    """
    kind, chosen = getattr(torch, dtype), norm or ("batch" if batch_norm else "none")
    task = source(dataset, kind, data, download, device, size)
    colours, height, width = task.shape
    most = min(height, width).bit_length() - 1
    if not 1 <= len(channels) <= most or min(channels) < 1:
        expected = f"one to {most} positive numbers"
        raise UserError("convnet: channels", expected=expected, found=str(list(channels)), remedy="change the value")
    above_0("convnet", hidden=hidden)

    def factory() -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, task.shape)]
        for fan_in, fan_out in zip((colours, *channels), channels, strict=False):
            layers.append(nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=chosen == "none"))
            layers += [*normalisation(chosen, fan_out, images=True), nn.ReLU(), nn.MaxPool2d(2)]
        pixels = (height >> len(channels)) * (width >> len(channels))
        layers += [nn.Flatten(), nn.Linear(pixels * channels[-1], hidden), nn.ReLU(), nn.Linear(hidden, task.classes)]
        return initialise(nn.Sequential(*layers), initialisation, gain).to(kind)

    return task.classifier(factory, batch_size, heldout, evaluation_samples)
