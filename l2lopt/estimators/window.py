"""A window of recorded steps, as backpropagation through a block of its coordinates sees it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.core.types import Batch, Carry, Loss, OptimiserState, Update


class Meeting(NamedTuple):
    """What the coordinates of the whole vector met in at one step.

    Attributes:
        means: Means over groups, "grouping.name" → [*batch, count].
        wholes: Functions of whole tensors, name → [..., *batch, n].
        controls: Outputs of networks per group, "grouping.name" → [..., *batch, count].
    """

    means: Params
    wholes: Params
    controls: Params


class Window(NamedTuple):
    """What first-order backpropagation through T steps needs to know of a block of B coordinates.

    Attributes:
        state: Optimiser state before the first step; its layout is a slice of the whole, or the whole itself.
        params: θ before the first step, [*batch, B].
        grads: Gradients, [T, *batch, B].
        sources: Gradient of the meta-loss at θ after each step, where θ enters it directly, [T, *batch, B].
        losses: Training losses, [T, *batch].
        meetings: Record of each step's means, functions of whole tensors and controls.
        updates: Updates u that were added to θ, [T, *batch, B]; None where no `BlockUpdate.mean_adjoint` asks for them.
    """

    state: OptimiserState
    params: Tensor
    grads: Tensor
    sources: Tensor
    losses: Tensor
    meetings: Sequence[Meeting]
    updates: Tensor | None = None


class MeanAdjoint(NamedTuple):
    """The adjoint of a mean over groups, as each coordinate of a group takes its share of it.

    With M̄ = ∂(meta-loss)/∂M of a group's mean M = Σ v_i / n, the adjoint of v_i is M̄ / n. Let p_i be the part of M̄
    that goes through coordinate i alone, so that M̄ = Σ p_i. The adjoint of v_i is computed as

        v̄_i = total − self_weight·p_i

    where `total` is M̄ / n and `self_weight` is 0 if all coordinates are there. If M̄ is estimated from a random
    sample, two coordinates meet in it with another chance than one meets itself, and `self_weight` makes up for that.

    Attributes:
        total: [T, *batch, count].
        self_weight: [count].
    """

    total: Tensor
    self_weight: Tensor


class BlockAdjoints(NamedTuple):
    """What backpropagation through a window of a block gives.

    Attributes:
        phi: The block's part of the meta-gradient, like φ.
        controls: The block's part of the adjoints of the controls, "grouping.name" → [T, ..., *batch, count].
    """

    phi: Params
    controls: Params


Replay: TypeAlias = Callable[[Params, Window, Mapping[str, MeanAdjoint]], BlockAdjoints]
"""(φ, window, adjoints of means) → the block's adjoints. Gradients, losses, and means without adjoint are constants."""
AdjointOfMean: TypeAlias = Callable[[Params, Window, Mapping[str, MeanAdjoint], str], Tensor]
"""(φ, window, adjoints of the means after it, "grouping.name") → ∂(meta-loss)/∂(that mean) through the block's
coordinates, [T, *batch, count], float64."""
RowStep: TypeAlias = Callable[[Carry, Batch, Params], tuple[Tensor, Carry]]
"""(carry of rows, the batch of all, φ with a row axis) → losses [R, *batch] and the next carry, in any memory."""
MakeRowSteps: TypeAlias = Callable[[Loss, Carry, Batch, Params, bool], RowStep]
"""(loss, carry, batch, φ, whether to compile) → steps of runs like these."""


@dataclass(frozen=True)
class BlockUpdate:
    """An update that comes with fast ways to use it where nobody needs the state from before.

    Attributes:
        update: The update itself; calling this object calls it.
        update_: The same without a tape and in place: it may overwrite the state it is given and its own last result.
        replay: Backpropagation through a window of a block, from several threads at once; None leaves it to autograd.
        linked: Means that depend on φ and have an adjoint, "grouping.name", those that depend on others first; None
            lets the estimator find out.
        mean_adjoint: The adjoint of one of `linked`, or of a function of it that `replay` takes the sums of, from a
            window with its updates; None leaves it to autograd, which walks through the window once more.
        at_once: Coordinates times steps that `replay` and `mean_adjoint` are best given at once, from one thread; None
            leaves it to the estimator.
        local: Whether the update obeys the law of locality, see `core.groupings`.
        row_steps: Inner steps of runs with a φ each: (loss, carry, batch, φ) of a first step → steps; it may compile
            them where the last argument says so. None leaves them to `vmap`.
    """

    update: Update
    update_: Update
    replay: Replay | None = None
    linked: tuple[str, ...] | None = None
    mean_adjoint: AdjointOfMean | None = None
    at_once: int | None = None
    local: bool = True
    row_steps: MakeRowSteps | None = None

    def __call__(
        self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """See `Update`."""
        return self.update(phi, grads, state, params, loss=loss)
