"""Residual networks for small images (He et al. 2016): ResNet-34 in its CIFAR form, other widths and depths."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0, few
from optimisees import precision
from optimisees.data import image_inputs, images
from optimisees.data.datasets import class_count
from optimisees.module import ModuleOptimisee, accuracy


class BasicBlock(nn.Module):
    """ReLU(BN(conv(ReLU(BN(conv(x))))) + x): two 3×3 convolutions; where the shape changes, x goes through a 1×1 one.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        stride: Stride of the first convolution and of the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, h, w] to [batch, outputs, h / stride, w / stride]."""
        inner = self.norm1(self.conv1(x)).relu()
        outputs: Tensor = self.norm2(self.conv2(inner)) + self.shortcut(x)
        return outputs.relu()


class ResNet(nn.Module):
    """3×3 stem without pooling → stages of basic blocks, each twice as wide and half as large → mean → classes.

    Convolutions start from He's normal distribution (fan out), batch norm from 1 and 0, the last layer from PyTorch's
    default.

    Args:
        channels: Number of channels of the images.
        classes: Number of classes.
        blocks: Number of blocks in each stage.
        width: Channels of the first stage.
    """

    def __init__(self, channels: int, classes: int, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        layers: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            for index in range(count):
                layers.append(BasicBlock(inputs, outputs, 2 if stage and not index else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, channels, h, w] to scores [batch, classes]."""
        features = self.blocks(self.stem(x).relu())
        scores: Tensor = self.head(features.mean((-2, -1)))
        return scores


@checks_words
def resnet(
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    dataset: str = "cifar10",
    size: int | None = None,
    data: str | None = None,
    download: bool = False,
    crop_and_flip: bool = False,
    channels_last: bool = False,
    autocast: bool = False,
    evaluation_samples: int | None = None,
    evaluation_size: int = 500,
    batch_size: int = 128,
    heldout: float = 0.1,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """A ResNet on images, cross-entropy: 21,282,122 parameters as it stands, ResNet-34; 1,334,618 with a width of 16.

    Args:
        blocks: Number of blocks in each stage, whose channels are `width`, 2 `width`, 4 `width`, …
        width: Channels of the first stage.
        dataset: "cifar10", "mnist", "svhn", "photographs", or a folder; see `images.load`, as for the next three.
        size: Side length to which the images are scaled; those of a named set can only be made smaller.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        crop_and_flip: Training batches are moved by up to 4 pixels and mirrored at random; held-out ones are not.
        channels_last: Channels lie last in memory, which is faster in most places. A CPU that may crash then keeps them
            first: in float32 with fewer than 8 channels.
        autocast: Compute in bfloat16 where that is safe; parameters, running statistics and loss stay as they are.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        evaluation_size: Samples evaluated at once.
        batch_size: Samples a step.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of the parameters.
        device: Device of data and parameters.
    """
    above_0("resnet", width=width, stages=len(blocks), blocks=min(blocks, default=0))
    few("resnet", blocks=sum(blocks))
    pictures = images.load(dataset, size, data, download)
    kind, (_, channels, height, _) = getattr(torch, dtype), pictures.train_inputs.shape
    if height < 2 ** (len(blocks) - 1):
        expected = f"images of at least {2 ** (len(blocks) - 1)} pixels for {len(blocks)} stages"
        raise UserError("resnet: blocks", expected=expected, found=str(height), remedy="take fewer stages")
    classes = class_count(dataset, pictures)
    if channels_last and width < 8 and kind == torch.float32 and torch.device(device).type == "cpu":
        # oneDNN 3.13, in PyTorch 2.15, writes beyond the weight gradient of a strided 1×1 convolution of a few channels
        # that lie last, where the processor has AVX2 and no AVX-512: `free(): invalid next size`.
        logging.getLogger("l2lopt").info("optimisee.channels_last: not on a CPU below a width of 8, which may crash")
        channels_last = False
    precision.tell_if_emulated(device, autocast)
    mean, deviation = (part.to(device) for part in image_inputs.statistics(pictures.train_inputs, kind))

    def factory() -> nn.Module:
        model = ResNet(channels, classes, blocks, width).to(kind)
        return image_inputs.Normalised(model, mean, deviation, channels_last, autocast)

    return ModuleOptimisee(
        factory,
        nn.functional.cross_entropy,
        pictures,
        batch_size,
        heldout,
        device,
        evaluation_size,
        metrics={"accuracy": accuracy},
        augment=partial(image_inputs.crop_and_flip, padding=4) if crop_and_flip else None,
        evaluation_samples=evaluation_samples,
    )
