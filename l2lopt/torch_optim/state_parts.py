"""Each parameter's part of a rule's state, as `state[p]` holds it.

A rule keeps its state for all parameters together: arrays [features…, n] with a column per coordinate, and
[features…, count] with a column per group of coordinates. The part of a parameter p has those axes of p along which the
array varies:

    per coordinate    "name"            (features…, *p.shape)
    per tensor        "tensors.name"    (features…)
    per row           "rows.name"       (features…, *p.shape[:1])
    per column        "columns.name"    (features…, *p.shape[1:])

So the part of each parameter can be saved, loaded, sharded, and joined with those of other parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Layout, Params
from l2lopt.core.types import OptimiserState
from l2lopt.torch_optim import sharding

AXES = {"coordinates": slice(None), "tensors": slice(0), "rows": slice(0, 1), "columns": slice(1, None)}
"""Kind of array → the axes of a parameter that its part has."""


class StateArray(NamedTuple):
    """An array of a rule's state.

    Attributes:
        name: Name in `state[p]`, without a prefix.
        kind: One of `AXES`.
        value: Array [features…, columns].
    """

    name: str
    kind: str
    value: Tensor

    def columns(self, layout: Layout) -> list[int]:
        """The number of columns that belong to each tensor of a layout."""
        return [prod(shape[AXES[self.kind]]) for shape in layout.shapes]

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part that belongs to a parameter of this shape."""
        return (*self.value.shape[:-1], *shape[AXES[self.kind]])

    def split(self, layout: Layout) -> list[Tensor]:
        """The parts as views, one for each tensor of a layout."""
        parts = self.value.split(self.columns(layout), dim=-1)
        return [part.view(self.part_shape(shape)) for part, shape in zip(parts, layout.shapes, strict=True)]

    def join(self, layout: Layout, saved: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
        """An array like this one, from the parts of several parameters.

        Args:
            layout: Layout of the parameters, or of this process's parts of them.
            saved: Part of each parameter, plain or distributed.
            params: Parameters, plain or distributed.
        """
        here = [sharding.local(part, param, AXES[self.kind]) for part, param in zip(saved, params, strict=True)]
        sizes = zip(here, self.columns(layout), strict=True)
        return torch.cat([part.reshape(*self.value.shape[:-1], size) for part, size in sizes], dim=-1)


def arrays_of(state: OptimiserState) -> Iterator[StateArray]:
    """The arrays of a state, those per coordinate first."""
    for name, value in state.coordinates.items():
        yield StateArray(name, "coordinates", value)
    for grouping, values in state.groups.items():
        for name, value in values.items():
            yield StateArray(f"{grouping}.{name}", grouping, value)


def with_arrays(state: OptimiserState, arrays: Params, shared: Mapping[str, Tensor]) -> OptimiserState:
    """A state with other arrays, by the names of `arrays_of`, and other shared tensors."""
    coordinates = {name: arrays[name] for name in state.coordinates}
    groups = {kind: {name: arrays[f"{kind}.{name}"] for name in values} for kind, values in state.groups.items()}
    return OptimiserState(state.layout, coordinates, groups, dict(shared))


def shared_or_initial(name: str, saved: Any, initial: Tensor) -> Tensor:
    """A saved shared tensor, or the initial one where none is saved, in memory of its own."""
    # The length of the run is the group's to say: a run may go on for longer than it was begun for.
    fresh = saved is None or name == "total_steps"
    return initial.clone() if fresh else initial.clone().copy_(torch.as_tensor(saved))
