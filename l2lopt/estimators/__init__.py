"""Ways to get a meta-gradient. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt.core import registry
from l2lopt.estimators.backprop import Taped
from l2lopt.estimators.base import MetaGradient, Unroll, UnrollState
from l2lopt.estimators.blockwise import Blockwise
from l2lopt.estimators.evolution import EvolutionStrategies, persistent_evolution_strategies
from l2lopt.estimators.higher import Higher

UNROLLS: Mapping[str, Callable[..., Unroll]] = {
    "blockwise": Blockwise,
    "taped": Taped,
    "higher": Higher,
    "es": EvolutionStrategies,
    "pes": persistent_evolution_strategies,
}


def make(name: str, **options: Any) -> Unroll:
    """The unroll called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    unroll: Unroll = registry.make(UNROLLS, "unroll", name, **options)
    return unroll


__all__ = [
    "UNROLLS",
    "Blockwise",
    "EvolutionStrategies",
    "Higher",
    "MetaGradient",
    "Taped",
    "Unroll",
    "UnrollState",
    "make",
]
