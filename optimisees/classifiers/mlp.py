"""A multilayer perceptron, the small task of Andrychowicz et al. 2016; on the bundled digits unless told otherwise."""

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from optimisees.classifiers.layers import Activation, Initialisation, Norm, perceptron
from optimisees.classifiers.sources import source
from optimisees.module import ModuleOptimisee


@checks_words
def mlp(
    hidden: Sequence[int] = (20,),
    activation: Activation = "sigmoid",
    dataset: str = "digits",
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
    loss: Literal["cross-entropy", "squared"] = "cross-entropy",
) -> ModuleOptimisee:
    """Pixels → hidden layers → scores of the classes; 1,510 parameters on digits with one hidden layer of 20.

    "squared" is the mean over samples and classes of (z − y)², y 1 for the sample's class and 0 for all others, which
    trains classifiers about as well as the cross-entropy does (Hui and Belkin 2021, arXiv:2006.07322).

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
        size: Height and width that images are scaled to, such as 16 for CIFAR-10; none: as they are.
        norm: Normalisation of the hidden layers before the activation, "batch" or "layer"; under "batch" they have no
            bias.
        initialisation: Initial values: PyTorch's, "he" or "orthogonal"; see `layers.initialise`.
        gain: Factor on the initial weights.
        loss: "cross-entropy" of the scores, or "squared".
    """
    if any(units < 1 for units in hidden):
        raise UserError("mlp: hidden", expected="positive sizes", found=str(list(hidden)), remedy="change the value")
    kind = getattr(torch, dtype)
    task = source(dataset, kind, data, download, device, size)
    sizes = (prod(task.shape), *hidden, task.classes)
    return task.classifier(
        lambda: perceptron(sizes, activation, kind, norm, initialisation, gain),
        batch_size,
        heldout,
        evaluation_samples,
        squared_error if loss == "squared" else cross_entropy,
    )


def squared_error(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples and classes of (z − y)² for scores z [samples, classes] and numbers of classes."""
    # `one_hot` looks at the targets' values, which no compiled step can.
    aims = targets.unsqueeze(-1) == torch.arange(scores.shape[-1], device=scores.device)
    return (scores - aims.to(scores)).square().mean()
