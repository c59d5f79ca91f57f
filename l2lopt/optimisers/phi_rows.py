"""A learned optimiser with other meta-parameters in every run of those side by side."""

from collections.abc import Sequence

from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout, Params
from l2lopt.core.phi_rows import over_phi
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser


class PhiRows(Optimiser):
    """R rules of one kind as the optimiser of R runs: row k is updated by the rule of φ_k.

    So the perturbed rules of an evolution strategy are the rows of a single run, which costs little more than one of
    them. The rows stay the caller's: where their numbers are changed in place, the rules are others from then on.

    Args:
        reference: Optimiser whose form the rules have; its parameters are not used.
        rows: Meta-parameters φ by name, each [R, ...].

    Raises:
        UserError: For names or shapes that are not those of the reference.

    Example:
        >>> import torch
        >>> from l2lopt import optimisers
        >>> from l2lopt.core.layout import Layout
        >>> from l2lopt.optimisers.phi_rows import PhiRows
        >>> rule = optimisers.make("coordinatewise")
        >>> rows = {name: torch.stack([value, 2 * value]).detach() for name, value in rule.phi().items()}
        >>> two = PhiRows(rule, rows)
        >>> params = torch.ones(2, 3)
        >>> state = two.init(Layout(("w",), ((3,),)), (2,), like=params)
        >>> update, state = two.update(params, state, params)
        >>> update.shape
        torch.Size([2, 3])
    """

    def __init__(self, reference: Optimiser, rows: Params) -> None:
        super().__init__()
        shapes = {name: list(value.shape) for name, value in reference.phi().items()}
        found = {name: list(value.shape[1:]) for name, value in rows.items()}
        counts = {len(value) if value.dim() else 0 for value in rows.values()}
        if found != shapes or len(counts) > 1:
            remedy = "stack the φ of equal optimisers"
            raise UserError("rows of φ", expected=str(shapes), found=f"{found} in {sorted(counts)} rows", remedy=remedy)
        # Not as a submodule: its parameters are no part of this optimiser.
        self._reference = (reference,)
        self.rows = dict(rows)
        self.coordinatewise, self.groupings = reference.coordinatewise, reference.groupings
        self.knows_end, self.needs_loss = reference.knows_end, reference.needs_loss
        self._update = over_phi(reference.update_with)

    @property
    def reference(self) -> Optimiser:
        """The optimiser whose form the rules have."""
        return self._reference[0]

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The reference's state of R rows."""
        return self.reference.init(layout, batch, like=like, total_steps=total_steps)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The update of each row by its own rule."""
        return self._update(self.rows, grads, state, params, loss=loss)

    def phi(self) -> Params:
        """The rows' meta-parameters, each [R, ...]."""
        return self.rows

    def update_with(
        self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """`update` with other rows φ, each [R, ...]."""
        return self._update(phi, grads, state, params, loss=loss)
