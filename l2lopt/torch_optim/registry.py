"""The classes of `torch.optim` by name, as entries of a registry.

An entry takes the options of its class and gives an `OptimizerFactory`, which waits for the parameters.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import field, make_dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from pydantic import Strict
from torch.optim.optimizer import Optimizer, ParamsT

OptimizerFactory: TypeAlias = Callable[[ParamsT], Optimizer]
"""(parameters) → the optimiser of these parameters."""

# Options that the training loop decides or does not support.
_NOT_OPTIONS = ("params", "differentiable", "capturable")
# Classes for sparse gradients; the gradients of a training loop here are dense.
_SPARSE_ONLY = ("SparseAdam",)


class _Factory:
    """The options of a class of `torch.optim` as the fields of a dataclass; a call makes the optimiser.

    Attributes:
        kind: Class of the optimiser.
    """

    kind: ClassVar[type[Optimizer]]

    def __call__(self, params: ParamsT) -> Optimizer:
        """The optimiser of `params`."""
        return self.kind(params, **vars(self))


def _entry(kind: type[Optimizer]) -> type[_Factory]:
    """A dataclass with the options of the constructor, their types and their defaults."""
    hints = typing.get_type_hints(kind.__init__)
    options = []
    for option in inspect.signature(kind).parameters.values():
        if option.name not in _NOT_OPTIONS:
            default = field() if option.default is option.empty else field(default=option.default)
            options.append((option.name, _list_for_tuple(hints.get(option.name, Any)), default))
    namespace = {"kind": kind, "__doc__": f"The options of `torch.optim.{kind.__name__}`."}
    return make_dataclass(kind.__name__, options, bases=(_Factory,), namespace=namespace, frozen=True, kw_only=True)


def _list_for_tuple(hint: Any) -> Any:
    """The type of an option; a list will do for a tuple, as TOML has no tuples."""
    return Annotated[hint, Strict(False)] if typing.get_origin(hint) is tuple else hint


TORCH: Mapping[str, Callable[..., OptimizerFactory]] = {
    f"torch.optim.{name}": _entry(kind)
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer and name not in _SPARSE_ONLY
}
