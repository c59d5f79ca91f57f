"""Seed 000, "Differentiation of coupled GRU" (Compagnon et al. 2021): equations (1)-(28), left ← and right → through
shared weights. A pair lies on the first axis, [2, B, ...]; W are [M, N], the print's W x being x Wᵀ on rows.

Exact but for one misprint: (20)-(23) print h_t where the outer products need h_{t−1}.
"""

import pytest
import torch
from implementations import normal
from nodes import Nodes, assert_terms_agree, relative_error, wrong_terms

N, M, B, STEPS = 3, 4, 2, 5


def make_weights():
    gates = {"iz": N, "ir": N, "in": N, "hz": M, "hr": M, "hn": M, "hc": M}
    w = {f"W_{gate}": 0.7 * normal(M, size, seed=k) for k, (gate, size) in enumerate(gates.items())}
    w |= {f"b_{gate}": 0.7 * normal(M, seed=10 + k) for k, gate in enumerate(gates)}
    return {name: value.requires_grad_() for name, value in w.items()}


def forward(x, h, w, node=lambda name, value: value, coupled=True):
    """One step of a pair, x [2, B, N] and h [2, B, M] to h' and what the backward pass reads."""

    def a(gate, value):
        return value @ w[f"W_{gate}"].T + w[f"b_{gate}"]

    az = node("da_z", a("iz", x) + a("hz", h))
    ar = node("da_r", a("ir", x) + a("hr", h))
    z, r = node("dz", torch.sigmoid(az)), node("dr", torch.sigmoid(ar))
    a_nh = node("da_n,h", a("hn", h))
    a_ni = a("in", x)
    tilde = node("dh̃", torch.tanh(node("da_n", a_ni + r * a_nh)))
    ac = node("da_c", a("hc", h).sum(0))  # b_hc enters twice
    c = node("dc", torch.sigmoid(ac)) if coupled else torch.zeros_like(ac)
    bar = node("dh̄", (1 - c) * tilde + c * tilde.flip(0))
    after = z * node("dh_o", h) + (1 - z) * bar
    return after, {
        "z": z,
        "r": r,
        "c": c,
        "tilde": tilde,
        "bar": bar,
        "az": az,
        "ar": ar,
        "ac": ac,
        "ani": a_ni,
        "anh": a_nh,
    }


def backward(dh, x, before, after, v, w, printed=False):
    """Equations (1)-(28) for one step; `printed` takes h_t in (20)-(23)."""
    h = after if printed else before
    z, r, c, tilde, bar = (v[name] for name in ("z", "r", "c", "tilde", "bar"))
    az, ar, ac, anh = (v[name] for name in ("az", "ar", "ac", "anh"))
    s, L, R = torch.sigmoid, 0, 1
    d = {"dh_o": dh * z}  # (1)
    d["dz"] = dh * (before - bar)  # (2)
    d["dh̄"] = dh * (1 - z)  # (3)
    d["dc"] = d["dh̄"][L] * (tilde[R] - tilde[L]) + d["dh̄"][R] * (tilde[L] - tilde[R])  # (4)
    d["dh̃"] = d["dh̄"] + torch.stack([c, c]) * (torch.stack([d["dh̄"][R], d["dh̄"][L]]) - d["dh̄"])  # (5)
    d["da_z"] = d["dz"] * ((1 - s(az)) * s(az))  # (6)
    d["da_n"] = d["dh̃"] * (1 - torch.tanh(v["ani"] + r * anh) ** 2)  # (7)
    d["da_n,h"] = d["da_n"] * r  # (8)
    d["dr"] = d["da_n"] * anh  # (9)
    d["da_r"] = d["dr"] * ((1 - s(ar)) * s(ar))  # (10)
    d["da_c"] = d["dc"] * ((1 - s(ac)) * s(ac))  # (11)
    da_i = [torch.cat([d["da_z"][k], d["da_r"][k], d["da_n"][k]], -1) for k in (L, R)]  # (12), (13)
    da_h = [torch.cat([d["da_z"][k], d["da_r"][k], d["da_n,h"][k], d["da_c"]], -1) for k in (L, R)]  # (14), (15)
    d["W_iz"] = d["da_z"][L].T @ x[L] + d["da_z"][R].T @ x[R]  # (16)
    d["W_ir"] = d["da_r"][L].T @ x[L] + d["da_r"][R].T @ x[R]  # (17)
    d["W_in"] = d["da_n"][L].T @ x[L] + d["da_n"][R].T @ x[R]  # (18)
    d["W_hz"] = d["da_z"][L].T @ h[L] + d["da_z"][R].T @ h[R]  # (20)
    d["W_hr"] = d["da_r"][L].T @ h[L] + d["da_r"][R].T @ h[R]  # (21)
    d["W_hn"] = d["da_n,h"][L].T @ h[L] + d["da_n,h"][R].T @ h[R]  # (22)
    d["W_hc"] = d["da_c"].T @ (h[L] + h[R])  # (23)
    ones = torch.ones(len(dh[L]), dtype=dh.dtype)
    b_i = da_i[L].T @ ones + da_i[R].T @ ones  # (25)
    b_h = da_h[L].T @ ones + da_h[R].T @ ones  # (26)
    names = ("b_iz", "b_ir", "b_in", "b_hz", "b_hr", "b_hn", "b_hc")
    d |= dict(zip(names, (*b_i.chunk(3), *b_h.chunk(4)), strict=True))
    W_i = torch.cat([w["W_iz"], w["W_ir"], w["W_in"]])  # (19)
    W_h = torch.cat([w["W_hz"], w["W_hr"], w["W_hn"], w["W_hc"]])  # (24)
    d["dx"] = torch.stack([da_i[L] @ W_i, da_i[R] @ W_i])  # (27)
    d["dh"] = d["dh_o"] + torch.stack([da_h[L] @ W_h, da_h[R] @ W_h])  # (28)
    return d


def gradients(value, leaves):
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()), retain_graph=True), strict=True))


def one_step(printed=False):
    w, nodes = make_weights(), Nodes()
    x, h = normal(2, B, N, seed=30).requires_grad_(), normal(2, B, M, seed=31).requires_grad_()
    dh = normal(2, B, M, seed=32)
    after, values = forward(x, h, w, nodes)
    value = (after * dh).sum()
    expected = nodes.gradients(value) | gradients(value, {"dx": x, "dh": h} | w)
    with torch.no_grad():
        return backward(dh, x, h, after, values, w, printed), expected


def through_time(printed=False):
    """BPTT over all steps, dh_t being what the loss asks of h_t and (28) of the step after it."""
    w, xs = make_weights(), normal(STEPS, 2, B, N, seed=30).requires_grad_()
    h = first = normal(2, B, M, seed=31).requires_grad_()
    asked, past, value = normal(STEPS, 2, B, M, seed=32), [], 0
    for t in range(STEPS):
        after, values = forward(xs[t], h, w)
        past.append((xs[t], h, after, values))
        h, value = after, value + (after * asked[t]).sum()
    expected = gradients(value, {"dx": xs, "dh": first} | w)
    found, dh, dx = {name: torch.zeros_like(p) for name, p in w.items()}, torch.zeros(2, B, M, dtype=xs.dtype), []
    with torch.no_grad():
        for t in reversed(range(STEPS)):
            d = backward(asked[t] + dh, *past[t], w, printed)
            dh = d["dh"]
            dx.insert(0, d["dx"])
            found = {name: found[name] + d[name] for name in found}
    return found | {"dx": torch.stack(dx), "dh": dh}, expected


@pytest.mark.parametrize("run", [one_step, through_time])
def test_every_term_is_autograds(run):
    found, expected = run()
    assert_terms_agree(found, expected)


@pytest.mark.parametrize("run", [one_step, through_time])
def test_20_to_23_need_the_state_before_the_step(run):
    found, expected = run(printed=True)
    assert wrong_terms(found, expected) == {"W_hz", "W_hr", "W_hn", "W_hc"}
    assert all(relative_error(found[name], expected[name]) > 0.1 for name in ("W_hz", "W_hr", "W_hn", "W_hc"))


def test_without_coupling_it_is_torchs_gru_cell():
    w = make_weights()
    cell = torch.nn.GRUCell(N, M).double()
    stacked = {
        f"{theirs}_{kind}h": torch.cat([w[f"{ours}_{kind}{gate}"] for gate in "rzn"])
        for theirs, ours in (("weight", "W"), ("bias", "b"))
        for kind in "ih"
    }
    cell.load_state_dict({name: value.detach() for name, value in stacked.items()})
    x, h = normal(2, B, N, seed=30), normal(2, B, M, seed=31)
    after, _ = forward(x, h, w, coupled=False)
    torch.testing.assert_close(after, cell(x.flatten(0, 1), h.flatten(0, 1)).view_as(after), rtol=0, atol=1e-14)


def test_sides_are_symmetric():
    w, x, h = make_weights(), normal(2, B, N, seed=30), normal(2, B, M, seed=31)
    after, _ = forward(x, h, w)
    torch.testing.assert_close(forward(x.flip(0), h.flip(0), w)[0], after.flip(0), rtol=0, atol=1e-14)
    same, _ = forward(x[[0, 0]], h[[0, 0]], w)
    torch.testing.assert_close(same[0], same[1], rtol=0, atol=0)
    assert (after[0] - after[1]).abs().max() > 0.1
