"""Ways to get a meta-gradient. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt import tables
from l2lopt.unrolls.blockwise import Blockwise
from l2lopt.unrolls.evolution import EvolutionStrategies, persistent_evolution_strategies
from l2lopt.unrolls.higher import Higher
from l2lopt.unrolls.taped import Taped
from l2lopt.unrolls.unroll import MetaGradient, Unroll, UnrollState

UNROLLS: Mapping[str, Callable[..., Unroll]] = {
    "blockwise": Blockwise,
    "taped": Taped,
    "higher": Higher,
    "es": EvolutionStrategies,
    "pes": persistent_evolution_strategies,
}


def make(name: str, **options: Any) -> Unroll:
    """The unroll called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    unroll: Unroll = tables.make(UNROLLS, "unroll", name, **options)
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
