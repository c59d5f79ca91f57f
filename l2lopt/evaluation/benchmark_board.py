"""A benchmark in TensorBoard: mean losses as scalars, the report's figures, settings and scores as hparams."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from l2lopt.core.interrupts import interrupted_after
from l2lopt.evaluation import scores
from l2lopt.evaluation.benchmark_result import BenchmarkResult
from l2lopt.evaluation.standings import Competitor, Standings


def write_board(result: BenchmarkResult, folder: Path, figures: Iterable[Path] = ()) -> None:
    """Writes TensorBoard's event files: a run for each optimiser and league, and one with the figures.

    They are no part of `write_report`, whose files depend on the result alone: an event file has the time in it.

    Args:
        result: Result of the benchmark.
        folder: Folder of the event files; TensorBoard shows all that were ever written there.
        figures: PNG files of the report's figures; other files are passed over.

    Example:
        >>> from l2lopt.evaluation.benchmark_report import write_report
        >>> paths = write_report(result, folder)  # doctest: +SKIP
        >>> write_board(result, folder / "tensorboard", paths)  # doctest: +SKIP
    """
    from torch.utils.tensorboard import SummaryWriter  # imported here: it takes half a second

    standings = Standings(result)
    # TensorBoard's queue: an interruption inside its locks would leave them held, and `close` waiting.
    with interrupted_after():
        for index, entry in enumerate(standings.competitors):
            board = SummaryWriter(str(folder / _folder(index, entry)), max_queue=1000)
            for run in (run for run in result.runs if (run.optimiser, run.league) == (entry.optimiser, entry.league)):
                for split, by_step in run.losses.items():
                    for step, losses in by_step.items():
                        # TensorBoard shows what is not a number as such.
                        mean = float(scores.finite_or_infinite(losses).mean())
                        board.add_scalar(f"{run.task}/{split}", mean if math.isfinite(mean) else math.nan, step)
            settings = {"optimiser": entry.optimiser, "kind": entry.kind, "league": entry.league}
            board.add_hparams(settings, _metrics(standings, entry), run_name=".")
            board.close()
        board = SummaryWriter(str(folder))
        for path in figures:
            if path.suffix == ".png":
                with Image.open(path) as image:
                    board.add_image(path.stem, np.asarray(image.convert("RGB")), dataformats="HWC")
        board.close()


def _folder(index: int, entry: Competitor) -> str:
    """A name for a folder; the number keeps two apart that differ in what a folder's name cannot hold."""
    return f"{index:02}-{re.sub(r'[^0-9A-Za-z.]+', '-', entry.label).strip('-.')}"


def _metrics(standings: Standings, entry: Competitor) -> dict[str, float]:
    metrics = {}
    if found := standings.interquartile(entry, standings.tasks):
        metrics["normalised test loss"] = found.value if math.isfinite(found.value) else math.nan
        speeds = standings.speed_ups(entry)[0]
        metrics["share of tasks at the target"] = float((speeds > 0).double().mean())
    return metrics
