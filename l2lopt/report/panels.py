"""Sheets of panels: one figure for a file, whose panels a page can show one by one."""

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from l2lopt.report.style import STYLE, Line, write_figure

SHEET_STYLE: dict[Any, Any] = STYLE | {
    "svg.fonttype": "none",  # text as text: a page restyles it, a reader searches it
    "font.size": 9,
    "axes.titlesize": 9.5,
}
"""Matplotlib's settings for sheets."""
TITLE, NOTE = "title", "note"
"""Identifiers of the two texts that a page says in words of its own."""
_LEGEND_ROW, _LETTER, _CAPTION_ROW = 0.24, 0.075, 0.18
"""Inches of a legend's row, of an average letter and of a caption's row."""


class Margins(NamedTuple):
    """Inches between the edges of a panel's cell and its axes.

    Attributes:
        left: Room for the labels of the y axis.
        right: Room for half a label.
        top: Room for the title.
        bottom: Room for the labels of the x axis and a note.
    """

    left: float = 0.62
    right: float = 0.14
    top: float = 0.34
    bottom: float = 0.66


_ROOM = Margins()


class Box(NamedTuple):
    """A panel's part of a figure in points from its upper left corner, without title and note.

    Attributes:
        x: Left edge.
        y: Upper edge.
        width: Width.
        height: Height.
    """

    x: float
    y: float
    width: float
    height: float


class Drawn(NamedTuple):
    """A sheet that was written.

    Attributes:
        paths: Files of the sheet, PNG and SVG.
        boxes: Part of each panel in the SVG, in which its group is called "panel-0", "panel-1" and so on.
    """

    paths: list[Path]
    boxes: list[Box]


class Sheet:
    """A figure of panels of one size, in rows.

    Args:
        count: Number of panels.
        columns: Most panels in a row.
        cell: Width and height of a panel in inches, margins included.
        legend: Label → line, below the panels.
        margins: Room within a cell around the axes.
        caption: Line below the legend, such as what the bands are; it is wrapped where the sheet is narrow.
    """

    def __init__(
        self,
        count: int,
        columns: int,
        cell: tuple[float, float],
        legend: dict[str, Line],
        margins: Margins = _ROOM,
        caption: str = "",
    ) -> None:
        columns = min(columns, max(count, 1))
        rows = math.ceil(count / columns)
        width = columns * cell[0]
        longest = max((len(label) for label in legend), default=0)
        across = max(1, int(width / (longest * _LETTER + 0.65)))
        told = textwrap.wrap(caption, max(20, int(width / _LETTER)))
        below = _CAPTION_ROW * len(told)
        foot = _LEGEND_ROW * math.ceil(len(legend) / across) + (0.1 if legend else 0) + below
        height = rows * cell[1] + foot
        self.figure = plt.figure(figsize=(width, height))
        self.axes: list[Axes] = []
        self.boxes: list[Box] = []
        for index in range(count):
            left, top = index % columns * cell[0], index // columns * cell[1]
            inner = cell[0] - margins.left - margins.right, cell[1] - margins.top - margins.bottom
            low = height - top - margins.top - inner[1]
            place = (left + margins.left) / width, low / height, inner[0] / width, inner[1] / height
            panel = self.figure.add_axes(place, gid=f"panel-{index}")
            self.axes.append(panel)
            upper, lower = top + margins.top - 0.12, top + cell[1] - margins.bottom + 0.46
            self.boxes.append(Box(*(72 * inches for inches in (left, upper, cell[0], lower - upper))))
        if legend:
            _add_legend(self.figure, legend, across, below / height)
        if told:
            self.figure.text(0.5, 0.04 / height, "\n".join(told), ha="center", va="bottom", fontsize=9)

    def write(self, folder: Path, name: str) -> Drawn:
        """Writes the sheet as PNG and SVG."""
        return Drawn(write_figure(self.figure, folder, name), self.boxes)


@contextmanager
def sheet_style() -> Iterator[None]:
    """Matplotlib's settings for sheets; a character that the font lacks is drawn as a box, without a warning."""
    with plt.rc_context(SHEET_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        yield


def plain(text: str, longest: int = 200) -> str:
    """Text that can be drawn: control characters are spaces, what is too long is cut.

    Args:
        text: Any text, such as a label from a user.
        longest: Most characters.
    """
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def title(panel: Axes, text: str) -> None:
    """Writes the title of a panel: text as it is, never a formula."""
    panel.set_title(plain(text, 44), loc="left", parse_math=False, gid=TITLE)


def note(panel: Axes, texts: Sequence[str]) -> None:
    """Writes a remark below a panel's x axis."""
    if texts:
        text = plain("; ".join(texts), 52)
        # Below the labels of the axis, in points, so that the height of the panel does not matter.
        panel.annotate(
            text, (0, 0), (0, -44), "axes fraction", "offset points", parse_math=False, gid=NOTE, annotation_clip=False
        )


def _add_legend(figure: Figure, lines: dict[str, Line], across: int, bottom: float) -> None:
    handles = [
        Line2D([], [], color=line.colour, linestyle=line.dash, linewidth=line.width, marker=line.marker, markersize=4.5)
        for line in lines.values()
    ]
    labels = [plain(label) for label in lines]
    look: dict[str, Any] = {"ncols": across, "frameon": False, "fontsize": 9, "bbox_to_anchor": (0.5, bottom)}
    found = figure.legend(handles, labels, loc="lower center", **look)
    for text in found.get_texts():
        text.set_parse_math(False)
