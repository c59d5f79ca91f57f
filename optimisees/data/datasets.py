"""Data sets in memory."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.digest import bytes_of
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import generator


class InMemory(NamedTuple):
    """Samples in memory, the first axis running over samples."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def digits(dtype: torch.dtype = torch.float32) -> InMemory:
    """The 1,797 handwritten 8×8 digits that scikit-learn carries, flat, in [0, 1]: 1,300 to train, 497 to test."""
    from sklearn.datasets import load_digits  # seconds to import, and only these data need it

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=generator("digits", "split"))
    inputs, targets = torch.as_tensor(images, dtype=dtype)[order] / 16, torch.as_tensor(labels)[order].long()
    return InMemory(inputs[:1300], targets[:1300], inputs[1300:], targets[1300:])


def class_count(name: str, samples: InMemory) -> int:
    """How many classes there are.

    Raises:
        UserError: For fewer than two, between which there is nothing to learn.
    """
    count = int(samples.train_targets.max()) + 1
    if count < 2:
        remedy = "put each class into a folder of its own"
        raise UserError(f"dataset {name!r}", expected="at least two classes", found=str(count), remedy=remedy)
    return count


def check_classes(where: str, classes: Sequence[str], labels: Iterable[Tensor]) -> None:
    """Refuses fewer than two classes, between which there is nothing to learn, and labels of no class.

    Args:
        where: Name of the argument, for the error.
        classes: Names of the classes.
        labels: Labels of each part of the data, from 0.

    Raises:
        UserError: For either mistake.
    """
    if len(classes) < 2:
        found, remedy = ", ".join(classes) or "none", "give samples of another class as well"
        raise UserError(where, expected="at least two classes", found=found, remedy=remedy)
    for part in labels:
        least, greatest = (int(end) for end in part.aminmax()) if part.numel() else (0, 0)
        if least < 0 or greatest >= len(classes):
            expected, found = f"labels from 0 to {len(classes) - 1}", f"some from {least} to {greatest}"
            raise UserError(where, expected=expected, found=found, remedy="number the classes from 0, and name each")


def digest(samples: Sequence[Tensor]) -> str:
    """A digest of every byte of the samples; it takes about a second per gigabyte."""
    found = hashlib.blake2b(digest_size=16)
    for part in samples:
        found.update(f"{part.dtype} {list(part.shape)}".encode())
        found.update(bytes_of(part))
    return found.hexdigest()


def black_images(shape: tuple[int, ...]) -> InMemory:
    """One black image in uint8 to train and to test, for a model whose own images are not needed any more."""
    return InMemory(*(torch.zeros(1, *part, dtype=kind) for part, kind in ((shape, torch.uint8), ((), torch.long)) * 2))


def data_root(data: str | None = None, holds: str = "the data sets", make: bool = False) -> Path:
    """The folder that data sets lie in: `data`, or what the environment variable L2LOPT_DATA says.

    Args:
        data: Path of the folder.
        holds: Noun phrase for its contents, for the error.
        make: Whether a missing folder is made, so that files can be fetched into it.

    Raises:
        UserError: Where neither names a folder.
    """
    named = data or os.environ.get("L2LOPT_DATA")
    if named:
        folder = Path(os.path.expanduser(named))
        try:
            if make and not str(folder).startswith("~"):  # the home of a user that is none
                folder.mkdir(parents=True, exist_ok=True)
            if folder.is_dir():
                return folder
        except OSError:  # said below
            pass
    remedy = f"make {named}, or name another" if named else "set L2LOPT_DATA or pass --data"
    found = f"{named}, which is no folder" if named else "none"
    raise UserError("data", expected=f"a folder that holds {holds}", found=found, remedy=remedy)


def damaged(path: Path, found: str, remedy: str) -> UserError:
    """The error that names a file which cannot be read whole."""
    return UserError(str(path), expected="a whole file", found=f"damage ({found})", remedy=remedy)
