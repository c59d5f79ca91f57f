"""The contract of a meta-optimiser: what changes φ, one meta-update after another."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from l2lopt.optimisers import Optimiser


class MetaUpdate(NamedTuple):
    """What is told of a meta-update.

    Attributes:
        figures: Name → figure, for the records and the progress.
        inner_steps: The number of inner steps of the batch's runs; rules that share a run count once.
        skipped: The number of runs that were left out because they told nothing.
    """

    figures: dict[str, float]
    inner_steps: int
    skipped: int


class MetaOptimiser(ABC):
    """Changes the meta-parameters of one optimiser, in place, by what its inner runs tell."""

    @abstractmethod
    def step(self, update: int) -> MetaUpdate:
        """The next meta-update. Collective: every rank must call it, and has the same φ afterwards.

        Args:
            update: The number of the meta-update, counted from 1.
        """

    @abstractmethod
    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that the next steps depend on beside φ and the inner runs, as facts that JSON can say and tensors."""

    @abstractmethod
    def load_state_dict(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Puts back what `state_dict` gave, found among the facts and tensors of a whole checkpoint.

        Raises:
            LookupError, TypeError, ValueError: For a state that is not one of this work.
        """


def assign(optimiser: Optimiser, phi: Mapping[str, Tensor]) -> None:
    """Overwrites the optimiser's meta-parameters with these values."""
    with torch.no_grad():
        for name, parameter in optimiser.phi().items():
            # In place: a meta-optimiser holds these very tensors.
            parameter.copy_(phi[name])


def finite_mean(values: Iterable[Tensor]) -> float:
    """The mean of those numbers that are finite; NaN if none is."""
    numbers = [float(value) for value in values]
    kept = [number for number in numbers if math.isfinite(number)]
    return fmean(kept) if kept else math.nan
