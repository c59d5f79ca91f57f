"""The learned rule's update from its network's outputs: each equals its namesake in `optimisers.rules`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from l2lopt.core.types import Params
from l2lopt.kernels.cpu.block import Block
from l2lopt.kernels.cpu.features import Rows
from l2lopt.optimisers import rules
from l2lopt.optimisers.rules import UpdateRule


class Finish(NamedTuple):
    """How outputs become updates in one step.

    Attributes:
        head: [outputs, M].
        bias: [outputs].
        write: (outputs [B] each, each input's rows by its name, block) → the block's update and the rule's memory. A
            single output lies in the update's own memory.
        scale: S_t of a direction and its magnitude; what `write` leaves is then the direction.
        decay: S_t λ.
    """

    head: Tensor
    bias: Tensor
    write: Callable[[Sequence[Tensor], Mapping[str, Sequence[Tensor]], Block], None]
    scale: float = 1.0
    decay: float = 0.0


def additive(rule: rules.Additive, phi: Params, inputs: Mapping[str, Rows], step: int) -> Finish:
    """The factor s belongs to the head. No operation."""
    head, bias = phi["head.weight"], phi["head.bias"]
    return Finish(head * rule.step_size, bias * rule.step_size, lambda outputs, rows, block: None)


def bounded(rule: rules.Bounded, phi: Params, inputs: Mapping[str, Rows], step: int) -> Finish:
    """Two operations."""

    def write(outputs: Sequence[Tensor], rows: Mapping[str, Sequence[Tensor]], block: Block) -> None:
        block.update.tanh_().mul_(rule.step_size)

    return Finish(phi["head.weight"], phi["head.bias"], write)


def gated(rule: rules.Gated, phi: Params, inputs: Mapping[str, Rows], step: int) -> Finish:
    """The large biases come last, as in the reference: one rounding is theirs. Thirteen operations."""
    weight_params, weight_gates = phi["rule.weight_params"].tolist(), phi["rule.weight_gates"].tolist()
    bias = phi["rule.bias"].tolist()

    def write(outputs: Sequence[Tensor], rows: Mapping[str, Sequence[Tensor]], block: Block) -> None:
        gates = []
        for k, name in enumerate(rule.memory):
            before, after = block.before[f"rule.{name}"], block.after[f"rule.{name}"]
            outputs[k].add_(block.params, alpha=weight_params[k]).add_(before, alpha=weight_gates[k]).add_(bias[k])
            gates.append(torch.sigmoid(outputs[k], out=after))
        torch.mul(outputs[0].neg_().sigmoid_(), block.params, out=block.update)
        block.update.addcmul_(gates[1], block.grads).neg_()

    return Finish(phi["head.weight"], phi["head.bias"], write)


def direction_and_magnitude(
    rule: rules.DirectionAndMagnitude, phi: Params, inputs: Mapping[str, Rows], step: int
) -> Finish:
    """The direction d alone, in two or three operations: what is taken over a tensor must wait for all of it."""
    nominal = -inputs["rnnprop"].scale[0] if rule.needs else 0.0

    def write(outputs: Sequence[Tensor], rows: Mapping[str, Sequence[Tensor]], block: Block) -> None:
        if rule.needs:
            outputs[0].add_(rows["rnnprop"][0], alpha=nominal)
        torch.mul(outputs[0], outputs[1].exp_(), out=block.update)

    growth = math.exp(10 * float(phi["rule.log_scale"]))
    scale = rule.step_size * growth / (1 + (step - 1) / rule.horizon)
    return Finish(phi["head.weight"], phi["head.bias"], write, scale, scale * rule.weight_decay)


UPDATES: Mapping[type[UpdateRule], Callable[[Any, Params, Mapping[str, Rows], int], Finish]] = {
    rules.Additive: additive,
    rules.Bounded: bounded,
    rules.Gated: gated,
    rules.DirectionAndMagnitude: direction_and_magnitude,
}
"""Rule → (itself, φ, the inputs' rows, the step's number t) → finish."""
