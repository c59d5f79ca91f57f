"""The pass of cells whose gates depend on h: a feed brings h to the gates, the rest is element-wise."""

from collections.abc import Callable

import torch
from torch import Tensor

from l2lopt.cells import CellState
from l2lopt.core.layout import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.feed import Feed
from l2lopt.sequence.by_hand.pointwise import Pointwise, PointwiseStep, Span
from l2lopt.sequence.by_hand.sweep import Adjoints, Sweep, TimeOrder


class Recurrent(Sweep):
    """The element-wise part of a cell behind a feed.

    Forward: z, h and c of all steps are allocated once, and each step works in place. Backward: `factors` computes
    everything that does not depend on the adjoints for all steps at once, so that the loop has a few products of
    [B, M] and the feed's matrix products left. It fills one buffer with the adjoints of all blocks, from which the
    gradients of x and of every weight follow by one matrix product each.

    Args:
        pointwise: Element-wise part.
        feed: Class of the feed.
        blocks: name → range of blocks, as the feed's class asks for them.
        prepare: Weights of the cell → weights of the feed.
    """

    def __init__(
        self, pointwise: Pointwise, feed: type[Feed], blocks: dict[str, Span], prepare: Callable[[Params], Params]
    ) -> None:
        self.pointwise, self.feed, self.blocks, self._prepare = pointwise, feed, blocks, prepare

    def prepare(self, w: Params) -> Params:
        """The function given for this cell."""
        return self._prepare(w)

    def forward(self, time: TimeOrder, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """All steps; the tape is z, h and c of all steps, and `kept`."""
        p, (steps, batch, _), m = self.pointwise, x.shape, state["h"].shape[1]
        tape = {name: time.states(value, steps) for name, value in state.items()}
        z = tape["z"] = products.room(x, steps, batch, p.blocks * m)
        if p.with_kept:
            tape["kept"] = x.new_empty(steps, batch, m)
        every = self._every(time, tape)
        feed = self.feed(self.blocks, w, x, every.h, z, tape)
        feed.hoist()
        if p.with_x:
            every.z[-1].copy_(x)
        gates = z[..., p.sigmoid[0] * m : p.sigmoid[1] * m].unbind(0) if p.sigmoid[1] else None
        views = _unbound(every)
        for t in time.order(steps):
            s = views[t]
            feed.step(t, s.h)
            if gates is not None:
                gates[t].sigmoid_()
            p.forward(s, w)
            if time.alive is not None:
                # An ended sequence keeps its state, so one index has the final state of all, however long they are.
                torch.where(time.alive[t], s.h_next, s.h, out=s.h_next)
                if p.with_c:
                    torch.where(time.alive[t], s.c_next, s.c, out=s.c_next)
        # Clones: a caller may change the outputs in place, and the tape must not change with them.
        outputs = every.h_next.clone() if time.alive is None else time.visible(every.h_next)
        return outputs, {name: tape[name][time.ends()[1]].clone() for name in state}, tape

    def backward(
        self, time: TimeOrder, x: Tensor, state: CellState, w: Params, tape: Params, adjoints: Adjoints
    ) -> tuple[Tensor | None, CellState, Params]:
        """All steps in the opposite order."""
        p, every = self.pointwise, self._every(time, tape)
        steps, m = len(x), every.h.shape[2]
        dhs = time.adjoints(adjoints.outputs, adjoints.state["h"])
        # A clone, because the loop multiplies it in place and the adjoint that came in belongs to autograd.
        dc = adjoints.state["c"].clone() if p.with_c else None
        d = products.room(x, *tape["z"].shape)
        # d holds the factors at first; multiplied by dh or dc in the loop, they become the adjoints.
        k, direct = p.factors(d.unflatten(2, (p.blocks, m)).unbind(2), every, w)
        feed = self.feed(self.blocks, w, x, every.h, tape["z"], tape)
        feed.prepare_back(d)
        by_h, by_c = ([_span(d, span, m).unbind(0) for span in spans] for spans in (p.by_h, p.by_c))
        ks, directs = (None if part is None else part.unbind(0) for part in (k, direct))
        befores, afters = (part.unbind(0) for part in time.around(dhs))
        # As numbers, so that products in place can switch ended sequences off, and the others.
        alive, ended = None, None
        if time.alive is not None:
            alive, ended = (part.to(dhs.dtype).unbind(0) for part in (time.alive, ~time.alive))
        for t in time.order(steps)[::-1]:
            dh, before = afters[t], befores[t]
            if alive is not None and ended is not None:
                # The adjoint of a step beyond a sequence's end goes to the state before as it is. Not added everywhere
                # and taken back from the others: they would lose the digits of a smaller `before`.
                before.addcmul_(dh, ended[t])
                dh.mul_(alive[t])
            for blocks in by_h:
                blocks[t].mul_(dh.unsqueeze(1))
            if dc is not None and ks is not None and directs is not None:
                # The dc of ended sequences goes round this step: set aside here, added again at the end.
                aside = None if ended is None else dc * ended[t]
                dc = dc if alive is None else dc.mul_(alive[t])
                # Before the blocks of `by_c`: c' also acts through h', and they need the whole adjoint of c'.
                dc.addcmul_(dh, ks[t])
                for blocks in by_c:
                    blocks[t].mul_(dc.unsqueeze(1))
                dc.mul_(directs[t])
                dc = dc if aside is None else dc.add_(aside)
            elif directs is not None:
                before.addcmul_(dh, directs[t])
            # Last, since it reads the adjoints of all blocks of this step.
            feed.step_back(t, before)
        dw = feed.weight_gradients() | p.scalars(time.around(dhs)[1], every) if adjoints.of_weights else {}
        dx = feed.input_gradient() if adjoints.of_x else None
        if dx is not None and p.with_x:
            # The last block is x itself, so its adjoint reaches x without a product.
            dx.add_(d[..., -m:])
        initial = {"h": dhs[time.ends()[0]].clone()} | ({} if dc is None else {"c": dc})
        return dx, initial, dw

    def _every(self, time: TimeOrder, tape: Params) -> PointwiseStep:
        """The quantities of all steps; h fills the place of c and `kept` for cells without them."""
        h = time.around(tape["h"])
        c = time.around(tape["c"]) if self.pointwise.with_c else h
        z = tape["z"].unflatten(2, (self.pointwise.blocks, -1)).unbind(2)
        return PointwiseStep(z, h[0], c[0], h[1], c[1], tape.get("kept", h[1]))


def _unbound(every: PointwiseStep) -> list[PointwiseStep]:
    """A view for each step, made before the loop: `unbind` makes all of them in one call, indexing one a call."""
    z = zip(*(block.unbind(0) for block in every.z), strict=True)
    rest = zip(*(part.unbind(0) for part in every[1:]), strict=True)
    return [PointwiseStep(blocks, *parts) for blocks, parts in zip(z, rest, strict=True)]


def _span(d: Tensor, span: Span, m: int) -> Tensor:
    """A range of blocks, [T, B, blocks, M]."""
    blocks: Tensor = d[..., span[0] * m : span[1] * m].unflatten(2, (-1, m))
    return blocks
