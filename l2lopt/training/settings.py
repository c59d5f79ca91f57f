"""Settings of meta-training: what the meta-loss measures, how long runs are, how the meta-gradient is followed."""

import math
from typing import Annotated

import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.optimisers.schedules import Schedule, multiplier


class Targets(Settings):
    """Weights of the losses that the meta-loss adds up after each inner step; a loss of weight 0 is not computed."""

    next: NonNegativeFloat = 1.0
    """The weight of the loss on the next training batch."""
    same: NonNegativeFloat = 0.0
    """The weight of the loss on the batch whose gradient made the update."""
    heldout: NonNegativeFloat = 0.0
    """The weight of the loss on samples that the run's inner steps never see; every run holds out other samples."""
    end: NonNegativeFloat = 0.0
    """The weight of the loss on training batches after the run's last step alone, beside the mean over its steps of
    all the above. What pays at the end of a run is not what pays along it."""
    end_heldout: NonNegativeFloat = 0.0
    """The weight of the loss on held-out samples after the run's last step alone."""
    end_batches: PositiveInt = 4
    """The number of batches on which each of the two is measured."""

    @model_validator(mode="after")
    def _some(self) -> "Targets":
        if not self.next + self.same + self.heldout + self.end + self.end_heldout:
            raise ValueError("at least one weight above 0")
        return self

    @property
    def holds_out(self) -> bool:
        """Whether some samples are held out from the inner steps."""
        return bool(self.heldout or self.end_heldout)


class UnrollSettings(Settings):
    """The inner runs: how long they are, what is measured in them, and how they are differentiated."""

    length: PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] = 100
    """T, the inner steps of a run. Two numbers: every run draws its T log-uniformly between them."""
    truncation: PositiveInt | None = None
    """K: there is a meta-update after every K inner steps, and the run goes on from where it was; none: there is one
    after the whole run."""
    curriculum: NonNegativeInt = 0
    """The number of meta-updates over which runs grow to their full length: a run that begins at meta-update u of
    them has T·u/curriculum steps, at least K. 0: all runs have their full length."""
    scaling: NonNegativeFloat = 0.0
    """Random scaling of parameters (Lv et al. 2017): a run optimises θ/c with c = exp(U(−scaling, scaling)), drawn
    for every coordinate and run, so that the learned optimiser meets gradients of many sizes. 0: no scaling."""
    targets: Targets = Targets()
    """The weights of the losses in the meta-loss."""
    estimator: Choice = "blockwise"
    """The estimator of the meta-gradient: a name, or a table of the name and its options."""

    @field_validator("length")
    @classmethod
    def _rising(cls, length: int | list[int]) -> int | list[int]:
        if isinstance(length, list) and length[0] > length[1]:
            raise ValueError("the smaller number first")
        return length

    def draw_length(self, source: torch.Generator, update: int) -> int:
        """T for a run that begins at meta-update `update`, counted from 1."""
        length = self.length
        if not isinstance(length, int):
            low, high = (math.log(bound) for bound in length)
            fraction = torch.rand((), generator=source, dtype=torch.float64).item()
            length = round(math.exp(low + fraction * (high - low)))
        if update >= self.curriculum:
            return length
        return min(length, max(self.truncation or 1, round(length * update / self.curriculum)))


class CMASettings(Settings):
    """CMA-ES in the place of Adam: a normal distribution over φ, whose mean is the optimiser's φ."""

    population: Annotated[int, Field(ge=4, le=10_000)] | None = None
    """λ, the members that every meta-update draws and runs; none: 4 + ⌊3 log n⌋ for n meta-parameters."""
    sigma: Annotated[float, Field(ge=1e-6, le=1e3)] = 0.1
    """The standard deviation of every meta-parameter at the beginning."""
    separable: bool = False
    """Whether a variance for each meta-parameter is adapted instead of all n² covariances: they are learned from fewer
    members, in memory of n numbers."""

    def members(self, count: int) -> int:
        """λ for so many meta-parameters."""
        return self.population or 4 + math.floor(3 * math.log(count))


class MetaTrainSettings(Settings):
    """How φ is changed: by Adam along the meta-gradient, or by CMA-ES; and when the optimiser is validated."""

    updates: PositiveInt = 320
    """The number of meta-updates."""
    rate: PositiveFloat = 5e-3
    """Adam's highest rate."""
    warm_up: NonNegativeInt = 10
    """The number of meta-updates over which the rate rises linearly to its highest."""
    schedule: Schedule = "cosine"
    """The shape in which the rate then falls to `final` at the last meta-update."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate at the end, divided by the highest rate."""
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """The largest norm of the meta-gradient, which is a mean over the steps of an unroll."""
    batch: PositiveInt = 1
    """The number of inner runs whose meta-gradients a meta-update averages; CMA-ES: in which it ranks the members."""
    checkpoint_every: PositiveInt = 10
    """The number of meta-updates between two checkpoints."""
    validate_every: PositiveInt = 40
    """The number of meta-updates between two validations; meta-training ends with the optimiser of the best score."""
    cma: CMASettings | None = None
    """CMA-ES in the place of Adam and of all of the above that is Adam's: rate, warm-up, schedule, final and clip. It
    wants whole runs and the estimator `es`; an empty table will do."""

    @model_validator(mode="after")
    def _falls(self) -> "MetaTrainSettings":
        if self.schedule == "exponential" and not self.final:
            raise ValueError("final above 0 for an exponential schedule")
        return self

    def rate_at(self, update: int) -> float:
        """Adam's rate at meta-update `update` = 1, 2, …, `updates`."""
        return self.rate * multiplier(self.schedule, update - 1, self.warm_up, self.updates, self.final)
