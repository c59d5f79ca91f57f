"""How a learned rule turns its network's outputs into an update."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from l2lopt.core.errors import above_0, at_least_0, finite
from l2lopt.core.layout import Layout, Params
from l2lopt.optimisers.inputs import StepInputs

EPS = 1e-12
"""The least root mean square."""
DIRECTION = "direction"
"""Name of the mean square of each tensor's directions."""
LEAST = 0.1
"""Size of Adam's direction below which a coordinate without a gradient slows down; see `activity`."""


class UpdateRule(nn.Module, ABC):
    """From the outputs of a coordinate's network to its update.

    A coordinate without a gradient comes to rest: a rule multiplies what it takes from the network by `activity`.

    Attributes:
        outputs: Numbers per coordinate it takes from the network.
        needs: The inputs whose features it looks at besides.
        memory: The names of the running values [*batch, n] it keeps, zero at first.
        statistic: Whether it takes a root mean square over each tensor's coordinates; where it does not, a coordinate's
            update is its own affair.
        by_fan_in: Whether the statistic is multiplied by the root of the tensor's fan-in.
    """

    outputs: int
    needs: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    statistic: bool = False
    by_fan_in: bool = False

    @abstractmethod
    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], step_inputs: StepInputs, memory: Params
    ) -> tuple[Tensor, Params]:
        """The update [*batch, n] and the memory after it.

        Args:
            outputs: The network's, [outputs, *batch, n].
            features: Each input's by its name, [size, *batch, n].
            step_inputs: Gradient, θ, step and loss.
            memory: The running values by name.
        """


class Additive(UpdateRule):
    """u = s·a·o, with a of `activity` (Andrychowicz et al. 2016, who have no a).

    Args:
        step_size: s.
    """

    outputs = 1

    def __init__(self, step_size: float = 0.1) -> None:
        super().__init__()
        finite("additive", step_size=step_size)
        self.step_size = step_size

    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], step_inputs: StepInputs, memory: Params
    ) -> tuple[Tensor, Params]:
        """s·a·o."""
        return self.step_size * outputs[0] * activity(step_inputs.grads, features), memory


class DirectionAndMagnitude(UpdateRule):
    """A direction and its magnitude (Metz et al. 2020), of normalised size and with a decaying step.

    d = (o₀ − m̂/√v̂)·exp(o₁), the nominal direction m̂/√v̂ taken from the input `rnnprop`;
    u = S_t·(a·r·d / RMS(d) − λ θ), with a of `activity`, the root mean square taken over each tensor's coordinates, and
    S_t = s·e^{10 b} / (1 + t / horizon) with t = 0 at the first update and one learned number b, 0 at first.
    The decay is tied to the step: it fades as the step does.

    Coordinates at rest count in the root mean square with the direction that they would have. Were they 0 there, the
    few rows of an embedding that are in use would take steps many times as long, and a tensor whose gradient has gone
    would be brought back to full size however small its directions are.

    r is 1, and S_t an absolute step, which belongs to the problems it was learned on; or r = 1/√fan-in (a vector takes
    its matrix's, see `Layout.fan_ins`), about the size of usual initial weights, and S_t a relative step, which other
    problems can share.

    Args:
        step_size: s.
        horizon: Steps after which S_t has halved.
        weight_decay: λ ≥ 0.
        nominal: Add Adam's direction −m̂/√v̂ to o₀.
        by_fan_in: r = 1/√fan-in.
    """

    outputs = 2
    statistic = True

    def __init__(
        self,
        step_size: float = 0.01,
        horizon: float = 50.0,
        weight_decay: float = 0.1,
        nominal: bool = True,
        by_fan_in: bool = False,
    ) -> None:
        super().__init__()
        self.step_size, self.horizon, self.weight_decay, self.by_fan_in = step_size, horizon, weight_decay, by_fan_in
        above_0("direction-and-magnitude", step_size=step_size, horizon=horizon)
        at_least_0("direction-and-magnitude", weight_decay=weight_decay)
        self.needs = ("rnnprop",) if nominal else ()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], step_inputs: StepInputs, memory: Params
    ) -> tuple[Tensor, Params]:
        """S_t·(a·r·d / RMS(d) − λ θ)."""
        direction = outputs[0] - features["rnnprop"][0] if self.needs else outputs[0]
        direction = direction * outputs[1].exp()
        # A coordinate that is left out has a direction, too, made from a gradient of 0: it must not count here.
        scale = root_mean_square(direction.where(step_inputs.finite, 0.0), step_inputs.layout, self.by_fan_in)
        direction = direction / step_inputs.layout.tensors.spread(scale) * activity(step_inputs.grads, features)
        steps = (step_inputs.step - 1).to(direction.dtype)
        scale = self.step_size * torch.exp(10 * self.log_scale) / (1 + steps / self.horizon)
        return scale * (direction - self.weight_decay * step_inputs.params), memory


class Gated(UpdateRule):
    """A forget gate on θ and an input gate on the gradient (Ravi and Larochelle 2017), each with a memory of itself.

    θ' = f∘θ − s i∘g with f = σ(o₀ + w_fθ θ + w_ff f₋ + b_f), i = σ(o₁ + w_iθ θ + w_ii i₋ + b_i), f₋ and i₋ the gates
    of the step before (0 at first), so u = −(1 − f)∘θ − s i∘g. 1 − f is computed as σ of the negative: f is near 1.
    Without a gradient there is the decay (1 − f)∘θ alone, so that `activity` has no part in it.

    s is 1, as Ravi and Larochelle have it, so that no rate is above 1; or s = scale·e^{10 b} with one learned number b,
    0 at first.

    Args:
        forget_bias: Initial b_f; σ(5)^1000 = 0.001, σ(10)^1000 = 0.956.
        input_bias: Initial b_i; σ(−4) = 0.018 is the first rate.
        scale: First s of a learned s, above 0; None for s = 1.
    """

    outputs = 2
    memory = ("forget", "input")

    def __init__(self, forget_bias: float = 10.0, input_bias: float = -4.0, scale: float | None = None) -> None:
        super().__init__()
        finite("gated", forget_bias=forget_bias, input_bias=input_bias)
        self.scale = scale
        if scale is not None:
            above_0("gated", scale=scale)
            self.log_scale = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.tensor([forget_bias, input_bias]))
        self.weight_params = nn.Parameter(torch.zeros(2))
        self.weight_gates = nn.Parameter(torch.zeros(2))

    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], step_inputs: StepInputs, memory: Params
    ) -> tuple[Tensor, Params]:
        """−(1 − f)∘θ − s i∘g."""
        f, i = (
            outputs[k] + self.weight_params[k] * step_inputs.params + self.weight_gates[k] * memory[name] + self.bias[k]
            for k, name in enumerate(self.memory)
        )
        gates = {"forget": torch.sigmoid(f), "input": torch.sigmoid(i)}
        step = gates["input"] * step_inputs.grads
        if self.scale is not None:
            step = self.scale * torch.exp(10 * self.log_scale) * step
        return -torch.sigmoid(-f) * step_inputs.params - step, gates


class Bounded(UpdateRule):
    """u = s·a·tanh o, in (−s, s), with a of `activity` (RNNprop, Lv et al. 2017, who have no a).

    Args:
        step_size: s > 0.
    """

    outputs = 1

    def __init__(self, step_size: float = 0.1) -> None:
        super().__init__()
        above_0("bounded", step_size=step_size)
        self.step_size = step_size

    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], step_inputs: StepInputs, memory: Params
    ) -> tuple[Tensor, Params]:
        """s·a·tanh o."""
        return self.step_size * torch.tanh(outputs[0]) * activity(step_inputs.grads, features), memory


def activity(grads: Tensor, features: Mapping[str, Tensor]) -> Tensor:
    """The share a of its update that a coordinate takes, in [0, 1]: 1 with a gradient, down to 0 without one.

    What a network says of a gradient of 0 is not 0: rows of an embedding that nothing uses and the weights of dead
    units would drift. So where g = 0, a = min(1, |m̂| / (√v̂ + ε) / `LEAST`), which is 0 if the gradient has always been
    0. After the last gradient of a coordinate it stays near 1 for some 20 updates and falls by 0.9/√0.99 an update
    then (with the default means), so that gradients which come now and then still act. Without the input `rnnprop`
    nothing tells how long ago the last one was, and a = 0 where g = 0.

    Args:
        grads: Gradients, finite, [*batch, n].
        features: Each input's by its name, [size, *batch, n]; only `rnnprop`'s first is looked at.
    """
    silent = grads == 0
    if "rnnprop" not in features:
        return (~silent).to(grads.dtype)
    # A choice and not a product with the mask, so that nothing changes by a bit where there is a gradient.
    direction = features["rnnprop"].unbind()[0]
    return torch.where(silent, (direction.abs() / LEAST).clamp(max=1.0), 1.0)


def root_mean_square(values: Tensor, layout: Layout, by_fan_in: bool = False) -> Tensor:
    """The root mean square (at least `EPS`) of each tensor's coordinates: [*batch, n] to [*batch, tensors].

    Args:
        values: Directions, [*batch, n].
        layout: Layout of the coordinates.
        by_fan_in: Whether to multiply by the root of the tensor's fan-in.
    """
    # EPS² under the root and not EPS beside it: √ has no finite derivative where a whole tensor is 0.
    squares = layout.tensors.mean(DIRECTION, values.square())
    return root_of_mean(squares, layout.tensors.each(layout.fan_ins, squares) if by_fan_in else None)


def root_of_mean(squares: Tensor, fan_ins: Tensor | None) -> Tensor:
    """The root of mean squares, at least `EPS`, times the root of the fan-ins where there are any."""
    found = (squares + EPS**2).sqrt()
    return found if fan_ins is None else found * fan_ins.sqrt()


RULES: Mapping[str, type[UpdateRule]] = {
    "additive": Additive,
    "bounded": Bounded,
    "gated": Gated,
    "direction-and-magnitude": DirectionAndMagnitude,
}
