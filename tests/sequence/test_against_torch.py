"""Stacks of LSTMs equal `nn.LSTM`: outputs, final states and gradients, padded, packed, batched or not."""

import pytest
import torch
from implementations import normal
from laws import assert_close
from stacks import GRU, Elman, M, N, each_shape, lstm_state, torch_layer
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from l2lopt import cells
from l2lopt.core.errors import UserError
from l2lopt.sequence import from_torch, torch_weights


def gradients(output, final, inputs, module, names):
    """Adjoints of a weighted sum of the outputs and final states, along inputs and weights."""
    terms = [output, *([final] if isinstance(final, torch.Tensor) else final)]
    value = sum((term * normal(*term.shape, seed=30 + k)).sum() for k, term in enumerate(terms))
    weights = dict(module.named_parameters())
    found = torch.autograd.grad(value, [*inputs, *(weights[name] for name in names)], allow_unused=True)
    return found[: len(inputs)], dict(zip(names, found[len(inputs) :], strict=True))


def torch_names(module):
    """Of each cell of `module`: the names of its four weights in PyTorch."""
    directions = ["", "_reverse"][: 1 + module.bidirectional]
    places = [f"_l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]
    return [[f"{kind}{place}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")] for place in places]


def our_names(module):
    """Of each cell of our stack of LSTMs: the names of its weights."""
    places = [f"layers.{i}.{k}.cell" for i in range(module.num_layers) for k in range(1 + module.bidirectional)]
    return [[f"{place}.{kind}" for kind in ("weight_x", "weight_h", "bias")] for place in places]


def assert_equal_layers(theirs, call_theirs, call_ours, inputs):
    """The two calls agree in outputs, final states, and gradients of inputs and weights."""
    ours = from_torch(theirs)
    inputs = [value.requires_grad_() for value in inputs]
    expected, found = call_theirs(theirs, *inputs), call_ours(ours, *inputs)
    assert_close(found, expected)
    name_groups, our_groups = torch_names(theirs), our_names(theirs)
    a, their_gradients = gradients(*expected, inputs, theirs, [name for group in name_groups for name in group])
    b, our_gradients = gradients(*found, inputs, ours, [name for group in our_groups for name in group])
    assert_close(b, a)
    for group, our_group in zip(name_groups, our_groups, strict=True):
        x, h, bias, other = (their_gradients[name] for name in group)
        assert_close(bias, other)  # either bias has the gradient of the sum
        assert_close([our_gradients[name] for name in our_group], [x, h, bias])


def call(layer, x, h, c):
    return layer(x, (h, c))


@each_shape
@pytest.mark.parametrize("batch", [(1,), (3,), ()], ids=["batch 1", "batch 3", "one sequence"])
@pytest.mark.parametrize("steps", [1, 7])
def test_equals_nn_lstm(layers, bidirectional, batch, steps):
    theirs = torch_layer(nn.LSTM, layers, bidirectional)
    inputs = [normal(steps, *batch, N, seed=3), *lstm_state(layers, bidirectional, batch)]
    assert_equal_layers(theirs, call, call, inputs)


@each_shape
def test_starts_from_zeros(layers, bidirectional):
    theirs = torch_layer(nn.LSTM, layers, bidirectional)
    x = normal(5, 3, N)
    assert_close(from_torch(theirs)(x), theirs(x))


@each_shape
def test_batch_first(layers, bidirectional):
    theirs = torch_layer(nn.LSTM, layers, bidirectional, batch_first=True)
    inputs = [normal(3, 5, N, seed=3), *lstm_state(layers, bidirectional, (3,))]
    assert_equal_layers(theirs, call, call, inputs)
    x = normal(5, N)
    assert_close(from_torch(theirs)(x), theirs(x))


@each_shape
@pytest.mark.parametrize("lengths", [[7, 4, 1], [2, 7, 7], [1, 3, 2], [5]], ids=str)
def test_padded_lengths_equal_packed_nn_lstm(layers, bidirectional, lengths):
    def call_theirs(layer, x, h, c):
        packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
        output, final = layer(packed, (h, c))
        return pad_packed_sequence(output, total_length=7)[0], final

    def call_ours(layer, x, h, c):
        return layer(x, (h, c), lengths=lengths)

    theirs = torch_layer(nn.LSTM, layers, bidirectional)
    inputs = [normal(7, len(lengths), N, seed=3), *lstm_state(layers, bidirectional, (len(lengths),))]
    assert_equal_layers(theirs, call_theirs, call_ours, inputs)


@each_shape
@pytest.mark.parametrize(("lengths", "is_sorted"), [([7, 4, 1], True), ([2, 7, 7, 3], False), ([4], False)], ids=str)
def test_packed_equals_packed_nn_lstm(layers, bidirectional, lengths, is_sorted):
    def packed_call(layer, x, h, c):
        packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=is_sorted)
        output, final = layer(packed, (h, c))
        assert isinstance(output, PackedSequence)
        assert_close(tuple(output)[1:], tuple(packed)[1:])
        return output.data, final

    theirs = torch_layer(nn.LSTM, layers, bidirectional)
    inputs = [normal(7, len(lengths), N, seed=3), *lstm_state(layers, bidirectional, (len(lengths),))]
    assert_equal_layers(theirs, packed_call, packed_call, inputs)


@pytest.mark.parametrize("layers", [2, 3])
def test_dropout_draws_what_nn_lstm_draws(layers):
    theirs = torch_layer(nn.LSTM, layers, True, dropout=0.4)
    ours, x = from_torch(theirs), normal(6, 3, N)
    torch.manual_seed(5)
    expected = theirs(x)
    torch.manual_seed(5)
    assert_close(ours(x), expected)
    assert (expected[0] - ours.eval()(x)[0]).abs().max() > 1e-3
    assert_close(ours(x), theirs.eval()(x))


def test_from_torch_keeps_options_and_copies():
    theirs = nn.LSTM(N, M, 2, bias=False, dropout=0.25, batch_first=True).eval()
    ours = from_torch(theirs)
    assert (ours.dropout, ours.batch_first, ours.training) == (0.25, True, False)
    x = torch.ones(2, 5, N)
    before = ours(x)[0]
    assert before.dtype == torch.float32
    torch.testing.assert_close(before, theirs(x)[0])
    with torch.no_grad():
        theirs.weight_ih_l0.zero_()
    assert torch.equal(ours(x)[0], before)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_from_torch_trains_as_the_layer_does(kind):
    """Of two biases that act through their sum each moves."""
    theirs, x = kind(N, M, 2).double(), normal(6, 3, N)
    ours = from_torch(theirs)
    for layer in (theirs, ours):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(x)[0].square().sum().backward()
            optimizer.step()
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_from_torch_leaves_frozen_what_is_frozen(kind, bias):
    theirs = kind(N, M, 2, bias=bias)
    theirs.weight_hh_l0.requires_grad_(False)
    for name, value in theirs.named_parameters():
        value.requires_grad_(value.requires_grad and not name.endswith("_l1"))
    ours = {name: value.requires_grad for name, value in from_torch(theirs).named_parameters()}
    assert not ours.pop("layers.0.0.cell.weight_h")
    assert {name: trained for name, trained in ours.items() if trained != name.startswith("layers.0")} == {}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_from_torch_takes_the_values_of_pruned_and_normed_weights(kind):
    theirs, x = kind(N, M).double(), normal(5, 3, N)
    prune.random_unstructured(theirs, "weight_ih_l0", 0.5)
    parametrizations.weight_norm(theirs, "weight_hh_l0")
    ours = from_torch(theirs)
    assert (ours.layers[0][0].cell.weight_x == 0).any()
    assert_close(ours(x), theirs(x))


def test_a_packed_input_has_a_pass_as_well():
    stack, x = from_torch(nn.LSTM(N, M, batch_first=True)), torch.zeros(4, 3, N)
    packed = pack_padded_sequence(x, [3, 2, 2, 1], batch_first=True)
    assert stack.backends(packed) == stack.backends(x, [3, 2, 2, 1])


def test_from_torch_refuses_what_it_cannot_convert():
    class Own(nn.LSTM):
        pass

    with pytest.raises(UserError, match=r"expected a layer with a conversion, found Own; .*nn\.LSTM"):
        from_torch(Own(N, M))
    with pytest.raises(UserError, match="proj_size: expected 0, found 2; build"):
        from_torch(nn.LSTM(N, M, proj_size=2))


def copy_in_order(cell, weights):
    """A conversion for the tests' own GRU, whose parameters lie in PyTorch's order."""
    with torch.no_grad():
        for parameter, value in zip(cell.parameters(), weights.values(), strict=True):
            parameter.data = value.clone()
    return cell


@each_shape
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_new_conversion_is_one_line(monkeypatch, layers, bidirectional, kind):
    def gru(module, weights):
        named = {name: weights[name] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        return copy_in_order(GRU(weights["weight_ih"].shape[1], M), named)

    def rnn(module, weights):
        named = {"x": weights["weight_ih"], "h": weights["weight_hh"], "b": weights["bias_ih"] + weights["bias_hh"]}
        return copy_in_order(Elman(weights["weight_ih"].shape[1], M), named)

    monkeypatch.setitem(torch_weights.CONVERSIONS, kind, {nn.GRU: gru, nn.RNN: rnn}[kind])
    theirs = torch_layer(kind, layers, bidirectional)
    x, h = normal(5, 3, N), normal(layers * (1 + bidirectional), 3, M, seed=4)
    assert_close(from_torch(theirs)(x, h), theirs(x, h))
    assert_close(from_torch(theirs)(x), theirs(x))


@each_shape
@pytest.mark.parametrize(("kind", "options"), [("gru", {}), ("rnn", {}), ("rnn", {"nonlinearity": "relu"})], ids=str)
def test_equals_nn_gru_and_nn_rnn(layers, bidirectional, kind, options):
    if kind not in cells.CELLS:
        pytest.skip(f"there is no cell {kind!r} yet")
    theirs = torch_layer({"gru": nn.GRU, "rnn": nn.RNN}[kind], layers, bidirectional, **options)
    ours = from_torch(theirs)
    x, h = normal(7, 3, N).requires_grad_(), normal(layers * (1 + bidirectional), 3, M, seed=4).requires_grad_()
    assert_close(ours(x, h), theirs(x, h))
    assert_close(gradients(*ours(x, h), (x, h), ours, [])[0], gradients(*theirs(x, h), (x, h), theirs, [])[0])
    packed = pack_padded_sequence(x, torch.tensor([2, 7, 1]), enforce_sorted=False)
    assert_close([ours(packed, h)[0].data, ours(packed, h)[1]], [theirs(packed, h)[0].data, theirs(packed, h)[1]])
