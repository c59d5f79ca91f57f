"""The step of `LearnedOptimizer` on autograd's tape, for `higher.innerloop_ctx` (Grefenstette et al. 2019)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.types import Layout, OptimiserState, Params
from l2lopt.estimators.higher import library
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim.flat_vectors import computes_in, fan_ins_of, names_of, partition, ravelled

higher = library()
Base: Any = higher.optim.DifferentiableOptimizer


class Differentiable(Base):  # type: ignore[misc]  # higher has no types
    """θ ← θ + lr · (u − λθ) as a function of θ before, the state, lr, λ and φ.

    `higher` copies `param_groups`, where stands the hash of each group's rule. φ is the rule's own, a constant, unless
    `override={"weights": [rule]}` puts an optimiser in its place, one for all groups or one for each: then everything
    is differentiable in that optimiser's parameters. The loss of `step(loss)` goes to rules that look at it.

    Its numbers are those of the plain `update` of the rule, for steps, options and state of the optimiser it is made
    from; it costs autograd's tape, about 1 KB a coordinate and step for an LSTM of 20.

    Args:
        other: the `LearnedOptimizer`; it stays as it is.
        args: as for `higher.optim.DifferentiableOptimizer`.
        kwargs: likewise.

    Raises:
        UserError: for a fallback, as to go over to it has no derivative.
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
        """Puts new parameters into `param_groups`, as `higher` has it."""
        with torch.set_grad_enabled(self._track_higher_grads):
            self._move_all(grouped_grads)

    def _move_all(self, grouped_grads: Sequence[Sequence[Tensor | None]]) -> None:
        for group, own, grads in zip(self.param_groups, self.state, grouped_grads, strict=True):
            numbers = [own[place].get("vector") if place in own else None for place in range(len(grads))]
            present = [grad is not None for grad in grads]
            others = [param for one in self.param_groups if one is not group for param in one["params"]]
            fan_ins = fan_ins_of(group["params"], others)  # of all: a bias's matrix may lie in another vector
            for number, places in partition(group["params"], numbers, present):
                moved = self._move(group, places, own, [grads[place] for place in places], fan_ins)
                for place, param in zip(places, moved, strict=True):
                    group["params"][place] = param
                    own[place]["vector"] = number

    def _move(
        self, group: dict[str, Any], places: list[int], own: Any, grads: Sequence[Any], fan_ins: Sequence[int]
    ) -> list[Tensor]:
        """One vector's parameters after a step; `own[place]` gets their state."""
        names = names_of(group)
        params = {names[place]: group["params"][place] for place in places}
        tables: list[dict[str, Any]] = [own[place] for place in places]
        layout = replace(Layout.of(params), fan_ins=tuple(fan_ins[place] for place in places))
        dtype = computes_in(grads[0])
        theta = layout.ravel(params).to(dtype)
        flat = layout.ravel(dict(zip(params, grads, strict=True))).to(dtype)
        loss = None if self._loss is None else self._loss.to(theta)
        rule = group["weights"] if isinstance(group["weights"], Optimiser) else self._rules[group["weights"]]
        phi = {name: value.to(theta) for name, value in rule.phi().items()}
        before = _joined(params, tables, rule.init(layout, like=theta))
        update, state = rule.update_with(phi, flat, before, theta, loss=loss)
        _part(state, torch.bfloat16 if group["state_dtype"] == "bfloat16" else dtype, tables)
        if group["max_update"] is not None:
            update = update.clamp(-group["max_update"], group["max_update"])
        moved = layout.split(theta + group["lr"] * (update - group["weight_decay"] * theta))
        return [part.view(param.shape).to(param.dtype) for part, param in zip(moved, params.values(), strict=True)]


def _joined(params: Params, tables: Sequence[dict[str, Any]], fresh: OptimiserState) -> OptimiserState:
    """The state that the parameters' tables hold, where they do, or the first one."""
    coordinates, shared = dict(fresh.coordinates), dict(fresh.shared)
    for key, value in coordinates.items():
        if key in tables[0]:
            rows = zip(tables, params.values(), fresh.layout.sizes, strict=True)
            coordinates[key] = torch.cat([ravelled(own[key], param, size) for own, param, size in rows], -1).to(value)
    for key, value in shared.items():
        shared[key] = torch.as_tensor(tables[0].get(key, value), dtype=value.dtype, device=value.device)
    return fresh._replace(coordinates=coordinates, shared=shared)


def _part(state: OptimiserState, dtype: torch.dtype, tables: Sequence[dict[str, Any]]) -> None:
    """Puts each parameter's part of a state, [features…, *p.shape], and what all share into its table."""
    for key, value in state.coordinates.items():
        parts = state.layout.split(value.to(dtype))
        for own, part, shape in zip(tables, parts, state.layout.shapes, strict=True):
            own[key] = part.view(*part.shape[:-1], *shape)
    for own in tables:
        own.update(state.shared)
