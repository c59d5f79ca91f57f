"""Recurrent cells, one file each. `make(name, input_size, hidden_size, **options)` builds one by name."""

from typing import Any

from l2lopt import tables
from l2lopt.cells.cell import Cell, CellState
from l2lopt.cells.lstm import LSTM

CELLS: dict[str, type[Cell]] = {"lstm": LSTM}


def make(name: str, input_size: int, hidden_size: int, **options: Any) -> Cell:
    """The cell called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    cell: Cell = tables.make(CELLS, "cell", name, input_size=input_size, hidden_size=hidden_size, **options)
    return cell


__all__ = ["CELLS", "LSTM", "Cell", "CellState", "make"]
