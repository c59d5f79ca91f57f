"""The learned optimiser's update rules on a block: forward for the step and the replay, and backward, by hand.

Each rule equals its namesake in `optimisers.rules`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.kernels.cpu.activations import tanh_backward
from l2lopt.kernels.cpu.block import Block
from l2lopt.kernels.cpu.trace import Trace
from l2lopt.kernels.folding import Folded, growth_of, step_size
from l2lopt.optimisers import rules
from l2lopt.optimisers.rules import UpdateRule


class Normaliser(NamedTuple):
    """The statistic R of each of T steps, spread over the coordinates: [P] each.

    A first-order replay takes R as a constant, or it knows the adjoint of R. Then ∂(meta-loss)/∂d has κ d more, with
    κ = c² R (adjoint − weight · p) and p = −S_t a d / R, see `types.Replay`; c² is the fan-in or 1.

    Attributes:
        factors: S_t / R, times the activity.
        adjoints: c² adjoint / R, or None where R is a constant.
        weights: c² weight / R², or None where R is a constant.
    """

    factors: Sequence[Tensor]
    adjoints: Sequence[Tensor] | None
    weights: Sequence[Tensor] | None


class RuleKernel(ABC):
    """A rule's update from the network's outputs, and its backward pass through a window.

    `forward` and what it reads are the same for all blocks and threads; `begin`, `backward` and `gradient` belong to
    the replay of one block.

    Args:
        rule: The reference rule, for its options.
        folded: The multiplied-out layers.
        phi: All parameters by name.
        nominal: Factor of the row of features that the rule takes m̂/√v̂ from.

    Attributes:
        factor: The head's weights and bias are multiplied by it.
        rests: Whether updates are multiplied by `rules.activity`; `forward` leaves that to its callers.
    """

    factor: float = 1.0
    rests: bool = True

    def __init__(self, rule: Any, folded: Folded, phi: Params, nominal: float = 1.0) -> None:
        self.rule, self.nominal = rule, nominal
        self.phi = {name[5:]: value.detach() for name, value in phi.items() if name.startswith("rule.")}
        self.head, self.head_bias = folded.head, folded.head_bias[:, None]
        if self.factor != 1.0:
            self.head, self.head_bias = self.head * self.factor, self.head_bias * self.factor

    @abstractmethod
    def forward(self, outputs: Sequence[Tensor], nominal: Tensor | None, block: Block) -> Tensor:
        """The update [B]; of a rule with a statistic R its direction, before the division by R.

        Args:
            outputs: The network's, [B] each, overwritten with what `backward` needs. A single output may be the
                block's update itself.
            nominal: The row of features that holds m̂/√v̂, [B], where the rule needs it.
            block: θ and gradients; the rule's memory after the step is written, and `update` unless it is `outputs[0]`
                that is returned.
        """

    def begin(self, trace: Trace, memory: Params) -> None:
        """Starts the replay of a trace, from the state's coordinates."""
        self.trace = trace

    def memory(self, t: int) -> Params:
        """The rule's memory before step t, by name as in the state's coordinates."""
        return {}

    @abstractmethod
    def backward(self, t: int, a: Tensor, normaliser: Normaliser | None) -> Tensor | None:
        """Writes the adjoint of the outputs of step t, and adds to the gradients of the rule's parameters.

        Args:
            t: Step.
            a: The adjoint of the update, 0 where a coordinate is skipped, [P].
            normaliser: The statistic of each step, for a rule that has one.

        Returns:
            The adjoint of θ by way of the rule, or None for 0.
        """

    def gradient(self) -> Params:
        """The gradients of the rule's parameters by their names in the rule, after the last `backward`."""
        return {}


class Additive(RuleKernel):
    """u = s·o, with s multiplied into the head: no operation."""

    def __init__(self, rule: rules.Additive, folded: Folded, phi: Params, nominal: float = 1.0) -> None:
        self.factor = rule.step_size
        super().__init__(rule, folded, phi, nominal)

    def forward(self, outputs: Sequence[Tensor], nominal: Tensor | None, block: Block) -> Tensor:
        """The output itself."""
        return outputs[0]

    def backward(self, t: int, a: Tensor, normaliser: Normaliser | None) -> Tensor | None:
        """The update's own, times the activity."""
        self.trace.adjoint_rows[t][0].copy_(self.trace.active(t, a))
        return None


class Bounded(RuleKernel):
    """u = s·tanh o. Two operations; tanh o takes the place of o."""

    def forward(self, outputs: Sequence[Tensor], nominal: Tensor | None, block: Block) -> Tensor:
        """s·tanh o."""
        return torch.mul(outputs[0].tanh_(), self.rule.step_size, out=block.update)

    def backward(self, t: int, a: Tensor, normaliser: Normaliser | None) -> Tensor | None:
        """s·a·(1 − tanh² o), times the activity."""
        a = self.trace.active(t, a) * self.rule.step_size
        tanh_backward(a, self.trace.output_rows[t][0], grad_input=self.trace.adjoint_rows[t][0])
        return None


class Gated(RuleKernel):
    """u = −(1 − f)∘θ − s i∘g, the gates σ(o + w_θ θ + w_g gate₋ + b). Thirteen operations.

    The large biases come last, as in the reference: one rounding is theirs. 1 − f is computed as σ of the negative, for
    f is near 1, and takes the place of the first output.
    """

    rests = False

    def __init__(self, rule: rules.Gated, folded: Folded, phi: Params, nominal: float = 1.0) -> None:
        super().__init__(rule, folded, phi, nominal)
        # Plain numbers can go into `alpha`, which saves the products with them an operation each.
        self.weights = [self.phi[name].tolist() for name in ("weight_params", "weight_gates", "bias")]
        self._scale = 1.0 if rule.scale is None else rule.scale * growth_of(self.phi["log_scale"])

    def forward(self, outputs: Sequence[Tensor], nominal: Tensor | None, block: Block) -> Tensor:
        """−(1 − f)∘θ − s i∘g."""
        gates = []
        for output, name, by_params, by_gate, bias in zip(outputs, self.rule.memory, *self.weights, strict=True):
            before, after = block.before[f"rule.{name}"], block.after[f"rule.{name}"]
            # In place `after` is `before`: the gate before is read here, then overwritten.
            output.add_(block.params, alpha=by_params).add_(before, alpha=by_gate).add_(bias)
            gates.append(torch.sigmoid(output, out=after))
        torch.mul(outputs[0].neg_().sigmoid_(), block.params, out=block.update)
        return block.update.addcmul_(gates[1], block.grads, value=self._scale).neg_()

    def begin(self, trace: Trace, memory: Params) -> None:
        """Makes room for the two gates of each step."""
        super().begin(trace, memory)
        steps, like = len(trace.outputs), trace.params[0]
        self._gates = like.new_empty(steps + 1, 2, len(like))
        for k, name in enumerate(self.rule.memory):
            value = memory[f"rule.{name}"]
            self._gates[0, k].view(value.shape).copy_(value)
        rows = [step.unbind() for step in self._gates.unbind()]
        self._memory = [
            {f"rule.{name}": gate for name, gate in zip(self.rule.memory, two, strict=True)} for two in rows
        ]
        self._adjoint, self._log_scale = like.new_zeros(2, len(like)), like.new_zeros(())
        self._by_params, self._by_gates = (self.phi[name][:, None] for name in ("weight_params", "weight_gates"))

    def memory(self, t: int) -> Params:
        """The two gates."""
        return self._memory[t]

    def backward(self, t: int, a: Tensor, normaliser: Normaliser | None) -> Tensor | None:
        """f(1 − f)(aθ + f̄) for o₀, i(1 − i)(ī − s a g) for o₁, with f̄, ī the gates' adjoints from the step after."""
        adjoint, passing = self.trace.part(t, self._adjoint)
        (f, i), forgotten = self._memory[t + 1].values(), self.trace.output_rows[t][0]
        out, (by_f, by_i) = self.trace.adjoints[t], self.trace.adjoint_rows[t]
        # 1 − f is the forward's σ of the negative: subtracted from 1, an f near 1 would lose its digits.
        torch.addcmul(adjoint[0], a, self.trace.params[t], out=by_f).mul_(f).mul_(forgotten)
        torch.addcmul(adjoint[1], a, self.trace.grads[t], value=-self._scale, out=by_i).mul_(i).mul_(1 - i)
        if self.rule.scale is not None:
            self._log_scale.sub_(torch.dot(a * i, self.trace.grads[t]), alpha=10 * self._scale)
        self._adjoint = self._by_gates * out
        if passing is not None:
            self._adjoint += passing
        return (self._by_params * out).sum(0) - a * forgotten

    def gradient(self) -> Params:
        """Sums over steps and coordinates."""
        adjoints, theta = torch.stack(self.trace.adjoints), torch.stack(self.trace.params[:-1])
        return ({} if self.rule.scale is None else {"log_scale": self._log_scale}) | {
            "bias": adjoints.sum((0, 2)),
            "weight_params": (adjoints * theta[:, None]).sum((0, 2)),
            "weight_gates": (adjoints * self._gates[:-1]).sum((0, 2)),
        }


class DirectionAndMagnitude(RuleKernel):
    """u = S_t (a d / R − λθ), d = (o₀ − m̂/√v̂) exp o₁, with R the statistic of d over each tensor.

    R takes all coordinates of a tensor. So `forward` ends with d, in two or three operations, and `finish` follows once
    R is known. In a replay d and exp o₁ take the places of o₀ and o₁.
    """

    def __init__(self, rule: rules.DirectionAndMagnitude, folded: Folded, phi: Params, nominal: float = 1.0) -> None:
        super().__init__(rule, folded, phi, nominal)
        self._growth = growth_of(self.phi["log_scale"])

    def scale(self, step: int) -> float:
        """S_t at step t, counted from 1."""
        return step_size(self.rule, self._growth, step)

    def forward(self, outputs: Sequence[Tensor], nominal: Tensor | None, block: Block) -> Tensor:
        """The direction d."""
        if nominal is not None:
            outputs[0].add_(nominal, alpha=-self.nominal)
        return torch.mul(outputs[0], outputs[1].exp_(), out=block.update)

    def begin(self, trace: Trace, memory: Params) -> None:
        """Starts the gradient of the log scale at 0."""
        super().begin(trace, memory)
        self._log_scale = torch.zeros_like(self.phi["log_scale"])

    def finish(self, scaled: Tensor, params: Tensor, scale: float) -> Tensor:
        """The update in the place of S_t d / R."""
        decay = scale * self.rule.weight_decay
        return scaled.add_(params, alpha=-decay) if decay else scaled

    def backward(self, t: int, a: Tensor, normaliser: Normaliser | None) -> Tensor | None:
        """(S_t a + κ d / R) exp(o₁) / R for o₀, the same times o₀ − m̂/√v̂ for o₁; −S_t λ a for θ."""
        assert normaliser is not None
        direction, magnitude = self.trace.output_rows[t]
        decay = self.scale(self.trace.numbers[t]) * self.rule.weight_decay
        scaled = whole = a * normaliser.factors[t]
        if normaliser.adjoints is not None and normaliser.weights is not None:
            # R was measured without skipped coordinates, so it leads back to none of them.
            d = self.trace.part(t, direction)[0]
            # −weight · p has a plus here, since p = −S_t a d / R.
            kappa = torch.addcmul(normaliser.adjoints[t], normaliser.weights[t], scaled * d)
            whole = torch.addcmul(scaled, kappa, d)
        torch.mul(whole, magnitude, out=self.trace.adjoint_rows[t][0])
        torch.mul(whole, direction, out=self.trace.adjoint_rows[t][1])
        self._log_scale.add_(torch.dot(scaled, direction) - decay * torch.dot(a, self.trace.params[t]), alpha=10)
        return -decay * a if decay else None

    def gradient(self) -> Params:
        """Σ a·∂u/∂(log scale) = Σ 10 a·u."""
        return {"log_scale": self._log_scale}


KERNELS: Mapping[type[UpdateRule], type[RuleKernel]] = {
    rules.Additive: Additive,
    rules.Bounded: Bounded,
    rules.Gated: Gated,
    rules.DirectionAndMagnitude: DirectionAndMagnitude,
}
"""Rule → its kernel."""
