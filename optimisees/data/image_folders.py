"""Folders of images, or of class folders of images, decoded once and kept in a cache."""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.seeding import generator
from l2lopt.storage.run_log import written_whole
from optimisees.data.datasets import InMemory, damaged

_ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_FORM = 2
"""Number of the way in which images are decoded: another makes kept ones anew."""
_DEPTHS = (8, 10, 12, 14, 16)
"""Bits of grey values, of which a folder's are taken to have the fewest that hold them all."""
_log = logging.getLogger("l2lopt")


def from_folder(folder: Path, size: int | None = None, test_share: float = 0.2) -> InMemory:
    """Images of class folders, decoded once and kept in `.l2lopt-cache` beside the folder; see `images.load`."""
    if _is_divided(folder):
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
        trained_on = {files[index].label for index in order[:cut].tolist()}
        if len(trained_on) < len(classes):
            absent = ", ".join(label for label in classes if label not in trained_on)
            expected, remedy = "a training image of each class", "add images there, change test_share, or leave it out"
            raise UserError(str(folder), expected=expected, found=f"none of {absent}", remedy=remedy)
    number = {label: index for index, label in enumerate(classes)}
    labels = torch.tensor([number[file.label] for file in files])
    images = _decoded(folder, tuple(files), size)
    train_order, test_order = order[:cut], order[cut:]
    return InMemory(images[train_order], labels[train_order], images[test_order], labels[test_order])


def _is_divided(folder: Path) -> bool:
    """Whether a folder has train/ and test/; train/ among other classes is a class."""
    if not (folder / "train").is_dir():
        return False
    others = {entry.name for entry in _entries(folder) if entry.is_dir() and not entry.name.startswith(".")}
    return "test" in others or others <= {"train", "val", "valid", "validation"}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, by name."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        found = error.strerror or str(error)
        raise UserError(str(folder), expected="a folder to read", found=found, remedy="make it readable") from None


class _File(NamedTuple):
    """An image of a folder: its name below it, its class, and what tells that it has changed."""

    name: str
    label: str
    bytes: int
    modified: int

    def below(self, folder: str) -> "_File":
        return self._replace(name=f"{folder}/{self.name}")


def _listed(folder: Path) -> list[_File]:
    """The images of the class folders in `folder`, by class and name; without any, its own as one class."""
    places = [entry.name for entry in _entries(folder) if entry.is_dir()] if folder.is_dir() else []
    found = {place: _within(folder, place) for place in places if not place.startswith(".")}
    files = [file for own in found.values() for file in own]
    if files and (without := [place for place, own in found.items() if not own]):
        said = "%s: no classes, as no image lies in them directly (of those that end in %s): %s"
        _log.warning(said, folder, ", ".join(_ENDINGS), ", ".join(without))
    if not files and folder.is_dir():
        files = _within(folder, ".")
    if not files:
        expected = f"folders of images ({', '.join(_ENDINGS)}), one for each class, or images"
        raise UserError(str(folder), expected=expected, found="none", remedy="put them there")
    return files


def _within(folder: Path, label: str) -> list[_File]:
    """The images of a class folder, by name; what else lies in it is logged."""
    files, passed = [], Counter[str]()
    for entry in _entries(folder / label):
        if entry.name.startswith("."):  # as macOS leaves them
            continue
        if not entry.name.lower().endswith(_ENDINGS):
            passed["folders" if entry.is_dir() else Path(entry.name).suffix or entry.name] += 1
        else:
            try:
                stat = entry.stat()
            except OSError as error:
                raise damaged(Path(entry.path), error.strerror or "", "replace or remove it") from None
            files.append(_File(f"{label}/{entry.name}", label, stat.st_size, stat.st_mtime_ns))
    if files and passed:
        said = ", ".join(f"{count} {kind}" for kind, count in passed.most_common(5))
        _log.warning("%s: left out, beside %d images: %s", folder / label, len(files), said)
    return files


@lru_cache(maxsize=2)
def _decoded(folder: Path, files: tuple[_File, ...], size: int | None) -> Tensor:
    """The images in uint8 [n, 3, height, width], from the cache where the files are the same, and then into it."""
    listing = json.dumps([_FORM, size, *((file.name, file.bytes, file.modified) for file in files)])
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
            with written_whole(place) as temporary:
                save_file({"images": images}, temporary, metadata={"l2lopt.images": fingerprint})
            _log.info("the decoded images are kept in %s", place)
            break
        except (UserError, SafetensorError):  # a folder that may only be read, or a full disk
            continue
    return images


def _cache_places(folder: Path, size: int | None) -> list[Path]:
    """Where the decoded images of a folder are kept: beside it, else in the user's own cache."""
    name = f"{folder.name}-{size or 'native'}"
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()
    ending = ".safetensors"
    return [folder.parent / ".l2lopt-cache" / (name + ending), own / "l2lopt" / f"{name}-{key}{ending}"]


def _in_eight_bits(image: Image.Image, depth: int, deep: list[int]) -> Image.Image:
    """An image whose grey values Pillow would clip at 255, of up to 16 bits, as one of 8; others as they are.

    Args:
        image: Image.
        depth: Bits of such values.
        deep: List that gets the largest of them.

    Raises:
        ValueError: For grey values without a known range.
    """
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65_535:
        raise ValueError(f"grey values of Pillow's mode {image.mode}, whose range is not known")
    deep.append(int(values.max()))
    return Image.fromarray((values >> (depth - 8)).clip(0, 255).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """An image in colours; what lies below its transparent parts is white, and not what a file has there by chance."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("RGB")


def _decode(folder: Path, files: Sequence[_File], size: int | None, depth: int = 16) -> Tensor:
    """All images, several read at the same time; grey values that are all of fewer bits than 16 are read again so."""
    deep: list[int] = []

    def decode(file: _File) -> np.ndarray:
        try:
            with Image.open(folder / file.name) as image:
                colours = _on_white(_in_eight_bits(image, depth, deep))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise damaged(folder / file.name, str(error), "replace or remove it") from None
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
    least = next(bits for bits in _DEPTHS if max(deep, default=65_535) < 2**bits)
    if least < depth:
        _log.info("grey values of %s are at most %d: read as of %d bits", folder, max(deep), least)
        return _decode(folder, files, size, least)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
