"""The meta-gradient followed by Adam: unroll after unroll, their mean clipped to a norm."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.schedules import set_rates
from l2lopt.training.clipping import clip_gradients
from l2lopt.training.inner_runs import InnerRuns, UnrollSummary
from l2lopt.training.meta_optimiser import MetaOptimiser, MetaUpdate
from l2lopt.training.settings import MetaTrainSettings

_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
"""What Adam keeps of a parameter once it has made a step."""


class Adam(MetaOptimiser):
    """Adam along the mean of the meta-gradients of the batch's next unrolls.

    The meta-gradient of each unroll is divided by its number of steps; those that are finite are averaged, and the mean
    is clipped. An unroll that is not finite is counted and left out, and a new run begins in the place of its run.

    Args:
        optimiser: The learned optimiser.
        runs: The inner runs.
        settings: The rate, its schedule, the largest norm and the decay.
    """

    def __init__(self, optimiser: Optimiser, runs: InnerRuns, settings: MetaTrainSettings) -> None:
        self.optimiser, self.runs, self.settings = optimiser, runs, settings
        if any(value.dtype == torch.bfloat16 for value in optimiser.phi().values()):
            said = "φ is in bfloat16, as the problems' parameters are: steps below 1/256 of a number are rounded away"
            logging.getLogger("l2lopt").warning("%s; meta-train on parameters in float32", said)
        # Without a decay it is Adam, to the bit.
        self.adam = torch.optim.AdamW(optimiser.parameters(), lr=settings.rate, weight_decay=settings.decay or 0.0)

    def step(self, update: int) -> MetaUpdate:
        """The next unroll of every run, and a step along their mean; see `MetaOptimiser`."""
        unrolls = self.runs.unroll(update)
        finite = [unroll for unroll in unrolls if unroll.finite]
        figures = self._follow(finite, self.settings.rate_at(update))
        if self.settings.batch > 1:
            figures["agreement"] = agreement([unroll.gradient for unroll in finite])
        return MetaUpdate(figures, sum(unroll.steps for unroll in unrolls), len(unrolls) - len(finite))

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Adam's moments and step counts, as tensors."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.optimiser.phi().items():
            tensors |= {f"adam/{name}/{key}": value for key, value in self.adam.state[parameter].items()}
        return {}, tensors

    def load_state_dict(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Puts back the moments and step counts."""
        for name, parameter in self.optimiser.phi().items():
            prefix = f"adam/{name}/"
            for key, value in tensors.items():
                if key.startswith(prefix):
                    # Adam's step count stays on the CPU; its moments lie beside the parameter.
                    placed = value if key == f"{prefix}step" else value.to(parameter)
                    self.adam.state[parameter][key.removeprefix(prefix)] = placed
            if (found := self.adam.state[parameter].keys()) - _MOMENTS or len(found) % len(_MOMENTS):
                raise KeyError(f"{', '.join(found)} where Adam has {', '.join(sorted(_MOMENTS))}")

    def _follow(self, unrolls: Sequence[UnrollSummary], rate: float) -> dict[str, float]:
        """One step of Adam along the mean of the unrolls' meta-gradients; without an unroll φ stays."""
        if not unrolls:
            return dict.fromkeys(("meta_loss", "loss", "gradient_norm", "update_size"), math.nan) | {"rate": 0.0}
        for name, parameter in self.optimiser.phi().items():
            # In the order of the runs' indices on every rank: the mean does not depend on who made which run.
            parameter.grad = torch.stack([unroll.gradient[name] for unroll in unrolls]).mean(0).to(parameter)
        norm = clip_gradients(self.optimiser.parameters(), self.settings.clip)
        set_rates(self.adam, [rate])
        self.adam.step()
        self.adam.zero_grad()
        return {
            "meta_loss": _mean([unroll.meta_loss for unroll in unrolls]),
            "loss": _mean([unroll.loss for unroll in unrolls]),
            "gradient_norm": float(norm),
            "rate": rate,
            "update_size": _mean([unroll.update_size for unroll in unrolls]),
        }


def agreement(gradients: Sequence[Params]) -> float:
    """The squared norm of the mean of some meta-gradients over the mean of their squared norms, in [0, 1].

    It is 1 where all are equal, and about 1/n where n of them are noise around 0. NaN for fewer than two, and where all
    are 0.
    """
    if len(gradients) < 2:
        return math.nan
    of_mean = of_each = 0.0
    for name in gradients[0]:
        each = torch.stack([gradient[name] for gradient in gradients]).cpu().double()
        of_mean += float(each.mean(0).square().sum())
        of_each += float(each.square().sum()) / len(gradients)
    return of_mean / of_each if of_each else math.nan


def _mean(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).mean())
