"""What the kernels read of a window's record beside gradients: the steps' numbers, and a rule's statistic.

The statistic R of a rule is the root of the mean square of a tensor's directions, times the root of its fan-in where
the rule asks for that. The record has the mean square; adjoints are those of R, on both ways.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Layout, Params
from l2lopt.estimators.window import MeanAdjoint, Window
from l2lopt.kernels.folding import growth_of, step_size
from l2lopt.optimisers import Coordinatewise, Optimiser
from l2lopt.optimisers.inputs import Parameter
from l2lopt.optimisers.rules import DIRECTION, DirectionAndMagnitude, root_of_mean

MEAN = f"tensors.{DIRECTION}"
"""Name of the mean square of each tensor's directions in a record."""


class Statistic(NamedTuple):
    """A rule's statistic R at each step and how it acts backward, [T, *batch, tensors] each.

    Attributes:
        value: R.
        adjoint: c² times the adjoint that each coordinate takes, c² the fan-in or 1; None where R is a constant.
        weight: c² times the weight of a coordinate's part in it, see `MeanAdjoint`; None where R is a constant.
    """

    value: Tensor
    adjoint: Tensor | None
    weight: Tensor | None


def numbers(window: Window) -> list[int]:
    """Each step's number, from 1 at an optimiser's first update."""
    first = int(window.state.shared["step"])
    return [first + t for t in range(1, len(window.grads) + 1)]


def root_of(squares: Tensor, layout: Layout, by_fan_in: bool) -> Tensor:
    """R of the mean squares [..., tensors], as `rules.root_mean_square` has it."""
    return root_of_mean(squares, squares.new_tensor(layout.fan_ins) if by_fan_in else None)


def statistic(rule: DirectionAndMagnitude, window: Window, adjoints: Mapping[str, MeanAdjoint]) -> Statistic:
    """The statistic that was measured on the whole vector, and its adjoint."""
    value = _measured(rule, window)
    if MEAN not in adjoints:
        return Statistic(value, None, None)
    total, weight = (part.to(value.dtype) for part in adjoints[MEAN])
    squares = torch.tensor(window.state.layout.fan_ins if rule.by_fan_in else 1).to(value)
    return Statistic(value, total * squares, weight.expand_as(total) * squares)


def spread(values: Tensor, layout: Layout) -> Tensor:
    """A number per tensor, [..., tensors], to each of a block's coordinates, [..., B]."""
    sizes = torch.tensor(layout.sizes, device=values.device)
    return values.repeat_interleave(sizes, dim=-1, output_size=layout.size)


@torch.no_grad()
def statistic_adjoint(optimiser: Coordinatewise, phi: Params, window: Window) -> Tensor:
    """∂(meta-loss)/∂R at each step by way of the block's updates u = S_t (d / R − λθ): −S_t Σ a d / R² over a tensor.

    No network is run. The recorded update has the direction in it, S_t d / R = u + S_t λθ. The adjoint of the update
    does not depend on the network where θ is none of its inputs: it is a = q_t + a_{t+1}, and a_t = (1 − S_t λ) a that
    of θ before step t, with the source q_t at the θ after it. A coordinate whose gradient is not finite is skipped: its
    adjoint passes unchanged.

    Cost: about ten numbers read or written per coordinate and step; a hundredth of a replay's time.

    Args:
        optimiser: An optimiser that `has_statistic_adjoint` lets pass.
        phi: Parameters of the optimiser.
        window: The block's, with its updates, which are overwritten.

    Returns:
        [T, *batch, tensors] in float64.
    """
    rule, scaled = optimiser.rule, window.updates
    assert isinstance(rule, DirectionAndMagnitude)
    assert scaled is not None
    growth = growth_of(phi["rule.log_scale"])
    decays = [step_size(rule, growth, step) * rule.weight_decay for step in numbers(window)]
    if rule.weight_decay:
        theta = window.params
        for update, decay in zip(scaled, decays, strict=True):
            after = theta + update
            update.add_(theta, alpha=decay)
            theta = after
    # Of the square, as in the update: a gradient whose square overflows was skipped, too.
    finite = window.grads.square().isfinite()
    a = torch.zeros_like(window.params)
    for t in reversed(range(len(scaled))):
        a = a + window.sources[t]
        acting = a.where(finite[t], 0.0)
        scaled[t].mul_(acting)
        a.sub_(acting, alpha=decays[t])
    # The products have both signs and a tensor has many: a float32 sum would lose digits.
    sums = [part.sum(-1, dtype=torch.float64) for part in window.state.layout.split(scaled)]
    return -torch.stack(sums, -1) / _measured(rule, window).double()


def has_statistic_adjoint(optimiser: Optimiser) -> bool:
    """Whether the adjoint of the rule's statistic can be computed: there is one, and the network does not see θ."""
    if not isinstance(optimiser, Coordinatewise) or not optimiser.rule.statistic:
        return False
    return not any(isinstance(item, Parameter) for item in optimiser.inputs.values())


def _measured(rule: DirectionAndMagnitude, window: Window) -> Tensor:
    """R of each step, [T, *batch, tensors]."""
    squares = torch.stack([meeting.means[MEAN] for meeting in window.meetings])
    return root_of(squares, window.state.layout, rule.by_fan_in).to(window.params.dtype)
