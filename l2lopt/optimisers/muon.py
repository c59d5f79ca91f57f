"""Muon: orthogonalised momentum for matrices, AdamW for the rest."""

from collections.abc import Sequence
from math import sqrt
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import at_least_0
from l2lopt.core.kinds import stack_of
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, no_moments
from l2lopt.optimisers.directions import COEFFICIENTS, PRECISIONS, is_matrix, orthogonalised_whole
from l2lopt.optimisers.hand_designed import bias_corrected, check_decay, check_decays, safe_sqrt
from l2lopt.optimisers.rates import Rate, check_rate, per_row

Scale: TypeAlias = Literal["moonlight", "original"]


class Muon(Optimiser):
    """Momentum whose matrices are orthogonalised, with AdamW for everything else. Jordan et al. 2024.

    On matrices (`Layout.roles`): b' = μ b + (1 − μ) g; u = −η (k NS(μ b' + (1 − μ) g) + λ θ), with NS as in
    `directions.newton_schulz`. k = 0.2 √max(rows, columns) makes the update as large as AdamW's usually are, so that
    one η serves both ("moonlight", Liu et al. 2025, arXiv:2502.16982); k = √max(1, rows/columns) is "original".
    On vectors, embeddings and heads: u = −η_r (m̂ / (√v̂ + ε) + λ θ), AdamW.

    Equals `torch.optim.Muon(adjust_lr_fn="match_rms_adamw" or "original")` on matrices and `torch.optim.AdamW` on the
    rest; PyTorch computes the products in bfloat16 always. One running value per coordinate serves as b and m, so a
    coordinate's state is 8 bytes in float32.

    Args:
        lr: η > 0.
        momentum: μ in [0, 1).
        weight_decay: λ ≥ 0.
        betas: (β₁, β₂) of the rest, each in [0, 1).
        eps: ε ≥ 0 of the rest.
        rest_lr: η_r > 0; None for η.
        scale: "moonlight" or "original".
        coefficients: Any of `directions.COEFFICIENTS`.
        precision: Dtype of the products: "float32", "bfloat16", or "auto" for `directions.fast_precision`.

    Raises:
        UserError: For a value out of its range.
    """

    @checks_words
    def __init__(
        self,
        lr: Rate,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        rest_lr: Rate | None = None,
        scale: Scale = "moonlight",
        coefficients: Literal["keller-jordan", "you-jiacheng", "polar-express"] = "keller-jordan",
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        super().__init__()
        self.lr, self.rest_lr = check_rate(lr), None if rest_lr is None else check_rate(rest_lr)
        self.momentum = check_decay("muon: momentum", momentum)
        self.beta1, self.beta2 = check_decays("muon: betas", betas)
        self.weight_decay, self.eps, self.scale = weight_decay, eps, scale
        at_least_0("muon", weight_decay=weight_decay, eps=eps)
        self.coefficients, self.precision = COEFFICIENTS[coefficients], PRECISIONS[precision]

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The running means at 0; v stays so on matrices."""
        return no_moments(layout, batch, like)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η (k NS(…) + λ θ) on matrices, AdamW's update elsewhere."""
        layout, step = state.layout, state.shared["step"] + 1
        matrix = is_matrix(layout, grads)
        kinds = [role.kind == "matrix" for role in layout.roles]
        beta1 = self._each([self.momentum if one else self.beta1 for one in kinds], layout, grads)
        m = beta1 * state.coordinates["m"] + (1 - beta1) * grads
        v = torch.where(matrix, 0.0, self.beta2 * state.coordinates["v"] + (1 - self.beta2) * grads.square())
        nesterov = beta1 * m + (1 - beta1) * grads
        turned = orthogonalised_whole(nesterov, layout, self.coefficients, self.precision)
        sizes = self._each(self._scales(layout), layout, grads)
        adam = bias_corrected(m, self.beta1, step) / (safe_sqrt(bias_corrected(v, self.beta2, step)) + self.eps)
        direction = torch.where(matrix, sizes * turned, adam) + self.weight_decay * params
        # Numbers of the gradients' dtype: a float32 0.1 would be another rate for a model in float64.
        rates = self.lr, self.lr if self.rest_lr is None else self.rest_lr
        lr, rest = (torch.as_tensor(per_row(rate, grads), dtype=grads.dtype) for rate in rates)
        rate = torch.where(matrix, lr.to(grads.device), rest.to(grads.device))
        return -rate * direction, state._replace(coordinates={"m": m, "v": v}, shared={"step": step})

    @staticmethod
    def _each(values: Sequence[float], layout: Layout, like: Tensor) -> Tensor:
        """A number per tensor, at each of its coordinates."""
        return layout.tensors.spread(layout.tensors.each(values, like))

    def _scales(self, layout: Layout) -> list[float]:
        """The factor k of each tensor."""
        found = []
        for shape, role in zip(layout.whole_shapes, layout.roles, strict=True):
            _, rows, columns = stack_of(shape, role.split)
            ratio = max(1.0, rows / max(columns, 1))
            found.append(0.2 * sqrt(max(rows, columns)) if self.scale == "moonlight" else sqrt(ratio))
        return found
