"""Runs side by side whose rules have other meta-parameters: fused steps row by row, and compiled ones."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.layout import Layout, Params
from l2lopt.core.phi_rows import gradients_of_rows, over_phi, row_of_state
from l2lopt.core.types import Batch, Carry, Loss, OptimiserState, Update
from l2lopt.estimators.window import RowStep
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.kernels.graph import CompiledFunction, NotCompiledError, in_order
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.phi_rows import PhiRows

_log = logging.getLogger("l2lopt")


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


class RowSteps:
    """Makes inner steps of runs with a φ each, eager or compiled; compiled ones are kept for the next runs.

    Args:
        update: Update of one rule.
        fused: The same in place for φ with a row axis, which a compiled step does not include; None for rules that the
            compiler does best with.
    """

    KEPT = 32
    """Number of compiled steps that are kept."""

    def __init__(self, update: Update, fused: Update | None = None) -> None:
        self._update, self._fused = fused or over_phi(update), fused
        self._compiled: dict[tuple[Any, ...], RowStep] = {}

    def __call__(self, loss: Loss, carry: Carry, batch: Batch, phi: Params, compiled: bool) -> RowStep:
        """Steps of runs like these.

        Args:
            loss: Loss of one run.
            carry: Carry of the rows before a first step, which stays as it is.
            batch: Batch of that step.
            phi: Meta-parameters of the rows.
            compiled: Whether to compile them; they stay eager, and a line says so, where that cannot be done.
        """
        if not compiled:
            return self._eager(loss)
        key = (loss, carry.params.shape, carry.params.dtype, _shapes(batch))
        if key not in self._compiled:
            if len(self._compiled) == self.KEPT:
                del self._compiled[next(iter(self._compiled))]
            try:
                self._compiled[key] = self._for_these(batch, self._compile(loss, carry, batch, phi), self._eager(loss))
            except NotCompiledError as reason:
                _log.warning("the inner steps of perturbed rules stay eager: %s", reason)
                self._compiled[key] = self._eager(loss)
        return self._compiled[key]

    def _for_these(self, batch: Batch, compiled: RowStep, eager: RowStep) -> RowStep:
        """Compiled steps for batches like this one, eager ones for others, such as windows of another length."""
        shapes = _shapes(batch)

        def step(carry: Carry, batch: Batch, phi: Params) -> tuple[Tensor, Carry]:
            return (compiled if _shapes(batch) == shapes else eager)(carry, batch, phi)

        return step

    def _eager(self, loss: Loss) -> RowStep:
        gradients = gradients_of_rows(loss)

        def step(carry: Carry, batch: Batch, phi: Params) -> tuple[Tensor, Carry]:
            grads, losses, aux = gradients(carry.params, carry.aux, batch)
            with torch.no_grad():
                change, state = self._update(phi, grads, carry.state, carry.params, loss=losses)
                return losses, Carry(carry.params + change, aux, state)

        return step

    def _compile(self, loss: Loss, carry: Carry, batch: Batch, phi: Params) -> RowStep:
        gradients = gradients_of_rows(loss)
        if self._fused is not None:
            derivative = CompiledFunction(gradients, carry.params, carry.aux, batch)

            def with_fused_update(carry: Carry, batch: Batch, phi: Params) -> tuple[Tensor, Carry]:
                grads, losses, aux = derivative(carry.params, carry.aux, batch)
                change, state = self._update(phi, grads, carry.state, carry.params, loss=losses)
                return losses, Carry(carry.params + change, aux, state)

            return with_fused_update

        def whole(carry: Carry, batch: Batch, phi: Params) -> tuple[Tensor, Carry]:
            grads, losses, aux = gradients(carry.params, carry.aux, batch)
            change, state = self._update(phi, grads, carry.state, carry.params, loss=losses)
            return losses, in_order(Carry(carry.params + change, aux, state), carry)

        found: RowStep = CompiledFunction(whole, carry, batch, phi)
        return found


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

    def update_with(
        self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The reference's."""
        return self.reference.update_with(phi, grads, state, params, loss=loss)


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


def _shapes(batch: Batch) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in pytree.tree_leaves(batch))
