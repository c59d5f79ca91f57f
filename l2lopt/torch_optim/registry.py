"""The classes of `torch.optim` as a table like ours: name → what makes one from options alone, all but the parameters.

A made entry is an `OptimizerFactory`, which waits for the parameters.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Strict
from torch.optim.optimizer import Optimizer, ParamsT

OptimizerFactory: TypeAlias = Callable[[ParamsT], Optimizer]
"""(parameters) → the optimiser of them."""

# What the training loop decides, or cannot serve.
_NOT_OPTIONS = ("params", "differentiable", "capturable")
# Ours are dense.
_SPARSE_ONLY = ("SparseAdam",)


def _entry(kind: type[Optimizer]) -> Callable[..., OptimizerFactory]:
    """A function of the constructor's options, typed as they are; a list does for a tuple, as TOML has none."""

    def make(**options: Any) -> OptimizerFactory:
        return partial(kind, **options)

    hints = typing.get_type_hints(kind.__init__)
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.name not in _NOT_OPTIONS
    ]
    make.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # inspect's own protocol
    make.__annotations__ = {option.name: _loosened(hints.get(option.name, Any)) for option in options}
    make.__name__ = kind.__name__
    return make


def _loosened(hint: Any) -> Any:
    return Annotated[hint, Strict(False)] if typing.get_origin(hint) is tuple else hint


TORCH: Mapping[str, Callable[..., OptimizerFactory]] = {
    f"torch.optim.{name}": _entry(kind)
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer and name not in _SPARSE_ONLY
}
