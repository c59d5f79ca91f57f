"""The pass of the cells whose gates see h: a feed brings h to the gates, the rest is element by element."""

from collections.abc import Callable

import torch
from torch import Tensor

from l2lopt.cells import CellState
from l2lopt.core.types import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.feed import Feed
from l2lopt.sequence.by_hand.pointwise import Pointwise, Span, Step
from l2lopt.sequence.by_hand.sweep import Slopes, Sweep, Way


class Recurrent(Sweep):
    """A pointwise part behind a feed.

    Forward, the blocks z, h and c of all steps are written once, each step in place. Backward, `factors` makes what
    does not depend on the slopes, and the loop over the steps is left with a few products of [B, M] and the feed's
    matrix products; it leaves the slopes of all blocks in one buffer, from which those of x and of every weight are one
    product each.

    Args:
        pointwise: the cell's gates.
        feed: what h goes through.
        blocks: name → the blocks the feed asks for.
        prepare: the cell's weights → the feed's.
    """

    def __init__(
        self, pointwise: Pointwise, feed: type[Feed], blocks: dict[str, Span], prepare: Callable[[Params], Params]
    ) -> None:
        self.pointwise, self.feed, self.blocks, self._prepare = pointwise, feed, blocks, prepare

    def prepare(self, w: Params) -> Params:
        """The cell's own, as given."""
        return self._prepare(w)

    def forward(self, way: Way, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """All h, and h and c of the last step."""
        p, (steps, batch, _), m = self.pointwise, x.shape, state["h"].shape[1]
        tape = {name: way.states(value, steps) for name, value in state.items()}
        z = tape["z"] = products.room(x, steps, batch, p.blocks * m)
        if p.with_kept:
            tape["kept"] = x.new_empty(steps, batch, m)
        every = self._every(way, tape)
        feed = self.feed(self.blocks, w, x, every.h, z, tape)
        feed.hoist()
        if p.with_x:
            every.z[-1].copy_(x)
        gates = z[..., p.sigmoid[0] * m : p.sigmoid[1] * m].unbind(0) if p.sigmoid[1] else None
        views = _unbound(every)
        for t in way.order(steps):
            s = views[t]
            feed.step(t, s.h)
            if gates is not None:
                gates[t].sigmoid_()
            p.forward(s, w)
            if way.alive is not None:
                torch.where(way.alive[t], s.h_next, s.h, out=s.h_next)
                if p.with_c:
                    torch.where(way.alive[t], s.c_next, s.c, out=s.c_next)
        outputs = every.h_next.clone() if way.alive is None else way.visible(every.h_next)
        return outputs, {name: tape[name][way.ends()[1]].clone() for name in state}, tape

    def backward(
        self, way: Way, x: Tensor, state: CellState, w: Params, tape: Params, slopes: Slopes
    ) -> tuple[Tensor | None, CellState, Params]:
        """Every step in the opposite order."""
        p, every = self.pointwise, self._every(way, tape)
        steps, m = len(x), every.h.shape[2]
        dhs = way.slopes(slopes.outputs, slopes.state["h"])
        dc = slopes.state["c"].clone() if p.with_c else None
        d = products.room(x, *tape["z"].shape)
        k, direct = p.factors(d.unflatten(2, (p.blocks, m)).unbind(2), every, w)
        feed = self.feed(self.blocks, w, x, every.h, tape["z"], tape)
        feed.prepare_back(d)
        by_h, by_c = ([_span(d, span, m).unbind(0) for span in spans] for spans in (p.by_h, p.by_c))
        ks, directs = (None if part is None else part.unbind(0) for part in (k, direct))
        befores, afters = (part.unbind(0) for part in way.around(dhs))
        alive = None if way.alive is None else way.alive.to(dhs.dtype).unbind(0)
        for t in way.order(steps)[::-1]:
            dh, before = afters[t], befores[t]
            if alive is not None:
                before.add_(dh).addcmul_(dh, alive[t], value=-1)
                dh.mul_(alive[t])
            for blocks in by_h:
                blocks[t].mul_(dh.unsqueeze(1))
            if dc is not None and ks is not None and directs is not None:
                ended = None if alive is None else dc - dc * alive[t]
                dc = dc if alive is None else dc.mul_(alive[t])
                dc.addcmul_(dh, ks[t])
                for blocks in by_c:
                    blocks[t].mul_(dc.unsqueeze(1))
                dc.mul_(directs[t])
                dc = dc if ended is None else dc.add_(ended)
            elif directs is not None:
                before.addcmul_(dh, directs[t])
            feed.step_back(t, before)
        dw = feed.weight_slopes() | p.scalars(way.around(dhs)[1], every) if slopes.of_weights else {}
        dx = feed.input_slopes() if slopes.of_x else None
        if dx is not None and p.with_x:
            dx.add_(d[..., -m:])
        initial = {"h": dhs[way.ends()[0]].clone()} | ({} if dc is None else {"c": dc})
        return dx, initial, dw

    def _every(self, way: Way, tape: Params) -> Step:
        """All steps' quantities; where there is no c, or nothing kept, h stands there."""
        h = way.around(tape["h"])
        c = way.around(tape["c"]) if self.pointwise.with_c else h
        z = tape["z"].unflatten(2, (self.pointwise.blocks, -1)).unbind(2)
        return Step(z, h[0], c[0], h[1], c[1], tape.get("kept", h[1]))


def _unbound(every: Step) -> list[Step]:
    """Each step's."""
    z = zip(*(block.unbind(0) for block in every.z), strict=True)
    rest = zip(*(part.unbind(0) for part in every[1:]), strict=True)
    return [Step(blocks, *parts) for blocks, parts in zip(z, rest, strict=True)]


def _span(d: Tensor, span: Span, m: int) -> Tensor:
    """Those blocks, [T, B, blocks, M]."""
    blocks: Tensor = d[..., span[0] * m : span[1] * m].unflatten(2, (-1, m))
    return blocks
