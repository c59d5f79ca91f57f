"""Meta-gradients from perturbed meta-parameters alone: antithetic evolution strategies, plain and persistent.

Salimans et al. 2017 (ES); Vicol, Metz and Sohl-Dickstein 2021 (PES). For horizons where backpropagated gradients
explode.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError, above_0
from l2lopt.core.layout import Params
from l2lopt.core.phi_rows import losses_of_rows, over_phi, row_of, stack_carries
from l2lopt.core.seeding import generator
from l2lopt.core.types import Carry, InnerStep, Loss, Update, detach
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator
from l2lopt.estimators.window import BlockUpdate


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
        rows: Number of runs side by side, at most; None: all. The memory is that of so many.
    """

    def __init__(
        self,
        pairs: int = 4,
        sigma: float = 0.01,
        persistent: bool = False,
        objective: Literal["loss", "log-loss"] = "loss",
        rows: int | None = None,
    ) -> None:
        for name, count in (("pairs", pairs), ("rows", rows)):
            if count is not None and count < 1:
                raise UserError(name, expected="at least 1", found=str(count), remedy="change the value")
        above_0("evolution strategies", sigma=sigma)
        self.pairs, self.sigma, self.persistent, self.objective, self.rows = pairs, sigma, persistent, objective, rows

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
        weight = (values[:pairs] - values[pairs:-1]) / (2 * pairs * self.sigma**2)
        gradient = {name: torch.tensordot(weight.to(value), value, 1) for name, value in xi.items()}
        after = row_of(ends[-1].carry, -1)
        finite = all(bool(t.isfinite().all()) for t in (values[-1], after.params, *gradient.values()))
        kept: dict[str, Any] = {"seed": state["seed"], "calls": state["calls"] + 1}
        if self.persistent:
            ran = [row_of(end.carry, index) for end in ends for index in range(len(end.values))]
            kept |= {"carries": stack_carries(ran[:-1]), "summed": xi}
        return MetaGradient(values[-1], gradient, after, ends[-1].losses[:, -1], finite, kept)

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
        fused = update.over_phi if isinstance(update, BlockUpdate) else None
        update_rows, loss_rows = fused or over_phi(update), losses_of_rows(loss)
        params, aux, state = carry
        values, losses = params.new_zeros(len(params)), []
        for step in steps:
            theta = params.detach().requires_grad_()
            measured, aux = loss_rows(theta, aux, step.batch)
            (grads,) = torch.autograd.grad(measured.sum(), theta)
            aux = detach(aux)
            losses.append(measured.detach())
            with torch.no_grad():
                change, state = update_rows(rules, grads, state, params, loss=losses[-1])
                params = params + change
                for target in step.targets:
                    term, _ = loss_rows(params, aux, target.batch)
                    term = term.log() if self.objective == "log-loss" else term
                    values = values + target.weight * term.reshape(len(term), -1).mean(1)
        trajectory = torch.stack(losses) if losses else params.new_zeros(0, *params.shape[:-1])
        return _Ends(values, Carry(params, aux, state), trajectory)


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
) -> EvolutionStrategies:
    """`EvolutionStrategies` whose pairs carry their own runs on: unbiased under truncation."""
    return EvolutionStrategies(pairs, sigma, True, objective, rows)
