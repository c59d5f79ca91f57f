"""The small convolutional network of Andrychowicz et al. 2016, on the bundled digits."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from l2lopt.errors import UserError
from optimisees.datasets import digits
from optimisees.module import ModuleOptimisee, accuracy


def convnet(
    channels: Sequence[int] = (16, 16, 16),
    hidden: int = 32,
    batch_norm: bool = True,
    batch_size: int = 128,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """8×8 images → (3×3 convolution, batch norm, ReLU, 2×2 max-pooling) for each of `channels` → `hidden` → 10 classes.

    Three stages of 16 and 32 hidden units as in the paper's CIFAR-10 network: 5,722 parameters here.

    Args:
        channels: of the stages, at most three: each halves 8×8 pixels.
        hidden: units of the fully connected layer.
        batch_norm: after each convolution, which then has no bias of its own.
        batch_size: samples a step, of 1,300.
        heldout: the share of training samples held out of the inner steps of meta-training.
        dtype: of data and parameters.
        device: where they live.
    """
    if not 1 <= len(channels) <= 3 or min(channels) < 1:
        expected = "one to three positive numbers"
        raise UserError("convnet: channels", expected=expected, found=str(list(channels)), remedy="change the value")
    if hidden < 1:
        raise UserError("convnet: hidden", expected="at least 1", found=str(hidden), remedy="change the value")
    kind = getattr(torch, dtype)

    def factory() -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
        for fan_in, fan_out in zip((1, *channels), channels, strict=False):
            layers.append(nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=not batch_norm))
            layers += [nn.BatchNorm2d(fan_out)] if batch_norm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        pixels = (8 >> len(channels)) ** 2
        layers += [nn.Flatten(), nn.Linear(pixels * channels[-1], hidden), nn.ReLU(), nn.Linear(hidden, 10)]
        return nn.Sequential(*layers).to(kind)

    criterion, metrics = nn.functional.cross_entropy, {"accuracy": accuracy}
    return ModuleOptimisee(factory, criterion, digits(kind), batch_size, heldout, device, metrics=metrics)
