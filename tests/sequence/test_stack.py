"""Stacks over any cells: forms of the state, layouts, derivatives, `torch.func`."""

import numpy as np
import pytest
import torch
from implementations import normal, seeded
from laws import assert_close, assert_same
from stacks import GRU, Delayed, Elman, M, N, Pair, each_shape, grid, lstm_state
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from l2lopt import cells, sequence


def registered(name, layers=1, bidirectional=False):
    """A stack of a registered cell; equal sizes where a cell may need them."""
    if bidirectional:
        return seeded(sequence.Stack([[cells.make(name, M, M), cells.make(name, M, M)]]))
    return seeded(sequence.make(name, M, M, layers))


@pytest.mark.parametrize("name", cells.CELLS)
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, False), (1, True)], ids=str)
def test_every_registered_cell_stacks(name, layers, bidirectional):
    stack, x = registered(name, layers, bidirectional), normal(5, 3, M)
    output, final = stack(x)
    assert output.shape == (5, 3, M * (1 + bidirectional))
    first, between = stack(x[:2])
    if not bidirectional:
        second, last = stack(x[2:], between)
        assert_close((torch.cat([first, second]), last), (output, final))
    for b, length in enumerate([5, 2, 0]):
        mine = stack(x[:length, b])[0]
        assert_close(stack(x, lengths=[5, 2, 0])[0][:length, b], mine)


@pytest.mark.parametrize("name", cells.CELLS)
def test_every_registered_cell_has_right_gradients(name):
    stack, x = registered(name, 2), normal(3, 2, M)
    weights = dict(stack.named_parameters())

    def outputs(x, *values):
        output, final = functional_call(stack, dict(zip(weights, values, strict=True)), (x,), {"lengths": [3, 1]})
        return output, *(part for part in torch.utils._pytree.tree_leaves(final))

    # Along random directions: number by number the stacks would take half a minute.
    assert torch.autograd.gradcheck(outputs, (x.requires_grad_(), *weights.values()), fast_mode=True)


@each_shape
@pytest.mark.parametrize("cell", [Elman, GRU, cells.LSTM])
def test_gradcheck(cell, layers, bidirectional):
    stack, x = grid(cell, layers, bidirectional), normal(3, 2, N).requires_grad_()
    given = (x, *stack.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: stack(x, lengths=[2, 3])[0], given, fast_mode=True)


@each_shape
def test_state_of_h_alone_is_a_tensor(layers, bidirectional):
    stack = grid(GRU, layers, bidirectional)
    h = normal(layers * (1 + bidirectional), 3, M)
    output, final = stack(normal(5, 3, N), h)
    assert final.shape == h.shape
    assert_close(final[-1 - bidirectional], output[-1, :, :M])
    if bidirectional:
        assert_close(final[-1], output[0, :, M:])
    assert_same(stack(normal(0, 3, N), h)[1], h)


@each_shape
def test_other_states_are_mappings(layers, bidirectional):
    stack = grid(Delayed, layers, bidirectional)
    x = normal(4, 2, N)
    _, final = stack(x)
    assert len(final) == layers * (1 + bidirectional)
    assert [set(part) for part in final] == [{"last", "h"}] * len(final)
    assert_same(final[0]["last"], x[-1])
    assert final[-1]["last"].shape == (2, N if layers == 1 else M * (1 + bidirectional))
    start = [{name: normal(*value.shape, seed=9) for name, value in part.items()} for part in final]
    assert_same(stack(x[:0], start)[1], start)
    assert (stack(x, start)[0] - stack(x)[0]).abs().max() > 1e-3


def test_initial_state_is_the_cells_own():
    stack, x = grid(Delayed), normal(1, 2, N)
    (blank,) = stack(x[:0])[1]
    assert_same(blank, {"last": torch.ones(2, N).double(), "h": torch.zeros(2, M).double()})
    cell = stack.layers[0][0].cell
    assert_close(
        stack(x)[0][0].T, cell(x[0].T, {"last": torch.ones(N, 2).double(), "h": torch.zeros(M, 2).double()})[0]
    )


def test_mappings_are_taken_from_every_cell():
    stack, x = grid(cells.LSTM, 2), normal(5, 3, N)
    h, c = lstm_state(2, False, (3,))
    assert_same(stack(x, [{"h": h[0], "c": c[0]}, {"c": c[1], "h": h[1]}]), stack(x, (h, c)))


def test_layers_may_differ_in_cell_and_size():
    layers = [[Elman(N, 2), Elman(N, 5)], [cells.LSTM(7, 6)], [GRU(6, 4)]]
    stack = seeded(sequence.Stack(layers))
    x = normal(5, 2, N)
    output, final = stack(x)
    assert output.shape == (5, 2, 4)
    assert [{name: value.shape for name, value in part.items()} for part in final] == [
        {"h": (2, 2)},
        {"h": (2, 5)},
        {"h": (2, 6), "c": (2, 6)},
        {"h": (2, 4)},
    ]
    for layer in layers:
        x = sequence.Stack([layer])(x)[0]
    assert_close(output, x)


@each_shape
def test_no_steps(layers, bidirectional):
    stack, state = grid(cells.LSTM, layers, bidirectional), lstm_state(layers, bidirectional, (3,))
    output, final = stack(normal(0, 3, N), state)
    assert output.shape == (0, 3, M * (1 + bidirectional))
    assert_same(final, state)
    assert_same(stack(normal(4, 3, N), state, lengths=[0, 0, 0]), (output.new_zeros(4, 3, output.shape[-1]), state))
    assert stack(normal(4, 0, N))[0].shape == (4, 0, output.shape[-1])


def test_lengths_come_as_lists_or_tensors_and_full_ones_change_nothing():
    stack, x = grid(GRU, 2, True), normal(5, 3, N)
    assert_same(stack(x, lengths=torch.tensor([5, 1, 0], dtype=torch.int32)), stack(x, lengths=(5, 1, 0)))
    assert_same(stack(x, lengths=[5, 5, 5]), stack(x))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.uint16])
def test_lengths_may_have_a_type_that_cannot_hold_t(kind):
    """T = 356 is 100 in eight bits."""
    stack, x, lengths = grid(GRU), normal(356, 2, N), torch.tensor([100, 100])
    assert_same(stack(x, lengths=lengths.to(kind)), stack(x, lengths=lengths))


def test_packed_equals_padded_for_any_cell():
    stack, x, lengths = grid(Delayed, 2, True), normal(5, 3, N), [2, 5, 3]
    packed, final = stack(pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False))
    assert_close((pad_packed_sequence(packed)[0], final), stack(x, lengths=lengths))


def test_batch_first_moves_the_batch_of_outputs_only():
    time_first, batch_first = grid(GRU, 2), grid(GRU, 2, batch_first=True)
    x = normal(5, 3, N)
    output, final = time_first(x)
    assert output.is_contiguous()
    moved = batch_first(x.transpose(0, 1), lengths=[5, 2, 4])
    assert_same((moved[0].transpose(0, 1), moved[1]), time_first(x, lengths=[5, 2, 4]))
    assert_same(batch_first(x.transpose(0, 1)), (output.transpose(0, 1), final))


def test_further_axes_are_a_batch():
    stack, x = grid(cells.LSTM, 2, True), normal(5, 2, 3, N)
    output, (h, c) = stack(x)
    flat, (h_flat, c_flat) = stack(x.flatten(1, 2))
    assert_close((output.flatten(1, 2), h.flatten(1, 2), c.flatten(1, 2)), (flat, h_flat, c_flat))
    lengths = torch.tensor([[5, 0, 2], [1, 4, 3]])
    assert_close(stack(x, lengths=lengths)[0].flatten(1, 2), stack(x.flatten(1, 2), lengths=lengths.flatten())[0])
    last = grid(cells.LSTM, 2, True, batch_first=True)(x.movedim(0, -2))
    assert_close((last[0].movedim(-2, 0), last[1]), (output, (h, c)))


@pytest.mark.parametrize("batch", [(2,), (2, 3)], ids=str)
def test_cells_over_pairs(batch):
    stack, x = grid(Pair, 2, True), normal(5, *batch, N)
    output, h = stack(x)
    assert output.shape == (5, *batch, 2 * M)
    assert h.shape == (4, *batch, M)
    swapped, h_swapped = stack(x.flip(1))
    assert_close((swapped.flip(1), h_swapped.flip(1)), (output, h))
    assert (stack(torch.cat([x[:, :1], x[:, 1:] + 1], 1))[0][:, 0] - output[:, 0]).abs().max() > 1e-3


@each_shape
def test_maps_over_inputs_and_weights(layers, bidirectional):
    stack = grid(cells.LSTM, layers, bidirectional)
    rows = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in stack.named_parameters()}
    xs = normal(2, 4, 3, N)

    def loss(weights, x):
        output, (h, c) = functional_call(stack, weights, (x,), {"lengths": [4, 0, 2]})
        return output.square().sum() + (h * c).sum()

    mapped = vmap(grad(loss))(rows, xs)
    for row in range(2):
        alone = {name: value[row].clone().requires_grad_() for name, value in rows.items()}
        gradients = torch.autograd.grad(loss(alone, xs[row]), list(alone.values()))
        assert_close({name: value[row] for name, value in mapped.items()}, dict(zip(alone, gradients, strict=True)))


def test_second_derivatives_are_right():
    stack = grid(cells.LSTM, 2)
    h, c = lstm_state(2, False, (2,))
    x = normal(2, 2, N).requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x, h, c: stack(x, (h, c))[0], (x, h.requires_grad_(), c.requires_grad_())
    )


def test_weights_travel_by_state_dict():
    ours, other = grid(GRU, 2, True), grid(GRU, 2, True, seed=1)
    x = normal(3, 2, N)
    assert (ours(x)[0] - other(x)[0]).abs().max() > 1e-3
    other.load_state_dict(ours.state_dict())
    assert_same(ours(x), other(x))


def test_a_stack_over_pairs_swaps_with_its_sides():
    stack, x = seeded(sequence.make("coupled-gru", N, M, num_layers=2)), normal(5, 2, 3, N)
    output, final = stack(x)
    assert output.shape == (5, 2, 3, M)
    assert_close(stack(x.flip(1)), (output.flip(1), final.flip(1)))


@pytest.mark.parametrize(("name", "expected"), [("lstm", 20_200_800), ("ihc-lstm", 16_262_700)])
def test_the_last_layer_may_have_a_size_of_its_own(name, expected):
    """The language models of Kuo et al. 2020, 400 → 1150 → 1150 → 400, with their counts."""
    with torch.device("meta"):
        stack = sequence.make(name, 400, 1150, 3, output_size=400)
    assert [(layer[0].cell.input_size, layer[0].cell.hidden_size) for layer in stack.layers] == [
        (400, 1150),
        (1150, 1150),
        (1150, 400),
    ]
    assert sum(parameter.numel() for parameter in stack.parameters()) == expected


@pytest.mark.parametrize("layers", [1, 3])
def test_a_size_of_its_own_is_per_direction(layers):
    stack = seeded(sequence.make("lstm", N, M, layers, output_size=2, bidirectional=True))
    assert stack(normal(5, 3, N))[0].shape == (5, 3, 4)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_code_for_torchs_layers_finds_what_it_looks_for(bidirectional):
    stack = sequence.make("lstm", 3, 5, num_layers=2, bidirectional=bidirectional)
    assert (stack.input_size, stack.hidden_size, stack.num_layers, stack.bidirectional) == (3, 5, 2, bidirectional)
    stack.flatten_parameters()
    start = torch.zeros(stack.num_layers * (1 + stack.bidirectional), 2, stack.hidden_size)
    assert stack(torch.zeros(4, 2, 3), (start, start))[0].shape == (4, 2, 5 * (1 + bidirectional))
    lengths = np.array([4, 2])
    assert stack(torch.zeros(4, 2, 3), lengths=lengths)[0].equal(stack(torch.zeros(4, 2, 3), lengths=[4, 2])[0])


@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_the_final_state_may_be_changed_in_place(backend):
    """That of a T-LSTM holds the last input."""
    stack, x = sequence.make("t-lstm", N, M, backend=backend), torch.ones(5, 2, N)
    stack(x)[1][0]["x"].zero_()
    assert x.all()


def test_a_printed_layer_shows_its_sizes():
    lines = str(sequence.make("ihc-lstm", N, M)) + str(sequence.make("leaky", N, M))
    assert all(part in lines for part in ("Simplified(\n", f"LSTMCore({N}, {M})", f"Leaky({N}, {M})", f"{N}, {M}\n"))
