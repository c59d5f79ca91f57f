"""Optimisers, learned and hand-designed. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core import registry
from l2lopt.core.registry import Choice
from l2lopt.optimisers.base import Optimiser
from l2lopt.optimisers.coordinatewise import Coordinatewise, coordinatewise
from l2lopt.optimisers.directions import DIRECTIONS
from l2lopt.optimisers.dowg import DoWG
from l2lopt.optimisers.hand_designed import SGD, AdamW, Lion, Momentum, NAdamW, adam
from l2lopt.optimisers.hierarchical import Hierarchical, hierarchical
from l2lopt.optimisers.inputs import INPUTS, Input
from l2lopt.optimisers.muon import Muon
from l2lopt.optimisers.normalised_adam import NormalisedAdam
from l2lopt.optimisers.normalised_muon import NormalisedMuon
from l2lopt.optimisers.rates import Rate
from l2lopt.optimisers.rule_check import check_rule, check_update
from l2lopt.optimisers.rules import RULES, UpdateRule
from l2lopt.optimisers.schedules import Schedule, Scheduled
from l2lopt.optimisers.small_fc import SmallFC


def scheduled(
    optimiser: Choice,
    shape: Schedule = "cosine",
    warm_up: int = 0,
    total: int | None = None,
    final: float = 0.0,
    lr: Rate | None = None,
) -> Scheduled:
    """`Scheduled` from the name of its inner optimiser.

    Args:
        optimiser: Inner optimiser: a name, or a mapping of name and options.
        shape: Fall after the warm-up.
        warm_up: Updates of the warm-up.
        total: Update at which the fall ends.
        final: Last multiplier.
        lr: The inner optimiser's rate, where its own options do not have it.
    """
    inner = build(optimiser) if lr is None else build(optimiser, lr=lr)
    return Scheduled(inner, shape, warm_up, total, final)


LEARNED: Mapping[str, Callable[..., Optimiser]] = {
    "coordinatewise": coordinatewise,
    "hierarchical": hierarchical,
    "small-fc": SmallFC,
}
HAND_DESIGNED: Mapping[str, Callable[..., Optimiser]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": adam,
    "adamw": AdamW,
    "dowg": DoWG,
    "lion": Lion,
    "muon": Muon,
    "nadamw": NAdamW,
    "normalised-adam": NormalisedAdam,
    "normalised-muon": NormalisedMuon,
}
UNTUNED = ("dowg", "normalised-adam", "normalised-muon")
"""Hand-designed optimisers that need no rate."""
WRAPPERS: Mapping[str, Callable[..., Optimiser]] = {"scheduled": scheduled}
"""Optimisers around another one, whose choice is among their options."""
OPTIMISERS: Mapping[str, Callable[..., Optimiser]] = {**LEARNED, **HAND_DESIGNED, **WRAPPERS}


def make(name: str, **options: Any) -> Optimiser:
    """The optimiser called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    return build({"name": name, **options})


def build(choice: Choice, table: Mapping[str, Callable[..., Optimiser]] = OPTIMISERS, **extra: Any) -> Optimiser:
    """The optimiser of a choice (a name, or a mapping of name and options) from a table, knowing its description.

    Args:
        choice: Name, or mapping with the key `name`.
        table: Name → class or function.
        extra: Options that the choice must leave to the caller, such as a seed.

    Raises:
        UserError: For a mistake in the choice, and for a rule of a module's own that breaks the contract.
    """
    # Whatever PyTorch's default device is: its generator would draw φ, and a model is often made on "meta".
    with torch.device("cpu"):
        made = registry.build(table, "optimiser", choice, **extra)
        optimiser: Optimiser = registry.checked_kind("optimiser", choice, made, Optimiser)
        optimiser.description = ({"name": choice} if isinstance(choice, str) else dict(choice)) | extra
        # With a rate for each of several runs it takes that number of rows alone; it is tried with a single one before.
        if not any(isinstance(value, Tensor) and value.dim() for value in pytree.tree_leaves(optimiser.description)):
            check_rule(optimiser)
    return optimiser


__all__ = [
    "DIRECTIONS",
    "HAND_DESIGNED",
    "INPUTS",
    "LEARNED",
    "OPTIMISERS",
    "RULES",
    "SGD",
    "UNTUNED",
    "WRAPPERS",
    "AdamW",
    "Coordinatewise",
    "DoWG",
    "Hierarchical",
    "Input",
    "Lion",
    "Momentum",
    "Muon",
    "NAdamW",
    "NormalisedAdam",
    "NormalisedMuon",
    "Optimiser",
    "Rate",
    "Scheduled",
    "SmallFC",
    "UpdateRule",
    "adam",
    "build",
    "check_update",
    "coordinatewise",
    "hierarchical",
    "make",
    "scheduled",
]
