"""The ways through time, the plain loop and the one that is chosen: order, lengths, no steps; for any cell."""

import pytest
import torch
from implementations import normal, seeded
from laws import assert_close, assert_same
from stacks import GRU, Delayed, Elman, M, N

from l2lopt import cells
from l2lopt.sequence import loop, run

WAYS = {"loop": loop.run, "auto": run}
OWN = {"own gru": GRU, "own elman": Elman, "own delayed": Delayed}


def made(name):
    """A cell in float64: one of the tests' own, or a registered one with N = M."""
    return seeded(OWN[name](N, M) if name in OWN else cells.make(name, M, M))


each_cell = pytest.mark.parametrize("name", [*OWN, *cells.CELLS])
each_way = pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
both_directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])


def start(cell, batch):
    """A state such as the cell has after a step."""
    x = normal(cell.input_size, *batch, seed=2)
    state = cell(x, cell.initial_state(x))[1]
    return {name: value.detach() for name, value in state.items()}


@each_cell
@each_way
@both_directions
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_is_the_cell_step_by_step(run, name, reverse, batch):
    cell = made(name)
    x, state = normal(4, cell.input_size, *batch), start(cell, batch)
    outputs, final = run(cell, x, state, reverse=reverse)
    expected = {}
    for t in (3, 2, 1, 0) if reverse else (0, 1, 2, 3):
        expected[t], state = cell(x[t], state)
    assert_close(outputs, torch.stack([expected[t] for t in range(4)]))
    assert_close(final, state)


@each_cell
@each_way
@both_directions
def test_lengths_run_each_sequence_alone(run, name, reverse):
    """Whatever the padding holds."""
    cell, lengths = made(name), [4, 0, 1, 7]
    x, state = normal(7, cell.input_size, 4), start(cell, (4,))
    padded = x.clone()
    for b, length in enumerate(lengths):
        padded[length:, :, b] = float("nan")
    outputs, final = run(cell, padded, state, torch.tensor(lengths), reverse)
    gradients = torch.autograd.grad(outputs.sum(), list(cell.parameters()))
    alone = []
    for b, length in enumerate(lengths):
        own, last = run(cell, x[:length, :, b], {key: value[:, b] for key, value in state.items()}, None, reverse)
        alone.append(own.sum())
        assert_close(outputs[:length, :, b], own)
        assert_same(outputs[length:, :, b], torch.zeros(7 - length, cell.hidden_size, dtype=x.dtype))
        assert_close({key: value[:, b] for key, value in final.items()}, last)
    assert_close(gradients, torch.autograd.grad(sum(alone), list(cell.parameters())))


@each_cell
@each_way
def test_no_steps_give_the_state_back(run, name):
    cell = made(name)
    state = start(cell, (3,))
    outputs, final = run(cell, normal(0, cell.input_size, 3), state)
    assert outputs.shape == (0, cell.hidden_size, 3)
    assert_same(final, state)


@each_cell
@each_way
def test_changes_nothing(run, name):
    cell = made(name)
    x, state = normal(3, cell.input_size, 2), start(cell, (2,))
    before = x.clone(), {key: value.clone() for key, value in state.items()}
    run(cell, x, state, torch.tensor([1, 2]))
    assert_same((x, state), before)


@each_cell
@each_way
def test_pieces_make_the_whole(run, name):
    cell = made(name)
    x, state = normal(7, cell.input_size, 2), start(cell, (2,))
    outputs, final = run(cell, x, state)
    first, between = run(cell, x[:3], state)
    second, last = run(cell, x[3:], between)
    assert_close((torch.cat([first, second]), last), (outputs, final))
