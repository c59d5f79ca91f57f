"""Simplified cells: a highway makes v from x and h, a core makes the next state from v and x (Kuo et al., IJCNN 2020).

The gates are functions of v alone, and the candidate a = W_A x is a function of x alone: a candidate computed from v
would feed the memory with itself. Any core goes with any highway; `irc`, `ihc` and `no_irc` put them together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from l2lopt.cells.cell import Cell, CellState, affine, column, constant, same_size, uniform
from l2lopt.core.choices import checks_words


class Core(nn.Module, ABC):
    """The second half of a simplified cell: the gates σ(W v), the candidate W_A x and the next state.

    `weight_v` is W [gates·M, N], the gate of `gate_bias` first, and `weight_x` is W_A [M, N]: (gates + 1)·MN numbers.

    Args:
        input_size: N.
        hidden_size: M.
        gate_bias: Whether the first gate has an extra trainable bias [M], which starts at `bias_start`.
    """

    gates: ClassVar[int]
    state: ClassVar[tuple[str, ...]]
    """Names of the states, each [M, ...]; "h" is what the highway feeds back."""
    diagonal: ClassVar[bool] = False
    """Whether the paper feeds h back element by element, which needs N = M."""
    adds_x: ClassVar[bool] = False
    """Whether the output adds x element by element, which needs N = M."""
    bias_start: ClassVar[float] = 1.0

    def __init__(self, input_size: int, hidden_size: int, gate_bias: bool = False) -> None:
        super().__init__()
        self.weight_v = uniform(hidden_size, self.gates * hidden_size, input_size)
        self.weight_x = uniform(hidden_size, hidden_size, input_size)
        self.gate_bias = constant(gate_bias, self.bias_start, hidden_size)

    def extra_repr(self) -> str:
        """N and M, which `print` shows."""
        hidden_size, input_size = self.weight_x.shape
        return f"{input_size}, {hidden_size}"

    @abstractmethod
    def forward(self, v: Tensor, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step: v and x [N, ...] and the state to the output [M, ...] and the next state."""


class Feedback(nn.Module):
    """F(h), the previous output in the size of x: U_V h (NM numbers), or ω_V∘h with ω_V = tanh(raw) (N numbers).

    Args:
        input_size: N.
        hidden_size: M.
        diagonal: Whether F(h) is ω_V∘h; otherwise it is U_V h.
    """

    def __init__(self, input_size: int, hidden_size: int, diagonal: bool) -> None:
        super().__init__()
        shape = (input_size,) if diagonal else (input_size, hidden_size)
        self.weight_h = uniform(hidden_size, *shape)

    def forward(self, h: Tensor) -> Tensor:
        """[M, ...] to [N, ...]."""
        if self.weight_h.dim() == 1:
            return column(torch.tanh(self.weight_h), h) * h
        return affine(None, (self.weight_h, h))


class NoFeedback(nn.Module):
    """v = x, eqs. 12-13: the gates see the input alone. No numbers.

    "This simplified version of the GRU is no longer a real RNN" (Kuo et al.): the state is carried on, but no gate and
    no candidate reads it, so over time the cell is a linear scan. It is what an IRC with α = 0 computes, hence the
    ablation that shows what the IRC is worth.
    """

    recurrent_weights: ClassVar[tuple[str, ...]] = ()

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """The gates' input v [N, ...], x itself."""
        return x


class Residual(nn.Module):
    """The input residual connection (IRC), eq. 15: v = x + α∘F(h), α = σ(raw). N numbers beside the feedback's.

    Args:
        input_size: N.
        hidden_size: M.
        diagonal: Whether F(h) is ω_V∘h; otherwise it is U_V h.
    """

    recurrent_weights: ClassVar[tuple[str, ...]] = ("feedback.weight_h",)

    def __init__(self, input_size: int, hidden_size: int, diagonal: bool) -> None:
        super().__init__()
        self.feedback = Feedback(input_size, hidden_size, diagonal)
        self.alpha = uniform(hidden_size, input_size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """The gates' input v [N, ...] of x [N, ...] and h [M, ...]."""
        back: Tensor = self.feedback(h)
        return x + column(torch.sigmoid(self.alpha), x) * back


class Highway(nn.Module):
    """The input highway connection (IHC), eqs. 52-53: g = σ(W_G x + Γ h + b_G); v = (1−g)∘x + g∘F(h).

    Beside the feedback's, N² + N numbers for W_G and b_G, and NM for Γ. The paper prints Γ as [M, N], which cannot
    be multiplied with h: it is [N, M].

    Args:
        input_size: N.
        hidden_size: M.
        diagonal: Whether F(h) is ω_V∘h; otherwise it is U_V h.
        gate_input: Whether g has the terms W_G x and b_G; the authors' released language model has neither.
        gamma_on: Argument of Γ: "h" (eq. 53), or "uvh", F(h) with Γ [N, N], the reading that gives the paper's number
            of parameters for DRAW.
    """

    recurrent_weights: ClassVar[tuple[str, ...]] = ("gamma", "feedback.weight_h")

    @checks_words
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        diagonal: bool,
        gate_input: bool = True,
        gamma_on: Literal["h", "uvh"] = "h",
    ) -> None:
        super().__init__()
        self.feedback = Feedback(input_size, hidden_size, diagonal)
        self.gamma_on = gamma_on
        self.gamma = uniform(hidden_size, input_size, hidden_size if gamma_on == "h" else input_size)
        self.weight_g = uniform(hidden_size, input_size, input_size) if gate_input else None
        self.bias_g = uniform(hidden_size, input_size) if gate_input else None

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """The gates' input v [N, ...] of x [N, ...] and h [M, ...]."""
        back: Tensor = self.feedback(h)
        products = [(self.gamma, h if self.gamma_on == "h" else back)]
        if self.weight_g is not None:
            products.append((self.weight_g, x))
        g = torch.sigmoid(affine(self.bias_g, *products))
        return (1 - g) * x + g * back


class Simplified(Cell):
    """A core behind a highway: v from x and h, then the core's step on v and x.

    Args:
        input_size: N.
        hidden_size: M.
        highway: (x, h) → v.
        core: (v, x, state) → (output, state).
    """

    @property
    def recurrent_weights(self) -> tuple[str, ...]:
        """The highway's: everything through which h reaches v; none without feedback."""
        return tuple(f"highway.{name}" for name in self.highway.recurrent_weights)

    def __init__(self, input_size: int, hidden_size: int, highway: NoFeedback | Residual | Highway, core: Core) -> None:
        super().__init__(input_size, hidden_size, dict.fromkeys(core.state, hidden_size))
        self.highway, self.core = highway, core

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step."""
        self.check(x, state)
        output: tuple[Tensor, CellState] = self.core(self.highway(x, state["h"]), x, state)
        return output


def no_irc(name: str, core: type[Core]) -> Callable[..., Cell]:
    """The factory of a core whose gates see x itself."""

    def make(input_size: int, hidden_size: int, gate_bias: bool = False) -> Cell:
        if core.adds_x:
            same_size(name, input_size, hidden_size)
        return Simplified(input_size, hidden_size, NoFeedback(), core(input_size, hidden_size, gate_bias))

    return make


def irc(name: str, core: type[Core]) -> Callable[..., Cell]:
    """The factory of a core behind an IRC."""

    def make(input_size: int, hidden_size: int, gate_bias: bool = False) -> Cell:
        if core.diagonal:
            same_size(name, input_size, hidden_size)
        highway = Residual(input_size, hidden_size, core.diagonal)
        return Simplified(input_size, hidden_size, highway, core(input_size, hidden_size, gate_bias))

    return make


def ihc(name: str, core: type[Core]) -> Callable[..., Cell]:
    """The factory of a core behind an IHC."""

    def make(
        input_size: int,
        hidden_size: int,
        gate_bias: bool = False,
        gate_input: bool = True,
        gamma_on: Literal["h", "uvh"] = "h",
    ) -> Cell:
        if core.diagonal:
            same_size(name, input_size, hidden_size)
        highway = Highway(input_size, hidden_size, core.diagonal, gate_input, gamma_on)
        return Simplified(input_size, hidden_size, highway, core(input_size, hidden_size, gate_bias))

    return make
