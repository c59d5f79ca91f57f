"""What small classifiers are trained on: the bundled digits, or images by name or from a folder."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from l2lopt.core.errors import UserError
from optimisees.data import images
from optimisees.data.datasets import InMemory, class_count, digits
from optimisees.data.image_inputs import Normalised, statistics
from optimisees.module import ModuleOptimisee, accuracy


class Source(NamedTuple):
    """Samples, and how a model gets them.

    Attributes:
        samples: Samples in memory, in their stored form.
        shape: Channels, height and width of a sample.
        wrapped: A model of flat samples in the dtype asked for → one of samples as they are kept.
        device: Device of data and models.
        dataset: Name of the data set, or path of the folder.
    """

    samples: InMemory
    shape: tuple[int, int, int]
    wrapped: Callable[[nn.Module], nn.Module]
    device: str
    dataset: str

    @property
    def classes(self) -> int:
        """Number of classes.

        Raises:
            UserError: For fewer than two.
        """
        return class_count(self.dataset, self.samples)

    def classifier(
        self,
        factory: Callable[[], nn.Module],
        batch_size: int,
        heldout: float,
        evaluation_samples: int | None,
        criterion: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    ) -> ModuleOptimisee:
        """Models from flat samples to scores of the classes; see `ModuleOptimisee`."""
        return ModuleOptimisee(
            lambda: self.wrapped(factory()),
            criterion,
            self.samples,
            batch_size,
            heldout,
            self.device,
            metrics={"accuracy": accuracy},
            evaluation_samples=evaluation_samples,
        )


def source(
    dataset: str,
    dtype: torch.dtype,
    data: str | None = None,
    download: bool = False,
    device: str = "cpu",
    size: int | None = None,
) -> Source:
    """The source called "digits" (`datasets.digits`), or any of `images.load`, whose arguments the others are.

    Args:
        dataset: Name of the data set, or path of a folder of images.
        dtype: Data type that models compute in.
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        device: Device of data and models.
        size: Height and width that images are scaled to; None leaves them as they are. Digits have 8 pixels, always.
    """
    if dataset == "digits":
        if size not in (None, 8):
            raise UserError("size", expected="none with digits", found=str(size), remedy="leave it out")
        return Source(digits(dtype), (1, 8, 8), lambda model: model, device, dataset)
    samples = images.load(dataset, size, data, download)
    _, channels, height, width = samples.train_inputs.shape
    mean, deviation = (part.to(device) for part in statistics(samples.train_inputs, dtype))

    def wrapped(model: nn.Module) -> nn.Module:
        return Normalised(nn.Sequential(nn.Flatten(), model), mean, deviation)

    return Source(samples, (channels, height, width), wrapped, device, dataset)
