"""Seed 002, "GRU units" (Fichou 2019): δ1-δ24 and the weight updates, row vectors, update gate z the NEW share.

The print has five errors; `backward(..., printed={...})` keeps the named ones as they are printed. Its forward pass
writes W_g * (h·r) where row vectors need (h·r) * W_g, and its updates accumulate on δW_f, δW_i for δW_r, δW_z.
"""

import pytest
import torch
from implementations import normal
from nodes import Nodes, assert_terms_agree, wrong_terms

STEPS, B = 4, 3


def make_weights(N, M):
    sizes = {f"{kind}_{gate}": (M if kind == "W" else N, M) for kind in "WU" for gate in "rzg"}
    return {name: (0.7 * normal(*size, seed=k)).requires_grad_() for k, (name, size) in enumerate(sizes.items())}


def forward(x, h, w, node=lambda name, value: value):
    """One time step; every use of h, r, z and x is a node of its own, named after the δ that is its gradient."""
    r = torch.sigmoid(node("18", node("21", h) @ w["W_r"] + node("20", x) @ w["U_r"]))
    z = torch.sigmoid(node("11", node("15", h) @ w["W_z"] + node("14", x) @ w["U_z"]))
    z = node("9", z)
    g = torch.tanh(node("10", node("13", node("17", h) * node("16", r)) @ w["W_g"] + node("12", x) @ w["U_g"]))
    return node("3", node("4", h) * node("5", 1 - node("6", z)) + node("7", z) * node("8", g)), (r, z, g)


def backward(d1, d2, x, h, r, z, g, w, printed=frozenset()):
    """δ3 to δ24 by number, and this step's share of the weights' gradients."""
    d = {"1": d1, "2": d2}
    d["3"] = d1 + d2
    d["4"] = (1 - z) * d["3"]
    d["5"] = d["3"] * h
    d["6"] = 1 - d["5"] if "δ6" in printed else -d["5"]
    d["7"] = d["3"] * g
    d["8"] = d["3"] * z
    d["9"] = d["7"] + (d["8"] if "δ9" in printed else d["6"])
    d["10"] = d["8"] * (1 - g**2)
    d["11"] = d["9"] * z * (1 - z)
    W, U = ("W", "U") if "W and U" in printed else ("U", "W")
    d["12"], d["13"] = d["10"] @ w[f"{W}_g"].T, d["10"] @ w[f"{U}_g"].T
    d["14"], d["15"] = d["11"] @ w[f"{W}_z"].T, d["11"] @ w[f"{U}_z"].T
    d["16"], d["17"] = d["13"] * h, d["13"] * r
    d["18"] = (d["17"] if "δ18" in printed else d["16"]) * r * (1 - r)
    d["19"] = d["17"] + d["4"]
    d["20"], d["21"] = d["18"] @ w[f"{W}_r"].T, d["18"] @ w[f"{U}_r"].T
    d["22"] = d["21"] + d["15"]
    d["23"] = d["19"] + d["22"]
    d["24"] = d["12"] + d["14"] + d["20"]
    at_r, at_g = ("10", "18") if "weights" in printed else ("18", "10")
    gradients = {"W_r": h.T @ d[at_r], "U_r": x.T @ d[at_r], "W_z": h.T @ d["11"], "U_z": x.T @ d["11"]}
    return d, gradients | {"W_g": (h * r).T @ d[at_g], "U_g": x.T @ d[at_g]}


def one_step(N, M, printed=frozenset()):
    """The terms of one step, derived and by autograd; the sum of the uses gives δ23 (h) and δ24 (x)."""
    w, nodes = make_weights(N, M), Nodes()
    x, h = normal(B, N, seed=20).requires_grad_(), normal(B, M, seed=21).requires_grad_()
    d1, d2 = normal(B, M, seed=22), normal(B, M, seed=23)
    after, (r, z, g) = forward(x, h, w, nodes)
    value = (after * (d1 + d2)).sum()
    expected = nodes.gradients(value) | nodes_of(value, {"23": h, "24": x} | w)
    expected["22"], expected["19"] = expected["21"] + expected["15"], expected["17"] + expected["4"]
    with torch.no_grad():
        d, gradients = backward(d1, d2, x, h, r, z, g, w, printed)
    return d | gradients, expected


def nodes_of(value, leaves):
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()), retain_graph=True), strict=True))


def test_every_term_is_autograds():
    for N, M in [(3, 4), (4, 4), (5, 2)]:
        found, expected = one_step(N, M)
        assert expected.keys() >= {str(k) for k in range(3, 25)}
        assert_terms_agree(found, expected)


MISPRINTS = {
    "δ6": {"6", "9", "11", "14", "15", "22", "23", "24", "W_z", "U_z"},
    "δ9": {"9", "11", "14", "15", "22", "23", "24", "W_z", "U_z"},
    "W and U": {"12", "13", "14", "15", "16", "17", "18", "19", "20", "21", "22", "23", "24", "W_r", "U_r"},
    "δ18": {"18", "20", "21", "22", "23", "24", "W_r", "U_r"},
    "weights": {"W_r", "U_r", "W_g", "U_g"},
}


@pytest.mark.parametrize("misprint", MISPRINTS)
def test_each_misprint_spoils_what_depends_on_it_and_nothing_else(misprint):
    """N = M = 4: in no other case do W and U even fit when exchanged."""
    found, expected = one_step(4, 4, {misprint})
    assert wrong_terms(found, expected) == MISPRINTS[misprint]


def through_time(printed=frozenset()):
    """Gradients of Σ over steps, derived from the last step to the first (δ2: the later step's δ23), and autograd's."""
    N = M = 4
    w, xs = make_weights(N, M), normal(STEPS, B, N, seed=20).requires_grad_()
    h = first = normal(B, M, seed=21).requires_grad_()
    d1, past, value = normal(STEPS, B, M, seed=22), [], 0
    for t in range(STEPS):
        after, gates = forward(xs[t], h, w)
        past.append((xs[t], h, *gates))
        h, value = after, value + (after * d1[t]).sum()
    expected = nodes_of(value, {"x": xs, "h": first} | w)
    found, d2, dx = {name: torch.zeros_like(p) for name, p in w.items()}, torch.zeros(B, M, dtype=xs.dtype), []
    with torch.no_grad():
        for t in reversed(range(STEPS)):
            d, gradients = backward(d1[t], d2, *past[t], w, printed)
            d2 = d["23"]
            dx.insert(0, d["24"])
            found = {name: found[name] + gradients[name] for name in found}
    return found | {"x": torch.stack(dx), "h": d2}, expected


def test_through_time_it_is_autograd():
    assert_terms_agree(*through_time())


@pytest.mark.parametrize("misprint", MISPRINTS)
def test_through_time_each_misprint_spoils_the_weights(misprint):
    found, expected = through_time({misprint})
    assert {"W_r", "U_r"} <= wrong_terms(found, expected)
