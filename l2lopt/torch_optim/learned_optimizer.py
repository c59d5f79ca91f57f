"""Any optimiser of this library as a `torch.optim.Optimizer`, for other people's training loops."""

import logging
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain, product
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from l2lopt import kernels, optimisers
from l2lopt.core.errors import UserError, above_0, at_least_0, did_you_mean
from l2lopt.core.types import Layout
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.inputs import Loss
from l2lopt.torch_optim import sharding
from l2lopt.torch_optim.differentiable import Differentiable, higher
from l2lopt.torch_optim.flat_vectors import FlatVector, computes_in, names_of, vectors_of
from l2lopt.torch_optim.state_dict import restore
from l2lopt.weights import files

Weights: TypeAlias = str | Path | Mapping[str, Any] | Optimiser
"""A name in `list_weights()`, a file that `l2lopt meta-train` has left, a choice such as {"name": "adam", "lr": 0.001},
or an optimiser."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = ("float32", "bfloat16")
_REFUSED = {
    "capturable": "capture the model alone: the rules read the step count on the host",
    "maximize": "take the loss with its sign turned: learned rules go downhill",
    "differentiable": "use higher.innerloop_ctx",
}
"""Options of `torch.optim`'s groups that would change what a step does → what to do instead."""
_PREFIXES = {"weights": "", "fallback": "fallback."}
"""The rules of a group → what the names of their state begin with."""
DIVERGED = 10.0
"""A loss above this many times the first one told has diverged."""


class LearnedOptimizer(torch.optim.Optimizer):
    """Drives an `Optimiser`, learned or hand-made: θ ← θ + lr · (u − λθ), with u its update.

    The parameters of a group are one flat vector (see `flat_vectors`) and take the rule's fast step. `state[p]` holds
    p's part of the state, each array as a view shaped (features…, *p.shape), what all coordinates share ("step" and the
    like), and "vector", the number of the flat vector that p belongs to. A parameter without a gradient neither moves
    nor changes its state, its step count included; those that go on without it are a flat vector of their own from
    then on.

    Rules compute in float32 (in float64 for float64 parameters) from copies of gradients and parameters; the new
    parameters are rounded to their dtype, and no float32 master copy is kept. A step takes 16 bytes a parameter of the
    vector beside the state, 4 of which stay. The rules work on copies of φ that are never trained here, and
    `param_groups` and `state_dict()` hold tensors and plain values only: a group's "weights" is the hash of its rule.

    With a `fallback`, its state ("fallback.…" in `state[p]`) goes along beside the rule's. Once an update of the rule
    is not finite, or the loss told is not finite or above `DIVERGED` times the first one told, all groups with a
    fallback take its updates for good ("fallen_back" in the group), and a warning is logged. To look costs a GPU a
    synchronisation a step.

    Parameters that lie across processes (FSDP2's, see `sharding`) step where they lie, to what one process would give:
    statistics are those of the whole tensors, and so are the loss and what the guard sees; `state[p]` is laid out as p
    is. Under DDP all processes must tell the same loss.

    CUDA graphs are refused: the rules read the step count, and guards their findings, on the host.

    Args:
        params: tensors, (name, tensor) pairs, or groups of them as tables, which may have any of the options below for
            themselves; float32, bfloat16, float16 or float64.
        weights: the rule: a name in `list_weights()`, a file, a choice, or an optimiser.
        lr: multiplies update and decay; schedulers change it.
        weight_decay: λ, decoupled: θ ← θ − lr·λ·θ.
        max_update: the largest size of a coordinate of u, before lr; None is no bound.
        fallback: a hand-made rule by name (its lr is 0.001 then), choice or optimiser; groups whose own rule is
            hand-made have none unless they ask.
        state_dtype: of what is kept between steps, the fallback's apart: "float32" (float64 for float64 parameters), or
            "bfloat16", rounded at each step, in which running means with β above 0.996 may stand still. A step then
            needs the float32 state of `flat_vectors.PIECE` coordinates at once, or of a whole tensor for rules that
            take a statistic over it.
        capturable: refused.

    Raises:
        UserError: for a missing, damaged or foreign file, or an option that is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        weights: Weights,
        lr: float | Tensor = 1.0,
        weight_decay: float = 0.0,
        max_update: float | None = None,
        fallback: str | Mapping[str, Any] | Optimiser | None = None,
        state_dtype: str = "float32",
        capturable: bool = False,
    ) -> None:
        self._rules: dict[str, Optimiser] = {}
        options = {"lr": lr, "weight_decay": weight_decay, "max_update": max_update}
        rules = {"weights": self._known(weights), "fallback": self._spare(fallback)}
        place = {"first_loss": None, "fallen_back": False}
        torchs = {"capturable": capturable, "differentiable": False}  # torch.optim adds the second on loading
        self._forget()
        super().__init__(params, options | rules | place | {"state_dtype": state_dtype} | torchs)

    @property
    def rules(self) -> Mapping[str, Optimiser]:
        """The rules in use, copies with a constant φ, by the hashes that stand in the groups."""
        return self._rules

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rules": self._rules}  # torch.optim leaves a subclass's own out of copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up a copy, or what `load_state_dict` has read; a state of other rules is refused before anything."""
        for group, saved in zip(self.__dict__.get("param_groups", []), state["param_groups"], strict=False):
            for key in ("weights", "fallback"):
                if group[key] is not None and files.is_old(saved.get(key)):
                    self._check_keys(group, key, state["state"])
                    saved[key] = group[key]
                if saved.get(key) != group[key]:
                    expected, found = f"the state of {key} {group[key]}", f"that of {key} {saved.get(key)}"
                    remedy = "make the optimiser with the rules it was saved with, or begin without its state"
                    raise UserError("load_state_dict", expected=expected, found=found, remedy=remedy)
            self._check_state(group, state["state"])
        super().__setstate__(state)
        for group, (key, value) in product(self.param_groups, self.defaults.items()):
            group.setdefault(key, value)  # where an older release knew an option less
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own; the table stays as it is.

        Raises:
            UserError: as for the options of the constructor.
        """
        group = self.defaults | param_group
        if "weights" in param_group:
            group["weights"] = self._known(group["weights"])
        if "fallback" in param_group:
            group["fallback"] = self._spare(group["fallback"])
        elif not self._rules[group["weights"]].phi():
            group["fallback"] = None
        _check(group)
        super().add_param_group(group)

    def step(  # type: ignore[override]  # torch.optim has no loss
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | float | None = None
    ) -> Tensor | None:
        """One update of every parameter that has a gradient.

        Args:
            closure: computes loss and gradients; called once.
            loss: of these gradients, unscaled, where there is no closure; for rules that look at it and for the guard.

        Returns:
            What the closure returned.

        Raises:
            UserError: for a gradient that is sparse, complex or of integers, or a loss that is wanting; nothing has
                moved then.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = loss = closure()
        with torch.no_grad():
            self._refuse()
            told = self._told(loss)
            if loss is not None and told is not None:
                self._watch(told)
            for index, group in enumerate(self.param_groups):
                others = chain.from_iterable(one["params"] for one in self.param_groups if one is not group)
                for vector in vectors_of(group, self.state, self._flat.setdefault(index, {}), others):
                    self._move(vector, group, told)
        return value

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the trajectory of `state_dict()` to the bit; the argument stays as it is.

        The hashes of the first releases cannot be compared with those of today: of a state that has one it is only
        checked that rules such as these have left it, and what they have learned is taken on trust.

        Raises:
            UserError: for the state of other rules, with both hashes.
        """
        restore(self, state_dict)

    def _known(self, weights: Weights) -> str:
        """The hash of a rule, which is at hand under it from now on."""
        if isinstance(weights, str) and weights in self._rules:  # a copy of a group
            return weights
        if not isinstance(weights, Optimiser | Mapping | str | Path):
            expected = "a name, a file, a choice or an optimiser"  # type: ignore[unreachable]
            remedy = f"use {files.list_weights()[0]!r}, for instance"
            raise UserError("LearnedOptimizer: weights", expected=expected, found=repr(weights), remedy=remedy)
        if isinstance(weights, Optimiser):
            rule = deepcopy(weights)
        else:
            rule = optimisers.build(dict(weights)) if isinstance(weights, Mapping) else files.load(weights)
        mark = files.digest(rule)
        self._rules.setdefault(mark, rule.requires_grad_(False))
        return mark

    def _spare(self, fallback: str | Mapping[str, Any] | Optimiser | None) -> str | None:
        """The hash of a hand-made rule."""
        if fallback is None or (isinstance(fallback, str) and fallback in self._rules):
            return fallback
        if isinstance(fallback, Optimiser):
            if fallback.phi():
                found, remedy = type(fallback).__name__, f"choose one of {', '.join(optimisers.HANDMADE)}"
                raise UserError("fallback", expected="a hand-made optimiser", found=found, remedy=remedy)
            return self._known(fallback)
        if not isinstance(fallback, Mapping | str):
            expected = "a name, a choice or a hand-made optimiser"  # type: ignore[unreachable]
            remedy = 'use "adam", for instance'
            raise UserError("LearnedOptimizer: fallback", expected=expected, found=repr(fallback), remedy=remedy)
        choice = {"name": fallback, "lr": 1e-3} if isinstance(fallback, str) else dict(fallback)
        return self._known(optimisers.build(choice, optimisers.HANDMADE))

    def _check_state(self, group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Refuses a state of a group's parameters that the group's rules have not left."""
        for key, prefix in _PREFIXES.items():
            mark = group[key]
            keys = self._rules[mark].init(Layout(("one",), ((1,),))).coordinates if mark else ()
            for name, param in zip(names_of(group), group["params"], strict=True):
                table = state.get(param, {})
                shapes = {key: tuple(table[prefix + key].shape) for key in keys if prefix + key in table}
                fit = all(shape[len(shape) - param.dim() :] == param.shape for shape in shapes.values())
                if shapes and not (fit and len(shapes) == len(keys)):
                    expected, found = f"{', '.join(keys)} [..., *{list(param.shape)}]", str(shapes)
                    remedy = "give it the state of this model"
                    raise UserError(f"load_state_dict: {name}", expected=expected, found=found, remedy=remedy)

    def _check_keys(self, group: Mapping[str, Any], key: str, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Refuses a state of a group's parameters that holds other things, or more numbers, than a rule keeps."""
        fresh = self._rules[group[key]].init(Layout(("one",), ((1,),)))
        wanted = {name: tuple(value.shape[:-1]) for name, value in fresh.coordinates.items()}
        for name, param in zip(names_of(group), group["params"], strict=True):
            own = _part_of(state.get(param, {}), _PREFIXES[key])
            arrays = {k: _features(value, param) for k, value in own.items() if k not in fresh.shared}
            if own and not (arrays == wanted and own.keys() >= fresh.shared.keys()):
                remedy = "make the optimiser with the rules it was saved with, or begin without its state"
                raise UserError(f"load_state_dict: {name}", expected=str(wanted), found=str(arrays), remedy=remedy)

    def _forget(self) -> None:
        """Drops what can be made again from `state` and the rules."""
        self._flat: dict[int, dict[int, FlatVector]] = {}
        self._fast: dict[tuple[str, torch.dtype, torch.device], Optimiser] = {}

    def _refuse(self) -> None:
        """Raises what gradients would raise, before anything moves."""
        for group in self.param_groups:
            for name, param in zip(names_of(group), group["params"], strict=True):
                _check_gradient(name, param)

    def _told(self, loss: Tensor | float | None) -> Tensor | None:
        """The loss of these gradients for those who look at it: of sharded parameters, the mean over the processes."""
        looking = [group for group in self.param_groups if _looks_at_the_loss(self._rules[group["weights"]])]
        if loss is None:
            if any(group["lr"] != 0 for group in looking):  # at 0, distributed checkpoints have the first state made
                expected, remedy = "the loss of this step", "call step(loss=…) or step(closure)"
                raise UserError("input 'loss'", expected=expected, found="none", remedy=remedy)
            return torch.zeros(()) if looking else None
        told = torch.as_tensor(loss).detach()
        if told.numel() != 1:
            found, remedy = str(list(told.shape)), "tell their mean"
            raise UserError("step: loss", expected="one number", found=found, remedy=remedy)
        told = told.reshape(())
        if not looking and all(group["fallback"] is None for group in self.param_groups):
            return told
        return sharding.mean(told, chain.from_iterable(group["params"] for group in self.param_groups))

    def _move(self, vector: FlatVector, group: dict[str, Any], loss: Tensor | None) -> None:
        """One step of a flat vector."""
        grads, theta = vector.gather()
        loss = None if loss is None else loss.to(grads)
        kept = torch.bfloat16 if group["state_dtype"] == "bfloat16" else grads.dtype
        if not group["fallen_back"]:
            update = vector.advance(self._rule(group["weights"], vector), "", kept, grads, theta, loss)
        if group["fallback"] is not None:
            sound = grads.where(grads.square().isfinite(), 0.0)
            rule = self._rule(group["fallback"], vector)
            spare = vector.advance(rule, "fallback.", grads.dtype, sound, theta, loss)
            if not group["fallen_back"] and vector.anywhere(~update.isfinite().all()):
                self._fall_back("an update of the learned rule is not finite")
            if group["fallen_back"]:
                update = spare
        if group["max_update"] is not None:
            update = update.clamp(-group["max_update"], group["max_update"])
        if group["weight_decay"]:
            update = update - group["weight_decay"] * theta
        lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        vector.scatter(theta.add_(lr * update))

    def _watch(self, loss: Tensor) -> None:
        """Goes over to the fallback where the loss has diverged."""
        for group in self.param_groups:
            if group["fallback"] is None or group["fallen_back"]:
                continue
            value = float(loss)
            if group["first_loss"] is None:
                group["first_loss"] = value
            if not math.isfinite(value) or value > DIVERGED * group["first_loss"] > 0:
                self._fall_back(f"the loss is {value:.6g} and was {group['first_loss']:.6g} at first")

    def _fall_back(self, reason: str) -> None:
        for group in self.param_groups:
            group["fallen_back"] = group["fallback"] is not None
        logging.getLogger("l2lopt").warning("the fallback's updates from now on: %s", reason)

    def _rule(self, mark: str, vector: FlatVector) -> Optimiser:
        """The fast form of a rule in the dtype that the vector needs, on its device."""
        dtype, device = computes_in(vector.params[0]), vector.params[0].device
        if (mark, dtype, device) not in self._fast:
            self._fast[mark, dtype, device] = kernels.fast(deepcopy(self._rules[mark]).to(device, dtype))
        return self._fast[mark, dtype, device]


higher.register_optim(LearnedOptimizer, Differentiable)


def _check(group: Mapping[str, Any]) -> None:
    """Refuses options out of their range."""
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        found, remedy = str(list(group["lr"].shape)), "make a group for each rate"
        raise UserError("LearnedOptimizer: lr", expected="one number", found=found, remedy=remedy)
    for name in ("lr", "weight_decay", "max_update"):
        if not isinstance(group[name], Real | Tensor) and not (name == "max_update" and group[name] is None):
            found = repr(group[name])
            raise UserError(f"LearnedOptimizer: {name}", expected="a number", found=found, remedy="change the value")
    at_least_0("LearnedOptimizer", lr=group["lr"], weight_decay=group["weight_decay"])
    if group["max_update"] is not None:
        above_0("LearnedOptimizer", max_update=group["max_update"])
    if group["state_dtype"] not in STATE_DTYPES:
        found, remedy = repr(group["state_dtype"]), did_you_mean(str(group["state_dtype"]), STATE_DTYPES)
        raise UserError("LearnedOptimizer: state_dtype", expected="a known name", found=found, remedy=remedy)
    for name, remedy in _REFUSED.items():
        if group.get(name):
            raise UserError(f"LearnedOptimizer: {name}", expected="False", found="True", remedy=remedy)


def _part_of(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What one rule keeps of a parameter, under the rule's own names."""
    begins = {key: next(p for p in reversed(_PREFIXES.values()) if key.startswith(p)) for key in table}
    return {key.removeprefix(prefix): table[key] for key in table if key != "vector" and begins[key] == prefix}


def _features(value: Any, param: Tensor) -> tuple[int, ...]:
    """How many numbers a coordinate has in an array of a parameter's state, axis by axis."""
    shape = torch.as_tensor(value).shape
    return tuple(shape[: len(shape) - param.dim()])


def _looks_at_the_loss(rule: Optimiser) -> bool:
    return any(isinstance(part, Loss) for part in rule.modules())


def _check_gradient(name: str, param: Tensor) -> None:
    """Refuses what no rule can work on."""
    for value in (param.grad, param) if param.grad is not None else ():
        if value.layout != torch.strided or value.dtype not in DTYPES:
            found = f"{str(value.layout).removeprefix('torch.')} {str(value.dtype).removeprefix('torch.')}"
            expected, remedy = "a dense real gradient", "give the parameter to another optimiser"
            raise UserError(f"parameter {name!r}", expected=expected, found=found, remedy=remedy)
