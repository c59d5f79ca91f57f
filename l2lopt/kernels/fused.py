"""What the fast twins of the coordinatewise learned optimiser have in common."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.layout import Layout, Params
from l2lopt.core.types import OptimiserState
from l2lopt.kernels import folding
from l2lopt.kernels.folding import Folded
from l2lopt.optimisers import Coordinatewise, Optimiser

CONTIGUOUS = torch.contiguous_format


class FusedOptimiser(Optimiser):
    """A fast form of a coordinatewise rule: the same φ, states and numbers.

    Where a derivative may be asked for (φ or an argument needs one, or a `torch.func` transform is at work), and for
    numbers of another kind than it knows, `update` is the reference's.

    Args:
        reference: The plain optimiser; its parameters are φ.
    """

    def __init__(self, reference: Coordinatewise) -> None:
        super().__init__()
        self.reference = reference
        self.description = reference.description
        self.coordinatewise, self.groupings = reference.coordinatewise, reference.groupings
        self.needs_loss = reference.needs_loss
        self._update = torch.empty(0)
        self._folded: tuple[Params, Folded] | None = None
        self._fixed: tuple[Params, Folded] | None = None
        self._own: Params | None = None

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The reference's."""
        return self.reference.init(layout, batch, like=like, total_steps=total_steps)

    def phi(self) -> Params:
        """The reference's."""
        return self.reference.phi()

    @torch.no_grad()
    def fix(self, phi: Params | None = None) -> None:
        """Multiplies the layers out for a φ that nobody changes from now on, so that no step has to look at it.

        Other steps compare every number of φ with a copy. Nothing cheaper would do: the version of a tensor does not
        count changes through `.data`, through NumPy or by a fused step of `torch.optim`.

        Args:
            phi: The very dict that `update_with_` is going to be given, its tensors unchanged. None for the parameters
                of the optimiser, which `update_` then takes as they are now.
        """
        if phi is None:
            phi = self._own = self.phi()
        self._fixed = phi, folding.fold(self.reference, phi)

    def update(
        self,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        *,
        loss: Tensor | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The reference's update and next state."""
        return self.update_with(self.phi(), grads, state, params, loss=loss)

    def update_with(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        *,
        loss: Tensor | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The same as a function of φ."""
        leaves = pytree.tree_leaves((phi, grads, state, params, loss))
        taped = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves if leaf is not None)
        # The kernels leave no tape: a derivative through them would be missing without a word.
        if taped or not self._suits(phi, grads, state, params):
            return self.reference.update_with(phi, grads, state, params, loss=loss)
        with torch.no_grad():
            fresh = {key: self._fresh(value) for key, value in state.coordinates.items()}
            return self._step(phi, grads, state, params, loss, fresh, _empty(grads))

    def update_(
        self,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        *,
        loss: Tensor | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """`update` without a tape and in place: it overwrites the state it is given and its own last result.

        From the second call on nothing is allocated. A state in memory that is not its own (expanded, or shared
        between its values) is copied first.
        """
        phi = self.phi() if self._own is None else self._own
        return self.update_with_(phi, grads, state, params, loss=loss)

    @torch.no_grad()
    def update_with_(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        *,
        loss: Tensor | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The same as a function of φ."""
        if not self._suits(phi, grads, state, params):
            return self.reference.update_with(phi, grads, state, params, loss=loss)
        # In place, two values in one memory would overwrite each other, as would the numbers of an expanded one.
        places = Counter([value.data_ptr() for value in state.coordinates.values()])
        own = {
            key: value.contiguous() if places[value.data_ptr()] == 1 else value.clone(memory_format=CONTIGUOUS)
            for key, value in state.coordinates.items()
        }
        kind = (grads.dtype, grads.device)
        if (self._update.dtype, self._update.device) != kind or self._update.numel() < grads.numel():
            # It only grows: problems of several sizes that take turns would otherwise allocate at each step.
            self._update = _empty(grads).view(-1)
        update = self._update[: grads.numel()].view(grads.shape)
        return self._step(phi, grads, state._replace(coordinates=own), params, loss, own, update)

    @abstractmethod
    def _suits(self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor) -> bool:
        """Whether these numbers are of a known kind and in reach, and no `torch.func` transform looks on."""

    def _fresh(self, value: Tensor) -> Tensor:
        """Memory of its own for a part of the next state."""
        return _empty(value)

    @abstractmethod
    def _step(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None,
        coordinates: Params,
        update: Tensor,
    ) -> tuple[Tensor, OptimiserState]:
        """Writes the next state into `coordinates`, which may be the state's own, and the update into `update`."""

    def _fold(self, phi: Params) -> Folded:
        """The layers multiplied out, anew only where a number of φ is another: that takes longer than to look."""
        if self._fixed is not None and phi is self._fixed[0]:
            return self._fixed[1]
        if self._folded is None or not all(_equal(value, phi[key]) for key, value in self._folded[0].items()):
            # φ is usually changed in place: without a copy it would be compared with itself and never look changed.
            copy = {key: value.clone() for key, value in phi.items()}
            self._folded = copy, folding.fold(self.reference, copy)
        return self._folded[1]


def _equal(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


def _empty(like: Tensor) -> Tensor:
    # Not `empty_like`, which keeps a transposed tensor's strides: callers need flat views of this memory.
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
