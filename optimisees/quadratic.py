"""Random quadratics, the first task of Andrychowicz et al. 2016, also ill-conditioned and under noise."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0, at_least_0
from l2lopt.core.layout import Params
from l2lopt.core.memory import check_need
from l2lopt.core.seeding import generator
from l2lopt.core.types import Aux, Batch
from l2lopt.optimisee import Optimisee, Split


class Quadratic(Optimisee):
    """ℓ(θ) = ‖W θ − y‖², W and y drawn from N(0, 1) by the run's seed and the same at every step; θ from N(0, 1).

    With a `condition` κ, W is Q₁ diag(s) Q₂ for random orthogonal Q₁ and Q₂, with s² falling in equal ratios from 1 to
    1/κ: the Hessian 2 WᵀW then has the condition number κ. With `noise` σ, training batches have y + σε for y, a fresh
    ε from N(0, I) at every step, so that the gradient is 2 Wᵀ(W θ − y − σε); held-out and test batches, and every
    evaluation, are without noise. All splits are the same problem beside that.

    Args:
        size: n, the number of parameters and of equations.
        dtype: "float32" or "float64".
        device: Device of the tensors.
        condition: κ, at least 1; none leaves W as it is drawn, which makes it about n².
        noise: σ, at least 0.
    """

    @checks_words
    def __init__(
        self,
        size: int = 10,
        dtype: Literal["float32", "float64"] = "float32",
        device: str = "cpu",
        condition: float | None = None,
        noise: float = 0.0,
    ) -> None:
        above_0("quadratic", size=size)
        at_least_0("quadratic", noise=noise)
        if condition is not None and not 1 <= condition < float("inf"):
            found, remedy = str(condition), "change the value"
            raise UserError("quadratic: condition", expected="at least 1, finite", found=found, remedy=remedy)
        self.size, self.dtype, self.device = size, getattr(torch, dtype), device
        self.condition, self.noise = condition, noise
        check_need(f"quadratic: size = {size}", size**2 * self.dtype.itemsize)  # a size beyond int64, too, is refused
        self._problem = lru_cache(maxsize=64)(self._draw)

    def init(self, seed: int) -> tuple[Params, Aux]:
        """θ [n] from N(0, 1)."""
        return {"theta": self._normal(generator("quadratic", "init", seed), self.size)}, {}

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """(W [n, n], y [n]); all splits and steps of a run share them but for the noise."""
        matrix, target = self._problem(seed)
        if self.noise and split in ("train", "inner"):
            source = generator("quadratic", "noise", split, seed, step)
            target = target + self.noise * self._normal(source, self.size)
        return matrix, target

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """‖W θ − y‖²."""
        return self.evaluate(params, aux, batch), aux

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """‖W θ − y‖²."""
        matrix, target = batch
        residual: Tensor = matrix @ params["theta"] - target
        return residual.square().sum()

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The one problem of the run, without noise."""
        yield self._problem(seed), 1

    def _draw(self, seed: int) -> tuple[Tensor, Tensor]:
        """W and y."""
        source = generator("quadratic", "problem", seed)
        matrix, target = self._normal(source, self.size, self.size), self._normal(source, self.size)
        if self.condition is not None:
            turned = (matrix, self._normal(source, self.size, self.size))
            left, right = (torch.linalg.qr(part.cpu().double()).Q for part in turned)
            exponents = torch.linspace(0, -0.5, self.size, dtype=torch.float64)
            matrix = (left * self.condition**exponents @ right).to(matrix)
        return matrix, target

    def _normal(self, source: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=self.dtype).to(self.device)
