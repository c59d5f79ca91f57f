"""Data sets in memory."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from l2lopt.errors import UserError
from l2lopt.types import generator


class InMemory(NamedTuple):
    """Samples in memory, the first axis running over samples."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def digits(dtype: torch.dtype = torch.float32) -> InMemory:
    """The 1,797 handwritten 8×8 digits that scikit-learn carries, flat, in [0, 1]: 1,300 to train, 497 to test."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=generator("digits", "split"))
    inputs, targets = torch.as_tensor(images, dtype=dtype)[order] / 16, torch.as_tensor(labels)[order].long()
    return InMemory(inputs[:1300], targets[:1300], inputs[1300:], targets[1300:])


def blank(shape: tuple[int, ...]) -> InMemory:
    """One black image in uint8 to train and to test, for a model whose own images are not needed any more."""
    return InMemory(*(torch.zeros(1, *part, dtype=kind) for part, kind in ((shape, torch.uint8), ((), torch.long)) * 2))


def data_root(data: str | None = None) -> Path:
    """The folder that data sets lie in: `data`, or what the environment variable L2LOPT_DATA says.

    Raises:
        UserError: where neither names a folder.
    """
    named = data or os.environ.get("L2LOPT_DATA")
    if named and Path(named).expanduser().is_dir():
        return Path(named).expanduser()
    found, remedy = (f"{named}, which is no folder" if named else "none"), "set L2LOPT_DATA or pass --data"
    raise UserError("data", expected="the folder of the data sets", found=found, remedy=remedy)


def damaged(path: Path, found: str, remedy: str) -> UserError:
    """The error that names a file which cannot be read whole."""
    return UserError(str(path), expected="a whole file", found=f"damage ({found})", remedy=remedy)
