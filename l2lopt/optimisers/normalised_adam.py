"""Adam's direction at a size of its own: what the learned rule of normalised size is without its network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from l2lopt.core.errors import above_0, at_least_0
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, no_moments
from l2lopt.optimisers.inputs import RNNprop, StepInputs
from l2lopt.optimisers.rates import Rate, check_rate, per_row
from l2lopt.optimisers.rules import activity, root_mean_square


class NormalisedAdam(Optimiser):
    """The control of `rules.DirectionAndMagnitude`, which it equals where a network's outputs are 0.

    d = −m̂ / (√v̂ + ε) with m̂, v̂ as in `inputs.RNNprop`;
    u = η_t·(a·r·d / RMS(d) − λ θ), the root mean square taken over each tensor's coordinates, r = 1/√fan-in
    (`Layout.fan_ins`), η_t = η / (1 + t / horizon) with t = 0 at the first update, and a of `rules.activity`: 1 but for
    coordinates whose gradient is 0, which come to rest.

    Args:
        lr: η > 0, relative to the usual size of initial weights.
        horizon: Steps after which η_t has halved.
        weight_decay: λ ≥ 0.
        betas: Decay rates of the two running means, each in [0, 1).
        eps: ε > 0.
        by_fan_in: False puts r at 1.
    """

    groupings = ("tensors",)

    def __init__(
        self,
        lr: Rate = 0.1,
        horizon: float = 50.0,
        weight_decay: float = 0.02,
        betas: Sequence[float] = (0.9, 0.99),
        eps: float = 1e-8,
        by_fan_in: bool = True,
    ) -> None:
        super().__init__()
        self.lr, self.horizon, self.weight_decay, self.by_fan_in = check_rate(lr), horizon, weight_decay, by_fan_in
        above_0("normalised-adam", horizon=horizon)
        at_least_0("normalised-adam", weight_decay=weight_decay)
        self.direction = RNNprop(betas, eps)

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The state m = v = 0."""
        return no_moments(layout, batch, like)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """η_t·(a·r·d / RMS(d) − λ θ)."""
        step = state.shared["step"] + 1
        seen, memory = self.direction(
            # All count as finite: only learned rules leave coordinates out, and here a divergence is to be seen.
            StepInputs(grads, params, step, loss, state.layout, torch.ones_like(grads, dtype=torch.bool)),
            state.coordinates,
        )
        direction, _ = seen
        rate = per_row(self.lr, grads) / (1 + (step - 1).to(grads.dtype) / self.horizon)
        scale = state.layout.tensors.spread(root_mean_square(direction, state.layout, self.by_fan_in))
        update = -rate * (direction / scale * activity(grads, {"rnnprop": seen}) + self.weight_decay * params)
        return update, OptimiserState(state.layout, memory, {}, {"step": step})
