"""The mean of the exact meta-gradient and of evolution strategies', weighted by the inverse of their variances.

Metz et al. 2019, "Understanding and correcting pathologies in the training of learned optimizers"; Parmas et al. 2018
(PIPPS). For runs of which it is not known whether their derivatives explode.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core import registry
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Carry, InnerStep, Loss, Update
from l2lopt.estimators.backprop import Backprop
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator
from l2lopt.estimators.blockwise import Blockwise
from l2lopt.estimators.evolution import EvolutionStrategies, persistent_evolution_strategies
from l2lopt.estimators.higher import Higher
from l2lopt.estimators.loss_and_gradient import Objective
from l2lopt.estimators.memory_plan import Plan

EXACT: registry.Table = {"blockwise": Blockwise, "backprop": Backprop, "higher": Higher}
EVOLUTION: registry.Table = {"es": EvolutionStrategies, "pes": persistent_evolution_strategies}
FEWEST = 4
"""Pairs: with 2 the variance was up to 12 times that of evolution alone, see `Mixed`."""


class Mixed(MetaGradientEstimator):
    """The exact meta-gradient and evolution strategies', weighted tensor by tensor by the inverse of their variances.

    Both estimate the gradient of the smoothed meta-loss E L(φ + ε), ε from N(0, σ²), from the same P antithetic pairs:
    x_p = (∇L(φ + ε_p) + ∇L(φ − ε_p))/2 by differentiating the perturbed runs, y_p = ε_p (L(φ + ε_p) − L(φ − ε_p))/(2σ²)
    from their meta-losses alone. For every tensor of φ, with V the sum over its numbers of the sample variance over
    pairs,

        ĝ = w mean(x) + (1 − w) mean(y),  w = (1/V_x) / (1/V_x + 1/V_y).

    Where the run is smooth the x_p hardly differ, and ĝ is the exact gradient; where it is chaotic they differ by more
    than the y_p, which no derivative can make explode, and ĝ is evolution's. An x that is not finite in a tensor has
    weight 0 there. Metz et al. weigh every number by itself, over hundreds of samples; a variance that is pooled over
    a tensor can be told from a few pairs. Nothing is remembered between calls but evolution's own state.

    The weights are told from the pairs that they weigh. A gradient that explodes in one pair is so kept out, at the
    price of a bias of O(1/P), and of weights that vary. For L = sin(kφ), a tensor of one number, at several φ and with
    kσ from 0.01 to 10, the variance of ĝ was at most 1.1 times the smaller of the two with 8 pairs, 2 times with 4, 4
    times with 3 and 12 times with 2, whose variances are small by accident; so there are at least 4.

    Both estimate the same only if the exact one drops nothing: `{name = "backprop", order = 2}` or `higher`, with no
    window shorter than the call, of a loss without a state of its own and a meta-loss without jumps, which no
    derivative sees. The default drops second order, and where its variance is small so does the mixture.

    Cost: evolution's rows, forward, and 2P meta-gradients one after the other (`exact_members = "plus"`: P).

    Args:
        exact: Choice of `blockwise`, `backprop` or `higher`.
        evolution: Choice of `es`, with at least 4 pairs, better 8 or more, no floor and no shaping.
        objective: "loss" or "log-loss"; of both.
        exact_members: Members of a pair that are differentiated. "both": φ ± ε_p, where all odd terms of L cancel;
            "plus": φ + ε_p alone.
    """

    @checks_words
    def __init__(
        self,
        exact: Choice = "blockwise",
        evolution: Choice = "es",
        objective: Objective = "loss",
        exact_members: Literal["both", "plus"] = "both",
    ) -> None:
        # One objective for both: a mean of gradients of different functions would be the gradient of none.
        made = registry.build(EXACT, "estimator", exact, objective=objective)
        self.exact: MetaGradientEstimator = registry.checked_kind("estimator", exact, made, MetaGradientEstimator)
        made = registry.build(EVOLUTION, "estimator", evolution, objective=objective)
        self.evolution: EvolutionStrategies = registry.checked_kind("estimator", evolution, made, EvolutionStrategies)
        self.exact_members = exact_members
        _check(self.evolution)

    def init(self, carry: Carry, phi: Params, seed: int) -> EstimatorState:
        """Evolution's state."""
        return self.evolution.init(carry, phi, seed)

    def __call__(
        self,
        update: Update,
        loss: Loss,
        phi: Params,
        carry: Carry,
        steps: Iterable[InnerStep],
        state: EstimatorState = (),
    ) -> MetaGradient:
        """Runs the pairs, and again with derivatives; value, losses and carry are φ's; see `MetaGradientEstimator`."""
        steps, pairs = list(steps), self.evolution.pairs
        runs = self.evolution.run_pairs(update, loss, phi, carry, steps, state)
        key = int(state["seed"]), int(state["calls"])
        members = [{name: rule[index] for name, rule in runs.rules.items()} for index in range(self._members)]
        found = [
            self._gradient(update, loss, member, carry, steps, seed_of("mixed", *key, index))
            for index, member in enumerate(members)
        ]
        gradient = {}
        for name, xi in runs.xi.items():
            exact = torch.stack([one[name] for one in found]).double().unflatten(0, (-1, pairs)).mean(0)
            evolution = pairs * runs.weights.double().reshape(-1, *[1] * (xi.dim() - 1)) * xi.double()
            gradient[name] = weighted_mean(exact, evolution)[0].to(phi[name].dtype)
        run = runs.found
        finite = all(bool(t.isfinite().all()) for t in (run.value, run.carry.params, *gradient.values()))
        return replace(run, gradient=gradient, finite=finite)

    def plan(
        self, update: Update, loss: Loss, phi: Params, carry: Carry, steps: Iterable[InnerStep], length: int
    ) -> Plan | None:
        """The memory of one exact meta-gradient, and the time of all; see `MetaGradientEstimator`."""
        plan = self.exact.plan(update, loss, phi, carry, steps, length)
        return plan and replace(plan, seconds=self._members * plan.seconds)

    @property
    def _members(self) -> int:
        """The number of exact meta-gradients of a call."""
        return self.evolution.pairs * (2 if self.exact_members == "both" else 1)

    def _gradient(
        self, update: Update, loss: Loss, rule: Params, carry: Carry, steps: Sequence[InnerStep], seed: int
    ) -> Params:
        """The exact meta-gradient at a member."""
        # A state for this call alone: what an exact estimator remembers is where its random numbers are, no more.
        return self.exact(update, loss, rule, carry, steps, self.exact.init(carry, rule, seed)).gradient


def weighted_mean(exact: Tensor, evolution: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of two samples' means, each weighted by the inverse of its sample's variance, in float64.

    Args:
        exact: Gradients of a tensor, [P, ...] with P at least 2; unless all are finite their weight is 0.
        evolution: Estimates of the same gradient, [P, ...]; unless all are finite their weight is 0, if the others are.

    Returns:
        The mean [...], and the weight of `exact` in it. It is 1 where neither varies.
    """
    exact, evolution = exact.double(), evolution.double()
    of_exact, of_evolution = (sample.var(0).sum() for sample in (exact, evolution))
    # As a ratio: it may be infinite, where a product with 1/V would be NaN.
    weight = torch.where(of_exact == 0, 1.0, 1 / (1 + of_exact / of_evolution))
    usable, other = (
        sample.isfinite().all() & of.isfinite() for sample, of in ((exact, of_exact), (evolution, of_evolution))
    )
    weight = torch.where(usable, torch.where(other, weight, 1.0), 0.0)
    # Not 0 times what is not finite, which is NaN; where neither is finite, the mean is not.
    mean, others = torch.where(usable, exact.mean(0), 0.0), torch.where(usable & ~other, 0.0, evolution.mean(0))
    return weight * mean + (1 - weight) * others, weight


def _check(evolution: EvolutionStrategies) -> None:
    """Refuses evolution strategies whose result is no estimate of what the exact estimator differentiates."""
    where = "estimator 'mixed': evolution"
    if evolution.persistent:
        expected, found = "'es', which like the exact gradient looks at one window", "persistent evolution strategies"
        raise UserError(where, expected=expected, found=found, remedy="use 'es', or 'pes' by itself")
    if evolution.shaping != "none":
        remedy = "leave shaping out: a direction cannot be averaged with a gradient"
        raise UserError(f"{where}: shaping", expected="'none'", found=repr(evolution.shaping), remedy=remedy)
    if evolution.floor:
        remedy = "leave floor out: the exact gradient has none"
        raise UserError(f"{where}: floor", expected="0", found=f"{evolution.floor:g}", remedy=remedy)
    if evolution.pairs < FEWEST:
        expected, remedy = f"at least {FEWEST}, whose variances tell something", "change the value"
        raise UserError(f"{where}: pairs", expected=expected, found=str(evolution.pairs), remedy=remedy)
