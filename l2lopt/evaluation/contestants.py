"""Optimisers of a comparison, each with the rates that it may have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.evaluation.torch_classes import OptimizerFactory
from l2lopt.optimisers import Optimiser, Rate, Scheduled
from l2lopt.report.names import BEFORE

Runner: TypeAlias = Optimiser | OptimizerFactory | Sequence[OptimizerFactory]
"""What can run free: an optimiser of ours, a factory of `torch.optim.Optimizer`, or such a factory for each run."""


class Contestant(NamedTuple):
    """An optimiser of a comparison.

    Attributes:
        name: Name in the results.
        kind: "learned" or "baseline".
        make: (rate, or [S], a rate for each of S runs; number of steps of these runs) → what runs.
        rates: Rates to choose from; a single one is taken as it is.
        knows_end: Whether its steps depend on where the run ends, so that every horizon has runs of its own.
        one_by_one: Whether its runs are made one after the other whatever the group.
    """

    name: str
    kind: str
    make: Callable[[Rate, int], Runner]
    rates: tuple[float, ...]
    knows_end: bool = False
    one_by_one: bool = False

    def at(self, rates: Rate, length: int) -> "AtRates":
        """Its runs at a rate, or at a rate each, for `length` steps."""
        return AtRates(self, rates, length)


class AtRates(NamedTuple):
    """A contestant whose runs have their rates.

    Attributes:
        contestant: Contestant that runs.
        rates: Rate of all runs, or [S], a rate for each run.
        length: Step that the runs take for their end.
    """

    contestant: Contestant
    rates: Rate
    length: int

    def build(self, group: slice) -> Runner:
        """The optimiser of some of the runs."""
        rates = self.rates[group] if isinstance(self.rates, Tensor) else self.rates
        return self.contestant.make(rates, self.length)

    def build_rows(self, group: slice, count: int) -> Runner:
        """The same for `count` rows, of which those beyond the group are like its last one.

        A rate that was chosen is a tensor, an input of a compiled step, so that all choices share one.
        """
        if isinstance(self.rates, Tensor):
            own = self.rates[group]
            return self.contestant.make(torch.cat([own, own[-1:].expand(count - len(own))]), self.length)
        if len(self.contestant.rates) == 1:
            return self.build(group)
        return self.contestant.make(torch.full((count,), self.rates, dtype=torch.float64), self.length)

    def facts(self, group: slice) -> Mapping[str, Any]:
        """What some of the runs depend on beside their problems, for a cache."""
        rates = self.rates[group].tolist() if isinstance(self.rates, Tensor) else self.rates
        return {"rates": rates, "length": self.length}


def learned(name: str, optimiser: Optimiser | OptimizerFactory, multipliers: Sequence[float] = (1.0,)) -> Contestant:
    """A learned optimiser, or any other that takes part as it is.

    Args:
        name: Name in the results.
        optimiser: Optimiser of ours, or a factory of `torch.optim.Optimizer`.
        multipliers: Factors of its updates to choose from; only an optimiser of ours has others than 1.
    """

    def make(rate: Rate, length: int) -> Runner:
        if not isinstance(optimiser, Optimiser) or (not isinstance(rate, Tensor) and rate == 1):
            return optimiser
        return Scheduled(optimiser, "constant", lr=rate)

    knows_end = isinstance(optimiser, Optimiser) and optimiser.knows_end
    return Contestant(name, "learned", make, tuple(multipliers), knows_end, not isinstance(optimiser, Optimiser))


def tuned_name(name: str) -> str:
    """The name of a learned optimiser's second row, in which the multiplier is tuned."""
    return f"{name}, multiplier tuned"


def untrained_name(name: str) -> str:
    """The name of a learned optimiser's row with the φ that its meta-training began from."""
    return f"{name}, {BEFORE}"
