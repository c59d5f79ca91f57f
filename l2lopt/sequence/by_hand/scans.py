"""SRU and T-LSTM: every product is taken out of the loop, which is left with a few numbers per unit.

Forward, c' = f∘c + (1−f)∘a is a step of one operation (T-LSTM) or three (SRU, whose f sees c). The way back is linear,
e_t = d_t + J_{t+1}∘e_{t+1} for the slope e of c, and all of J is known beforehand.
"""

import torch
from torch import Tensor

from l2lopt.cells import CellState
from l2lopt.core.types import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.pointwise import sigmoid_back
from l2lopt.sequence.by_hand.sweep import Slopes, Sweep, Way


def scan_back(way: Way, es: Tensor, jacobian: Tensor) -> None:
    """Adds J∘e of each step to the slope before it; es [T + 1, B, M], jacobian [T, B, M]."""
    before, after = (part.unbind(0) for part in way.around(es))
    if way.alive is not None:
        jacobian = torch.where(way.alive, jacobian, 1.0)
    for t, j in list(enumerate(jacobian.unbind(0)))[:: 1 if way.reverse else -1]:
        before[t].addcmul_(after[t], j)


class SRUScan(Sweep):
    """f, p = σ(W x + ω∘c + b); a = W_A x; c' = f∘c + (1−f)∘a; h' = p∘c' + (1−p)∘x, z in the rows f, p, a."""

    def prepare(self, w: Params) -> Params:
        """All biases of f and p as one, and none of a."""
        b = w["bias"]
        if "gate_bias" in w:
            b = b + torch.cat([w["gate_bias"], w["highway_bias"]])
        return {"W": w["weight_x"], "b": torch.cat([b, torch.zeros_like(b[: len(b) // 2])]), "omega": w["weight_c"]}

    def forward(self, way: Way, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """Only c step by step."""
        steps, batch, m = x.shape
        z = products.room(x, steps, batch, 3 * m)
        products.write(z.flatten(0, 1), x.flatten(0, 1), w["W"], w["b"])
        (f, p, a), (omega_f, omega_p) = z.chunk(3, 2), w["omega"].chunk(2)
        tape = {"z": z, "c": way.states(state["c"], steps)}
        before, after = way.around(tape["c"])
        views = list(zip(f.unbind(0), a.unbind(0), before.unbind(0), after.unbind(0), strict=True))
        for t in way.order(steps):
            f_t, a_t, c, c_next = views[t]
            f_t.addcmul_(c, omega_f).sigmoid_()
            torch.lerp(a_t, c, f_t, out=c_next)
            if way.alive is not None:
                torch.where(way.alive[t], c_next, c, out=c_next)
        p.addcmul_(before, omega_p).sigmoid_()
        outputs = way.visible(torch.lerp(x, after, p))
        return outputs, {"c": tape["c"][way.ends()[1]].clone()}, tape

    def backward(
        self, way: Way, x: Tensor, state: CellState, w: Params, tape: Params, slopes: Slopes
    ) -> tuple[Tensor | None, CellState, Params]:
        """J = f + (c − a) f (1−f) ω_f."""
        dh, (f, p, a), (omega_f, omega_p) = way.visible(slopes.outputs), tape["z"].chunk(3, 2), w["omega"].chunk(2)
        before, after = way.around(tape["c"])
        d = products.room(x, *tape["z"].shape)
        d_f, d_p, d_a = d.chunk(3, 2)
        torch.sub(after, x, out=d_p).mul_(dh)
        sigmoid_back(d_p, d_p, p)
        es = way.slopes(dh * p, slopes.state["c"])
        e_before, e = way.around(es)
        e_before.addcmul_(d_p, omega_p)
        torch.sub(before, a, out=d_f)
        sigmoid_back(d_f, d_f, f)
        scan_back(way, es, torch.addcmul(f, d_f, omega_f))
        e = way.visible(e)
        d_f.mul_(e)
        torch.sub(e, e * f, out=d_a)
        dw = {}
        if slopes.of_weights:
            omega = torch.cat([(part * before).sum((0, 1)) for part in (d_f, d_p)])
            dw = {"W": products.outer(d, x, w["W"].dtype), "b": d.sum((0, 1)), "omega": omega}
        dx = products.back(d, w["W"]).add_(dh).addcmul_(dh, p, value=-1) if slopes.of_x else None
        return dx, {"c": es[way.ends()[0]].clone()}, dw


class TLSTMScan(Sweep):
    """f, o = σ(W x + U x_before + b); a likewise without σ; c' = f∘c + (1−f)∘a; h' = o∘c', z in the rows f, o, a."""

    def prepare(self, w: Params) -> Params:
        """The two biases of f as one."""
        b = w["bias"]
        if "gate_bias" in w:
            m = len(w["gate_bias"])
            b = torch.cat([b[:m] + w["gate_bias"], b[m:]])
        return {"W": w["weight_x"], "U": w["weight_before"], "b": b}

    def forward(self, way: Way, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """Only c step by step, and of that one operation."""
        steps, batch, m = len(x), x.shape[1], state["c"].shape[1]
        z = products.room(x, steps, batch, 3 * m)
        x_before = torch.where(_second(way, x), x.roll(_one(way), 0), state["x"])
        products.write(z.flatten(0, 1), x.flatten(0, 1), w["W"], w["b"])
        products.add(z.flatten(0, 1), x_before.flatten(0, 1), w["U"])
        z[..., : 2 * m].sigmoid_()
        f, o, a = z.chunk(3, 2)
        tape = {"z": z, "c": way.states(state["c"], steps), "x_before": x_before}
        before, after = way.around(tape["c"])
        views = list(zip(f.unbind(0), a.unbind(0), before.unbind(0), after.unbind(0), strict=True))
        for t in way.order(steps):
            f_t, a_t, c, c_next = views[t]
            torch.lerp(a_t, c, f_t, out=c_next)
            if way.alive is not None:
                torch.where(way.alive[t], c_next, c, out=c_next)
        last = torch.where(_last(way, x), x, 0.0).sum(0) if way.alive is not None else x[way.order(steps)[-1]].clone()
        if way.alive is not None:
            last = torch.where(way.alive.any(0), last, state["x"])
        return way.visible(o * after), {"x": last, "c": tape["c"][way.ends()[1]].clone()}, tape

    def backward(
        self, way: Way, x: Tensor, state: CellState, w: Params, tape: Params, slopes: Slopes
    ) -> tuple[Tensor | None, CellState, Params]:
        """J = f."""
        dh, (f, o, a) = way.visible(slopes.outputs), tape["z"].chunk(3, 2)
        before, after = way.around(tape["c"])
        d = products.room(x, *tape["z"].shape)
        d_f, d_o, d_a = d.chunk(3, 2)
        sigmoid_back(d_o, dh * after, o)
        es = way.slopes(dh * o, slopes.state["c"])
        scan_back(way, es, f)
        e = way.visible(way.around(es)[1])
        torch.sub(before, a, out=d_f).mul_(e)
        sigmoid_back(d_f, d_f, f)
        torch.sub(e, e * f, out=d_a)
        dw = {}
        if slopes.of_weights:
            u = products.outer(d, tape["x_before"], w["U"].dtype)
            dw = {"W": products.outer(d, x, w["W"].dtype), "U": u, "b": d.sum((0, 1))}
        d_before, second = products.back(d, w["U"]), _second(way, x)
        initial = torch.where(second, 0.0, d_before).sum(0)
        last = slopes.state["x"]
        if way.alive is not None:
            initial += torch.where(way.alive.any(0), 0.0, last)
        dx = None
        if slopes.of_x:
            dx = products.back(d, w["W"]).add_(torch.where(second, d_before, 0.0).roll(-_one(way), 0))
            dx += torch.where(_last(way, x), last, 0.0)
        return dx, {"x": initial, "c": es[way.ends()[0]].clone()}, dw


def _one(way: Way) -> int:
    """Where the step before lies, for `roll`."""
    return -1 if way.reverse else 1


def _second(way: Way, x: Tensor) -> Tensor:
    """Whether a step is not a sequence's first, [T, B or 1, 1]."""
    alive = _alive(way, x).roll(_one(way), 0)
    alive[way.order(len(x))[0]] = False
    return alive


def _last(way: Way, x: Tensor) -> Tensor:
    """Whether a step is a sequence's last, [T, B or 1, 1]."""
    alive = _alive(way, x)
    following = alive.roll(-_one(way), 0)
    following[way.order(len(x))[-1]] = False
    return alive & ~following


def _alive(way: Way, x: Tensor) -> Tensor:
    return x.new_ones(len(x), 1, 1, dtype=torch.bool) if way.alive is None else way.alive
