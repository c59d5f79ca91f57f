"""The contract of an optimiser, learned or hand-made."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt.core.types import Layout, OptimiserState, Params


class Optimiser(nn.Module, ABC):
    """A rule that turns gradients into updates; its parameters are the meta-parameters φ.

    It works on one flat vector of n coordinates, or on many at once: `batch` axes stand before the coordinates and no
    row sees another. Nothing is changed in place: state in, state out.

    Attributes:
        coordinatewise: a coordinate's update depends on that coordinate and on what all share, never on its neighbours.
        rounds_its_state: it takes a state in another dtype than it computes in.
        description: the choice (name and options) that builds this optimiser again, set by `optimisers.make`.
    """

    coordinatewise: bool = True
    rounds_its_state: bool = False
    description: Mapping[str, Any] | None = None

    @abstractmethod
    def init(self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None) -> OptimiserState:
        """The state before the first update, for coordinates [*batch, n] of the dtype and device of `like`."""

    @abstractmethod
    def update(
        self,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The update [*batch, n], to be ADDED to the parameters, and the next state.

        Coordinates meet only in what is shared. So a part of them can be updated by itself, with what is shared
        afterwards given: the result is that part of the whole update.

        Args:
            grads: the gradient of the loss, [*batch, n].
            state: from `init` or the last update.
            params: the parameters θ, [*batch, n].
            loss: [*batch]; only rules that have it among their inputs need it.
            after: the next state's `shared`, where it is known already; taken as a constant.
        """

    def advance(
        self,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """`update` for those who need neither the state they hand over again nor the last result.

        A fast twin overwrites both.
        """
        return self.update(grads, state, params, loss, after)

    def forward(
        self,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """`update`, under the name that `torch.func.functional_call` calls."""
        return self.update(grads, state, params, loss, after)

    def phi(self) -> Params:
        """The meta-parameters by name."""
        return dict(self.named_parameters())

    def update_with(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """`update` as a function of φ as well: what an unroll differentiates."""
        result: tuple[Tensor, OptimiserState] = functional_call(self, phi, (grads, state, params, loss, after))
        return result


def blank(layout: Layout, batch: Sequence[int], like: Tensor | None) -> Tensor:
    """Zeros [*batch, n] of the dtype and device of `like`."""
    if like is None:
        return torch.zeros(*batch, layout.size)
    return torch.zeros(*batch, layout.size, dtype=like.dtype, device=like.device)


def first_step(like: Tensor) -> Tensor:
    """A step count of 0 on the device of `like`."""
    return torch.zeros((), dtype=torch.int64, device=like.device)
