"""The controls of a network per tensor over the steps of a run, as a table and as a figure."""

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from l2lopt.core.errors import UserError
from l2lopt.report.style import DASHES, HARNESS, RULES, STYLE, shown, write_figure
from l2lopt.storage import csv_table
from l2lopt.storage.run_log import written_whole

NAME = "controls.csv"
"""Name of the table in a folder."""
COLUMNS = ("kind", "control", "unit", "step", "mean", "low", "high")
"""The columns of the table."""
AT_THE_HARNESS = {"factor": 1.0, "degrees": 0.0, "share": 0.0}
"""Unit → the value at which a control leaves the harness as it is."""
LEAST = {"factor": (0.5, 2.0), "degrees": (-10.0, 10.0), "share": (-0.1, 0.1)}
"""Unit → what the axis spans at least, so that a control that stays at the harness looks like one."""
TITLES = {
    "step": "step, times the harness's",
    "decay": "weight decay, times the harness's",
    "mix": "matrices: turn to Adam's direction",
    "sign": "turn to the momentum's sign",
    "slow": "turn to the slow momentum",
    "momentum": "slow momentum (below 0: gradient)",
}
BANDS = "line: mean over the tensors of a kind (of factors the geometric one); band: lowest to highest"


class ControlCurve(NamedTuple):
    """A control of the tensors of one kind, step by step.

    Attributes:
        kind: Kind of the tensors, as in `core.kinds`.
        control: Name of the control.
        unit: "factor" of the harness's, "degrees" of a turn away from it, or "share" of something else.
        steps: Number of each step, counted from 1, [T].
        mean: Mean over the tensors, for factors the geometric one, [T].
        low: Lowest value of the tensors, [T].
        high: Highest value of the tensors, [T].
    """

    kind: str
    control: str
    unit: str
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def write_controls(curves: Sequence[ControlCurve], path: Path) -> None:
    """Writes the table of curves as CSV, by rename."""
    with written_whole(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        for curve in curves:
            values = zip(curve.mean, curve.low, curve.high, strict=True)
            for step, three in zip(curve.steps, values, strict=True):
                numbers = (f"{value:.7g}" for value in three)
                lines.writerow((curve.kind, curve.control, curve.unit, int(step), *numbers))


def read_controls(path: Path) -> list[ControlCurve]:
    """The curves of a table that `write_controls` has written.

    Raises:
        UserError: For a missing file, other columns, or a line that cannot be read (with its number).
    """
    remedy = "run l2lopt controls again"
    found: dict[tuple[str, str, str], list[tuple[float, ...]]] = defaultdict(list)
    for where, line in csv_table.read_lines(path, COLUMNS, "a table of controls", remedy):
        try:
            key = line["kind"], line["control"], line["unit"]
            if key[2] not in AT_THE_HARNESS:
                raise ValueError
            found[key].append(tuple(float(line[name]) for name in COLUMNS[3:]))
        except (TypeError, ValueError):
            said = ",".join(str(value) for value in line.values())
            raise UserError(where, expected="a control at a step", found=said, remedy=remedy) from None
    if not found:
        raise UserError(str(path), expected="controls", found="none", remedy=remedy)
    return [ControlCurve(*key, *np.array(rows, dtype=float).T) for key, rows in found.items()]


def control_curves(curves: Sequence[ControlCurve], folder: Path, title: str = "") -> list[Path]:
    """Draws a panel for each control: a line for each kind of tensor, a band from the lowest to the highest tensor.

    The turn to Adam's direction is drawn for matrices alone: for other kinds this is the harness's direction, and the
    turn does nothing.

    Args:
        curves: Curves, as `read_controls` gives them.
        folder: Folder for `controls.png` and `controls.svg`.
        title: Line above the panels.
    """
    controls = list(dict.fromkeys(curve.control for curve in curves))
    kinds = list(dict.fromkeys(curve.kind for curve in curves))
    columns = min(len(controls), 3)
    rows = math.ceil(len(controls) / columns)
    with plt.rc_context(STYLE):
        size = max(4.2 * columns, 7.0), 3.2 * rows + 0.7
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for panel, control in zip(axes.flat, controls, strict=False):
            _panel(panel, [curve for curve in curves if curve.control == control], kinds)
        for panel in axes.flat[len(controls) :]:
            panel.set_axis_off()
        # Of all panels: one may lack a kind.
        told = [panel.get_legend_handles_labels() for panel in axes.flat]
        lines = {label: line for found in told for line, label in zip(*found, strict=True)}
        figure.legend(
            list(lines.values()), list(lines), loc="outside lower center", ncols=len(lines), frameon=False, title=BANDS
        )
        if title:
            figure.suptitle(shown(title))
        return write_figure(figure, folder, "controls")


def _panel(panel: Axes, curves: Sequence[ControlCurve], kinds: Sequence[str]) -> None:
    """One control of all kinds of tensors."""
    control, unit = curves[0].control, curves[0].unit
    if unit == "factor":
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
    panel.axhline(AT_THE_HARNESS[unit], color=HARNESS, linewidth=0.9, label="the harness")
    for curve in curves:
        if control == "mix" and curve.kind != "matrix":
            continue
        index = kinds.index(curve.kind)
        colour = RULES[index % len(RULES)]
        # A factor without a bound may be too large for a number.
        mean, low, high = (np.where(np.isfinite(part), part, np.nan) for part in (curve.mean, curve.low, curve.high))
        panel.fill_between(curve.steps, low, high, color=colour, alpha=0.18, linewidth=0)
        dash = DASHES[index % len(DASHES)]
        panel.plot(curve.steps, mean, color=colour, linestyle=dash, linewidth=1.6, label=shown(curve.kind))
    bottom, top = panel.get_ylim()
    panel.set_ylim(min(bottom, LEAST[unit][0]), max(top, LEAST[unit][1]))
    panel.set_title(TITLES.get(control, shown(control)), fontsize=10)
    panel.set(xlabel="step", ylabel=unit, xlim=(0, None))
    panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
