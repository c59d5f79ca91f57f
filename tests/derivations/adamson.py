"""Seed 003's unit (Adamson 2015), column vectors [M, B]: z the share KEPT, reset after the product, inputs h→, h←."""

import torch
from implementations import normal

M, B, STEPS, LAYERS, CLASSES = 4, 3, 5, 3, 6


def make_unit(seed, scale=0.7):
    """One direction of a GRU layer: W_g1 reads h→ of the layer below, W_g2 h←, V_g the unit's own state."""
    names = [f"{kind}_{gate}{number}" for gate in "zrh" for kind, number in (("W", 1), ("W", 2), ("V", ""))]
    return {name: scale * normal(M, M, seed=100 * seed + k) for k, name in enumerate(names)}


def gates(w, right, left, h):
    """z, r, h̃ and V h (eqs. 1-3)."""
    z = torch.sigmoid(w["W_z1"] @ right + w["W_z2"] @ left + w["V_z"] @ h)
    r = torch.sigmoid(w["W_r1"] @ right + w["W_r2"] @ left + w["V_r"] @ h)
    Vh = w["V_h"] @ h
    return z, r, torch.tanh(w["W_h1"] @ right + w["W_h2"] @ left + r * Vh), Vh


def unit(w, right, left, h):
    """Eqs. 1-4, and 5-8 as corrected."""
    z, _, tilde, _ = gates(w, right, left, h)
    return z * h + (1 - z) * tilde


def up(w, number, state, D, printed=False):
    """What delta D of a unit sends to h→ (number 1) or h← (2) of the layer below; `printed` drops the reset's path."""
    h, z, r, tilde, Vh = state
    total = w[f"W_z{number}"].T @ (z * (1 - z) * (h - tilde) * D)
    total = total + w[f"W_h{number}"].T @ ((1 - z) * (1 - tilde**2) * D)
    if not printed:
        total = total + w[f"W_r{number}"].T @ (r * (1 - r) * Vh * (1 - z) * (1 - tilde**2) * D)
    return total


def rec(w, state, D):
    """What delta D of a unit sends to its state before the step."""
    h, z, r, tilde, Vh = state
    inner = (1 - z) * (1 - tilde**2) * D
    total = z * D + w["V_z"].T @ (z * (1 - z) * (h - tilde) * D)
    return total + w["V_h"].T @ (r * inner) + w["V_r"].T @ (r * (1 - r) * Vh * inner)


def sweep(step, inputs, h, reverse):
    """The states h_t of one direction, in the order of time."""
    states, order = {}, range(len(inputs))
    for t in reversed(order) if reverse else order:
        states[t] = h = step(t, inputs[t], h)
    return [states[t] for t in order]
