"""Parameters that step together as one flat vector, and what `torch.optim` sees of a rule's state on them."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.optimisers import Coordinatewise, Optimiser
from l2lopt.types import Layout, OptimiserState, Params

PIECE = 2**16
"""Coordinates at once where the state is kept in another dtype than the rule computes in."""


class FlatVector:
    """Parameters of one dtype on one device as a flat vector of n coordinates, with the state of one or more rules.

    A state lies in one piece, so that a rule can work in place; the parameters' own tables hold views of it, shaped
    (features…, *p.shape), and what all coordinates share. Rules work in float32, for float64 parameters in float64.

    Args:
        params: name → parameter.
        own: `state[p]` of each, taken up where there is something in it.
    """

    def __init__(self, params: Mapping[str, Tensor], own: Sequence[dict[str, Any]]) -> None:
        self.params, self.own = list(params.values()), list(own)
        self.layout = Layout.of(params)
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
        grads = torch.cat([param.grad.reshape(-1) for param in self.params if param.grad is not None])
        return grads.to(dtype), torch.cat([param.reshape(-1) for param in self.params]).to(dtype)

    def scatter(self, theta: Tensor) -> None:
        """Puts θ [n] into the parameters, rounded to their dtype."""
        parts = [part.view(param.shape) for part, param in zip(self.layout.split(theta), self.params, strict=True)]
        torch._foreach_copy_(self.params, parts)

    def advance(
        self, rule: Optimiser, prefix: str, dtype: torch.dtype, grads: Tensor, theta: Tensor, loss: Tensor | None
    ) -> Tensor:
        """The rule's update [n]; its state, kept in `dtype` under names that begin with `prefix`, moves on in place."""
        if prefix not in self._states:
            self._states[prefix] = self._join(rule, prefix, dtype, grads)
        state = self._states[prefix]
        if dtype == grads.dtype:
            update, after = rule.advance(grads, state, theta, loss)
            for key, value in after.coordinates.items():
                if value is not state.coordinates[key]:
                    state.coordinates[key].copy_(value)
            shared = after.shared
        else:
            update, shared = self._in_pieces(rule, state, grads, theta, loss)
        self._states[prefix] = state._replace(shared=shared)
        for table in self.own:
            table.update({prefix + key: value for key, value in shared.items()})
        return update

    def _join(self, rule: Optimiser, prefix: str, dtype: torch.dtype, like: Tensor) -> OptimiserState:
        """The state that the parameters' tables hold, or the rule's first one; the tables get views of it."""
        fresh = rule.init(self.layout, like=like)
        coordinates = {}
        for key, value in fresh.coordinates.items():
            name = prefix + key
            if name in self.own[0]:
                parts = [_flat(table[name], param) for table, param in zip(self.own, self.params, strict=True)]
                flat = torch.cat(parts, dim=-1).to(dtype)
            else:
                flat = torch.empty(value.shape, dtype=dtype, device=like.device).copy_(value)
            coordinates[key] = flat
            for index, part in enumerate(self.layout.split(flat)):
                view = part.view((*part.shape[:-1], *self.params[index].shape))
                self._views[index][name] = self.own[index][name] = view
        shared = {
            key: torch.as_tensor(self.own[0].get(prefix + key, value), dtype=value.dtype, device=value.device)
            for key, value in fresh.shared.items()
        }
        return OptimiserState(self.layout, coordinates, shared)

    def _in_pieces(
        self, rule: Optimiser, state: OptimiserState, grads: Tensor, theta: Tensor, loss: Tensor | None
    ) -> tuple[Tensor, Params]:
        """Update and shared state; no more than a piece of the state is there in the rule's own dtype at once."""
        updates, results = [], list[Params]()
        for low, high, layout in cut(self.layout, rule):
            part = {key: value[..., low:high].to(grads.dtype) for key, value in state.coordinates.items()}
            before = dict(results[-1] if results else state.shared)
            before |= {key: value for key, value in state.shared.items() if key == "step"}
            given = OptimiserState(layout, part, before)
            update, after = rule.advance(grads[low:high], given, theta[low:high], loss)
            updates.append(update.clone())
            results.append(after.shared)
            for key, value in after.coordinates.items():
                state.coordinates[key][..., low:high] = value
        shared = dict(results[-1])  # "skipped" has gone from piece to piece
        if "statistic" in shared:
            shared["statistic"] = torch.cat([result["statistic"] for result in results], dim=-1)
        return torch.cat(updates), shared


def vectors_of(
    group: Mapping[str, Any], state: MutableMapping[Tensor, dict[str, Any]], kept: dict[int, FlatVector]
) -> list[FlatVector]:
    """The parameters of a group that have a gradient, as the flat vectors that they make.

    Each has its vector's number in `state[p]["vector"]`; those that step without others of theirs get a new one.

    Args:
        group: of `torch.optim`.
        state: of the optimiser; changed in place.
        kept: number → vector, from the last call; changed in place.
    """
    members: dict[Any, dict[str, Tensor]] = {}
    for name, param in zip(names_of(group), group["params"], strict=True):
        known = "vector" in state.get(param, ())
        if known or param.grad is not None:
            key = state[param]["vector"] if known else (param.dtype, param.device)
            members.setdefault(key, {})[name] = param
    vectors, number = [], max((key for key in members if isinstance(key, int)), default=-1)
    for key, vector in members.items():
        present = {name: param for name, param in vector.items() if param.grad is not None}
        if not present:
            continue
        if len(present) < len(vector) or not isinstance(key, int):
            for param in vector.values():
                if param.grad is None:  # a view would keep the memory of all
                    state[param].update(pytree.tree_map_only(Tensor, torch.clone, state[param]))
            kept.pop(key, None)
            key = number = number + 1
            for param in present.values():
                state[param]["vector"] = number
        params = list(present.values())
        own = [state[param] for param in params]
        if key not in kept or not kept[key].holds(params, own):
            kept[key] = FlatVector(present, own)
        vectors.append(kept[key])
    return vectors


def names_of(group: Mapping[str, Any]) -> list[str]:
    """The names of a group's parameters, or their numbers."""
    return group.get("param_names") or [f"p{index}" for index in range(len(group["params"]))]


def cut(layout: Layout, rule: Optimiser) -> list[tuple[int, int, Layout]]:
    """First coordinate, end and layout of pieces on which `rule` gives what it gives on the whole.

    They hold `PIECE` coordinates; where a rule takes a statistic over a tensor, they end with a tensor.
    """
    if rule.coordinatewise:
        places = [(low, min(low + PIECE, layout.size)) for low in range(0, max(layout.size, 1), PIECE)]
        return [(low, high, layout.between(low, high)) for low, high in places]
    if not isinstance(rule, Coordinatewise):
        return [(0, layout.size, layout)]
    pieces, first, low, high = [], 0, 0, 0
    for end, size in enumerate(layout.sizes, 1):
        high += size
        if high - low >= PIECE or end == len(layout.names):
            pieces.append((low, high, layout.part(first, end)))
            first, low = end, high
    return pieces


def computes_in(param: Tensor) -> torch.dtype:
    """The dtype in which rules work on a parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _flat(value: Tensor, param: Tensor) -> Tensor:
    """A state [features…, *p.shape] as [features…, p's coordinates]."""
    return value.reshape(*value.shape[: value.dim() - param.dim()], param.numel())
