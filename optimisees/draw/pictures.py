"""Images as they are painted, step by step: a PNG with the steps side by side, and a GIF; and images in a row."""

from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from l2lopt.storage.run_log import written_whole

_INK, _PAPER, _GAP = (255, 70, 60), (255, 255, 255), 2
_SHOWN = 112
"""Pixels, about, of an image's longer side."""


def progress_grid(path: Path, images: Tensor, rectangles: Tensor | None, columns: int = 12) -> Path:
    """Writes a PNG with a row for each image and a column for each of up to `columns` steps, the last among them.

    Args:
        path: Path of the file.
        images: Images of every step, [T, n, channels, height, width] in [0, 1], of 1 or 3 channels.
        rectangles: Rectangles to draw in, [T, n, 4]: top, left, bottom, right as centres of pixels, numbered from 0;
            or None.
        columns: Largest number of columns.
    """
    steps = np.unique(np.linspace(0, len(images) - 1, min(columns, len(images))).round().astype(int)).tolist()
    cells = [_frame(images, rectangles, step, k) for k in range(images.shape[1]) for step in steps]
    with written_whole(path) as temporary:
        _tiled(cells, len(steps)).save(temporary)
    return path


def animation(path: Path, images: Tensor, rectangles: Tensor | None, milliseconds: int = 120) -> Path:
    """Writes a GIF of every step, all images in a square; the last step, without rectangles, stays for two seconds.

    Args:
        path: Path of the file.
        images: Images of every step; see `progress_grid`.
        rectangles: Rectangles to draw in; see `progress_grid`.
        milliseconds: Duration of a step.
    """
    count = images.shape[1]
    side = ceil(sqrt(count))
    frames = [_tiled([_frame(images, rectangles, t, k) for k in range(count)], side) for t in range(len(images))]
    frames.append(_tiled([_frame(images, None, -1, k) for k in range(count)], side))
    durations = [milliseconds] * len(images) + [2000]
    with written_whole(path) as temporary:
        frames[0].save(temporary, save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return path


def strip(images: Tensor) -> str:
    """Images in a row, pixel for pixel, as the bytes of a PNG in base64: text that fits into JSON.

    Args:
        images: Images [n, channels, height, width] in [0, 1], of 1 or 3 channels.
    """
    cells = [Image.fromarray(_array(image)) for image in images]
    written = BytesIO()
    _tiled(cells, len(cells)).save(written, "png")
    return b64encode(written.getvalue()).decode()


def _array(image: Tensor) -> np.ndarray:
    """An image [channels, height, width] in [0, 1] as bytes [height, width, 3]; what is not a number is black."""
    pixels = (image.nan_to_num().clamp(0, 1) * 255).round().byte().cpu()
    return pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()


def _frame(images: Tensor, rectangles: Tensor | None, step: int, k: int) -> Image.Image:
    """Image k at a step, enlarged, with its rectangle."""
    array = _array(images[step, k])
    scale = max(1, _SHOWN // max(array.shape[:2]))
    frame = Image.fromarray(array).resize((array.shape[1] * scale, array.shape[0] * scale), Image.Resampling.NEAREST)
    if rectangles is not None:
        top, left, bottom, right = ((rectangles[step, k] + 0.5) * scale).tolist()
        ImageDraw.Draw(frame).rectangle((left, top, right, bottom), outline=_INK, width=max(1, scale // 2))
    return frame


def _tiled(cells: Sequence[Image.Image], columns: int) -> Image.Image:
    """Images of one size in rows of so many."""
    width, height = (size + _GAP for size in cells[0].size)
    whole = Image.new("RGB", (columns * width - _GAP, ceil(len(cells) / columns) * height - _GAP), _PAPER)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        whole.paste(cell, (column * width, row * height))
    return whole
