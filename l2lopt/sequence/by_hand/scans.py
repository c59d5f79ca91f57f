"""SRU and T-LSTM: all matrix products are outside the loop over time, which is element-wise.

Forward, c' = f∘c + (1−f)∘a is one operation a step (T-LSTM), or three (SRU, whose f depends on c). The backward pass is
linear, e_t = d_t + J_{t+1}∘e_{t+1} for the adjoint e of c, and J is known for all steps beforehand.
"""

import torch
from torch import Tensor

from l2lopt.cells import CellState
from l2lopt.core.layout import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.pointwise import sigmoid_back
from l2lopt.sequence.by_hand.sweep import Adjoints, Sweep, TimeOrder


def scan_back(time: TimeOrder, es: Tensor, jacobian: Tensor) -> None:
    """Adds J∘e of each step to the adjoint before it; es [T + 1, B, M], jacobian [T, B, M]."""
    before, after = (part.unbind(0) for part in time.around(es))
    if time.alive is not None:
        # Beyond its end a sequence hands c on unchanged: the derivative there is 1.
        jacobian = torch.where(time.alive, jacobian, 1.0)
    for t, j in list(enumerate(jacobian.unbind(0)))[:: 1 if time.reverse else -1]:
        before[t].addcmul_(after[t], j)


class SRUScan(Sweep):
    """f, p = σ(W x + ω∘c + b); a = W_A x; c' = f∘c + (1−f)∘a; h' = p∘c' + (1−p)∘x, z in the rows f, p, a."""

    def prepare(self, w: Params) -> Params:
        """One bias for f, p and a: the sum of those of f and p, and zeros for a."""
        b = w["bias"]
        if "gate_bias" in w:
            b = b + torch.cat([w["gate_bias"], w["highway_bias"]])
        return {"W": w["weight_x"], "b": torch.cat([b, torch.zeros_like(b[: len(b) // 2])]), "omega": w["weight_c"]}

    def forward(self, time: TimeOrder, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """All products at once, then c step by step."""
        steps, batch, m = x.shape
        z = products.room(x, steps, batch, 3 * m)
        products.write(z.flatten(0, 1), x.flatten(0, 1), w["W"], w["b"])
        (f, p, a), (omega_f, omega_p) = z.chunk(3, 2), w["omega"].chunk(2)
        tape = {"z": z, "c": time.states(state["c"], steps)}
        before, after = time.around(tape["c"])
        views = list(zip(f.unbind(0), a.unbind(0), before.unbind(0), after.unbind(0), strict=True))
        for t in time.order(steps):
            f_t, a_t, c, c_next = views[t]
            # f reads c, so it cannot be computed before the loop.
            f_t.addcmul_(c, omega_f).sigmoid_()
            torch.lerp(a_t, c, f_t, out=c_next)
            if time.alive is not None:
                torch.where(time.alive[t], c_next, c, out=c_next)
        # p reads c too, but no later step reads p: one call for all steps can wait until c is known.
        p.addcmul_(before, omega_p).sigmoid_()
        outputs = time.visible(torch.lerp(x, after, p))
        return outputs, {"c": tape["c"][time.ends()[1]].clone()}, tape

    def backward(
        self, time: TimeOrder, x: Tensor, state: CellState, w: Params, tape: Params, adjoints: Adjoints
    ) -> tuple[Tensor | None, CellState, Params]:
        """J = f + (c − a) f (1−f) ω_f."""
        # Outputs beyond a sequence's end are constant zeros, so their adjoints go nowhere.
        dh, (f, p, a), (omega_f, omega_p) = time.visible(adjoints.outputs), tape["z"].chunk(3, 2), w["omega"].chunk(2)
        before, after = time.around(tape["c"])
        d = products.room(x, *tape["z"].shape)
        d_f, d_p, d_a = d.chunk(3, 2)
        torch.sub(after, x, out=d_p).mul_(dh)
        sigmoid_back(d_p, d_p, p)
        es = time.adjoints(dh * p, adjoints.state["c"])
        e_before, e = time.around(es)
        # p reads the c before its step; this part must be there before the scan hands the sums on.
        e_before.addcmul_(d_p, omega_p)
        # d_f first serves the Jacobian, as (c − a) f (1 − f); e, when it is known, makes it the adjoint of f.
        torch.sub(before, a, out=d_f)
        sigmoid_back(d_f, d_f, f)
        scan_back(time, es, torch.addcmul(f, d_f, omega_f))
        # Beyond a sequence's end e only passes through: no gate acted on c there.
        e = time.visible(e)
        d_f.mul_(e)
        torch.sub(e, e * f, out=d_a)
        dw = {}
        if adjoints.of_weights:
            omega = torch.cat([(part * before).sum((0, 1)) for part in (d_f, d_p)])
            dw = {"W": products.outer(d, x, w["W"].dtype), "b": d.sum((0, 1)), "omega": omega}
        # The term (1 − p)∘x of h' is a way to x beside the products.
        dx = products.back(d, w["W"]).add_(dh).addcmul_(dh, p, value=-1) if adjoints.of_x else None
        return dx, {"c": es[time.ends()[0]].clone()}, dw


class TLSTMScan(Sweep):
    """f, o, a = W x + U x_before + b, σ of f and o; c' = f∘c + (1−f)∘a; h' = o∘c', z in the rows f, o, a."""

    def prepare(self, w: Params) -> Params:
        """One bias: the sum of the two of f, and those of o and a."""
        b = w["bias"]
        if "gate_bias" in w:
            m = len(w["gate_bias"])
            b = torch.cat([b[:m] + w["gate_bias"], b[m:]])
        return {"W": w["weight_x"], "U": w["weight_before"], "b": b}

    def forward(self, time: TimeOrder, x: Tensor, state: CellState, w: Params) -> tuple[Tensor, CellState, Params]:
        """All products and gates at once, then c step by step, one operation each."""
        steps, batch, m = len(x), x.shape[1], state["c"].shape[1]
        z = products.room(x, steps, batch, 3 * m)
        # `roll` wraps round, so each sequence's first step takes the x of the state instead.
        x_before = torch.where(_second(time, x), x.roll(_one(time), 0), state["x"])
        products.write(z.flatten(0, 1), x.flatten(0, 1), w["W"], w["b"])
        products.add(z.flatten(0, 1), x_before.flatten(0, 1), w["U"])
        z[..., : 2 * m].sigmoid_()
        f, o, a = z.chunk(3, 2)
        tape = {"z": z, "c": time.states(state["c"], steps), "x_before": x_before}
        before, after = time.around(tape["c"])
        views = list(zip(f.unbind(0), a.unbind(0), before.unbind(0), after.unbind(0), strict=True))
        for t in time.order(steps):
            f_t, a_t, c, c_next = views[t]
            torch.lerp(a_t, c, f_t, out=c_next)
            if time.alive is not None:
                torch.where(time.alive[t], c_next, c, out=c_next)
        last = (
            # One term of the sum is not zero: each sequence gives its last x, and no length is read back to the CPU.
            torch.where(_last(time, x), x, 0.0).sum(0) if time.alive is not None else x[time.order(steps)[-1]].clone()
        )
        if time.alive is not None:
            # A sequence without steps keeps the x of its initial state.
            last = torch.where(time.alive.any(0), last, state["x"])
        return time.visible(o * after), {"x": last, "c": tape["c"][time.ends()[1]].clone()}, tape

    def backward(
        self, time: TimeOrder, x: Tensor, state: CellState, w: Params, tape: Params, adjoints: Adjoints
    ) -> tuple[Tensor | None, CellState, Params]:
        """J = f."""
        dh, (f, o, a) = time.visible(adjoints.outputs), tape["z"].chunk(3, 2)
        before, after = time.around(tape["c"])
        d = products.room(x, *tape["z"].shape)
        d_f, d_o, d_a = d.chunk(3, 2)
        sigmoid_back(d_o, dh * after, o)
        es = time.adjoints(dh * o, adjoints.state["c"])
        scan_back(time, es, f)
        # Beyond a sequence's end e only passes through: no gate acted on c there.
        e = time.visible(time.around(es)[1])
        torch.sub(before, a, out=d_f).mul_(e)
        sigmoid_back(d_f, d_f, f)
        torch.sub(e, e * f, out=d_a)
        dw = {}
        if adjoints.of_weights:
            u = products.outer(d, tape["x_before"], w["U"].dtype)
            dw = {"W": products.outer(d, x, w["W"].dtype), "U": u, "b": d.sum((0, 1))}
        d_before, second = products.back(d, w["U"]), _second(time, x)
        initial = torch.where(second, 0.0, d_before).sum(0)
        last = adjoints.state["x"]
        if time.alive is not None:
            initial += torch.where(time.alive.any(0), 0.0, last)
        dx = None
        if adjoints.of_x:
            # First steps are zeroed before the roll: what they hold belongs to the state and would wrap round.
            dx = products.back(d, w["W"]).add_(torch.where(second, d_before, 0.0).roll(-_one(time), 0))
            dx += torch.where(_last(time, x), last, 0.0)
        return dx, {"x": initial, "c": es[time.ends()[0]].clone()}, dw


def _one(time: TimeOrder) -> int:
    """The shift for `roll` that moves each step to the next."""
    return -1 if time.reverse else 1


def _second(time: TimeOrder, x: Tensor) -> Tensor:
    """Whether a step is not a sequence's first, [T, B or 1, 1]."""
    alive = _alive(time, x).roll(_one(time), 0)
    # `roll` has made a copy, so `time.alive` stays as it is.
    alive[time.order(len(x))[0]] = False
    return alive


def _last(time: TimeOrder, x: Tensor) -> Tensor:
    """Whether a step is a sequence's last, [T, B or 1, 1]."""
    alive = _alive(time, x)
    following = alive.roll(-_one(time), 0)
    following[time.order(len(x))[-1]] = False
    return alive & ~following


def _alive(time: TimeOrder, x: Tensor) -> Tensor:
    return x.new_ones(len(x), 1, 1, dtype=torch.bool) if time.alive is None else time.alive
