"""Schedules as functions of the step, and any optimiser under one."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, at_least_0
from l2lopt.core.layout import Layout
from l2lopt.core.precision import double
from l2lopt.core.settings import Schedule as Schedule
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, zero_step
from l2lopt.optimisers.rates import Rate, check_rate, per_row

STABLE = 0.8
"""Share of the way after which "warm-up-stable-decay" begins to fall."""
HALVED = 100
"""Updates after which "inverse" has fallen to a half."""
UNKNOWN = 10
"""Updates of the warm-up of a run whose end is not known."""


def warm_up_then(shape: Schedule, step: Tensor, warm_up: int, total: int | None, final: float = 0.0) -> Tensor:
    """The multiplier at update `step` = 0, 1, …: linear to 1 over `warm_up` updates, then down to `final` at `total`.

    min(1, (step + 1) / warm_up) during the warm-up. Then, with p = (step − warm_up) / (total − warm_up) in [0, 1]:

    - "constant": 1;
    - "linear", "cosine", "warm-up-stable-decay": final + (1 − final)·c with c = 1 − p, ½(1 + cos πp), and
      min(1, (1 − p) / (1 − `STABLE`)) (Hu et al. 2024, arXiv:2404.06395);
    - "exponential": final^p;
    - "inverse": 1 / (1 + (step − warm_up) / `HALVED`), at least `final`, whatever `total` is: for runs whose end nobody
      knows.

    1 throughout where `total` is None, but for "inverse". In [0, 1], float64.
    """
    # In float64, so that rates of every dtype are rounded from one multiplier.
    # The schedule's numbers are tensors as well, so inputs of a compiled step, which serves schedules of any length.
    step, begin = double(step), torch.tensor(float(warm_up), dtype=torch.float64)
    rise = ((step + 1) / begin.clamp(min=1.0)).clamp(max=1.0)
    if shape == "inverse":
        return torch.where(step < begin, rise, inverse_decay(step - begin, HALVED).clamp(min=final))
    if total is None or shape == "constant":
        return rise
    # `total` may equal `warm_up`, and then there is no way from one to the other: the end is there at once.
    end, length = (torch.tensor(float(n), dtype=torch.float64) for n in (total, max(total - warm_up, 1)))
    progress = torch.where(step < end, ((step - begin) / length).clamp(0.0, 1.0), 1.0)
    return torch.where(step < begin, rise, fall(shape, progress, final))


def fall(shape: Schedule, progress: Tensor, final: float = 0.0) -> Tensor:
    """The multiplier at p = `progress` in [0, 1] of the way from the end of the warm-up to the end of the run.

    Args:
        shape: Any but "inverse", which knows no end.
        progress: p, float64.
        final: Multiplier at p = 1.
    """
    if shape == "exponential":
        return final**progress
    falls = {
        "constant": torch.ones_like(progress),
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + torch.cos(math.pi * progress)),
        "warm-up-stable-decay": ((1 - progress) / (1 - STABLE)).clamp(max=1.0),
    }
    return final + (1 - final) * falls[shape]


def to_the_end(shape: Schedule, step: Tensor, total: Tensor, share: float) -> Tensor:
    """The multiplier at update `step` = 0, 1, … of a run of `total` updates, or of one whose end nobody knows.

    Linear to 1 over the first `share` of the updates, then `fall(shape, …)` to 0 at the end. Where `total` is 0 it is
    unknown: linear to 1 over `UNKNOWN` updates, then `inverse_decay`. All of it without waiting for a GPU.

    Args:
        shape: Fall after the warm-up, any but "exponential" and "inverse".
        step: Number of updates so far.
        total: Number of updates in all, integer, of any shape; 0 where it is not known.
        share: Share of the warm-up, in [0, 1).
    """
    step, total = double(step), double(total)
    known = total > 0
    warm_up = torch.where(known, (share * total).floor(), float(UNKNOWN)).clamp(min=1.0)
    # A run of one update is all warm-up, and the end comes at once.
    progress = torch.where(step < total, ((step - warm_up) / (total - warm_up).clamp(min=1.0)).clamp(0.0, 1.0), 1.0)
    after = torch.where(known, fall(shape, progress), inverse_decay((step - warm_up).clamp(min=0.0), HALVED))
    return torch.where(step < warm_up, (step + 1) / warm_up, after)


def inverse_decay(step: Tensor, horizon: float) -> Tensor:
    """1 / (1 + step / horizon): a half after `horizon` updates, with no end in sight."""
    return 1 / (1 + step / horizon)


def warm_up_cosine(step: Tensor, warm_up: int, total: int | None) -> Tensor:
    """`warm_up_then` along a half cosine to 0."""
    return warm_up_then("cosine", step, warm_up, total)


def multiplier(shape: Schedule, step: int, warm_up: int, total: int | None, final: float = 0.0) -> float:
    """`warm_up_then` for one step, as a number: what a training loop multiplies its rate by."""
    return float(warm_up_then(shape, torch.tensor(step), warm_up, total, final))


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Gives every parameter group of a `torch.optim.Optimizer` its rate, in the order of the groups."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_mode(optimizer: torch.optim.Optimizer, mode: Literal["train", "eval"]) -> None:
    """Calls `train` or `eval` of an optimiser that has them: schedule-free ones evaluate elsewhere than they step."""
    switch = getattr(optimizer, mode, None)
    if callable(switch):
        switch()


class Scheduled(Optimiser):
    """Any optimiser whose update is multiplied by a schedule: u_t = η s_t · (inner update).

    t = 0, 1, … counts the updates and s_t is `warm_up_then(shape, t, warm_up, total, final)`. The whole update is
    multiplied, and with it the weight decay that the inner optimiser adds to its update, just as the schedulers of
    `torch.optim` act on decoupled decay. The inner optimiser's state never sees the schedule: running means go on as if
    there were none.

    Equal to the inner optimiser with its rate multiplied by η s_t, up to one rounding, wherever the update is
    proportional to the rate.

    Args:
        optimiser: Inner optimiser, learned or hand-designed.
        shape: Fall of s after the warm-up, see `warm_up_then`.
        warm_up: Updates over which s rises linearly to 1.
        total: Update at which s arrives at `final`; None keeps s at 1 after the warm-up. "inverse" falls without it.
        final: Last value of s, in [0, 1]; above 0 for "exponential".
        lr: η > 0; or [*batch], one for each row.

    Raises:
        UserError: For a value out of its range.

    Example:
        >>> from l2lopt.optimisers import SGD
        >>> rule = Scheduled(SGD(0.1), "linear", total=2)
        >>> theta = torch.zeros(1)
        >>> state = rule.init(Layout(("theta",), ((1,),)), like=theta)
        >>> for _ in range(2):
        ...     update, state = rule.update(torch.ones(1), state, theta)
        ...     print(round(float(update), 3))
        -0.1
        -0.05
    """

    @checks_words
    def __init__(
        self,
        optimiser: Optimiser,
        shape: Schedule = "cosine",
        warm_up: int = 0,
        total: int | None = None,
        final: float = 0.0,
        lr: Rate = 1.0,
    ) -> None:
        super().__init__()
        check_schedule("scheduled", shape, warm_up, total, final)
        self.lr = check_rate(lr)
        self.optimiser, self.shape, self.warm_up, self.total, self.final = optimiser, shape, warm_up, total, final
        self.coordinatewise, self.accepts_low_precision_state = (
            optimiser.coordinatewise,
            optimiser.accepts_low_precision_state,
        )
        self.groupings, self.needs_loss = optimiser.groupings, optimiser.needs_loss
        self.knows_end = optimiser.knows_end

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The inner optimiser's state, and "step", the count of updates so far, where it does not count them itself."""
        state = self.optimiser.init(layout, batch, like=like, total_steps=total_steps)
        count = zero_step(torch.zeros(()) if like is None else like)
        return state._replace(shared={"step": count, **state.shared})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """η s_t · u_t."""
        return self._scaled(self.optimiser.update, grads, state, params, loss)

    def update_(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """η s_t · u_t by the inner optimiser's `update_`."""
        return self._scaled(self.optimiser.update_, grads, state, params, loss)

    def _scaled(
        self,
        update: Callable[..., tuple[Tensor, OptimiserState]],
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None,
    ) -> tuple[Tensor, OptimiserState]:
        """The inner optimiser's update times η s_t, and its next state with the count."""
        # Before the inner update, which may overwrite the state.
        step, before = state.shared["step"], state.shared
        factor = warm_up_then(self.shape, step, self.warm_up, self.total, self.final).to(grads.dtype)
        rate, count = per_row(self.lr, grads) * factor, step + 1
        change, after = update(grads, state, params, loss=loss)
        # An inner optimiser without a step hands ours on or drops it, one with a step has counted already: the names
        # of before come first, so that the state keeps its order, which is what a checkpoint goes by.
        return rate * change, after._replace(shared={**before, **after.shared, "step": count})


def check_schedule(where: str, shape: Schedule, warm_up: int, total: int | None, final: float = 0.0) -> None:
    """Refuses numbers that are no schedule.

    Args:
        where: Subject of the error.
        shape: Fall after the warm-up.
        warm_up: Updates of the warm-up, at least 0.
        total: Update at which the fall ends, at least `warm_up`, or None.
        final: Last multiplier, in [0, 1]; above 0 for "exponential".

    Raises:
        UserError: For a value out of its range.
    """
    at_least_0(where, warm_up=warm_up)
    if total is not None and total < warm_up:
        remedy = "shorten the warm-up"
        raise UserError(f"{where}: total", expected=f"at least warm_up = {warm_up}", found=str(total), remedy=remedy)
    if not 0 <= final <= 1 or (shape == "exponential" and total is not None and final == 0):
        expected = "a number in (0, 1]" if shape == "exponential" else "a number in [0, 1]"
        raise UserError(f"{where}: final", expected=expected, found=str(final), remedy="change the value")
