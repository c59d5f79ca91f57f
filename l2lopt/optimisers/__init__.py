"""Optimisers, learned and hand-made. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt.core import registry
from l2lopt.core.registry import Choice
from l2lopt.optimisers.base import Optimiser
from l2lopt.optimisers.coordinatewise import Coordinatewise, coordinatewise
from l2lopt.optimisers.hand_designed import SGD, AdamW, Momentum, adam
from l2lopt.optimisers.inputs import INPUTS, Input
from l2lopt.optimisers.normalised_adam import NormalisedAdam
from l2lopt.optimisers.rules import RULES, UpdateRule

LEARNED: Mapping[str, Callable[..., Optimiser]] = {"coordinatewise": coordinatewise}
HANDMADE: Mapping[str, Callable[..., Optimiser]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": adam,
    "adamw": AdamW,
    "normalised-adam": NormalisedAdam,
}
OPTIMISERS: Mapping[str, Callable[..., Optimiser]] = {**LEARNED, **HANDMADE}


def make(name: str, **options: Any) -> Optimiser:
    """The optimiser called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    return build({"name": name, **options})


def build(choice: Choice, table: Mapping[str, Callable[..., Optimiser]] = OPTIMISERS, **extra: Any) -> Optimiser:
    """The optimiser of a choice (a name, or a mapping of name and options) from a table, knowing its description."""
    optimiser: Optimiser = registry.build(table, "optimiser", choice, **extra)
    optimiser.description = ({"name": choice} if isinstance(choice, str) else dict(choice)) | extra
    return optimiser


__all__ = [
    "HANDMADE",
    "INPUTS",
    "LEARNED",
    "OPTIMISERS",
    "RULES",
    "SGD",
    "AdamW",
    "Coordinatewise",
    "Input",
    "Momentum",
    "NormalisedAdam",
    "Optimiser",
    "UpdateRule",
    "adam",
    "build",
    "coordinatewise",
    "make",
]
