"""Recurrent cells, a file per family. `make(name, input_size, hidden_size, **options)` builds one by name.

`README.md` beside this file has the equations, the numbers of parameters, and the places where we differ from a paper.
"""

from collections.abc import Callable
from typing import Any

from l2lopt.cells.cell import Cell, CellState, check_sizes
from l2lopt.cells.coupled_gru import CoupledGRU
from l2lopt.cells.fastgrnn import FastGRNN, FastGRNNCore
from l2lopt.cells.gru import GRU, GRUCore
from l2lopt.cells.highway import Core, ihc, irc, no_irc
from l2lopt.cells.initial_values import init_as_published
from l2lopt.cells.leaky import Leaky
from l2lopt.cells.lstm import LSTM, LSTMCore
from l2lopt.cells.rnn import RNN
from l2lopt.cells.sru import SRU, SRUCore
from l2lopt.cells.stacked import Stacked
from l2lopt.cells.t_lstm import TLSTM, TLSTMCore
from l2lopt.core import registry
from l2lopt.core.errors import few
from l2lopt.core.registry import Choice


def stacked(input_size: int, hidden_size: int, cell: Choice = "lstm", layers: int = 2) -> Stacked:
    """`layers` cells of one choice on top of one another, each with `hidden_size` features."""
    few("stacked", layers=layers)
    sizes = [input_size, *[hidden_size] * layers]
    return Stacked([build(cell, n, hidden_size) for n in sizes[:layers]])


CORES: dict[str, type[Core]] = {
    "gru": GRUCore,
    "lstm": LSTMCore,
    "sru": SRUCore,
    "t-lstm": TLSTMCore,
    "fastgrnn": FastGRNNCore,
}
CELLS: dict[str, Callable[..., Cell]] = {
    "rnn": RNN,
    "gru": GRU,
    "lstm": LSTM,
    "sru": SRU,
    "t-lstm": TLSTM,
    "fastgrnn": FastGRNN,
    "leaky": Leaky,
    **{f"irc-{name}": irc(f"irc-{name}", core) for name, core in CORES.items()},
    **{f"ihc-{name}": ihc(f"ihc-{name}", core) for name, core in CORES.items()},
    **{f"no-irc-{name}": no_irc(f"no-irc-{name}", core) for name, core in CORES.items()},
    "stacked": stacked,
}
"""Cells that treat every column independently."""
PAIR_CELLS: dict[str, Callable[..., Cell]] = {"coupled-gru": CoupledGRU}
"""Cells over pairs of columns, x [N, 2, ...]; they cannot serve as optimiser cells, whose coordinates come alone."""


def make(name: str, input_size: int, hidden_size: int, **options: Any) -> Cell:
    """Builds the cell called `name`.

    Example:
        >>> import torch
        >>> from l2lopt import cells
        >>> cell = cells.make("lstm", input_size=3, hidden_size=5)
        >>> x = torch.randn(3, 7)                         # features first, then any number of columns
        >>> output, state = cell(x, cell.initial_state(x))
        >>> output.shape
        torch.Size([5, 7])

    Args:
        name: Name in `CELLS` or `PAIR_CELLS`.
        input_size: N, features of the input.
        hidden_size: M, features of the output.
        options: Options of that cell, such as `biases="two"` for an LSTM.

    Raises:
        UserError: For an unknown name or option, of which it lists the known ones, and for what makes no `Cell`.
    """
    check_sizes(input_size, hidden_size)
    table = CELLS | PAIR_CELLS
    made = registry.make(table, "cell", name, input_size=input_size, hidden_size=hidden_size, **options)
    cell: Cell = registry.checked_kind("cell", name, made, Cell)
    return cell


def build(choice: Choice, input_size: int, hidden_size: int, with_pairs: bool = False) -> Cell:
    """Builds the cell of a choice: a name in `CELLS`, or a mapping of its name and options.

    Args:
        choice: Name, or mapping.
        input_size: N.
        hidden_size: M.
        with_pairs: Whether the names in `PAIR_CELLS` are known too.
    """
    check_sizes(input_size, hidden_size)
    table = CELLS | PAIR_CELLS if with_pairs else CELLS
    made = registry.build(table, "cell", choice, input_size=input_size, hidden_size=hidden_size)
    cell: Cell = registry.checked_kind("cell", choice, made, Cell)
    return cell


__all__ = [
    "CELLS",
    "GRU",
    "LSTM",
    "PAIR_CELLS",
    "RNN",
    "SRU",
    "TLSTM",
    "Cell",
    "CellState",
    "CoupledGRU",
    "FastGRNN",
    "Leaky",
    "Stacked",
    "build",
    "init_as_published",
    "make",
    "stacked",
]
