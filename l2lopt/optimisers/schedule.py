"""Step-size schedules as multipliers of the rate."""

import math

import torch
from torch import Tensor


def warm_up_cosine(step: Tensor, warm_up: int, total: int | None) -> Tensor:
    """The multiplier at update `step` = 0, 1, …: linear to 1 over `warm_up` updates, then a half cosine to 0.

    min(1, (step + 1) / warm_up) during the warm-up, then ½(1 + cos(π · (step − warm_up) / (total − warm_up))), in [0,
    1]; 0 from `total` on, and 1 throughout after the warm-up where `total` is None. Float64.
    """
    step = step.double()
    rise = ((step + 1) / max(warm_up, 1)).clamp(max=1.0)
    if total is None:
        return rise
    progress = ((step - warm_up) / max(total - warm_up, 1)).clamp(0.0, 1.0)
    return torch.where(step < warm_up, rise, 0.5 * (1 + torch.cos(math.pi * progress)))
