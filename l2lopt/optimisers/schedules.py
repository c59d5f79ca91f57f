"""Step-size schedules as multipliers of the rate."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = Literal["constant", "linear", "cosine", "exponential"]
"""How a rate falls once it is warm."""


def warm_up_then(shape: Shape, step: Tensor, warm_up: int, total: int | None, final: float = 0.0) -> Tensor:
    """The multiplier at update `step` = 0, 1, …: linear to 1 over `warm_up` updates, then down to `final` at `total`.

    min(1, (step + 1) / warm_up) during the warm-up. Then, with p = (step − warm_up) / (total − warm_up) in [0, 1]:
    1 for "constant", final^p for "exponential", and final + (1 − final)·c with c = 1 − p for "linear" and
    ½(1 + cos πp) for "cosine"; 1 throughout where `total` is None. In [0, 1], float64.
    """
    step = step.double()
    rise = ((step + 1) / max(warm_up, 1)).clamp(max=1.0)
    if total is None or shape == "constant":
        return rise
    progress = ((step - warm_up) / max(total - warm_up, 1)).clamp(0.0, 1.0)
    if shape == "exponential":
        return torch.where(step < warm_up, rise, final**progress)
    fall = 1 - progress if shape == "linear" else 0.5 * (1 + torch.cos(math.pi * progress))
    return torch.where(step < warm_up, rise, final + (1 - final) * fall)


def warm_up_cosine(step: Tensor, warm_up: int, total: int | None) -> Tensor:
    """`warm_up_then` along a half cosine to 0."""
    return warm_up_then("cosine", step, warm_up, total)


def multiplier(shape: Shape, step: int, warm_up: int, total: int | None, final: float = 0.0) -> float:
    """`warm_up_then` for one step, as a number: what a training loop multiplies its rate by."""
    return float(warm_up_then(shape, torch.tensor(step), warm_up, total, final))


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Gives every parameter group of a `torch.optim.Optimizer` its rate, in the order of the groups."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
