"""What travels between the parts: parameters, layouts, states, batches, steps of an unroll."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Params: TypeAlias = dict[str, Tensor]
"""Named tensors: an optimisee's parameters θ or an optimiser's meta-parameters φ."""
Aux: TypeAlias = dict[str, Tensor]
"""What the loss itself moves: running statistics, a hidden state. Detached."""
Batch: TypeAlias = Any
"""A pytree of tensors: the data and every random number that one evaluation of the loss uses."""


class Shards(NamedTuple):
    """What is known of the whole tensors where the coordinates are only this process's part of each.

    Attributes:
        sizes: coordinates of each whole tensor.
        total: sums [*batch, tensors] over the coordinates here → the sums over the whole tensors.
    """

    sizes: tuple[int, ...]
    total: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in the flat vector of n coordinates.

    Ravelled tensors follow one another in the order of `names`, each in row-major order. A layout is a constant: pytree
    functions (and so `vmap`) carry it along without looking inside.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: Shards | None = None
    fan_ins: tuple[int, ...] = ()
    """Numbers that each of a tensor's outputs is made of: the product of all axes but the first. A vector or scalar (a
    bias, a norm's gain) takes that of the last matrix before it, or its own size where there is none. Worked out from
    the shapes unless given."""

    def __post_init__(self) -> None:
        if not self.fan_ins:
            found: list[int] = []
            last = 0
            for shape in self.shapes:
                last = prod(shape[1:]) if len(shape) > 1 else last
                found.append(max(last or prod(shape), 1))
            object.__setattr__(self, "fan_ins", tuple(found))

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> "Layout":
        """The layout of `params`, in their order."""
        return cls(tuple(params), tuple(tuple(tensor.shape) for tensor in params.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Coordinates per tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """Coordinates in all, n."""
        return sum(self.sizes)

    def ravel(self, params: Mapping[str, Tensor]) -> Tensor:
        """Named tensors to one flat vector [n]."""
        if not self.names:
            return torch.empty(0)
        return torch.cat([params[name].reshape(-1) for name in self.names])

    def unravel(self, flat: Tensor) -> Params:
        """A flat vector [n] to named tensors, as views."""
        parts = zip(self.names, self.shapes, self.split(flat), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The last axis of [..., n] cut into one view per tensor: [..., n_k]."""
        parts: tuple[Tensor, ...] = flat.split(self.sizes, dim=-1)
        return parts

    def part(self, first: int, end: int) -> "Layout":
        """The layout of tensors `first` … `end` − 1 alone."""
        shards = None if self.shards is None else Shards(self.shards.sizes[first:end], self.shards.total)
        return Layout(self.names[first:end], self.shapes[first:end], shards, self.fan_ins[first:end])

    def means(self, sums: Tensor) -> Tensor:
        """Sums over each tensor's coordinates here, [*batch, tensors], to means over the whole tensors."""
        sizes = self.sizes if self.shards is None else self.shards.sizes
        sums = sums if self.shards is None else self.shards.total(sums)
        return sums / torch.tensor(sizes, dtype=sums.dtype, device=sums.device).clamp(min=1)

    def between(self, low: int, high: int) -> "Layout":
        """The layout of coordinates `low` … `high` − 1: all names, with the sizes of what lies between."""
        sizes, first = [], 0
        for size in self.sizes:
            sizes.append((max(0, min(high, first + size) - max(low, first)),))
            first += size
        return Layout(self.names, tuple(sizes), fan_ins=self.fan_ins)


pytree.register_pytree_node(Layout, lambda layout: ([], layout), lambda _, layout: layout)


class OptimiserState(NamedTuple):
    """An optimiser's state between two updates.

    Attributes:
        layout: of the vector of coordinates it works on.
        coordinates: name → [..., *batch, n], one column a coordinate.
        shared: what all coordinates share, such as the step count.
    """

    layout: Layout
    coordinates: dict[str, Tensor]
    shared: dict[str, Tensor]


class Carry(NamedTuple):
    """All that one inner step hands to the next.

    Attributes:
        params: θ as a flat vector [*batch, n].
        aux: the loss's own state.
        state: the optimiser's.
    """

    params: Tensor
    aux: Aux
    state: OptimiserState


class Target(NamedTuple):
    """A term of the meta-loss: `weight` times the loss on `batch`, measured after an update."""

    batch: Batch
    weight: float


class Step(NamedTuple):
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
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The update [*batch, n] and the next state.

        Args:
            phi: the meta-parameters φ.
            grads: [*batch, n].
            state: before.
            params: θ, [*batch, n].
            loss: [*batch].
            after: the next state's `shared` where it is known already, as in a replay of some of the coordinates.
        """


class Window(NamedTuple):
    """What first-order backpropagation through T steps needs to know of a block of coordinates.

    Attributes:
        state: before the first step; its layout names every tensor, those outside the block with size 0.
        params: θ before the first step, [*batch, B].
        grads: [T, *batch, B].
        sources: ∂(meta-loss)/∂θ directly at θ after each step, [T, *batch, B].
        losses: [T, *batch].
        shared: the state's `shared` after each step, of the whole vector.
    """

    state: OptimiserState
    params: Tensor
    grads: Tensor
    sources: Tensor
    losses: Tensor
    shared: Sequence[Params]


Replay: TypeAlias = Callable[[Params, Window], Params]
"""(φ, window) → the block's part of the meta-gradient, like φ; gradients, losses and what is shared are constants.

Where `shared` has a "pull" and an "own" [*batch, tensors] as well, the rule's statistic is none: the block adds what
its coordinates have in it. With p_i what coordinate i does to the meta-loss by way of its tensor's statistic, Σp over
all n coordinates is ∂(meta-loss)/∂(statistic), and pull − own·p_i takes the place of Σp / n for coordinate i; own is 0
but where Σp is estimated from a sample that i belongs to."""
Pull: TypeAlias = Callable[[Params, Window], Tensor]
"""(φ, window) → ∂(meta-loss)/∂(the rule's statistic at each step) by way of the block's updates,
[T, *batch, tensors]."""


@dataclass(frozen=True)
class BlockUpdate:
    """An update that comes with fast ways to use it where nobody needs the state from before.

    Attributes:
        update: the update itself; calling this object calls it.
        advance: the same without a tape; it may overwrite the state it is given and its own last result.
        replay: backpropagation through a window of a block, from several threads at once; None leaves it to autograd.
        pull: likewise, for a rule with a statistic whose network does not see θ, so that what its updates do to the
            meta-loss is known before the statistic's slope is; None takes the statistic as a constant.
        at_once: coordinates times steps that `replay` and `pull` are best given at once, from one thread; None leaves
            it to the unroll.
    """

    update: Update
    advance: Update
    replay: Replay | None = None
    pull: Pull | None = None
    at_once: int | None = None

    def __call__(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """See `Update`."""
        return self.update(phi, grads, state, params, loss, after)


class ModuleParts(NamedTuple):
    """A training-mode loss taken apart: criterion(module(inputs), targets).

    Attributes:
        module: in training mode. Whoever takes it works on a copy.
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
        flat: the loss itself; calling this object calls it.
        layout: of θ.
        parts: what it is made of.
    """

    flat: Loss
    layout: Layout
    parts: ModuleParts

    def __call__(self, params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """See `Loss`."""
        return self.flat(params, aux, batch)


def silent(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
    """The `Report` that says nothing."""


def seed_of(*key: str | int) -> int:
    """A seed in [0, 2⁶³) that is a pure function of `key`, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: str | int) -> torch.Generator:
    """A CPU generator seeded by `key`; equal keys give equal streams."""
    return torch.Generator().manual_seed(seed_of(*key))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global CPU generator under `seed` within the block, and as it was after it; other devices are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def detach(tree: Any) -> Any:
    """The same pytree with every tensor cut from its graph."""
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)


def stack(trees: list[Any]) -> Any:
    """Pytrees of one structure to one pytree whose tensors have a new first axis, a row for each."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)
