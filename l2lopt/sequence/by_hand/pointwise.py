"""The element-wise part of each cell: a step forward, in place, and the factors of the backward pass.

z holds the arguments of the gates, side by side in blocks of M; a step overwrites them with the gates' values.

The backward pass is linear in dh and dc, the adjoints of h' and c':

    dc += k∘dh;   adjoint of a block = factor∘dh or factor∘dc (`by_h`, `by_c`);   direct path to the state before.

The factors depend on values of the forward pass alone. `factors` therefore computes them for all steps in one call of a
few large operations, and the loop over time, where dh and dc become known one step after another, only multiplies.
With s = σ(z) and a = tanh z the derivatives are σ'(z) = s(1 − s) and tanh'(z) = 1 − a².
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Params

Span = tuple[int, int]
"""A range of blocks: the first, and the one after the last."""


class PointwiseStep(NamedTuple):
    """The quantities of one step [B, M], or of many [T, B, M]."""

    z: Sequence[Tensor]
    h: Tensor
    c: Tensor
    h_next: Tensor
    c_next: Tensor
    kept: Tensor
    """One more quantity that the backward pass needs."""


class Pointwise(ABC):
    """The blocks of a cell, and the functions that turn them into its state."""

    blocks: int
    sigmoid: Span = (0, 0)
    """Blocks that hold σ(z). They lie side by side, so that the loop applies σ to all of them in one call."""
    by_h: tuple[Span, ...] = ()
    """Blocks whose adjoint is factor∘dh."""
    by_c: tuple[Span, ...] = ()
    """Blocks whose adjoint is factor∘dc."""
    with_c = False
    with_kept = False
    with_x = False
    """Whether the last block is x itself, as h' of the SRU adds it."""

    @abstractmethod
    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes h_next, c_next, kept, and the values of the blocks outside `sigmoid`."""

    @abstractmethod
    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """Writes the factors into d, block by block; gives k and the factor of the direct path.

        The direct path leads from c' to c if the cell has a c, otherwise from h' to h; None if there is no such path.
        """

    def scalars(self, dh: Tensor, s: PointwiseStep) -> Params:
        """The gradients of scalar weights, from dh of all steps."""
        return {}


def sigmoid_back(d: Tensor, adjoint: Tensor, value: Tensor) -> None:
    """Writes d = adjoint∘value∘(1 − value)."""
    # Autograd's own kernel: one pass without temporaries, and d may be the adjoint itself.
    torch.ops.aten.sigmoid_backward.grad_input(adjoint, value, grad_input=d)


def tanh_back(d: Tensor, adjoint: Tensor, value: Tensor) -> None:
    """Writes d = adjoint∘(1 − value²)."""
    torch.ops.aten.tanh_backward.grad_input(adjoint, value, grad_input=d)


def tanh(x: Tensor, out: Tensor) -> None:
    """Writes tanh x as 2σ(2x) − 1, in as little as a fifth of the time of `torch.tanh`.

    `torch.tanh` calls MKL's vector functions, which are slow on processors other than Intel's. The absolute error is a
    rounding error of 1, so small results lose relative precision; an argument that is the sum of a matrix product has
    an error of that size already.
    """
    torch.mul(x, 2, out=out).sigmoid_().mul_(2).sub_(1)


def activate(name: str, z: Tensor, out: Tensor) -> None:
    """Writes f(z) for the activation f of that name; `out` may be z itself."""
    if name == "tanh":
        tanh(z, out)
    elif name == "relu":
        # `torch.relu` has no `out`.
        torch.clamp(z, min=0, out=out)
    elif out is not z:
        out.copy_(z)


def activation_back(name: str, d: Tensor, adjoint: Tensor, value: Tensor) -> None:
    """Writes d = adjoint∘f'(z), from the value f(z); d may be the adjoint itself."""
    if name == "tanh":
        tanh_back(d, adjoint, value)
    elif name == "relu":
        # The derivative at 0 is 0, as that of PyTorch's relu.
        torch.mul(adjoint, value > 0, out=d)
    elif d is not adjoint:
        d.copy_(adjoint)


class RNN(Pointwise):
    """h' = f(z), f = tanh or relu."""

    blocks, by_h = 1, ((0, 1),)

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes h'."""
        activate(self.activation, s.z[0], s.h_next)

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """Writes f'(z)."""
        # d holds the ones that the kernel multiplies, then its result: no memory is needed beside it.
        activation_back(self.activation, d[0], d[0].fill_(1), s.h_next)
        return None, None


class Leaky(Pointwise):
    """h' = (1−ξ)∘h + ξ∘a, a = f(z); ξ [M] is a weight."""

    blocks, by_h = 1, ((0, 1),)

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes h'."""
        a = s.z[0]
        activate(self.activation, a, a)
        torch.lerp(s.h, a, w["xi"], out=s.h_next)

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """The factor of a; direct path 1 − ξ."""
        activation_back(self.activation, d[0], d[0].copy_(w["xi"]), s.z[0])
        return None, (1 - w["xi"]).expand_as(s.h)

    def scalars(self, dh: Tensor, s: PointwiseStep) -> Params:
        """For ξ, one value for each unit; those of a single ξ are added up by autograd, which has spread it."""
        return {"xi": (dh * (s.z[0] - s.h)).sum((0, 1))}


class LSTM(Pointwise):
    """c' = f∘c + i∘a; h' = o∘tanh c'. The blocks i, f, a, o with a = tanh(z), or the core's f, i, o, a with a = z."""

    blocks, with_c, with_kept = 4, True, True

    def __init__(self, core: bool) -> None:
        self.core, self.order = core, (1, 0, 2, 3) if core else (0, 1, 3, 2)
        self.sigmoid = (0, 3) if core else (0, 2)
        self.by_c = ((0, 2), (3, 4)) if core else ((0, 3),)
        self.by_h = ((2, 3),) if core else ((3, 4),)

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes c', tanh c' and h'."""
        i, f, o, a = (s.z[k] for k in self.order)
        if not self.core:
            # In PyTorch's order a lies between f and o, so o is outside the range that the loop treats in one call.
            o.sigmoid_()
            tanh(a, a)
        torch.mul(f, s.c, out=s.c_next).addcmul_(i, a)
        # Kept, because two factors of the backward pass need tanh c'.
        tanh(s.c_next, s.kept)
        torch.mul(o, s.kept, out=s.h_next)

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """The factors; k = o(1 − tanh² c'), direct path f."""
        (i, f, o, a), (di, df, do, da) = ([blocks[k] for k in self.order] for blocks in (s.z, d))
        sigmoid_back(di, a, i)
        sigmoid_back(df, s.c, f)
        sigmoid_back(do, s.kept, o)
        da.copy_(i) if self.core else tanh_back(da, i, a)
        k = torch.empty_like(s.kept)
        tanh_back(k, o, s.kept)
        # f itself and no copy: the loop over time only reads it.
        return k, f


class FastGRNN(Pointwise):
    """h' = f∘h + (β(1−f) + κ)∘a in the blocks f, a; a = tanh(z), or a = z and no κ in the core."""

    blocks, sigmoid, by_h = 2, (0, 1), ((0, 2),)

    def __init__(self, core: bool) -> None:
        self.core = core

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Computes h' = f∘(h − βa) + (β + κ)a: the same, with fewer operations."""
        f, a = s.z
        if not self.core:
            tanh(a, a)
        # −β and β + κ come as tensors: as a Python number each would have to be read back from the GPU.
        torch.addcmul(s.h, a, w["minus_beta"], out=s.h_next).mul_(f).addcmul_(a, w["share"])

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """The factors; direct path f."""
        (f, a), (df, da) = s.z, d
        torch.addcmul(s.h, a, w["minus_beta"], out=df)
        sigmoid_back(df, df, f)
        torch.addcmul(w["share"], f, w["minus_beta"], out=da)
        if not self.core:
            tanh_back(da, da, a)
        return None, f

    def scalars(self, dh: Tensor, s: PointwiseStep) -> Params:
        """For β and κ."""
        f, a = s.z
        weighted = dh * a
        kappa = {} if self.core else {"kappa": weighted.sum()}
        return {"beta": (weighted * (1 - f)).sum()} | kappa


class GRU(Pointwise):
    """h' = (1−i)∘h + i∘a for update="new", i∘h + (1−i)∘a for "kept".

    With reset="before" the blocks are r, i, a, with a = f(z) and z computed from r∘h by `ResetBefore`; with "after"
    they are a, r, i, q, with a = f(z + r∘q).
    """

    def __init__(self, update: str, reset: str, activation: str) -> None:
        self.kept, self.after, self.activation = update == "kept", reset == "after", activation
        self.blocks = 4 if self.after else 3
        self.sigmoid = (1, 3) if self.after else (0, 0)
        self.by_h = ((0, 4),) if self.after else ((1, 3),)

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes h'."""
        a, r, i = s.z[:3] if self.after else (s.z[2], *s.z[:2])
        if self.after:
            a.addcmul_(r, s.z[3])
        activate(self.activation, a, a)
        # One operation without temporaries, instead of a subtraction, two products and a sum.
        torch.lerp(*((a, s.h) if self.kept else (s.h, a)), i, out=s.h_next)

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """The factors; direct path i or 1 − i. With reset="before" `ResetBefore` completes that of r in the loop."""
        (a, r, i), (da, dr, di) = ((b[:3] if self.after else (b[2], *b[:2])) for b in (s.z, d))
        share = 1 - i
        torch.sub(*((s.h, a) if self.kept else (a, s.h)), out=di)
        sigmoid_back(di, di, i)
        activation_back(self.activation, da, share if self.kept else i, a)
        if self.after:
            # a = f(z + r∘q): the factor of z is that of the whole argument, and q and r share it.
            torch.mul(da, r, out=d[3])
            torch.mul(da, s.z[3], out=dr)
            sigmoid_back(dr, dr, r)
        else:
            sigmoid_back(dr, s.h, r)
        return None, i if self.kept else share


class GRUCore(Pointwise):
    """h' = (1−i)∘h + i∘(r∘a), with the blocks i, r, a and r∘a in `kept`."""

    blocks, sigmoid, by_h, with_kept = 3, (0, 2), ((0, 3),), True

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes h'."""
        i, r, a = s.z
        torch.mul(r, a, out=s.kept)
        torch.lerp(s.h, s.kept, i, out=s.h_next)

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """The factors; direct path 1 − i."""
        (i, r, a), (di, dr, da) = s.z, d
        torch.sub(s.kept, s.h, out=di)
        sigmoid_back(di, di, i)
        torch.mul(i, r, out=da)
        torch.mul(i, a, out=dr)
        sigmoid_back(dr, dr, r)
        return None, 1 - i


class SRUCore(Pointwise):
    """c' = f∘c + (1−f)∘a; h' = p∘c' + (1−p)∘x in the blocks f, p, a, x."""

    blocks, sigmoid, with_c, with_x = 4, (0, 2), True, True
    by_c, by_h = ((0, 1), (2, 3)), ((1, 2), (3, 4))

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes c' and h'."""
        f, p, a, x = s.z
        torch.lerp(a, s.c, f, out=s.c_next)
        torch.lerp(x, s.c_next, p, out=s.h_next)

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """The factors; k = p, direct path f."""
        (f, p, a, x), (df, dp, da, dx) = s.z, d
        torch.sub(s.c, a, out=df)
        sigmoid_back(df, df, f)
        torch.sub(s.c_next, x, out=dp)
        sigmoid_back(dp, dp, p)
        torch.sub(1, f, out=da)
        torch.sub(1, p, out=dx)
        # Views of the tape: the loop over time only reads them.
        return p, f


class TLSTMCore(Pointwise):
    """c' = f∘c + (1−f)∘a; h' = o∘c' in the blocks f, o, a."""

    blocks, sigmoid, with_c = 3, (0, 2), True
    by_c, by_h = ((0, 1), (2, 3)), ((1, 2),)

    def forward(self, s: PointwiseStep, w: Params) -> None:
        """Writes c' and h'."""
        f, o, a = s.z
        torch.lerp(a, s.c, f, out=s.c_next)
        torch.mul(o, s.c_next, out=s.h_next)

    def factors(self, d: Sequence[Tensor], s: PointwiseStep, w: Params) -> tuple[Tensor | None, Tensor | None]:
        """The factors; k = o, direct path f."""
        (f, o, a), (df, do, da) = s.z, d
        torch.sub(s.c, a, out=df)
        sigmoid_back(df, df, f)
        sigmoid_back(do, s.c_next, o)
        torch.sub(1, f, out=da)
        return o, f
