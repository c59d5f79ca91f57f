"""What the command line shows: lines, tables, files and progress. The only place that prints, but for the help."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category

import rich.table
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from l2lopt.core.errors import printable
from l2lopt.core.interrupts import interrupted_between_steps

if TYPE_CHECKING:
    from l2lopt.core.types import Report
    from l2lopt.report.tables import Table

# Some programs that start others without a terminal say COLUMNS=0, in which Rich shows nothing at all.
_WIDTH = 80 if os.environ.get("COLUMNS", "").strip() == "0" else None
console = Console(stderr=False, emoji=False, width=_WIDTH)
errors = Console(stderr=True, soft_wrap=True, emoji=False, width=_WIDTH)
_SPACES = "".join(c for c in map(chr, range(0x3001)) if category(c) == "Zs")
_JOINERS = "\u200c\u200d"  # of Persian, of Indian scripts and of emoji
_KEPT = f"\n\t{_SPACES}{_JOINERS}"
"""What a text that is shown as it is may have beside printable characters, among which Python has no other space."""


@contextmanager
def progress() -> "Iterator[Report]":
    """Shows how far long work is: a bar for each stage, with its figures and the time left.

    Off a terminal, as in a notebook or a file, a line for every tenth of a stage. What the library logs, such as the
    backend that it chose, is shown as well, and an interruption (Ctrl-C) waits for the end of the step. Any function of
    (stage, done, total, figures) can take the place of what this yields.

    Example:
        >>> import l2lopt
        >>> with l2lopt.progress() as report:  # report=report in l2lopt.meta_train, evaluate, train, benchmark, …
        ...     report("train", 5, 10, {"loss": 0.25})
        train: 5/10  loss 0.25
    """
    columns = (
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    bars: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}
    quiet, period = not console.is_terminal, 1800.0  # seconds that the speed is taken over: steps may take a minute
    with (
        Progress(*columns, console=console, disable=quiet, speed_estimate_period=period) as progress,
        logged_lines(),
        interrupted_between_steps() as step_ended,
    ):

        def report(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
            stage = printable(stage)
            shown = printable("  ".join(f"{name} {value:.4g}" for name, value in list(figures.items())[:3]))
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=total, completed=done, figures=shown)
            elif done < progress.tasks[bars[stage]].completed:  # once more from the start
                progress.reset(bars[stage], completed=done)
            progress.update(bars[stage], completed=done, total=total, figures=shown)
            if not console.is_terminal and (tenth := 10 * done // max(total, 1)) != tenths.get(stage):
                tenths[stage] = tenth
                left = progress.tasks[bars[stage]].time_remaining
                told = f"  left {timedelta(seconds=ceil(left))}" if left else ""
                say(f"{stage}: {done}/{total}  {shown}{told}")
            step_ended()

        yield report


@contextmanager
def logged_lines() -> Iterator[None]:
    """Shows messages that the library logs for its user, such as the backend it chose, as lines."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger, lines = logging.getLogger("l2lopt"), Lines(logging.INFO)
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


def print_table(table: "Table") -> None:
    """A table in the terminal, the first column to the left and numbers to the right."""
    from l2lopt.report.tables import spans

    shown = rich.table.Table(title=escape(printable(table.title)) or None, title_justify="left")
    for number, column in enumerate(table.columns):
        # Folded: a word that is longer than its column would lose its end.
        shown.add_column(escape(printable(column)), justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        parts = ([(printable(text), "bold" if bold else "") for text, bold in spans(cell)] for cell in row)
        shown.add_row(*(Text.assemble(*own) for own in parts))
    console.print(shown)
    for note in (*table.notes, *([table.legend] if table.legend else [])):
        say("".join(text for text, _ in spans(note)))


def list_files(paths: list[Path]) -> None:
    """The paths of files that a command has left, a line each."""
    for path in paths:
        say(os.fspath(path))


def say(text: str, *, wrapped: bool = False) -> None:
    """A text as it is: what looks like markup is none, and control characters do not reach the terminal.

    Args:
        text: Text.
        wrapped: Whether lines are broken between words at the terminal's width; paths and messages are to stay whole.
    """
    console.print(printable(text, but=_KEPT), markup=False, highlight=False, soft_wrap=not wrapped)
