"""The contract of an optimiser, learned or hand-designed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt.core.layout import Layout, Params
from l2lopt.core.types import OptimiserState


class Optimiser(nn.Module, ABC):
    """A rule that turns gradients into updates; its parameters are the meta-parameters φ.

    It works on one flat vector of n coordinates, or on many at once: `batch` axes stand before the coordinates and no
    row sees another. Nothing is changed in place: state in, state out.

    Coordinates meet only in the layout's groupings (`layout.tensors.mean(name, values)`, `.controls`) and in functions
    of whole tensors that go through `layout.whole`. So a slice of them can be updated by itself, given what the whole
    vector's coordinates met in: *locality*, see `core.groupings`. A rule that does otherwise says so.

    In a learned rule a coordinate whose gradient (or its square) is not finite gets the update 0, keeps its state and
    counts as 0 in means; `state.shared["skipped"]` [*batch] counts such events, `state.shared["step"]` the updates.
    Everything in `shared` is a tensor, and the same for all coordinates.

    A coordinate whose gradient has always been 0 gets no update but the weight decay, and one whose gradient stays 0
    comes to rest: see `rules.activity` for learned rules. A direction that is a function of whole matrices may move
    single coordinates of rows and columns with a gradient, and a direction of signs (Lion's) has no size to fade.

    Example:
        >>> import torch
        >>> from l2lopt import optimisers
        >>> from l2lopt.core.layout import Layout
        >>> sgd = optimisers.make("sgd", lr=0.1)
        >>> params = torch.ones(3)
        >>> state = sgd.init(Layout(("w",), ((3,),)), like=params)
        >>> update, state = sgd.update(2 * params, state, params)
        >>> params + update
        tensor([0.8000, 0.8000, 0.8000])

    Attributes:
        coordinatewise: Whether the rule obeys the law of locality.
        groupings: Groupings in which its coordinates meet, of "tensors", "rows" and "columns".
        knows_end: Whether its updates depend on `total_steps`, the number of updates that `init` is told.
        needs_loss: Whether `update` must be given the loss.
        accepts_low_precision_state: Whether it takes a state in another dtype than it computes in.
        description: The choice (name and options) that builds this optimiser again, set by `optimisers.make`.
    """

    coordinatewise: bool = True
    groupings: tuple[str, ...] = ()
    knows_end: bool = False
    needs_loss: bool = False
    accepts_low_precision_state: bool = False
    description: Mapping[str, Any] | None = None

    @abstractmethod
    def init(
        self,
        layout: Layout,
        batch: Sequence[int] = (),
        *,
        like: Tensor | None = None,
        total_steps: int | None = None,
    ) -> OptimiserState:
        """The state before the first update.

        Args:
            layout: Layout of the coordinates.
            batch: Axes before the coordinates, one row for each run.
            like: A tensor of the dtype and on the device that the state is to have.
            total_steps: Number of updates until the end of the run, for rules that know their horizon; None where it is
                unknown.
        """

    @abstractmethod
    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The update [*batch, n], to be ADDED to the parameters, and the next state.

        Args:
            grads: Gradients of the loss, [*batch, n].
            state: State from `init` or the last update.
            params: Parameters θ, [*batch, n].
            loss: Losses, [*batch]; only rules with `needs_loss` look at it. Estimators of second order differentiate
                through it, so a rule does not detach it.
        """

    def update_(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """`update` for those who need neither the state they hand over again nor the last result.

        A fused optimiser overwrites both.
        """
        return self.update(grads, state, params, loss=loss)

    def forward(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """`update`, under the name that `torch.func.functional_call` calls."""
        return self.update(grads, state, params, loss=loss)

    def phi(self) -> Params:
        """The meta-parameters by name."""
        return dict(self.named_parameters())

    def update_with(
        self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """`update` as a function of φ as well: what an estimator differentiates."""
        # φ takes the place of the parameters during the call alone, so estimators share one module.
        given = functional_call(self, phi, (grads, state, params), {"loss": loss})
        result: tuple[Tensor, OptimiserState] = given
        return result


def zeros(layout: Layout, batch: Sequence[int], like: Tensor | None) -> Tensor:
    """Zeros [*batch, n] of the dtype and device of `like`."""
    if like is None:
        return torch.zeros(*batch, layout.size)
    return torch.zeros(*batch, layout.size, dtype=like.dtype, device=like.device)


def zero_step(like: Tensor) -> Tensor:
    """A step count of 0 on the device of `like`."""
    # An integer: float32 counts to 2²⁴ only, and bfloat16 to 2⁸.
    return torch.zeros((), dtype=torch.int64, device=like.device)


def no_moments(layout: Layout, batch: Sequence[int], like: Tensor | None) -> OptimiserState:
    """The state of running means m and v before the first update."""
    m, v = zeros(layout, batch, like), zeros(layout, batch, like)
    return OptimiserState(layout, {"m": m, "v": v}, {}, {"step": zero_step(m)})
