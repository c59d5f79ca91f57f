"""The law of locality, tried on the numbers of a run: a slice's update by itself is that part of the whole update."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.types import OptimiserState, Update
from l2lopt.estimators.exchange import Playback
from l2lopt.estimators.record import copies_of
from l2lopt.estimators.window import Meeting

Check: TypeAlias = Callable[[Update, Params, Tensor, Meeting], None]
COORDINATES = 16
TOLERANCE = {torch.float64: 1e-6}
"""Largest difference, relative to the largest update; 1e-2 for others, in which fused steps round otherwise."""


def check_locality(state: OptimiserState, grads: Tensor, params: Tensor, loss: Tensor) -> Check | None:
    """Copies some coordinates before a step; afterwards the result sees whether they give the same by themselves.

    An update that divides by a tensor's mean of its own making, say, gives another number on a slice: replayed block by
    block it would give a wrong meta-gradient without a word.

    Args:
        state: Optimiser state before the step, of the whole vector.
        grads: Gradients, [*batch, n].
        params: Parameters θ, [*batch, n].
        loss: Losses, [*batch].

    Returns:
        A function of (update, φ, the whole update, what the coordinates met in) that raises a `UserError`; None where
        there are too few coordinates to tell.
    """
    count = grads.shape[-1]
    if count < 2:
        return None
    # Never all of them: a slice that is the whole vector would agree whatever the update does.
    some = min(COORDINATES, count - 1)
    # In whole numbers: those of float32 end at 2²⁴, and some devices know no float64.
    places = (torch.arange(some) * (count - 1) // max(some - 1, 1)).unique()
    there = places.to(grads.device)
    g, theta = grads.index_select(-1, there), params.index_select(-1, there)
    layout = state.layout.select(places)
    coordinates = {name: value.index_select(-1, there) for name, value in state.coordinates.items()}
    groups = {
        kind: {name: copies_of(layout, kind, value) for name, value in values.items()}
        for kind, values in state.groups.items()
    }
    shared = {name: value.clone() for name, value in state.shared.items()}

    def check(update: Update, phi: Params, change: Tensor, meeting: Meeting) -> None:
        wholes = {name: value.index_select(-1, there) for name, value in meeting.wholes.items()}
        alone = layout.meeting(Playback(meeting._replace(wholes=wholes), {}))
        found, _ = update(phi, g, OptimiserState(alone, coordinates, groups, shared), theta, loss=loss)
        wanted = change.index_select(-1, there)
        error, size = (found - wanted).abs().max(), change.abs().max()
        # False for NaN: an update that is not finite says nothing of locality, and `MetaGradient.finite` reports it.
        if bool(error > TOLERANCE.get(grads.dtype, 1e-2) * size):
            raise UserError(
                "estimator 'blockwise'",
                expected="an update that a slice of the coordinates gives by itself",
                found=f"one that differs by {float(error):.3g} where updates are as large as {float(size):.3g}",
                remedy="let coordinates meet in layout.tensors.mean, layout.whole and the like, or use 'backprop'",
            )

    return check
