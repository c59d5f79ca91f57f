"""An autoencoder of images: a perceptron through a narrow code and back; on MNIST unless told otherwise."""

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from optimisees.classifiers.layers import Activation, Initialisation, Norm, perceptron
from optimisees.classifiers.sources import source
from optimisees.module import ModuleOptimisee


@checks_words
def autoencoder(
    hidden: Sequence[int] = (64, 16),
    activation: Activation = "relu",
    loss: Literal["squared", "cross-entropy"] = "squared",
    dataset: str = "mnist",
    data: str | None = None,
    download: bool = False,
    evaluation_samples: int | None = None,
    batch_size: int = 128,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
    size: int | None = None,
    norm: Norm = "none",
    initialisation: Initialisation = "default",
    gain: float = 1.0,
) -> ModuleOptimisee:
    """Pixels → hidden layers → code → the same layers in reverse → pixels (Hinton and Salakhutdinov 2006).

    The targets are the grey values x in [0, 1]. "squared" is the mean of (x̂ − x)² over samples and pixels,
    "cross-entropy" that of −x log σ(x̂) − (1 − x) log(1 − σ(x̂)), x̂ the decoder's outputs. The first has no largest
    value; the second cannot fall to 0 where x is grey.

    Args:
        hidden: Sizes of the encoder's layers, the last of which is the code.
        activation: Name of the function between the layers, the code's as well.
        loss: "squared" or "cross-entropy".
        dataset: "digits", or images as for `images.load`: "mnist", "cifar10", "svhn", "photographs", a folder.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        batch_size: Samples a step.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
        size: Height and width that images are scaled to; none: as they are.
        norm: Normalisation of the hidden layers before the activation, "batch" or "layer".
        initialisation: Initial values: PyTorch's, "he" or "orthogonal"; see `layers.initialise`.
        gain: Factor on the initial weights.
    """
    if not hidden or min(hidden) < 1:
        where, found = "autoencoder: hidden", str(list(hidden))
        raise UserError(where, expected="positive sizes, the code's last", found=found, remedy="change the value")
    kind = getattr(torch, dtype)
    task = source(dataset, kind, data, download, device, size)
    samples = task.samples
    pixels = prod(task.shape)
    sizes = (pixels, *hidden, *hidden[-2::-1], pixels)

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        x = targets.flatten(1).to(outputs.dtype)
        x = x if targets.is_floating_point() else x / 255
        if loss == "squared":
            return nn.functional.mse_loss(outputs, x)
        return nn.functional.binary_cross_entropy_with_logits(outputs, x)

    return ModuleOptimisee(
        lambda: task.wrapped(perceptron(sizes, activation, kind, norm, initialisation, gain)),
        criterion,
        # The targets are the inputs themselves, not copies of them.
        samples._replace(train_targets=samples.train_inputs, test_targets=samples.test_inputs),
        batch_size,
        heldout,
        device,
        evaluation_samples=evaluation_samples,
    )
