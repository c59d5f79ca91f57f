"""How h reaches the gates, and back: what is taken out of the time loop, and the products that stay in it."""

from abc import ABC, abstractmethod

from torch import Tensor

from l2lopt.core.types import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.pointwise import Span


class Feed(ABC):
    """One call's way from x [T, B, N] and h [T, B, M], the states before each step, to z [T, B, K·M], the blocks.

    Args:
        blocks: name → which blocks of z.
        w: the weights; those of products may be of a lower precision than z.
        x: the inputs.
        h: the states before; the steps fill it in as they run.
        z: the blocks, with their final values on the way back.
        tape: what the steps keep beside z for the way back; empty before them.
    """

    def __init__(self, blocks: dict[str, Span], w: Params, x: Tensor, h: Tensor, z: Tensor, tape: Params) -> None:
        self.blocks, self.w, self.x, self.h, self.z, self.tape = blocks, w, x, h, z, tape

    @abstractmethod
    def hoist(self) -> None:
        """Writes into z all that does not depend on h, and prepares for the steps."""

    @abstractmethod
    def step(self, t: int, h: Tensor) -> None:
        """Adds to the blocks of step t what comes from h."""

    @abstractmethod
    def prepare_back(self, d: Tensor) -> None:
        """Prepares for the steps back, of slopes d [T, B, K·M]."""

    @abstractmethod
    def step_back(self, t: int, dh: Tensor) -> None:
        """Adds to dh, the slope of h, what comes from the slopes of step t."""

    @abstractmethod
    def weight_slopes(self) -> Params:
        """Those of the weights, after all steps: a product each over time and batch."""

    @abstractmethod
    def input_slopes(self) -> Tensor:
        """Those of x, likewise; after `weight_slopes`."""

    def part(self, z: Tensor, name: str) -> Tensor:
        """The named blocks of [T, B, K·M]."""
        m = self.h.shape[2]
        return z[..., self.blocks[name][0] * m : self.blocks[name][1] * m]

    def buffer(self, name: str, size: int) -> Tensor:
        """A part [T, B, size] of the tape: a new one before the steps."""
        if name not in self.tape:
            self.tape[name] = products.room(self.z, *self.z.shape[:2], size)
        return self.tape[name]

    def outer(self, slopes: Tensor, x: Tensor, name: str) -> Tensor:
        """The slope of w[name], with those of w x."""
        return products.outer(slopes, x, self.w[name].dtype)
