"""Labelled images as uint8 in memory: CIFAR-10, MNIST, SVHN, patches of two photographs, or any folder of images."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from l2lopt.core.errors import UserError, above_0, did_you_mean
from optimisees.data.datasets import InMemory, damaged, data_root
from optimisees.data.image_folders import from_folder


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
            (ROOT/MNIST/raw/), "svhn" (ROOT/svhn/{train,test}_32x32.mat), "photographs" (which needs no files), or the
            path of a folder: train/ and test/ with a folder for each class, or the class folders themselves. Labels
            follow the classes' names in order. Images that lie in no class folder are one class; a folder without any
            among others is no class, which is logged, as are files that are no images. Transparent parts are white, and
            grey values of more than 8 bits are scaled by the fewest of 8, 10, 12, 14 or 16 bits that hold a folder's.
        size: Height and width of what comes out. Images of a folder are cut to a square about the middle and scaled;
            those of a named set are made smaller, each new pixel the mean of the area that it covers. None leaves the
            images as they are; those of a folder must then be of one size.
        data: ROOT; None takes the environment variable L2LOPT_DATA.
        download: Fetch what is missing, through torchvision.
        test_share: Share of the samples for testing, drawn once and for all, where a folder has no train/ and test/.

    Raises:
        UserError: For missing data, saying which files go where, for a damaged file, by its name, and for a size that
            is larger than the images of a named set.
    """
    above_0("images", size=1 if size is None else size)
    if dataset == PHOTOGRAPHS:
        return _reduced(photographs(), size)
    if dataset in _SETS:
        return _reduced(_SETS[dataset](data_root(data, _HOLDS[dataset], download), download), size)
    folder = Path(os.path.expanduser(dataset))  # not `Path.expanduser`: it raises for a user that is none
    if not os.path.isdir(folder):  # not `Path.is_dir`: it raises for a name that no folder can have
        known = (*_SETS, PHOTOGRAPHS)
        expected = f"one of {', '.join(known)}, or a folder of class folders"
        remedy = f"make that folder, or {did_you_mean(dataset, known)}"
        raise UserError("dataset", expected=expected, found=repr(dataset), remedy=remedy)
    return from_folder(folder, size, test_share)


def photographs() -> InMemory:
    """6,136 + 1,976 patches of 16×16 in colour from the two photographs that scikit-learn carries, a class each.

    Patches begin every 8 pixels. Those for testing are from the right quarter of each photograph, of which no training
    patch has a pixel.
    """
    from sklearn.datasets import load_sample_images  # seconds to import, and only these data need it

    parts: list[list[Tensor]] = [[], []]
    for picture in load_sample_images().images:
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        cut = pixels.shape[2] * 3 // 4
        for found, region in zip(parts, (pixels[:, :, :cut], pixels[:, :, cut:]), strict=True):
            patches = region.unfold(1, 16, 8).unfold(2, 16, 8)  # [channels, rows, columns, 16, 16]
            found.append(patches.flatten(1, 2).transpose(0, 1).contiguous())
    labels = [torch.arange(2).repeat_interleave(torch.tensor([len(one) for one in part])) for part in parts]
    return InMemory(torch.cat(parts[0]), labels[0], torch.cat(parts[1]), labels[1])


def cifar10(root: Path, download: bool = False) -> InMemory:
    """50,000 + 10,000 colour images of 32×32 in ten classes, from a folder of images or torchvision's files."""
    if (root / "cifar10" / "train").is_dir():
        return from_folder(root / "cifar10")
    from torchvision.datasets import CIFAR10

    listed = [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])]
    sums = {root / CIFAR10.base_folder / name: md5 for name, md5 in listed}
    expected = f"{_HOLDS['cifar10']} in {root}"
    _fetch([*sums], expected, download, lambda: CIFAR10(str(root), download=True))
    _compare(sums, "unpack cifar-10-python.tar.gz again")
    parts = [CIFAR10(str(root), train=train) for train in (True, False)]
    images = [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
    labels = [torch.tensor(part.targets) for part in parts]
    return InMemory(images[0], labels[0], images[1], labels[1])


def mnist(root: Path, download: bool = False) -> InMemory:
    """Grey digits of 28×28, 60,000 + 10,000 of them where the files are whole."""
    from torchvision.datasets import MNIST
    from torchvision.datasets.mnist import read_image_file, read_label_file

    folder = root / "MNIST" / "raw"
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    paths = [folder / name for name in names]
    expected = f"{', '.join(names)} in {folder}"
    _fetch(paths, expected, download, lambda: MNIST(str(root), download=True))
    parts = []
    # By the readers and not by `MNIST`, which would prefer the unpickled files of its early versions to these.
    for path, reader in zip(paths, (read_image_file, read_label_file) * 2, strict=True):
        try:
            parts.append(reader(str(path)))
        except (OSError, ValueError, TypeError, LookupError, AssertionError, RuntimeError) as error:
            raise damaged(path, str(error) or "no idx file", "fetch it again") from None
    for images, labels, path in ((*parts[:2], paths[1]), (*parts[2:], paths[3])):
        if len(images) != len(labels):
            raise damaged(path, f"{len(labels)} labels for {len(images)} images", "fetch it again")
        if labels.max() > 9:  # digits
            raise damaged(path, f"the label {int(labels.max())}", "fetch it again")
    return InMemory(parts[0][:, None], parts[1], parts[2][:, None], parts[3])


def svhn(root: Path, download: bool = False) -> InMemory:
    """House numbers cropped to digits of 32×32 in colour, 73,257 + 26,032."""
    from torchvision.datasets import SVHN

    folder, splits = root / "svhn", ("train", "test")
    sums = {folder / SVHN.split_list[split][1]: SVHN.split_list[split][2] for split in splits}
    expected = f"train_32x32.mat and test_32x32.mat in {folder}"
    _fetch([*sums], expected, download, lambda: [SVHN(str(folder), split, download=True) for split in splits])
    _compare(sums, "fetch it again")
    parts = [SVHN(str(folder), split) for split in splits]
    images = [torch.from_numpy(np.ascontiguousarray(part.data)) for part in parts]
    labels = [torch.from_numpy(part.labels) for part in parts]
    return InMemory(images[0], labels[0], images[1], labels[1])


PHOTOGRAPHS = "photographs"
_SETS: dict[str, Callable[[Path, bool], InMemory]] = {"cifar10": cifar10, "mnist": mnist, "svhn": svhn}
_HOLDS = {
    "cifar10": "cifar10/{train,test}/<class>/*.jpg, or cifar-10-python.tar.gz unpacked",
    "mnist": "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
    "svhn": "svhn/{train,test}_32x32.mat",
}
"""What `_SETS` look for in the folder of the data sets."""


def _reduced(samples: InMemory, size: int | None) -> InMemory:
    """The samples with images of `size` by `size` pixels, each the mean of the area that it covers."""
    if size is None:
        return samples
    most = min(samples.train_inputs.shape[2:])
    if not 1 <= size <= most:
        raise UserError("size", expected=f"from 1 to {most} pixels", found=str(size), remedy="change the value")

    def smaller(images: Tensor) -> Tensor:
        # A thousand at a time: as numbers with a fraction all of them would take four times the memory.
        parts = [
            nn.functional.interpolate(part.float(), (size, size), mode="area").round().to(torch.uint8)
            for part in images.split(1000)
        ]
        return torch.cat(parts)

    return samples._replace(train_inputs=smaller(samples.train_inputs), test_inputs=smaller(samples.test_inputs))


def _fetch(paths: Sequence[Path], expected: str, download: bool, fetch: Callable[[], object]) -> None:
    """Makes sure that the files are there."""
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        return
    found, remedy = f"no {missing[0]}", "put them there, or set download = true"
    if download:
        logging.getLogger("l2lopt").info("downloading %s", expected)
        try:
            fetch()
            return
        except (OSError, RuntimeError) as error:  # no network, or a server's answer that is not the file
            found, remedy = f"no {missing[0]}, and no way to fetch it ({error})", "put them there"
    raise UserError("data", expected=expected, found=found, remedy=remedy)


def _compare(sums: Mapping[Path, str], remedy: str) -> None:
    """Refuses files of other checksums than the distributor's, before anything in them is read."""
    from torchvision.datasets.utils import check_integrity

    for path, md5 in sums.items():
        if not check_integrity(path, md5):
            raise damaged(path, "another checksum", remedy)
