"""Fused steps of runs side by side whose rules have other meta-parameters: row by row, in place."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from l2lopt.core.layout import Layout, Params
from l2lopt.core.phi_rows import row_of_state
from l2lopt.core.types import OptimiserState
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.phi_rows import PhiRows


class FusedOverPhi:
    """An `Update` in place for φ with a row axis: each row by a fused optimiser that keeps what it derives from its φ.

    A fused step is quicker row by row than the reference's operations on all rows at once.

    Args:
        make: () → fused form of the rule, for one row.
    """

    def __init__(self, make: Callable[[], FusedOptimiser]) -> None:
        self._make = make
        self._twins: list[FusedOptimiser] = []

    @torch.no_grad()
    def __call__(
        self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The updates [R, *batch, n] and the next state, in the memory of the given one.

        Args:
            phi: Meta-parameters, [R, ...] each.
            grads: Gradients, [R, *batch, n].
            state: State of the rows.
            params: Parameters θ, [R, *batch, n].
            loss: Losses, [R, *batch].
        """
        count = len(grads)
        self._twins += [self._make() for _ in range(count - len(self._twins))]
        state, changes, shared = _rows_apart(state, params), torch.empty_like(params), []
        for index, twin in enumerate(self._twins[:count]):
            before = row_of_state(state, params, index)
            rule = {name: value[index] for name, value in phi.items()}
            told = None if loss is None else loss[index]
            change, after = twin.update_with_(rule, grads[index], before, params[index], loss=told)
            changes[index] = change
            for name, value in after.coordinates.items():
                if value.data_ptr() != before.coordinates[name].data_ptr():
                    before.coordinates[name].copy_(value)
            shared.append(after.shared)
        # One number for all rows stays one: every row has made the same step.
        joined = {
            name: torch.stack([row[name] for row in shared]) if value.dim() else shared[0][name]
            for name, value in state.shared.items()
        }
        return changes, state._replace(shared=joined)


class FusedPhiRows(Optimiser):
    """`PhiRows` whose `update_` works in place, row by row; everything else is the reference's.

    Args:
        reference: Plain rows of rules.
        make: () → fused form of the rule, for one row.
    """

    def __init__(self, reference: PhiRows, make: Callable[[], FusedOptimiser]) -> None:
        super().__init__()
        self.reference, self._in_place = reference, FusedOverPhi(make)
        self.coordinatewise, self.groupings = reference.coordinatewise, reference.groupings
        self.knows_end, self.needs_loss = reference.knows_end, reference.needs_loss

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The reference's."""
        return self.reference.init(layout, batch, like=like, total_steps=total_steps)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The reference's."""
        return self.reference.update(grads, state, params, loss=loss)

    def update_(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The same in place: it overwrites the state that it is given."""
        return self._in_place(self.reference.rows, grads, state, params, loss=loss)

    def phi(self) -> Params:
        """The reference's."""
        return self.reference.phi()


def _rows_apart(state: OptimiserState, params: Tensor) -> OptimiserState:
    """The state with each row of a name's numbers in memory of its own without gaps, so that it can be overwritten."""
    places = Counter(value.data_ptr() for value in state.coordinates.values())
    own = {}
    for name, value in state.coordinates.items():
        axis = value.dim() - params.dim()
        rows = value.movedim(axis, 0)
        alone = rows.is_contiguous() and places[value.data_ptr()] == 1
        own[name] = value if alone else rows.clone(memory_format=torch.contiguous_format).movedim(0, axis)
    return state._replace(coordinates=own)
