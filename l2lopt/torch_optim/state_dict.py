"""Loading the state of a `torch.optim.Optimizer` to the bit."""

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def restore(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """`load_state_dict` to the bit: state keeps its own dtype (torch.optim gives it the parameter's), and is copied.

    It runs after the optimiser's own pre-hooks, and before its post-hooks.
    """
    read: dict[str, Any] = {}

    def keep(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
        read.update(given)

    def put_back(_: torch.optim.Optimizer) -> None:
        saved = deepcopy(read["state"])
        numbers = chain.from_iterable(group["params"] for group in read["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, param in zip(numbers, params, strict=True):
            if number in saved:
                optimizer.state[param] = pytree.tree_map(_placed, saved[number], optimizer.state[param])

    handles = [
        optimizer.register_load_state_dict_pre_hook(keep),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, dict(state_dict))
    finally:
        for handle in handles:
            handle.remove()


def _placed(saved: Any, loaded: Any) -> Any:
    """The saved value where torch.optim would have put it."""
    return saved.to(loaded.device) if isinstance(saved, Tensor) else saved
