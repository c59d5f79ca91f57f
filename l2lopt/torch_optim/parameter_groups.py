"""A module's parameters for `LearnedOptimizer`, with what each of them is to an optimiser."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from l2lopt.core.errors import UserError
from l2lopt.core.kinds import Role, check_kind, check_split, roles, roles_in
from l2lopt.core.layout import Layout
from l2lopt.torch_optim.options import check_options, check_parameters, names_of, with_plain_numbers

Each: TypeAlias = Any
"""A value for all parameters of a group, a list with a value for each, or None."""


def parameter_groups(module: nn.Module | Sequence[nn.Module], *, by_role: bool = False) -> list[dict[str, Any]]:
    """The parameters of a module as one group, with the kind of each and the matrices stacked in it.

    As those of `module.parameters()`, also the ones that are frozen now: as long as they have no gradient they neither
    move nor take memory.

    `LearnedOptimizer(module, …)` asks for it. Ask for it yourself to set options of some parameters: a group may be cut
    in two, and its "kind" and "split" with it.

        >>> import torch, l2lopt
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 9))
        >>> (group,) = l2lopt.parameter_groups(model)
        >>> for (name, _), kind in zip(group["params"], group["kind"]):
        ...     print(name, kind)
        0.weight embedding
        1.weight matrix
        1.bias vector
        2.weight head
        2.bias vector

    Args:
        module: Module to train, in whole or in part; or a list of modules.
        by_role: Whether parameters of one kind, split and fan-in make a group each, without names and with single
            values as options: for `ZeroRedundancyOptimizer`, which shares a group's parameters out to the processes.

    Raises:
        UserError: A parameter is lazy: it has no shape before the module's first call; or the module, or a part of it,
            is scripted or traced: it does not say what its layers are.
    """
    given: object = as_one_module(module)
    if not isinstance(given, nn.Module):
        expected, found = "a module, or a list of modules", f"a {type(given).__name__}"
        raise UserError("parameter_groups", expected=expected, found=found, remedy="give the model, not its parameters")
    module = given
    named = list(module.named_parameters())
    check_parameters(named)
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        expected, found = "a module whose layers can be told apart", "one of torch.jit.script or torch.jit.trace"
        remedy = "give its named_parameters(), and kind= where names and shapes do not tell"
        raise UserError("LearnedOptimizer: params", expected=expected, found=found, remedy=remedy)
    known, transposed = roles_in(module), _fan_ins_of_transposed(module)
    if not by_role:
        group: dict[str, Any] = {
            "params": named,
            "kind": [known[name].kind for name, _ in named],
            "split": [known[name].split for name, _ in named],
        }
        return [group | ({"fan_in": [transposed.get(name) for name, _ in named]} if transposed else {})]
    groups: dict[tuple[Role, int], list[nn.Parameter]] = {}
    fan_ins = Layout.of(dict(named), known).fan_ins
    for (name, param), fan_in in zip(named, fan_ins, strict=True):
        groups.setdefault((known[name], transposed.get(name, max(fan_in, 1))), []).append(param)
    return [
        {"params": params, "kind": role.kind, "split": role.split, "fan_in": fan_in}
        for (role, fan_in), params in groups.items()
    ]


def as_one_module(params: Any) -> Any:
    """Several modules as one; anything else as it is."""
    several = isinstance(params, list | tuple) and len(params) > 0 and all(isinstance(one, nn.Module) for one in params)
    return nn.ModuleList(params) if several else params


def _fan_ins_of_transposed(module: nn.Module) -> dict[str, int]:
    """Name → fan-in of the parameters of layers whose weight has its inputs first: `Conv1D` of transformers' GPT-2."""
    found = dict[str, int]()
    for name, part in module.named_modules():
        weight = part._parameters.get("weight")  # the attribute may be computed
        if type(part).__name__ == "Conv1D" and weight is not None and weight.dim() == 2:
            found |= {f"{name}.{own}".lstrip("."): len(weight) for own, _ in part.named_parameters(recurse=False)}
    return found


def inform(
    optimizer: torch.optim.Optimizer, *, steps: int | None = None, known: Mapping[str, Role] | None = None
) -> None:
    """Tells an optimiser what is only known after it was made; others than `LearnedOptimizer` have no use for it.

    Args:
        optimizer: Optimiser, before its first step or between two steps, or a wrapper that shows its `param_groups`.
        steps: Number of steps of the run.
        known: Roles of parameters by name.

    Raises:
        UserError: A number of steps that is none, or a role that a parameter cannot have; nothing has changed.
    """
    changes = []
    for group in optimizer.param_groups:
        if "split" not in group:
            continue
        new: dict[str, Any] = {} if steps is None else {"steps": steps}
        if known:
            found = [known.get(name, role) for name, role in zip(names_of(group), roles_of(group), strict=True)]
            new |= {"kind": [role.kind for role in found], "split": [role.split for role in found]}
        new = with_plain_numbers(new)
        changed = {**group, **new}
        check_options(changed)
        roles_of(changed)
        changes.append((group, new))
    for group, new in changes:  # all or none
        group.update(new)


def roles_of(group: Mapping[str, Any]) -> tuple[Role, ...]:
    """The roles of a group's parameters: its options "kind" and "split", and names and shapes where they say nothing.

    Raises:
        UserError: An unknown kind, a split that does not divide the rows, or a list of another length than the group.
    """
    names, shapes = names_of(group), [tuple(param.shape) for param in group["params"]]
    found = []
    given = zip(each_of("kind", group, len(names)), each_of("split", group, len(names)), strict=True)
    for name, shape, role, (kind, split) in zip(names, shapes, roles(names, shapes), given, strict=True):
        chosen = role if kind is None else Role(check_kind(f"parameter {name!r}", kind))
        if 0 in shape:  # nothing to orthogonalise
            chosen = Role("vector")
        found.append(chosen if split is None else chosen._replace(split=check_split(name, shape, split)))
    return tuple(found)


def each_of(option: str, group: Mapping[str, Any], count: int) -> Sequence[Each]:
    """An option's value for each of a group's `count` parameters."""
    value = group[option]
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        expected, found = f"one value, or a list of {count}, one for each parameter", f"a list of {len(value)}"
        raise UserError(f"LearnedOptimizer: {option}", expected=expected, found=found, remedy="cut it as the group")
    return value


def in_order_of(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved group lists for each parameter, in the order that a group has these in.

    Distributed checkpoints find a parameter's state by its name, and leave such lists as they were saved.

    Args:
        group: Group that loads.
        saved: Saved group.

    Returns:
        The options "kind", "split" and "fan_in" that are lists, and the group's names; nothing where no name is in
        both groups.
    """
    names, own = saved.get("param_names"), group.get("param_names")
    if not names or not own or list(names) == list(own) or not {*names} & {*own}:
        return {}
    found: dict[str, Any] = {"param_names": list(own)}
    for option in ("kind", "split", "fan_in"):
        value = saved.get(option)
        if isinstance(value, list) and len(value) == len(names):
            there = dict(zip(names, value, strict=True))
            mine = zip(own, each_of(option, group, len(own)), strict=True)
            found[option] = [there.get(name, known) for name, known in mine]
    return found


def named_alike(group: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A group with names of its own if it has none and the other groups have them.

    `torch.optim` refuses such a group. Here a module's names are taken unasked, and the `parameters()` of a layer that
    is added later have none.
    """
    given = group["params"]
    params = [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given)
    is_named = "param_names" in group or isinstance(params, set) or any(isinstance(one, tuple) for one in params)
    if params and not is_named and others and "param_names" in others[0]:
        params = [(f"{len(others)}.{index}", param) for index, param in enumerate(params)]
    return {**group, "params": params}
