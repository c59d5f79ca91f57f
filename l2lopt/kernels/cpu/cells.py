"""The learned rule's cell on a block: products into reused buffers, activations in place."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from l2lopt.kernels.cpu.block import WIDTH, Block
from l2lopt.kernels.folding import Folded

EXPONENT = 2 / math.log(2)


class Network:
    """The products of one step, made ready for `Buffers`.

    tanh y is taken as (E − 1) / (E + 1) with E = 2^(2y / ln 2), the factor in the product where it can be. It errs by
    10⁻⁷ at most, and takes a third of the time that `torch.tanh` does on processors its library is not written for.

    Args:
        folded: the layers multiplied out.
        scale: per feature, [F]; what its row is to be multiplied with.
    """

    def __init__(self, folded: Folded, scale: Sequence[float]) -> None:
        first = folded.first.clone()
        first[:, : len(scale)] *= first.new_tensor(scale)
        self.hidden = folded.head.shape[1]
        self.second = folded.second
        if folded.second is None:
            first[-self.hidden :] *= EXPONENT
        else:
            n = folded.second.shape[1]
            first[n : 2 * n] -= first[2 * n : 3 * n]  # F(h) − x, for v = x + g∘(F(h) − x)
            if folded.second_bias is not None:
                self.second = torch.cat([folded.second, folded.second_bias[:, None]], dim=1)
        self.first = first

    def step(self, buffers: "Buffers", block: Block) -> Tensor:
        """The next h [M, B], written with c' into the block's state, of the features in `buffers.features`.

        Seventeen operations for an LSTM, fifteen for an IHC-LSTM.
        """
        buffers.h.copy_(block.before["cell.h"])
        torch.mm(self.first, buffers.stacked, out=buffers.gates)
        if self.second is None:
            i, f, o, a = buffers.parts
            buffers.squashed.sigmoid_()
            _tanh_(a, buffers.h)
        else:
            g, back, x, a = buffers.parts
            torch.addcmul(x, g.sigmoid_(), back, out=buffers.v)
            torch.mm(self.second, buffers.v_and_one, out=buffers.second)
            buffers.second.sigmoid_()
            f, i, o = buffers.second_parts
        c = torch.mul(f, block.before["cell.c"], out=block.after["cell.c"]).addcmul_(i, a)
        t = _tanh_(torch.mul(c, EXPONENT, out=f), buffers.h)
        return torch.mul(o, t, out=block.after["cell.h"])


def _tanh_(exponent: Tensor, scratch: Tensor) -> Tensor:
    """Puts tanh y in the place of 2y / ln 2."""
    exponent.clamp_(max=100).exp2_()
    torch.add(exponent, 1, out=scratch)
    return exponent.sub_(1).div_(scratch)


class Buffers:
    """What one thread works in; for narrower blocks, cut anew from the same memory.

    Args:
        network: of any step; the shapes are the same for all.
        sizes: features per input.
        outputs: of the head.

    Attributes:
        stacked: [F + M + 1, B], features, h and 1.
        features: each input's rows.
        h: the rows of h; free once they are multiplied.
        gates: [4M, B] or [3N + M, B], the first product; `parts` are its four, `squashed` an LSTM's first three.
        second: [3M, B], the second product; `second_parts` are its three.
        v: [N, B]; `v_and_one` with a row of 1 below, where the second product has a bias.
        outputs: the head's, [outputs, B]; `output_rows` its rows.
    """

    def __init__(self, network: Network, sizes: Sequence[int], outputs: int) -> None:
        rows, columns = network.first.shape
        self._hidden, self._sizes = network.hidden, sizes
        self._inner = 0 if network.second is None else (rows - network.hidden) // 3
        second = (0, 0) if network.second is None else tuple(network.second.shape)
        self._memory = [network.first.new_empty(size * WIDTH) for size in (columns, rows, *second, outputs)]
        self._width = -1

    def cut(self, width: int) -> None:
        """Makes every buffer as wide as a block."""
        if width == self._width:
            return
        self._width = width
        tensors = [memory[: memory.shape[0] // WIDTH * width].view(-1, width) for memory in self._memory]
        self.stacked, self.gates, self.second, self.v_and_one, self.outputs = tensors
        *features, self.h, one = self.stacked.split([*self._sizes, self._hidden, 1])
        one.fill_(1)
        self.features = [rows.unbind() for rows in features]
        inner = self._inner or self._hidden
        self.parts = self.gates.split([inner] * 3 + [self._hidden])
        self.squashed = self.gates[: 3 * self._hidden]
        self.second_parts = self.second.chunk(3)
        self.v = self.v_and_one[: self._inner]
        self.v_and_one[self._inner :].fill_(1)
        self.output_rows = self.outputs.unbind()
