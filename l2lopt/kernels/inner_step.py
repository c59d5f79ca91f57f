"""One inner step of many runs side by side: the gradients of all rows and the optimiser's update, eager or compiled."""

from typing import Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.types import Aux, Batch, Carry, Loss, detach
from l2lopt.kernels.cpu.normalised_muon import FusedNormalisedMuon
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.kernels.graph import compile_function
from l2lopt.optimisers import Optimiser, Scheduled


class RowStep(Protocol):
    """One inner step of S runs."""

    def __call__(self, carry: Carry, samples: Batch, index: Tensor | None) -> tuple[Tensor, Carry]:
        """The losses before the step, [S], and all that the next step needs; the carry may be overwritten.

        Args:
            carry: Parameters [S, n], aux and state of the optimiser.
            samples: Batches with a row for each run; with an index, the samples that they are taken from.
            index: Places of each run's samples, [S, batch]; None where `samples` are the batches.
        """


def eager_step(loss: Loss, optimiser: Optimiser) -> RowStep:
    """A step operation by operation.

    Args:
        loss: Loss of rows.
        optimiser: Optimiser; its `update_` is used.
    """

    def step(carry: Carry, samples: Batch, index: Tensor | None) -> tuple[Tensor, Carry]:
        params = carry.params.detach().requires_grad_()
        values, aux = loss(params, carry.aux, gathered(samples, index))
        # No row sees another: the gradient of the sum has each run's own.
        (grads,) = torch.autograd.grad(values.sum(), params)
        values, params = values.detach(), params.detach()
        with torch.no_grad():
            change, state = optimiser.update_(grads, carry.state, params, loss=values)
            return values, Carry(params + change, detach(aux), state)

    return step


def compiled_step(loss: Loss, optimiser: Optimiser, carry: Carry, samples: Batch, index: Tensor | None) -> RowStep:
    """A step as one compiled graph, samples gathered inside; for as many rows as the carry has.

    A rule with a fused step of its own keeps it, since that is quicker than what a compiler makes of it: the gradients
    alone are compiled then.

    Args:
        loss: Loss of rows.
        optimiser: Optimiser.
        carry: Carry before a first step, which stays as it is.
        samples: Samples or batches of that step; see `RowStep`.
        index: Index of that step.

    Raises:
        NotCompiledError: If there is no compiler, or Python looks at numbers on the way.
    """

    def gradients(params: Tensor, aux: Aux, samples: Batch, index: Tensor | None) -> tuple[Tensor, tuple[Tensor, Aux]]:
        def summed(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Aux]]:
            values, after = loss(theta, aux, gathered(samples, index))
            return values.sum(), (values, after)

        found: tuple[Tensor, tuple[Tensor, Aux]] = torch.func.grad(summed, has_aux=True)(params)
        return found

    plain = _recordable(optimiser)
    if plain is None:
        compiled = compile_function(gradients, carry.params, carry.aux, samples, index)

        def with_fused_update(carry: Carry, samples: Batch, index: Tensor | None) -> tuple[Tensor, Carry]:
            grads, (values, aux) = compiled(carry.params, carry.aux, samples, index)
            with torch.no_grad():
                change, state = optimiser.update_(grads, carry.state, carry.params, loss=values)
                return values, Carry(carry.params + change, aux, state)

        return with_fused_update

    def whole(carry: Carry, samples: Batch, index: Tensor | None) -> tuple[Tensor, Carry]:
        grads, (values, aux) = gradients(carry.params, carry.aux, samples, index)
        change, state = plain.update(grads, carry.state, carry.params, loss=values)
        return values, Carry(carry.params + change, aux, state)

    step: RowStep = compile_function(whole, carry, samples, index)
    return step


def gathered(samples: Batch, index: Tensor | None) -> Batch:
    """The batches of all rows; see `RowStep`."""
    return samples if index is None else pytree.tree_map(lambda leaf: leaf[index], samples)


def _recordable(optimiser: Optimiser) -> Optimiser | None:
    """The optimiser in the form that a compiler does best with; None for one whose fused step is quicker."""
    if isinstance(optimiser, FusedOptimiser):
        return None
    if isinstance(optimiser, FusedNormalisedMuon):
        return optimiser.reference
    if isinstance(optimiser, Scheduled):
        inner, known = _recordable(optimiser.optimiser), optimiser
        return inner and Scheduled(inner, known.shape, known.warm_up, known.total, known.final, known.lr)
    return optimiser
