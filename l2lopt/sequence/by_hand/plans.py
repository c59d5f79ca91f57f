"""The table of cells and their passes, with the functions that bring a cell's weights into the form of its pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from l2lopt.cells import GRU, LSTM, RNN, SRU, TLSTM, Cell, FastGRNN, Leaky
from l2lopt.cells.fastgrnn import FastGRNNCore
from l2lopt.cells.gru import GRUCore
from l2lopt.cells.highway import Core, Feedback, Highway, NoFeedback, Residual, Simplified
from l2lopt.cells.lstm import LSTMCore
from l2lopt.cells.sru import SRUCore
from l2lopt.cells.t_lstm import TLSTMCore
from l2lopt.core.layout import Params
from l2lopt.sequence.by_hand import highway, pointwise
from l2lopt.sequence.by_hand.full import Full, Hoisted, ResetBefore
from l2lopt.sequence.by_hand.pointwise import Pointwise
from l2lopt.sequence.by_hand.recurrent import Recurrent
from l2lopt.sequence.by_hand.scans import SRUScan, TLSTMScan
from l2lopt.sequence.by_hand.sweep import Sweep

CORES: dict[type[Core], Callable[[], Pointwise]] = {
    GRUCore: pointwise.GRUCore,
    LSTMCore: partial(pointwise.LSTM, core=True),
    SRUCore: pointwise.SRUCore,
    TLSTMCore: pointwise.TLSTMCore,
    FastGRNNCore: partial(pointwise.FastGRNN, core=True),
}
PARTS = {Simplified, NoFeedback, Residual, Highway, Feedback, *CORES}
"""What simplified cells with a pass are made of."""


def plan(cell: Cell, fold: bool = False) -> Sweep | str:
    """The pass of a cell, or the reason why it has none.

    Args:
        cell: Any cell.
        fold: Whether an IRC cell may be folded into R = W diag(α) U_V, one product a step instead of two, if that is
            less work within the steps: N ≥ gM/(1 + g) for g gates. It is more work in all, since W v then needs a
            product over all time beforehand and another for dx: on a CPU two products are 1.0 to 3 times as fast,
            forward and backward. A GPU waits for launches, so that fewer products count for more.
    """
    # `type` and not `isinstance`: a subclass may compute something else.
    if type(cell) is Simplified:
        for part in cell.modules():
            if type(part) not in PARTS:
                return f"{type(part).__name__} has no hand-derived pass"
        return _simplified(cell, CORES[type(cell.core)](), fold)
    if type(cell) not in PLANS:
        return f"{type(cell).__name__} has no hand-derived pass"
    return PLANS[type(cell)](cell)


def _full(p: Pointwise, prepare: Callable[[Params], Params]) -> Recurrent:
    """A pass in which x and h reach all blocks."""
    return Recurrent(p, Full, {"hoisted": (0, p.blocks), "product": (0, p.blocks)}, prepare)


def _plain(w: Params) -> Params:
    return {"W": w["weight_x"], "R": w["weight_h"], "b": w["bias"]}


def _rnn(cell: Cell) -> Sweep:
    assert isinstance(cell, RNN)
    return _full(pointwise.RNN(cell.activation), _plain)


def _leaky(cell: Cell) -> Sweep:
    assert isinstance(cell, Leaky)

    def prepare(w: Params) -> Params:
        # As long as h, whether there is one ξ or many: the gradient of one is then the sum that autograd makes.
        xi = torch.sigmoid(w["step"]).expand(len(w["weight_x"]))
        return ({"W": w["weight_x"]} if cell.weight_h is None else _plain(w)) | {"xi": xi}

    p = pointwise.Leaky(cell.activation)
    return Recurrent(p, Hoisted, {"hoisted": (0, 1)}, prepare) if cell.weight_h is None else _full(p, prepare)


def _lstm(cell: Cell) -> Sweep:
    def prepare(w: Params) -> Params:
        return _plain(w) | ({"b": w["bias"] + w["bias_h"]} if "bias_h" in w else {})

    return _full(pointwise.LSTM(core=False), prepare)


def _fastgrnn(cell: Cell) -> Sweep:
    def prepare(w: Params) -> Params:
        b = w["bias"]
        if "gate_bias" in w:
            f, a = b.chunk(2)
            b = torch.cat([f + w["gate_bias"], a])
        return _plain(w) | {"b": b} | _shares(w["beta"], w["kappa"])

    return _full(pointwise.FastGRNN(core=False), prepare)


def _shares(beta: Tensor, kappa: Tensor | None) -> Params:
    """β and κ, for which the pass gives gradients, and −β and β + κ, with which it computes."""
    # All are tensors: a Python number would have to be read back from a GPU.
    shares = {"beta": torch.sigmoid(beta)} | ({} if kappa is None else {"kappa": torch.sigmoid(kappa)})
    return shares | {"minus_beta": -shares["beta"], "share": sum(shares.values(), torch.zeros_like(beta))}


def _gru(cell: Cell) -> Sweep:
    """With reset="after" the blocks are a, r, i, q: W reaches the first three and U the last three."""
    assert isinstance(cell, GRU)
    after, m = cell.reset == "after", cell.hidden_size

    def prepare(w: Params) -> Params:
        zeros = w["weight_x"].new_zeros(m)
        b = w["bias"] if "bias" in w else torch.cat([zeros] * 3)
        bias_h = w["bias_h"] if "bias_h" in w else torch.cat([zeros] * 3)
        gate = w.get("gate_bias", zeros)
        if not after:
            # Here no gate multiplies a bias, so all of them act through their sum.
            b = b + bias_h + torch.cat([zeros, gate, zeros])
            return {"W": w["weight_x"], "R": w["weight_h"], "b": b}
        # The candidate's part of the second bias stays alone, as r multiplies it.
        b = b + torch.cat([bias_h[:m], bias_h[m : 2 * m] + gate, zeros])
        # Rolled, so that the rows of W (a, r, i) and those of U (r, i, q) are each one range of a, r, i, q.
        return {"W": w["weight_x"].roll(m, 0), "R": w["weight_h"], "b": b.roll(m), "b_h": bias_h[2 * m :]}

    p = pointwise.GRU(cell.update, cell.reset, cell.activation)
    if after:
        return Recurrent(p, Full, {"hoisted": (0, 3), "product": (1, 4), "alone": (3, 4)}, prepare)
    return Recurrent(p, ResetBefore, {"product": (0, 2), "candidate": (2, 3)}, prepare)


def _simplified(cell: Simplified, p: Pointwise, fold: bool) -> Sweep:
    """The pass of an IRC cell, folded or not, of an IHC cell, or of one without either."""
    gates, n, m = cell.core.gates, cell.input_size, cell.hidden_size
    diagonal = cell.core.diagonal
    blocks = {"product": (0, gates), "candidate": (gates, gates + 1)}
    if isinstance(cell.highway, NoFeedback):
        return Recurrent(p, Hoisted, {"hoisted": (0, gates + 1)}, _alone)
    if isinstance(cell.highway, Highway):
        on_u = {"on_u": (0, 0)} if cell.highway.gamma_on == "uvh" else {}
        return Recurrent(
            p, highway.Highway, blocks | on_u, partial(_highway, diagonal=diagonal, joined=not on_u and not diagonal)
        )
    if fold and (diagonal or n * (1 + gates) >= gates * m):
        return Recurrent(
            p, Full, {"hoisted": (0, gates + 1), "product": (0, gates)}, partial(_folded, diagonal=diagonal)
        )
    return Recurrent(p, highway.Residual, blocks, partial(_residual, diagonal=diagonal))


def _core(w: Params) -> Params:
    """W, W_A, β and the biases of the gates: the first, and the second of an SRU."""
    found = {"W_v": w["core.weight_v"], "W_A": w["core.weight_x"]}
    if "core.beta" in w:
        found |= _shares(w["core.beta"], None)
    if "core.gate_bias" in w:
        rows = len(w["core.weight_v"])
        given = [w[name] for name in ("core.gate_bias", "core.highway_bias") if name in w]
        rest = w["core.gate_bias"].new_zeros(rows - len(given) * len(given[0]))
        found["b"] = torch.cat([*given, rest])
    return found


def _residual(w: Params, diagonal: bool) -> Params:
    alpha, back = torch.sigmoid(w["highway.alpha"]), w["highway.feedback.weight_h"]
    # α goes into U once a call, instead of into U h at every step.
    return _core(w) | ({"omega": alpha * torch.tanh(back)} if diagonal else {"U": alpha.unsqueeze(1) * back})


def _alone(w: Params) -> Params:
    """W and W_A one below the other, for the one product that both have with x."""
    core = _core(w)
    w_v, w_a = core.pop("W_v"), core.pop("W_A")
    if "b" in core:
        # The joint product has the candidate's rows too, which have no bias.
        core["b"] = torch.cat([core["b"], core["b"].new_zeros(len(w_a))])
    return core | {"W": torch.cat([w_v, w_a])}


def _folded(w: Params, diagonal: bool) -> Params:
    back = w["highway.feedback.weight_h"]
    r = w["core.weight_v"] * torch.sigmoid(w["highway.alpha"])
    return _alone(w) | {"R": r * torch.tanh(back) if diagonal else r @ back}


def _highway(w: Params, diagonal: bool, joined: bool = False) -> Params:
    found, back, gamma = _core(w), w["highway.feedback.weight_h"], w["highway.gamma"]
    if "highway.weight_g" in w:
        found |= {"W_G": w["highway.weight_g"], "b_G": w["highway.bias_g"]}
    if diagonal:
        return found | {"omega": torch.tanh(back), "gamma": gamma}
    return found | ({"J": torch.cat([back, gamma])} if joined else {"U": back, "gamma": gamma})


PLANS: dict[type[Cell], Callable[[Any], Sweep]] = {
    RNN: _rnn,
    LSTM: _lstm,
    FastGRNN: _fastgrnn,
    GRU: _gru,
    Leaky: _leaky,
    SRU: lambda cell: SRUScan(),
    TLSTM: lambda cell: TLSTMScan(),
}
"""Cell → its pass; `CORES` has those of the simplified cells, by their core."""
