"""Where the coordinates of a flat vector meet: in means over groups of them, and in functions of whole tensors.

A *grouping* is a partition of the coordinates. A layout has three: `tensors`, and the `rows` and `columns` of each
tensor's matrix view [shape[0], the rest]. A vector [k] is the matrix [k, 1]: every coordinate is a row, and all of them
are one column. So the factored estimate row × column / tensor of a second moment is exact for vectors.

An update rule that lets its coordinates meet nowhere else obeys the law of *locality*: for every slice B of the
coordinates, update(g_B, s_B, θ_B | what the coordinates met in) = update(g, s, θ)_B. So a slice can be computed again
by itself, on another process, or as a sample of the whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.kinds import matrix_view
from l2lopt.core.precision import widest

GROUPINGS = ("tensors", "rows", "columns")
FEW, LONG = 16, 1024
"""Number of tensors, and their mean size, up to and from which copies are quicker than an index on a CPU."""
Shape: TypeAlias = tuple[int, ...]
Total: TypeAlias = Callable[[Tensor], Tensor]
"""Sums [..., groups] over the coordinates here → the sums over the coordinates of all processes."""
Controls: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""A network's outputs [..., groups] and its memory after the step."""


class Shards(NamedTuple):
    """The whole tensors behind coordinates that are only this process's part of each.

    Attributes:
        shapes: Shape of each whole tensor.
        total: Sum over the processes for groups of whole tensors.
        rows: Sum over the processes for rows; None where every row lies in one process.
        columns: Sum over the processes for columns; None where every column lies in one process.
        gather: (names, values [n] of this process's parts) → values of these whole tensors; None where nobody can.
        part: (names, values of these whole tensors) → values [n] of this process's parts.
    """

    shapes: tuple[Shape, ...]
    total: Total
    rows: Total | None = None
    columns: Total | None = None
    gather: Callable[[Sequence[str], Tensor], Tensor] | None = None
    part: Callable[[Sequence[str], Tensor], Tensor] | None = None

    def sum(self, grouping: str, sums: Tensor) -> Tensor:
        """Sums over the groups' coordinates here, to sums over all their coordinates."""
        total = {"tensors": self.total, "rows": self.rows, "columns": self.columns}[grouping]
        return sums if total is None else total(sums)


class Exchange(ABC):
    """How coordinates meet: computed from their values, recorded on the way, or played back in a slice."""

    @abstractmethod
    def mean(self, grouping: "Grouping", name: str, values: Tensor) -> Tensor:
        """The mean of `values` [..., n] over each group, [..., count]."""

    @abstractmethod
    def mean_of_sums(self, grouping: "Grouping", name: str, sums: Tensor) -> Tensor:
        """The mean over each group, given the sums over the coordinates here, [..., count]."""

    @abstractmethod
    def whole(self, name: str, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """`function(values)` [..., n], where the function needs the values of whole tensors."""

    @abstractmethod
    def controls(
        self, grouping: "Grouping", name: str, compute: Callable[[], Controls], memory: dict[str, Tensor]
    ) -> Controls:
        """What a network per group gives its coordinates, and its memory afterwards."""


class Grouping(ABC):
    """A partition of the coordinates, as an update rule uses it.

    Args:
        name: One of `GROUPINGS`.
        exchange: The way in which coordinates meet.
    """

    def __init__(self, name: str, exchange: Exchange) -> None:
        self.name, self.exchange = name, exchange

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of groups."""

    @abstractmethod
    def sums(self, values: Tensor) -> Tensor:
        """Sums over the coordinates of each group that are here: [..., n] to [..., count]."""

    @abstractmethod
    def means(self, sums: Tensor) -> Tensor:
        """Sums over the coordinates here, to means over the whole groups."""

    @abstractmethod
    def spread(self, groups: Tensor) -> Tensor:
        """A number per group, [..., count], to each of its coordinates, [..., n]."""

    @abstractmethod
    def each(self, values: Sequence[float], like: Tensor) -> Tensor:
        """A constant per tensor, to each group of the tensor: [count], of the dtype and device of `like`."""

    def mean(self, name: str, values: Tensor) -> Tensor:
        """The mean of `values` [..., n] over each group, [..., count].

        Args:
            name: Name under which the mean is recorded; different for each mean of a rule's step.
            values: Numbers per coordinate.
        """
        return self.exchange.mean(self, name, values)

    def mean_of_sums(self, name: str, sums: Tensor) -> Tensor:
        """`mean`, for those who have added the values up in their own order: [..., count] to [..., count]."""
        return self.exchange.mean_of_sums(self, name, sums)

    def controls(self, name: str, compute: Callable[[], Controls], memory: dict[str, Tensor]) -> Controls:
        """Outputs [..., count] of a network per group, which steer the group's coordinates, and its next memory.

        `compute` runs once a step for the whole vector. In a slice the recorded outputs take its place and the memory
        is handed back as it is: backpropagation collects the adjoints of the outputs from all slices, and goes through
        the network once.

        Args:
            name: Name under which the outputs are recorded.
            compute: The network's step; it may use means, the memory and whatever all coordinates share.
            memory: Name → [..., count], before the step.
        """
        return self.exchange.controls(self, name, compute, memory)


class WholeGrouping(Grouping):
    """A partition of all coordinates of the tensors, or of this process's part of them.

    Args:
        name: One of `GROUPINGS`.
        exchange: The way in which coordinates meet.
        shapes: Shapes of the tensors here.
        shards: The whole tensors, where those here are parts of them.
    """

    def __init__(self, name: str, exchange: Exchange, shapes: Sequence[Shape], shards: Shards | None = None) -> None:
        super().__init__(name, exchange)
        self._shards = shards
        self._matrices = [matrix_view(shape) for shape in shapes]
        self._whole = self._matrices if shards is None else [matrix_view(shape) for shape in shards.shapes]
        self.counts = tuple({"tensors": 1, "rows": rows, "columns": columns}[name] for rows, columns in self._matrices)
        """Groups of each tensor."""
        self._members: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def count(self) -> int:
        """Number of groups."""
        return sum(self.counts)

    @property
    def index(self) -> Tensor:
        """The group of each coordinate, [n], int32."""
        return self.spread(torch.arange(self.count, dtype=torch.int32))

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the coordinates of each group that are here: [..., n] to [..., count]."""
        parts = values.split([rows * columns for rows, columns in self._matrices], dim=-1)
        if self.name == "tensors":
            return torch.stack([part.sum(-1) for part in parts], dim=-1) if parts else values[..., :0]
        axis = -1 if self.name == "rows" else -2
        matrices = (part.unflatten(-1, matrix) for part, matrix in zip(parts, self._matrices, strict=True))
        # The empty piece in front is for layouts without tensors: cat refuses an empty list.
        return torch.cat([values[..., :0], *(matrix.sum(axis) for matrix in matrices)], dim=-1)

    def means(self, sums: Tensor) -> Tensor:
        """Sums over the coordinates here, to means over the whole groups."""
        return self.total(sums) / self.members(sums)

    def total(self, sums: Tensor) -> Tensor:
        """Sums over the coordinates here, to sums over the whole groups."""
        return sums if self._shards is None else self._shards.sum(self.name, sums)

    def members(self, like: Tensor) -> Tensor:
        """Coordinates of each whole group, at least 1: [count]."""
        kind = like.dtype, like.device
        if kind not in self._members:
            sizes = [
                {"tensors": rows * columns, "rows": columns, "columns": rows}[self.name]
                for rows, columns in self._whole
            ]
            # A tensor without coordinates then has the mean 0 / 1 and not NaN.
            self._members[kind] = self.each(sizes, like).clamp(min=1)
        return self._members[kind]

    def spread(self, groups: Tensor) -> Tensor:
        """A number per group, [..., count], to each of its coordinates, [..., n]."""
        if self.name == "tensors":
            sizes = [rows * columns for rows, columns in self._matrices]
            copies = sizes and (len(sizes) <= FEW or sum(sizes) >= LONG * len(sizes))
            # Not where a gradient goes back: its sums would have another order, and other bits than they always had.
            if copies and groups.device.type == "cpu" and not groups.requires_grad:
                ones = zip(groups.split(1, dim=-1), sizes, strict=True)
                return torch.cat([one.expand(*one.shape[:-1], size) for one, size in ones], dim=-1)
            # With output_size the host need not wait for a GPU to add up the sizes.
            index = torch.tensor(sizes, dtype=torch.int64, device=groups.device)
            return groups.repeat_interleave(index, dim=-1, output_size=sum(sizes))
        axis = -1 if self.name == "rows" else -2
        parts = zip(groups.split(self.counts, dim=-1), self._matrices, strict=True)
        spread = (part.unsqueeze(axis).expand(*part.shape[:-1], *matrix).flatten(-2) for part, matrix in parts)
        return torch.cat([groups[..., :0], *spread], dim=-1)

    def each(self, values: Sequence[float], like: Tensor) -> Tensor:
        """A constant per tensor, to each group of the tensor: [count], of the dtype and device of `like`."""
        of_tensors = torch.tensor(values, dtype=like.dtype, device=like.device)
        if self.name == "tensors":
            return of_tensors
        return of_tensors.repeat_interleave(torch.tensor(self.counts, device=like.device), output_size=self.count)


class SlicedGrouping(Grouping):
    """A partition seen from some of its coordinates: each carries a copy of its group's numbers.

    What a rule does with its groups' numbers, group by group, it does here with the copies. So a coordinate's adjoint
    of its group's mean can be told from the other coordinates', which a sample needs (see `MeanAdjoint`).

    Args:
        name: One of `GROUPINGS`.
        exchange: The way in which coordinates meet; one that plays back.
        index: The group of each coordinate of the slice, [B].
        tensor: The tensor of each coordinate of the slice, [B].
    """

    def __init__(self, name: str, exchange: Exchange, index: Tensor, tensor: Tensor) -> None:
        super().__init__(name, exchange)
        self.index, self._tensor = index, tensor

    @property
    def count(self) -> int:
        """Number of coordinates: each has a copy."""
        return len(self.index)

    def at(self, groups: Tensor) -> Tensor:
        """Numbers of the whole vector's groups, [..., all groups], as the coordinates' copies, [..., B]."""
        return groups.index_select(-1, self.index.to(groups.device))

    def gathered(self, copies: Tensor, count: int) -> Tensor:
        """Sums of the copies [..., B] over the coordinates of each of the whole vector's `count` groups."""
        # float64: a group may have millions of coordinates, and on a GPU index_add adds them in any order.
        wide = widest(copies.device)
        sums = copies.new_zeros(*copies.shape[:-1], count, dtype=wide)
        return sums.index_add(-1, self.index.to(copies.device), copies.to(wide))

    def sums(self, values: Tensor) -> Tensor:
        """Refused: a slice does not have all coordinates of a group."""
        raise UserError(f"{self.name}: sums", expected="the whole vector", found="a slice of it", remedy="use mean")

    def means(self, sums: Tensor) -> Tensor:
        """The sums as they are: a copy's group is the coordinate alone."""
        return sums

    def spread(self, groups: Tensor) -> Tensor:
        """The copies as they are."""
        return groups

    def each(self, values: Sequence[float], like: Tensor) -> Tensor:
        """A constant per tensor, to each coordinate: [B], of the dtype and device of `like`."""
        return torch.tensor(values, dtype=like.dtype, device=like.device)[self._tensor.long().to(like.device)]


class EmptiedGrouping(Grouping):
    """A partition whose groups are all there and whose coordinates are not: for networks per group by themselves.

    Args:
        whole: The partition with its coordinates.
        exchange: The way in which coordinates meet; one that plays back.
    """

    def __init__(self, whole: WholeGrouping, exchange: Exchange) -> None:
        super().__init__(whole.name, exchange)
        self._whole = whole

    @property
    def count(self) -> int:
        """Number of groups."""
        return self._whole.count

    def sums(self, values: Tensor) -> Tensor:
        """Zeros."""
        return values.new_zeros(*values.shape[:-1], self.count)

    def means(self, sums: Tensor) -> Tensor:
        """Zeros, as there are no coordinates."""
        return sums

    def spread(self, groups: Tensor) -> Tensor:
        """No coordinates: [..., 0]."""
        return groups[..., :0]

    def each(self, values: Sequence[float], like: Tensor) -> Tensor:
        """A constant per tensor, to each group of the tensor: [count]."""
        return self._whole.each(values, like)


class Computed(Exchange):
    """Means, functions of whole tensors and networks per group, computed from the coordinates' values."""

    def mean(self, grouping: Grouping, name: str, values: Tensor) -> Tensor:
        """The mean of `values` [..., n] over each group, [..., count]."""
        return grouping.means(grouping.sums(values))

    def mean_of_sums(self, grouping: Grouping, name: str, sums: Tensor) -> Tensor:
        """The mean over each group, given the sums over the coordinates here, [..., count]."""
        return grouping.means(sums)

    def whole(self, name: str, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """`function(values)` [..., n]."""
        return function(values)

    def controls(
        self, grouping: Grouping, name: str, compute: Callable[[], Controls], memory: dict[str, Tensor]
    ) -> Controls:
        """`compute()`."""
        return compute()


COMPUTED = Computed()


def key_of(grouping: Any, name: str) -> str:
    """The name of a mean or of controls among those of all groupings."""
    return f"{grouping.name}.{name}"
