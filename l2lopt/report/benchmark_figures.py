"""The figures of a benchmark: loss curves task by task, performance profiles, the time of a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from l2lopt.report.interval import half_width
from l2lopt.report.panels import Drawn, Margins, Sheet, note, plain, sheet_style, title
from l2lopt.report.style import BANDED_SEEDS, Line, bands_of, even_steps, log_steps

_NEAR = 3.0
"""Final losses whose ratio is below this share a linear axis."""


class Curve(NamedTuple):
    """The runs of one optimiser on one task.

    Attributes:
        label: Name of the optimiser.
        line: Look of the curve.
        steps: Recorded steps, rising, [K].
        losses: Losses, [K, S]; not finite where a run has diverged.
        diverged: Number of runs that end above their beginning or at no finite loss.
    """

    label: str
    line: Line
    steps: np.ndarray
    losses: np.ndarray
    diverged: int

    @property
    def seeds(self) -> int:
        """S, the number of runs."""
        return int(self.losses.shape[1])

    @property
    def mean(self) -> np.ndarray:
        """The mean over seeds, [K]; NaN where a run is not finite."""
        return np.asarray(_drawable(self.losses).mean(1))

    @property
    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """The 95 % interval of the mean by Student's t, [K] each; NaN with one seed."""
        if self.seeds < 2:
            return (np.full(len(self.steps), np.nan),) * 2
        spreads = _drawable(self.losses).std(1, ddof=1)
        half = np.array([half_width(float(spread), self.seeds) for spread in spreads])
        return self.mean - half, self.mean + half


class LossPanel(NamedTuple):
    """The curves of one task.

    Attributes:
        title: Name of the task.
        curves: Curves.
        begin: Mean loss before the first step; a curve above it leaves the picture.
    """

    title: str
    curves: Sequence[Curve]
    begin: float


class Profile(NamedTuple):
    """A share as a function of a threshold.

    Attributes:
        label: Name of the optimiser.
        line: Look of the curve.
        share: Share at each threshold, [K].
        low: Lower end of its interval, [K].
        high: Upper end of its interval, [K].
    """

    label: str
    line: Line
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


class ProfilePanel(NamedTuple):
    """Performance profiles over the same thresholds.

    Attributes:
        title: Name of the share.
        axis: Label of the axis of thresholds.
        thresholds: Thresholds, rising, [K].
        profiles: Profiles.
        even: Threshold at which an optimiser is as good as the target.
        doubling: Whether the axis has powers of two.
    """

    title: str
    axis: str
    thresholds: np.ndarray
    profiles: Sequence[Profile]
    even: float
    doubling: bool


def loss_panels(panels: Sequence[LossPanel], folder: Path, name: str) -> Drawn:
    """Draws the loss against the step, one panel for each task.

    A panel in which the final losses are near each other has linear axes, over the losses of the last four fifths of
    the budget; others have logarithmic ones. The thick line is the mean over seeds, which ends where a run is not
    finite. From `BANDED_SEEDS` seeds on the band is its 95 % interval by Student's t; with fewer, each run is a thin
    line.

    Args:
        panels: Panels, at least one.
        folder: Folder of the files.
        name: Name of the files without their endings.
    """
    with sheet_style():
        legend = {curve.label: curve.line for panel in panels for curve in panel.curves}
        told = bands_of(max((curve.seeds for panel in panels for curve in panel.curves), default=1))
        sheet = Sheet(len(panels), 4, (3.2, 2.6), legend, caption=f"{told}; cross: a run is no longer finite")
        for axes, panel in zip(sheet.axes, panels, strict=True):
            low, high, linear = limits(panel)
            for index, curve in enumerate(panel.curves):
                _draw_curve(axes, curve, index, linear)
            last = max((float(curve.steps[-1]) for curve in panel.curves), default=1.0)
            axes.set(yscale="linear" if linear else "log", ylim=(low, high), xlabel="step")
            even_steps(axes, last) if linear else log_steps(axes, last)
            if not linear:
                _mark_few(axes, low, high)
            axes.yaxis.set_major_formatter(FuncFormatter(_short))
            axes.grid(True, which="major", color="#CCCCCC", linewidth=0.5)
            title(axes, panel.title)
            lost = [f"{curve.label} {curve.diverged}/{curve.seeds}" for curve in panel.curves if curve.diverged]
            note(axes, [f"diverged: {', '.join(lost)}"] if lost else [])
        return sheet.write(folder, name)


def limits(panel: LossPanel) -> tuple[float, float, bool]:
    """The lowest and highest loss to show, and whether the axes are linear.

    Args:
        panel: Curves of a task.
    """
    means = [_drawable(curve.mean) for curve in panel.curves]
    every = np.concatenate([mean[np.isfinite(mean)] for mean in means] or [np.zeros(0)])
    top = panel.begin if np.isfinite(panel.begin) else float(every.max(initial=1.0))
    inside = every[every <= top]
    if not inside.size:
        room = max(1.0, 0.1 * abs(top))
        return top - room, top + room, True
    lowest = float(inside.min())
    finals = np.array([mean[-1] for mean in means if np.isfinite(mean[-1]) and mean[-1] <= top])
    if lowest > 0 and finals.size and finals.max() >= _NEAR * finals.min():
        return lowest / 1.15, max(top, lowest * 1.2), False
    early = [
        float(mean[np.searchsorted(curve.steps, curve.steps[-1] / 5)])
        for curve, mean in zip(panel.curves, means, strict=True)
    ]
    # The slowest curve at a fifth of the budget: what lies above says how they began, not where they get.
    settled = np.array([loss for loss in early if np.isfinite(loss) and loss <= top])
    high = max([*settled, *finals], default=top)
    spread = high - lowest
    if spread <= 1e-6 * abs(lowest):  # curves that never move still get an axis
        spread = abs(lowest) or 1.0
    room = 0.06 * spread
    return lowest - room, high + room, True


def profiles(panels: Sequence[ProfilePanel], folder: Path, name: str) -> Drawn:
    """Draws performance profiles, a panel for each kind of threshold; bands are 95 % bootstrap intervals.

    Args:
        panels: Panels, at least one.
        folder: Folder of the files.
        name: Name of the files without their endings.
    """
    with sheet_style():
        legend = {profile.label: profile.line for panel in panels for profile in panel.profiles}
        told = "band: 95 % bootstrap interval over seeds, at each threshold by itself"
        sheet = Sheet(len(panels), 2, (3.4, 2.9), legend, caption=told)
        for axes, panel in zip(sheet.axes, panels, strict=True):
            for index, profile in enumerate(panel.profiles):
                band, colour = (profile.low, profile.high), profile.line.colour
                axes.fill_between(panel.thresholds, *band, color=colour, alpha=0.1, linewidth=0)
                marks = list(range(3 * index % 20, len(panel.thresholds), 20))
                _plot(axes, panel.thresholds, profile.share, profile.line, marks)
            axes.axvline(panel.even, color="#000000", linewidth=0.8, alpha=0.5)
            if panel.doubling:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
            axes.set(ylim=(-0.02, 1.02), xlim=(panel.thresholds[0], panel.thresholds[-1]))
            axes.set_xlabel(plain(panel.axis, 40), parse_math=False)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
            axes.grid(True, which="major", color="#CCCCCC", linewidth=0.5)
            title(axes, panel.title)
        return sheet.write(folder, name)


def step_times(
    ratios: Mapping[str, Sequence[float]], lines: Mapping[str, Line], folder: Path, name: str, axis: str
) -> Drawn:
    """Draws the time of a step: a dot for each task, a bar at the median.

    Args:
        ratios: Name of an optimiser → time on each task, over that of the same baseline.
        lines: Name of an optimiser → its look.
        folder: Folder of the files.
        name: Name of the files without their endings.
        axis: Label of the axis.
    """
    with sheet_style():
        labels = [plain(name, 30) for name in ratios]  # two may be alike
        left = 0.08 * max(map(len, labels), default=1) + 0.2
        size, margins = (2.4 + left, 0.9 + 0.26 * len(labels)), Margins(left, 0.2, 0.14, 0.66)
        sheet = Sheet(1, 1, size, {}, margins, "a dot for each task, a bar at the median")
        axes = sheet.axes[0]
        for place, (optimiser, values) in enumerate(ratios.items()):
            line = lines[optimiser]
            axes.plot(values, [place] * len(values), "o", color=line.colour, alpha=0.45, markersize=4)
            axes.plot([np.median(values)] * 2, [place - 0.34, place + 0.34], color=line.colour, linewidth=2.6)
        axes.set(xscale="log", ylim=(len(labels) - 0.5, -0.5))
        axes.set_xlabel(plain(axis, 32), parse_math=False)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        every = [value for values in ratios.values() for value in values]
        _mark_times(axes, min(every, default=1.0), max(every, default=1.0))
        axes.axvline(1, color="#000000", linewidth=0.8, alpha=0.5)
        axes.grid(True, axis="x", which="major", color="#CCCCCC", linewidth=0.5)
        return sheet.write(folder, name)


def _draw_curve(axes: Axes, curve: Curve, index: int, linear: bool) -> None:
    steps, losses, mean = curve.steps, _drawable(curve.losses), curve.mean
    seeds = losses.shape[1]
    if seeds >= BANDED_SEEDS:
        low, high = curve.band
        # A logarithmic axis has no place for what is not above 0.
        low = low if linear else np.maximum(low, mean / 10)
        axes.fill_between(steps, low, high, color=curve.line.colour, alpha=0.13, linewidth=0)
    elif seeds > 1:
        axes.plot(steps, losses, color=curve.line.colour, linewidth=0.6, alpha=0.45)
    # On linear axes evenly over the steps, not over the records, which crowd at the beginning.
    end = float(steps[-1])
    places = np.linspace(end / 5, end * 4 / 5, 4) + end * index / 40
    if not linear:
        places = np.geomspace(2, max(end, 2), 6) * 1.08**index
    marks = sorted({int(found) for found in np.searchsorted(steps, places) if found < len(steps)})
    _plot(axes, steps, mean, curve.line, marks)
    finite = np.flatnonzero(np.isfinite(mean))
    if finite.size and finite[-1] + 1 < len(mean):
        axes.plot(steps[finite[-1]], mean[finite[-1]], "x", color=curve.line.colour, markersize=7, markeredgewidth=2)


def _plot(axes: Axes, x: np.ndarray, y: np.ndarray, line: Line, marks: list[int]) -> None:
    axes.plot(
        x,
        y,
        color=line.colour,
        linestyle=line.dash,
        linewidth=line.width,
        marker=line.marker,
        markersize=4,
        markevery=marks,
        zorder=2 + line.width,  # learned optimisers over the baselines
    )


def _drawable(values: np.ndarray) -> np.ndarray:
    """The values with NaN for what is not finite: a gap in a line, and no warning in a mean."""
    return np.where(np.isfinite(values), values, np.nan)


def _short(value: float, _: object) -> str:
    return f"{value:.3g}"


def _mark_few(axes: Axes, low: float, high: float) -> None:
    """Labels at 1, 2 and 5 of a decade of the y axis, or, over many decades, at its powers of ten only."""
    decades = np.log10(high / low)
    parts = (1, 2, 5) if decades < 2.5 else (1,)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    places = [part * 10.0**power for power in powers for part in parts if low <= part * 10.0**power <= high]
    axes.set_yticks(places)
    axes.yaxis.set_minor_locator(NullLocator())


def _mark_times(axes: Axes, low: float, high: float) -> None:
    """Labels at 1, 2 and 5 of a decade of the x axis."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.set_xticks([p * 10.0**k for k in powers for p in (1, 2, 5) if low / 1.25 <= p * 10.0**k <= high * 1.25])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
