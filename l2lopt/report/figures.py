"""Loss curves from the records of runs."""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.lib.stride_tricks import sliding_window_view

from l2lopt.core.errors import UserError, printable
from l2lopt.report.interval import half_width
from l2lopt.report.names import proper_names
from l2lopt.report.style import (
    BANDED_SEEDS,
    DASHES,
    RULES,
    STYLE,
    bands_of,
    even_steps,
    lines_of,
    log_losses,
    log_steps,
    shown,
    write_figure,
)
from l2lopt.storage import csv_table, run_log

COLUMNS = ("optimiser", "kind", "seed", "step", "split", "loss")
"""The columns of `evaluation.csv`."""


class Band(NamedTuple):
    """The losses of an optimiser on a split.

    Attributes:
        steps: Steps, rising, [K].
        losses: Losses, [K, S].
    """

    steps: np.ndarray
    losses: np.ndarray

    @property
    def seeds(self) -> int:
        """S, the number of seeds."""
        return int(self.losses.shape[1])

    @property
    def mean(self) -> np.ndarray:
        """The mean over seeds, [K]."""
        return np.asarray(self.losses.mean(1))

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the mean's 95 % interval, [K] each; the mean itself where a loss is not finite."""
        half = np.array([_half_width(values) for values in self.losses])
        return self.mean - half, self.mean + half


def read(path: Path) -> dict[tuple[str, str, str], Band]:
    """(optimiser, kind, split) → band, from an `evaluation.csv`.

    Raises:
        UserError: For a missing file, other columns, a line that cannot be read (with its number), or too few losses.
    """
    losses: dict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    remedy = "run l2lopt evaluate"
    for where, line in csv_table.read_lines(path, COLUMNS, "an evaluation", remedy):
        try:
            key = line["optimiser"], line["kind"], line["split"]
            if key[1] not in ("learned", "baseline") or key[2] not in ("train", "test"):
                raise ValueError
            losses[key][int(line["step"])].append(float(line["loss"]))
        except (TypeError, ValueError):
            found = ",".join(str(value) for value in line.values())
            raise UserError(where, expected="a loss", found=found, remedy=remedy) from None
    if not losses:
        raise UserError(str(path), expected="losses", found="none", remedy=remedy)
    for (name, _, split), by_step in losses.items():
        if len(counts := sorted({len(values) for values in by_step.values()})) > 1:
            raise UserError(
                f"{path}: {printable(name)} on {split}",
                expected="as many losses at each step",
                found=f"{counts[0]} and {counts[-1]}",
                remedy=remedy,
            )
    return {
        key: Band(np.array(sorted(by_step)), np.array([by_step[step] for step in sorted(by_step)]))
        for key, by_step in losses.items()
    }


def read_training(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Stage → (steps, losses), in the order in which they come, from the `metrics.jsonl` of a training.

    A loss that was not finite is NaN. A last line that a kill has cut short is passed over.

    Raises:
        UserError: For a missing file, one without a loss, or a line that cannot be read (with its number).
    """
    found: dict[str, list[tuple[int, float]]] = {"train": []}
    whole = run_log.read_text(path, "a training's records", "run l2lopt train first")
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
            loss = math.nan if line["loss"] is None else float(line["loss"])
            found.setdefault(str(line["stage"]), []).append((int(line["step"]), loss))
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
            if number > 1 and whole.endswith(text):  # no end of a line behind it
                break
            place, remedy = f"{path}, line {number}", "train again"
            raise UserError(place, expected="a loss", found=text[:80], remedy=remedy) from None
    curves = {stage: np.array(pairs, dtype=float).T for stage, pairs in found.items() if pairs}
    if not curves:
        raise UserError(str(path), expected="a training's records", found="none", remedy="train again")
    return {stage: (steps, losses) for stage, (steps, losses) in curves.items()}


def loss_curves(
    bands: Mapping[tuple[str, str, str], Band],
    folder: Path,
    title: str = "",
    breaks: Sequence[int] = (),
    cut: Collection[str] | None = None,
    proper: Mapping[str, str] | None = None,
) -> list[Path]:
    """Draws training and test loss against the step from 0 on, log axes, the mean over seeds for each optimiser.

    From `style.BANDED_SEEDS` seeds on there is the band of its 95 % interval; with fewer, each run is a thin line.
    A cross ends a line behind which a run is not finite: a diverged optimiser does not look like one that was stopped.
    Where a mean is below 0 the axis of losses is linear.

    Where a curve rises to twice the loss before the first step, as in test mode while batch norm's running statistics
    lag behind large steps, the axis of steps is linear, and the panels are as high as the losses from a tenth of the
    steps on that are below the first: curves leave them, so that it can be seen what they come to.

    Args:
        bands: (optimiser, kind, split) → band, as `read` gives them.
        folder: Folder for `loss-curves.png` and `loss-curves.svg`.
        title: Line above the panels.
        breaks: Steps after which a curve of several runs goes over to that for the next horizon; the line is cut.
        cut: Optimisers with such curves; by default the baselines.
        proper: Optimiser → name in the legend; by default `names.proper_name` of the optimiser.
    """
    splits = [split for split in ("train", "test") if any(key[2] == split for key in bands)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(splits), figsize=(5.2 * len(splits), 4.2), squeeze=False, layout="constrained"
        )
        spiky = _rises(bands.values())
        for panel, split in zip(axes[0], splits, strict=True):
            pieces = {
                name: breaks if (kind == "baseline" if cut is None else name in cut) else () for name, kind, _ in bands
            }
            own = {key[:2]: band for key, band in bands.items() if key[2] == split}
            _panel(panel, own, breaks, pieces, proper_names(pieces, proper), spiky)
            panel.set_title({"train": "training set", "test": "test set"}[split])
        axes[0][0].set_ylabel("mean loss per sample")
        handles, labels = axes[0][0].get_legend_handles_labels()
        told = bands_of(max(band.seeds for band in bands.values()))
        if any(_ends(band).size for band in bands.values()):
            told += f";{' ' if len(splits) > 1 else chr(10)}cross: a run is no longer finite"  # one panel is narrow
        # About twelve letters to an inch; an entry's line takes the room of eight.
        across = max(1, 62 * len(splits) // max((len(label) + 8 for label in labels), default=1))
        # Without this a long legend would take its room from the panels.
        figure.set_figheight(4.2 + 0.22 * max(0, math.ceil(len(labels) / across) - 2))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(across, len(labels)), frameon=False, title=told
        )
        if title:
            figure.suptitle(shown(title))
        return write_figure(figure, folder, "loss-curves")


def training_curve(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    folder: Path,
    title: str = "",
    smoothing: int = 50,
    levels: Mapping[str, float] | None = None,
) -> list[Path]:
    """Draws the training loss of each step with its running mean, and the watched loss, against the step.

    Args:
        curves: Stage → (steps, losses), as `read_training` gives them.
        folder: Folder for `training-curve.png` and `training-curve.svg`.
        title: Line above the panel.
        smoothing: Divisor of the number of steps; the running mean is over so many steps before each: 1/50 of all.
        levels: Name → loss that a line across is at, such as a published one.
    """
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
        for index, (stage, (steps, losses)) in enumerate(curves.items()):
            colour = RULES[index % len(RULES)]
            if stage == "train":
                panel.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.25)
                window = max(1, len(losses) // smoothing)
                label = "training batches" if window == 1 else f"training batches, mean of {window} (thin: each)"
                panel.plot(steps, _running_mean(losses, window), color=colour, linewidth=1.8, label=label)
            else:
                label = f"{'held-out' if stage == 'heldout' else shown(stage)} set"
                panel.plot(steps, losses, color=colour, linestyle=(0, (5, 1.5)), marker="o", markersize=4, label=label)
        for (name, level), dash in zip((levels or {}).items(), cycle(DASHES[2:])):
            panel.axhline(level, color="0.3", linestyle=dash, label=shown(name))
        values = np.concatenate([losses[np.isfinite(losses)] for _, losses in curves.values()])
        # A batch that is fitted exactly has a loss of 0, which the axis leaves out rather than flattening all else.
        logarithmic = (values >= 0).all() and (values > 0).any()
        panel.set(xlabel="step", ylabel="mean loss per sample", yscale="log" if logarithmic else "linear")
        if logarithmic:
            log_losses(panel)
        panel.set_xlim(left=0)
        panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
        panel.legend(frameon=False)
        if title:
            panel.set_title(shown(title))
        return write_figure(figure, folder, "training-curve")


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and the `window` − 1 before it, of as many as there are at the start."""
    # Window by window: differences of running sums would lose all digits after one very large value.
    begin = [values[:end].mean() for end in range(1, min(window, len(values) + 1))]
    rest = sliding_window_view(values, window).mean(-1) if len(values) >= window else []
    return np.concatenate([begin, rest])


def _panel(
    panel: Axes,
    bands: Mapping[tuple[str, str], Band],
    breaks: Sequence[int],
    pieces: Mapping[str, Sequence[int]],
    labels: Mapping[str, str],
    spiky: bool,
) -> None:
    ordered = sorted(bands.items(), key=lambda item: item[0][1] != "learned")
    lines = lines_of({name: kind for (name, kind), _ in ordered})
    limits, negative = _limits(bands.values()) if spiky else None, _negative(bands.values())
    for index, ((name, _), band) in enumerate(ordered):
        line = lines[name]
        ends = _ends(band)
        if ends.size:  # of the whole band: each gap of the cut one would have a cross
            steps, mean = band.steps[ends], band.mean[ends]
            panel.plot(steps, mean, "x", color=line.colour, markersize=9, markeredgewidth=2)
        band = _cut(band, pieces[name])
        steps, mean, (low, high) = band.steps, band.mean, band.interval
        if band.seeds >= BANDED_SEEDS:
            # The band of a curve that is outside would hide others.
            inside = None if limits is None else mean <= limits[1]
            lower = low if negative else np.maximum(low, mean / 10)
            panel.fill_between(steps, lower, high, where=inside, color=line.colour, alpha=0.18, linewidth=0)
        elif band.seeds > 1:
            panel.plot(steps, band.losses, color=line.colour, linewidth=0.6, alpha=0.45)
        marks = range(index % 4, len(steps), max(1, len(steps) // 8))
        panel.plot(
            steps,
            mean,
            color=line.colour,
            linewidth=line.width,
            linestyle=line.dash,
            marker=line.marker,
            markersize=4.5,
            markevery=list(marks),
            label=shown(labels[name]),
        )
    for step in breaks:
        panel.axvline(step, color="black", linewidth=0.5, alpha=0.35, linestyle=(0, (1, 3)))
    last = max(float(band.steps[-1]) for band in bands.values())
    if negative:
        panel.set(xlabel="step", ylim=_linear_limits(bands.values()))
    else:
        panel.set(yscale="log", xlabel="step", ylim=limits)
        log_losses(panel)
    # A logarithm's first half would be of steps at which most curves are outside.
    even_steps(panel, last) if spiky else log_steps(panel, last)
    panel.grid(True, which="major", linewidth=0.4, alpha=0.5)


def _first(bands: Collection[Band]) -> float:
    """The largest mean at step 0; infinite where there is none."""
    first = [float(band.mean[0]) for band in bands if band.steps[0] == 0 and np.isfinite(band.mean[0])]
    return max(first, default=math.inf)


def _means(bands: Collection[Band], begin: float) -> np.ndarray:
    """All means from a step on that a logarithmic axis can have."""
    return np.concatenate(
        [band.mean[(band.steps >= begin) & np.isfinite(band.mean) & (band.mean > 0)] for band in bands]
    )


def _rises(bands: Collection[Band]) -> bool:
    """Whether a mean rises to twice that at step 0, and another is to be seen late in the runs."""
    return not _negative(bands) and bool((_means(bands, 0) >= 2 * _first(bands)).any()) and _limits(bands) is not None


def _negative(bands: Collection[Band]) -> bool:
    """Whether a mean is below 0, which no logarithm has."""
    return any(bool((band.mean[np.isfinite(band.mean)] < 0).any()) for band in bands)


def _linear_limits(bands: Collection[Band]) -> tuple[float, float]:
    """Around all means, without those that are further above the largest at step 0 than that is above the lowest."""
    means = np.concatenate([band.mean[np.isfinite(band.mean)] for band in bands])
    low, first = float(means.min()), _first(bands)
    high = float(means[means <= 2 * first - low].max())  # infinite bound: all of them
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _limits(bands: Collection[Band]) -> tuple[float, float] | None:
    """Around all means after step 0 that are as low as those from a tenth of the steps on that are below the first."""
    late = _means(bands, max(1.0, max(float(band.steps[-1]) for band in bands) / 10))
    late = late[late < _first(bands)]
    return (float(_means(bands, 1).min()) / 1.2, 1.2 * float(late.max())) if late.size else None


def _cut(band: Band, breaks: Sequence[int]) -> Band:
    """The band with a gap after each of `breaks`."""
    after = [int(np.searchsorted(band.steps, step, side="right")) for step in breaks]
    steps, losses = (np.insert(part.astype(float), after, np.nan, axis=0) for part in band)
    return Band(steps, losses)


def _ends(band: Band) -> np.ndarray:
    """The places of the means that are finite while the next one is not."""
    finite = np.isfinite(band.mean)
    return np.flatnonzero(finite[:-1] & ~finite[1:])


def _half_width(values: np.ndarray) -> float:
    if len(values) < 2 or not np.isfinite(values).all():
        return 0.0
    return half_width(float(values.std(ddof=1)), len(values))
