"""Whether a saved state can belong to a group's rules and parameters; checked before anything is loaded."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.precision import double
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim.options import names_of
from l2lopt.torch_optim.state_parts import arrays_of
from l2lopt.weights import files

PREFIXES = {"weights": "", "fallback": "fallback."}
"""Rules of a group → first part of the names of their state in `state[p]`."""
MAY_LACK = ("total_steps", "skipped")
"""Shared tensors that a state may lack: an optimiser is told the first, and counts the second from 0 again."""
OBSOLETE = ("statistic",)
"""Shared tensors that older releases stored and each step computes."""
_REMEDY = "make the optimiser with the rules it was saved with, or begin without its state"


def check_rules(
    group: Mapping[str, Any],
    saved: dict[str, Any],
    rules: Mapping[str, Optimiser],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Refuses a state of other rules than the group's.

    A hash of the first releases cannot be compared with those of today. Where `saved` has one, the names and numbers
    in the state are compared instead, and the hash in `saved` is replaced.

    Args:
        group: Parameter group of the optimiser that loads.
        saved: Parameter group of the saved optimiser.
        rules: Rules by hash.
        state: Saved state by the parameters that load it.
    """
    for key, prefix in PREFIXES.items():
        if group[key] is not None and files.is_old(saved.get(key)):
            _check_names(group, prefix, rules[group[key]], state)
            saved[key] = group[key]
        if saved.get(key) != group[key]:
            expected, found = f"the state of {key} {group[key]}", f"that of {key} {saved.get(key)}"
            raise UserError("load_state_dict", expected=expected, found=found, remedy=_REMEDY)


def check_shapes(
    group: Mapping[str, Any], rules: Mapping[str, Optimiser], state: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Refuses a state that cannot be one of the group's rules and parameters.

    Each array must be there, in the shape that they give it, and each tensor that all coordinates share, such as the
    step count, as one finite number of at least 0.

    Args:
        group: Parameter group of the optimiser that loads.
        rules: Rules by hash.
        state: Saved state by the parameters that load it.
    """
    for key, prefix in PREFIXES.items():
        if group[key] is None:
            continue
        initial = _one_coordinate(rules[group[key]])
        arrays = list(arrays_of(initial))
        for name, param in zip(names_of(group), group["params"], strict=True):
            saved = state.get(param, {})
            there = {a.name: saved[prefix + a.name] for a in arrays if prefix + a.name in saved}
            found: dict[str, Any] = {
                name: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in there.items()
            }
            if found and found != {array.name: array.part_shape(param.shape) for array in arrays}:
                expected = f"{', '.join(array.name for array in arrays)} [..., *{list(param.shape)}]"
                remedy = "give it the state of this model"
                raise UserError(f"load_state_dict: {name}", expected=expected, found=str(found), remedy=remedy)
            own = _names_of_rule(saved, prefix)
            # A rule that a fallback has taken over from may have diverged, and is not asked any more.
            asked = own and not (key == "weights" and group.get("fallen_back"))
            for shared, value in initial.shared.items() if asked else ():
                if shared in own or shared not in MAY_LACK:
                    _check_number(f"load_state_dict: {name}: {prefix}{shared}", own.get(shared), value)


def _check_number(where: str, saved: Any, initial: Tensor) -> None:
    """Refuses what cannot be a step count, or another number that all coordinates share and that was once `initial`."""
    number = double(torch.as_tensor(math.nan if saved is None else saved))
    right = saved is not None and number.dim() == 0
    if initial.is_floating_point():  # of a run that has diverged it may be infinite, or no number
        right = right and not float(number) < 0
    else:
        right = right and 0 <= float(number) < math.inf and float(number).is_integer()
    if not right:
        expected = f"one {'' if initial.is_floating_point() else 'whole '}number, at least 0"
        found, remedy = "none" if saved is None else str(number.tolist()), "load a state that was saved whole"
        raise UserError(where, expected=expected, found=found, remedy=remedy)


def _check_names(
    group: Mapping[str, Any], prefix: str, rule: Optimiser, state: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Refuses a state that has other arrays than a rule, or more or fewer numbers per coordinate."""
    initial = _one_coordinate(rule)
    wanted = {array.name: tuple(array.value.shape[:-1]) for array in arrays_of(initial)}
    for name, param in zip(names_of(group), group["params"], strict=True):
        own = _names_of_rule(state.get(param, {}), prefix)
        arrays = {k: _features(value, param) for k, value in own.items() if k not in (*initial.shared, *OBSOLETE)}
        if own and not (arrays == wanted and own.keys() >= initial.shared.keys()):
            raise UserError(f"load_state_dict: {name}", expected=str(wanted), found=str(arrays), remedy=_REMEDY)


def _one_coordinate(rule: Optimiser) -> OptimiserState:
    """The initial state of a rule for one coordinate."""
    return rule.init(Layout(("one",), ((1,),)))


def _names_of_rule(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The part of a parameter's state that belongs to one rule, under the rule's names."""
    # The empty prefix comes last, as it begins every key.
    begins = {key: next(p for p in reversed(PREFIXES.values()) if key.startswith(p)) for key in saved}
    return {key.removeprefix(prefix): saved[key] for key in saved if key != "vector" and begins[key] == prefix}


def _features(value: Any, param: Tensor) -> tuple[int, ...]:
    """The numbers that each coordinate has in an array of a parameter's state, axis by axis."""
    shape = torch.as_tensor(value).shape
    return tuple(shape[: len(shape) - param.dim()])
