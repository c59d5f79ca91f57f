"""Seed 003's network as a stack equals its equations, written out one sequence and step at a time."""

import pytest
import torch
from implementations import normal, seeded
from laws import assert_close
from stacks import M, N

from l2lopt import cells, sequence
from l2lopt.core.errors import UserError

needs_cells = pytest.mark.skipif(not {"rnn", "gru"} <= cells.CELLS.keys(), reason="there are no cells rnn and gru yet")


def equations(stack, x, f=torch.tanh):
    """Outputs [T, 2M] and the final h [2L, M] for one sequence x [T, N]; eqs. 7 and 8 corrected."""
    below, final = list(x), []
    for i, layer in enumerate(stack.layers):
        directions = []
        for k, direction in enumerate(layer):
            w, h, states = dict(direction.cell.named_parameters()), torch.zeros(M, dtype=x.dtype), {}
            for t in reversed(range(len(x))) if k else range(len(x)):
                if i == 0:
                    h = f(w["weight_x"] @ below[t] + w["weight_h"] @ h + w["bias"])
                else:
                    (W_r, W_z, W), (V_r, V_z, V) = w["weight_x"].chunk(3), w["weight_h"].chunk(3)
                    right, left = below[t][:M], below[t][M:]
                    z = torch.sigmoid(W_z[:, :M] @ right + W_z[:, M:] @ left + V_z @ h)
                    r = torch.sigmoid(W_r[:, :M] @ right + W_r[:, M:] @ left + V_r @ h)
                    h = z * h + (1 - z) * f(W[:, :M] @ right + W[:, M:] @ left + r * (V @ h))
                states[t] = h
            directions.append(states)
            final.append(h)
        below = [torch.cat([states[t] for states in directions]) for t in range(len(x))]
    return torch.stack(below), torch.stack(final)


@needs_cells
@pytest.mark.parametrize(("layers", "activation"), [(1, "tanh"), (2, "tanh"), (3, "tanh"), (1, "relu"), (3, "relu")])
def test_follows_its_equations(layers, activation):
    stack, x = seeded(sequence.deep_bidirectional_gru(N, M, layers, activation=activation)), normal(5, 2, N)
    output, h = stack(x, lengths=[5, 3])
    for b, length in enumerate([5, 3]):
        expected = equations(stack, x[:length, b], getattr(torch, activation))
        assert_close((output[:length, b], h[:, b]), expected)
        sums = [values.square().sum() for values in (output[:, b], expected[0])]
        gradients, wanted = (torch.autograd.grad(value, list(stack.parameters()), retain_graph=True) for value in sums)
        assert_close(gradients, wanted, 1e-11)


@needs_cells
def test_counts_its_numbers():
    """Layer 1 has a bias; a GRU has three gates that read 2M and M numbers, and none."""
    stack = sequence.deep_bidirectional_gru(N, M, 3)
    expected = 2 * (M * N + M * M + M) + 2 * 2 * 3 * (2 * M * M + M * M)
    assert sum(parameter.numel() for parameter in stack.parameters()) == expected


@needs_cells
def test_takes_the_stacks_options():
    stack = sequence.deep_bidirectional_gru(N, M, 2, batch_first=True, dropout=0.5, weight_drop={"weight_h": 0.25})
    x = torch.ones(3, 5, N)
    assert stack.draw_masks(x).keys() == {f"{i}.{k}.weight_h" for i in (0, 1) for k in (0, 1)} | {"dropout.0"}
    assert stack(x)[0].shape == (3, 5, 2 * M)


def test_needs_a_layer():
    with pytest.raises(UserError, match="num_layers: expected at least 1, found 0; give"):
        sequence.deep_bidirectional_gru(N, M, 0)


def test_knows_two_activations():
    with pytest.raises(UserError, match="gru: activation: expected 'tanh' or 'relu', found 'linear'; choose"):
        sequence.deep_bidirectional_gru(N, M, 2, activation="linear")
