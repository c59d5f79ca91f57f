"""A benchmark in TensorBoard: mean losses, settings and scores as hparams, the report's tables and figures."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from l2lopt.evaluation import scores
from l2lopt.evaluation.benchmark_result import BenchmarkResult
from l2lopt.evaluation.board import board, run_name, write_curve, write_tables_and_figures
from l2lopt.evaluation.standings import Competitor, Standings


def write_board(result: BenchmarkResult, folder: Path, files: Iterable[Path] = ()) -> None:
    """Writes TensorBoard's event files: a run for each optimiser and league, and one with the tables and figures.

    They are no part of `write_report`, whose files depend on the result alone: an event file has the time in it.

    Args:
        result: Result of the benchmark.
        folder: Folder of the event files; TensorBoard shows all that were ever written there.
        files: Files of the report: the tables of its Markdown become texts, its PNG files images; others are passed
            over.

    Example:
        >>> from l2lopt.evaluation.benchmark_report import write_report
        >>> paths = write_report(result, folder)  # doctest: +SKIP
        >>> write_board(result, folder / "tensorboard", paths)  # doctest: +SKIP
    """
    standings, files = Standings(result), list(files)
    for index, entry in enumerate(standings.competitors):
        with board(folder / run_name(index, entry.label)) as events:
            for run in (run for run in result.runs if (run.optimiser, run.league) == (entry.optimiser, entry.league)):
                for split, by_step in run.losses.items():
                    means = {step: float(scores.finite_or_infinite(row).mean()) for step, row in by_step.items()}
                    write_curve(events, f"{run.task}/{split}", means)
            settings = {"optimiser": entry.optimiser, "kind": entry.kind, "league": entry.league}
            events.settings(settings, _metrics(standings, entry))
    texts: dict[str, str] = {}
    for path in files:
        if path.suffix == ".md":
            texts |= _sections(path.read_text(encoding="utf-8"))
    write_tables_and_figures(folder, texts, files)


def _sections(markdown: str) -> dict[str, str]:
    """Heading → text below it, of the sections that have any; images are left out, and what says where data lie."""
    kept = re.sub(r"^(!\[.*|Data: .*)\n", "", markdown, flags=re.MULTILINE)
    parts = [part.partition("\n") for part in re.split(r"^##? ", kept, flags=re.MULTILINE)]
    return {head: text.strip() for head, _, text in parts if text.strip()}


def _metrics(standings: Standings, entry: Competitor) -> dict[str, float]:
    metrics = {}
    if found := standings.interquartile(entry, standings.tasks):
        metrics["normalised test loss"] = found.value if math.isfinite(found.value) else math.nan
        speeds = standings.speed_ups(entry)[0]
        metrics["share of tasks at the target"] = float((speeds > 0).double().mean())
    return metrics
