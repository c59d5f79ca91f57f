"""The multiplied-out products, against the layers one after the other."""

import laws
import pytest
import torch
from implementations import FOLDED, normal, seeded

from l2lopt import optimisers
from l2lopt.kernels.folding import fold, refusal


@pytest.mark.parametrize("cell", FOLDED)
def test_first_product_is_the_layers_one_after_the_other(cell):
    optimiser = seeded(optimisers.coordinatewise(cell=FOLDED[cell], hidden_size=4))
    features, h = normal(5, 7), normal(4, 7, seed=1)
    x, c = optimiser.embedding(features.T).T, normal(4, 7, seed=2)
    wanted, _ = optimiser.cell(x, {"h": h, "c": c})
    folded = fold(optimiser, optimiser.phi())
    rows = folded.first @ torch.cat([features, h, torch.ones(1, 7).double()])
    if folded.second is None:
        i, f, o, a = rows.chunk(4)
        a = a.tanh()
    else:
        g, back, x, a = rows.chunk(4)
        v = x + g.sigmoid() * (back - x)
        gates = folded.second @ v
        f, i, o = (gates if folded.second_bias is None else gates + folded.second_bias[:, None]).chunk(3)
    laws.assert_close(o.sigmoid() * torch.tanh(f.sigmoid() * c + i.sigmoid() * a), wanted)


@pytest.mark.parametrize("cell", FOLDED)
def test_lstm_and_ihc_lstm_are_accepted(cell):
    assert refusal(optimisers.coordinatewise(cell=FOLDED[cell])) is None


@pytest.mark.parametrize(
    ("optimiser", "reason"),
    [(optimisers.SGD(0.1), "SGD"), (optimisers.coordinatewise(cell="gru"), "GRU")],
    ids=["sgd", "gru"],
)
def test_a_refusal_says_why(optimiser, reason):
    assert reason in refusal(optimiser)
