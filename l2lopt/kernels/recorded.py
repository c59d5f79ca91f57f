"""What a window records of its steps beside gradients: their numbers, and the statistic with its adjoint.

All that the kernels read from `Window.shared` is read here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.types import Window
from l2lopt.optimisers.rules import DirectionAndMagnitude


class Statistic(NamedTuple):
    """A rule's statistic R at each step and how it acts backward, [T, *batch, tensors] each.

    Attributes:
        value: R.
        adjoint: c² times what `types.Replay` calls "pull", c² the fan-in or 1; None where R is a constant.
        weight: c² times what it calls "own", or None where R is a constant.
    """

    value: Tensor
    adjoint: Tensor | None
    weight: Tensor | None


def numbers(window: Window) -> list[int]:
    """Each step's number, from 1 at an optimiser's first update."""
    return [int(shared["step"]) + 1 for shared in (window.state.shared, *window.shared[:-1])]


def statistic(rule: DirectionAndMagnitude, window: Window) -> Statistic:
    """The statistic that was measured on the whole vector."""
    value = _stacked(window, "statistic")
    if "pull" not in window.shared[0]:
        return Statistic(value, None, None)
    squares = torch.tensor(window.state.layout.fan_ins if rule.by_fan_in else 1).to(value)
    return Statistic(value, _stacked(window, "pull") * squares, _stacked(window, "own") * squares)


def statistic_adjoint(
    rule: DirectionAndMagnitude, scales: Sequence[float], directions: Tensor, window: Window
) -> Tensor:
    """∂(meta-loss)/∂R at each step by way of the block's updates u = S_t (d / R − λθ): −S_t Σ a d / R² over a tensor.

    The adjoint of θ needs no network where θ is none of its inputs: a_t = (q_t + a_{t+1}) (1 − S_t λ), with the source
    q_t at the θ after step t. A coordinate whose gradient is not finite is skipped: its adjoint passes unchanged.

    Args:
        rule: The rule of the updates.
        scales: S_t of each step.
        directions: d, [T, *batch, B], overwritten.
        window: The block's.

    Returns:
        [T, *batch, tensors] in float64.
    """
    finite = window.grads.square().isfinite()
    a = torch.zeros_like(window.params)
    for t in reversed(range(len(scales))):
        a = a + window.sources[t]
        scaled = scales[t] * a.where(finite[t], 0.0)
        directions[t].mul_(-scaled)
        a = a - rule.weight_decay * scaled
    sums = [part.sum(-1, dtype=torch.float64) for part in window.state.layout.split(directions)]
    return torch.stack(sums, -1) / _stacked(window, "statistic").double().square()


def _stacked(window: Window, name: str) -> Tensor:
    return torch.stack([shared[name] for shared in window.shared])
