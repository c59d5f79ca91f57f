"""Any optimiser of this library as a `torch.optim.Optimizer`, for other people's training loops."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils import _pytree as pytree

from l2lopt import weights as files
from l2lopt.errors import UserError, at_least_0
from l2lopt.optimisers import Optimiser
from l2lopt.types import Layout, OptimiserState


class LearnedOptimizer(torch.optim.Optimizer):
    """Drives an `Optimiser`, learned or hand-made: θ ← θ + lr · update.

    The parameters of a group are one flat vector. `state[p]` holds p's part of the state, each array as a view shaped
    (features…, *p.shape), what all coordinates share ("step" and the like), and "vector", the number of the flat
    vector that p belongs to. A parameter without a gradient neither moves nor changes its state, its step count
    included; those that go on without it are a flat vector of their own from then on.

    The rule works on a copy of φ that is never trained here. A step takes the rule's own time and two copies of state
    and parameters.

    Args:
        params: tensors, (name, tensor) pairs, or groups of them as tables with their own `lr`; float32 or float64.
        weights: a file that `l2lopt meta-train` has left, or an optimiser.
        lr: multiplies the update; schedulers change it.

    Raises:
        UserError: for a missing, damaged or foreign file, or an lr below 0.
    """

    def __init__(self, params: ParamsT, weights: str | Path | Optimiser, lr: float = 1.0) -> None:
        at_least_0("LearnedOptimizer", lr=lr)
        rule = deepcopy(weights) if isinstance(weights, Optimiser) else files.load(weights)
        self._rule = rule.requires_grad_(False)
        self._rules: dict[tuple[torch.dtype, torch.device], Optimiser] = {}
        self._shared = tuple(rule.init(Layout(("p0",), ((1,),))).shared)
        super().__init__(params, {"lr": lr})

    def __getstate__(self) -> dict[str, Any]:
        own = {"_rule": self._rule, "_rules": self._rules, "_shared": self._shared}
        return {**super().__getstate__(), **own}  # torch.optim leaves a subclass's own out of copies and pickles

    def step(  # type: ignore[override]  # torch.optim has no loss
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | None = None
    ) -> Tensor | None:
        """One update of every parameter that has a gradient.

        Args:
            closure: computes loss and gradients; called once.
            loss: of these gradients, where there is no closure; only rules that look at the loss need it.

        Returns:
            What the closure returned.

        Raises:
            UserError: for a gradient that is sparse or neither float32 nor float64, or a loss that is wanting; nothing
                has moved then.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = loss = closure()
        with torch.no_grad():
            vectors = [(group, vector) for group in self.param_groups for vector in self._vectors(group)]
            changes = [self._change(vector, loss) for _, vector in vectors]
            for (group, vector), (update, state) in zip(vectors, changes, strict=True):
                for param, part in zip(vector.values(), state.layout.split(group["lr"] * update), strict=True):
                    param.add_(part.view(param.shape))
                self._keep(vector, state)
        return value

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the trajectory of `state_dict()` to the bit; the argument stays as it is."""
        restore(self, state_dict)

    def _vectors(self, group: dict[str, Any]) -> list[dict[str, Tensor]]:
        """The parameters that have a gradient, by name, as the flat vectors that they make."""
        names = group.get("param_names") or [f"p{index}" for index in range(len(group["params"]))]
        members: dict[Any, dict[str, Tensor]] = {}
        for name, param in zip(names, group["params"], strict=True):
            key = self.state[param]["vector"] if param in self.state else (param.dtype, param.device)
            if param in self.state or param.grad is not None:
                members.setdefault(key, {})[name] = param
        vectors, number = [], max((key for key in members if isinstance(key, int)), default=-1)
        for key, vector in members.items():
            present = {name: _checked(name, param) for name, param in vector.items() if param.grad is not None}
            if present and (len(present) < len(vector) or not isinstance(key, int)):
                number += 1
                self._begin(present, number)
            vectors += [present] if present else []
        return vectors

    def _begin(self, vector: dict[str, Tensor], number: int) -> None:
        """Makes `vector` a flat vector of its own, and gives a state to parameters that have none."""
        first = next(iter(vector.values()))
        if first not in self.state:
            self._keep(vector, self._rule_like(first).init(Layout.of(vector), like=first))
        for param in vector.values():
            self.state[param]["vector"] = number

    def _change(self, vector: dict[str, Tensor], loss: Tensor | None) -> tuple[Tensor, OptimiserState]:
        """The update [n] of a flat vector and the state after it."""
        layout, first = Layout.of(vector), next(iter(vector.values()))
        kept = self.state[first]
        coordinates = {
            # Joined anew at each step: in memory as after `load_state_dict`, so that a resumed run has the same bits.
            key: torch.cat([_flat(self.state[param][key], param) for param in vector.values()], dim=-1)
            for key in kept
            if key not in (*self._shared, "vector")
        }
        state = OptimiserState(layout, coordinates, {key: kept[key] for key in self._shared})
        grads = layout.ravel({name: param.grad for name, param in vector.items() if param.grad is not None})
        value = None if loss is None else torch.as_tensor(loss).detach().to(grads)
        return self._rule_like(first).update(grads, state, layout.ravel(vector), value)

    def _keep(self, vector: dict[str, Tensor], state: OptimiserState) -> None:
        """Hands each parameter its part of the state."""
        parts = {key: state.layout.split(value) for key, value in state.coordinates.items()}
        for index, param in enumerate(vector.values()):
            own = {key: part[index].view((*part[index].shape[:-1], *param.shape)) for key, part in parts.items()}
            self.state[param].update(own | state.shared)

    def _rule_like(self, param: Tensor) -> Optimiser:
        """The rule in the parameter's dtype, on its device."""
        key = param.dtype, param.device
        if key not in self._rules:
            self._rules[key] = deepcopy(self._rule).to(param.device, param.dtype)
        return self._rules[key]


def restore(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """`load_state_dict` to the bit: state keeps its own dtype (torch.optim gives it the parameter's), and is copied."""
    saved = deepcopy(dict(state_dict))
    torch.optim.Optimizer.load_state_dict(optimizer, saved)
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, param in zip(numbers, params, strict=True):
        if number in saved["state"]:
            optimizer.state[param] = pytree.tree_map(_placed, saved["state"][number], optimizer.state[param])


def _placed(saved: Any, loaded: Any) -> Any:
    """The saved value where torch.optim would have put it."""
    return saved.to(loaded.device) if isinstance(saved, Tensor) else saved


def _flat(value: Tensor, param: Tensor) -> Tensor:
    """A state [features…, *p.shape] as [features…, p's coordinates]."""
    return value.reshape(*value.shape[: value.dim() - param.dim()], param.numel())


def _checked(name: str, param: Tensor) -> Tensor:
    """`param`, if a rule can work on its gradient."""
    kind = param.grad if param.grad is not None else param
    if kind.layout != torch.strided or kind.dtype not in (torch.float32, torch.float64):
        found = f"{str(kind.layout).removeprefix('torch.')} {str(kind.dtype).removeprefix('torch.')}"
        expected, remedy = "a dense float32 or float64 gradient", "give the parameter to another optimiser"
        raise UserError(f"parameter {name!r}", expected=expected, found=found, remedy=remedy)
    return param
