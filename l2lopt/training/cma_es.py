"""Meta-training without meta-gradients: a normal distribution over φ, adapted by CMA-ES.

Hansen 2016, "The CMA Evolution Strategy: A Tutorial"; Ros and Hansen 2008 (separable). By the package cmaes. For rules
with few meta-parameters.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from l2lopt.core.errors import UserError, install
from l2lopt.core.layout import Params
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Carry, InnerStep, Loss, Update
from l2lopt.estimators import EvolutionStrategies, MetaGradientEstimator
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes
from l2lopt.storage.checkpoint import fitting
from l2lopt.training.inner_runs import InnerRuns
from l2lopt.training.meta_optimiser import MetaOptimiser, MetaUpdate, assign, finite_mean
from l2lopt.training.settings import CMASettings, UnrollSettings

ARRAYS = ("_mean", "_C", "_p_sigma", "_pc")
"""The arrays of the package's `CMA` and `SepCMA` that `tell` changes: mean, covariance and the two evolution paths."""


class MemberFitness(NamedTuple):
    """What a run tells of a population.

    Attributes:
        values: The meta-loss of each member, [λ].
        meta_loss: The meta-loss with the mean of the distribution, divided by the number of steps.
        loss: The training loss at its last step.
        update_size: The root mean square of its change of θ, divided by the number of steps.
        steps: The number of inner steps.
    """

    values: Tensor
    meta_loss: Tensor
    loss: Tensor
    update_size: Tensor
    steps: int


class CMAES(MetaOptimiser):
    """φ is the mean of a normal distribution N(m, σ²C) over meta-parameters, which CMA-ES adapts.

    A meta-update draws λ members, runs all of them and the mean through each of the batch's runs, from the same start
    and on the same batches, as rows of one vectorised run. Within each run the members are ranked by their meta-loss,
    and a member's fitness is the mean of its ranks: a task whose losses are a hundred times as large, or vary a hundred
    times as much, has the same say as any other. A meta-loss that is not finite ranks last. A run in which none is
    finite is counted as skipped; if all are, the distribution stays as it is.

    Everything is float64 and on the CPU but the runs. The population of a meta-update is a function of the seed, the
    update and the distribution. Rank 0 alone draws and tells, on one thread: the last bits of a product of matrices
    depend on the processor and on the threads.

    Cost: the runs of λ + 1 rules, no tape. The full covariance of n meta-parameters takes about 16 λ n² bytes and
    2 λ n³ operations a meta-update (763 of them and 23 members: 210 MB, 0.8 s on one core), the separable one some λ n
    of both.

    Args:
        optimiser: The learned optimiser; its φ is the first mean.
        runs: The inner runs, which are made whole; of their estimator, `es`, the objective, the rows and the backend
            count.
        settings: The distribution's settings.

    Raises:
        UserError: For another estimator, for truncated runs, or if the package cmaes is missing.
    """

    def __init__(self, optimiser: Optimiser, runs: InnerRuns, settings: CMASettings) -> None:
        self.optimiser, self.runs = optimiser, runs
        self.estimator = checked(runs.estimator, runs.settings)
        mean = torch.cat([value.detach().flatten() for value in optimiser.phi().values()]).cpu().double().numpy()
        # The package has no separable form of one number, where the two are one.
        kind = _package().SepCMA if settings.separable and len(mean) > 1 else _package().CMA
        self.cma: Any = kind(mean, settings.sigma, population_size=settings.members(len(mean)))

    def step(self, update: int) -> MetaUpdate:
        """Draws a population, ranks it on a new batch of runs, and adapts the distribution; see `MetaOptimiser`."""
        members = processes.on_first(partial(self._ask, update))
        phi = self.optimiser.phi()
        rules = {name: torch.cat([rows, phi[name].detach()[None]]) for name, rows in self._rows(members).items()}
        found = self.runs.whole(update, partial(self._run, rules))
        fitness = torch.stack([one.values.cpu().double() for one in found])
        telling = fitness.isfinite().any(1)
        if telling.any():
            mean = processes.on_first(lambda: self._tell(members, mean_ranks(fitness)))
            assign(self.optimiser, {name: row[0] for name, row in self._rows(mean[None]).items()})
        figures = {
            "meta_loss": finite_mean(one.meta_loss for one in found),
            "loss": finite_mean(one.loss for one in found),
            "update_size": finite_mean(one.update_size for one in found),
            "sigma": float(self.cma._sigma),
        }
        return MetaUpdate(figures, sum(one.steps for one in found), int((~telling).sum()))

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The distribution: rank 0 has it."""
        # Not by the package's own `__getstate__`, which keeps half of a covariance that is symmetric but for rounding.
        tensors = {f"cma{name}": torch.from_numpy(getattr(self.cma, name)) for name in ARRAYS}
        return {"cma": {"sigma": float(self.cma._sigma), "generation": int(self.cma.generation)}}, tensors

    def load_state_dict(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Puts back the distribution."""
        saved, attributes = facts["cma"], {}
        for name in ARRAYS:
            array = fitting(tensors[f"cma{name}"], torch.from_numpy(getattr(self.cma, name)))
            if not array.isfinite().all():
                raise ValueError(f"cma{name} is not finite")
            attributes[name] = array.clone().numpy()
        sigma, generation = saved["sigma"], saved["generation"]
        if not (isinstance(sigma, float) and 0 < sigma < math.inf and type(generation) is int and generation >= 0):
            raise ValueError(f"sigma {sigma!r} in generation {generation!r}")
        vars(self.cma).update(attributes, _sigma=sigma, _g=generation)

    def _ask(self, update: int) -> Tensor:
        """The members of a meta-update, [λ, n]. It leaves the distribution as it is."""
        before = dict(vars(self.cma))
        # By seed and update: meta-training that goes on from a checkpoint draws what it would have drawn.
        self.cma.reseed_rng(seed_of("cma", self.runs.seed, update) % 2**32)
        with _one_thread():
            members = np.stack([self.cma.ask() for _ in range(self.cma.population_size)])
        # Asking keeps the decomposition of C and puts its product, with other last bits, in the place of C. Without
        # this line a population that is never told would leave them, and a checkpoint would have to hold them.
        vars(self.cma).update(before)
        return torch.from_numpy(members)

    def _tell(self, members: Tensor, fitness: Tensor) -> Tensor:
        """Adapts the distribution; gives its mean, [n]."""
        with _one_thread():
            self.cma.tell(list(zip(members.numpy(), fitness.tolist(), strict=True)))
        return torch.from_numpy(self.cma.mean.copy())

    def _rows(self, flat: Tensor) -> Params:
        """Rows [R, n] of all meta-parameters as a φ with a row axis, in the optimiser's dtype and on its device."""
        phi = self.optimiser.phi()
        parts = flat.split([value.numel() for value in phi.values()], 1)
        return {
            name: part.reshape(-1, *value.shape).to(value)
            for (name, value), part in zip(phi.items(), parts, strict=True)
        }

    def _run(
        self, rules: Params, update: Update, loss: Loss, carry: Carry, steps: Sequence[InnerStep]
    ) -> MemberFitness:
        """What one run tells of rules whose last is the mean."""
        count = len(next(iter(rules.values())))
        ends, steps_made = self.estimator.run_members(update, loss, rules, [carry] * count, steps), len(steps)
        update_size = (ends.carries[-1].params - carry.params).square().mean().sqrt() / steps_made
        return MemberFitness(
            ends.values[:-1], ends.values[-1] / steps_made, ends.losses[-1, -1].mean(), update_size, steps_made
        )


def mean_ranks(values: Tensor) -> Tensor:
    """The rank of each member within each run, 1 the lowest value, as the mean over runs: [runs, λ] → [λ].

    Members of equal value share the mean of their ranks; values that are not finite are equal and above all others.

    Example:
        >>> import torch
        >>> from l2lopt.training.cma_es import mean_ranks
        >>> mean_ranks(torch.tensor([[0.1, 0.3, 0.2], [500.0, 100.0, torch.nan]]))
        tensor([1.5000, 2.0000, 2.5000], dtype=torch.float64)
    """
    values = torch.where(values.isfinite(), values, torch.inf)
    lower = (values[:, None, :] < values[:, :, None]).sum(2)
    equal = (values[:, None, :] == values[:, :, None]).sum(2)  # with the member itself
    return (lower + (equal + 1).double() / 2).mean(0)


def checked(estimator: MetaGradientEstimator, settings: UnrollSettings) -> EvolutionStrategies:
    """The estimator, if CMA-ES can use it.

    Args:
        estimator: The estimator of the experiment.
        settings: The settings of the inner runs.

    Raises:
        UserError: For another estimator than `es`, for truncated runs, or if the package cmaes is missing.
    """
    _package()
    if not isinstance(estimator, EvolutionStrategies) or estimator.persistent:
        expected, remedy = 'the estimator "es", whose runs it makes', 'set unroll.estimator = "es"'
        raise UserError("meta.cma", expected=expected, found="another", remedy=remedy)
    longest = settings.longest
    if settings.truncation is not None and settings.truncation < longest:
        found = f"unroll.truncation = {settings.truncation} of up to {longest} steps"
        raise UserError("meta.cma", expected="whole runs", found=found, remedy=f"leave it out, or set it to {longest}")
    return estimator


def _one_thread() -> Any:
    """A block in which NumPy's products of matrices are made by one thread."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, "blas")


def _package() -> Any:
    """The package cmaes."""
    try:
        import cmaes
    except ImportError:
        remedy = install("cma")
        raise UserError("meta.cma", expected="the package cmaes", found="none", remedy=remedy) from None
    return cmaes
