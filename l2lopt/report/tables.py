"""Tables of results: one value, written as Markdown or HTML; the command line prints it."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, TypeAlias

from l2lopt.core.errors import UserError

Cell: TypeAlias = str | None
"""Text in which `**…**` marks what is set in bold; None where a column has no meaning in this row."""


def loss_text(value: float | None, digits: str = ".3g") -> str:
    """A loss in a table; ∞ where there is no finite one (None in a file: JSON has no such number).

    Args:
        value: Loss.
        digits: Format of a finite one.
    """
    return "∞" if value is None or not math.isfinite(value) else f"{value:{digits}}"


class Span(NamedTuple):
    """A run of characters in one style.

    Attributes:
        text: Characters without any markup.
        bold: Whether they are set in bold.
    """

    text: str
    bold: bool


@dataclass(frozen=True)
class Table:
    """A table of results, ready to be shown.

    Cells hold text, already formatted: the table decides how it is written down, never how a number is rounded.

    Args:
        columns: Heads of the columns; the first column names the rows.
        rows: Cells of each row, one for each column.
        notes: Remarks on single entries; each becomes an item of a list below the table.
        legend: Sentence below the table that explains its marks.
        title: Line above the table.

    Raises:
        UserError: For a row with more or fewer cells than there are columns.

    Example:
        >>> print(Table(("", "test loss"), (("adam", "**0.12**"), ("sgd", "0.31"))).markdown())
        | | test loss |
        |---|---|
        | adam | **0.12** |
        | sgd | 0.31 |
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    legend: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                found, remedy = f"{len(row)} in {list(row)}", "give each row a cell for each column"
                raise UserError("table", expected=f"{len(self.columns)} cells", found=found, remedy=remedy)

    def markdown(self) -> str:
        """The table as GitHub's Markdown, without a newline at the end."""
        heads = tuple(column or None for column in self.columns)
        lines = [_markdown_row(heads), "|" + "---|" * len(self.columns), *map(_markdown_row, self.rows)]
        title = [f"**{_markdown(self.title)}**", ""] if self.title else []
        notes = ["", *(f"- {_markdown(note)}" for note in self.notes)] if self.notes else []
        legend = ["", _markdown(self.legend)] if self.legend else []
        return "\n".join([*title, *lines, *notes, *legend])

    def html(self, classes: Mapping[tuple[int, int], str] | None = None) -> str:
        """The table as one `<table>` element without style; everything but the bold marks is escaped.

        Args:
            classes: Row and column of a cell, counted from 0 → its class in the page's style.
        """
        marks = classes or {}
        caption = f"<caption>{_html(self.title)}</caption>\n" if self.title else ""
        heads = "".join(f'<th scope="col">{_html(column)}</th>' for column in self.columns)
        rows = "".join(f"<tr>{_html_row(row, index, marks)}</tr>\n" for index, row in enumerate(self.rows))
        below = [*self.notes, *([self.legend] if self.legend else [])]
        remarks = "".join(f'<tr><td colspan="{len(self.columns)}">{_html(text)}</td></tr>\n' for text in below)
        foot = f"<tfoot>\n{remarks}</tfoot>\n" if below else ""
        return f"<table>\n{caption}<thead>\n<tr>{heads}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n{foot}</table>\n"


def spans(cell: Cell) -> Iterator[Span]:
    """The text of a cell, cut where its style changes: what a terminal needs to show it."""
    for index, text in enumerate(re.split(r"\*\*(.+?)\*\*", cell or "", flags=re.DOTALL)):
        if text:  # the split puts what stood between two marks at every odd index
            yield Span(text, bold=index % 2 == 1)


def _markdown_row(cells: tuple[Cell, ...]) -> str:
    return "|" + "".join(" |" if cell is None else f" {_markdown(cell)} |" for cell in cells)


def _markdown(text: str) -> str:
    """The text of one cell: a line break would end the row, a bar would end the cell, and "<…>" would be HTML."""
    return " ".join(text.splitlines()).replace("|", r"\|").replace("<", "&lt;") if text else text


def _html_row(cells: tuple[Cell, ...], row: int, classes: Mapping[tuple[int, int], str]) -> str:
    found = []
    for column, cell in enumerate(cells):
        tag = "td" if column else 'th scope="row"'
        mark = f' class="{escape(classes[row, column])}"' if (row, column) in classes else ""
        found.append(f"<{tag}{mark}>{_html(cell)}</{tag[:2]}>")
    return "".join(found)


def _html(cell: Cell) -> str:
    return "".join(f"<strong>{escape(text)}</strong>" if bold else escape(text) for text, bold in spans(cell))
