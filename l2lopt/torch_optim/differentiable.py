"""The step of `LearnedOptimizer` on autograd's tape, for `higher.innerloop_ctx` (Grefenstette et al. 2019)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Layout, Params
from l2lopt.core.types import OptimiserState
from l2lopt.estimators.higher import library
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim.flat_vectors import compute_dtype
from l2lopt.torch_optim.options import as_number, names_of
from l2lopt.torch_optim.parameter_groups import roles_of
from l2lopt.torch_optim.partition import fan_ins_of, partition
from l2lopt.torch_optim.state_parts import arrays_of, shared_or_initial, with_arrays

higher = library()
Base: Any = higher.optim.DifferentiableOptimizer


class Differentiable(Base):  # type: ignore[misc]  # higher has no types
    """The step θ ← θ + lr · (u − λθ) as a differentiable function of θ, the state, lr, λ and φ.

    `higher` makes it from a `LearnedOptimizer` and copies that optimiser's `param_groups`, which contain the hash of
    each group's rule. The rule's φ is a constant, unless `override={"weights": [rule]}` replaces the rule by an
    optimiser, one for all groups or one for each group: then the step is differentiable in that optimiser's parameters.

    Parameters, state and options give the same numbers as `LearnedOptimizer.step`. The tape takes memory: about 1 KB
    per coordinate and step for an LSTM of 20.

    Args:
        other: `LearnedOptimizer` to begin from; it is not changed.
        args: Further arguments of `higher.optim.DifferentiableOptimizer`.
        kwargs: Further keyword arguments of `higher.optim.DifferentiableOptimizer`.

    Raises:
        UserError: The optimiser has a fallback; the switch to it has no derivative.
    """

    def __init__(self, other: Any, *args: Any, **kwargs: Any) -> None:
        if any(group["fallback"] is not None for group in other.param_groups):
            found, remedy = "one", "make the optimiser without it"
            raise UserError(
                "higher: fallback", expected="none, as the switch is not smooth", found=found, remedy=remedy
            )
        super().__init__(other, *args, **kwargs)
        self._rules = other.rules
        self._loss: Tensor | None = None

    def step(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The parameters after a step; see `higher.optim.DifferentiableOptimizer.step`."""
        self._loss = loss
        return super().step(loss, *args, **kwargs)

    def _update(self, grouped_grads: Sequence[Sequence[Tensor | None]], **kwargs: Any) -> None:
        """Puts the parameters after a step into `param_groups`, where `higher` looks for them."""
        with torch.set_grad_enabled(self._track_higher_grads):
            for group, states, grads in zip(self.param_groups, self.state, grouped_grads, strict=True):
                self._update_group(group, states, grads)

    def _update_group(self, group: dict[str, Any], states: Any, grads: Sequence[Tensor | None]) -> None:
        """One step of a group's parameters; `states[index]` is the state of parameter `index`."""
        numbers = [states[index].get("vector") if index in states else None for index in range(len(grads))]
        present = [grad is not None for grad in grads]
        others = [param for other in self.param_groups if other is not group for param in other["params"]]
        # Of the whole group: a bias's matrix, or an embedding's head, may lie in another vector.
        facts = list(zip(fan_ins_of(group, others), roles_of(group), strict=True))
        for number, indices in partition(group["params"], numbers, present):
            moved = self._update_vector(group, indices, states, [grads[index] for index in indices], facts)
            for index, param in zip(indices, moved, strict=True):
                group["params"][index] = param
                states[index]["vector"] = number

    def _update_vector(
        self,
        group: dict[str, Any],
        indices: list[int],
        states: Any,
        grads: Sequence[Any],
        facts: Sequence[tuple[int, Role]],
    ) -> list[Tensor]:
        """The parameters of one flat vector after a step; writes their state into `states`."""
        names = names_of(group)
        params = {names[index]: group["params"][index] for index in indices}
        chosen: list[dict[str, Any]] = [states[index] for index in indices]
        fan_ins, roles = zip(*(facts[index] for index in indices), strict=True)
        layout = replace(Layout.of(params), fan_ins=fan_ins, roles=roles)
        dtype = compute_dtype(grads[0])
        theta = layout.ravel(params).to(dtype)
        flat = layout.ravel(dict(zip(params, grads, strict=True))).to(dtype)
        loss = None if self._loss is None else self._loss.to(theta)
        rule = group["weights"] if isinstance(group["weights"], Optimiser) else self._rules[group["weights"]]
        # `to` stays on the tape: φ remains the optimiser's own.
        phi = {name: value.to(theta) for name, value in rule.phi().items()}
        before = _joined(params, chosen, rule.init(layout, like=theta, total_steps=group["steps"]))
        update, state = rule.update_with(phi, flat, before, theta, loss=loss)
        _split(state, torch.bfloat16 if group["state_dtype"] == "bfloat16" else dtype, chosen)
        lr, decay, largest = (as_number(group[name]) for name in ("lr", "weight_decay", "max_update"))
        if largest is not None:
            update = update.clamp(-largest, largest)
        # Out of place, unlike `LearnedOptimizer.step`: the tape still needs the parameters from before.
        moved = layout.split(theta + lr * (update - decay * theta))
        return [part.view(param.shape).to(param.dtype) for part, param in zip(moved, params.values(), strict=True)]


def _joined(params: Params, states: Sequence[dict[str, Any]], initial: OptimiserState) -> OptimiserState:
    """The states of several parameters as the state of their flat vector; `initial` where they have none."""
    arrays = {}
    for array in arrays_of(initial):
        arrays[array.name] = array.value
        if array.name in states[0]:
            saved = [state[array.name] for state in states]
            arrays[array.name] = array.join(initial.layout, saved, list(params.values())).to(array.value)
    shared = {name: shared_or_initial(name, states[0].get(name), value) for name, value in initial.shared.items()}
    return with_arrays(initial, arrays, shared)


def _split(state: OptimiserState, dtype: torch.dtype, states: Sequence[dict[str, Any]]) -> None:
    """Writes each parameter's part of a state and the shared tensors into `states`; `dtype` is per coordinate."""
    for array in arrays_of(state):
        stored = array._replace(value=array.value.to(dtype)) if array.kind == "coordinates" else array
        for own, part in zip(states, stored.split(state.layout), strict=True):
            own[array.name] = part
    for own in states:
        own.update(state.shared)
