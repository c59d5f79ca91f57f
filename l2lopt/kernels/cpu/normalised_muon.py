"""The harness's step in place, for one run on the CPU."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.groupings import COMPUTED
from l2lopt.core.kinds import stack_of
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers import NormalisedMuon, Optimiser
from l2lopt.optimisers.directions import EPS, Orthogonalised, fast_precision
from l2lopt.optimisers.normalised_muon import REST
from l2lopt.optimisers.rules import root_of_mean
from l2lopt.optimisers.schedules import to_the_end

PLANS = 8
"""Layouts whose memory is kept."""
FEW = 32
"""Rows below which the number of products costs more than the size of each."""


class _Member(NamedTuple):
    """A matrix parameter, or a stack of them, within a batch of matrices of one shape.

    Attributes:
        place: Place among the tensors of the layout.
        shape: Matrices, rows, columns.
        low: Place of its first matrix in the batch.
    """

    place: int
    shape: tuple[int, int, int]
    low: int

    def batch(self, values: Tensor) -> Tensor:
        """Its matrices in a batch."""
        return values[self.low : self.low + self.shape[0]]

    def wide(self, values: Tensor) -> Tensor:
        """Its coordinates [n_k] as matrices with at most as many rows as columns."""
        matrices = values.view(self.shape)
        return matrices.mT if self.shape[1] > self.shape[2] else matrices


class _Batch:
    """The matrices of one shape, and the memory for their products.

    Args:
        members: Parameters that the matrices belong to.
        like: A tensor of the dtype of the products.
        quick: Whether wide matrices may go by `_of_squares`.
    """

    def __init__(self, members: Sequence[_Member], like: Tensor, quick: bool = True) -> None:
        self.members = members
        first, count = members[0].shape, members[-1].low + members[-1].shape[0]
        rows, columns = sorted(first[1:])
        self.x, self.y = (like.new_empty(count, rows, columns) for _ in range(2))
        self.gram, self.square = (like.new_empty(count, rows, rows) for _ in range(2))
        # Half precision has too few digits for the squares of small singular values.
        digits = like.dtype in (torch.float32, torch.float64)
        self.of_squares = quick and digits and rows >= FEW and columns >= 2 * rows
        self.factor, self.spare = (like.new_empty(count, rows, rows) if self.of_squares else like for _ in range(2))

    def orthogonalise(self, coefficients: Sequence[tuple[float, float, float]]) -> None:
        """`newton_schulz` of `x`, into `x`."""
        self.x.div_(torch.linalg.vector_norm(self.x, dim=(-2, -1), keepdim=True).clamp_(min=EPS))
        if self.of_squares:
            self._of_squares(coefficients)
            return
        for a, b, c in coefficients:
            torch.bmm(self.x, self.x.mT, out=self.gram)
            torch.baddbmm(self.gram, self.gram, self.gram, beta=b, alpha=c, out=self.square)
            torch.baddbmm(self.x, self.square, self.x, beta=a, out=self.y)
            self.x, self.y = self.y, self.x

    def _of_squares(self, coefficients: Sequence[tuple[float, float, float]]) -> None:
        """The same by products of A = X Xᵀ alone: with P = a I + b A + c A² a step is X ← P X, so A ← P A P.

        The wide X itself is in two products, not ten: in A of the first step, and times the product of all P. Rounding
        of A reaches directions of small singular values: in float32 the relative error is up to 5e-3, half of what the
        products in bfloat16 have, where one singular value is far above all others, and some 1e-4 otherwise.
        """
        torch.bmm(self.x, self.x.mT, out=self.gram)
        for step, (a, b, c) in enumerate(coefficients):
            torch.baddbmm(self.gram, self.gram, self.gram, beta=b, alpha=c, out=self.factor)
            self.factor.diagonal(dim1=-2, dim2=-1).add_(a)
            if step == 0:
                self.square.copy_(self.factor)
            else:
                torch.bmm(self.factor, self.square, out=self.spare)
                self.square, self.spare = self.spare, self.square
            if step < len(coefficients) - 1:
                torch.bmm(self.factor, self.gram, out=self.spare)
                torch.bmm(self.spare, self.factor, out=self.gram)
        torch.bmm(self.square, self.x, out=self.y)
        self.x, self.y = self.y, self.x


class Plan:
    """What a step needs of a layout, and the memory for it.

    Args:
        layout: Layout of one run's coordinates.
        like: Gradients of the run.
        precision: Dtype of the products; None chooses as `fast_precision` does.
    """

    def __init__(self, layout: Layout, like: Tensor, precision: torch.dtype | None) -> None:
        self.update = torch.empty_like(like)
        self.rest = [index for index, role in enumerate(layout.roles) if role.kind != "matrix"]
        alike: dict[tuple[int, ...], list[_Member]] = {}
        for index, (shape, role) in enumerate(zip(layout.shapes, layout.roles, strict=True)):
            if role.kind == "matrix":
                stack = stack_of(shape, role.split)
                members = alike.setdefault(tuple(sorted(stack[1:])), [])
                low = members[-1].low + members[-1].shape[0] if members else 0
                members.append(_Member(index, stack, low))
        dtypes = {shape: precision or fast_precision(like, min(shape)) for shape in alike}
        self.batches = [
            _Batch(members, like.new_empty(0, dtype=dtypes[shape]), precision is None)
            for shape, members in alike.items()
        ]

    def orthogonalise(self, parts: Mapping[str, Sequence[Tensor]], direction: Orthogonalised) -> None:
        """`directions.orthogonalised` of the Nesterov momentum β m' + (1 − β) g of every matrix.

        Args:
            parts: Each tensor's coordinates: gradients "g", running means "m", and "u", which is written to.
            direction: Direction with β and the coefficients.
        """
        for batch in self.batches:
            for one in batch.members:
                # Written where the products want it.
                pair = one.wide(parts["g"][one.place]), one.wide(parts["m"][one.place])
                _lerped(*pair, direction.adam.beta1, one.batch(batch.x))
            batch.orthogonalise(direction.coefficients)
            for one in batch.members:
                one.wide(parts["u"][one.place]).copy_(one.batch(batch.x))


class FusedNormalisedMuon(Optimiser):
    """The harness whose `update_` works in place: the same states and numbers, to the rounding of its products.

    For one run on the CPU, [n] or [1, n], by the orthogonalised direction, with finite gradients; for all else it is
    the reference. Beside the products a step of the reference is bound by memory, which this one goes over fewer times.

    Args:
        reference: The plain optimiser.
    """

    groupings, knows_end = NormalisedMuon.groupings, NormalisedMuon.knows_end

    def __init__(self, reference: NormalisedMuon) -> None:
        super().__init__()
        self.reference, self.description = reference, reference.description
        self._plans: dict[tuple[Layout, torch.dtype], Plan] = {}

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The reference's."""
        return self.reference.init(layout, batch, like=like, total_steps=total_steps)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The numbers of `update_`, to the bit, in memory of their own; the reference's where a tape is wanted."""
        leaves = [grads, params, *pytree.tree_leaves(state)]
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return self.reference.update(grads, state, params, loss=loss)
        own = {name: value.clone() for name, value in state.coordinates.items()}
        update, after = self.update_(grads, state._replace(coordinates=own), params, loss=loss)
        return update.clone(), after

    @torch.no_grad()
    def update_(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """`update` without a tape and in place: it overwrites the state it is given and its own last result."""
        direction, rate = self.reference.direction, self.reference.lr
        if not isinstance(direction, Orthogonalised) or isinstance(rate, Tensor):
            return self.reference.update_(grads, state, params, loss=loss)
        if is_one_row(grads):
            return of_one_row(self, grads, state, params, loss)
        if not suits(grads, state, params):
            return self.reference.update_(grads, state, params, loss=loss)
        layout, step = state.layout, state.shared["step"] + 1
        largest = torch.stack(torch._foreach_norm(layout.split(grads), math.inf))
        if not largest.max().square().isfinite():
            return self.reference.update_(grads, state, params, loss=loss)
        plan = self._plan(layout, grads, direction.precision)
        m, v, update = state.coordinates["m"], state.coordinates["v"], plan.update
        adam = direction.adam
        m.lerp_(grads, 1 - adam.beta1)
        parts = {name: layout.split(value) for name, value in (("g", grads), ("m", m), ("v", v), ("u", update))}
        plan.orthogonalise(parts, direction)
        if plan.rest:
            g, mean, square, into = ([parts[key][index] for index in plan.rest] for key in "gmvu")
            torch._foreach_mul_(square, adam.beta2)
            torch._foreach_addcmul_(square, g, g, 1 - adam.beta2)
            scales = torch._foreach_div(square, 1 - adam.beta2 ** int(step))
            torch._foreach_sqrt_(scales)
            torch._foreach_add_(scales, adam.eps)
            torch._foreach_mul_(scales, 1 - adam.beta1 ** int(step))
            torch._foreach_copy_(into, torch._foreach_div(mean, scales))
        means = torch.stack(torch._foreach_norm(parts["u"])).square() / grads.new_tensor(layout.sizes)
        idle = torch.where(largest > 0, 0.0, state.groups["tensors"]["idle"] + 1)
        factors = REST**idle / root_of_mean(means, layout.tensors.each(layout.fan_ins, means))
        torch._foreach_mul_(parts["u"], list((factors * self.reference.scales(layout, factors)).unbind()))
        total = state.shared["total_steps"]
        share = to_the_end(self.reference.schedule, state.shared["step"], total, self.reference.warm_up)
        update.add_(params, alpha=self.reference.weight_decay).mul_(-rate * float(share))
        groups = {"tensors": {"idle": idle}}
        return update, OptimiserState(layout, state.coordinates, groups, {"step": step, "total_steps": total})

    def _plan(self, layout: Layout, like: Tensor, precision: torch.dtype | None) -> Plan:
        """The plan of a layout, made once while few layouts take turns."""
        key = layout, like.dtype
        if key not in self._plans:
            if len(self._plans) == PLANS:
                self._plans.clear()
            self._plans[key] = Plan(layout, like, precision)
        return self._plans[key]


def _lerped(one: Tensor, other: Tensor, weight: float, out: Tensor) -> None:
    """Writes one + weight (other − one) into `out`, which may have another dtype."""
    if out.dtype == one.dtype:
        torch.lerp(one, other, weight, out=out)
    else:
        out.copy_(torch.lerp(one, other, weight))


def suits(grads: Tensor, state: OptimiserState, params: Tensor) -> bool:
    """Whether it is one run on the CPU of whole tensors, in memory of its own."""
    layout, values = state.layout, [grads, params, *state.coordinates.values()]
    if grads.dim() != 1 or layout.shards is not None or layout.origin is not None or layout.exchange is not COMPUTED:
        return False
    if not grads.numel() or torch._C._are_functorch_transforms_active():
        return False
    if any(value.device.type != "cpu" or value.dtype != grads.dtype or not value.is_contiguous() for value in values):
        return False
    own = {value.data_ptr() for value in pytree.tree_leaves(state.coordinates)}
    return 0 not in layout.sizes and len(own) >= 2


def is_one_row(grads: Tensor) -> bool:
    """Whether it is a single run of those that could be side by side, [1, n]."""
    return grads.dim() == 2 and len(grads) == 1


def of_one_row(
    optimiser: Optimiser, grads: Tensor, state: OptimiserState, params: Tensor, loss: Tensor | None
) -> tuple[Tensor, OptimiserState]:
    """The optimiser's `update_` of the single row, as of a run by itself: the same memory, without the row's axis.

    Args:
        optimiser: Optimiser with a step in place for one run.
        grads: Gradients, [1, n].
        state: State of a batch (1,), whose tensors are overwritten.
        params: θ, [1, n].
        loss: Loss, [1].
    """
    layout, coordinates, groups, shared = state
    # What all rows share, such as the step, has no axis of rows.
    alone = OptimiserState(
        layout,
        pytree.tree_map(lambda value: value.squeeze(-2), coordinates),
        pytree.tree_map(lambda value: value.squeeze(-2), groups),
        {name: value.squeeze(-1) if value.dim() else value for name, value in shared.items()},
    )
    update, after = optimiser.update_(grads[0], alone, params[0], loss=None if loss is None else loss[0])
    rows = OptimiserState(
        layout,
        pytree.tree_map(lambda value: value.unsqueeze(-2), after.coordinates),
        pytree.tree_map(lambda value: value.unsqueeze(-2), after.groups),
        {name: value[..., None] if shared[name].dim() else value for name, value in after.shared.items()},
    )
    return update[None], rows
