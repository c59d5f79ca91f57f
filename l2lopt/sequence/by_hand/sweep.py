"""The contract of a hand-derived pass over time, and how it goes there: direction, lengths, states."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.cells import CellState
from l2lopt.core.types import Params
from l2lopt.sequence.by_hand import products


class Way(NamedTuple):
    """How a call goes through time; alive [T, B, 1] is False where a sequence has ended, None if none ends early."""

    reverse: bool
    alive: Tensor | None

    def order(self, steps: int) -> Sequence[int]:
        """The steps as they are taken."""
        return range(steps)[::-1] if self.reverse else range(steps)

    def around(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Of [T + 1, ...], the states before and after each step; the initial one lies at the end it starts from."""
        return (states[1:], states[:-1]) if self.reverse else (states[:-1], states[1:])

    def ends(self) -> tuple[int, int]:
        """Where the initial and the final state lie in [T + 1, ...]."""
        return (-1, 0) if self.reverse else (0, -1)

    def states(self, initial: Tensor, steps: int) -> Tensor:
        """Room for them, [T + 1, *shape], with the initial one in place."""
        states = products.room(initial, steps + 1, *initial.shape)
        states[self.ends()[0]] = initial
        return states

    def slopes(self, outputs: Tensor, final: Tensor) -> Tensor:
        """The slopes of states [T + 1, ...] that come from the outputs' and the final state's."""
        slopes = self.states(torch.zeros_like(final), len(outputs))
        self.around(slopes)[1].copy_(self.visible(outputs))
        slopes[self.ends()[1]] += final
        return slopes

    def visible(self, x: Tensor) -> Tensor:
        """[T, B, ...] with zeros where a sequence has ended."""
        return x if self.alive is None else torch.where(self.alive, x, 0.0)


class Slopes(NamedTuple):
    """What a backward pass is given, and what is asked of it."""

    outputs: Tensor
    state: CellState
    of_x: bool
    of_weights: bool


class Sweep(ABC):
    """All steps of a cell, features last, and back: x [T, B, N], states name → [B, size]."""

    @abstractmethod
    def prepare(self, w: Params) -> Params:
        """The cell's weights in the form that the steps want, differentiable."""

    @abstractmethod
    def forward(self, way: Way, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """The outputs [T, B, M], the final state, and the tape: what `backward` needs beside the arguments."""

    @abstractmethod
    def backward(
        self, way: Way, x: Tensor, state: CellState, w: Params, tape: Params, slopes: Slopes
    ) -> tuple[Tensor | None, CellState, Params]:
        """The slopes of x and w, where they are asked for, and of the state; from those of outputs and final state."""
