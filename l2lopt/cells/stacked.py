"""Cells on top of one another, as one cell: the two-layer optimiser of Andrychowicz et al. 2016 by composition."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from l2lopt.cells.cell import Cell, CellState
from l2lopt.core.errors import UserError


class Stacked(Cell):
    """Layer k's output is layer k + 1's input; the last one's is the stack's. The state's names are "<k>.<name>".

    Args:
        layers: Cells from the lowest to the highest; each reads the output of the one before, so sizes must match.
    """

    def __init__(self, layers: Sequence[Cell]) -> None:
        if not layers:
            raise UserError("stacked: layers", expected="at least 1", found="none", remedy="give a cell")
        state = {f"{index}.{name}": n for index, cell in enumerate(layers) for name, n in cell.state_sizes.items()}
        super().__init__(layers[0].input_size, layers[-1].hidden_size, state)
        for below, above in pairwise(layers):
            if below.hidden_size != above.input_size:
                found, remedy = str(above.input_size), "make the sizes follow one another"
                raise UserError("stacked: input_size", expected=str(below.hidden_size), found=found, remedy=remedy)
        self.layers = nn.ModuleList(layers)

    @property
    def recurrent_weights(self) -> tuple[str, ...]:
        """Those of all layers."""
        return tuple(f"layers.{k}.{name}" for k, cell in enumerate(self.cells()) for name in cell.recurrent_weights)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step through all layers."""
        self.check(x, state)
        after: CellState = {}
        for index, layer in enumerate(self.cells()):
            # The dot keeps layer 1 apart from layer 10.
            own = {name.removeprefix(f"{index}."): v for name, v in state.items() if name.startswith(f"{index}.")}
            x, own = layer(x, own)
            after |= {f"{index}.{name}": value for name, value in own.items()}
        return x, after

    def cells(self) -> list[Cell]:
        """The layers, the lowest first."""
        return list(self.layers)  # type: ignore[arg-type]  # a ModuleList forgets what its modules are
