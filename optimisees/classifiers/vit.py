"""A small vision transformer (Dosovitskiy et al. 2021) as an optimisee, on CIFAR-10 unless told otherwise."""

from typing import Literal

import torch
from torch import Tensor, nn

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0
from optimisees.classifiers.sources import source
from optimisees.language.transformer import STD, Layer, initialise
from optimisees.module import ModuleOptimisee


class VisionTransformer(nn.Module):
    """Flat images to scores: x = W patches + P; layers of attention over all patches and perceptrons; mean; classes.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        patch: Height and width of a patch.
        width: Size of the patches' vectors.
        layers: Number of layers.
        heads: Number of attention heads.
        expansion: Hidden units of a layer's perceptron over the width.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        patch: int,
        width: int,
        layers: int,
        heads: int,
        expansion: int,
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.grid = (channels, height // patch, patch, breadth // patch, patch)
        self.patches = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Parameter(torch.empty(self.grid[1] * self.grid[3], width))
        parts = (Layer(width, heads, expansion, "layer", 0.0, causal=False) for _ in range(layers))
        self.layers = nn.Sequential(*parts)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=STD)
        initialise(self, layers)
        # A projection of N(0, 0.02²) would leave the pixels fainter than the positions: it keeps their size instead.
        nn.init.normal_(self.patches.weight, std=self.patches.in_features**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, pixels] to [batch, classes]."""
        cut = images.unflatten(-1, self.grid).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        features = self.norm(self.layers(self.patches(cut) + self.positions))
        scores: Tensor = self.head(features.mean(1))
        return scores


@checks_words
def vit(
    patch: int = 4,
    width: int = 32,
    layers: int = 2,
    heads: int = 2,
    expansion: int = 2,
    dataset: str = "cifar10",
    size: int | None = None,
    data: str | None = None,
    download: bool = False,
    evaluation_samples: int | None = None,
    batch_size: int = 128,
    heldout: float = 0.1,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """Patches of an image → vectors → layers of attention and perceptrons → mean → classes, cross-entropy.

    Layer norm before each part and before the mean, as in the paper; no class token: the mean takes its place (Zhai et
    al. 2022). The layers are those of `language.transformer.Transformer`, and see all patches. 21,098 parameters as it
    stands.

    Args:
        patch: Height and width of a patch, a divisor of the image's.
        width: Size of the patches' vectors.
        layers: Number of layers.
        heads: Number of attention heads, a divisor of the width.
        expansion: Hidden units of a layer's perceptron over the width.
        dataset: "digits", or images as for `images.load`: "mnist", "cifar10", "svhn", a folder.
        size: Height and width that images are scaled to, such as 16 for CIFAR-10; none: as they are.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        batch_size: Samples a step.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
    """
    above_0("vit", patch=patch, width=width, layers=layers, heads=heads, expansion=expansion)
    if width % heads:
        remedy = "change heads or width"
        raise UserError("vit: heads", expected=f"a divisor of the width, {width}", found=str(heads), remedy=remedy)
    kind = getattr(torch, dtype)
    task = source(dataset, kind, data, download, device, size)
    if task.shape[1] % patch or task.shape[2] % patch:
        expected = f"a divisor of the image's {task.shape[1]}×{task.shape[2]} pixels"
        raise UserError("vit: patch", expected=expected, found=str(patch), remedy="change the value")
    sizes = patch, width, layers, heads, expansion

    def factory() -> nn.Module:
        return VisionTransformer(task.shape, task.classes, *sizes).to(kind)

    return task.classifier(factory, batch_size, heldout, evaluation_samples)
