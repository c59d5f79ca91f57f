"""Meta-gradients from perturbed meta-parameters alone: antithetic evolution strategies, plain and persistent.

Salimans et al. 2017 (ES); Vicol, Metz and Sohl-Dickstein 2021 (PES). For horizons where backpropagated gradients
explode.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError, above_0
from l2lopt.core.layout import Params
from l2lopt.core.phi_rows import gradients_of_rows, losses_of_rows, over_phi, row_of, stack_carries
from l2lopt.core.seeding import generator
from l2lopt.core.types import Batch, Carry, InnerStep, Loss, Update, detach
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator
from l2lopt.estimators.window import BlockUpdate, RowStep


class EvolutionStrategies(MetaGradientEstimator):
    """ĝ = 1/(2 P σ²) Σ_p ξ_p (L(φ + ε_p) − L(φ − ε_p)), ε_p from N(0, σ²), over P antithetic pairs.

    L is the meta-loss of the call's steps, the sum that `Backprop` differentiates. Plain: every pair starts from the
    run's carry, ξ = ε, and what earlier windows did to the carry is ignored, a bias like truncation's. Persistent: each
    member of a pair carries its own run on from call to call and ξ_p is the sum of its ε so far, so that the gradients
    of a run's windows add up to that of the whole run, with no bias but the smoothing's, O(σ²). Nothing is
    differentiated twice: where `taped` of second order drops nothing, so does this.

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
            square and clipped to ±3, so that problems whose losses differ a hundredfold have an equal say. The
            result is no estimate of a gradient but a direction, of a size that depends on none of the losses.
        backend: "compile": the inner steps are one compiled graph for each problem, see `kernels.graph`.
    """

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
        if not state:
            remedy = "pass what init gives"
            raise UserError("evolution strategies", expected="their state", found="none", remedy=remedy)
        pairs, phi = self.pairs, detach(phi)
        noise = self._noise(phi, int(state["seed"]), int(state["calls"]))
        rules = {name: torch.cat([phi[name] + e, phi[name] - e, phi[name][None]]) for name, e in noise.items()}
        members = [row_of(state["carries"], index) if self.persistent else carry for index in range(2 * pairs)]
        # An iterator can be read once, and every group of runs needs the same batches.
        steps, count = list(steps), self.rows or 2 * pairs + 1
        starts, ends = [*members, carry], []
        for low in range(0, 2 * pairs + 1, count):
            some = {name: value[low : low + count] for name, value in rules.items()}
            ends.append(self._run(update, loss, some, stack_carries(starts[low : low + count]), steps))
        values = torch.cat([end.values for end in ends])
        xi = {name: state["summed"][name] + e for name, e in noise.items()} if self.persistent else noise
        weight = self._shaped(values[:pairs] - values[pairs:-1], len(steps)) / (2 * pairs * self.sigma**2)
        gradient = {name: torch.tensordot(weight.to(value), value, 1) for name, value in xi.items()}
        after = row_of(ends[-1].carry, -1)
        finite = all(bool(t.isfinite().all()) for t in (values[-1], after.params, *gradient.values()))
        kept: dict[str, Any] = {"seed": state["seed"], "calls": state["calls"] + 1}
        if self.persistent:
            ran = [row_of(end.carry, index) for end in ends for index in range(len(end.values))]
            kept |= {"carries": stack_carries(ran[:-1]), "summed": xi}
        return MetaGradient(values[-1], gradient, after, ends[-1].losses[:, -1], finite, kept)

    def _shaped(self, differences: Tensor, steps: int) -> Tensor:
        """The differences of the pairs' meta-losses as they weigh the perturbations."""
        if self.shaping == "none":
            return differences
        size = differences.square().mean().sqrt().clamp(min=1e-12)
        # Whoever divides by the number of steps then has the same size for runs of any length.
        return steps * self.sigma * (differences / size).clamp(-3, 3)

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

    def _run(self, update: Update, loss: Loss, rules: Params, carry: Carry, steps: Sequence[InnerStep]) -> "_Ends":
        """The runs of some rules, step by step."""
        values, losses = carry.params.new_zeros(len(carry.params)), []
        loss_rows, advance = losses_of_rows(loss), None
        for step in steps:
            advance = advance or self._step(update, loss, carry, step.batch, rules)
            measured, carry = advance(carry, step.batch, rules)
            losses.append(measured)
            with torch.no_grad():
                for target in step.targets:
                    term, _ = loss_rows(carry.params, carry.aux, target.batch)
                    term = (term + self.floor).log() if self.objective == "log-loss" else term
                    values = values + target.weight * term.reshape(len(term), -1).mean(1)
        trajectory = torch.stack(losses) if losses else carry.params.new_zeros(0, *carry.params.shape[:-1])
        return _Ends(values, carry, trajectory)

    def _step(self, update: Update, loss: Loss, carry: Carry, batch: Batch, rules: Params) -> RowStep:
        """The inner step of the runs."""
        compiled = self.backend == "compile"
        if isinstance(update, BlockUpdate) and update.row_steps is not None:
            return update.row_steps(loss, carry, batch, rules, compiled)
        gradients, update_rows = gradients_of_rows(loss), over_phi(update)

        def step(carry: Carry, batch: Batch, rules: Params) -> tuple[Tensor, Carry]:
            grads, losses, aux = gradients(carry.params, carry.aux, batch)
            with torch.no_grad():
                change, state = update_rows(rules, grads, carry.state, carry.params, loss=losses)
                return losses, Carry(carry.params + change, aux, state)

        return step


class _Ends(NamedTuple):
    """Where the runs of some rules end.

    Attributes:
        values: Meta-losses, [R].
        carry: Carries as rows.
        losses: Training losses, [T, R, *batch].
    """

    values: Tensor
    carry: Carry
    losses: Tensor


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
