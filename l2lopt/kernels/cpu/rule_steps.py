"""The update rules' steps and their adjoints, written by hand."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.types import Params, Window
from l2lopt.kernels.cpu.trace import Trace
from l2lopt.optimisers.rules import Additive, Bounded, DirectionAndMagnitude, Gated, UpdateRule, spread


class RuleSteps(ABC):
    """An update rule over the steps of a trace, and the way back.

    Args:
        rule: whose options count.
        phi: its parameters by its own names.
        trace: of the window.
        window: the block's.
    """

    def __init__(self, rule: Any, phi: Params, trace: Trace, window: Window) -> None:
        self.rule, self.phi, self.trace = rule, phi, trace

    @abstractmethod
    def forward(self, t: int) -> Tensor:
        """The update u [P] from the outputs of step t."""

    @abstractmethod
    def backward(self, t: int, a: Tensor) -> Tensor | None:
        """Writes `trace.slopes[t]` from the update's adjoint a [P]; returns θ's by way of the rule, or None for 0."""

    def gradient(self) -> Params:
        """With respect to the rule's parameters."""
        return {}


class AdditiveSteps(RuleSteps):
    """u = s·o."""

    rule: Additive

    def forward(self, t: int) -> Tensor:
        """s·o."""
        return self.trace.outputs[t][0] * self.rule.step_size

    def backward(self, t: int, a: Tensor) -> Tensor | None:
        """s·a."""
        torch.mul(a, self.rule.step_size, out=self.trace.slopes[t][0])
        return None


class BoundedSteps(RuleSteps):
    """u = s·tanh o; tanh o takes the place of o."""

    rule: Bounded

    def forward(self, t: int) -> Tensor:
        """s·tanh o."""
        return self.trace.outputs[t][0].tanh_() * self.rule.step_size

    def backward(self, t: int, a: Tensor) -> Tensor | None:
        """s·a·(1 − tanh² o)."""
        torch.ops.aten.tanh_backward.grad_input(
            a * self.rule.step_size, self.trace.outputs[t][0], grad_input=self.trace.slopes[t][0]
        )
        return None


class DirectionAndMagnitudeSteps(RuleSteps):
    """u = S_t (d − λθ), d = (o₀ − nominal) r, r = exp(o₁) / R; d and r take the places of o₀ and o₁.

    The statistic R has the slope that its "pull" says, see `rules.given`: ∂(meta-loss)/∂d has κ d more, with
    κ = c² R (pull − own·p), p = −S_t a d / R.
    """

    def __init__(self, rule: DirectionAndMagnitude, phi: Params, trace: Trace, window: Window) -> None:
        super().__init__(rule, phi, trace, window)
        measured = torch.stack([shared["statistic"] for shared in window.shared])
        layout, shape = window.state.layout, (len(trace.grads), window.params.numel())
        self.statistic = spread(measured, layout).reshape(shape)
        self.pulls: list[Tensor] | None = None
        if "pull" in window.shared[0]:
            squares = torch.tensor(layout.fan_ins if rule.by_fan_in else 1).to(measured)
            pull, own = (torch.stack([shared[name] for shared in window.shared]) for name in ("pull", "own"))
            self.pulls = [spread(part * squares, layout).reshape(shape) for part in (pull * measured, own)]
        steps = torch.stack([shared["step"] for shared in window.shared]).to(window.params.dtype)
        scale = rule.step_size * torch.exp(10 * phi["log_scale"])
        self.scales: list[float] = (scale / (1 + (steps - 1) / rule.horizon)).tolist()
        self.log_scale = torch.zeros_like(phi["log_scale"])

    def forward(self, t: int) -> Tensor:
        """S_t (d − λθ)."""
        d, r = self.trace.outputs[t]
        torch.div(r.exp_(), self.statistic[t], out=r)
        if self.rule.needs:
            d.sub_(self.trace.features["rnnprop"][t, 0])
        d.mul_(r)
        return torch.sub(d, self.trace.params[t], alpha=self.rule.weight_decay).mul_(self.scales[t])

    def backward(self, t: int, a: Tensor) -> Tensor | None:
        """(S_t a + κ d) r for o₀, (S_t a + κ d) d for o₁; −S_t λ a for θ."""
        d, _ = self.trace.outputs[t]
        scaled = self.scales[t] * a
        whole = scaled
        if self.pulls is not None:
            acting, _ = self.trace.part(t, d)
            kappa = torch.addcmul(self.pulls[0][t], self.pulls[1][t], scaled * acting)
            whole = torch.addcmul(scaled, kappa, acting)
        torch.mul(whole, self.trace.outputs[t].flip(0), out=self.trace.slopes[t])
        decay = self.rule.weight_decay
        self.log_scale.add_(torch.dot(scaled, torch.sub(d, self.trace.params[t], alpha=decay)), alpha=10)
        return -decay * scaled if decay else None

    def pull(self, t: int, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """∂(meta-loss)/∂R by way of each coordinate, −S_t a d / R [P], and θ's adjoint by way of the rule."""
        d, _ = self.trace.outputs[t]
        scaled = self.scales[t] * a
        decay = self.rule.weight_decay
        return -scaled * d / self.statistic[t], -decay * scaled if decay else None

    def gradient(self) -> Params:
        """∂u/∂a = 10 u."""
        return {"log_scale": self.log_scale}


class GatedSteps(RuleSteps):
    """u = −(1 − f)∘θ − i∘g, the gates σ(o + w_θ θ + w_g gates₋ + b); the two take the places of the outputs.

    The memory is kept apart: a coordinate that is skipped keeps its gates from before.
    """

    def __init__(self, rule: Gated, phi: Params, trace: Trace, window: Window) -> None:
        super().__init__(rule, phi, trace, window)
        steps, count = len(trace.outputs), window.params.numel()
        self.memory = window.params.new_empty(steps + 1, 2, count)
        for k, name in enumerate(rule.memory):
            self.memory[0, k].view(window.params.shape).copy_(window.state.coordinates[f"rule.{name}"])
        self.adjoint = window.params.new_zeros(2, count)
        self.bias, self.weight_params, self.weight_gates = (
            phi[name][:, None] for name in ("bias", "weight_params", "weight_gates")
        )
        self.forgotten = window.params.new_empty(steps, count)

    def forward(self, t: int) -> Tensor:
        """−(1 − f)∘θ − i∘g, 1 − f as σ of the negative: f is near 1."""
        theta, before, after = self.trace.params[t], self.memory[t], self.memory[t + 1]
        gates = self.trace.outputs[t]
        gates.add_(self.bias).addcmul_(self.weight_params, theta).addcmul_(self.weight_gates, before)
        torch.sigmoid(-gates[0], out=self.forgotten[t])
        after.copy_(gates.sigmoid_())
        self.trace.keep(t, before, after)
        return -self.forgotten[t] * theta - gates[1] * self.trace.grads[t]

    def backward(self, t: int, a: Tensor) -> Tensor | None:
        """f(1 − f)(aθ + f̄) for o₀, i(1 − i)(ī − a g) for o₁, the gates' adjoints f̄, ī from the step after."""
        acting, passing = self.trace.part(t, self.adjoint)
        gates, slopes, forgotten = self.trace.outputs[t], self.trace.slopes[t], self.forgotten[t]
        torch.addcmul(acting[0], a, self.trace.params[t], out=slopes[0]).mul_(gates[0]).mul_(forgotten)
        torch.addcmul(acting[1], a, self.trace.grads[t], value=-1, out=slopes[1]).mul_(gates[1]).mul_(1 - gates[1])
        self.adjoint = self.weight_gates * slopes
        if passing is not None:
            self.adjoint += passing
        return (self.weight_params * slopes).sum(0) - a * forgotten

    def gradient(self) -> Params:
        """Sums over steps and coordinates."""
        slopes, theta = torch.stack(self.trace.slopes), torch.stack(self.trace.params[:-1])
        return {
            "bias": slopes.sum((0, 2)),
            "weight_params": (slopes * theta[:, None]).sum((0, 2)),
            "weight_gates": (slopes * self.memory[:-1]).sum((0, 2)),
        }


RULE_STEPS: Mapping[type[UpdateRule], type[RuleSteps]] = {
    Additive: AdditiveSteps,
    Bounded: BoundedSteps,
    Gated: GatedSteps,
    DirectionAndMagnitude: DirectionAndMagnitudeSteps,
}
