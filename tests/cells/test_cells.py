"""Recurrent cells: the laws of the contract, the printed equations, PyTorch's own cell."""

import laws
import oracles
import pytest
import torch
from implementations import CELLS, normal, seeded

from l2lopt import cells
from l2lopt.errors import UserError

each_cell = pytest.mark.parametrize("cell", [pytest.param(seeded(make()), id=name) for name, make in CELLS.items()])


@pytest.mark.parametrize("name", CELLS)
def test_follows_its_equations(name):
    laws.assert_follows_its_equations(seeded(CELLS[name]()), oracles.CELLS[name])


@each_cell
@pytest.mark.parametrize("index", [[5, 3, 1, 0, 2, 4], [4], [2, 2, 0]], ids=["permuted", "one", "repeated"])
def test_columns_do_not_see_each_other(cell, index):
    laws.assert_columns_do_not_see_each_other(cell, index)


@each_cell
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_trailing_shape_is_kept(cell, shape):
    laws.assert_trailing_shape_is_kept(cell, shape)


@each_cell
def test_changes_nothing(cell):
    laws.assert_cell_changes_nothing(cell)


@each_cell
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_are_right(cell, batch):
    laws.assert_gradients_are_right(cell, batch, steps=3)


@each_cell
def test_maps(cell):
    laws.assert_cell_maps(cell)


@pytest.mark.parametrize(
    ("name", "input_size", "hidden_size", "count"),
    [("lstm", 20, 20, 3_280), ("lstm", 100, 800, 2_883_200), ("lstm", 3, 5, 4 * (5 * 3 + 5 * 5 + 5))],
)
def test_parameter_count(name, input_size, hidden_size, count):
    cell = cells.make(name, input_size, hidden_size)
    assert sum(parameter.numel() for parameter in cell.parameters()) == count


@pytest.mark.parametrize(("name", "hidden_size"), [("lstm", 25)])
def test_initial_values_lie_in_pytorchs_range(name, hidden_size):
    values = torch.cat([parameter.detach().flatten() for parameter in cells.make(name, 7, hidden_size).parameters()])
    assert 0.19 < values.abs().max() <= 0.2


def test_lstm_is_torchs_with_the_two_biases_added():
    ours, theirs = seeded(cells.LSTM(3, 4)), torch.nn.LSTMCell(3, 4).double()
    split = normal(16, seed=5)
    theirs.load_state_dict(
        {
            "weight_ih": ours.weight_x.detach(),
            "weight_hh": ours.weight_h.detach(),
            "bias_ih": split,
            "bias_hh": ours.bias.detach() - split,
        }
    )
    x, state = normal(6, 3, 8), {"h": normal(4, 8, seed=1), "c": normal(4, 8, seed=2)}
    expected = (state["h"].T, state["c"].T)
    for step in x:
        h, state = ours(step, state)
        expected = theirs(step.T, expected)
        laws.assert_close((h, state["h"], state["c"]), (expected[0].T, expected[0].T, expected[1].T))


@pytest.mark.parametrize(("input_size", "hidden_size", "name"), [(0, 4, "input_size"), (3, -1, "hidden_size")])
def test_sizes_are_positive(input_size, hidden_size, name):
    with pytest.raises(UserError, match=f"{name}: expected at least 1, found"):
        cells.make("lstm", input_size, hidden_size)
