"""Random quadratics, the first task of Andrychowicz et al. 2016."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.seeding import generator
from l2lopt.core.types import Aux, Batch
from l2lopt.optimisee import Optimisee, Split


class Quadratic(Optimisee):
    """ℓ(θ) = ‖W θ − y‖², W and y drawn from N(0, 1) by the run's seed and the same at every step; θ from N(0, 1).

    Args:
        size: n, the number of parameters and of equations.
        dtype: "float32" or "float64".
        device: Device of the tensors.
    """

    def __init__(self, size: int = 10, dtype: Literal["float32", "float64"] = "float32", device: str = "cpu") -> None:
        if size < 1:
            raise UserError("quadratic: size", expected="at least 1", found=str(size), remedy="change the value")
        self.size, self.dtype, self.device = size, getattr(torch, dtype), device

    def init(self, seed: int) -> tuple[Params, Aux]:
        """θ [n] from N(0, 1)."""
        return {"theta": self._normal(generator("quadratic", "init", seed), self.size)}, {}

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """(W [n, n], y [n]); all splits and steps of a run share them."""
        source = generator("quadratic", "problem", seed)
        return self._normal(source, self.size, self.size), self._normal(source, self.size)

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """‖W θ − y‖²."""
        return self.evaluate(params, aux, batch), aux

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """‖W θ − y‖²."""
        matrix, target = batch
        residual: Tensor = matrix @ params["theta"] - target
        return residual.square().sum()

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The one problem of the run."""
        yield self.batch(split, seed, 0), 1

    def _normal(self, source: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=self.dtype).to(self.device)
