"""Seed 003 (Adamson 2015, "Deep recurrent neural network with gated recurrent units"): one unit, and eqs. 7 and 8.

Misprints: the layer-up derivation drops the reset gate's path and, along h→, has W_z where W is due, the recurrent
one's last lines do not close, eq. 8 repeats h where it needs h̃, eq. 7 takes the candidate's state from elsewhere than
t + 1.
"""

import pytest
import torch
from adamson import STEPS, B, M, gates, make_unit, rec, sweep, unit, up
from implementations import normal
from nodes import relative_error
from torch.testing import assert_close


def rec_second_last_line(w, state, D):
    """The last printed line that still names ∂(r∘V h)/∂h, its Jacobian by autograd."""
    h, z, _, tilde, _ = state
    total = z * D + w["V_z"].T @ (z * (1 - z) * (h - tilde) * D)
    jacobian_of = lambda h: torch.sigmoid(w["at_r"] + w["V_r"] @ h) * (w["V_h"] @ h)  # noqa: E731  # the equation in one line
    return total + torch.func.vjp(jacobian_of, h)[1]((1 - z) * (1 - tilde**2) * D)[0]


def rec_last_line(w, state, D):
    """The line after it, which puts V_zᵀ and (h_t − h_{t+1}) in place of that Jacobian."""
    h, z, _, tilde, _ = state
    gate = w["V_z"].T @ (z * (1 - z) * (h - tilde) * D)
    return z * D + gate + w["V_z"].T @ ((1 - z) * (1 - tilde**2) * (h - tilde) * D)


def one_unit(seed):
    """A unit's weights, what its backward pass reads, a delta, and autograd's gradients along h→, h← and h."""
    w = make_unit(seed)
    inputs = [normal(M, B, seed=900 + 10 * seed + k).tanh().requires_grad_() for k in range(3)]
    D = normal(M, B, seed=990 + seed)
    gradients = torch.autograd.grad((unit(w, *inputs) * D).sum(), inputs)
    right, left, h = (value.detach() for value in inputs)
    w["at_r"] = w["W_r1"] @ right + w["W_r2"] @ left
    return w, (h, *gates(w, right, left, h)), D, gradients


each_seed = pytest.mark.parametrize("seed", range(8))


@each_seed
def test_up_and_rec_are_autograds(seed):
    w, state, D, (right, left, h) = one_unit(seed)
    found = up(w, 1, state, D), up(w, 2, state, D), rec(w, state, D)
    assert_close(found, (right, left, h), rtol=0, atol=1e-12)


@each_seed
def test_printed_up_misses_the_reset_gates_path(seed):
    w, state, D, gradients = one_unit(seed)
    for number in (1, 2):
        error = relative_error(up(w, number, state, D, printed=True), gradients[number - 1])
        assert 0.02 < error < 0.5


@each_seed
def test_printed_up_has_w_z_where_w_is_due(seed):
    """On the last line for h→ both terms end in W_zᵀ: far more is wrong than without the reset gate's path alone."""
    w, state, D, (right, _, _) = one_unit(seed)
    mended, printed = (up(own, 1, state, D, printed=True) for own in (w, w | {"W_h1": w["W_z1"]}))
    _, z, _, tilde, _ = state
    assert_close(printed - mended, (w["W_z1"] - w["W_h1"]).T @ ((1 - z) * (1 - tilde**2) * D), rtol=0, atol=1e-12)
    assert relative_error(printed, right) > 2 * relative_error(mended, right)
    assert relative_error(printed, right) > 0.5


@each_seed
def test_printed_rec_holds_until_its_last_lines(seed):
    w, state, D, (_, _, h) = one_unit(seed)
    assert_close(rec_second_last_line(w, state, D), h, rtol=0, atol=1e-12)
    assert relative_error(rec_last_line(w, state, D), h) > 0.05


def settle(w, right, left, candidate_from, printed_eq_8=False):
    """The backward direction (eqs. 5-8) as the values that satisfy its equations, by iteration from zero.

    `candidate_from` is the offset of the state in eq. 7. As meant (+1), it is settled after as many sweeps as steps.
    """
    h = torch.zeros_like(right)

    def shifted(offset):
        return torch.stack(
            [h[t + offset] if 0 <= t + offset < len(h) else torch.zeros_like(h[0]) for t in range(len(h))]
        )

    for _ in range(300):
        after, other = shifted(1), shifted(candidate_from)
        z, r, _, _ = gates(w, right, left, after)
        tilde = torch.tanh(w["W_h1"] @ right + w["W_h2"] @ left + r * (w["V_h"] @ other))
        old, h = h, z * after + (1 - z) * (h if printed_eq_8 else tilde)
    assert (h - old).abs().max() < 1e-13
    return h


def backward_direction():
    """Weights, the layer below and the backward states: the forward unit run over the mirrored steps."""
    w, right, left = make_unit(3, scale=0.4), normal(STEPS, M, B, seed=50), normal(STEPS, M, B, seed=51)
    start = torch.zeros(M, B, dtype=torch.float64)
    mirrored = sweep(
        lambda t, below, h: unit(w, *below, h), list(zip(right.flip(0), left.flip(0), strict=True)), start, False
    )
    return w, right, left, torch.stack(mirrored).flip(0)


def test_equations_7_and_8_corrected_mirror_the_forward_direction():
    w, right, left, mirrored = backward_direction()
    assert_close(settle(w, right, left, candidate_from=1), mirrored, rtol=0, atol=1e-12)


def test_equation_7_needs_the_state_at_t_plus_1():
    w, right, left, mirrored = backward_direction()
    assert relative_error(settle(w, right, left, candidate_from=-1), mirrored) > 0.05


def test_equation_8_as_printed_never_leaves_the_initial_state():
    """h_t = z∘h_{t+1} + (1 − z)∘h_t is h_t = h_{t+1}: no input is ever seen."""
    w, right, left, mirrored = backward_direction()
    assert_close(
        settle(w, right, left, candidate_from=1, printed_eq_8=True), torch.zeros_like(mirrored), rtol=0, atol=0
    )
    assert mirrored.abs().min(dim=0).values.max() > 0.1
