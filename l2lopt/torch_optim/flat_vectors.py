"""Parameters that step together as one flat vector, and a rule's state on them as `torch.optim` shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from l2lopt.core.errors import UserError
from l2lopt.core.types import Layout, OptimiserState, Params
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim import sharding

BLOCK = 2**16
"""Coordinates of a block, where the state is stored in another dtype than the rule computes in."""


class FlatVector:
    """Parameters of one `sharding.kind` as a flat vector of n coordinates, with the state of one or more rules.

    Each array of a state is one buffer for all parameters, so that a rule can work in place. `state[p]` holds a view of
    it, shaped (features…, *p.shape), and the tensors that all coordinates share, such as the step count. Rules work in
    float32, for float64 parameters in float64.

    Of parameters that are distributed over processes the vector holds this process's parts. The views have the
    placements of the parameters; shared tensors belong to the whole parameters and are equal in every process.

    Attributes:
        params: Parameters, in the order of the layout.
        states: `state[p]` of each parameter.
        layout: Layout of the coordinates in this process.

    Args:
        params: Parameters by name.
        states: `state[p]` of each parameter; a state that is there already is continued.
        fan_ins: Fan-in of each parameter, found among all parameters of its group.
    """

    def __init__(
        self, params: Mapping[str, Tensor], states: Sequence[dict[str, Any]], fan_ins: tuple[int, ...]
    ) -> None:
        self.params, self.states = list(params.values()), list(states)
        self.layout = replace(sharding.layout_of(params), fan_ins=fan_ins)
        self._is_distributed = sharding.is_distributed(self.params[0])
        self._shown: list[Params] = [{} for _ in self.params]  # the tensors that this vector has put into `states`
        self._buffers: dict[str, OptimiserState] = {}  # by prefix

    def is_current(self, params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> bool:
        """Whether the vector consists of exactly these parameters, and nobody has replaced a tensor in their states."""
        if len(params) != len(self.params):
            return False
        current = zip(params, self.params, states, self.states, self._shown, strict=True)
        return all(
            param is mine and state is kept and all(state.get(key) is tensor for key, tensor in shown.items())
            for param, mine, state, kept, shown in current
        )

    def gather(self) -> tuple[Tensor, Tensor]:
        """Copies of gradients and parameters, [n] each, so that a rule never writes to the caller's memory."""
        dtype = compute_dtype(self.params[0])
        grads = [param.grad for param in self.params if param.grad is not None]
        if self._is_distributed:
            grads = [sharding.local(grad, param) for grad, param in zip(grads, self.params, strict=True)]
        return _flattened(grads).to(dtype), _flattened(self._local()).to(dtype)

    def scatter(self, theta: Tensor) -> None:
        """Writes θ [n] into the parameters, rounded to their dtype."""
        parts = [param for param in self._local() if param.numel()]
        if parts:
            torch._foreach_copy_(parts, list(_unflatten_dense_tensors(theta, parts)))

    def any_rank(self, flag: Tensor) -> bool:
        """Whether a flag is set in any of the processes that hold a part of the parameters."""
        return bool(flag if self.layout.shards is None else self.layout.shards.total(flag.int()))

    def _local(self) -> list[Tensor]:
        """The parameters, or this process's parts of them."""
        return [sharding.local(param) for param in self.params] if self._is_distributed else self.params

    def advance(
        self, rule: Optimiser, prefix: str, dtype: torch.dtype, grads: Tensor, theta: Tensor, loss: Tensor | None
    ) -> Tensor:
        """The rule's update [n]; its state changes in place.

        Args:
            rule: Rule that computes the update.
            prefix: First part of the names of the rule's state in `state[p]`.
            dtype: Dtype that the state is stored in.
            grads: Gradients, [n].
            theta: Parameters θ, [n].
            loss: Loss at θ, a scalar; None where the rule does not use it.

        Raises:
            UserError: Sharded parameters, and a rule whose coordinates meet in something else than a statistic.
        """
        if prefix not in self._buffers:
            self._buffers[prefix] = self._join(rule, prefix, dtype, grads)
        state, shards = self._buffers[prefix], self.layout.shards
        if dtype == grads.dtype or rule.rounds_its_state:
            update, after = rule.advance(grads, state, theta, loss)
            shared = after.shared
            _copy(after.coordinates, state.coordinates)
        else:
            update, shared = _advance_in_blocks(rule, state, grads, theta, loss)
        if shards is not None and "skipped" in shared:
            before = state.shared["skipped"]
            shared = {**shared, "skipped": before + shards.total(shared["skipped"] - before)}
        _copy(shared, state.shared)
        return update

    def _join(self, rule: Optimiser, prefix: str, dtype: torch.dtype, like: Tensor) -> OptimiserState:
        """The state in `states`, or the rule's initial state, as buffers; `states` get views of them."""
        initial = rule.init(self.layout, like=like)
        if self.layout.shards is not None and not rule.coordinatewise and "statistic" not in initial.shared:
            found, remedy = type(rule).__name__, "choose a coordinatewise rule, or do not shard its parameters"
            expected = "a rule whose coordinates meet in a statistic only"
            raise UserError("sharded parameters", expected=expected, found=found, remedy=remedy)
        coordinates = {}
        for key, value in initial.coordinates.items():
            name = prefix + key
            if name in self.states[0]:
                saved = zip(self.states, self.params, self.layout.sizes, strict=True)
                parts = [ravelled(state[name], param, size) for state, param, size in saved]
                flat = torch.cat(parts, dim=-1).to(dtype)
            else:
                flat = torch.empty(value.shape, dtype=dtype, device=like.device).copy_(value)
            coordinates[key] = flat
            for index, part in enumerate(self.layout.split(flat)):
                view = part.view((*part.shape[:-1], *self.layout.shapes[index]))
                self._show(index, name, sharding.as_parameter(view, self.params[index]))
        shared = {key: _taken_over(self.states[0].get(prefix + key), value) for key, value in initial.shared.items()}
        for index in range(len(self.params)):
            for key, value in shared.items():
                self._show(index, prefix + key, value)
        return OptimiserState(self.layout, coordinates, shared)

    def _show(self, index: int, name: str, value: Tensor) -> None:
        """Puts a tensor into `state[p]` of one parameter."""
        self._shown[index][name] = self.states[index][name] = value


def _copy(values: Params, buffers: Params) -> None:
    """Writes the next state into the buffers, where the rule has not worked in place."""
    for key, value in values.items():
        if value is not buffers[key]:
            buffers[key].copy_(value)


def _taken_over(saved: Any, initial: Tensor) -> Tensor:
    """A saved shared tensor in new memory; the initial one if none is saved.

    A statistic per tensor that was saved for another number of tensors is of no use, nor needed: it is an output.
    """
    buffer = initial.clone()
    if saved is not None:
        value = torch.as_tensor(saved, dtype=initial.dtype, device=initial.device)
        return buffer.copy_(value) if value.shape == initial.shape else buffer
    return buffer


def _advance_in_blocks(
    rule: Optimiser, state: OptimiserState, grads: Tensor, theta: Tensor, loss: Tensor | None
) -> tuple[Tensor, Params]:
    """The update [n] and the shared tensors after it; only one block of the state is in the rule's dtype at once."""
    updates, results = [], list[Params]()
    for low, high, layout in blocks_of(state.layout, rule, state):
        block = {key: value[..., low:high].to(grads.dtype) for key, value in state.coordinates.items()}
        before = dict(results[-1] if results else state.shared)  # "skipped" counts on from block to block,
        before |= {key: value for key, value in state.shared.items() if key == "step"}  # "step" does not
        given = OptimiserState(layout, block, before)
        update, after = rule.advance(grads[low:high], given, theta[low:high], loss)
        updates.append(update.clone())  # a fused rule overwrites its last result
        results.append(after.shared)
        for key, value in after.coordinates.items():
            state.coordinates[key][..., low:high] = value
    shared = dict(results[-1])
    if "statistic" in shared:
        shared["statistic"] = torch.cat([result["statistic"] for result in results], dim=-1)
    return torch.cat(updates), shared


def blocks_of(layout: Layout, rule: Optimiser, state: OptimiserState) -> list[tuple[int, int, Layout]]:
    """The blocks of a vector on which `rule` gives the same as on the whole: first coordinate, end and layout of each.

    A block has `BLOCK` coordinates. For a rule with a statistic over each tensor it goes on to the end of a tensor.
    """
    if rule.coordinatewise:
        bounds = [(low, min(low + BLOCK, layout.size)) for low in range(0, max(layout.size, 1), BLOCK)]
        return [(low, high, layout.between(low, high)) for low, high in bounds]
    if "statistic" not in state.shared:
        return [(0, layout.size, layout)]
    shards = layout.shards
    whole = layout.sizes if shards is None else shards.sizes  # every process cuts between the same tensors
    blocks, first, low, high, count = [], 0, 0, 0, 0
    for end, (size, counted) in enumerate(zip(layout.sizes, whole, strict=True), 1):
        high, count = high + size, count + counted
        if count >= BLOCK or end == len(layout.names):
            blocks.append((low, high, layout.part(first, end)))
            first, low, count = end, high, 0
    return blocks


def compute_dtype(param: Tensor) -> torch.dtype:
    """The dtype in which rules work on a parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def ravelled(value: Tensor, param: Tensor, size: int) -> Tensor:
    """A state tensor [features…, *p.shape] as [features…, size], with the coordinates of this process's part of p."""
    return sharding.local(value, param).reshape(*value.shape[: value.dim() - param.dim()], size)


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all tensors, one after another."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).clone()
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat
