"""Classes of `torch.optim.Optimizer`, from PyTorch or any installed package, by the name `module:Class`.

Importing a module runs its code: use such names only from configs that you trust.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from l2lopt.core import registry
from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.registry import Choice
from l2lopt.optimisers.schedules import multiplier, set_rates

NamedTensors: TypeAlias = Sequence[tuple[str, Tensor]]
"""The parameters of one run with their names."""
OptimizerFactory: TypeAlias = Callable[[NamedTensors], Optimizer | Sequence[Optimizer]]
"""(named parameters) → what moves them: one optimiser, or several that share them out."""


@dataclass(frozen=True)
class TorchClass:
    """A class of `torch.optim.Optimizer` with its options: an `OptimizerFactory` once it has a rate.

    Args:
        name: Name in errors, such as "torch.optim:Muon".
        kind: Class.
        options: Keyword arguments of the class, all but the parameters and `lr`.
        lr: Rate, where the options fix it; None leaves it to `at`.
        rest: Second class, for the parameters that the first one is not for; None gives all to the first.
        rest_names: Parameters whose names contain one of these go to `rest` as well.
        warm_up: Steps over which the rate rises linearly.
        total: Step at which a half cosine has brought the rate to 0; None keeps the rate after the warm-up.
    """

    name: str
    kind: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float | None = None
    rest: "TorchClass | None" = None
    rest_names: tuple[str, ...] = ()
    warm_up: int = 0
    total: int | None = None

    def at(self, rate: float, warm_up: int = 0, total: int | None = None) -> "TorchClass":
        """The same class at a rate and under a schedule; a rate that the options fix is left."""
        rest = None if self.rest is None else self.rest.at(rate, warm_up, total)
        lr = rate if self.lr is None else self.lr
        return replace(self, lr=lr, rest=rest, warm_up=warm_up, total=total)

    def __call__(self, params: NamedTensors) -> list[Optimizer]:
        """The optimisers of these parameters.

        Raises:
            UserError: For options or parameters that the class refuses.
        """
        mine = [(name, value) for name, value in params if not self._goes_to_rest(name, value)]
        others = [(name, value) for name, value in params if self._goes_to_rest(name, value)]
        made = [self._made([value for _, value in mine])] if mine else []
        return [*made, *(self.rest(others) if self.rest is not None and others else [])]

    def _goes_to_rest(self, name: str, value: Tensor) -> bool:
        return self.rest is not None and (value.dim() != 2 or any(part in name for part in self.rest_names))

    def _made(self, params: list[Tensor]) -> Optimizer:
        try:
            options = {**self.options} if self.lr is None else {"lr": self.lr, **self.options}
            optimizer = self.kind(params, **options)
        except (ValueError, TypeError, RuntimeError, AssertionError, NotImplementedError) as error:  # its own checks
            remedy = 'change the options, or in a comparison give what is no matrix to another: rest = "adamw"'
            raise UserError(
                f"optimiser {self.name!r}", expected="one for these parameters", found=str(error), remedy=remedy
            ) from None
        if self.warm_up or self.total is not None:
            # A hook needs nobody to call it: these optimisers run in a loop that knows no schedulers.
            optimizer.register_step_pre_hook(_Cosine(optimizer, self.warm_up, self.total))
        return optimizer


class _Cosine:
    """Sets the rates of an optimiser before each of its steps."""

    def __init__(self, optimizer: Optimizer, warm_up: int, total: int | None) -> None:
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.warm_up, self.total, self.step = warm_up, total, 0

    def __call__(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        factor = multiplier("cosine", self.step, self.warm_up, self.total)
        set_rates(optimizer, [rate * factor for rate in self.rates])
        self.step += 1


def is_torch_class(choice: Choice) -> bool:
    """Whether a choice names a class of `torch.optim.Optimizer`, as "module:Class" or "torch.optim.Class".

    Raises:
        UserError: For a module that cannot be imported, or a name that is not in it.
    """
    name = choice if isinstance(choice, str) else choice.get("name")
    if not isinstance(name, str) or not (":" in name or name.startswith("torch.optim.")):
        return False
    entry = _entry(name)
    return isinstance(entry, type) and issubclass(entry, Optimizer) and entry is not Optimizer


def _entry(name: str) -> Any:
    """What "module:Class" or "torch.optim.Class" names."""
    dotted = ":" not in name
    return registry.find({}, "optimiser", ":".join(name.rsplit(".", 1)) if dotted else name)


def torch_class(choice: Choice) -> TorchClass:
    """The class of a choice with its options.

    Args:
        choice: "module:Class", or a mapping with that `name`, the options of the class beside it, and, if it is not for
            all parameters, `rest`: the choice of a second class for the parameters that are no matrices (a bare name is
            looked up in `torch.optim`, whatever its case), and `rest_names`: parts of the names of further ones.

    Raises:
        UserError: For a module that cannot be imported, a name that is no optimiser there, or an unknown option.
    """
    options: dict[str, Any] = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = str(options.pop("name", None))
    kind = _entry(name)
    if not is_torch_class(name):
        expected, remedy = (
            "a class of torch.optim.Optimizer",
            "name one of torch.optim, or of a package that is installed",
        )
        raise UserError(f"optimiser {name!r}", expected=expected, found=repr(kind), remedy=remedy)
    rest: Choice | None = options.pop("rest", None)
    rest_names: Any = options.pop("rest_names", [])
    if not isinstance(rest_names, list | tuple) or not all(isinstance(part, str) for part in rest_names):
        remedy = 'write for instance rest_names = ["embedding"]'
        raise UserError(f"{name}: rest_names", expected="a list of names", found=repr(rest_names), remedy=remedy)
    checked = _checked(name, kind, options)
    second = None if rest is None else torch_class(_in_torch(rest))
    return TorchClass(name, kind, checked, checked.pop("lr", None), second, tuple(rest_names))


def _in_torch(choice: Choice) -> Choice:
    """The choice with a bare name, such as "adamw", as that of the class in `torch.optim`."""
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    bare = str(options.get("name"))
    if ":" in bare or "." in bare:
        return choice
    known = {name.lower(): name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return {**options, "name": f"torch.optim:{known.get(bare.lower(), bare)}"}


def _checked(name: str, kind: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, all of them arguments of the class; a list does where the default is a tuple, as TOML has none."""
    parameters = dict(list(inspect.signature(kind).parameters.items())[1:])  # the first one is the parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(options)
    if "lr" not in parameters:
        expected, remedy = "a class with an option lr", "choose another: the rates of the grid would do nothing"
        raise UserError(f"optimiser {name!r}", expected=expected, found="none", remedy=remedy)
    for option in options:
        if option not in parameters:
            remedy = did_you_mean(option, parameters)
            raise UserError(f"optimiser {name!r}: {option}", expected="a known key", found=repr(option), remedy=remedy)
    return {
        option: tuple(value) if isinstance(parameters[option].default, tuple) else value
        for option, value in options.items()
    }
