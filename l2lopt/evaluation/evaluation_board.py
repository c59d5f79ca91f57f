"""An evaluation in TensorBoard: mean losses as scalars, rates and losses as hparams, its tables and its figure."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from l2lopt.evaluation.board import board, run_name, write_curve, write_tables_and_figures
from l2lopt.evaluation.comparison import Evaluation
from l2lopt.evaluation.scores import finite_or_infinite
from l2lopt.evaluation.settings import SPLITS
from l2lopt.evaluation.tables import loss_table


def write_evaluation_board(result: Evaluation, folder: Path, figures: Iterable[Path] = ()) -> None:
    """Writes TensorBoard's event files: a run for each optimiser, and one with the tables and figures.

    Args:
        result: Evaluation.
        folder: Folder of the event files; TensorBoard shows all that were ever written there.
        figures: PNG files of the figures; other files are passed over.
    """
    losses: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in result.rows:
        losses[row.optimiser][row.split][row.step].append(row.loss)
    kinds = {line.optimiser: line.kind for line in result.table}
    for index, (name, by_split) in enumerate(losses.items()):
        with board(folder / run_name(index, name)) as events:
            for split, by_step in by_split.items():
                write_curve(events, f"loss/{split}", {step: _mean(values) for step, values in by_step.items()})
            lines = [line for line in result.table if line.optimiser == name]
            settings: dict[str, str | float] = {"optimiser": name, "kind": kinds[name]}
            for split, by_horizon in result.chosen.get(name, {}).items():
                settings |= {f"rate for {split}, step {step}": run.rate for step, run in by_horizon.items()}
            events.settings(settings, {f"{line.split} loss, step {line.horizon}": line.mean for line in lines})
    texts = {f"{split} loss": loss_table(result, split).markdown() for split in SPLITS}
    texts |= {"warnings": "\n".join(f"- {text}" for text in result.warnings)} if result.warnings else {}
    write_tables_and_figures(folder, texts, figures)


def _mean(losses: list[float]) -> float:
    """The mean; infinite where a loss is not finite."""
    return float(finite_or_infinite(torch.tensor(losses, dtype=torch.float64)).mean())
