"""Parameters that step together as one flat vector, and a rule's state on them as `torch.optim` shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from l2lopt.core.errors import UserError
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Params
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim import sharding
from l2lopt.torch_optim.blocks import Block, blocks_of, update_in_blocks_
from l2lopt.torch_optim.state_check import OBSOLETE
from l2lopt.torch_optim.state_parts import AXES, StateArray, arrays_of, shared_or_initial, with_arrays


class FlatVector:
    """Parameters of one `sharding.kind` as a flat vector of n coordinates, with the state of one or more rules.

    Each array of a state is one buffer for all parameters, so that a rule can work in place. `state[p]` holds views of
    the columns that belong to p (see `state_parts`), and the tensors that all coordinates share, such as the step
    count. Rules work in float32, for float64 parameters in float64.

    Of parameters that are distributed over processes the vector holds this process's parts. The views have the
    placements of the parameters; shared tensors belong to the whole parameters and are equal in every process.

    Attributes:
        params: Parameters, in the order of the layout.
        states: `state[p]` of each parameter.
        layout: Layout of the coordinates in this process.
        steps_made: Number of steps so far of each rule that has made one, by the prefix of its state.
        ended: The rules whose updates have been 0 since the last step that they were told, by prefix: its number. Who
            has told so removes them.

    Args:
        params: Parameters by name.
        states: `state[p]` of each parameter; a state that is there already is continued.
        fan_ins: Fan-in of each parameter, found among all parameters of its group.
        roles: Role of each parameter, found among all parameters of its group.
        steps: Number of steps of the run; None where it is not known.
        told: Options of the group that roles and fan-ins follow from.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        states: Sequence[dict[str, Any]],
        fan_ins: tuple[int, ...],
        roles: tuple[Role, ...],
        steps: int | None = None,
        told: tuple[Any, ...] = (),
    ) -> None:
        self.params, self.states = list(params.values()), list(states)
        self.layout = replace(sharding.layout_of(params), fan_ins=fan_ins, roles=roles)
        self._steps, self._told = steps, told
        self._kinds = [(param.dtype, param.device, param.shape) for param in self.params]
        self._is_distributed = sharding.is_distributed(self.params[0])
        self._shown: list[Params] = [{} for _ in self.params]  # the tensors that this vector has put into `states`
        self._addresses: dict[tuple[int, str], int] = {}  # of these, less the distributed ones
        self._buffers: dict[str, OptimiserState] = {}  # by prefix
        self._blocks: dict[str, list[Block]] = {}  # by prefix
        self._copies: Params = {}
        self.steps_made: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self._judged: set[str] = set()  # prefixes of which is known whether they have ended
        self._ends: dict[str, int] = {}  # by prefix; 0 where it is not known

    def is_current(
        self, params: Sequence[Tensor], states: Sequence[dict[str, Any]], steps: int | None, told: tuple[Any, ...] = ()
    ) -> bool:
        """Whether it has exactly these parameters in a run of `steps`, and nobody has replaced a tensor in `states`."""
        if len(params) != len(self.params) or steps != self._steps or told != self._told:
            return False
        # By identity: who loads or replaces a state puts other tensors there, and the buffers here are then stale.
        every = zip(params, self.params, self._kinds, states, self.states, self._shown, strict=True)
        for index, (param, mine, kind, state, kept, shown) in enumerate(every):
            # A parameter that is converted, as by `module.double()`, stays the same object.
            if param is not mine or state is not kept or (param.dtype, param.device, param.shape) != kind:
                return False
            for key, tensor in shown.items():
                # `tensor.data = …` keeps the object, but it is no view of the buffer any more.
                address = self._addresses.get((index, key))
                if state.get(key) is not tensor or (address is not None and tensor.data_ptr() != address):
                    return False
        return True

    def gather(self) -> tuple[Tensor, Tensor]:
        """Copies of gradients and parameters, [n] each, so that a rule never writes to the caller's memory.

        On the CPU the next call writes to the same memory.
        """
        grads = [param.grad for param in self.params if param.grad is not None]
        if self._is_distributed:
            grads = [sharding.local(grad, param) for grad, param in zip(grads, self.params, strict=True)]
        return self._flattened("gradients", grads), self._flattened("parameters", self._local())

    def _flattened(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of all tensors, one after another, in the dtype of the rules."""
        dtype, flat = compute_dtype(self.params[0]), [tensor.reshape(-1) for tensor in tensors]
        if tensors[0].device.type != "cpu":
            return torch.cat(flat).to(dtype)  # clones a single tensor, too
        # New memory costs twice the copy's time there; a GPU's allocator hands the old out again by itself.
        kept = self._copies.get(name)
        if kept is None or kept.dtype != dtype:
            kept = self._copies[name] = torch.empty(self.layout.size, dtype=dtype, device=tensors[0].device)
        return torch.cat(flat, out=kept)

    def scatter(self, theta: Tensor) -> None:
        """Writes θ [n] into the parameters, rounded to their dtype."""
        parts = [param for param in self._local() if param.numel()]
        if parts:
            torch._foreach_copy_(parts, list(_unflatten_dense_tensors(theta, parts)))

    def any_rank(self, flag: Tensor) -> bool:
        """Whether a flag is set in any of the processes that hold a part of the parameters."""
        # Collective: every rank must call it, with coordinates or without.
        return bool(flag if self.layout.shards is None else self.layout.shards.total(flag.int()))

    def _local(self) -> list[Tensor]:
        """The parameters, or this process's parts of them."""
        return [sharding.local(param) for param in self.params] if self._is_distributed else self.params

    def update_(
        self, rule: Optimiser, prefix: str, dtype: torch.dtype, grads: Tensor, theta: Tensor, loss: Tensor | None
    ) -> Tensor:
        """The rule's update [n]; its state changes in place.

        Args:
            rule: Rule that computes the update.
            prefix: First part of the names of the rule's state in `state[p]`.
            dtype: Dtype that the state per coordinate is stored in; the state per group has the dtype of `grads`.
            grads: Gradients, [n].
            theta: Parameters θ, [n].
            loss: Loss at θ, a scalar; None where the rule does not use it.

        Raises:
            UserError: Sharded parameters, and a rule whose coordinates meet otherwise than in means over groups; a
            parameter that has another shape than its state.
        """
        if prefix not in self._buffers:
            self._buffers[prefix] = self._join(rule, prefix, dtype, grads)
        state, shards = self._buffers[prefix], self.layout.shards
        if dtype == grads.dtype or rule.accepts_low_precision_state:
            update, after = rule.update_(grads, state, theta, loss=loss)
            shared = after.shared
            _store(after.coordinates, state.coordinates)
            for kind, buffers in state.groups.items():
                _store(after.groups[kind], buffers)
        else:
            if prefix not in self._blocks:
                self._blocks[prefix] = blocks_of(self.layout, rule, grads)
            update, shared = update_in_blocks_(rule, self._blocks[prefix], state, grads, theta, loss)
        if shards is not None and "skipped" in shared:
            before = state.shared["skipped"]
            # The count is that of the whole parameters: only what this step has added here is summed over the ranks,
            # or the past would be counted once for each of them.
            shared = {**shared, "skipped": before + shards.total(shared["skipped"] - before)}
        _store(shared, state.shared)
        self._count(prefix, state.shared, update, grads)
        return update

    def _count(self, prefix: str, shared: Params, update: Tensor, grads: Tensor) -> None:
        """Counts a rule's steps on the host, as a look at the state waits for a GPU, and finds out whether it ended."""
        if prefix not in self.steps_made:
            self.steps_made[prefix], self._ends[prefix] = (int(shared.get(key, 0)) for key in ("step", "total_steps"))
        else:
            self.steps_made[prefix] += 1
        made, end = self.steps_made[prefix], self._ends[prefix]
        if not 0 < end < made or prefix in self._judged:
            return
        # A schedule may go on after the end, as "constant" does. A step without a finite gradient does not tell.
        moved = self.any_rank(update.any())
        if moved or self.any_rank((grads.isfinite() & (grads != 0)).any()):
            self._judged.add(prefix)
            if not moved:
                self.ended[prefix] = end

    def _join(self, rule: Optimiser, prefix: str, dtype: torch.dtype, like: Tensor) -> OptimiserState:
        """The state in `states`, or the rule's initial state, as buffers; `states` get views of them."""
        initial = rule.init(self.layout, like=like, total_steps=self._steps)
        if self.layout.shards is not None and not rule.coordinatewise:
            found, remedy = type(rule).__name__, "choose a coordinatewise rule, or do not shard its parameters"
            expected = "a rule whose coordinates meet in means over groups only"
            raise UserError("sharded parameters", expected=expected, found=found, remedy=remedy)
        buffers = {}
        for array in arrays_of(initial):
            name, stored = prefix + array.name, dtype if array.kind == "coordinates" else array.value.dtype
            if name in self.states[0]:
                self._check_shapes(array, name)
                value = array.join(self.layout, [state[name] for state in self.states], self.params)
                value = value.to(like.device, stored)  # parameters may have moved since
            else:
                # Real memory: an initial state may be one column expanded to all, which cannot be written in place.
                value = torch.empty(array.value.shape, dtype=stored, device=like.device).copy_(array.value)
            buffers[array.name] = value
            for index, part in enumerate(array._replace(value=value).split(self.layout)):
                self._show(index, name, sharding.as_parameter(part, self.params[index], AXES[array.kind]))
        saved = self.states[0]
        shared = {name: shared_or_initial(name, saved.get(prefix + name), v) for name, v in initial.shared.items()}
        for index, state in enumerate(self.states):
            for name in OBSOLETE:
                state.pop(prefix + name, None)
            for name, value in shared.items():
                self._show(index, prefix + name, value)
        return with_arrays(initial, buffers, shared)

    def _check_shapes(self, array: StateArray, name: str) -> None:
        """Refuses the state of a parameter that has been given another shape."""
        for param, state, own in zip(self.params, self.states, self.layout.names, strict=True):
            if (found := tuple(state[name].shape)) != (expected := array.part_shape(param.shape)):
                where, remedy = f"state of parameter {own!r}", "drop it: optimizer.state.pop(parameter)"
                raise UserError(where, expected=f"{name} {list(expected)}", found=str(list(found)), remedy=remedy)

    def _show(self, index: int, name: str, value: Tensor) -> None:
        """Puts a tensor into `state[p]` of one parameter."""
        self._shown[index][name] = self.states[index][name] = value
        if type(value) is Tensor:
            self._addresses[index, name] = value.data_ptr()


def _store(values: Params, buffers: Params) -> None:
    """Writes the next state into the buffers, where the rule has not worked in place."""
    for name, buffer in buffers.items():
        if values[name] is not buffer:
            buffer.copy_(values[name])


def compute_dtype(param: Tensor) -> torch.dtype:
    """The dtype in which rules work on a parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32
