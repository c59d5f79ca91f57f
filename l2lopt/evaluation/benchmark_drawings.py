"""The figures of a benchmark's report, from its scores to files and their data."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from l2lopt.evaluation import scores
from l2lopt.evaluation.benchmark_csv import csv_text
from l2lopt.evaluation.benchmark_result import BenchmarkResult, League
from l2lopt.evaluation.benchmark_tables import rivals, step_base, step_ratios
from l2lopt.evaluation.standings import Competitor, Standings
from l2lopt.report import benchmark_figures as figures
from l2lopt.report.benchmark_figures import Curve, LossPanel, Profile, ProfilePanel
from l2lopt.report.names import proper_names
from l2lopt.report.panels import Drawn
from l2lopt.report.style import Line, lines_of
from l2lopt.storage.run_log import write_text

MOST_CURVES = 8
"""Curves of a panel beyond which nobody can follow one: the report draws the leading ones and says so."""


class Drawing(NamedTuple):
    """A figure of the report.

    Attributes:
        name: Name of its files without their endings.
        drawn: Files of the image and the places of its panels.
        data: File of the data.
        lines: Label → line, the legend.
        titles: Title of each panel.
        remarks: Remark on each panel, such as the runs that diverged.
    """

    name: str
    drawn: Drawn
    data: Path
    lines: dict[str, Line]
    titles: list[str]
    remarks: list[str]

    @property
    def paths(self) -> list[Path]:
        """The files of the image, and of the data."""
        return [*self.drawn.paths, self.data]


def line_styles(result: BenchmarkResult) -> dict[str, Line]:
    """Optimiser → line, the same in all figures."""
    kinds = {run.optimiser: run.kind for run in result.runs}
    order = ("learned", "harness", "baseline")
    return lines_of(dict(sorted(kinds.items(), key=lambda item: order.index(item[1]))))


def _proper(result: BenchmarkResult) -> dict[str, str]:
    """Optimiser → name in figures."""
    return proper_names(dict.fromkeys(run.optimiser for run in result.runs), result.proper)


def shown(standings: Standings, league: League) -> list[Competitor]:
    """The field of a league, without its last baselines where there are more than `MOST_CURVES` competitors.

    The learned rules, the harness and what they are held to stay.

    Args:
        standings: Scores.
        league: League.
    """
    field = standings.field(league)
    kept = {entry.optimiser for entry in rivals(standings)}
    ranks = {entry: found.value for entry in field if (found := standings.interquartile(entry, standings.tasks))}
    rest = [entry for entry in field if entry.kind == "baseline" and entry.optimiser not in kept]
    rest.sort(key=lambda entry: ranks.get(entry, torch.inf))
    room = MOST_CURVES - (len(field) - len(rest))
    dropped = set(rest[max(room, 0) :])
    return [entry for entry in field if entry not in dropped]


def draw_losses(standings: Standings, field: Sequence[Competitor], folder: Path, name: str) -> Drawing:
    """The loss curves of every task.

    Args:
        standings: Scores.
        field: Competitors, each optimiser at most once.
        folder: Folder of the files.
        name: Name of the files without their endings.
    """
    lines, names = line_styles(standings.result), _proper(standings.result)
    panels, remarks, rows = [], [], []
    for task in standings.result.tasks:
        curves, begin = [], torch.inf
        for entry in field:
            run = standings.run(task.name, entry)
            if run is None:
                continue
            losses = run.losses[standings.split]
            steps, matrix = (found.numpy() for found in scores.loss_matrix(losses))
            begin = min(begin, float(scores.beginning(losses, run.first).mean()))
            count = int(scores.diverged(losses, run.first).sum())
            label = f"{names[entry.optimiser]}, {entry.league}"
            curves.append(Curve(label, lines[entry.optimiser], steps, matrix, count))
            columns = (steps, curves[-1].mean, *curves[-1].band)
            facts = task.name, entry.optimiser, entry.league
            rows += [(*facts, int(step), *map(_short, rest)) for step, *rest in zip(*columns, strict=True)]
        panels.append(LossPanel(task.name, curves, begin))
        lost = ", ".join(f"{curve.label} {curve.diverged} of {curve.seeds}" for curve in curves if curve.diverged)
        scale = "linear axes" if figures.limits(panels[-1])[2] else "logarithmic axes"
        remarks.append(f"{task.family}, {task.split}; {scale}" + (f"; diverged: {lost}" if lost else ""))
    drawn = figures.loss_panels(panels, folder, name)
    heads = ("task", "optimiser", "league", "step", "mean", "low", "high")
    legend = {f"{names[entry.optimiser]}, {entry.league}": lines[entry.optimiser] for entry in field}
    data = _write(folder, name, heads, rows)
    return Drawing(name, drawn, data, legend, [task.name for task in standings.result.tasks], remarks)


def draw_profiles(standings: Standings, field: Sequence[Competitor], folder: Path, name: str) -> Drawing | None:
    """The performance profiles of a field: of the speed-up over tasks, and of the normalised loss over runs.

    None without a task that counts and has a target.

    Args:
        standings: Scores.
        field: Competitors, each optimiser at most once.
        folder: Folder of the files.
        name: Name of the files without their endings.
    """
    tasks, lines, names = standings.targeted, line_styles(standings.result), _proper(standings.result)
    if not tasks:
        return None
    target = names.get(standings.result.target_optimiser, standings.result.target_optimiser)
    speeds = {entry: standings.speed_ups(entry) for entry in field}
    final = {entry: standings.normalised(entry, tasks) for entry in field}
    quickest = max((float(found.max()) for found, _ in speeds.values()), default=1.0)
    # From 1, since no run has more steps than the target's; to the power of two that none passes, at most 16.
    rates = np.geomspace(1, min(max(2.0, 2 ** np.ceil(np.log2(max(quickest, 1)))), 16.0), 101)
    levels = _levels(torch.cat([values.flatten() for values in final.values()]))
    by_speed, by_loss = [], []
    for entry in field:
        found, again = speeds[entry]
        style = f"{names[entry.optimiser]}, {entry.league}", lines[entry.optimiser]
        by_speed.append(_profile(style, found, again, torch.from_numpy(rates)))
        again = standings.normalised_again(entry, tasks).flatten(1)
        # A profile counts what is at or above a threshold, and of losses less is better.
        by_loss.append(_profile(style, -final[entry].flatten(), -again, -torch.from_numpy(levels)))
    panels = [
        ProfilePanel("share of tasks at least so quick", f"speed-up over {target}", rates, by_speed, 1, True),
        ProfilePanel("share of runs at most so high", "normalised final loss", levels, by_loss, 0, False),
    ]
    rows = [
        (panel.title, entry.label, *map(_short, numbers))
        for panel in panels
        for entry, profile in zip(field, panel.profiles, strict=True)
        for numbers in zip(panel.thresholds, profile.share, profile.low, profile.high, strict=True)
    ]
    drawn = figures.profiles(panels, folder, name)
    data = _write(folder, name, ("panel", "optimiser", "threshold", "share", "low", "high"), rows)
    legend = {profile.label: profile.line for profile in by_speed}
    remarks = [f"{len(tasks)} tasks", f"{len(tasks)} tasks × {standings.result.seeds} seeds"]
    return Drawing(name, drawn, data, legend, [panel.title for panel in panels], remarks)


def draw_step_times(standings: Standings, folder: Path, name: str) -> Drawing | None:
    """The time of a step of each optimiser; None where no time was measured.

    Args:
        standings: Scores.
        folder: Folder of the files.
        name: Name of the files without their endings.
    """
    found, names = step_ratios(standings), _proper(standings.result)
    if not found:
        return None
    lines = {names[label]: line for label, line in line_styles(standings.result).items()}
    ratios = {names[label]: [ratio for _, ratio in by_task.values()] for label, by_task in found.items()}
    base = step_base(standings)
    unit = "times the quickest" if base is None else f"times {names.get(base, base)}"
    drawn = figures.step_times(ratios, lines, folder, name, unit)
    rows = [
        (label, task, _short(seconds), _short(ratio))
        for label, by_task in found.items()
        for task, (seconds, ratio) in by_task.items()
    ]
    data = _write(folder, name, ("optimiser", "task", "seconds", "ratio"), rows)
    return Drawing(name, drawn, data, {}, ["Time of a step"], ["a dot for each task, a bar at the median"])


def _levels(values: torch.Tensor) -> np.ndarray:
    """Thresholds of the normalised loss: from the best run to where nearly all have arrived, 0 and at most 1."""
    finite = values[values.isfinite()]
    if not finite.numel():
        return np.linspace(-0.1, 1, 101)
    low, high = float(finite.min()), float(finite.quantile(0.98))
    return np.linspace(min(low, -0.02), max(min(high, 1.0), 0.05), 101)


def _profile(style: tuple[str, Line], found: torch.Tensor, again: torch.Tensor, thresholds: torch.Tensor) -> Profile:
    low, high = scores.percentiles(scores.performance_profile(again, thresholds))
    share = scores.performance_profile(found, thresholds)
    return Profile(*style, share.numpy(), low.numpy(), high.numpy())


def _write(folder: Path, name: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    path = folder / f"{name}.csv"
    write_text(path, csv_text(heads, rows))
    return path


def _short(value: float) -> str:
    return f"{value:.6g}"
