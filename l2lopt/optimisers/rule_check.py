"""Whether a rule of somebody else's keeps the contract of `Optimiser`, tried by one update of nine coordinates.

A rule that gives back the wrong thing would end in a traceback deep inside, or train and be silently wrong.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain, zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser

_PROBE = Layout(("weight", "bias"), ((3, 2), (3,)))
_ROWS = 2
_ASIDE = ("training", "description")
_SEE = "see docs/development/how-to-add.md, An optimiser"


def options(part: nn.Module) -> dict[str, str]:
    """The plain values of a part of an optimiser, name → text that is the same in every process."""
    own = vars(part).items()
    return {key: written(value) for key, value in own if not key.startswith("_") and key not in _ASIDE}


def written(value: Any) -> str:
    """A text of a value, the same in every process: without addresses, and of a tensor with all its numbers."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def check_rule(rule: Optimiser) -> None:
    """Refuses a rule of somebody else's, just built, that breaks the contract; those of this library are not tried.

    Args:
        rule: Rule to try, of which a copy makes the updates.

    Raises:
        UserError: For what `check_update` refuses, for rows that see one another, and for an option that changes.
    """
    if not _is_foreign(rule):
        return
    copy = _copy(rule)
    before = {name: options(part) for name, part in copy.named_modules()}
    both, one = (_update(copy, list(range(rows)), (rows,)) for rows in (_ROWS, 1))
    if not torch.allclose(both[:1], one, rtol=1e-3, atol=1e-6, equal_nan=True):
        found, remedy = "an update of a row that depends on the others", "reduce over the last axis alone"
        _refuse(rule, "rows that do not see one another", found, f"{remedy}, or by layout.tensors.mean")
    after = {name: options(part) for name, part in copy.named_modules()}
    for part, name in ((part, name) for part, own in before.items() for name in own):
        if after.get(part, {}).get(name) != before[part][name]:
            remedy = "keep it in the state, or under a name that begins with an underscore"
            _refuse(rule, "options that stay as they are", f"another {name!r} after an update", remedy)


def check_update(rule: Optimiser) -> None:
    """Refuses a rule of somebody else's whose update is not of the form that the contract says.

    Args:
        rule: Rule to try, of which a copy makes one update of a single run.

    Raises:
        UserError: If `init` gives no state of tensors, or `update` no pair of an update like the gradients and a state
            like that of `init`, or if it changes what it is given.
    """
    if _is_foreign(rule):
        _update(_copy(rule), 0, ())


def _is_foreign(rule: Optimiser) -> bool:
    return bool({type(part).__module__.partition(".")[0] for part in rule.modules()} - {"l2lopt", "torch"})


def _copy(rule: Optimiser) -> Optimiser:
    """A copy in one dtype, on which `init` and `update` may leave what they like."""
    copy: Optimiser = deepcopy(rule).requires_grad_(False).to(torch.float32)
    return copy


def _update(rule: Optimiser, rows: int | list[int], batch: Sequence[int]) -> Tensor:
    """The update that a rule makes of some of the rows of the probe."""
    device = next((value.device for value in chain(rule.parameters(), rule.buffers())), None)
    like, draw = torch.zeros((), device=device), torch.Generator().manual_seed(0)
    drawn = torch.randn(2, _ROWS, _PROBE.size, generator=draw, device="cpu")
    grads, params = drawn[:, rows].to(like).unbind()
    with torch.no_grad():
        state = rule.init(_PROBE, batch, like=like, total_steps=10)
        before = _leaves(rule, state)
        given = {"gradients": grads, "parameters": params, **before}
        form, versions = _form(before), {name: value._version for name, value in given.items()}
        found: Any = rule.update(grads, state, params, loss=torch.ones_like(grads[..., 0]))
    if not (isinstance(found, tuple) and len(found) == 2):
        kind = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, tuple) else "")
        _refuse(rule, "a pair of the update and the next state", kind)
    change, after = found
    if not isinstance(change, Tensor):
        _refuse(rule, "a tensor as the update", f"a {type(change).__name__}")
    if (change.shape, change.dtype) != (grads.shape, grads.dtype):
        expected = f"an update like the gradients, {_kind(grads)}"
        _refuse(rule, expected, _kind(change))
    for old, new in zip_longest(form, _form(_leaves(rule, after)), fillvalue="nothing"):
        if old != new:
            _refuse(rule, "the state's names, in their order, shapes and dtypes as init gave them", f"{new} for {old}")
    if changed := [name for name, value in given.items() if value._version != versions[name]]:
        _refuse(rule, "an update that changes nothing in place", f"changed {', '.join(changed)}")
    result: Tensor = change
    return result


def _leaves(rule: Optimiser, state: Any) -> dict[str, Tensor]:
    """The tensors of a state by their names, such as "coordinates.m"."""
    if not isinstance(state, OptimiserState):
        _refuse(rule, "an OptimiserState", f"a {type(state).__name__}")
    parts = {"coordinates": state.coordinates, "groups": state.groups, "shared": state.shared}
    found = pytree.tree_leaves_with_path(parts)
    leaves = {".".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in found}
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            _refuse(rule, f"a tensor as {name}", f"a {type(leaf).__name__}")
    return leaves


def _form(leaves: dict[str, Tensor]) -> list[str]:
    return [f"{name} {_kind(leaf)}" for name, leaf in leaves.items()]


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _refuse(rule: Optimiser, expected: str, found: str, remedy: str = _SEE) -> NoReturn:
    raise UserError(f"optimiser {type(rule).__name__!r}", expected=expected, found=found, remedy=remedy)
