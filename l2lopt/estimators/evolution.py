"""Meta-gradients from perturbed meta-parameters alone: antithetic evolution strategies, plain and persistent.

Salimans et al. 2017 (ES); Vicol, Metz and Sohl-Dickstein 2021 (PES). For horizons where backpropagated gradients
explode.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core.errors import UserError, above_0
from l2lopt.core.layout import Params
from l2lopt.core.seeding import generator
from l2lopt.core.types import Carry, InnerStep, Loss, Update, detach
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator


class EvolutionStrategies(MetaGradientEstimator):
    """ĝ = 1/(2 P σ²) Σ_p ξ_p (L(φ + ε_p) − L(φ − ε_p)), ε_p from N(0, σ²), over P antithetic pairs.

    L is the meta-loss of the call's steps, the sum that `Backprop` differentiates. Plain: every pair starts from the
    run's carry, ξ = ε, and what earlier windows did to the carry is ignored, a bias like truncation's. Persistent: each
    member of a pair carries its own run on from call to call and ξ_p is the sum of its ε so far, so that the gradients
    of a run's windows add up to that of the whole run, with no bias but the smoothing's, O(σ²). Nothing is
    differentiated twice: where `taped` of second order drops nothing, so does this.

    Cost: 2P + 1 runs forward, no tape; persistent: P pairs of carries kept.

    Args:
        pairs: P.
        sigma: σ > 0.
        persistent: PES instead of ES.
        objective: "loss" or "log-loss".
    """

    def __init__(
        self,
        pairs: int = 4,
        sigma: float = 0.01,
        persistent: bool = False,
        objective: Literal["loss", "log-loss"] = "loss",
    ) -> None:
        if pairs < 1:
            raise UserError("pairs", expected="at least 1", found=str(pairs), remedy="change the value")
        above_0("evolution strategies", sigma=sigma)
        self.pairs, self.sigma, self.persistent, self.objective = pairs, sigma, persistent, objective

    def init(self, carry: Carry, phi: Params, seed: int) -> EstimatorState:
        """The seed and the calls so far; persistent: the members' carries and summed perturbations as well."""
        kept = self.pairs if self.persistent else 0
        return {
            "seed": torch.tensor(seed),
            "calls": torch.tensor(0),
            "carries": [(carry, carry) for _ in range(kept)],
            "summed": [{name: torch.zeros_like(value) for name, value in phi.items()} for _ in range(kept)],
        }

    def __call__(
        self,
        update: Update,
        loss: Loss,
        phi: Params,
        carry: Carry,
        steps: Iterable[InnerStep],
        state: EstimatorState = (),
    ) -> MetaGradient:
        """Runs the pairs, and φ itself for the value, the losses and the carry; see `MetaGradientEstimator`."""
        if not state:
            remedy = "pass what init gives"
            raise UserError("evolution strategies", expected="their state", found="none", remedy=remedy)
        # An iterator can be read once, and all 2P + 1 runs need the same batches.
        steps, phi = list(steps), detach(phi)
        key = int(state["seed"]), int(state["calls"])
        gradient = {name: torch.zeros_like(value) for name, value in phi.items()}
        carries, summed = [], []
        for pair in range(self.pairs):
            # By run, call and pair: a run that goes on from a checkpoint draws what it would have drawn.
            draw = generator("evolution", *key, pair)
            noise = {name: self.sigma * _normal(value, draw) for name, value in phi.items()}
            xi = _add(state["summed"][pair], noise, 1.0) if self.persistent else noise
            starts = state["carries"][pair] if self.persistent else (carry, carry)
            ends = [
                self._run(update, loss, _add(phi, noise, sign), start, steps)
                for sign, start in zip((1.0, -1.0), starts, strict=True)
            ]
            weight = (ends[0][0] - ends[1][0]) / (2 * self.pairs * self.sigma**2)
            gradient = _add(gradient, xi, weight)
            carries.append((ends[0][1], ends[1][1]))
            summed.append(xi)
        value, after, losses = self._run(update, loss, phi, carry, steps)
        finite = all(bool(t.isfinite().all()) for t in (value, after.params, *gradient.values()))
        kept = {"carries": carries, "summed": summed} if self.persistent else {"carries": [], "summed": []}
        return MetaGradient(
            value, gradient, after, losses, finite, {"seed": state["seed"], "calls": state["calls"] + 1, **kept}
        )

    def _run(
        self, update: Update, loss: Loss, phi: Params, carry: Carry, steps: list[InnerStep]
    ) -> tuple[Tensor, Carry, Tensor]:
        """The meta-loss of the steps under φ, where the run ends, and its training losses."""
        params, aux, state = carry
        value, losses = params.new_zeros(()), []
        for step in steps:
            theta = params.detach().requires_grad_()
            measured, aux = loss(theta, aux, step.batch)
            (grads,) = torch.autograd.grad(measured.sum(), theta)
            aux = detach(aux)
            losses.append(measured.detach())
            with torch.no_grad():
                # Not `update_`: several members start from the same carry, which must not be overwritten.
                change, state = update(phi, grads, state, params, loss=losses[-1])
                params = params + change
                for target in step.targets:
                    term, _ = loss(params, aux, target.batch)
                    value = value + target.weight * (term.log() if self.objective == "log-loss" else term).mean()
        trajectory = torch.stack(losses) if losses else params.new_zeros(0)
        return value, Carry(params, aux, state), trajectory


def persistent_evolution_strategies(
    pairs: int = 4, sigma: float = 0.01, objective: Literal["loss", "log-loss"] = "loss"
) -> EvolutionStrategies:
    """`EvolutionStrategies` whose pairs carry their own runs on: unbiased under truncation."""
    return EvolutionStrategies(pairs, sigma, True, objective)


def _normal(like: Tensor, source: torch.Generator) -> Tensor:
    # On the CPU, where the numbers of a seed are the same whatever the device of φ.
    return torch.randn(like.shape, generator=source, dtype=like.dtype).to(like.device)


def _add(phi: Params, noise: Params, weight: float | Tensor) -> Params:
    return {name: value + weight * noise[name] for name, value in phi.items()}
