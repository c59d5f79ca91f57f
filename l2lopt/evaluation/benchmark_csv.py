"""The numbers of a benchmark as CSV: every loss, every score, and the data of the figures."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from l2lopt.evaluation.benchmark_result import BenchmarkResult
from l2lopt.evaluation.standings import Score, Standings

LOSS_COLUMNS = (
    *("task", "family", "task_split", "optimiser", "kind", "league"),
    *("trials", "split", "rate", "seed", "step", "loss"),
)
"""The columns of `benchmark.csv`; a loss that is not finite is `nan`."""


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file with a line of heads.

    Args:
        columns: Heads.
        rows: Cells of each row; a float is written so that it is read again exactly.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def loss_rows(result: BenchmarkResult) -> Iterable[Sequence[Any]]:
    """Every loss of a benchmark, in the columns `LOSS_COLUMNS`."""
    tasks = {task.name: task for task in result.tasks}
    for run in result.runs:
        task = tasks[run.task]
        facts = task.name, task.family, task.split, run.optimiser, run.kind, run.league, run.trials
        for split, by_step in run.losses.items():
            for step, losses in by_step.items():
                for seed, loss in enumerate(losses.tolist()):
                    yield *facts, split, run.rates[split], seed, step, loss if math.isfinite(loss) else math.nan


def scores_csv(standings: Sequence[Standings]) -> str:
    """The scores of every run on the splits of several standings."""
    return csv_text(Score._fields, (line for found in standings for line in found.lines()))
