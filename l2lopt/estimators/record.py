"""What a first-order estimator keeps of its window: gradients, sources, what coordinates met in; no tape."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.groupings import SlicedGrouping
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.estimators.exchange import Recorder
from l2lopt.estimators.loss_and_gradient import LossAndGradient
from l2lopt.estimators.window import Meeting, Window


class VectorPool:
    """Vectors kept from window to window and used again: fresh memory would cost more than what is written to it.

    Args:
        folder: Folder for the vectors as memory-mapped files, which vanish with the process; None keeps them in memory.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.made: list[Tensor] = []
        self._used = 0

    def keep(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `values` in `dtype`."""
        last = self.made[self._used] if self._used < len(self.made) else None
        if last is None or last.shape != values.shape or last.dtype != dtype or last.device != values.device:
            # Those after it were made for the old size, too: their memory goes back before new memory is taken.
            del self.made[self._used :]
            self.made.append(self._new(values, dtype))
        row = self.made[self._used].copy_(values)
        self._used += 1
        return row

    def clear(self) -> None:
        """All vectors may be overwritten."""
        self._used = 0

    def _new(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if self.folder is None or not values.numel():
            return torch.empty(values.shape, dtype=dtype, device=values.device)
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:  # unlinked at once, the mapping keeps it alive
                mapped = torch.from_file(file.name, shared=True, size=values.numel(), dtype=dtype)
        except (OSError, ValueError) as error:
            where, remedy = f"spill = {self.folder!r}", "name another folder"
            raise UserError(where, expected="a folder to write in", found=str(error), remedy=remedy) from None
        return mapped.view(values.shape)


class Record:
    """The window under way, for the coordinates that are replayed.

    The direct source at θ after step t is scale_t g_{t+1} + extra_t: a target on the next step's own batch needs no
    vector of its own.

    Args:
        state: The optimiser's before the window, of the whole vector; its memory is not changed while the record lives.
        params: θ before the window, [*batch, n].
        rows: Memory for the vectors.
        dtype: Number format of the vectors.
        select: Places [m] of the coordinates that are replayed; None for all.
        keeps_updates: Whether the windows have their updates, which takes one vector more a step.
    """

    def __init__(
        self,
        state: OptimiserState,
        params: Tensor,
        rows: VectorPool,
        dtype: torch.dtype,
        select: Tensor | None = None,
        keeps_updates: bool = False,
    ) -> None:
        self.rows, self.dtype = rows, dtype
        self.whole = state.layout
        self.recorder = Recorder(self.whole.exchange, self.stored)
        self.recording = self.whole.meeting(self.recorder)
        self.layout = self.whole if select is None else self.whole.select(select)
        self.select = None if select is None else select.to(params.device)
        self.params = self._part(params)
        self.coordinates = {name: self._part(value) for name, value in state.coordinates.items()}
        self.groups, self.shared = state.groups, state.shared
        self.grads: list[Tensor] = []
        self.updates: list[Tensor] | None = [] if keeps_updates else None
        self.losses: list[Tensor] = []
        self.meetings: list[Meeting] = []
        self.scales: dict[int, Tensor] = {}
        self.extras: dict[int, Tensor] = {}

    def stored(self, values: Tensor) -> Tensor:
        """Numbers [..., n] as the record will give them back."""
        return values.to(self.dtype).to(values.dtype)

    def begin(self, state: OptimiserState) -> OptimiserState:
        """The state, whose layout records what the coordinates meet in during the next step."""
        self.recorder.begin()
        return state._replace(layout=self.recording)

    def step(self, grads: Tensor, loss: Tensor, update: Tensor) -> None:
        """Keeps the step that was made with `grads`."""
        self.grads.append(self.rows.keep(self._part(grads), self.dtype))
        if self.updates is not None:
            self.updates.append(self.rows.keep(self._part(update), self.dtype))
        self.losses.append(loss)
        means, wholes, controls = self.recorder.meeting
        wholes = {name: self.rows.keep(self._part(value), self.dtype) for name, value in wholes.items()}
        self.meetings.append(Meeting(means, wholes, controls))

    def sources(
        self, measured: Sequence[tuple[LossAndGradient, Tensor]], following: LossAndGradient | None = None
    ) -> None:
        """∂(meta-loss)/∂θ after the last step, Σ weight·gradient; `following` is what the next step works with."""
        last = len(self.grads) - 1
        for one, weight in measured:
            if one is following:
                self.scales[last] = weight
                continue
            vector = self._part(weight[..., None] * one.grads)
            if last in self.extras:
                self.extras[last] += vector
            else:
                self.extras[last] = self.rows.keep(vector, self.dtype)

    def window(self, low: int, high: int, weights: Tensor | None = None) -> Window:
        """Coordinates `low` … `high` − 1 of those replayed, their sources times `weights` [m]."""
        params = self.params[..., low:high]
        grads = _stacked(self.grads, low, high).to(params.dtype)
        updates = None if self.updates is None else _stacked(self.updates, low, high).to(params.dtype)
        sources = torch.zeros_like(grads)
        for step, scale in self.scales.items():
            # The next step has worked with this gradient, so it is in the record already.
            torch.mul(grads[step + 1], scale[..., None], out=sources[step])
        for step, extra in self.extras.items():
            sources[step] += extra[..., low:high]
        if weights is not None:
            sources *= weights[low:high]
        layout = self.layout.slice(low, high)
        coordinates = {name: value[..., low:high] for name, value in self.coordinates.items()}
        groups = {
            kind: {name: copies_of(layout, kind, value) for name, value in values.items()}
            for kind, values in self.groups.items()
        }
        state = OptimiserState(layout, coordinates, groups, self.shared)
        meetings = [
            meeting._replace(wholes={name: value[..., low:high] for name, value in meeting.wholes.items()})
            for meeting in self.meetings
        ]
        return Window(state, params, grads, sources, torch.stack(self.losses), meetings, updates)

    def _part(self, values: Tensor) -> Tensor:
        return values if self.select is None else values.index_select(-1, self.select)


def _stacked(rows: Sequence[Tensor], low: int, high: int) -> Tensor:
    """Coordinates `low` … `high` − 1 of each step, a copy."""
    return torch.stack([row[..., low:high] for row in rows])


def copies_of(layout: Layout, kind: str, values: Tensor) -> Tensor:
    """Numbers of the whole vector's groups as the copies that a slice's coordinates carry."""
    grouping = layout.grouping(kind)
    assert isinstance(grouping, SlicedGrouping)
    return grouping.at(values)


def first_of(state: OptimiserState, count: int) -> OptimiserState:
    """The first coordinates of a state; numbers per group as copies that they carry."""
    layout = state.layout.slice(0, count)
    coordinates = {name: value[..., :count].clone() for name, value in state.coordinates.items()}
    groups = {
        kind: {name: copies_of(layout, kind, value) for name, value in values.items()}
        for kind, values in state.groups.items()
    }
    return OptimiserState(layout, coordinates, groups, state.shared)
