"""Rosenbrock's function in any number of dimensions: a long curved valley, with no data and no noise."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, at_least_0
from l2lopt.core.layout import Params
from l2lopt.core.memory import check_need
from l2lopt.core.seeding import generator
from l2lopt.core.types import Aux, Batch
from l2lopt.optimisee import Optimisee, Split


class Rosenbrock(Optimisee):
    """ℓ(θ) = 1/(n − 1) · Σᵢ 100 (θᵢ₊₁ − θᵢ²)² + (1 − θᵢ)², least at θ = (1, …, 1), where it is 0.

    Rosenbrock 1960, in the chained form of the test collections. Runs start near his point (−1.2, 1, −1.2, …), each
    coordinate moved by N(0, `spread`²). All splits are the same problem.

    Args:
        size: n, the number of parameters, at least 2.
        spread: Standard deviation of the starting points.
        dtype: "float32" or "float64".
        device: Device of the tensors.
    """

    @checks_words
    def __init__(
        self, size: int = 10, spread: float = 0.1, dtype: Literal["float32", "float64"] = "float32", device: str = "cpu"
    ) -> None:
        if size < 2:
            raise UserError("rosenbrock: size", expected="at least 2", found=str(size), remedy="change the value")
        at_least_0("rosenbrock", spread=spread)
        self.size, self.spread, self.dtype, self.device = size, spread, getattr(torch, dtype), device
        check_need(f"rosenbrock: size = {size}", size * self.dtype.itemsize)

    def init(self, seed: int) -> tuple[Params, Aux]:
        """θ [n] near (−1.2, 1, −1.2, 1, …)."""
        moved = torch.randn(self.size, generator=generator("rosenbrock", seed), dtype=self.dtype)
        start = torch.where(torch.arange(self.size) % 2 == 0, -1.2, 1.0).to(self.dtype)
        return {"theta": (start + self.spread * moved).to(self.device)}, {}

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """{"where"}, one number that the loss does not use: there are no data."""
        return {"where": torch.zeros((), dtype=self.dtype, device=self.device)}

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """ℓ(θ)."""
        return self.evaluate(params, aux, batch), aux

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """ℓ(θ)."""
        here, after = params["theta"][:-1], params["theta"][1:]
        return (100 * (after - here.square()).square() + (1 - here).square()).mean()

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The one problem."""
        yield self.batch(split, 0, 0), 1
