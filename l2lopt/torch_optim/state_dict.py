"""Loading the state of a `torch.optim.Optimizer` to the bit."""

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError


def restore(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """`load_state_dict` to the bit: the state is copied and keeps its dtype.

    `torch.optim` would cast it to the parameter's dtype. It runs after the optimiser's other pre-hooks and
    before its other post-hooks.

    Args:
        optimizer: Optimiser whose state is replaced.
        state_dict: State to load; not changed.

    Raises:
        UserError: For what is no state of an optimiser.
    """
    found: Any = state_dict
    if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
        said = f"a {type(found).__name__}" if not isinstance(found, Mapping) else f"the keys {list(found)[:3]}"
        remedy = "give what its state_dict() gave"
        raise UserError("load_state_dict", expected='a table of "state" and "param_groups"', found=said, remedy=remedy)
    given: dict[str, Any] = {}

    def remember(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        given.update(state_dict)

    def put_back(_: torch.optim.Optimizer) -> None:
        # A copy, or this optimiser would go on working in the tensors of the saved one.
        saved = deepcopy(given["state"])
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, param in zip(numbers, params, strict=True):
            if number in saved:
                optimizer.state[param] = pytree.tree_map(_on_device, saved[number], optimizer.state[param])

    handles = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, dict(state_dict))
    finally:
        for handle in handles:
            handle.remove()


def _on_device(saved: Any, loaded: Any) -> Any:
    """The saved value on the device that torch.optim has chosen for it."""
    return saved.to(loaded.device) if isinstance(saved, Tensor) else saved
