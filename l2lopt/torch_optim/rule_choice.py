"""The rules that `LearnedOptimizer` is given: by name, file or choice, or as optimisers."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from l2lopt import optimisers
from l2lopt.core.errors import UserError, within
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim.options import USUAL_RATES, check_rate
from l2lopt.weights import files


def rule_of(weights: Any, option: str = "weights") -> Optimiser:
    """A rule of its own for what a user gave as `weights`.

    Args:
        weights: Name, file, choice or optimiser.
        option: Name of the option that it was given as.

    Raises:
        UserError: Something else, a rule without the rate that it needs, a file that cannot be read, or a rule of a
            module's own that breaks the contract.
    """
    if not isinstance(weights, Optimiser | Mapping | str | Path):
        expected = "a name, a file, a choice or an optimiser"
        remedy = "a rate goes to lr=" if isinstance(weights, float | int) else "use 'lstm', for instance"
        raise UserError("LearnedOptimizer: weights", expected=expected, found=repr(weights), remedy=remedy)
    rated = {*optimisers.HAND_DESIGNED} - {*optimisers.UNTUNED}
    if isinstance(weights, str) and weights in rated and not Path(weights).exists():
        choice = {"name": weights, "lr": USUAL_RATES.get(weights, 0.001)}
        found, remedy = f"{weights!r} without a rate", f"use {choice}, for instance"
        raise UserError("LearnedOptimizer: weights", expected="a rule", found=found, remedy=remedy)
    if isinstance(weights, Optimiser):
        rule = deepcopy(weights)
    elif isinstance(weights, Mapping) or weights in optimisers.UNTUNED:
        rule = optimisers.build(weights if isinstance(weights, str) else dict(weights))
    else:
        rule = files.load(weights)
    check_rate(rule, option)
    optimisers.check_update(rule)
    return rule


def fallback_of(fallback: Any) -> Optimiser:
    """A hand-designed rule for what a user gave as `fallback`.

    Args:
        fallback: Name, choice or optimiser; a name that needs a rate gets 0.001.

    Raises:
        UserError: Something else, or a learned rule.
    """
    if isinstance(fallback, Optimiser):
        if fallback.phi():
            found, remedy = type(fallback).__name__, f"choose one of {', '.join(optimisers.HAND_DESIGNED)}"
            raise UserError("LearnedOptimizer: fallback", expected="a hand-made optimiser", found=found, remedy=remedy)
        return fallback
    if not isinstance(fallback, Mapping | str):
        expected = "a name, a choice or a hand-made optimiser"
        remedy = 'use "adam", for instance'
        raise UserError("LearnedOptimizer: fallback", expected=expected, found=repr(fallback), remedy=remedy)
    choice = dict(fallback) if isinstance(fallback, Mapping) else {"name": fallback}
    if isinstance(fallback, str) and fallback not in optimisers.UNTUNED:
        choice["lr"] = 1e-3
    with within("LearnedOptimizer: fallback"):
        return optimisers.build(choice, optimisers.HAND_DESIGNED)
