"""How every figure looks: colours, dashes and markers that survive a photocopier, and the way to a file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from l2lopt.core.errors import printable
from l2lopt.storage.run_log import written_whole

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

DASHES = ((0, ()), (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (2, 2)))
"""Dash patterns of lines, one for each."""
# Dark for learned optimisers, lighter for baselines; most are Okabe and Ito's.
RULES = ("#000000", "#0072B2", "#D55E00", "#882255")
"""Colours of learned optimisers, and of whatever else a figure is about; a harness has the green."""
HARNESS = "#009E73"
"""Colour of the harness."""
RIVALS = ("#F0B400", "#56B4E9", "#990000", "#9933FF", "#A3A3A3", "#8FB03C", "#F03CC8")
"""Colours of baselines where there may be as many as in a benchmark. Any two of these, of `RULES` and of `HARNESS` stay
apart for the colour-blind, and so do those in their place in the dark."""
IN_THE_DARK: Mapping[str, str] = {
    "#000000": "#F2F2F2",
    "#0072B2": "#3D9BE9",
    "#D55E00": "#FF7A1A",
    "#882255": "#D65C9E",
    "#009E73": "#1FB88A",
    "#F0B400": "#FFD54A",
    "#56B4E9": "#A6E1FF",
    "#990000": "#C23B3B",
    "#9933FF": "#9A66FF",
    "#A3A3A3": "#74747C",
    "#8FB03C": "#B4C95A",
    "#F03CC8": "#FFA8C8",
    "#CCCCCC": "#3A3D45",
    "#FFFFFF": "#16181D",
}
"""Colour of a figure on white → the one in its place on a dark page."""
MARKERS = "os^Dv<>P"
"""Markers of lines, one for each."""
BANDED_SEEDS = 5
"""Seeds from which a band of Student's t is drawn; with fewer the runs themselves are."""
FEW_DECADES = 30
"""Ratio of the ends of a logarithmic axis below which there are labels between the powers of ten."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "l2lopt",  # or the identifiers in an SVG would differ from run to run
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Matplotlib's settings, for `plt.rc_context`."""


def shown(name: str) -> str:
    """A name as Matplotlib shows it: between two $ it would read a formula; no legend has one that begins with _."""
    text = printable(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


class Line(NamedTuple):
    """How the curve of an optimiser looks, the same in all figures.

    Attributes:
        colour: Colour as "#RRGGBB".
        dash: Dash pattern as Matplotlib has it.
        marker: Matplotlib's name of the marker.
        width: Width in points.
    """

    colour: str
    dash: tuple[int, tuple[float, ...]]
    marker: str
    width: float


def lines_of(kinds: Mapping[str, str]) -> dict[str, Line]:
    """A line for each optimiser: wide and solid for learned ones, wide and dashed for a harness, thin for the rest.

    Args:
        kinds: Name → "learned", "harness" or anything else, a baseline.
    """
    found: dict[str, Line] = {}
    counts = {"learned": 0, "harness": 0, "baseline": 0}
    for index, (name, kind) in enumerate(kinds.items()):
        kind = kind if kind in counts else "baseline"
        count = counts[kind]
        counts[kind] += 1
        colours = {"learned": RULES, "harness": (HARNESS,), "baseline": RIVALS}[kind]
        # A second round through the colours takes other dashes, or two optimisers would look the same.
        dash = DASHES[(count // len(colours) if kind == "learned" else count + 1) % len(DASHES)]
        marker = MARKERS[index % len(MARKERS)]
        found[name] = Line(colours[count % len(colours)], dash, marker, 1.3 if kind == "baseline" else 2.2)
    return found


def even_steps(panel: Axes, last: float) -> None:
    """Makes the x axis one of steps from 0 to `last`, linear unless it is something else already.

    Args:
        panel: Axes.
        last: Last step.
    """
    panel.set_xlim(0, max(last, 1))
    panel.xaxis.set_major_formatter(FuncFormatter(_thousands))


def log_steps(panel: Axes, last: float) -> None:
    """Makes the x axis one of steps from 0 to `last`: even up to step 1, logarithmic beyond.

    Args:
        panel: Axes.
        last: Last step.
    """
    panel.set_xscale("symlog", linthresh=1, linscale=0.3)
    even_steps(panel, last)


def log_losses(panel: Axes) -> None:
    """Labels a logarithmic y axis by numbers in place of powers: 1, 10, 100, twos and fives where these are few.

    Where all of them together are fewer than two, every tick has a label.

    Args:
        panel: Axes.
    """

    def between(value: float, _: object) -> str:
        low, high = panel.get_ylim()
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        shown = [digit * 10.0**power for power in decades for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
        told = len(shown) < 2 or (high < FEW_DECADES * low and any(math.isclose(value, one) for one in shown))
        return f"{value:g}" if told else ""

    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(FuncFormatter(between))


def _thousands(value: float, _: object) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def bands_of(seeds: int) -> str:
    """What lines and bands of a figure of losses are, in words.

    Args:
        seeds: Number of runs of each optimiser.
    """
    if seeds < 2:
        return "line: a single run"
    if seeds < BANDED_SEEDS:
        return f"line: mean over {seeds} seeds; thin lines: the single runs"
    return f"line: mean over {seeds} seeds; band: 95 % interval of the mean (Student's t)"


def write_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure as PNG and SVG, and closes it.

    Args:
        figure: Figure to write.
        folder: Folder of the files.
        name: Name of the files without their endings.
    """
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        with written_whole(path) as temporary:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(temporary, dpi=160, metadata=metadata)
        # Where there is a layout engine, its places hold for both files: working them out is half of the time.
        figure.set_layout_engine("none")
    plt.close(figure)
    return paths
