"""Runs side by side whose rules differ: meta-parameters φ with a row axis in front, a run for each row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.types import Aux, Batch, Carry, Loss, OptimiserState, Update

Parts: TypeAlias = tuple[Params, dict[str, Params], Params]
"""Coordinates, groups and what is shared, of a state."""
Axes: TypeAlias = tuple[dict[str, int], dict[str, dict[str, int]], dict[str, int | None]]
"""The row axis of each tensor in these parts; None where all rows share it."""


def over_phi(update: Update) -> Update:
    """An optimiser's update with a φ for each row: rule k updates run k.

    Every tensor has the row axis first among its batch axes: φ [R, ...], gradients [R, *batch, n], coordinates
    [..., R, *batch, n]. What is shared has it first, or not at all where it is one number for all, like a step count.

    Args:
        update: Update of one rule. It works under `torch.func.vmap`: its Python does not look at numbers.

    Raises:
        UserError: For one that does, where the rows' update is called.
    """

    def rows(
        phi: Params, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        def one(phi: Params, grads: Tensor, parts: Parts, params: Tensor, loss: Tensor | None) -> tuple[Tensor, Parts]:
            change, after = update(phi, grads, OptimiserState(state.layout, *parts), params, loss=loss)
            return change, (after.coordinates, after.groups, after.shared)

        axes: Any = row_axes(state, grads)
        parts, axis = (state.coordinates, state.groups, state.shared), None if loss is None else 0
        mapped = vmap(one, in_dims=(0, 0, axes, 0, axis), out_dims=(0, axes))
        remedy = 'write torch.where for "if" and leave out .item(), or take the estimator "blockwise" or "backprop"'
        with _told("optimiser", "an update", remedy):
            change, after = mapped(phi, grads, parts, params, loss)
        return change, OptimiserState(state.layout, *after)

    return rows


def row_axes(state: OptimiserState, params: Tensor) -> Axes:
    """The row axis of each tensor of a state.

    Args:
        state: State of rows.
        params: θ or gradients of the same rows, [R, *batch, n].
    """
    coordinates = {name: value.dim() - params.dim() for name, value in state.coordinates.items()}
    groups = {
        kind: {name: value.dim() - params.dim() for name, value in own.items()} for kind, own in state.groups.items()
    }
    return coordinates, groups, {name: 0 if value.dim() else None for name, value in state.shared.items()}


def mapped_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.func.vmap` of a loss, whose model may do what vmap cannot.

    Raises:
        UserError: For a model that does, where the function is called.
    """
    remedy = 'set evaluation.rows and validation.rows to 1, and take the estimator "blockwise" or "backprop"; '
    remedy += "in a benchmark set rows to 1; of nn.LSTM and its kin: sequence.from_torch"

    def mapped(*trees: Any) -> Any:
        with _told("model", "a model", remedy):
            return vmap(function)(*trees)

    return mapped


_REFUSALS = (
    "vmap:",
    "Batching rule not implemented",
    "When vmap-ing",
    "data pointer of Tensor that doesn't have storage",
)
"""Parts of the messages in which `torch.func.vmap` refuses; the last is that of `tolist` and of `numpy`."""


@contextmanager
def _told(where: str, what: str, remedy: str) -> Iterator[None]:
    """Tells what `torch.func.vmap` refuses in the block as a `UserError`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not any(part in text for part in _REFUSALS):
            raise
        expected = f"{what} that torch.func.vmap runs, for runs side by side"
        raise UserError(where, expected=expected, found=text.splitlines()[0], remedy=remedy) from error


def losses_of_rows(loss: Loss) -> Loss:
    """The loss of θ [R, *batch, n] and its aux on one batch that all rows share and that is not copied for them."""

    def rows(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        found: tuple[Tensor, Aux] = mapped_rows(lambda theta, own: loss(theta, own, batch))(params, aux)
        return found

    return rows


def gradients_of_rows(loss: Loss) -> Callable[[Tensor, Aux, Batch], tuple[Tensor, Tensor, Aux]]:
    """(θ [R, *batch, n], aux, batch) → gradients, losses [R, *batch] and the next aux, all cut from the graph."""
    rows = losses_of_rows(loss)

    def gradients(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Tensor, Aux]:
        def summed(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Aux]]:
            values, after = rows(theta, aux, batch)
            return values.sum(), (values, after)

        # No row sees another: the gradient of the sum has each run's own.
        grads, (values, after) = torch.func.grad(summed, has_aux=True)(params)
        return grads, values, after

    return gradients


def stack_carries(carries: Sequence[Carry]) -> Carry:
    """Carries of single runs, or of equal batches of them, as rows; each row of a coordinate's state lies together."""

    def rows(*values: Tensor, axis: int) -> Tensor:
        # In memory the row axis comes first: an update in place then finds each row's numbers without gaps.
        return torch.stack(values).movedim(0, axis)

    first = carries[0]
    states = [carry.state for carry in carries]

    def all_of(part: Callable[[OptimiserState], Params]) -> Params:
        return {
            name: rows(*(part(state)[name] for state in states), axis=value.dim() - first.params.dim())
            for name, value in part(first.state).items()
        }

    coordinates = all_of(lambda state: state.coordinates)
    groups = {kind: all_of(lambda state, kind=kind: state.groups[kind]) for kind in first.state.groups}  # type: ignore[misc]  # a default argument in a lambda has no type
    shared = {name: torch.stack([state.shared[name] for state in states]) for name in first.state.shared}
    aux = {name: torch.stack([carry.aux[name] for carry in carries]) for name in first.aux}
    params = torch.stack([carry.params for carry in carries])
    return Carry(params, aux, OptimiserState(first.state.layout, coordinates, groups, shared))


def row_of(carry: Carry, index: int) -> Carry:
    """The carry of one row, a view."""
    return Carry(
        carry.params[index],
        {name: value[index] for name, value in carry.aux.items()},
        row_of_state(carry.state, carry.params, index),
    )


def row_of_state(state: OptimiserState, params: Tensor, index: int) -> OptimiserState:
    """The state of one row, a view.

    Args:
        state: State of rows.
        params: θ of the rows, [R, *batch, n].
        index: Number of the row.
    """
    of_coordinates, of_groups, of_shared = row_axes(state, params)
    shared = {name: value if of_shared[name] is None else value[index] for name, value in state.shared.items()}
    groups = {
        kind: {name: value.select(of_groups[kind][name], index) for name, value in own.items()}
        for kind, own in state.groups.items()
    }
    coordinates = {name: value.select(of_coordinates[name], index) for name, value in state.coordinates.items()}
    return OptimiserState(state.layout, coordinates, groups, shared)
