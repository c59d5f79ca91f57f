"""How every figure looks: colours, dashes and markers that survive a photocopier, and the way to a file."""

from pathlib import Path
from typing import Any

import matplotlib

from l2lopt.core.errors import printable
from l2lopt.storage.run_log import written_whole

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# Dark for learned optimisers, lighter for baselines. The colours are Okabe and Ito's, safe for the colour-blind.
LEARNED = ("#000000", "#0072B2", "#D55E00", "#009E73")
"""Colours of learned optimisers, and of whatever else a figure is about."""
BASELINES = ("#999999", "#E69F00", "#56B4E9", "#CC79A7", "#8C8C00", "#B0B0B0")
"""Colours of baselines."""
DASHES = ((0, ()), (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (2, 2)))
"""Dash patterns of lines, one for each."""
MARKERS = "os^Dv<>P"
"""Markers of lines, one for each."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "l2lopt",  # or the identifiers in an SVG would differ from run to run
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Matplotlib's settings, for `plt.rc_context`."""


def shown(name: str) -> str:
    """A name as Matplotlib is to show it: between two $ it would read a formula."""
    return printable(name).replace("$", r"\$")


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
    plt.close(figure)
    return paths
