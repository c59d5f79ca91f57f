"""Comparisons in TensorBoard: a run for each optimiser with its curves and hparams, one with tables and figures."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from l2lopt.core.interrupts import interrupted_after
from l2lopt.storage.disk_space import make_folder, needs_space

if TYPE_CHECKING:
    from l2lopt.storage.event_file import EventFile


@contextmanager
def board(folder: Path) -> Iterator["EventFile"]:
    """A new file of events in a folder, made if need be; an interruption waits for the end of the block.

    Args:
        folder: Folder of one of TensorBoard's runs.

    Raises:
        UserError: If the disk is full, or there can be no such folder.
    """
    from l2lopt.storage.event_file import EventFile  # imported here: it takes half a second

    with interrupted_after(), needs_space(folder):
        make_folder(folder)
        with closing(EventFile(folder, 0)) as events:
            yield events


def write_curve(events: "EventFile", name: str, means: Mapping[int, float]) -> None:
    """Writes a curve, step → value; what is not finite is shown as such."""
    for step, mean in means.items():
        events.write({name: mean if math.isfinite(mean) else math.nan}, step)


def write_tables_and_figures(folder: Path, texts: Mapping[str, str], figures: Iterable[Path]) -> None:
    """Writes the run of TensorBoard that has what is of no single optimiser.

    Args:
        folder: Folder of its file.
        texts: Name → Markdown.
        figures: PNG files; other files are passed over.
    """
    with board(folder) as events:
        for name, text in texts.items():
            events.tell(name, text)
        for path in figures:
            if path.suffix == ".png":
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                events.show(path.stem, torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None], 0)


def run_name(index: int, label: str) -> str:
    """A name for a folder; the number keeps two apart that differ in what a folder's name cannot hold."""
    return f"{index:02}-{re.sub(r'[^0-9A-Za-z.]+', '-', label).strip('-.')[:80]}"
