"""Curves of the distances to the nearest neighbours."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from l2lopt.report import style


def neighbour_curves(
    curves: Mapping[str, np.ndarray], folder: Path, title: str = "", name: str = "neighbour-curves"
) -> list[Path]:
    """Draws A(k), the mean scaled distance to the k nearest neighbours: the mean over runs, and their range.

    Args:
        curves: Label → A(k) of each run, [runs, n − 1], k from 1.
        folder: Folder that gets the figure as PNG and SVG.
        title: Text above the panel.
        name: Name of both files, without its ending.
    """
    with plt.rc_context(style.STYLE):
        figure, panel = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
        for index, (encoder, runs) in enumerate(curves.items()):
            colour, k = style.RULES[index % len(style.RULES)], np.arange(1, runs.shape[1] + 1)
            panel.fill_between(k, runs.min(0), runs.max(0), color=colour, alpha=0.18, linewidth=0)
            panel.plot(
                k,
                runs.mean(0),
                color=colour,
                linestyle=style.DASHES[index % len(style.DASHES)],
                label=style.shown(encoder),
            )
        panel.set(xlabel="number of nearest neighbours k", ylabel="mean scaled distance A(k)", ylim=(0, None))
        panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
        panel.legend(frameon=False)
        if title:
            panel.set_title(style.shown(title))
        return style.write_figure(figure, folder, name)
