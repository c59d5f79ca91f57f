"""How a learned rule turns its network's outputs into an update."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from l2lopt.errors import above_0, at_least_0
from l2lopt.types import Layout


class UpdateRule(nn.Module, ABC):
    """From the outputs of a coordinate's network to its update.

    Attributes:
        outputs: numbers per coordinate it takes from the network.
        needs: the inputs whose features it looks at besides.
        statistic: what it takes over each tensor's coordinates, or None where a coordinate's update is its own affair.
    """

    outputs: int
    needs: tuple[str, ...] = ()
    statistic: str | None = None

    @abstractmethod
    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], params: Tensor, step: Tensor, layout: Layout
    ) -> Tensor:
        """The update [*batch, n].

        Args:
            outputs: the network's, [outputs, *batch, n].
            features: each input's by its name, [size, *batch, n].
            params: θ, [*batch, n].
            step: the number of this update, counted from 1.
            layout: of the coordinates.
        """


class Additive(UpdateRule):
    """u = s·o (Andrychowicz et al. 2016).

    Args:
        step_size: s.
    """

    outputs = 1

    def __init__(self, step_size: float = 0.1) -> None:
        super().__init__()
        self.step_size = step_size

    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], params: Tensor, step: Tensor, layout: Layout
    ) -> Tensor:
        """s·o."""
        return self.step_size * outputs[0]


class DirectionAndMagnitude(UpdateRule):
    """A direction and its magnitude (Metz et al. 2020), of normalised size and with a decaying step.

    d = (o₀ − m̂/√v̂)·exp(o₁), the nominal direction m̂/√v̂ taken from the input `rnnprop`;
    u = S_t·(d / RMS(d) − λ θ), the root mean square taken over each tensor's coordinates, and
    S_t = s·e^{10 a} / (1 + t / horizon) with t = 0 at the first update and one learned number a, 0 at first.
    The decay is tied to the step: it fades as the step does.

    Args:
        step_size: s.
        horizon: steps after which S_t has halved.
        weight_decay: λ ≥ 0.
        nominal: add Adam's direction −m̂/√v̂ to o₀.
    """

    outputs = 2
    statistic = "root mean square"

    def __init__(
        self, step_size: float = 0.01, horizon: float = 50.0, weight_decay: float = 0.1, nominal: bool = True
    ) -> None:
        super().__init__()
        self.step_size, self.horizon, self.weight_decay = step_size, horizon, weight_decay
        above_0("direction-and-magnitude", step_size=step_size, horizon=horizon)
        at_least_0("direction-and-magnitude", weight_decay=weight_decay)
        self.needs = ("rnnprop",) if nominal else ()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(
        self, outputs: Tensor, features: Mapping[str, Tensor], params: Tensor, step: Tensor, layout: Layout
    ) -> Tensor:
        """S_t·(d / RMS(d) − λ θ)."""
        direction = outputs[0] - features["rnnprop"][0] if self.needs else outputs[0]
        direction = normalise(direction * outputs[1].exp(), layout)
        scale = self.step_size * torch.exp(10 * self.log_scale) / (1 + (step - 1).to(params.dtype) / self.horizon)
        return scale * (direction - self.weight_decay * params)


def normalise(direction: Tensor, layout: Layout, eps: float = 1e-12) -> Tensor:
    """[*batch, n] with each tensor's coordinates divided by their root mean square (at least `eps`)."""
    parts = layout.split(direction)
    return torch.cat([part / (part.square().mean(-1, keepdim=True) + eps**2).sqrt() for part in parts], dim=-1)


RULES: Mapping[str, type[UpdateRule]] = {"additive": Additive, "direction-and-magnitude": DirectionAndMagnitude}
