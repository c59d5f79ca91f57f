"""What a network per tensor steers: bounded factors of the harness's step and decay, and the mixture of directions."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.layout import Params
from l2lopt.optimisers.rules import EPS

CONTROLS = ("step", "decay", "mix", "sign", "slow", "momentum")
"""What a network may steer."""
TURNS = {"mix": "adam", "sign": "sign", "slow": "slow"}
"""Control that turns the direction → the direction that it turns to."""
AWAY = 0.25
"""Largest angle away from the direction that a control turns to."""
NEAREST = 0.95
"""Largest share of a bound whose output is asked for: at the bound itself it would be infinite."""
FLOOR = 1e-6
"""The least mean square of a mixture of directions whose own is 1."""


class Bounds(NamedTuple):
    """How far the controls can go.

    Attributes:
        step: Largest factor of the harness's step, and the inverse of the smallest; infinity for none.
        decay: Largest factor of the harness's decay, and the inverse of the smallest; infinity for none.
        mix: Map from the network's output to the mixture of the harness's direction with Adam's.
    """

    step: float
    decay: float
    mix: Literal["angle", "logit"]

    def bounded(self, control: str, output: Tensor) -> Tensor:
        """A control from the network's output: 0 for 0, but for the logit."""
        if control == "momentum":
            return output.tanh()
        if control == "mix" and self.mix == "logit":
            return torch.sigmoid(2 * output + 4)
        if control in TURNS:
            # Both sides have the derivative 1 at 0, and the second derivative 0.
            return torch.where(output > 0, _limited(output, math.pi / 2), _limited(output, AWAY))
        return _limited(output, math.log(self.step if control == "step" else self.decay))

    def output(self, control: str, value: float) -> float:
        """The network's output that gives this value of the control "step" or "decay"; as near as its bound allows."""
        bound = math.log(self.step if control == "step" else self.decay)
        if math.isinf(bound) or not value:
            return value
        share = max(-NEAREST, min(NEAREST, value / bound)) if bound else 0.0
        return bound * math.atanh(share)

    def shares(self, controls: Params, like: Tensor) -> Params:
        """The share of each direction in the mixture, [*batch, tensors].

        Args:
            controls: Bounded controls by name, [*batch, tensors].
            like: Any numbers per tensor.
        """
        shares = {"main": torch.ones_like(like)}
        for control, direction in TURNS.items():
            if control in controls:
                turn = controls[control]
                logit = control == "mix" and self.mix == "logit"
                stay, go = (turn, 1 - turn) if logit else (turn.cos(), turn.sin())
                shares = {name: share * stay for name, share in shares.items()} | {direction: go}
        return shares


def chosen(controls: Sequence[str]) -> tuple[str, ...]:
    """Controls of these names.

    Raises:
        UserError: For an unknown or repeated name, and for none at all.
    """
    for name in controls:
        if name not in CONTROLS:
            remedy = did_you_mean(name, CONTROLS)
            raise UserError("controls", expected="known names", found=repr(name), remedy=remedy)
    if len(set(controls)) < len(controls) or not controls:
        found, remedy = ", ".join(controls) or "none", f"choose from {', '.join(CONTROLS)}"
        raise UserError("controls", expected="at least one, and each at most once", found=found, remedy=remedy)
    return tuple(controls)


def mixed(products: Mapping[tuple[str, str], Tensor], shares: Params) -> Params:
    """What each direction is multiplied by, so that their sum is normal(Σ_k share_k normal(d_k)).

    normal divides by the root mean square over the tensor. That of the sum follows from the products of its parts,
    which depend on gradients alone: a derivative with respect to φ goes through the shares, and through no mean.

    Args:
        products: Means over each tensor of the product of two directions, for every pair, [*batch, tensors].
        shares: Shares by name, [*batch, tensors].

    Returns:
        Name → factor, [*batch, tensors].
    """
    # EPS² under the root and not EPS beside it: √ has no finite derivative where a whole tensor is 0.
    scales = {one: (value + EPS**2).rsqrt() for (one, other), value in products.items() if one == other}
    if len(scales) == 1:
        return scales
    square = torch.zeros(())
    for (one, other), value in products.items():
        times = 1.0 if one == other else 2.0
        # Two products and not one of four factors: 1 / RMS may be as large as 10¹² where a direction is 0.
        square = square + times * (shares[one] * scales[one]) * (shares[other] * scales[other] * value)
    size = square.clamp(min=FLOOR).rsqrt()
    return {name: size * share * scales[name] for name, share in shares.items()}


def _limited(output: Tensor, bound: float) -> Tensor:
    """B tanh(o / B), in (−B, B) and about o near 0; o itself without a bound."""
    if math.isinf(bound):
        return output
    return bound * torch.tanh(output / bound) if bound else torch.zeros_like(output)
