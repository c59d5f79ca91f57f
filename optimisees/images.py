"""Labelled images as uint8 in memory: CIFAR-10, MNIST, SVHN, or any folder of class folders; and what a model sees."""

import hashlib
import json
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy.io import loadmat
from scipy.io.matlab import MatReadError
from torch import Tensor, nn

from l2lopt.errors import UserError, did_you_mean
from l2lopt.types import generator
from optimisees.datasets import InMemory, data_root

_ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_log = logging.getLogger("l2lopt")


def load(
    dataset: str = "cifar10",
    size: int | None = None,
    data: str | None = None,
    download: bool = False,
    test_share: float = 0.2,
) -> InMemory:
    """Images [n, channels, height, width] in uint8 and labels [n] in int64.

    Args:
        dataset: "cifar10" (ROOT/cifar10/{train,test}/<class>/*, or torchvision's ROOT/cifar-10-batches-py/), "mnist"
            (ROOT/MNIST/raw/), "svhn" (ROOT/svhn/{train,test}_32x32.mat), or the path of a folder: train/ and test/
            with a folder for each class, or the class folders themselves. Labels follow the classes' names in order.
        size: height and width of what comes out of a folder: cut to a square about the middle and scaled. None leaves
            the images as they are, which must then be of one size.
        data: ROOT; None takes the environment variable L2LOPT_DATA.
        download: fetch what is missing, through torchvision.
        test_share: of the samples, drawn at random once and for all, where a folder has no train/ and test/.

    Raises:
        UserError: for missing data, saying which files go where, and for a damaged file, by its name.
    """
    if dataset in _SETS:
        if size is not None:
            remedy = "leave size out, or give the path of a folder of images"
            raise UserError("size", expected=f"none with {dataset}", found=str(size), remedy=remedy)
        return _SETS[dataset](data_root(data), download)
    folder = Path(dataset).expanduser()
    if not folder.is_dir():
        expected = f"one of {', '.join(_SETS)}, or a folder of class folders"
        remedy = f"make that folder, or {did_you_mean(dataset, _SETS)}"
        raise UserError("dataset", expected=expected, found=repr(dataset), remedy=remedy)
    return from_folder(folder, size, test_share)


def cifar10(root: Path, download: bool = False) -> InMemory:
    """50,000 + 10,000 colour images of 32×32 in ten classes, from a folder of images or torchvision's files."""
    if (root / "cifar10" / "train").is_dir():
        return from_folder(root / "cifar10")
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    paths = [(root / CIFAR10.base_folder / name, md5) for name, md5 in (*CIFAR10.train_list, *CIFAR10.test_list)]
    expected = f"{root}/cifar10/{{train,test}}/<class>/*.jpg or cifar-10-python.tar.gz unpacked in {root}"
    _fetch([path for path, _ in paths], expected, download, lambda: CIFAR10(str(root), download=True))
    for path, md5 in paths:  # before anything is unpickled
        if not check_integrity(path, md5):
            raise _damaged(path, "another checksum", "unpack cifar-10-python.tar.gz again")
    parts = [CIFAR10(str(root), train=train) for train in (True, False)]
    images = [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
    labels = [torch.tensor(part.targets) for part in parts]
    return InMemory(images[0], labels[0], images[1], labels[1])


def mnist(root: Path, download: bool = False) -> InMemory:
    """Grey digits of 28×28, 60,000 + 10,000 of them where the files are whole."""
    from torchvision.datasets import MNIST

    folder = root / "MNIST" / "raw"
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    paths = [folder / name for name in names]
    expected = f"{', '.join(names)} in {folder}"
    _fetch(paths, expected, download, lambda: MNIST(str(root), download=True))
    images, labels, test_images, test_labels = (_idx(path) for path in paths)
    return InMemory(images[:, None], labels.long(), test_images[:, None], test_labels.long())


def svhn(root: Path, download: bool = False) -> InMemory:
    """House numbers cropped to digits of 32×32 in colour, 73,257 + 26,032 where the files are whole."""
    from torchvision.datasets import SVHN

    folder = root / "svhn"
    paths = [folder / f"{part}_32x32.mat" for part in ("train", "test")]

    def fetch() -> None:
        for part in ("train", "test"):
            SVHN(str(folder), split=part, download=True)

    _fetch(paths, f"train_32x32.mat and test_32x32.mat in {folder}", download, fetch)
    parts = []
    for path in paths:
        try:
            found = loadmat(path)
            images = torch.from_numpy(np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1)))
            labels = torch.from_numpy(found["y"].reshape(-1).astype(np.int64))
            if images.dtype != torch.uint8 or len(images) != len(labels):
                raise ValueError("images and labels that do not fit")
        except (OSError, ValueError, KeyError, TypeError, NotImplementedError, zlib.error, MatReadError) as error:
            raise _damaged(path, str(error), "fetch it again") from None
        parts += [images, labels % 10]  # the files call the digit 0 ten
    return InMemory(*parts)


_SETS: dict[str, Callable[[Path, bool], InMemory]] = {"cifar10": cifar10, "mnist": mnist, "svhn": svhn}


def from_folder(folder: Path, size: int | None = None, test_share: float = 0.2) -> InMemory:
    """Images of class folders, decoded once and cached beside the folder; see `load`."""
    if (folder / "train").is_dir():
        train, test = (_listed(folder / part) for part in ("train", "test"))
        classes = sorted({file.label for file in train})
        for file in test:
            if file.label not in classes:
                expected, remedy = f"a class of {folder / 'train'}", "add it there, or remove it here"
                raise UserError(str(folder / "test" / file.label), expected=expected, found="another", remedy=remedy)
        files = [*(file.below("train") for file in train), *(file.below("test") for file in test)]
        order, cut = torch.arange(len(files)), len(train)
    else:
        files = _listed(folder)
        classes = sorted({file.label for file in files})
        order = torch.randperm(len(files), generator=generator("test images", len(files)))
        cut = len(files) - int(test_share * len(files))
        if not 0 < cut < len(files):
            found, remedy = f"{cut} to train of {len(files)}", "change test_share, or add images"
            raise UserError(str(folder), expected="images to train and to test", found=found, remedy=remedy)
    number = {label: index for index, label in enumerate(classes)}
    labels = torch.tensor([number[file.label] for file in files])
    images = _decoded(folder, tuple(files), size)
    train_order, test_order = order[:cut], order[cut:]
    return InMemory(images[train_order], labels[train_order], images[test_order], labels[test_order])


class Normalised(nn.Module):
    """A model on images in uint8: they are normalised by the training set's mean and standard deviation per channel.

    Args:
        model: takes [batch, channels, height, width] in the dtype of the statistics.
        mean: per channel, in [0, 255].
        deviation: likewise.
        channels_last: the model gets its images with the channels lying last in memory.
        autocast: the model computes in bfloat16 where that is safe; what it gives is of the dtype of the statistics.
    """

    def __init__(
        self, model: nn.Module, mean: Tensor, deviation: Tensor, channels_last: bool = False, autocast: bool = False
    ) -> None:
        super().__init__()
        self.model, self.channels_last, self.autocast = model, channels_last, autocast
        self.mean, self.deviation = mean.view(-1, 1, 1), deviation.view(-1, 1, 1)  # constants, and so no buffers

    def forward(self, images: Tensor) -> Tensor:
        """The model's outputs."""
        x = (images.to(self.mean.dtype) - self.mean) / self.deviation
        if self.channels_last:  # in words that vmap knows
            x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        # Weights are used once a call: a cache of their casts would only keep them.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            outputs: Tensor = self.model(x)
        return outputs.to(x.dtype)


def statistics(images: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, 1 where it is 0, per channel of images [n, channels, height, width] in uint8."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.transpose(0, 1)])
    shares = counts.double() / max(images[:, 0].numel(), 1)
    mean = shares @ values
    deviation = (shares * (values - mean[:, None]).square()).sum(1).sqrt()
    return mean.to(dtype), deviation.where(deviation > 0, 1.0).to(dtype)


def crop_and_flip(images: Tensor, source: torch.Generator, padding: int = 4) -> Tensor:
    """Images [n, channels, h, w], each moved by up to `padding` pixels, black coming in, and half of them mirrored."""
    count, channels, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, count, 1), generator=source)
    mirrored = torch.rand((count, 1), generator=source) < 0.5
    columns = torch.where(mirrored, torch.arange(width).flip(0), torch.arange(width)) + offsets[1]
    rows = torch.arange(height) + offsets[0]
    padded = nn.functional.pad(images, (padding,) * 4)
    places = (torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None])
    index = (*places, rows[:, None, :, None], columns[:, None, None, :])
    return padded[tuple(part.to(images.device) for part in index)]


class _File(NamedTuple):
    """An image of a folder: its name below it, its class, and what tells that it has changed."""

    name: str
    label: str
    bytes: int
    modified: int

    def below(self, folder: str) -> "_File":
        return self._replace(name=f"{folder}/{self.name}")


def _listed(folder: Path) -> list[_File]:
    """The images of the class folders in `folder`, ordered by class and name."""
    files = []
    for label in sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else ():
        for entry in sorted(os.scandir(folder / label), key=lambda entry: entry.name):
            if entry.name.lower().endswith(_ENDINGS):
                stat = entry.stat()
                files.append(_File(f"{label}/{entry.name}", label, stat.st_size, stat.st_mtime_ns))
    if not files:
        expected = f"folders of images ({', '.join(_ENDINGS)}), one for each class"
        raise UserError(str(folder), expected=expected, found="none", remedy="put them there")
    return files


@lru_cache(maxsize=2)
def _decoded(folder: Path, files: tuple[_File, ...], size: int | None) -> Tensor:
    """The images in uint8 [n, 3, height, width], from the cache where the files are the same, and then into it."""
    listing = json.dumps([size, *((file.name, file.bytes, file.modified) for file in files)])
    fingerprint = hashlib.blake2b(listing.encode(), digest_size=16).hexdigest()
    places = _cache_places(folder.resolve(), size)
    for place in places:
        try:
            with safe_open(place, "pt") as file:
                if (file.metadata() or {}).get("l2lopt.images") == fingerprint:
                    kept: Tensor = file.get_tensor("images")
                    return kept
        except (OSError, SafetensorError):  # absent or damaged: decoded anew
            continue
    images = _decode(folder, files, size)
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=".images-") as temporary:
                whole = Path(temporary) / place.name
                save_file({"images": images}, whole, metadata={"l2lopt.images": fingerprint})
                whole.replace(place)
            break
        except OSError:  # a folder that may only be read, or a full disk
            continue
    return images


def _cache_places(folder: Path, size: int | None) -> list[Path]:
    """Where the decoded images of a folder are kept: beside it, else in the user's own cache."""
    name = f"{folder.name}-{size or 'native'}"
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()
    ending = ".safetensors"
    return [folder.parent / ".l2lopt-cache" / (name + ending), own / "l2lopt" / f"{name}-{key}{ending}"]


def _decode(folder: Path, files: Sequence[_File], size: int | None) -> Tensor:
    """Every image, some at the same time."""

    def decode(file: _File) -> np.ndarray:
        try:
            with Image.open(folder / file.name) as image:
                colours = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise _damaged(folder / file.name, str(error), "replace or remove it") from None
        return np.asarray(ImageOps.fit(colours, (size, size)) if size else colours)

    _log.info("decoding %d images of %s, once", len(files), folder)
    images: np.ndarray | None = None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, len(files), 1000):  # an error ends the work soon, and the decoded do not pile up
            for index, image in enumerate(pool.map(decode, files[first : first + 1000]), first):
                if images is None:
                    images = np.empty((len(files), *image.shape), dtype=np.uint8)
                if image.shape != images.shape[1:]:
                    expected = f"{images.shape[2]}×{images.shape[1]} pixels, as {files[0].name} has"
                    found = f"{image.shape[1]}×{image.shape[0]}"
                    raise UserError(
                        str(folder / files[index].name),
                        expected=expected,
                        found=found,
                        remedy="give a size to scale to",
                    )
                images[index] = image
            done = min(first + 1000, len(files))
            if done % 10_000 == 0 or done == len(files):
                _log.info("decoded %d of %d images", done, len(files))
    assert images is not None  # a listing is never empty
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _fetch(paths: Sequence[Path], expected: str, download: bool, fetch: Callable[[], object]) -> None:
    """Makes sure that the files are there."""
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        return
    found, remedy = f"no {missing[0]}", "put them there, or set download = true"
    if download:
        _log.info("downloading %s", expected)
        try:
            fetch()
            return
        except (OSError, RuntimeError) as error:  # no network, or a server's answer that is not the file
            found, remedy = f"no {missing[0]}, and no way to fetch it ({error})", "put them there"
    raise UserError("data", expected=expected, found=found, remedy=remedy)


def _damaged(path: Path, found: str, remedy: str) -> UserError:
    return UserError(str(path), expected="a whole file", found=f"damage ({found})", remedy=remedy)


def _idx(path: Path) -> Tensor:
    """Numbers of one byte in the format of MNIST: 0, 0, 8, the number of axes, each one's length, the bytes."""
    content = path.read_bytes()
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    first = 4 + 4 * axes
    shape = struct.unpack(f">{axes}i", content[4:first]) if axes and len(content) >= first else ()
    if not shape or len(content) != first + prod(shape):
        raise _damaged(path, f"{len(content)} bytes that are not {shape or 'an idx file'}", "fetch it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=first).view(shape).clone()
