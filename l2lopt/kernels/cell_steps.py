"""The cells' steps and their adjoints on the multiplied-out products, written by hand into memory used again."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from l2lopt.kernels.folding import Folded
from l2lopt.kernels.trace import Trace
from l2lopt.kernels.workspace import Workspace

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input
MINUS = torch.tensor(-1.0)


class CellSteps(ABC):
    """c' = f∘c + i∘a, h' = o∘tanh c' over the steps of a trace, and the way back.

    The gates are kept, not computed again: that costs 1/4 more time and saves 2/3 of the memory, which is
    4 (F + 7M + 1) bytes per coordinate and step of an LSTM in float32, 572 with two features and M = 20.

    The weights' gradients are taken transposed, of [F + M + 1, P] by [P, 4M]: the narrow side first is twice as fast.

    Args:
        folded: the products.
        trace: of the window.
        below: the columns of `folded.first` whose rows need an adjoint: θ's, if it is a feature, then those of h.
        space: where the numbers go.
    """

    def __init__(self, folded: Folded, trace: Trace, below: Tensor, space: Workspace) -> None:
        self.folded, self.trace = folded, trace
        steps, self.size, count = len(trace.outputs), trace.c.shape[1], trace.c.shape[2]
        self.tanh_c = space.take("tanh c", steps, self.size, count, like=trace.c)
        self.scratch = space.take("scratch", self.size, count, like=trace.c)
        self.first = folded.first.new_zeros(folded.first.shape[::-1])
        self.back = folded.first[:, below].T.contiguous()

    @abstractmethod
    def gates(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """i, f, o and a [M, P] of step t, computed forward."""

    @abstractmethod
    def kept(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, as they were kept."""

    @abstractmethod
    def slopes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where the adjoints of i, f, o and a belong."""

    @abstractmethod
    def products(self, t: int) -> Tensor:
        """From the adjoints in `slopes` to that of the first product's rows, those of later products added up."""

    @abstractmethod
    def gradient(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """With respect to `first`, `second` and `second_bias`."""

    def forward(self, t: int) -> None:
        """From h and c of index t to those of t + 1; the coordinates that are skipped keep theirs."""
        trace = self.trace
        i, f, o, a = self.gates(t)
        before, c, tanh_c = trace.c[t], trace.c[t + 1], self.tanh_c[t]
        torch.mul(f, before, out=c).addcmul_(i, a)
        tanh_of_half_(torch.mul(c, 2, out=tanh_c))
        torch.mul(o, tanh_c, out=trace.hidden[t + 1])
        trace.keep(t, before, c)
        trace.keep(t, trace.hidden[t], trace.hidden[t + 1])

    def backward(self, t: int, dh: Tensor, dc: Tensor, below: Tensor) -> None:
        """From the adjoints of h' and c' to those of the rows `below` (which may hold dh) and, in place, of c."""
        i, f, o, a = self.kept(t)
        di, df, do, da = self.slopes()
        tanh_c, scratch = self.tanh_c[t], self.scratch
        torch.mul(dh, tanh_c, out=do)
        torch.mul(dh, o, out=scratch)
        dc.add_(tanh_backward(scratch, tanh_c, grad_input=scratch))
        torch.mul(dc, a, out=di)
        torch.mul(dc, self.trace.c[t], out=df)
        torch.mul(dc, i, out=da)
        dc.mul_(f)
        rows = self.products(t)
        self.first.addmm_(self.trace.rows[t], rows.T)
        torch.mm(self.back, rows, out=below)


class LSTMSteps(CellSteps):
    """i, f, o = σ, a = tanh of the first product's rows."""

    def __init__(self, folded: Folded, trace: Trace, below: Tensor, space: Workspace) -> None:
        super().__init__(folded, trace, below, space)
        steps, count, M = len(trace.outputs), trace.c.shape[2], self.size
        self.rows = space.take("gates", steps, 4 * M, count, like=trace.c)
        self.adjoint = space.take("gates' adjoint", 4 * M, count, like=trace.c)
        self.doubled = folded.first.clone()
        self.doubled[3 * M :] *= 2

    def gates(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One product and the activations."""
        rows = torch.mm(self.doubled, self.trace.rows[t], out=self.rows[t])
        rows[: 3 * self.size].sigmoid_()
        tanh_of_half_(rows[3 * self.size :])
        return self.kept(t)

    def kept(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four parts of the product's rows."""
        return self.rows[t].chunk(4)  # type: ignore[return-value]  # four parts

    def slopes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four parts of the rows' adjoint."""
        return self.adjoint.chunk(4)  # type: ignore[return-value]  # four parts

    def products(self, t: int) -> Tensor:
        """σ' and tanh'."""
        sigmoids, a = self.adjoint[: 3 * self.size], self.adjoint[3 * self.size :]
        sigmoid_backward(sigmoids, self.rows[t, : 3 * self.size], grad_input=sigmoids)
        tanh_backward(a, self.rows[t, 3 * self.size :], grad_input=a)
        return self.adjoint

    def gradient(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of the one product."""
        return self.first.T, None, None


class IHCLSTMSteps(CellSteps):
    """v = x + g∘(F(h) − x), g = σ, from the first product's rows; f, i, o = σ(W v + b); a linear."""

    def __init__(self, folded: Folded, trace: Trace, below: Tensor, space: Workspace) -> None:
        super().__init__(folded, trace, below, space)
        assert folded.second is not None
        steps, count, M = len(trace.outputs), trace.c.shape[2], self.size
        N = self.inputs = folded.second.shape[1]
        bias = folded.second_bias
        bias = folded.second.new_zeros(3 * M) if bias is None else bias
        self.second = torch.cat([folded.second, bias[:, None]], dim=1)
        self.second_back = folded.second.T.contiguous()
        self.second_gradient = self.second.new_zeros(N + 1, 3 * M)
        self.rows = space.take("highway", steps, 3 * N + M, count, like=trace.c)
        self.sigmoids = space.take("gates", steps, 3 * M, count, like=trace.c)
        self.mixed = space.take("v", N + 1, count, like=trace.c)
        self.mixed[N:] = 1
        self.adjoint = space.take("highway's adjoint", 3 * N + M, count, like=trace.c)
        self.gates_adjoint = space.take("gates' adjoint", 3 * M, count, like=trace.c)
        self.mixed_adjoint = space.take("v's adjoint", N, count, like=trace.c)

    def gates(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Two products; F(h) − x takes the place of F(h)."""
        g, back, x, _ = self._parts(torch.mm(self.folded.first, self.trace.rows[t], out=self.rows[t]))
        g.sigmoid_()
        back.sub_(x)
        self._mix(t)
        torch.mm(self.second, self.mixed, out=self.sigmoids[t]).sigmoid_()
        return self.kept(t)

    def kept(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The second product's rows and the last of the first's."""
        f, i, o = self.sigmoids[t].chunk(3)
        return i, f, o, self.rows[t, 3 * self.inputs :]

    def slopes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Likewise."""
        f, i, o = self.gates_adjoint.chunk(3)
        return i, f, o, self.adjoint[3 * self.inputs :]

    def products(self, t: int) -> Tensor:
        """Through the second product and the highway."""
        gates, dv = self.gates_adjoint, self.mixed_adjoint
        sigmoid_backward(gates, self.sigmoids[t], grad_input=gates)
        self._mix(t)
        self.second_gradient.addmm_(self.mixed, gates.T)
        torch.mm(self.second_back, gates, out=dv)
        g, less, _, _ = self._parts(self.rows[t])
        dg, dback, dx, _ = self._parts(self.adjoint)
        torch.mul(dv, g, out=dback)
        torch.sub(dv, dback, out=dx)
        sigmoid_backward(dv.mul_(less), g, grad_input=dg)
        return self.adjoint

    def gradient(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of both products."""
        N = self.inputs
        bias = None if self.folded.second_bias is None else self.second_gradient[N]
        return self.first.T, self.second_gradient[:N].T, bias

    def _mix(self, t: int) -> None:
        g, less, x, _ = self._parts(self.rows[t])
        torch.addcmul(x, g, less, out=self.mixed[: self.inputs])

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        N = self.inputs
        return rows[:N], rows[N : 2 * N], rows[2 * N : 3 * N], rows[3 * N :]


def tanh_of_half_(x: Tensor) -> Tensor:
    """tanh(x / 2) = 2 σ(x) − 1 in place, to an absolute error of one rounding of 1.

    PyTorch's tanh takes MKL's, which off Intel's processors costs 2.5 ns an element, six times σ.
    """
    return torch.add(MINUS, x.sigmoid_(), alpha=2, out=x)
