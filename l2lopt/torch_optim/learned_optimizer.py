"""Any optimiser of this library as a `torch.optim.Optimizer`, for other people's training loops."""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from torch.utils import _pytree as pytree

from l2lopt import kernels
from l2lopt.core.errors import UserError
from l2lopt.core.precision import without_autocast
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim import sharding
from l2lopt.torch_optim.differentiable import Differentiable, higher
from l2lopt.torch_optim.flat_vectors import FlatVector, compute_dtype
from l2lopt.torch_optim.options import (
    LATE,
    SMALL,
    as_number,
    check_closure,
    check_gradients,
    check_group,
    check_options,
    check_parameters,
    guard_of,
    has_diverged,
    names_of,
    one_loss,
    refuse_torchs,
    steps_of,
    warn_of_end,
    warn_of_small_factors,
    with_plain_numbers,
)
from l2lopt.torch_optim.parameter_groups import (
    as_one_module,
    each_of,
    in_order_of,
    named_alike,
    parameter_groups,
    roles_of,
)
from l2lopt.torch_optim.partition import vectors_of
from l2lopt.torch_optim.rule_choice import fallback_of, rule_of
from l2lopt.torch_optim.state_check import check_rules, check_shapes
from l2lopt.torch_optim.state_dict import restore
from l2lopt.weights import files

Weights: TypeAlias = str | Path | Mapping[str, Any] | Optimiser
"""A rule: a name in `list_weights()`, a file written by `l2lopt meta-train`, a choice such as
{"name": "adam", "lr": 0.001}, or an optimiser."""


class LearnedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that takes the steps of an `Optimiser`, learned or hand-designed.

    One step is θ ← θ + lr · (u − λθ), where u is the update that the rule computes from the gradients, its state and θ.

        >>> import torch, l2lopt
        >>> model, inputs = torch.nn.Linear(4, 2), torch.ones(3, 4)
        >>> optimizer = l2lopt.LearnedOptimizer(model, steps=20)
        >>> losses = []
        >>> for step in range(20):
        ...     loss = (model(inputs) - 3.0).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step(loss=loss)  # or step(), or step(closure)
        ...     losses.append(loss.item())
        >>> losses[-1] < losses[0]
        True

    *State.* The parameters of a group form one flat vector (see `flat_vectors`). `state[p]` contains the part of the
    state that belongs to p: per coordinate as views shaped (features…, *p.shape), per tensor, row or column under
    "tensors.…", "rows.…" or "columns.…" (see `state_parts`); the tensors that all coordinates share, such as "step";
    and "vector", the number of p's flat vector. A parameter without a gradient is not updated, and neither is
    its state, not even its step count. The parameters that step without it form a flat vector of their own from then
    on. `param_groups` and `state_dict()` contain tensors and plain values only: a group's "weights" is the hash of its
    rule.

    *Precision.* Rules compute in float32 (in float64 for float64 parameters) on copies of gradients and parameters. The
    new parameters are rounded to their dtype; there is no float32 master copy. The rules are copies with a constant φ.
    Beside the state, a step takes 16 bytes per parameter; 4 of them remain allocated, on the CPU 12.

    *Fallback.* The fallback's state ("fallback.…" in `state[p]`) is updated at every step beside the rule's. Once an
    update of the rule is not finite, or the loss is not finite or far above the first one (`has_diverged`), all groups
    with a fallback use its updates for good ("fallen_back" in the group), and a warning is logged. The checks cost two
    GPU synchronisations per step and group, one where no loss is told.

    *Several processes.* Distributed parameters (FSDP2; see `sharding`) are updated part by part in their processes,
    with the result that one process would have: statistics are those of whole tensors, and loss and fallback are
    decided over all processes. `state[p]` has the placements of p. Under DDP all processes must pass the same loss.

    CUDA graphs are refused: the rules read the step count, and the fallback its checks, on the host.

    Args:
        params: A module or several, whose parameters these are (see `parameter_groups`); or tensors, (name, tensor)
            pairs, or groups of them as dicts, which may set any option below for their parameters; float32, bfloat16,
            float16 or float64.
        weights: Rule: a name in `list_weights()`, "normalised-muon", a file, a choice, or an optimiser. The default is
            the harness, on which the learned rules stand; it wants to know the end of the run, `steps`.
        lr: Factor of update and decay, at least 0; schedulers change it.
        weight_decay: λ ≥ 0, decoupled: θ ← θ − lr·λ·θ.
        max_update: Largest size of a coordinate of u, before lr; None sets no bound.
        fallback: Hand-designed rule by name, by choice, or as an optimiser: best "normalised-muon", the harness, which
            has its own rate as it is; other names have lr 0.001. A group that sets a hand-designed rule of its own has
            no fallback unless it sets one as well.
        state_dtype: Dtype of the rule's state per coordinate between steps: "float32" (float64 for float64 parameters),
            or "bfloat16", rounded at each step; running means with β above 0.996 may stop moving in it. A step then
            needs the float32 state of `blocks.BLOCK` coordinates at once, or of a whole tensor for a rule whose
            coordinates meet.
        capturable: Refused where true, as the next four are: they are there for loops that hand them to every
            optimiser.
        maximize: Refused where true.
        foreach: Refused where true.
        fused: Refused where true.
        differentiable: Refused where true.
        steps: Number of steps of the run, for rules that know their end; None where it is not known. A run that goes on
            with another number takes it, and the log says so.
        kind: Kind of the parameters: "matrix", "vector", "embedding" or "head", or a list with one for each; None tells
            by names and shapes. See `core.kinds`.
        split: Number of matrices that are stacked along a parameter's first axis, such as 3 for attention's queries,
            keys and values in one; or a list with one for each; None tells by names and shapes.
        fan_in: Number of inputs of a parameter, to whose root relative steps are inverse; or a list with one for each;
            None tells by shapes, a bias's from the matrix before it.

    Raises:
        UserError: A file is missing, damaged or foreign, or an option is out of its range.
    """

    _is_made = False

    def __init__(
        self,
        params: ParamsT | nn.Module,
        weights: Weights = "normalised-muon",
        lr: float | Tensor = 1.0,
        weight_decay: float = 0.0,
        max_update: float | None = None,
        fallback: str | Mapping[str, Any] | Optimiser | None = None,
        state_dtype: str = "float32",
        capturable: bool = False,
        steps: int | None = None,
        kind: str | list[str] | None = None,
        split: int | list[int] | None = None,
        fan_in: int | list[int] | None = None,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        self._rules: dict[str, Optimiser] = {}
        options = {"lr": lr, "weight_decay": weight_decay, "max_update": max_update}
        rules = {"weights": self._rule_id(weights), "fallback": self._fallback_id(fallback)}
        progress = {"first_loss": None, "fallen_back": False}
        refuse_torchs({"maximize": maximize, "foreach": foreach, "fused": fused})
        torchs = {"capturable": capturable, "differentiable": differentiable}  # torch.optim adds the second on loading
        about = {"state_dtype": state_dtype, "steps": steps, "kind": kind, "split": split, "fan_in": fan_in}
        self._clear_cache()
        params = as_one_module(params)
        if isinstance(params, nn.Module):
            given = ("kind", kind), ("split", split), ("fan_in", fan_in)
            asked = {name for name, value in given if value is not None}
            found = parameter_groups(params)
            if not any(param.requires_grad for _, param in found[0]["params"]):
                where, remedy = "LearnedOptimizer: params", "set requires_grad of what is to be trained"
                raise UserError(where, expected="a parameter to train", found="none", remedy=remedy)
            params = [{key: value for key, value in group.items() if key not in asked} for group in found]
        super().__init__(params, with_plain_numbers(options | rules | progress | about | torchs))
        warn_of_small_factors(self.param_groups, self._rules)
        self._is_made = True

    @property
    def rules(self) -> Mapping[str, Optimiser]:
        """The rules in use, copies with a constant φ, by the hashes in the groups."""
        return self._rules

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_rules": self._rules}  # torch.optim copies its own attributes only
        # A view would be pickled with all of its storage, which all parameters share.
        return {**state, "state": pytree.tree_map_only(Tensor, _compact, state["state"])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continues from a copy or a state dict; the state of other rules is refused before anything changes."""
        for group, saved in zip(self.__dict__.get("param_groups", []), state["param_groups"], strict=False):
            saved |= in_order_of(group, saved)  # distributed checkpoints go by names
            check_rules(group, saved, self._rules, state["state"])
            check_options({**group, **saved})
            check_shapes(group | {"fallen_back": saved.get("fallen_back")}, self._rules, state["state"])
            saved["steps"] = steps_of(group, saved)
            for name in ("kind", "split", "fan_in"):
                saved.setdefault(name, group[name])
        super().__setstate__(state)
        for group, (key, value) in product(self.param_groups, self.defaults.items()):
            group.setdefault(key, value)  # an older release had fewer options
        self._clear_cache()
        self._is_made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own; `param_group` is not changed.

        Raises:
            UserError: An option is out of its range.
        """
        check_group(param_group)
        # Lists are of the first parameters, each with its value: later ones have their own or none.
        lists = ("kind", "split", "fan_in") if self._is_made else ()
        none = {name: None for name in lists if isinstance(self.defaults[name], list)}
        group = self.defaults | none | guard_of(self.param_groups) | param_group
        if "weights" in param_group:
            group["weights"] = self._rule_id(group["weights"])
        if "fallback" in param_group:
            group["fallback"] = self._fallback_id(group["fallback"])
        elif "weights" in param_group and not self._rules[group["weights"]].phi():
            group["fallback"] = None
        group["fallen_back"] = group["fallen_back"] and group["fallback"] is not None
        check_options(group)
        super().add_param_group(named_alike(with_plain_numbers(group), self.param_groups))
        added = self.param_groups[-1]
        self._vectors.clear()  # a matrix among the new ones may be the one of a bias in another group
        try:
            # These refuse what they cannot be.
            check_parameters(zip(names_of(added), added["params"], strict=True))
            roles_of(added), each_of("fan_in", added, len(added["params"]))
        except UserError:
            self.param_groups.pop()
            raise
        if self._is_made:  # those of the beginning are looked at together
            warn_of_small_factors([added], self._rules)

    def step(  # type: ignore[override]  # torch.optim has no loss
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | float | None = None
    ) -> Tensor | None:
        """One update of every parameter that has a gradient.

        Args:
            closure: Function that computes loss and gradients; called once.
            loss: Unscaled loss that the gradients belong to, one number, where no closure returns it. Rules with the
                input `loss` need it; a fallback checks it.

        Returns:
            The result of the closure.

        Raises:
            UserError: A gradient is sparse, complex or of integers, or the loss is missing; no parameter has changed.
        """
        result = None
        check_closure(closure)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            # Lightning passes a closure that returns nothing beside the loss.
            loss = loss if result is None else result
        devices = {param.device.type for group in self.param_groups for param in group["params"]}
        with torch.no_grad(), without_autocast(devices | {"cpu"}):
            for group in self.param_groups:
                # All groups before any step, so that a refusal leaves every parameter as it was.
                check_gradients(group)
            value = self._loss(loss)
            if loss is not None and value is not None:
                self._check_divergence(value)
            late, ended = [], []
            for index, group in enumerate(self.param_groups):
                others = [param for other in self.param_groups if other is not group for param in other["params"]]
                for vector in vectors_of(group, self.state, self._vectors.setdefault(index, {}), others):
                    self._step_vector(vector, group, value)
                    # "initial_lr" is what a scheduler began with: from a factor of 1 a decay may be far down by now.
                    is_late = not group["fallen_back"] and vector.steps_made[""] == LATE
                    late += [group] * (is_late and float(group.get("initial_lr", 0)) < SMALL)
                    # The rule stands still once the fallback has taken over.
                    prefix = "fallback." if group["fallen_back"] else ""
                    if end := vector.ended.pop(prefix, 0):
                        ended += [(vector.steps_made[prefix], end)]
        warn_of_small_factors(late, self._rules)
        if ended:
            warn_of_end(*ended[0])
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues the run that `state_dict` was saved in, to the bit; `state_dict` is not changed.

        A state of the first releases has hashes that cannot be compared with those of today. It is checked that rules
        like these have such a state, and trusted that their φ was the same.

        Raises:
            UserError: The state belongs to other rules; the message has both hashes.
        """
        restore(self, state_dict)

    def _rule_id(self, weights: Any, option: str = "weights") -> str:
        """The hash of a rule, under which `_rules` has a copy of it from now on."""
        if isinstance(weights, str) and weights in self._rules:  # from a copied group
            return weights
        rule = rule_of(weights, option)
        rule_id = files.digest(rule)
        self._rules.setdefault(rule_id, rule.requires_grad_(False))
        return rule_id

    def _fallback_id(self, fallback: Any) -> str | None:
        """The hash of a hand-designed rule; see `_rule_id`."""
        if fallback is None or (isinstance(fallback, str) and fallback in self._rules):
            return fallback
        return self._rule_id(fallback_of(fallback), "fallback")

    def _clear_cache(self) -> None:
        """Drops everything that can be made again from `state` and the rules."""
        self._vectors: dict[int, dict[int, FlatVector]] = {}
        self._fast: dict[tuple[str, torch.dtype, torch.device], Optimiser] = {}

    def _loss(self, loss: Tensor | float | None) -> Tensor | None:
        """The loss as a scalar, averaged over the processes of sharded parameters; None if nothing uses it."""
        users = [
            group
            for group in self.param_groups
            if any(self._rules[group[option]].needs_loss for option in ("weights", "fallback") if group[option])
        ]
        if loss is None:
            if any(group["lr"] != 0 for group in users):  # at 0, distributed checkpoints create the initial state
                expected, remedy = "the loss of this step", "call step(loss=…) or step(closure)"
                raise UserError("input 'loss'", expected=expected, found="none", remedy=remedy)
            return torch.zeros(()) if users else None
        value = one_loss(loss)
        if not users and all(group["fallback"] is None for group in self.param_groups):
            return value
        # Collective for sharded parameters: their ranks must not step, or fall back, by losses that differ.
        return sharding.mean(value, chain.from_iterable(group["params"] for group in self.param_groups))

    def _step_vector(self, vector: FlatVector, group: dict[str, Any], loss: Tensor | None) -> None:
        """One step of a flat vector."""
        grads, theta = vector.gather()
        update = self._update(vector, group, grads, theta, None if loss is None else loss.to(grads))
        lr, decay, largest = (as_number(group[name]) for name in ("lr", "weight_decay", "max_update"))
        if largest is not None:
            update = update.clamp(-largest, largest)
        if decay:
            update = update - decay * theta
        vector.scatter(theta.add_(update if isinstance(lr, float) and lr == 1 else lr * update))

    def _update(
        self, vector: FlatVector, group: dict[str, Any], grads: Tensor, theta: Tensor, loss: Tensor | None
    ) -> Tensor:
        """The update u [n] of the rule, or of the fallback once it has taken over."""
        update = None
        if not group["fallen_back"]:
            dtype = torch.bfloat16 if group["state_dtype"] == "bfloat16" else grads.dtype
            update = vector.update_(self._rule(group["weights"], vector), "", dtype, grads, theta, loss)
            if group["fallback"] is None:
                return update
        # The fallback sees every step, so that its running means are right when it takes over.
        # Hand-designed rules mask nothing: such a gradient would stay in their running means for good.
        finite = grads.where(grads.square().isfinite(), 0.0)
        fallback = vector.update_(self._rule(group["fallback"], vector), "fallback.", grads.dtype, finite, theta, loss)
        # Decided over all ranks, or some would take the rule's update and others the fallback's.
        if update is not None and vector.any_rank(~update.isfinite().all()):
            self._fall_back("an update of the learned rule is not finite")
        return fallback if group["fallen_back"] or update is None else update

    def _check_divergence(self, loss: Tensor) -> None:
        """Switches to the fallback if the loss has diverged."""
        for group in self.param_groups:
            if group["fallback"] is None or group["fallen_back"]:
                continue
            value = float(loss)
            if not group["first_loss"]:  # none yet, or 0, which gives no scale
                group["first_loss"] = value
            if has_diverged(value, group["first_loss"]):
                self._fall_back(f"the loss is {value:.6g} and was {group['first_loss']:.6g} at first")

    def _fall_back(self, reason: str) -> None:
        for group in self.param_groups:
            group["fallen_back"] = group["fallback"] is not None
        logging.getLogger("l2lopt").warning("the fallback's updates from now on: %s", reason)

    def _rule(self, rule_id: str, vector: FlatVector) -> Optimiser:
        """The fastest form of a rule, in the vector's dtype and on its device."""
        dtype, device = compute_dtype(vector.params[0]), vector.params[0].device
        if (rule_id, dtype, device) not in self._fast:
            # Of a copy: moving the rule itself would change what the other vectors and the hash stand for.
            fast = kernels.fuse(deepcopy(self._rules[rule_id]).to(device, dtype))
            if isinstance(fast, FusedOptimiser):
                fast.fix()  # nobody else has this copy's φ
            self._fast[rule_id, dtype, device] = fast
        return self._fast[rule_id, dtype, device]


higher.register_optim(LearnedOptimizer, Differentiable)


def _compact(value: Tensor) -> Tensor:
    """A tensor by itself, copied if it is a part of a larger storage."""
    is_part = type(value) is Tensor and value.untyped_storage().nbytes() > value.numel() * value.element_size()
    return value.clone() if is_part else value
