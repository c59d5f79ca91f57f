"""The parameters of a group that step together.

A parameter without a gradient neither moves nor counts the step, so its state falls behind that of the others. From
then on the parameters with a gradient are a flat vector of their own: each vector has one step count for all.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.layout import Layout
from l2lopt.torch_optim import sharding
from l2lopt.torch_optim.flat_vectors import FlatVector
from l2lopt.torch_optim.options import names_of
from l2lopt.torch_optim.parameter_groups import each_of, roles_of

_COUNTS = ("step", "fallback.step")
"""Step counts in `state[p]`."""


def partition(
    params: Sequence[Tensor], numbers: Sequence[int | None], present: Sequence[bool]
) -> list[tuple[int, list[int]]]:
    """The flat vectors of the parameters that have a gradient: the number of each and the indices of its parameters.

    Parameters that step for the first time, or without others of their vector, get a new number.

    Args:
        params: Parameters of one group.
        numbers: Number of the vector that each parameter belongs to; None before its first step.
        present: Whether each parameter has a gradient.
    """
    members: dict[Any, list[int]] = {}
    for index, (param, number, nth) in enumerate(zip(params, numbers, _in_one_memory(params), strict=True)):
        if number is not None or present[index]:
            members.setdefault((number, sharding.kind(param), nth), []).append(index)
    last, seen, vectors = max((key[0] for key in members if key[0] is not None), default=-1), set(), []
    for (number, *_), indices in members.items():
        stepping = [index for index in indices if present[index]]
        # Seen before: members of one vector that are no longer of one kind, of one dtype and device, for instance.
        if number is None or number in seen or len(stepping) < len(indices):
            last += 1
            vectors.append((last, stepping))
        else:
            vectors.append((number, stepping))
        seen.add(number)
    return [(number, stepping) for number, stepping in vectors if stepping]


def _in_one_memory(params: Sequence[Tensor]) -> list[int]:
    """The number of earlier parameters in each one's memory, as of `nn.Parameter(other)` and `p.data = other.data`.

    Within one vector only the last of them would be written back.
    """
    counts, found = dict[int, int](), []  # in every step: a Counter takes three times as long
    for param in params:
        known = param.numel() and not param.is_meta and not sharding.is_distributed(param)
        address = param.data_ptr() if known else 0
        earlier = counts.get(address, 0) if address else 0
        found.append(earlier)
        counts[address] = earlier + 1
    return found


def _by_count(numbers: Sequence[int | None], present: Sequence[bool], states: Sequence[dict[str, Any]]) -> list[Any]:
    """The numbers of the vectors, with new ones for members that have made other numbers of steps than the first.

    Parameters of two groups may have come into one, whose vectors have equal numbers.

    Args:
        numbers: Number of the vector that each parameter belongs to.
        present: Whether each parameter has a gradient.
        states: `state[p]` of each parameter; "vector" in it is changed.
    """
    found, last = [*numbers], max((number for number in numbers if number is not None), default=-1)
    for number in sorted({number for number in numbers if number is not None}):
        members = [index for index, own in enumerate(numbers) if own == number and present[index]]
        # The members of a vector share the tensor, so that a GPU is waited for where they have just been loaded.
        if len({tuple(id(states[index].get(name)) for name in _COUNTS) for index in members}) > 1:
            known = dict[Any, int]()
            for index in members:
                made = tuple(None if (count := states[index].get(name)) is None else int(count) for name in _COUNTS)
                if made not in known:
                    last += bool(known)
                    known[made] = last if known else number
                found[index] = states[index]["vector"] = known[made]
    return found


def vectors_of(
    group: Mapping[str, Any],
    state: MutableMapping[Tensor, dict[str, Any]],
    vectors: dict[int, FlatVector],
    others: Iterable[Tensor] = (),
) -> list[FlatVector]:
    """The flat vectors of a group's parameters that have a gradient.

    The number of a parameter's vector is `state[p]["vector"]`; see `partition`.

    Args:
        group: Parameter group of a `torch.optim.Optimizer`.
        state: State of the optimiser; changed in place.
        vectors: Vectors of the last call by number; changed in place.
        others: Parameters of the other groups; see `fan_ins_of`.
    """
    params, told = group["params"], _told(group)
    # The usual case: nothing has changed since the last step, and the work below can be left out.
    if len(vectors) == 1 and all(param.grad is not None for param in params):
        (vector,) = vectors.values()
        states = [state.get(param, {}) for param in params]
        if vector.is_current(params, states, group["steps"], told) and not any(_in_one_memory(params)):
            return [vector]
    names = names_of(group)
    numbers = [state[param].get("vector") if param in state else None for param in params]
    present = [param.grad is not None for param in params]
    numbers, stepping = _by_count(numbers, present, [state.get(param, {}) for param in params]), []
    for number, indices in partition(params, numbers, present):
        old = numbers[indices[0]]
        if number != old:
            if old is not None:
                vectors.pop(old, None)
                _detach(state[params[index]] for index in _absent(old, numbers, present))
            for index in indices:
                state[params[index]]["vector"] = number
        chosen, states = [params[index] for index in indices], [state[params[index]] for index in indices]
        if number not in vectors or not vectors[number].is_current(chosen, states, group["steps"], told):
            # Of the whole group: a bias's matrix, or an embedding's head, may lie in another vector.
            fan_ins, roles = fan_ins_of(group, others), roles_of(group)
            named = dict(zip([names[index] for index in indices], chosen, strict=True))
            vectors[number] = FlatVector(
                named,
                states,
                tuple(fan_ins[index] for index in indices),
                tuple(roles[index] for index in indices),
                group["steps"],
                told,
            )
        stepping.append(vectors[number])
    return stepping


def _told(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The group's options that roles and fan-ins follow from; copies, as lists may be changed in place."""
    given = (group.get(name) for name in ("kind", "split", "fan_in"))
    return tuple(tuple(value) if isinstance(value, list) else value for value in given)


def _absent(old: int, numbers: Sequence[int | None], present: Sequence[bool]) -> list[int]:
    """The indices of the parameters that stay behind in vector `old`."""
    return [index for index, number in enumerate(numbers) if number == old and not present[index]]


def _detach(states: Iterable[dict[str, Any]]) -> None:
    """Copies the tensors of parameters that stay behind.

    As views they would keep the whole buffer alive, and their step count would go on with that of the others.
    """
    for state in states:
        state.update(pytree.tree_map_only(Tensor, torch.clone, state))


def fan_ins_of(group: Mapping[str, Any], others: Iterable[Tensor]) -> tuple[int, ...]:
    """`Layout.fan_ins` of a group's parameters: its option "fan_in", and what shapes tell where it says nothing.

    A vector with no matrix before it in its group, such as a bias in a group of biases, takes the fan-in of the first
    matrix among `others` with as many outputs as the vector has numbers.
    """
    params = group["params"]
    known = {str(index): role for index, role in enumerate(roles_of(group))}
    found = list(Layout.of({str(index): param for index, param in enumerate(params)}, known).fan_ins)
    matrices = [other for other in others if other.dim() > 1]
    for index, param in enumerate(params):
        if param.dim() > 1:
            break
        found[index] = next((prod(m.shape[1:]) for m in matrices if len(m) == param.numel()), found[index])
    given = each_of("fan_in", group, len(params))
    return tuple(max(shown, 1) if told is None else told for shown, told in zip(found, given, strict=True))
