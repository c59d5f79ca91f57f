"""Rates: a number, or a tensor [*batch] with a rate for every row, so that a grid of rates runs in one pass."""

from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from l2lopt.core.errors import UserError

Rate: TypeAlias = float | Tensor


def per_row(rate: Rate, grads: Tensor) -> Rate:
    """A rate per row, shaped to multiply coordinates."""
    return rate.to(grads)[..., None] if isinstance(rate, Tensor) else rate


def check_rate(rate: Rate) -> Rate:
    """A rate, or all rates, above 0 and finite."""
    given: object = rate
    real = isinstance(given, Real) or (isinstance(given, Tensor) and not given.is_complex())
    # In double precision: a number above 3e38 is none of float32's, and a rate all the same.
    rates = rate if isinstance(rate, Tensor) else torch.tensor(rate if real else 0.0, dtype=torch.float64)
    if not real or not bool((rates.gt(0) & rates.isfinite()).all()):
        raise UserError("lr", expected="a rate above 0", found=str(rate), remedy="give a positive rate")
    return rate
