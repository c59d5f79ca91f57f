"""The cells' steps and their adjoints on the multiplied-out products, written by hand into memory used again."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.kernels.cpu.trace import Trace
from l2lopt.kernels.cpu.workspace import Workspace
from l2lopt.kernels.folding import Folded

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input
MINUS = torch.tensor(-1.0)


class Gates(NamedTuple):
    """A number [M, P] for each gate and for the candidate: its value, or the adjoint of the sum in it."""

    i: Tensor
    f: Tensor
    o: Tensor
    a: Tensor


class Slopes(NamedTuple):
    """The slopes of c' in the sums of i, f and a and in c, those of h' in the sum of o and in c', each [M, P]."""

    i: Tensor
    f: Tensor
    a: Tensor
    c: Tensor
    o: Tensor
    tanh: Tensor


class CellSteps(ABC):
    """c' = f∘c + i∘a, h' = o∘tanh c' over the steps of a trace, and the way back.

    A step keeps the slopes of these sums and products, so that the way back is one pass for each. With the features
    and h they take 4 (F + 7M + 1) bytes per coordinate and step of an LSTM in float32, 572 with two features and
    M = 20, and 4 (F + 7M + 3N + 2) of an IHC-LSTM. To compute the gates again on the way back would save two thirds of
    it and cost a product and five activations.

    The weights' gradients are taken transposed, [F + M + 1, P] by [P, rows]: with the narrow side first the product
    is nearly twice as fast.

    Args:
        folded: the products.
        trace: of the window.
        c: the memory before the first step, [M, ...].
        below: the columns of `folded.first` that need an adjoint: θ's, where it is a feature, then those of h.
        space: where the numbers go.
    """

    adjoints: Gates
    """Where the adjoints of the sums belong."""

    def __init__(self, folded: Folded, trace: Trace, c: Tensor, below: Tensor, space: Workspace) -> None:
        self.folded, self.trace, self.space = folded, trace, space
        self.size, self.steps, self.count = len(c), len(trace.outputs), trace.grads[0].numel()
        self.c, self.c_after, self.tanh_c = self.take("c", 3, self.size).unbind()
        self.c.view(c.shape).copy_(c)
        self.kept = [Slopes(*step.unbind()) for step in self.take("slopes", self.steps, 6, self.size).unbind()]
        self.back = folded.first[:, below].T.contiguous()
        self.first = folded.first.new_zeros(folded.first.shape[::-1])

    def take(self, name: str, *shape: int) -> Tensor:
        """Memory for numbers [*shape, P]."""
        return self.space.take(name, *shape, self.count, like=self.folded.first)

    @abstractmethod
    def gates(self, t: int) -> Gates:
        """The gates of step t; the next step overwrites them."""

    @abstractmethod
    def candidate(self, gates: Gates, out: Tensor) -> None:
        """The slope of i∘a in the sum of a."""

    @abstractmethod
    def products(self, t: int) -> Tensor:
        """From `adjoints` to the adjoint of the first product's rows; the later products' gradients are added up."""

    @abstractmethod
    def gradient(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """With respect to `first`, `second` and `second_bias`."""

    def forward(self, t: int) -> None:
        """From h and c before step t to those after it; the coordinates that are skipped keep theirs."""
        trace, gates, slopes = self.trace, self.gates(t), self.kept[t]
        i, f, o, a = gates
        torch.mul(f, self.c, out=self.c_after).addcmul_(i, a)
        tanh_c = tanh_of_half_(torch.add(self.c_after, self.c_after, out=self.tanh_c))
        torch.mul(o, tanh_c, out=trace.hidden[t + 1])
        sigmoid_backward(a, i, grad_input=slopes.i)
        sigmoid_backward(self.c, f, grad_input=slopes.f)
        self.candidate(gates, slopes.a)
        slopes.c.copy_(f)
        sigmoid_backward(tanh_c, o, grad_input=slopes.o)
        tanh_backward(o, tanh_c, grad_input=slopes.tanh)
        trace.keep(t, self.c, self.c_after)
        trace.keep(t, trace.hidden[t], trace.hidden[t + 1])
        self.c, self.c_after = self.c_after, self.c

    def backward(self, t: int, dh: Tensor, dc: Tensor, below: Tensor) -> None:
        """From the adjoints of h' and c' to those of the rows `below` (which may hold dh) and, in place, of c."""
        slopes, adjoints = self.kept[t], self.adjoints
        torch.mul(dh, slopes.o, out=adjoints.o)
        dc.addcmul_(dh, slopes.tanh)
        torch.mul(dc, slopes.i, out=adjoints.i)
        torch.mul(dc, slopes.f, out=adjoints.f)
        torch.mul(dc, slopes.a, out=adjoints.a)
        dc.mul_(slopes.c)
        rows = self.products(t)
        self.first.addmm_(self.trace.rows[t], rows.T)
        torch.mm(self.back, rows[: self.back.shape[1]], out=below)


class LSTMSteps(CellSteps):
    """i, f, o = σ and a = tanh of the first product's rows."""

    def __init__(self, folded: Folded, trace: Trace, c: Tensor, below: Tensor, space: Workspace) -> None:
        super().__init__(folded, trace, c, below, space)
        M = self.size
        self.rows, self.adjoint = self.take("gates", 4 * M), self.take("gates' adjoint", 4 * M)
        self.now, self.adjoints = Gates(*self.rows.chunk(4)), Gates(*self.adjoint.chunk(4))
        self.sigmoids = self.rows[: 3 * M]
        self.doubled = folded.first.clone()
        self.doubled[3 * M :] *= 2

    def gates(self, t: int) -> Gates:
        """One product and the activations."""
        torch.mm(self.doubled, self.trace.rows[t], out=self.rows)
        self.sigmoids.sigmoid_()
        tanh_of_half_(self.now.a)
        return self.now

    def candidate(self, gates: Gates, out: Tensor) -> None:
        """i(1 − a²)."""
        tanh_backward(gates.i, gates.a, grad_input=out)

    def products(self, t: int) -> Tensor:
        """There is no other."""
        return self.adjoint

    def gradient(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of the one product."""
        return self.first.T, None, None


class IHCLSTMSteps(CellSteps):
    """v = x + g∘(F(h) − x), g = σ, from the first product's rows; f, i, o = σ(W v + b); a linear."""

    def __init__(self, folded: Folded, trace: Trace, c: Tensor, below: Tensor, space: Workspace) -> None:
        super().__init__(folded, trace, c, below, space)
        assert folded.second is not None
        M, N, bias = self.size, folded.second.shape[1], folded.second_bias
        self.second_bias = folded.second.new_zeros(3 * M) if bias is None else bias
        self.second = torch.cat([folded.second, self.second_bias[:, None]], dim=1)
        self.second_back = folded.second.T.contiguous()
        self.of_second = self.second.new_zeros(N + 1, 3 * M)
        if len(below) == M:  # x and a do not depend on h
            self.back = self.back[:, : 2 * N].contiguous()
        parts = (N, N, N, M)
        self.rows, self.adjoint = self.take("highway", 3 * N + M), self.take("highway's adjoint", 3 * N + M)
        self.g, self.back_h, self.x, a = self.rows.split(parts)
        self.of_g, self.of_back, self.of_x, of_a = self.adjoint.split(parts)
        self.sigmoids, self.of_sigmoids = self.take("gates", 3 * M), self.take("gates' adjoint", 3 * M)
        f, i, o = self.sigmoids.chunk(3)
        self.now = Gates(i, f, o, a)
        f, i, o = self.of_sigmoids.chunk(3)
        self.adjoints = Gates(i, f, o, of_a)
        self.dv = self.take("v's adjoint", N)
        mixed = self.take("v", self.steps, N + 1)
        mixed[:, N] = 1
        self.mixed, self.v = mixed.unbind(), mixed[:, :N].unbind()
        self.by_g, self.by_back = (part.unbind() for part in self.take("highway's slopes", 2, self.steps, N).unbind())

    def gates(self, t: int) -> Gates:
        """Two products, the slopes of v in g's sum and in F(h) kept."""
        torch.mm(self.folded.first, self.trace.rows[t], out=self.rows)
        torch.sigmoid(self.g, out=self.by_back[t])
        self.back_h.sub_(self.x)
        torch.addcmul(self.x, self.by_back[t], self.back_h, out=self.v[t])
        sigmoid_backward(self.back_h, self.by_back[t], grad_input=self.by_g[t])
        torch.mm(self.second, self.mixed[t], out=self.sigmoids).sigmoid_()
        return self.now

    def candidate(self, gates: Gates, out: Tensor) -> None:
        """I."""
        out.copy_(gates.i)

    def products(self, t: int) -> Tensor:
        """Through the second product and the highway."""
        self.of_second.addmm_(self.mixed[t], self.of_sigmoids.T)
        torch.mm(self.second_back, self.of_sigmoids, out=self.dv)
        torch.mul(self.dv, self.by_g[t], out=self.of_g)
        torch.mul(self.dv, self.by_back[t], out=self.of_back)
        torch.sub(self.dv, self.of_back, out=self.of_x)
        return self.adjoint

    def gradient(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of both products."""
        bias = None if self.folded.second_bias is None else self.of_second[-1]
        return self.first.T, self.of_second[:-1].T, bias


def tanh_of_half_(x: Tensor) -> Tensor:
    """tanh(x / 2) = 2 σ(x) − 1 in place, to an absolute error of about one rounding of 1.

    PyTorch's own tanh is MKL's, which off Intel's processors costs 2.5 ns an element, six times σ. Near 0 digits are
    lost: float32 meta-gradients err by 3e-7, twice autograd's error, and by 2e-6 with a cell of tiny weights.
    """
    return torch.add(MINUS, x.sigmoid_(), alpha=2, out=x)
