"""How the coordinates of an unrolled run meet: recorded on the way, and played back for a slice of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.groupings import Controls, Exchange, Grouping, SlicedGrouping, key_of
from l2lopt.core.layout import Params
from l2lopt.estimators.window import MeanAdjoint, Meeting


class Recorder(Exchange):
    """Computes what coordinates meet in, and keeps it until the next `begin`.

    Args:
        inner: The way in which coordinates meet otherwise.
        stored: Rounds a function of whole tensors [..., n] to what a record will give back.
    """

    def __init__(self, inner: Exchange, stored: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        self._inner, self._stored = inner, stored
        self.meeting = Meeting({}, {}, {})

    def begin(self) -> Meeting:
        """An empty record, which fills during the next step."""
        self.meeting = Meeting({}, {}, {})
        return self.meeting

    def mean(self, grouping: Grouping, name: str, values: Tensor) -> Tensor:
        """See `Exchange.mean`."""
        return self._kept(self.meeting.means, key_of(grouping, name), self._inner.mean(grouping, name, values))

    def mean_of_sums(self, grouping: Grouping, name: str, sums: Tensor) -> Tensor:
        """See `Exchange.mean_of_sums`."""
        return self._kept(self.meeting.means, key_of(grouping, name), self._inner.mean_of_sums(grouping, name, sums))

    def whole(self, name: str, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """See `Exchange.whole`."""
        return self._kept(self.meeting.wholes, name, self._stored(self._inner.whole(name, function, values)))

    def controls(self, grouping: Grouping, name: str, compute: Callable[[], Controls], memory: Params) -> Controls:
        """See `Exchange.controls`."""
        found, after = self._inner.controls(grouping, name, compute, memory)
        return self._kept(self.meeting.controls, key_of(grouping, name), found), after

    def _kept(self, record: Params, key: str, value: Tensor) -> Tensor:
        # Under one name two means would be told apart neither in the record nor by their adjoints.
        if key in record:
            expected, remedy = "another name for each that a step takes", "give one of them another name"
            raise UserError(f"update: {key}", expected=expected, found="two of this name", remedy=remedy)
        record[key] = value.detach()
        return value


class Playback(Exchange):
    """Gives a slice at one step what the whole vector's coordinates met in then.

    Args:
        meeting: The record of the step, its functions of whole tensors cut to the slice.
        adjoints: Adjoints at this step of the means that are linked to their values, "grouping.name" → of one step.
        leaf: The mean whose adjoint is asked for, which becomes a leaf; "controls" makes leaves of all controls.
    """

    def __init__(self, meeting: Meeting, adjoints: Mapping[str, MeanAdjoint], leaf: str | None = None) -> None:
        self._meeting, self._adjoints, self._leaf = meeting, adjoints, leaf
        self.leaves: dict[str, tuple[Tensor, SlicedGrouping]] = {}

    def mean(self, grouping: Grouping, name: str, values: Tensor) -> Tensor:
        """The recorded mean: a constant, a leaf, or linked to the values by its adjoint."""
        assert isinstance(grouping, SlicedGrouping)
        key = key_of(grouping, name)
        found = grouping.at(self._meeting.means[key]).to(values.dtype)
        if key == self._leaf:
            return self._as_leaf(key, found, grouping)
        if key in self._adjoints and values.requires_grad:
            adjoint = self._adjoints[key]
            total, weight = (grouping.at(part).to(values.dtype) for part in adjoint)
            found = _Linked.apply(values, found, total, weight)
        return found

    def mean_of_sums(self, grouping: Grouping, name: str, sums: Tensor) -> Tensor:
        """The recorded mean of the whole's groups, as those have it who add up group by group: a constant."""
        return self._meeting.means[key_of(grouping, name)].to(sums.dtype)

    def whole(self, name: str, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """The recorded values, a constant."""
        return self._meeting.wholes[name].to(values.dtype)

    def controls(self, grouping: Grouping, name: str, compute: Callable[[], Controls], memory: Params) -> Controls:
        """The recorded outputs; the memory stays as it was."""
        assert isinstance(grouping, SlicedGrouping)
        key = key_of(grouping, name)
        found = grouping.at(self._meeting.controls[key])
        return (self._as_leaf(key, found, grouping) if self._leaf == "controls" else found), memory

    def _as_leaf(self, key: str, value: Tensor, grouping: SlicedGrouping) -> Tensor:
        leaf = value.detach().requires_grad_()
        self.leaves[key] = leaf, grouping
        return leaf


class GroupsPlayback(Exchange):
    """Lets networks per group run by themselves, on recorded means and without coordinates.

    Args:
        meeting: The record of the step.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.outputs: Params = {}

    def mean(self, grouping: Grouping, name: str, values: Tensor) -> Tensor:
        """The recorded mean, a constant."""
        return self._meeting.means[key_of(grouping, name)].to(values.dtype)

    def mean_of_sums(self, grouping: Grouping, name: str, sums: Tensor) -> Tensor:
        """The recorded mean, a constant."""
        return self.mean(grouping, name, sums)

    def whole(self, name: str, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """No coordinates."""
        return self._meeting.wholes[name][..., :0].to(values.dtype)

    def controls(self, grouping: Grouping, name: str, compute: Callable[[], Controls], memory: Params) -> Controls:
        """`compute()`, its outputs remembered."""
        outputs, after = compute()
        self.outputs[key_of(grouping, name)] = outputs
        return outputs, after


class Alone(Exchange):
    """Gives a slice ones for whatever it cannot compute, and records them: for measuring times."""

    def __init__(self) -> None:
        self.meeting = Meeting({}, {}, {})

    def mean(self, grouping: Grouping, name: str, values: Tensor) -> Tensor:
        """Ones."""
        self.meeting.means[key_of(grouping, name)] = _ones(grouping, values)
        return torch.ones_like(values)

    def mean_of_sums(self, grouping: Grouping, name: str, sums: Tensor) -> Tensor:
        """Ones."""
        self.meeting.means[key_of(grouping, name)] = torch.ones_like(sums)
        return torch.ones_like(sums)

    def whole(self, name: str, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """The values as they are."""
        self.meeting.wholes[name] = values
        return values

    def controls(self, grouping: Grouping, name: str, compute: Callable[[], Controls], memory: Params) -> Controls:
        """`compute()`."""
        outputs, after = compute()
        self.meeting.controls[key_of(grouping, name)] = _ones(grouping, outputs)
        return outputs, after


def _ones(grouping: Grouping, copies: Tensor) -> Tensor:
    """Ones for the groups that a slice's copies [..., B] come from, [..., count]."""
    assert isinstance(grouping, SlicedGrouping)
    return copies.new_ones(*copies.shape[:-1], int(grouping.index.max()) + 1)


class _Linked(torch.autograd.Function):
    """A recorded mean whose adjoint is known: v̄_i = total − self_weight·p_i, see `MeanAdjoint`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, total: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(total, weight)
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *adjoints: Tensor) -> tuple[Tensor, None, None, None]:
        total, weight = ctx.saved_tensors
        # What arrives is p_i: a slice has a copy of the mean for each coordinate, and this is the copy's own adjoint.
        return total - weight * adjoints[0], None, None, None
