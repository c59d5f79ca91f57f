"""The inner steps of many runs side by side: gradients of all rows and the optimiser's updates, eager or compiled."""

from typing import Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.types import Aux, Batch, Carry, Loss, detach
from l2lopt.kernels.cpu.hierarchical import FusedHierarchical
from l2lopt.kernels.cpu.normalised_muon import FusedNormalisedMuon
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.kernels.graph import CompiledFunction, in_order
from l2lopt.kernels.phi_rows import FusedPhiRows
from l2lopt.optimisers import Optimiser, Scheduled


class InnerSteps(Protocol):
    """Some inner steps of S runs."""

    def __call__(self, carry: Carry, samples: Batch, places: Tensor | None) -> tuple[Tensor, Carry]:
        """The losses before the last of the steps, [S], and all that the next step needs.

        The carry may be overwritten.

        Args:
            carry: Parameters [S, n], aux and state of the optimiser.
            samples: Samples that the batches are taken from; without places the batch of one step, a row for each run.
            places: Places of each run's samples at each step, [steps, S, batch].
        """


def eager_steps(loss: Loss, optimiser: Optimiser) -> InnerSteps:
    """Steps made operation by operation.

    Args:
        loss: Loss of rows.
        optimiser: Optimiser; its `update_` is used.
    """

    def step(carry: Carry, batch: Batch) -> tuple[Tensor, Carry]:
        params = carry.params.detach().requires_grad_()
        values, aux = loss(params, carry.aux, batch)
        # No row sees another: the gradient of the sum has each run's own.
        (grads,) = torch.autograd.grad(values.sum(), params)
        values, params = values.detach(), params.detach()
        with torch.no_grad():
            change, state = optimiser.update_(grads, carry.state, params, loss=values)
            return values, Carry(params + change, detach(aux), state)

    def steps(carry: Carry, samples: Batch, places: Tensor | None) -> tuple[Tensor, Carry]:
        if places is None:
            return step(carry, samples)
        values = torch.empty(0)
        for index in places:
            values, carry = step(carry, gathered(samples, index))
        return values, carry

    return steps


def compiled_steps(loss: Loss, optimiser: Optimiser, carry: Carry, samples: Batch, places: Tensor | None) -> InnerSteps:
    """Steps each of which is one compiled graph, samples gathered inside; for as many rows as the carry has.

    A rule with a fused step of its own keeps it, since that is quicker than what a compiler makes of it: the gradients
    alone are compiled then. On batches of other shapes than the first, as windows of varying length are, steps are
    eager.

    Args:
        loss: Loss of rows.
        optimiser: Optimiser.
        carry: Carry before a first step, which stays as it is.
        samples: Samples, or the batch, of that step; see `InnerSteps`.
        places: Places of that step.

    Raises:
        NotCompiledError: If there is no compiler, Python looks at numbers on the way, or the step is too long.
    """
    made, eager = _compiled_steps(loss, optimiser, carry, samples, places), eager_steps(loss, optimiser)
    shapes = _shapes(samples)

    def steps(carry: Carry, samples: Batch, places: Tensor | None) -> tuple[Tensor, Carry]:
        return (made if _shapes(samples) == shapes else eager)(carry, samples, places)

    return steps


def _compiled_steps(
    loss: Loss, optimiser: Optimiser, carry: Carry, samples: Batch, places: Tensor | None
) -> InnerSteps:
    """Compiled steps for batches of the shapes given."""

    def gradients(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, tuple[Tensor, Aux]]:
        def summed(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Aux]]:
            values, after = loss(theta, aux, batch)
            return values.sum(), (values, after)

        found: tuple[Tensor, tuple[Tensor, Aux]] = torch.func.grad(summed, has_aux=True)(params)
        return found

    plain = _recordable(optimiser)

    def whole(carry: Carry, samples: Batch, index: Tensor | None = None) -> tuple[Tensor, Carry]:
        assert plain is not None
        grads, (values, aux) = gradients(carry.params, carry.aux, gathered(samples, index))
        change, state = plain.update(grads, carry.state, carry.params, loss=values)
        return values, in_order(Carry(carry.params + change, aux, state), carry)

    first = () if places is None else (places[0],)
    if plain is not None:
        compiled = CompiledFunction(whole, carry, samples, *first)

        def steps(carry: Carry, samples: Batch, places: Tensor | None) -> tuple[Tensor, Carry]:
            found = compiled(carry, samples) if places is None else compiled.repeat(carry, samples, places)
            result: tuple[Tensor, Carry] = found
            return result

        return steps

    def of_samples(params: Tensor, aux: Aux, samples: Batch, index: Tensor | None = None) -> object:
        return gradients(params, aux, gathered(samples, index))

    derivative = CompiledFunction(of_samples, carry.params, carry.aux, samples, *first)

    def with_fused_update(carry: Carry, samples: Batch, places: Tensor | None) -> tuple[Tensor, Carry]:
        values = torch.empty(0)
        for index in [()] if places is None else [(index,) for index in places]:
            grads, (values, aux) = derivative(carry.params, carry.aux, samples, *index)
            with torch.no_grad():
                change, state = optimiser.update_(grads, carry.state, carry.params, loss=values)
                carry = Carry(carry.params + change, aux, state)
        return values, carry

    return with_fused_update


def _shapes(batch: Batch) -> list[torch.Size]:
    return [leaf.shape for leaf in pytree.tree_leaves(batch)]


def gathered(samples: Batch, index: Tensor | None) -> Batch:
    """The batches of all rows: samples at the places [S, batch], or what is a batch already."""
    return samples if index is None else pytree.tree_map(lambda leaf: leaf[index], samples)


def _recordable(optimiser: Optimiser) -> Optimiser | None:
    """The optimiser in the form that a compiler does best with; None for one whose fused step is quicker."""
    if isinstance(optimiser, FusedOptimiser | FusedPhiRows):
        return None
    if isinstance(optimiser, FusedNormalisedMuon | FusedHierarchical):
        return optimiser.reference
    if isinstance(optimiser, Scheduled):
        inner, known = _recordable(optimiser.optimiser), optimiser
        return inner and Scheduled(inner, known.shape, known.warm_up, known.total, known.final, known.lr)
    return optimiser
