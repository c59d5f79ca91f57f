"""The contract of a feed: the products that bring x and h to the gates, inside and outside the loop over time."""

from abc import ABC, abstractmethod

from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.pointwise import Span


class Feed(ABC):
    """Computes z [T, B, K·M], the arguments of the gates, from x [T, B, N] and h [T, B, M]; an object for each call.

    Products with x do not depend on the order of the steps: `hoist` computes them for all steps at once, one large
    product instead of T small ones. Products with h stay in the loop.

    Args:
        blocks: name → range of blocks of z.
        w: Weights; those of products may have a lower precision than z.
        x: Inputs.
        h: States before each step; the steps fill it in while they run.
        z: Blocks; in the backward pass they hold the values of the gates.
        tape: Tensors for the backward pass beside z, by name; empty before the forward pass.
    """

    def __init__(self, blocks: dict[str, Span], w: Params, x: Tensor, h: Tensor, z: Tensor, tape: Params) -> None:
        self.blocks, self.w, self.x, self.h, self.z, self.tape = blocks, w, x, h, z, tape

    @abstractmethod
    def hoist(self) -> None:
        """Writes the part of z that does not depend on h, for all steps, and prepares `step`."""

    @abstractmethod
    def step(self, t: int, h: Tensor) -> None:
        """Adds the products with h to the blocks of step t."""

    @abstractmethod
    def prepare_back(self, d: Tensor) -> None:
        """Prepares `step_back`; d [T, B, K·M] holds the adjoints of z, filled in step by step."""

    @abstractmethod
    def step_back(self, t: int, dh: Tensor) -> None:
        """Adds the contribution of step t, through its blocks, to dh, the adjoint of h."""

    @abstractmethod
    def weight_gradients(self) -> Params:
        """The gradients of the weights, after all steps: for each a single product over time and batch."""

    @abstractmethod
    def input_gradient(self) -> Tensor:
        """The gradient of x; to be called after `weight_gradients`, whose inputs it may overwrite."""

    def part(self, z: Tensor, name: str) -> Tensor:
        """The named blocks of z or its adjoint, [T, B, K·M]."""
        m = self.h.shape[2]
        return z[..., self.blocks[name][0] * m : self.blocks[name][1] * m]

    def buffer(self, name: str, size: int) -> Tensor:
        """A tensor [T, B, size] of the tape; made when it is first asked for."""
        # On the tape, so that the backward pass finds in it what the steps have written.
        if name not in self.tape:
            self.tape[name] = products.room(self.z, *self.z.shape[:2], size)
        return self.tape[name]

    def outer(self, adjoints: Tensor, x: Tensor, name: str) -> Tensor:
        """The gradient of w[name], from the adjoints of w x."""
        return products.outer(adjoints, x, self.w[name].dtype)
