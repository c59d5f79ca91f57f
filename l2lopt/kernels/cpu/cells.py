"""The learned optimiser's cell on a block: forward for the step and the replay, and backward, written by hand.

All tensors are [features or hidden, B] with B coordinates. A step costs a handful of operations, each in memory that is
used again, so that a block stays in cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.kernels.cpu.activations import EXPONENT, sigmoid_backward, tanh_, tanh_backward
from l2lopt.kernels.folding import Folded

Take: TypeAlias = Callable[..., Tensor]
"""(name, *sizes) → memory [*sizes, B], its contents undefined."""


class Gates(NamedTuple):
    """The gates i, f, o and the candidate a, or the adjoints of their arguments; [M, B] each."""

    i: Tensor
    f: Tensor
    o: Tensor
    a: Tensor


class Highway(NamedTuple):
    """Memory for v of an IHC-LSTM; where nothing is recorded, `by_gate` is empty and `gate` overwrites g's argument.

    Attributes:
        v: [N, B].
        and_one: v and, where the second layer has a bias, a row of ones: the second product's argument.
        by_gate: ∂v/∂(argument of g), [N, B].
        gate: ∂v/∂F(h) = g, [N, B].
    """

    v: Tensor
    and_one: Tensor
    by_gate: Tensor
    gate: Tensor


class Buffers(NamedTuple):
    """Memory for one forward step; the next one overwrites it.

    Attributes:
        first: The first product, [4M, B] or [3N + M, B].
        parts: The four parts i, f, o, a of an LSTM; g, F(h) − x, x, a of an IHC-LSTM.
        second: The second product, [3M, B]; [0, B] for an LSTM.
        sigmoids: The gates that are σ of a product, [3M, B].
        gates: The gates and the candidate.
        scratch: [M, B]. It may overlap the rows of h in the first product's argument, which are read before.
        highway: Memory for v of an IHC-LSTM where nothing is recorded.
    """

    first: Tensor
    parts: Sequence[Tensor]
    second: Tensor
    sigmoids: Tensor
    gates: Gates
    scratch: Tensor
    highway: Highway | None = None


class Record(NamedTuple):
    """The derivatives of one step, which `backward` multiplies with.

    Attributes:
        i: ∂c'/∂(argument of i), [M, B].
        f: ∂c'/∂(argument of f), [M, B].
        a: ∂c'/∂(argument of a), [M, B].
        c: ∂c'/∂c = f, [M, B].
        o: ∂h'/∂(argument of o), [M, B].
        tanh: ∂h'/∂c', [M, B].
        highway: v of an IHC-LSTM and its derivatives.
    """

    i: Tensor
    f: Tensor
    a: Tensor
    c: Tensor
    o: Tensor
    tanh: Tensor
    highway: Highway | None


class Adjoint(NamedTuple):
    """Memory of the backward pass, and the weights' gradients summed over its steps.

    Attributes:
        rows: The adjoint of the first product, [4M, B] or [3N + M, B].
        parts: The four parts, in the order of `Folded.first`.
        sigmoids: The adjoint of the arguments of the three sigmoid gates, [3M, B].
        gates: The adjoints of the arguments of the gates and the candidate.
        v: The adjoint of v, [N, B]; [0, B] for an LSTM.
        back: The part of the first layer's transpose that leads to the rows whose adjoints are wanted.
        second_back: The second layer's transpose, without its bias; None for an LSTM.
        first: The gradient of `Folded.first`, transposed.
        second: The gradient of `Folded.second`, with its bias in a last row, transposed; None for an LSTM.
    """

    rows: Tensor
    parts: Sequence[Tensor]
    sigmoids: Tensor
    gates: Gates
    v: Tensor
    back: Tensor
    second_back: Tensor | None
    first: Tensor
    second: Tensor | None


class CellKernel(ABC):
    """One step c' = f∘c + i∘a, h' = o∘tanh c', with the gates from the multiplied-out layers.

    `forward` runs in the optimiser's step and in the replay of a window; with a `Record` it also writes the derivatives
    for `backward`. With the features and h a record takes 4 (F + 7M + 1) bytes per coordinate and step of an LSTM in
    float32, 572 with two features and M = 20, and 4 (F + 7M + 3N + 2) of an IHC-LSTM. To compute the gates again in the
    backward pass would save two thirds of it and cost a product and five activations.

    Args:
        folded: The multiplied-out layers.
        scale: Factors of the first features' rows; they are multiplied into the layer.
    """

    def __init__(self, folded: Folded, scale: Sequence[float] = ()) -> None:
        self.folded, self.hidden = folded, folded.head.shape[1]
        # A copy: other steps use the folded layers again, and `adjoint` needs them without the factors.
        self.first = folded.first.clone()
        self.first[:, : len(scale)] *= self.first.new_tensor(scale)

    @abstractmethod
    def buffers(self, take: Take, scratch: Tensor) -> Buffers:
        """Memory for `forward`; `scratch` is described there."""

    @abstractmethod
    def records(self, take: Take, steps: int) -> list[Record]:
        """Memory for the derivatives of each step."""

    @abstractmethod
    def adjoint(self, take: Take, below: Tensor) -> Adjoint:
        """Memory for `backward`, the sums of gradients at 0.

        Args:
            take: Allocator.
            below: The columns of `Folded.first` whose rows' adjoints are wanted: θ's, if it is a feature, then h's.
        """

    @abstractmethod
    def gradient(self, adjoint: Adjoint) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of `Folded.first`, `second` and `second_bias`."""

    def forward(
        self, z: Tensor, c: Tensor, c_next: Tensor, h_next: Tensor, buffers: Buffers, record: Record | None = None
    ) -> None:
        """Writes c' and h' in 17 operations for an LSTM, 15 for an IHC-LSTM; to record takes seven or eight more.

        Args:
            z: Features, h and a row of ones, [F + M + 1, B].
            c: [M, B].
            c_next: C', [M, B]; the same memory as c where nothing is recorded.
            h_next: H', [M, B].
            buffers: Memory that is overwritten.
            record: Memory for the derivatives, or None.
        """
        i, f, o, a = self._gates(z, buffers, record)
        # In place c_next is c, which is read here for the last time.
        torch.mul(f, c, out=c_next).addcmul_(i, a)
        # f is in the record or needed no more: its buffer is free.
        tanh_c = tanh_(torch.mul(c_next, EXPONENT, out=buffers.gates.f), buffers.scratch)
        torch.mul(o, tanh_c, out=h_next)
        if record is not None:
            sigmoid_backward(a, i, grad_input=record.i)
            sigmoid_backward(c, f, grad_input=record.f)
            self._by_candidate(i, a, record.a)
            sigmoid_backward(tanh_c, o, grad_input=record.o)
            tanh_backward(o, tanh_c, grad_input=record.tanh)

    def backward(self, z: Tensor, record: Record, dh: Tensor, dc: Tensor, adjoint: Adjoint, below: Tensor) -> None:
        """Adds this step to the weights' gradients.

        These are summed transposed, [F + M + 1, B] by [B, rows]: with the narrow side first the product is nearly twice
        as fast.

        Args:
            z: The argument of `forward`.
            record: The derivatives it wrote.
            dh: The adjoint of h', [M, B].
            dc: The adjoint of c', [M, B]; replaced by that of c.
            adjoint: Memory and sums.
            below: The adjoints of the wanted rows of z, written last; it may overlap `dh`.
        """
        gates = adjoint.gates
        torch.mul(dh, record.o, out=gates.o)
        dc.addcmul_(dh, record.tanh)
        torch.mul(dc, record.i, out=gates.i)
        torch.mul(dc, record.f, out=gates.f)
        torch.mul(dc, record.a, out=gates.a)
        # Only now: the three products above needed the adjoint of c' that this replaces.
        dc.mul_(record.c)
        self._products_backward(record, adjoint)
        adjoint.first.addmm_(z, adjoint.rows.T)
        torch.mm(adjoint.back, adjoint.rows[: adjoint.back.shape[1]], out=below)

    def _records(self, take: Take, highways: Sequence[Highway | None]) -> list[Record]:
        """Memory for the six derivatives of each step, beside what there is for v."""
        derivatives = take("derivatives", len(highways), 6, self.hidden)
        each = (one.unbind() for one in derivatives.unbind(1))
        return [Record(*parts) for parts in zip(*each, highways, strict=True)]

    def _sigmoids(self, buffers: Buffers, record: Record | None) -> Gates:
        """Applies σ to the three gates; f goes to where it is recorded, which saves a copy."""
        if record is None:
            buffers.sigmoids.sigmoid_()
            return buffers.gates
        i, f, o, a = buffers.gates
        return Gates(i.sigmoid_(), torch.sigmoid(f, out=record.c), o.sigmoid_(), a)

    @abstractmethod
    def _gates(self, z: Tensor, buffers: Buffers, record: Record | None) -> Gates:
        """The gates and the candidate."""

    @abstractmethod
    def _by_candidate(self, i: Tensor, a: Tensor, out: Tensor) -> None:
        """Writes ∂(i∘a)/∂(argument of a)."""

    @abstractmethod
    def _products_backward(self, record: Record, adjoint: Adjoint) -> None:
        """Completes `adjoint.rows` from `adjoint.gates`, and adds to the second layer's gradient."""


class LSTMKernel(CellKernel):
    """i, f, o = σ and a = tanh of the first product's four parts."""

    def __init__(self, folded: Folded, scale: Sequence[float] = ()) -> None:
        super().__init__(folded, scale)
        # The rows of a carry the factor that `tanh_` asks for, which saves an operation a step.
        self.first[-self.hidden :] *= EXPONENT

    def buffers(self, take: Take, scratch: Tensor) -> Buffers:
        """One product's."""
        M, first = self.hidden, take("first", 4 * self.hidden)
        gates, nothing = Gates(*first.split(M)), first[:0]
        return Buffers(first, gates, nothing, first[: 3 * M], gates, scratch)

    def records(self, take: Take, steps: int) -> list[Record]:
        """Six derivatives a step."""
        return self._records(take, [None] * steps)

    def adjoint(self, take: Take, below: Tensor) -> Adjoint:
        """The gates' adjoints are the first product's."""
        # Not `self.first`: derivatives are by tanh's own argument, without EXPONENT.
        rows, first = take("first's adjoint", 4 * self.hidden), self.folded.first
        gates = Gates(*rows.split(self.hidden))
        back, total = first[:, below].T.contiguous(), first.new_zeros(first.shape[::-1])
        return Adjoint(rows, gates, rows, gates, rows[:0], back, None, total, None)

    def gradient(self, adjoint: Adjoint) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One layer's."""
        return adjoint.first.T, None, None

    def _gates(self, z: Tensor, buffers: Buffers, record: Record | None) -> Gates:
        torch.mm(self.first, z, out=buffers.first)
        tanh_(buffers.gates.a, buffers.scratch)
        return self._sigmoids(buffers, record)

    def _by_candidate(self, i: Tensor, a: Tensor, out: Tensor) -> None:
        tanh_backward(i, a, grad_input=out)

    def _products_backward(self, record: Record, adjoint: Adjoint) -> None:
        pass


class IHCLSTMKernel(CellKernel):
    """v = x + g∘(F(h) − x), g = σ, from the first product; f, i, o = σ(W v + b); a is linear."""

    def __init__(self, folded: Folded, scale: Sequence[float] = ()) -> None:
        super().__init__(folded, scale)
        assert folded.second is not None
        self.inner = n = folded.second.shape[1]
        self.first[n : 2 * n] -= self.first[2 * n : 3 * n]  # F(h) − x by the product itself, one operation less
        self.second, self.biased = folded.second, folded.second_bias is not None
        if folded.second_bias is not None:
            # With a row of ones in the argument, the products add the bias and sum its gradient.
            self.second = torch.cat([folded.second, folded.second_bias[:, None]], dim=1)

    def buffers(self, take: Take, scratch: Tensor) -> Buffers:
        """Two products' and v."""
        N, M = self.inner, self.hidden
        first, second = take("first", 3 * N + M), take("second", 3 * M)
        parts, (f, i, o) = first.split([N, N, N, M]), second.split(M)
        v = take("v", self.second.shape[1])
        v[N:].fill_(1)
        highway = Highway(v[:N], v, v[:0], parts[0])
        return Buffers(first, parts, second, second, Gates(i, f, o, parts[3]), scratch, highway)

    def records(self, take: Take, steps: int) -> list[Record]:
        """Six derivatives a step, and v with its two."""
        v, by = take("v of each step", steps, self.second.shape[1]), take("v's derivatives", steps, 2, self.inner)
        v[:, self.inner :].fill_(1)
        each = zip(v[:, : self.inner].unbind(), v.unbind(), *(one.unbind() for one in by.unbind(1)), strict=True)
        return self._records(take, [Highway(*parts) for parts in each])

    def adjoint(self, take: Take, below: Tensor) -> Adjoint:
        """Two products'."""
        # Not `self.first`: the adjoints are those of F(h) and x themselves, not of their difference.
        N, M, first = self.inner, self.hidden, self.folded.first
        assert self.folded.second is not None
        rows, sigmoids = take("first's adjoint", 3 * N + M), take("second's adjoint", 3 * M)
        parts = rows.split([N, N, N, M])
        f, i, o = sigmoids.split(M)
        back = first[:, below].T
        if len(below) == M:
            back = back[:, : 2 * N]  # x and a do not depend on h
        total, second = first.new_zeros(first.shape[::-1]), self.second.new_zeros(self.second.shape[::-1])
        v = take("v's adjoint", N)
        back, second_back = back.contiguous(), self.folded.second.T.contiguous()
        return Adjoint(rows, parts, sigmoids, Gates(i, f, o, parts[3]), v, back, second_back, total, second)

    def gradient(self, adjoint: Adjoint) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Both layers'."""
        assert adjoint.second is not None
        bias = adjoint.second[-1] if self.biased else None
        return adjoint.first.T, adjoint.second[: self.inner].T, bias

    def _gates(self, z: Tensor, buffers: Buffers, record: Record | None) -> Gates:
        torch.mm(self.first, z, out=buffers.first)
        g, back, x, _ = buffers.parts
        highway = buffers.highway if record is None else record.highway
        assert highway is not None
        torch.addcmul(x, torch.sigmoid(g, out=highway.gate), back, out=highway.v)
        torch.mm(self.second, highway.and_one, out=buffers.second)
        if record is not None:
            sigmoid_backward(back, highway.gate, grad_input=highway.by_gate)
        return self._sigmoids(buffers, record)

    def _by_candidate(self, i: Tensor, a: Tensor, out: Tensor) -> None:
        out.copy_(i)

    def _products_backward(self, record: Record, adjoint: Adjoint) -> None:
        assert record.highway is not None
        assert adjoint.second is not None
        assert adjoint.second_back is not None
        of_g, of_back, of_x, _ = adjoint.parts
        adjoint.second.addmm_(record.highway.and_one, adjoint.sigmoids.T)
        torch.mm(adjoint.second_back, adjoint.sigmoids, out=adjoint.v)
        torch.mul(adjoint.v, record.highway.by_gate, out=of_g)
        torch.mul(adjoint.v, record.highway.gate, out=of_back)
        # x takes (1 − g) of v's adjoint: what F(h) has left of it, without 1 − g in memory.
        torch.sub(adjoint.v, of_back, out=of_x)


def cell_kernel(folded: Folded, scale: Sequence[float] = ()) -> CellKernel:
    """The kernel of the cell that was multiplied out."""
    return (LSTMKernel if folded.second is None else IHCLSTMKernel)(folded, scale)
