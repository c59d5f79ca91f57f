"""A loss and its gradient at one θ, as the unrolls by backpropagation take them."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.core.precision import for_sums
from l2lopt.core.types import Aux, Batch, Loss, Target, detach

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


def parts_of(targets: Sequence[Target], objective: Objective) -> list[tuple[float, dict[int, float]]]:
    """The losses that a step's targets are batches of: the weight of each, and its targets by index with their shares.

    For "loss" every target stands alone, as a sum of means is the same sum.

    Args:
        targets: Targets of one step.
        objective: "loss" or "log-loss".
    """
    members: dict[object, list[int]] = {}
    for index, target in enumerate(targets):
        alone = target.part is None or objective == "loss"
        members.setdefault(index if alone else target.part, []).append(index)
    parts = []
    for indices in members.values():
        weight = sum(targets[index].weight for index in indices)
        # Without a division where it stands alone: its share is 1 for the weight 0, too.
        shares = [1.0] if len(indices) == 1 else [targets[index].weight / weight for index in indices]
        parts.append((weight, dict(zip(indices, shares, strict=True))))
    return parts


def target_terms(
    measured: Sequence[LossAndGradient], targets: Sequence[Target], objective: Objective
) -> tuple[list[Tensor], list[Tensor]]:
    """A step's terms of the meta-loss, means over rows, and for each target their derivative by each row's loss on it.

    For a part of the weight w with the loss ℓ̄, the mean of its targets' losses, the term is w ℓ̄ or w log ℓ̄.

    Args:
        measured: Loss on the batch of each target.
        targets: Targets of one step.
        objective: "loss" or "log-loss".
    """
    losses = [each.loss for each in measured]
    values, derivatives = [], losses.copy()  # each target is in one part, which replaces its entry
    for weight, shares in parts_of(targets, objective):
        value = mean_of_part(losses, shares)
        rows = max(value.numel(), 1)
        derivative = weight / rows * torch.ones_like(value)
        if objective == "log-loss":
            value, derivative = value.log(), derivative / value
        values.append(weight * value.to(for_sums(value.dtype)).sum() / rows)
        for index, share in shares.items():
            derivatives[index] = share * derivative
    return values, derivatives


def mean_of_part(losses: Sequence[Tensor], shares: Mapping[int, float]) -> Tensor:
    """Σ_i share_i ℓ_i over a part's targets."""
    first, *others = (losses[index] if share == 1 else share * losses[index] for index, share in shares.items())
    return sum(others, first)


def gradient_of(value: Tensor, leaves: Params) -> Params:
    """dvalue/dleaves, zeros where it does not depend on a leaf."""
    # autograd refuses a value that depends on no leaf, such as a sum over no targets.
    if not leaves or not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    pieces = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(leaves, pieces, strict=True))
