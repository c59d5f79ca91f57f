"""Samples of a trained DRAW, written as pictures into the run's folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from l2lopt.core import registry
from l2lopt.core.errors import UserError, above_0
from l2lopt.core.layout import Params
from l2lopt.core.types import Aux
from l2lopt.optimisee import MODEL, SampleRequest, SavedRun
from l2lopt.storage.tensor_file import check_tensors
from optimisees.data.datasets import black_images
from optimisees.draw import pictures
from optimisees.draw.network import Painting


class Painter(Protocol):
    """A model that paints images from its prior."""

    def init(self, seed: int) -> tuple[Params, Aux]:
        """Initial parameters."""

    def sample_images(self, params: Params, count: int, seed: int = 0) -> Painting:
        """Images from the prior, with every step of their painting."""


def paint(make: Callable[..., Painter], run: SavedRun, request: SampleRequest) -> list[Path]:
    """Writes `figures/samples.png` (a row for each image, a column for each step) and `figures/samples.gif`.

    The steps show the rectangle that is written. The training images are not needed: a black one takes their place.

    Args:
        make: Class of the model.
        run: Finished training.
        request: Number of images, and the seed of the draws.

    Raises:
        UserError: For no images.
    """
    above_0("sample", count=request.count)
    sources = ("dataset", "size", "data", "download", "batch_size")
    options = {name: value for name, value in run.options.items() if name not in sources}
    path, remedy = run.folder / MODEL, "train again"
    if (canvas := run.params.get("canvas", torch.zeros(()))).dim() != 3:
        raise UserError(str(path), expected="the canvas of a DRAW", found=f"{list(canvas.shape)}", remedy=remedy)
    images = black_images(tuple(canvas.shape))
    model: Painter = registry.make({"draw": make}, "optimisee", "draw", **options, dataset=images, batch_size=1)
    check_tensors(path, model.init(0)[0], run.params, remedy)
    steps, rectangles = model.sample_images(run.params, request.count, request.seed)
    png, gif = (run.folder / "figures" / f"samples.{ending}" for ending in ("png", "gif"))
    return [pictures.progress_grid(png, steps, rectangles), pictures.animation(gif, steps, rectangles)]
