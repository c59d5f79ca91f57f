"""Parameters that step together as one flat vector, and what `torch.optim` sees of a rule's state on them."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError
from l2lopt.core.types import Layout, OptimiserState, Params
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim import sharding

PIECE = 2**16
"""Coordinates at once where the state is kept in another dtype than the rule computes in."""


class FlatVector:
    """Parameters of one `sharding.kind` as a flat vector of n coordinates, with the state of one or more rules.

    A state lies in one piece, so that a rule can work in place; the parameters' own tables hold views of it, shaped
    (features…, *p.shape), and what all coordinates share. Rules work in float32, for float64 parameters in float64.

    Of parameters that lie across processes it holds this process's parts, and the views are laid out as the parameters
    are; what all coordinates share is that of the whole, the same in every process.

    Args:
        params: name → parameter.
        own: `state[p]` of each, taken up where there is something in it.
        fan_ins: of each, among all parameters of their group.
    """

    def __init__(self, params: Mapping[str, Tensor], own: Sequence[dict[str, Any]], fan_ins: tuple[int, ...]) -> None:
        self.params, self.own = list(params.values()), list(own)
        self._distributed = sharding.is_distributed(self.params[0])
        self.layout = replace(sharding.layout_of(params), fan_ins=fan_ins)
        self._views: list[Params] = [{} for _ in self.params]
        self._states: dict[str, OptimiserState] = {}

    def holds(self, params: Sequence[Tensor], own: Sequence[dict[str, Any]]) -> bool:
        """Whether it is the vector of just these, and nobody has put another tensor in the place of a view."""
        return len(params) == len(self.params) and all(
            param is mine and table is kept and all(table.get(key) is view for key, view in views.items())
            for param, mine, table, kept, views in zip(params, self.params, own, self.own, self._views, strict=True)
        )

    def gather(self) -> tuple[Tensor, Tensor]:
        """Copies of gradients and parameters, [n] each; a rule never sees the caller's memory."""
        dtype = computes_in(self.params[0])
        grads = [param.grad for param in self.params if param.grad is not None]
        if self._distributed:
            grads = [sharding.local(grad, param) for grad, param in zip(grads, self.params, strict=True)]
        return _flattened(grads).to(dtype), _flattened(self._here()).to(dtype)

    def scatter(self, theta: Tensor) -> None:
        """Puts θ [n] into the parameters, rounded to their dtype."""
        here = [param for param in self._here() if param.numel()]
        if here:
            torch._foreach_copy_(here, list(_unflatten_dense_tensors(theta, here)))

    def anywhere(self, found: Tensor) -> bool:
        """Whether a flag is set in any of the processes that the parameters lie across."""
        return bool(found if self.layout.shards is None else self.layout.shards.total(found.int()))

    def _here(self) -> list[Tensor]:
        """The parameters, or this process's parts of them."""
        return [sharding.local(param) for param in self.params] if self._distributed else self.params

    def advance(
        self, rule: Optimiser, prefix: str, dtype: torch.dtype, grads: Tensor, theta: Tensor, loss: Tensor | None
    ) -> Tensor:
        """The rule's update [n]; its state, kept in `dtype` under names that begin with `prefix`, moves on in place."""
        if prefix not in self._states:
            self._states[prefix] = self._join(rule, prefix, dtype, grads)
        state, shards = self._states[prefix], self.layout.shards
        if dtype == grads.dtype or rule.rounds_its_state:
            update, after = rule.update_(grads, state, theta, loss=loss)
            for key, value in after.coordinates.items():
                if value is not state.coordinates[key]:
                    state.coordinates[key].copy_(value)
            shared = after.shared
        else:
            update, shared = self._in_pieces(rule, state, grads, theta, loss)
        if shards is not None and "skipped" in shared:
            before = state.shared["skipped"]
            shared = {**shared, "skipped": before + shards.total(shared["skipped"] - before)}
        self._states[prefix] = state._replace(shared=shared)
        named = {prefix + key: value for key, value in shared.items()}
        for table in self.own:
            table.update(named)
        return update

    def _join(self, rule: Optimiser, prefix: str, dtype: torch.dtype, like: Tensor) -> OptimiserState:
        """The state that the parameters' tables hold, or the rule's first one; the tables get views of it.

        Raises:
            UserError: for a rule whose coordinates meet otherwise than in a statistic, on parameters that are cut.
        """
        fresh = rule.init(self.layout, like=like)
        if self.layout.shards is not None and not rule.coordinatewise:
            found, remedy = type(rule).__name__, "choose a coordinatewise rule, or do not shard its parameters"
            expected = "a rule whose coordinates meet in means over groups only"
            raise UserError("sharded parameters", expected=expected, found=found, remedy=remedy)
        coordinates = {}
        for key, value in fresh.coordinates.items():
            name = prefix + key
            if name in self.own[0]:
                values = zip(self.own, self.params, self.layout.sizes, strict=True)
                parts = [ravelled(table[name], param, size) for table, param, size in values]
                flat = torch.cat(parts, dim=-1).to(dtype)
            else:
                flat = torch.empty(value.shape, dtype=dtype, device=like.device).copy_(value)
            coordinates[key] = flat
            for index, part in enumerate(self.layout.split(flat)):
                view = part.view((*part.shape[:-1], *self.layout.shapes[index]))
                self._views[index][name] = self.own[index][name] = sharding.as_parameter(view, self.params[index])
        shared = {
            key: torch.as_tensor(self.own[0].get(prefix + key, value), dtype=value.dtype, device=value.device)
            for key, value in fresh.shared.items()
        }
        return OptimiserState(self.layout, coordinates, fresh.groups, shared)

    def _in_pieces(
        self, rule: Optimiser, state: OptimiserState, grads: Tensor, theta: Tensor, loss: Tensor | None
    ) -> tuple[Tensor, Params]:
        """Update and shared state; no more than a piece of the state is there in the rule's own dtype at once."""
        updates, results = [], list[Params]()
        for low, high, layout in cut(self.layout, rule, state):
            part = {key: value[..., low:high].to(grads.dtype) for key, value in state.coordinates.items()}
            before = dict(results[-1] if results else state.shared)
            before |= {key: value for key, value in state.shared.items() if key == "step"}
            given = OptimiserState(layout, part, {}, before)
            update, after = rule.update_(grads[low:high], given, theta[low:high], loss=loss)
            updates.append(update.clone())
            results.append(after.shared)
            for key, value in after.coordinates.items():
                state.coordinates[key][..., low:high] = value
        shared = dict(results[-1])  # "skipped" has gone from piece to piece
        return torch.cat(updates), shared


def partition(
    params: Sequence[Tensor], numbers: Sequence[int | None], present: Sequence[bool]
) -> list[tuple[int, list[int]]]:
    """The parameters that have a gradient as vectors: the number and the members' places of each.

    Those that step without others of theirs, or for the first time, get a new number.

    Args:
        params: of a group.
        numbers: the vector that each belongs to; None at first.
        present: which have a gradient.
    """
    members: dict[Any, list[int]] = {}
    for place, (param, number) in enumerate(zip(params, numbers, strict=True)):
        if number is not None or present[place]:
            members.setdefault((number, sharding.kind(param)), []).append(place)
    last, seen, vectors = max((number for number, _ in members if number is not None), default=-1), set(), []
    for (number, _), places in members.items():
        there = [place for place in places if present[place]]
        if number is None or number in seen or len(there) < len(places):
            last += 1
            vectors.append((last, there))
        else:
            vectors.append((number, there))
        seen.add(number)
    return [(number, there) for number, there in vectors if there]


def vectors_of(
    group: Mapping[str, Any],
    state: MutableMapping[Tensor, dict[str, Any]],
    kept: dict[int, FlatVector],
    others: Iterable[Tensor] = (),
) -> list[FlatVector]:
    """The parameters of a group that have a gradient, as the flat vectors that they make.

    Each has its vector's number in `state[p]["vector"]`; see `partition`.

    Args:
        group: of `torch.optim`.
        state: of the optimiser; changed in place.
        kept: number → vector, from the last call; changed in place.
        others: the parameters of the other groups, see `fan_ins_of`.
    """
    params = group["params"]
    if len(kept) == 1 and all(param.grad is not None for param in params):
        (vector,) = kept.values()
        if vector.holds(params, [state.get(param, {}) for param in params]):
            return [vector]
    names = names_of(group)
    numbers = [state[param].get("vector") if param in state else None for param in params]
    present = [param.grad is not None for param in params]
    vectors = []
    for number, places in partition(params, numbers, present):
        old = numbers[places[0]]
        if number != old:
            if old is not None:
                kept.pop(old, None)
            for param, other, there in zip(params, numbers, present, strict=True):
                if other == old is not None and not there:  # a view would keep the memory of all
                    state[param].update(pytree.tree_map_only(Tensor, torch.clone, state[param]))
            for place in places:
                state[params[place]]["vector"] = number
        own = [state[params[place]] for place in places]
        if number not in kept or not kept[number].holds([params[place] for place in places], own):
            fan_ins = fan_ins_of(params, others)  # of all: a bias's matrix may lie in another vector
            chosen = {names[place]: params[place] for place in places}
            kept[number] = FlatVector(chosen, own, tuple(fan_ins[place] for place in places))
        vectors.append(kept[number])
    return vectors


def fan_ins_of(params: Sequence[Tensor], others: Iterable[Tensor]) -> tuple[int, ...]:
    """`Layout.fan_ins` of a group's parameters.

    Vectors before which there is no matrix in their group, such as biases that are a group of their own, take the
    fan-in of the first matrix among `others` that has as many outputs as they have numbers.
    """
    found = list(Layout.of({str(place): param for place, param in enumerate(params)}).fan_ins)
    matrices = [other for other in others if other.dim() > 1]
    for place, param in enumerate(params):
        if param.dim() > 1:
            break
        found[place] = next((prod(m.shape[1:]) for m in matrices if len(m) == param.numel()), found[place])
    return tuple(max(fan_in, 1) for fan_in in found)


def names_of(group: Mapping[str, Any]) -> list[str]:
    """The names of a group's parameters, or their numbers."""
    return group.get("param_names") or [f"p{index}" for index in range(len(group["params"]))]


def cut(layout: Layout, rule: Optimiser, state: OptimiserState) -> list[tuple[int, int, Layout]]:
    """First coordinate, end and layout of pieces on which `rule` gives what it gives on the whole.

    They hold `PIECE` coordinates; where a rule takes a statistic over a tensor, they end with a tensor.
    """
    if rule.coordinatewise and not rule.groupings:
        places = [(low, min(low + PIECE, layout.size)) for low in range(0, max(layout.size, 1), PIECE)]
        return [(low, high, layout.slice(low, high)) for low, high in places]
    if not rule.coordinatewise:
        return [(0, layout.size, layout)]
    shards = layout.shards
    whole = layout.sizes if shards is None else tuple(map(prod, shards.shapes))  # every process cuts in the same places
    pieces, first, low, high, count = [], 0, 0, 0, 0
    for end, (size, counted) in enumerate(zip(layout.sizes, whole, strict=True), 1):
        high, count = high + size, count + counted
        if count >= PIECE or end == len(layout.names):
            pieces.append((low, high, layout.part(first, end)))
            first, low, count = end, high, 0
    return pieces


def computes_in(param: Tensor) -> torch.dtype:
    """The dtype in which rules work on a parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all, one after another."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).clone()
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat


def ravelled(value: Tensor, param: Tensor, size: int) -> Tensor:
    """A state [features…, *p.shape] as [features…, p's coordinates here]."""
    return sharding.local(value, param).reshape(*value.shape[: value.dim() - param.dim()], size)
