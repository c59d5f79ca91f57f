"""A loss and its gradient at one θ, as the unrolls by backpropagation take them."""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.core.types import Aux, Batch, Loss, detach

Objective: TypeAlias = Literal["loss", "log-loss"]
"""What the meta-loss sums: the losses, or their logarithms."""


class LossAndGradient(NamedTuple):
    """Remembered with its batch, because what one step measures often is the next step's batch."""

    batch: Batch
    loss: Tensor
    grads: Tensor
    aux: Aux


def loss_and_gradient(loss: Loss, params: Tensor, aux: Aux, batch: Batch, second: bool = False) -> LossAndGradient:
    """The loss and its gradient at θ: both on the tape in second order, constants in first."""
    # In second order θ is a leaf at the begin of a window only; later it is a function of φ and stays on the tape.
    theta = params if second and params.requires_grad else params.detach().requires_grad_()
    with torch.enable_grad():
        value, moved = loss(theta, aux, batch)
        # Rows are separate runs, so the gradient of their sum has each row's own gradient.
        (grads,) = torch.autograd.grad(value.sum(), theta, create_graph=second)
    return LossAndGradient(batch, value if second else value.detach(), grads, detach(moved))


def term(measured: LossAndGradient, weight: float, objective: Objective) -> tuple[Tensor, Tensor]:
    """A target's term of the meta-loss, mean over rows, and its derivative w f'(ℓ) / rows by each row's loss."""
    rows = max(measured.loss.numel(), 1)
    value, derivative = measured.loss, weight / rows * torch.ones_like(measured.loss)
    if objective == "log-loss":
        value, derivative = value.log(), derivative / measured.loss
    return weight * value.sum() / rows, derivative


def gradient_of(value: Tensor, leaves: Params) -> Params:
    """dvalue/dleaves, zeros where it does not depend on a leaf."""
    # autograd refuses a value that depends on no leaf, such as a sum over no targets.
    if not leaves or not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    pieces = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(leaves, pieces, strict=True))
