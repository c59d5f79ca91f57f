"""Ways to get a meta-gradient. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt.core import registry
from l2lopt.estimators.backprop import Backprop
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator
from l2lopt.estimators.blockwise import Blockwise
from l2lopt.estimators.evolution import EvolutionStrategies, persistent_evolution_strategies
from l2lopt.estimators.higher import Higher
from l2lopt.estimators.mixed import Mixed

ESTIMATORS: Mapping[str, Callable[..., MetaGradientEstimator]] = {
    "blockwise": Blockwise,
    "backprop": Backprop,
    "higher": Higher,
    "es": EvolutionStrategies,
    "pes": persistent_evolution_strategies,
    "mixed": Mixed,
}


def make(name: str, **options: Any) -> MetaGradientEstimator:
    """The estimator called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    estimator: MetaGradientEstimator = registry.make(ESTIMATORS, "estimator", name, **options)
    return estimator


__all__ = [
    "ESTIMATORS",
    "Backprop",
    "Blockwise",
    "EstimatorState",
    "EvolutionStrategies",
    "Higher",
    "MetaGradient",
    "MetaGradientEstimator",
    "Mixed",
    "make",
]
