"""Settings of meta-training (the meta-loss, the length of runs, the way the meta-gradient is followed) and of training.

As all settings they do not import PyTorch; what computes with it is imported where it is called.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from l2lopt.core.registry import Choice
from l2lopt.core.settings import Schedule, Settings, Split

if TYPE_CHECKING:
    from torch import Generator


class Targets(Settings):
    """Weights of the losses that the meta-loss adds up after each inner step; a loss of weight 0 is not computed."""

    next: NonNegativeFloat = 1.0
    """The weight of the loss on the next training batch."""
    same: NonNegativeFloat = 0.0
    """The weight of the loss on the batch whose gradient made the update. A recurrent language model reads it from the
    state at that batch's end, as any other batch."""
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

    @property
    def longest(self) -> int:
        """The longest T that a run may draw."""
        return self.length if isinstance(self.length, int) else self.length[1]

    def draw_length(self, source: "Generator", update: int) -> int:
        """T for a run that begins at meta-update `update`, counted from 1."""
        import torch

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


class ImitationSettings(Settings):
    """A warm start for a hierarchical rule: it first learns to say the best constants of step and decay of each run."""

    runs: PositiveInt = 2
    """The number of runs of each problem on which all constants are tried."""
    steps: list[PositiveFloat] = Field(default=[0.6, 1.0, 1.8, 3.2], min_length=1)
    """Factors of the harness's step that are tried."""
    decays: list[PositiveFloat] = Field(default=[0.25, 1.0, 2.5, 6.0], min_length=1)
    """Factors of the harness's decay that are tried with each of them."""
    temperature: PositiveFloat = 0.05
    """The difference of meta-losses, divided by the steps, that makes a pair of constants weigh e times as much."""
    updates: PositiveInt = 100
    """The number of Adam's updates of the regression, each on all runs."""
    rate: PositiveFloat = 0.03
    """Adam's rate at the first of them; it falls to 0 along a cosine."""


class MetaTrainSettings(Settings):
    """How φ is changed: by Adam along the meta-gradient, or by CMA-ES; and when the optimiser is validated."""

    updates: PositiveInt = 320
    """The number of meta-updates."""
    rate: PositiveFloat = 5e-3
    """Adam's highest rate."""
    warm_up: NonNegativeInt = 10
    """The number of meta-updates over which the rate rises linearly to its highest. Longer than `updates`: the rate
    only rises, to updates / warm_up of the highest."""
    schedule: Schedule = "cosine"
    """The shape in which the rate then falls to `final`, which it would have one meta-update after the last."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate at the end, divided by the highest rate."""
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """The largest norm of the meta-gradient, which is a mean over the steps of an unroll."""
    decay: PositiveFloat | None = None
    """AdamW's decoupled decay of φ; none: Adam. A rule whose φ = 0 is its nominal rule is pulled back to that where the
    meta-gradient says nothing."""
    batch: PositiveInt = 1
    """The number of inner runs whose meta-gradients a meta-update averages; CMA-ES: in which it ranks the members."""
    checkpoint_every: PositiveInt = 10
    """The number of meta-updates between two checkpoints."""
    validate_every: PositiveInt = 40
    """The number of meta-updates between two validations."""
    keep: Literal["best", "last"] = "best"
    """Which optimiser meta-training ends with: that of the best validation, or the last with a finite score. The best
    may be the one that meta-training began with, where the validation has nothing of what the other problems teach."""
    imitation: ImitationSettings | None = None
    """A warm start for hierarchical rules that are meta-trained by `es` or `pes`; an empty table will do."""
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
        from l2lopt.optimisers.schedules import multiplier

        return self.rate * multiplier(self.schedule, update - 1, self.warm_up, self.updates, self.final)


class TrainSettings(Settings):
    """How an optimisee is trained."""

    steps: PositiveInt = 1000
    """The number of steps."""
    epochs: PositiveInt | None = Field(default=None, le=100_000)
    """The number of passes over the training samples, which then replaces `steps` and `evaluate_every`: there is an
    evaluation and a checkpoint after each pass; none: there are `steps` steps."""
    evaluate_every: PositiveInt = 100
    """The number of steps between two test-mode evaluations on the watched split; there is one before the first step
    and one after the last, too."""
    checkpoint_every: PositiveInt = 100
    """The number of steps between two checkpoints."""
    clip: PositiveFloat | None = None
    """The largest norm of the gradient over all parameters; none: the gradient is not clipped."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The shape of the optimiser's rate (of a learned optimiser's whole update); `cosine` falls to 0, which it
    would have one step after the last."""
    warm_up: NonNegativeInt = 0
    """The number of steps over which the rate first rises linearly."""
    patience: PositiveInt | None = None
    """Early stopping: training ends after so many evaluations without a lower loss. It then trains on the split
    `inner`, watches `heldout`, and ends with the parameters of the lowest loss. None: it trains on `train`, watches
    `test` without choosing anything by it, and ends with the last parameters."""
    average: PositiveInt | Literal["non-monotonic"] | None = None
    """Averaged SGD (Polyak and Juditsky 1992): after so many evaluations, not counting the one before the first step,
    the parameters are averaged over all later steps, and the mean is what is watched, tested and written.
    `non-monotonic` begins once a watched loss is worse than the best of all but the last `patience_to_average` before
    it (Merity et al. 2018). The splits and the end are those of `patience`, which may be none."""
    patience_to_average: PositiveInt = 5
    """The number of latest evaluations that `average = "non-monotonic"` leaves out of the best."""

    @field_validator("warm_up")
    @classmethod
    def _in_time(cls, warm_up: int, info: ValidationInfo) -> int:
        steps, by_epochs = info.data.get("steps", warm_up), info.data.get("epochs")
        if not by_epochs and warm_up > steps:
            raise ValueError(f"at most {steps}, the steps")
        return warm_up

    @property
    def chooses(self) -> bool:
        """Whether training ends with the parameters of the lowest watched loss."""
        return self.patience is not None or self.average is not None

    @property
    def splits(self) -> tuple[Split, Split]:
        """The split that is trained on and the one that is watched."""
        return ("inner", "heldout") if self.chooses else ("train", "test")

    def multiplier(self, step: int, steps: int) -> float:
        """The factor of the rate at step 1, 2, …, `steps`, in [0, 1]."""
        from l2lopt.optimisers.schedules import multiplier

        return multiplier(self.schedule, step - 1, self.warm_up, steps)

    def averages(self, losses: Sequence[float]) -> bool:
        """Whether averaging begins after these watched losses, the first of them from before the first step."""
        if self.average == "non-monotonic":
            best = min(losses[1 : -1 - self.patience_to_average], default=math.inf)
            return losses[-1] > best
        return self.average is not None and len(losses) > self.average
