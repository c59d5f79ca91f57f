"""Backpropagation through the unrolled optimisation, on autograd's tape (Andrychowicz et al. 2016)."""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.precision import for_sums
from l2lopt.core.types import Carry, InnerStep, Loss, Update, detach
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator
from l2lopt.estimators.loss_and_gradient import LossAndGradient, Objective, gradient_of, loss_and_gradient, target_terms


class Backprop(MetaGradientEstimator):
    """Backpropagation through the whole call, or cut every `window` steps.

    With θ_{t+1} = θ_t + u_t, (u_t, s_{t+1}) = m_φ(∇ℓ(θ_t), s_t, θ_t), the meta-loss is L(φ) = Σ_t Σ_j w_j
    f(ℓ(θ_{t+1}; c_{t,j})) over the steps' targets c, f the identity or the logarithm.

    First order takes the inputs ∇ℓ and ℓ as constants (∂∇ℓ/∂φ = 0). The optimisee then never enters the tape: each
    target adds the linear term ⟨q, θ_{t+1}⟩ with q = w f'(ℓ) ∂ℓ/∂θ. Second order drops nothing but
    the path through the loss's own state, which is a constant of the step.

    Cost of first order: one gradient a step, one more for each target that is not the next step's own batch, and about
    0.75 KB of tape per coordinate and step of a window for an LSTM of 20.

    Args:
        order: 1 or 2.
        window: K, the steps of a window; None for the whole call.
        objective: "loss" or "log-loss".
    """

    old_names = ("taped",)
    old_options: ClassVar[dict[str, str]] = {"truncation": "window"}

    @checks_words
    def __init__(
        self,
        order: Literal[1, 2] = 1,
        window: int | None = None,
        objective: Objective = "loss",
    ) -> None:
        if window is not None and window < 1:
            raise UserError("window", expected="at least 1", found=str(window), remedy="change the value")
        self.order, self.window, self.objective = order, window, objective

    def init(self, carry: Carry, phi: Params, seed: int) -> EstimatorState:
        """Nothing is kept."""
        return ()

    def __call__(
        self,
        update: Update,
        loss: Loss,
        phi: Params,
        carry: Carry,
        steps: Iterable[InnerStep],
        state: EstimatorState = (),
    ) -> MetaGradient:
        """Runs and differentiates; see `MetaGradientEstimator`."""
        second = self.order == 2
        leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
        gradient = {name: torch.zeros_like(value, dtype=for_sums(value.dtype)) for name, value in phi.items()}
        value = carry.params.new_zeros((), dtype=for_sums(carry.params.dtype))
        losses: list[Tensor] = []
        params, aux, optimiser_state = detach(carry)
        terms: list[Tensor] = []
        known: list[LossAndGradient] = []  # the losses already measured at this θ

        def close_window() -> None:
            nonlocal params, aux, optimiser_state
            for name, piece in gradient_of(sum(terms, torch.zeros(())), leaves).items():
                gradient[name] += piece
            terms.clear()
            params, aux, optimiser_state = detach(Carry(params, aux, optimiser_state))
            # In second order these hang on the tape that ends here: the next window has to measure them anew.
            if second:
                known.clear()

        with torch.enable_grad():
            for index, step in enumerate(steps):
                if index and self.window and index % self.window == 0:
                    close_window()
                # A target of the last step often is this very batch, as one object: its gradient is known then.
                seen = next((m for m in known if m.batch is step.batch), None)
                seen = seen or loss_and_gradient(loss, params, aux, step.batch, second)
                losses.append(seen.loss.detach())
                change, optimiser_state = update(leaves, seen.grads, optimiser_state, params, loss=seen.loss)
                params, aux = params + change, seen.aux
                known = [loss_and_gradient(loss, params, aux, target.batch, second) for target in step.targets]
                pieces, weights = target_terms(known, step.targets, self.objective)
                # Detached, or the sum would keep the graph of every closed window alive.
                value = sum((piece.detach() for piece in pieces), value)
                # First order: linear in θ with constant factors, so no second derivatives arise.
                linear = zip(weights, known, strict=True)
                terms += pieces if second else [(weight[..., None] * m.grads * params).sum() for weight, m in linear]
            close_window()
        gradient = {name: piece.to(phi[name].dtype) for name, piece in gradient.items()}
        finite = all(bool(t.isfinite().all()) for t in (value, params, *gradient.values()))
        trajectory = torch.stack(losses) if losses else carry.params.new_zeros(0)
        return MetaGradient(value, gradient, Carry(params, aux, optimiser_state), trajectory, finite, state)
