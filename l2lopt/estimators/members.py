"""Runs of many rules on one problem, with the same batches: the rows of vectorised runs with a φ for each."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.core.phi_rows import gradients_of_rows, losses_of_rows, over_phi, row_of, stack_carries
from l2lopt.core.precision import for_sums
from l2lopt.core.types import Batch, Carry, InnerStep, Loss, Update
from l2lopt.estimators.loss_and_gradient import Objective, mean_of_part, parts_of
from l2lopt.estimators.window import BlockUpdate, RowStep


class MemberRuns(NamedTuple):
    """Where the runs of some rules end.

    Attributes:
        values: Meta-losses, [R].
        carries: The carry of each run, R of them.
        losses: Training losses, [T, R, *batch].
    """

    values: Tensor
    carries: list[Carry]
    losses: Tensor


def run_members(
    update: Update,
    loss: Loss,
    rules: Params,
    starts: Sequence[Carry],
    steps: Sequence[InnerStep],
    objective: Objective = "loss",
    rows: int | None = None,
    backend: Literal["eager", "compile"] = "eager",
    floor: float = 0.0,
) -> MemberRuns:
    """Runs each rule from its carry through the same steps. Nothing is taped.

    Args:
        update: (φ, gradient, state, θ, loss) → (update, state).
        loss: (θ, aux, batch) → (loss [*batch], aux).
        rules: The φ of each run, [R, ...].
        starts: The carry that each run begins from, R of them.
        steps: One for each inner step.
        objective: "loss" or "log-loss": whether the targets' losses or their logarithms are added up.
        rows: Number of runs side by side, at most; None: all.
        backend: "compile": the inner steps are one compiled graph for each problem, see `kernels.graph`.
        floor: Number that is added to losses before their logarithm.
    """
    count, parts, carries = rows or len(starts), [], []
    for low in range(0, len(starts), count):
        some = {name: value[low : low + count] for name, value in rules.items()}
        carry = stack_carries(starts[low : low + count])
        values, carry, losses = _run_rows(update, loss, some, carry, steps, objective, backend, floor)
        parts.append((values, losses))
        carries += [row_of(carry, index) for index in range(len(values))]
    return MemberRuns(torch.cat([part[0] for part in parts]), carries, torch.cat([part[1] for part in parts], 1))


def _run_rows(
    update: Update,
    loss: Loss,
    rules: Params,
    carry: Carry,
    steps: Sequence[InnerStep],
    objective: Objective,
    backend: str,
    floor: float,
) -> tuple[Tensor, Carry, Tensor]:
    """The meta-losses, the carry and the training losses of runs that are all side by side."""
    values = carry.params.new_zeros(len(carry.params), dtype=for_sums(carry.params.dtype))
    losses: list[Tensor] = []
    loss_rows, advance = losses_of_rows(loss), None
    for step in steps:
        advance = advance or _row_step(update, loss, carry, step.batch, rules, backend == "compile")
        measured, carry = advance(carry, step.batch, rules)
        losses.append(measured)
        with torch.no_grad():
            measured_after = [loss_rows(carry.params, carry.aux, target.batch)[0] for target in step.targets]
            for weight, shares in parts_of(step.targets, objective):
                term = mean_of_part(measured_after, shares).to(values.dtype)
                term = (term + floor).log() if objective == "log-loss" else term
                values = values + weight * term.reshape(len(term), -1).mean(1)
    trajectory = torch.stack(losses) if losses else carry.params.new_zeros(0, *carry.params.shape[:-1])
    return values, carry, trajectory


def _row_step(update: Update, loss: Loss, carry: Carry, batch: Batch, rules: Params, compiled: bool) -> RowStep:
    """The inner step of all rows."""
    if isinstance(update, BlockUpdate) and update.row_steps is not None:
        return update.row_steps(loss, carry, batch, rules, compiled)
    gradients, update_rows = gradients_of_rows(loss), over_phi(update)

    def step(carry: Carry, batch: Batch, rules: Params) -> tuple[Tensor, Carry]:
        grads, losses, aux = gradients(carry.params, carry.aux, batch)
        with torch.no_grad():
            change, state = update_rows(rules, grads, carry.state, carry.params, loss=losses)
            return losses, Carry(carry.params + change, aux, state)

    return step
