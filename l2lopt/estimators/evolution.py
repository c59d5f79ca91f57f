"""Meta-gradients from perturbed meta-parameters alone: antithetic evolution strategies, plain and persistent.

Salimans et al. 2017 (ES); Vicol, Metz and Sohl-Dickstein 2021 (PES). For horizons where backpropagated gradients
explode.
"""

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0
from l2lopt.core.layout import Params
from l2lopt.core.phi_rows import row_of, stack_carries
from l2lopt.core.seeding import generator
from l2lopt.core.types import Carry, InnerStep, Loss, Update, detach
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator, check_state
from l2lopt.estimators.members import MemberRuns, run_members


class PairRuns(NamedTuple):
    """What the runs of a call's pairs give; Σ_p weights_p ξ_p is the meta-gradient.

    Attributes:
        found: The meta-gradient and the rest of what the call returns.
        rules: φ + ε_p of all pairs, φ − ε_p of all pairs, and φ: [2P + 1, ...] of each tensor.
        xi: ξ_p, [P, ...] of each tensor.
        weights: Weight of each ξ_p in the sum, [P].
    """

    found: MetaGradient
    rules: Params
    xi: Params
    weights: Tensor


class EvolutionStrategies(MetaGradientEstimator):
    """ĝ = 1/(2 P σ²) Σ_p ξ_p (L(φ + ε_p) − L(φ − ε_p)), ε_p from N(0, σ²), over P antithetic pairs.

    L is the meta-loss of the call's steps, the sum that `Backprop` differentiates. Plain: every pair starts from the
    run's carry, ξ = ε, and what earlier windows did to the carry is ignored, a bias like truncation's. Persistent: each
    member of a pair carries its own run on from call to call and ξ_p is the sum of its ε so far, so that the gradients
    of a run's windows add up to that of the whole run, with no bias but the smoothing's, O(σ²). Nothing is
    differentiated twice: where `Backprop` of second order drops nothing, so does this.

    All 2P + 1 runs, the last one with φ itself, are the rows of a single vectorised run with a φ for each
    (`core.phi_rows`); they share the batches, which are not copied. Cost: that run forward, no tape; persistent: 2P
    carries kept.

    Args:
        pairs: P.
        sigma: σ > 0.
        persistent: PES instead of ES.
        objective: "loss" or "log-loss".
        floor: Number that is added to losses before their logarithm, so that losses near 0 do not decide; at least 0.
        rows: Number of runs side by side, at most; None: all. The memory is that of so many.
        shaping: "standardised": the differences D_p = L(φ + ε_p) − L(φ − ε_p) are divided by the root of their mean
            square and clipped to ±3, so that problems whose losses differ a hundredfold have an equal say. Where one
            run of a pair diverges, the pair counts ±3; where both do, 0; neither enters the mean square. The result is
            no estimate of a gradient but a direction, of a size that depends on none of the losses.
        backend: "compile": the inner steps are one compiled graph for each problem, see `kernels.graph`.
    """

    @checks_words
    def __init__(
        self,
        pairs: int = 4,
        sigma: float = 0.01,
        persistent: bool = False,
        objective: Literal["loss", "log-loss"] = "loss",
        rows: int | None = None,
        shaping: Literal["none", "standardised"] = "none",
        backend: Literal["eager", "compile"] = "eager",
        floor: float = 0.0,
    ) -> None:
        for name, count in (("pairs", pairs), ("rows", rows)):
            if count is not None and count < 1:
                raise UserError(name, expected="at least 1", found=str(count), remedy="change the value")
        above_0("evolution strategies", sigma=sigma)
        if not (floor >= 0 and isfinite(floor)):
            remedy = "change the value"
            raise UserError("evolution strategies: floor", expected="at least 0", found=f"{floor:g}", remedy=remedy)
        if floor and objective != "log-loss":
            remedy = "set objective to log-loss, or leave floor out"
            raise UserError("evolution strategies: floor", expected="0 for the loss", found=f"{floor:g}", remedy=remedy)
        self.pairs, self.sigma, self.persistent, self.objective, self.rows = pairs, sigma, persistent, objective, rows
        self.shaping, self.backend, self.floor = shaping, backend, floor

    def init(self, carry: Carry, phi: Params, seed: int) -> EstimatorState:
        """The seed and the calls so far; persistent: the members' carries and summed perturbations as well."""
        known = {"seed": torch.tensor(seed), "calls": torch.tensor(0)}
        if not self.persistent:
            return known
        summed = {name: value.new_zeros(self.pairs, *value.shape) for name, value in detach(phi).items()}
        return {**known, "carries": stack_carries([carry] * 2 * self.pairs), "summed": summed}

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
        return self.run_pairs(update, loss, phi, carry, steps, state).found

    def run_pairs(
        self, update: Update, loss: Loss, phi: Params, carry: Carry, steps: Iterable[InnerStep], state: EstimatorState
    ) -> PairRuns:
        """The call, and each pair's part of its meta-gradient.

        Args:
            update: (φ, gradient, state, θ, loss) → (update, state).
            loss: (θ, aux, batch) → (loss [*batch], aux).
            phi: The meta-parameters.
            carry: State of the run before these steps.
            steps: One for each inner step.
            state: Estimator state from `init` or the last call.

        Raises:
            UserError: If the state is empty.
        """
        check_state("evolution strategies", state)
        pairs, phi = self.pairs, detach(phi)
        noise = self._noise(phi, int(state["seed"]), int(state["calls"]))
        rules = {name: torch.cat([phi[name] + e, phi[name] - e, phi[name][None]]) for name, e in noise.items()}
        members = [row_of(state["carries"], index) if self.persistent else carry for index in range(2 * pairs)]
        steps = list(steps)  # an iterator can be read once, and every group of runs needs the same batches
        ends = self.run_members(update, loss, rules, [*members, carry], steps)
        # A copy: the row is a view that would keep the memory of all other rows.
        values, after = ends.values, pytree.tree_map_only(Tensor, Tensor.clone, ends.carries[-1])
        xi = {name: state["summed"][name] + e for name, e in noise.items()} if self.persistent else noise
        weight = self._shaped(values[:pairs], values[pairs:-1], len(steps)) / (2 * pairs * self.sigma**2)
        gradient = {name: torch.tensordot(weight.to(value), value, 1) for name, value in xi.items()}
        finite = all(bool(t.isfinite().all()) for t in (values[-1], after.params, *gradient.values()))
        kept: dict[str, Any] = {"seed": state["seed"], "calls": state["calls"] + 1}
        if self.persistent:
            kept |= {"carries": stack_carries(ends.carries[:-1]), "summed": xi}
        found = MetaGradient(values[-1], gradient, after, ends.losses[:, -1], finite, kept)
        return PairRuns(found, rules, xi, weight)

    def run_members(
        self, update: Update, loss: Loss, rules: Params, starts: Sequence[Carry], steps: Sequence[InnerStep]
    ) -> MemberRuns:
        """The runs of any rules, with the estimator's objective, rows and backend; see `members.run_members`."""
        return run_members(update, loss, rules, starts, steps, self.objective, self.rows, self.backend, self.floor)

    def _shaped(self, plus: Tensor, minus: Tensor, steps: int) -> Tensor:
        """The differences of the pairs' meta-losses as they weigh the perturbations."""
        if self.shaping == "none":
            return plus - minus
        # A run that ends in NaN has diverged as one that ends in infinity has; where both have, they differ by NaN.
        differences = plus.where(~plus.isnan(), inf) - minus.where(~minus.isnan(), inf)
        told = differences.isfinite()
        size = differences[told].square().mean().sqrt().where(told.any(), 1.0).clamp(min=1e-12)
        # Whoever divides by the number of steps then has the same size for runs of any length.
        return steps * self.sigma * (differences / size).clamp(-3, 3).nan_to_num(0.0)

    def _noise(self, phi: Params, seed: int, call: int) -> Params:
        """The perturbations ε of all pairs, each [P, ...]."""
        noise: dict[str, list[Tensor]] = {name: [] for name in phi}
        for pair in range(self.pairs):
            # By run, call and pair: a run that goes on from a checkpoint draws what it would have drawn.
            draw = generator("evolution", seed, call, pair)
            for name, value in phi.items():
                # On the CPU, where the numbers of a seed are the same whatever the device of φ.
                drawn = torch.randn(value.shape, generator=draw, dtype=value.dtype)
                noise[name].append(self.sigma * drawn.to(value.device))
        return {name: torch.stack(drawn) for name, drawn in noise.items()}


@checks_words
def persistent_evolution_strategies(
    pairs: int = 4,
    sigma: float = 0.01,
    objective: Literal["loss", "log-loss"] = "loss",
    rows: int | None = None,
    shaping: Literal["none", "standardised"] = "none",
    backend: Literal["eager", "compile"] = "eager",
    floor: float = 0.0,
) -> EvolutionStrategies:
    """`EvolutionStrategies` whose pairs carry their own runs on: unbiased under truncation."""
    return EvolutionStrategies(pairs, sigma, True, objective, rows, shaping, backend, floor)
