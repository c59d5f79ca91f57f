"""Options of `LearnedOptimizer`: their names, their ranges, and the parameters and gradients it accepts."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from l2lopt.core.errors import UserError, above_0, at_least_0, did_you_mean
from l2lopt.optimisers import UNTUNED, Optimiser

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of parameters and gradients."""
STATE_DTYPES = ("float32", "bfloat16")
"""Values of the option `state_dtype`."""
_REFUSED = {
    "capturable": "capture the model alone: the rules read the step count on the host",
    "maximize": "take the loss with its sign turned: learned rules go downhill",
    "differentiable": "use higher.innerloop_ctx",
    "foreach": "leave it out: all parameters of a group step together as they are",
    "fused": "leave it out: rules that have a fused form use it by themselves",
}
"""Options of `torch.optim` that mean nothing here, and are accepted where they ask for nothing → what to do instead."""
_COUNTS = {
    "steps": "give the number of steps of the run",
    "split": "give the number of matrices that are stacked",
    "fan_in": "give the number of inputs",
}
"""Options that are whole numbers → what to do where one is not."""
LARGE = 1e-3
"""Weight decay a step from which it is probably AdamW's that was meant."""
SMALL = 0.01
"""Factor of the update below which it is probably a rate that was meant."""
USUAL_RATES = {"sgd": 0.1, "momentum": 0.1, "muon": 0.02, "lion": 1e-4}
"""Rates to begin with, of rules for which 0.001 is none."""
LATE = 100
"""Step at which such a factor is warned of again: a schedule may have set it, and a warm-up from 0 is above `SMALL`."""
DIVERGED = 10.0
"""A loss above this many times the first one counts as diverged; see `has_diverged`."""


def check_options(group: Mapping[str, Any]) -> None:
    """Refuses options of a parameter group that are out of their range or of the wrong type."""
    for name in ("lr", "weight_decay", "max_update"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            found, remedy = str(list(value.shape)), "make a group for each value"
            raise UserError(f"LearnedOptimizer: {name}", expected="one number", found=found, remedy=remedy)
        is_real = isinstance(value, Real) or (isinstance(value, Tensor) and not value.is_complex())
        if not is_real and not (name == "max_update" and value is None):
            found = repr(value)
            raise UserError(f"LearnedOptimizer: {name}", expected="a number", found=found, remedy="change the value")
    at_least_0("LearnedOptimizer", lr=group["lr"], weight_decay=group["weight_decay"])
    if group["max_update"] is not None:
        above_0("LearnedOptimizer", max_update=group["max_update"])
    if group["state_dtype"] not in STATE_DTYPES:
        found, remedy = repr(group["state_dtype"]), did_you_mean(str(group["state_dtype"]), STATE_DTYPES)
        raise UserError("LearnedOptimizer: state_dtype", expected="a known name", found=found, remedy=remedy)
    for name, remedy in _COUNTS.items():
        for value in group[name] if isinstance(group[name], list | tuple) and name != "steps" else [group[name]]:
            whole = not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1
            if value is not None and not (whole and int(value) < 2**63):
                expected = f"a whole number above 0{' of at most 64 bits' if whole else ''}, or None"
                raise UserError(f"LearnedOptimizer: {name}", expected=expected, found=repr(value), remedy=remedy)
    refuse_torchs(group)


def with_plain_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group whose numbers are Python's and whose tuples are lists.

    Numbers of NumPy could not be loaded from a saved state again.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    return {name: value if name == "params" else plain(value) for name, value in group.items()}


def refuse_torchs(options: Mapping[str, Any]) -> None:
    """Refuses options of `torch.optim` that would change what a step does, where they are set."""
    for name, remedy in _REFUSED.items():
        if options.get(name):
            found = str(options[name])
            raise UserError(f"LearnedOptimizer: {name}", expected="False", found=found, remedy=remedy)


def warn_of_small_factors(groups: Sequence[Mapping[str, Any]], rules: Mapping[str, Optimiser]) -> None:
    """Logs a warning each, for all groups, where `lr` or `weight_decay` look like those of an optimiser with a rate.

    The one multiplies the step of a rule that has a size of its own, the other is a share of the weights at each step.

    Args:
        groups: Parameter groups.
        rules: Rules by hash.
    """
    log = logging.getLogger("l2lopt")
    kinds = [(rules[group["weights"]], group) for group in groups]
    sized = [group for rule, group in kinds if rule.phi() or (rule.description or {}).get("name") in UNTUNED]
    rates = [float(group["lr"]) for group in sized if 0 < float(group["lr"]) < SMALL]
    decays = [found for group in sized if (found := float(group["lr"]) * float(group["weight_decay"])) >= LARGE]
    if rates:
        text = "lr=%g makes every step of the rule that much smaller: it is a factor, 1 by default, and not a rate"
        log.warning(text, rates[0])
    if decays:
        text = "weight_decay takes %g of every weight at each step, and is not multiplied by a small rate as AdamW's: "
        text += "leave it out where the rule decays by itself, or give AdamW's lr·weight_decay"
        log.warning(text, decays[0])


def warn_of_end(made: int, total: int) -> None:
    """Logs a warning that updates are 0.

    Args:
        made: Number of steps so far.
        total: Number of steps in all.
    """
    text = "the run was to end after %d steps, and updates are 0 from now on: this is step %d; "
    text += "steps counts all calls of step(), those before a resume among them"
    logging.getLogger("l2lopt").warning(text, total, made)


def has_diverged(loss: float, first: float) -> bool:
    """Whether a loss is not finite or has gone up by more than `DIVERGED` − 1 times the size of the first one.

    Above 0 that is `DIVERGED` times the first loss; the log of a density may begin below 0.
    """
    return not math.isfinite(loss) or loss > (DIVERGED if first > 0 else 2 - DIVERGED) * first


def guard_of(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the guard of the loss knows, of the first of `groups` that has a fallback: one that is added shares it."""
    known = next(
        (group for group in groups if group["fallback"] is not None), {"first_loss": None, "fallen_back": False}
    )
    return {name: known[name] for name in ("first_loss", "fallen_back")}


def steps_of(group: Mapping[str, Any], saved: Mapping[str, Any]) -> int | None:
    """The number of steps of a run that goes on: the optimiser's where it has one, else the saved one."""
    steps: int | None = group["steps"]
    before: int | None = saved.get("steps")
    if steps is None or before is None or steps == before:
        return before if steps is None else steps
    logging.getLogger("l2lopt").warning("the run was begun for %d steps and goes on to %d", before, steps)
    return steps


def check_closure(closure: object) -> None:
    """Refuses a closure that is none, such as a loss."""
    if closure is not None and not callable(closure):
        found, remedy = f"a {type(closure).__name__}", "call step(loss=…) to tell the loss"
        raise UserError("step: closure", expected="a function", found=found, remedy=remedy)


def as_number(value: Any) -> Any:
    """An option's number: a tensor of one, whatever its shape, without axes; all else as it is."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def one_loss(loss: Any) -> Tensor:
    """The loss of a step as a scalar.

    Raises:
        UserError: For anything but one number.
    """
    if not isinstance(loss, Real | Tensor | np.ndarray):
        found, remedy = f"a {type(loss).__name__}", "tell the loss alone; a closure returns it alone"
        raise UserError("step: loss", expected="one number", found=found, remedy=remedy)
    value = torch.as_tensor(loss).detach()
    if value.is_complex():
        raise UserError("step: loss", expected="a real number", found=str(value), remedy="tell its real part")
    if value.numel() != 1:
        found, remedy = str(list(value.shape)), "tell their mean"
        raise UserError("step: loss", expected="one number", found=found, remedy=remedy)
    return value.reshape(())


def check_group(group: Any) -> None:
    """Refuses what is no parameter group."""
    if not isinstance(group, Mapping) or "params" not in group or isinstance(group["params"], nn.Module):
        is_module = isinstance(group, Mapping) and isinstance(group.get("params"), nn.Module)
        found = "a module as params" if is_module else f"a {type(group).__name__} without it"
        remedy = 'give {"params": module.parameters()}, or what l2lopt.parameter_groups(module) gives'
        raise UserError("add_param_group", expected='a table with "params"', found=found, remedy=remedy)


def check_rate(rule: Optimiser, option: str) -> None:
    """Refuses a rule, given as this option, with a rate for each of several runs side by side: this is one run."""
    parts = [part for part in rule.modules() if isinstance(part, Optimiser)]  # a scheduled one has another inside
    for rate in (getattr(part, name, None) for part in parts for name in ("lr", "rest_lr")):
        if isinstance(rate, Tensor) and rate.dim() and not isinstance(rate, nn.Parameter):  # which a rule may learn
            found, remedy = f"a tensor of shape {list(rate.shape)}", "give a number"
            where = f"LearnedOptimizer: {option}"
            raise UserError(where, expected="a rule with one rate", found=found, remedy=remedy)


def check_parameters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses parameters that have no shape yet."""
    for name, param in named:
        if is_lazy(param):
            expected, remedy = "a parameter with a shape", "call the model on a batch before making the optimiser"
            raise UserError(f"parameter {name!r}", expected=expected, found="a lazy one", remedy=remedy)


def check_gradients(group: Mapping[str, Any]) -> None:
    """Refuses sparse, complex and integer gradients, and parameters of such kinds, or without memory, that have one."""
    for index, param in enumerate(group["params"]):
        if param.grad is not None and param.device.type == "meta":
            where, remedy = f"parameter {names_of(group)[index]!r}", "give the module memory: module.to_empty(device=…)"
            raise UserError(where, expected="a parameter with numbers", found="one on meta", remedy=remedy)
        for value in (param.grad, param) if param.grad is not None else ():
            if value.layout != torch.strided or value.dtype not in DTYPES:
                found = f"{str(value.layout).removeprefix('torch.')} {str(value.dtype).removeprefix('torch.')}"
                expected, remedy = "a dense real gradient", "give the parameter to another optimiser"
                where = f"parameter {names_of(group)[index]!r}"
                raise UserError(where, expected=expected, found=found, remedy=remedy)


def names_of(group: Mapping[str, Any]) -> Sequence[str]:
    """The names of a group's parameters; "p0", "p1", … where the caller gave none.

    Each once: a name that comes again, as of a second model's `named_parameters`, has its number before it.

    Raises:
        UserError: More names than parameters.
    """
    names, count = list(group.get("param_names") or []), len(group["params"])
    if len(names) > count:  # which of them is gone nobody can tell, and a name decides what a parameter is taken for
        where, remedy = "LearnedOptimizer: param_names", "take a parameter's name out of the group with it"
        raise UserError(where, expected=f"{count} names, one for each parameter", found=str(len(names)), remedy=remedy)
    names += [f"p{index}" for index in range(len(names), count)]  # of those that someone has appended
    taken, seen, found = {*names}, set[str](), list[str]()
    if len(taken) == len(names):
        return names
    for index, name in enumerate(names):
        own = name
        while own in seen or (own != name and own in taken):  # a module may have the name with the number as well
            own = f"{index}.{own}"
        seen.add(own)
        found.append(own)
    return found
