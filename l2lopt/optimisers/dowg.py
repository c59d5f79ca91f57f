"""DoWG: gradient descent whose rate is the distance from the start over the gradients weighted by that distance."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from l2lopt.core.errors import above_0
from l2lopt.core.groupings import Controls
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, zero_step, zeros
from l2lopt.optimisers.rates import Rate, check_rate, per_row


class DoWG(Optimiser):
    """Distance over weighted gradients, which has no rate to tune. Khaled, Mishchenko and Jin 2023, arXiv:2305.16284.

    r̄_t = max(r̄_{t−1}, ‖θ_t − θ_0‖), v_t = v_{t−1} + r̄_t² ‖g_t‖², u = −η (r̄_t² / √v_t) g_t, with r̄_{−1} = r_ε and
    v_{−1} = 0. So the update is as large whatever the loss is multiplied by. As long as all gradients are 0, it is 0.

    The norms are over all coordinates of the vector. `LearnedOptimizer` makes a vector for the parameters of a group
    that have one dtype, one device and a gradient: each such vector then has a distance and a rate of its own, and so
    has each process of `ZeroRedundancyOptimizer`. Of parameters that are sharded, the norms are over the whole ones.

    The authors' program adds 10⁻⁴ to √v_t, which makes the first steps smaller where gradients are small; the paper
    does not, and nor does this.

    θ_0 is what the first update meets: 4 bytes of state a parameter in float32. Stored in bfloat16 it is rounded, and
    the distance of float32 parameters from it is some 0.001 ‖θ_0‖ at least.

    Args:
        lr: η > 0; 1 is the authors' rule.
        initial_distance: r_ε > 0. The default is that of the authors' program, in which r̄² begins at 10⁻⁴.

    Raises:
        UserError: For a value out of its range.

    Example:
        >>> import torch, l2lopt
        >>> x = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
        >>> optimizer = l2lopt.LearnedOptimizer([x], "dowg")
        >>> for _ in range(200):
        ...     optimizer.zero_grad()
        ...     x.square().sum().backward()
        ...     _ = optimizer.step()
        >>> bool(x.norm() < 0.1)
        True
    """

    groupings = ("tensors",)
    # Blocks would have norms of their own.
    accepts_low_precision_state = True

    def __init__(self, lr: Rate = 1.0, initial_distance: float = 0.01) -> None:
        super().__init__()
        self.lr, self.initial_distance = check_rate(lr), initial_distance
        above_0("dowg", initial_distance=initial_distance)

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The state r̄² = r_ε² and v = 0; the first update puts θ_0 there."""
        start = zeros(layout, batch, like)
        # Squares throughout: √ has no finite derivative at the distance 0 of the start.
        squares = {"square_distance": self.initial_distance**2, "weighted_squares": 0.0}
        # In bfloat16 a sum would soon stop growing.
        wide = torch.promote_types(start.dtype, torch.float32)
        shared = {name: start.new_full((*batch,), value, dtype=wide) for name, value in squares.items()}
        return OptimiserState(layout, {"start": start}, {}, {"step": zero_step(start), **shared})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η (r̄_t² / √v_t) g_t."""
        tensors, shared = state.layout.tensors, state.shared
        start = torch.where(shared["step"] == 0, params, state.coordinates["start"].to(params.dtype))
        before = {name: shared[name].unsqueeze(-1) for name in ("square_distance", "weighted_squares")}

        def compute() -> Controls:
            moved = square_norm("moved", params - start, state.layout)
            distance = torch.maximum(before["square_distance"], moved)
            weighted = before["weighted_squares"] + distance * square_norm("gradient", grads, state.layout)
            none = weighted == 0  # not `> 0`, which would hide a divergence, as a rate of 0 for an infinite sum would
            rate = torch.where(none, 0.0, distance / torch.where(none, 1.0, weighted).sqrt())
            rate = torch.where(weighted.isinf(), torch.nan, rate).to(grads.dtype)
            after = {"square_distance": distance, "weighted_squares": weighted}
            return rate.expand(*rate.shape[:-1], tensors.count), after

        # Controls, as a slice of the coordinates knows neither norm: it gets the rate that the whole vector has found.
        rates, after = tensors.controls("rate", compute, before)
        update = -tensors.spread(per_row(self.lr, rates) * rates) * grads
        squares = {name: value.squeeze(-1) for name, value in after.items()}
        coordinates = {"start": start.to(state.coordinates["start"].dtype)}
        return update, OptimiserState(state.layout, coordinates, {}, {**shared, "step": shared["step"] + 1, **squares})


def square_norm(name: str, values: Tensor, layout: Layout) -> Tensor:
    """The sum of squares over all coordinates of the whole tensors: [*batch, n] to [*batch, 1].

    Args:
        name: Name under which the means over tensors are recorded.
        values: Numbers per coordinate.
        layout: Layout of the coordinates.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    means = layout.tensors.mean(name, values.to(wide).square())
    sizes = layout.tensors.each([prod(shape) for shape in layout.whole_shapes], means)
    return (means * sizes).sum(-1, keepdim=True)
