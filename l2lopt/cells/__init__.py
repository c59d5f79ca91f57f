"""Recurrent cells, one file each. `make(name, input_size, hidden_size, **options)` builds one by name."""

from collections.abc import Callable
from typing import Any

from l2lopt import tables
from l2lopt.cells.cell import Cell, CellState
from l2lopt.cells.lstm import LSTM
from l2lopt.cells.stacked import Stacked
from l2lopt.tables import Choice


def stacked(input_size: int, hidden_size: int, cell: Choice = "lstm", layers: int = 2) -> Stacked:
    """`layers` cells of one choice on top of one another, each of `hidden_size`."""
    sizes = [input_size, *[hidden_size] * layers]
    return Stacked([build(cell, n, hidden_size) for n in sizes[:layers]])


CELLS: dict[str, Callable[..., Cell]] = {"lstm": LSTM, "stacked": stacked}


def make(name: str, input_size: int, hidden_size: int, **options: Any) -> Cell:
    """The cell called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    return build({"name": name, **options}, input_size, hidden_size)


def build(choice: Choice, input_size: int, hidden_size: int) -> Cell:
    """The cell of a choice: a name, or a mapping of name and options."""
    cell: Cell = tables.build(CELLS, "cell", choice, input_size=input_size, hidden_size=hidden_size)
    return cell


__all__ = ["CELLS", "LSTM", "Cell", "CellState", "Stacked", "build", "make", "stacked"]
