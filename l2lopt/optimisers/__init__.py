"""Optimisers, learned and hand-made. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt import tables
from l2lopt.optimisers.coordinatewise import Coordinatewise, coordinatewise
from l2lopt.optimisers.handmade import SGD, AdamW, Momentum, adam
from l2lopt.optimisers.inputs import INPUTS, Input
from l2lopt.optimisers.optimiser import Optimiser
from l2lopt.optimisers.rules import RULES, UpdateRule

OPTIMISERS: Mapping[str, Callable[..., Optimiser]] = {
    "coordinatewise": coordinatewise,
    "sgd": SGD,
    "momentum": Momentum,
    "adam": adam,
    "adamw": AdamW,
}


def make(name: str, **options: Any) -> Optimiser:
    """The optimiser called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    optimiser: Optimiser = tables.make(OPTIMISERS, "optimiser", name, **options)
    optimiser.description = {"name": name, **options}
    return optimiser


__all__ = [
    "INPUTS",
    "OPTIMISERS",
    "RULES",
    "SGD",
    "AdamW",
    "Coordinatewise",
    "Input",
    "Momentum",
    "Optimiser",
    "UpdateRule",
    "adam",
    "coordinatewise",
    "make",
]
