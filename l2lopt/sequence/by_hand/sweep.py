"""The contract of a hand-derived pass over time, and the order of its steps: direction and lengths."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.cells import CellState
from l2lopt.core.layout import Params
from l2lopt.sequence.by_hand import products


class TimeOrder(NamedTuple):
    """The order of a call's steps, and the steps that count.

    Attributes:
        reverse: Whether the pass runs from the last step to the first.
        alive: False for steps after the end of a sequence, [T, B, 1]; None if no sequence ends early.
    """

    reverse: bool
    alive: Tensor | None

    def order(self, steps: int) -> Sequence[int]:
        """The numbers of the steps in the order in which they run."""
        return range(steps)[::-1] if self.reverse else range(steps)

    def around(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Views of states [T + 1, ...]: those before and those after each step, both indexed by step.

        The initial state is at index 0, or at the end for `reverse`: then step t leads from t + 1 to t.
        """
        return (states[1:], states[:-1]) if self.reverse else (states[:-1], states[1:])

    def ends(self) -> tuple[int, int]:
        """The indices of the initial and the final state in [T + 1, ...]."""
        return (-1, 0) if self.reverse else (0, -1)

    def states(self, initial: Tensor, steps: int) -> Tensor:
        """Memory for all states, [T + 1, *shape], with the initial one written."""
        states = products.room(initial, steps + 1, *initial.shape)
        states[self.ends()[0]] = initial
        return states

    def adjoints(self, outputs: Tensor, final: Tensor) -> Tensor:
        """The adjoints of states [T + 1, ...] before the backward pass: those of the outputs and of the final state."""
        adjoints = self.states(torch.zeros_like(final), len(outputs))
        self.around(adjoints)[1].copy_(self.visible(outputs))
        # Added and not written: the adjoint of the last output may stand there already.
        adjoints[self.ends()[1]] += final
        return adjoints

    def visible(self, x: Tensor) -> Tensor:
        """X [T, B, ...] with zeros for steps after the end of a sequence."""
        # Not a product with a mask: NaN · 0 is NaN.
        return x if self.alive is None else torch.where(self.alive, x, 0.0)


class Adjoints(NamedTuple):
    """The input of a backward pass.

    Attributes:
        outputs: Adjoints of the outputs, [T, B, M].
        state: Adjoints of the final state, name → [B, size].
        of_x: Whether the gradient of x is wanted.
        of_weights: Whether the gradients of the weights are wanted.
    """

    outputs: Tensor
    state: CellState
    of_x: bool
    of_weights: bool


class Sweep(ABC):
    """All steps of a cell, forward and backward, features last: x [T, B, N], states name → [B, size]."""

    @abstractmethod
    def prepare(self, w: Params) -> Params:
        """The cell's weights in the form that the steps use; autograd differentiates this function."""

    @abstractmethod
    def forward(self, time: TimeOrder, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """The outputs [T, B, M], the final state, and the tape: tensors for `backward` beside the arguments."""

    @abstractmethod
    def backward(
        self, time: TimeOrder, x: Tensor, state: CellState, w: Params, tape: Params, adjoints: Adjoints
    ) -> tuple[Tensor | None, CellState, Params]:
        """The gradients of x, of the initial state and of w; None for x, and none for w, if they are not wanted."""
