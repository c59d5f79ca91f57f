"""Whether an optimisee of somebody else's keeps the contract of `Optimisee`, tried on one batch.

One that gives back the wrong thing would end in a traceback deep inside, after a run has its folder.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.optimisee import Optimisee

_SEE = "see docs/development/how-to-add.md, An optimisee"


def check_optimisee(optimisee: Optimisee) -> None:
    """Refuses an optimisee of somebody else's that breaks the contract; those of this library are not tried.

    It makes its initial values, the loss on a first batch, and the test-mode loss there.

    Args:
        optimisee: Optimisee to try.

    Raises:
        UserError: If `init` gives no pair of tables of tensors; if `loss` gives no pair of one number that depends on
            the parameters, and the names that `init` gave beside them, in their order; or `evaluate` not one number.
    """
    if type(optimisee).__module__.partition(".")[0] in ("l2lopt", "optimisees"):
        return
    params, aux = _pair(optimisee, "init", "parameters and aux", optimisee.init(0))
    _table(optimisee, "init: parameters", params)
    _table(optimisee, "init: aux", aux)
    batch = optimisee.batch("train", 0, 0)
    floating = {name: value.is_floating_point() for name, value in params.items()}
    leaves = {name: value.detach().requires_grad_(floating[name]) for name, value in params.items()}
    with torch.enable_grad():
        loss, after = _pair(optimisee, "loss", "the loss and aux", optimisee.loss(leaves, aux, batch))
    _number(optimisee, "loss", loss)
    if any(floating.values()) and not loss.requires_grad:
        remedy = "compute it without no_grad and detach"
        _refuse(optimisee, "loss", "a function of the parameters", "one without a gradient", remedy)
    _table(optimisee, "loss: aux", after)
    if [*after] != [*aux]:
        first, second = (f"the names {', '.join(table) or 'none'}" for table in (aux, after))
        _refuse(optimisee, "loss: aux", first, second, "return those of init, in their order")
    with torch.no_grad():
        _number(optimisee, "evaluate", optimisee.evaluate(params, aux, batch))


def _pair(optimisee: Optimisee, what: str, parts: str, found: Any) -> tuple[Any, Any]:
    if not (isinstance(found, tuple) and len(found) == 2):
        kind = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, tuple) else "")
        _refuse(optimisee, what, f"a pair, {parts}", kind, _SEE)
    return found


def _table(optimisee: Optimisee, what: str, found: Any) -> None:
    if not isinstance(found, dict):
        _refuse(optimisee, what, "a dict of tensors", f"a {type(found).__name__}", "give {} where there are none")
    for name, value in found.items():
        if not isinstance(value, Tensor):
            _refuse(optimisee, what, "tensors", f"a {type(value).__name__} as {name!r}", "make it a tensor")


def _number(optimisee: Optimisee, what: str, found: Any) -> None:
    if not isinstance(found, Tensor) or found.shape != ():
        kind = f"one of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        _refuse(optimisee, what, "a tensor of one number, of shape []", kind, "take the mean over the samples")


def _refuse(optimisee: Optimisee, what: str, expected: str, found: str, remedy: str) -> NoReturn:
    where = f"optimisee {type(optimisee).__name__!r}: {what}"
    raise UserError(where, expected=expected, found=found, remedy=remedy)
