"""What travels between the parts: parameters, layouts, states, batches, steps of an unroll."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2lopt.core.layout import Layout, Params

Aux: TypeAlias = dict[str, Tensor]
"""What the loss itself moves: running statistics, a hidden state. Detached."""
Batch: TypeAlias = Any
"""A pytree of tensors: the data and every random number that one evaluation of the loss uses."""


class OptimiserState(NamedTuple):
    """An optimiser's state between two updates.

    Attributes:
        layout: Layout of the vector of coordinates.
        coordinates: State per coordinate, name → [..., *batch, n].
        groups: State per group, grouping ("tensors", "rows" or "columns") → name → [..., *batch, count].
        shared: State that all coordinates share, such as the step count.
    """

    layout: Layout
    coordinates: Params
    groups: dict[str, Params]
    shared: Params


class Carry(NamedTuple):
    """All that one inner step hands to the next.

    Attributes:
        params: θ as a flat vector [*batch, n].
        aux: The loss's own state.
        state: The optimiser's.
    """

    params: Tensor
    aux: Aux
    state: OptimiserState


class Target(NamedTuple):
    """A term of the meta-loss: `weight` times the loss on `batch`, measured after an update.

    A step's targets with the same `part` are batches of one loss, the weighted mean over them, and the objective
    "log-loss" takes its logarithm: a mean of logarithms would reward a rule for a few batches with almost no loss.
    """

    batch: Batch
    weight: float
    part: str | None = None


class InnerStep(NamedTuple):
    """One inner step: the batch whose gradient the optimiser sees, and what is measured after its update."""

    batch: Batch
    targets: tuple[Target, ...]


Loss: TypeAlias = Callable[[Tensor, Aux, Batch], tuple[Tensor, Aux]]
"""(θ [*batch, n], aux, batch) → (loss [*batch], aux)."""
Report: TypeAlias = Callable[[str, int, int, Mapping[str, float]], None]
"""Progress of long work: (stage, done, total, current figures)."""


class Update(Protocol):
    """An optimiser's update as a function of φ as well. The update is ADDED to θ."""

    def __call__(
        self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The update [*batch, n] and the next state.

        Args:
            phi: Meta-parameters φ.
            grads: Gradients, [*batch, n].
            state: State before the step.
            params: Parameters θ, [*batch, n].
            loss: Losses, [*batch].
        """


class ModuleParts(NamedTuple):
    """A training-mode loss taken apart: criterion(module(inputs), targets).

    Attributes:
        module: Module in training mode. Whoever uses it works on a copy.
        criterion: (outputs, targets) → mean loss.
        unpack: batch → (inputs, targets, buffers), the buffers those that the batch gives, such as dropout masks. All
            others are in aux, under the module's names.
    """

    module: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    unpack: Callable[[Batch], tuple[Tensor, Tensor, Params]]


@dataclass(frozen=True)
class ModuleLoss:
    """A flat loss that knows its module, for those who compute it in their own way.

    Attributes:
        flat: The loss itself; calling this object calls it.
        layout: Layout of θ.
        parts: Module, criterion and the split of a batch.
    """

    flat: Loss
    layout: Layout
    parts: ModuleParts

    def __call__(self, params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """See `Loss`."""
        return self.flat(params, aux, batch)


def silent(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
    """The `Report` that says nothing."""


def detach(tree: Any) -> Any:
    """The same pytree with every tensor cut from its graph."""
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)


def stack(trees: list[Any]) -> Any:
    """Pytrees of one structure to one pytree whose tensors have a new first axis, a row for each."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)
