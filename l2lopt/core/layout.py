"""Where named tensors lie in the flat vector of coordinates, and how the coordinates are grouped."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError
from l2lopt.core.groupings import (
    COMPUTED,
    Computed,
    EmptiedGrouping,
    Exchange,
    Grouping,
    Shards,
    SlicedGrouping,
    WholeGrouping,
)
from l2lopt.core.kinds import Kind, Role, as_roles, roles, stack_of

Params: TypeAlias = dict[str, Tensor]
"""Named tensors: an optimisee's parameters θ or an optimiser's meta-parameters φ."""


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in the flat vector of n coordinates, and how its coordinates are grouped.

    Ravelled tensors follow one another in the order of `names`, each in row-major order. A layout is a constant: pytree
    functions (and so `vmap`) carry it along without looking inside.

    Example:
        >>> import torch
        >>> from l2lopt.core.layout import Layout
        >>> layout = Layout.of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
        >>> flat = torch.arange(8.0)
        >>> layout.tensors.mean("values", flat)
        tensor([2.5000, 6.5000])
        >>> layout.rows.mean("values", flat)
        tensor([1., 4., 6., 7.])
        >>> layout.columns.spread(layout.columns.mean("values", flat))
        tensor([1.5000, 2.5000, 3.5000, 1.5000, 2.5000, 3.5000, 6.5000, 6.5000])

    Attributes:
        names: Names of the tensors.
        shapes: Shapes of the tensors; of a slice, one axis with the coordinates that lie in it.
        shards: The whole tensors, where the coordinates are only this process's part of them.
        fan_ins: Numbers that each of a tensor's outputs is made of: the product of all axes but the first. A vector or
            scalar (a bias, a norm's gain) takes that of the last matrix before it, or its own size where there is none.
            Worked out from the shapes unless given.
        roles: Kind of each tensor, and the number of matrices stacked in it. Worked out from names and shapes unless
            given, see `core.kinds`.
        exchange: The way in which coordinates meet.
        origin: The whole layout that this is a slice of, or None.
        places: The places [B] of a slice's coordinates in the whole; None for all or no coordinates.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: Shards | None = None
    fan_ins: tuple[int, ...] = ()
    roles: tuple[Role, ...] = ()
    # Not compared: layouts of one vector are equal however its coordinates meet.
    exchange: Exchange = field(default=COMPUTED, compare=False, repr=False)
    origin: "Layout | None" = field(default=None, compare=False, repr=False)
    places: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.roles:
            object.__setattr__(self, "roles", roles(self.names, self.whole_shapes))
        if not self.fan_ins:
            found: list[int] = []
            last = 0
            for shape, role in zip(self.shapes, self.roles, strict=True):
                # A matrix's columns: of experts [experts, outputs, inputs] these are the inputs of one.
                last = stack_of(shape, role.split)[2] if len(shape) > 1 else last
                found.append(max(last or prod(shape), 1))
            object.__setattr__(self, "fan_ins", tuple(found))

    @classmethod
    def of(cls, params: Mapping[str, Tensor], known: Mapping[str, Role] | None = None) -> "Layout":
        """The layout of `params`, in their order, with the roles that are known of some of them."""
        names, shapes = tuple(params), tuple(tuple(tensor.shape) for tensor in params.values())
        return cls(names, shapes, roles=as_roles(names, shapes, known or {}))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Coordinates per tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def whole_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the whole tensors, also where this is a slice of their coordinates or a process's part of them."""
        whole = self.origin or self
        return whole.shapes if whole.shards is None else whole.shards.shapes

    @cached_property
    def size(self) -> int:
        """Coordinates in all, n."""
        return sum(self.sizes)

    @cached_property
    def tensors(self) -> Grouping:
        """The coordinates of each tensor as a group."""
        return self._grouping("tensors")

    @cached_property
    def rows(self) -> Grouping:
        """The rows of each tensor's matrix view [shape[0], the rest] as groups."""
        return self._grouping("rows")

    @cached_property
    def columns(self) -> Grouping:
        """The columns of each tensor's matrix view [shape[0], the rest] as groups."""
        return self._grouping("columns")

    def grouping(self, name: str) -> Grouping:
        """The grouping called "tensors", "rows" or "columns"."""
        return {"tensors": self.tensors, "rows": self.rows, "columns": self.columns}[name]

    def whole(
        self,
        name: str,
        function: Callable[[Tensor, "Layout"], Tensor],
        values: Tensor,
        kind: Kind | None = None,
    ) -> Tensor:
        """`function(values, self)` [..., n], for a function that needs the values of whole tensors.

        In a slice of the coordinates the recorded result takes its place, as a constant. Of tensors that lie across
        processes every process gathers the values, of `kind` alone if it is given, and computes all of the function;
        the layout that it gets is then that of these whole tensors.

        Args:
            name: Name under which the result is recorded.
            function: (values [..., n], layout) → [..., n]; an orthogonalised direction, for instance.
            values: Numbers per coordinate.
            kind: Kind of the tensors that the function needs, if it gives 0 at all others; None where it needs all.

        Raises:
            UserError: The layout is a slice that nothing is recorded for, or the tensors lie across processes that have
                no way to gather them.
        """
        if self.origin is not None and isinstance(self.exchange, Computed):
            expected, remedy = "whole tensors", "update the whole vector, or play back what was recorded"
            raise UserError(name, expected=expected, found="a slice of the coordinates", remedy=remedy)
        if self.shards is None:
            return self.exchange.whole(name, lambda given: function(given, self), values)
        gather, part = self.shards.gather, self.shards.part
        if gather is None or part is None:
            expected, remedy = "whole tensors", "choose a rule whose coordinates meet in means only, or do not shard"
            raise UserError(name, expected=expected, found="tensors that lie across processes", remedy=remedy)
        needed = [index for index, role in enumerate(self.roles) if kind in (None, role.kind)]
        names, fan_ins = tuple(self.names[k] for k in needed), tuple(self.fan_ins[k] for k in needed)
        shapes = tuple(self.shards.shapes[k] for k in needed)
        whole = Layout(names, shapes, None, fan_ins, tuple(self.roles[k] for k in needed))

        def gathered(given: Tensor) -> Tensor:
            if not needed:
                return torch.zeros_like(given)
            parts = self.split(given)
            mine = torch.cat([parts[index] for index in needed], -1)
            own = part(names, function(gather(names, mine), whole)).split([self.sizes[index] for index in needed], -1)
            found = dict(zip(needed, own, strict=True))
            return torch.cat([found[k] if k in found else torch.zeros_like(one) for k, one in enumerate(parts)], -1)

        return self.exchange.whole(name, gathered, values)

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
        shards = None if self.shards is None else self.shards._replace(shapes=self.shards.shapes[first:end])
        cut = slice(first, end)
        return Layout(self.names[cut], self.shapes[cut], shards, self.fan_ins[cut], self.roles[cut], self.exchange)

    def meeting(self, exchange: Exchange) -> "Layout":
        """The same layout, whose coordinates meet in another way."""
        return replace(self, exchange=exchange)

    def slice(self, low: int, high: int) -> "Layout":
        """Coordinates `low` … `high` − 1: all names, with the sizes of what lies between."""
        sizes, first = [], 0
        for size in self.sizes:
            sizes.append((max(0, min(high, first + size) - max(low, first)),))
            first += size
        places = torch.arange(low, high) if self.places is None else self.places[low:high]
        return self._sliced(tuple(sizes), places)

    def select(self, places: Tensor) -> "Layout":
        """The coordinates at `places` [m], which rise: all names, with the numbers of coordinates chosen of each."""
        # Fan-ins are handed on: the sizes of a selection no longer tell them.
        ends = torch.tensor(self.sizes).cumsum(0)
        cuts = torch.searchsorted(places, ends).tolist()
        sizes = tuple((end - begin,) for begin, end in zip([0, *cuts], cuts, strict=False))
        return self._sliced(sizes, places)

    def emptied(self) -> "Layout":
        """All groups and no coordinates, for networks per group by themselves."""
        return self._sliced(((0,),) * len(self.names), None)

    def _sliced(self, sizes: tuple[tuple[int, ...], ...], places: Tensor | None) -> "Layout":
        """All names with fewer coordinates, which knows the whole."""
        origin = self.origin or self
        return Layout(self.names, sizes, None, self.fan_ins, self.roles, self.exchange, origin, places)

    def _grouping(self, name: str) -> Grouping:
        if self.origin is None:
            return WholeGrouping(name, self.exchange, self.shapes, self.shards)
        whole = self.origin.grouping(name)
        assert isinstance(whole, WholeGrouping)
        if self.places is None:
            return EmptiedGrouping(whole, self.exchange)
        index, tensor = (self.origin._indices(kind)[self.places] for kind in (name, "tensors"))
        return SlicedGrouping(name, self.exchange, index, tensor)

    def _indices(self, name: str) -> Tensor:
        """The group of each coordinate, [n], made once."""
        if name not in self._index:
            whole = self.grouping(name)
            assert isinstance(whole, WholeGrouping)
            self._index[name] = whole.index
        return self._index[name]

    @cached_property
    def _index(self) -> Params:
        return {}


pytree.register_pytree_node(Layout, lambda layout: ([], layout), lambda _, layout: layout)

__all__ = ["Layout", "Params", "Shards"]
