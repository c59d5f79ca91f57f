"""What a first-order unroll keeps of its window: gradients, sources and what is shared, no tape."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from l2lopt.core.types import OptimiserState, Params, Window
from l2lopt.estimators.loss_and_gradient import Measured


class Rows:
    """Vectors kept from window to window and used again: fresh memory would cost more than what is written to it.

    Args:
        folder: where the vectors lie as memory-mapped files, which vanish with the process; None keeps them in memory.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.made: list[Tensor] = []
        self._used = 0

    def keep(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `values` in `dtype`."""
        fits = self._used < len(self.made)
        last = self.made[self._used] if fits else values.new_empty(0)
        if last.shape != values.shape or last.dtype != dtype or last.device != values.device:
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
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:  # unlinked at once, the mapping keeps it alive
            mapped = torch.from_file(file.name, shared=True, size=values.numel(), dtype=dtype)
        return mapped.view(values.shape)


class Record:
    """The window under way, for the coordinates that are replayed.

    The direct source at θ after step t is scale_t g_{t+1} + extra_t: a target on the next step's own batch needs no
    vector of its own.

    Args:
        state: the optimiser's before the window, of the coordinates replayed; not changed while the record lives.
        params: θ before the window, [*batch, n].
        rows: where the vectors go.
        dtype: of the vectors.
        select: the coordinates [m] that are replayed; None for all.
    """

    def __init__(
        self, state: OptimiserState, params: Tensor, rows: Rows, dtype: torch.dtype, select: Tensor | None = None
    ) -> None:
        self.state, self.select, self.rows, self.dtype = state, select, rows, dtype
        self.params = self._part(params)
        self.grads: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.shared: list[Params] = []
        self.scales: dict[int, Tensor] = {}
        self.extras: dict[int, Tensor] = {}

    def stored(self, grads: Tensor) -> Tensor:
        """The gradient as the record will give it back."""
        return grads.to(self.dtype).to(grads.dtype)

    def step(self, grads: Tensor, loss: Tensor, shared: Params) -> None:
        """A step was made with `grads` and left `shared`."""
        self.grads.append(self.rows.keep(self._part(grads), self.dtype))
        self.losses.append(loss)
        self.shared.append({name: value.clone() for name, value in shared.items()})

    def sources(self, measured: Sequence[tuple[Measured, Tensor]], following: Measured | None = None) -> None:
        """∂(meta-loss)/∂θ after the last step, Σ slope·gradient; `following` is what the next step works with."""
        last = len(self.grads) - 1
        for one, slope in measured:
            if one is following:
                self.scales[last] = slope
                continue
            vector = self._part(slope[..., None] * one.grads)
            if last in self.extras:
                self.extras[last] += vector
            else:
                self.extras[last] = self.rows.keep(vector, self.dtype)

    def window(self, low: int, high: int, weights: Tensor | None = None) -> Window:
        """Coordinates `low` … `high` − 1 of those replayed, their sources times `weights` [m]."""
        params = self.params[..., low:high]
        grads = torch.stack([row[..., low:high] for row in self.grads]).to(params.dtype)
        sources = torch.zeros_like(grads)
        for step, scale in self.scales.items():
            torch.mul(grads[step + 1], scale[..., None], out=sources[step])
        for step, extra in self.extras.items():
            sources[step] += extra[..., low:high]
        if weights is not None:
            sources *= weights[low:high]
        coordinates = {name: value[..., low:high] for name, value in self.state.coordinates.items()}
        state = OptimiserState(self.state.layout.between(low, high), coordinates, self.state.shared)
        return Window(state, params, grads, sources, torch.stack(self.losses), self.shared)

    def _part(self, values: Tensor) -> Tensor:
        return values if self.select is None else values.index_select(-1, self.select)
