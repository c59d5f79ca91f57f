"""Backpropagation through a recorded window of a block of coordinates, on autograd's tape."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from l2lopt.core.groupings import SlicedGrouping
from l2lopt.core.layout import Params
from l2lopt.core.types import OptimiserState, Update
from l2lopt.estimators.exchange import GroupsPlayback, Playback
from l2lopt.estimators.loss_and_gradient import gradient_of
from l2lopt.estimators.window import AdjointOfMean, BlockAdjoints, MeanAdjoint, Replay, Window

Adjoints = Mapping[str, MeanAdjoint]


def autograd_replay(update: Update) -> Replay:
    """The replay of any update by autograd: about 0.75 KB per coordinate of the block and step for an LSTM of 20."""

    def replay(phi: Params, window: Window, adjoints: Adjoints) -> BlockAdjoints:
        leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
        total, exchanges = _moved(update, leaves, window, adjoints, "controls")
        controls = _by_step(exchanges)
        found = gradient_of(total, leaves | {f"{t} {key}": leaf for (t, key), (leaf, _) in controls.items()})
        counts = {key: value.shape[-1] for key, value in window.meetings[0].controls.items()}
        gathered = {
            key: torch.stack(
                [
                    # Each coordinate had a copy of its group's output: the output's adjoint is the sum over them.
                    grouping.gathered(found[f"{t} {key}"], counts[key])
                    for (t, other), (_, grouping) in controls.items()
                    if other == key
                ]
            )
            for key in counts
        }
        return BlockAdjoints({name: found[name] for name in leaves}, gathered)

    return replay


def taped_mean_adjoint(update: Update) -> AdjointOfMean:
    """The adjoint of a recorded mean through a block's coordinates, by autograd, for any update."""

    def mean_adjoint(phi: Params, window: Window, adjoints: Adjoints, key: str) -> Tensor:
        # φ needs a gradient although nobody asks for it: a mean is linked only to values that depend on something.
        needed = {name: value.detach().requires_grad_() for name, value in phi.items()}
        total, exchanges = _moved(update, needed, window, adjoints, key)
        leaves = {str(t): exchange.leaves[key] for t, exchange in enumerate(exchanges)}
        found = gradient_of(total, {t: leaf for t, (leaf, _) in leaves.items()})
        count = window.meetings[0].means[key].shape[-1]
        return torch.stack([grouping.gathered(found[t], count) for t, (_, grouping) in leaves.items()])

    return mean_adjoint


def through_the_networks(update: Update, phi: Params, window: Window, adjoints: Params) -> Params:
    """Backpropagation through the networks per group, once, from the adjoints of their outputs.

    Args:
        update: Update of the optimiser.
        phi: Meta-parameters φ.
        window: The recorded window, all groups and no coordinates.
        adjoints: Adjoints of the controls, "grouping.name" → [T, ..., *batch, count].

    Returns:
        The part of the meta-gradient that goes through the networks' outputs.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
    state, total = window.state, torch.zeros(())
    layout = state.layout
    with torch.enable_grad():
        for t, (grads, loss, meeting) in enumerate(zip(window.grads, window.losses, window.meetings, strict=True)):
            exchange = GroupsPlayback(meeting)
            state = state._replace(layout=layout.meeting(exchange))
            _, state = update(leaves, grads, state, window.params, loss=loss)
            for key, output in exchange.outputs.items():
                # Adjoints times outputs: the gradient of this sum is the adjoint of φ for all steps in one pass.
                total = total + (output * adjoints[key][t].to(output.dtype)).sum()
    return gradient_of(total, leaves)


@torch.enable_grad()
def _moved(update: Update, phi: Params, window: Window, adjoints: Adjoints, leaf: str) -> tuple[Tensor, list[Playback]]:
    """Σ_t q_t θ_{t+1} over a block's steps, whose gradients are those of the meta-loss, and each step's exchange."""
    params, total = window.params, torch.zeros(())
    state, exchanges = window.state, []
    layout = state.layout
    rows = zip(window.grads, window.sources, window.losses, window.meetings, strict=True)
    for t, (grads, source, loss, meeting) in enumerate(rows):
        now = {key: MeanAdjoint(value.total[t], value.self_weight) for key, value in adjoints.items()}
        exchange = Playback(meeting, now, leaf)
        exchanges.append(exchange)
        change, state = update(phi, grads, state._replace(layout=layout.meeting(exchange)), params, loss=loss)
        params = params + change
        # The sources are constants: this linear form has the gradient of the meta-loss, though not its value.
        total = total + (source * params).sum()
    return total, exchanges


def _by_step(exchanges: Sequence[Playback]) -> dict[tuple[int, str], tuple[Tensor, SlicedGrouping]]:
    """(step, "grouping.name") → the leaf and its grouping."""
    return {(t, key): leaf for t, exchange in enumerate(exchanges) for key, leaf in exchange.leaves.items()}


def emptied(window: Window, groups: dict[str, Params]) -> Window:
    """The window with all groups and no coordinates.

    Args:
        window: A recorded window of any of the whole vector's coordinates.
        groups: State per group of the whole vector before the first step.
    """
    state = OptimiserState(
        window.state.layout.emptied(),
        {name: value[..., :0] for name, value in window.state.coordinates.items()},
        groups,
        window.state.shared,
    )
    nothing = window.grads[..., :0]
    return window._replace(state=state, params=window.params[..., :0], grads=nothing, sources=nothing, updates=None)
