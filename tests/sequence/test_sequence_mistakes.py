"""Every mistake ends in one line with what was expected, what came and what to do."""

import pytest
import torch
from implementations import normal
from stacks import GRU, Delayed, Elman, M, N, grid
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

from l2lopt import cells, sequence
from l2lopt.core.errors import UserError

LSTM, X = cells.LSTM, normal(5, 3, N)
H = normal(1, 3, M)
PACKED = pack_padded_sequence(X, torch.tensor([5, 2, 1]))

CALLS = {
    "features": (GRU, (normal(5, 3, 7),), {}, "input: expected 3 features on the last axis, found 7; build"),
    "rank 1": (GRU, (normal(N),), {}, r"input: expected \[T, B, N\] .*, found shape \[3\]; reshape"),
    "rank 0": (GRU, (normal(),), {}, r"input: expected \[T, B, N\] .*, found shape \[\]; reshape"),
    "too many": (GRU, (X,), {"lengths": [5, 2, 1, 1]}, r"lengths: expected shape \[3\], found \[4\]; give one"),
    "too few": (GRU, (X,), {"lengths": torch.tensor([5])}, r"lengths: expected shape \[3\], found \[1\]; give one"),
    "nested": (GRU, (X,), {"lengths": [[5], [2], [1]]}, r"lengths: expected shape \[3\], found \[3, 1\]; give one"),
    "too long": (GRU, (X,), {"lengths": [5, 6, 1]}, r"lengths\[1\]: expected 0 to T = 5, found 6; cut"),
    "negative": (GRU, (X,), {"lengths": [5, 2, -1]}, r"lengths\[2\]: expected 0 to T = 5, found -1; cut"),
    "broken": (GRU, (X,), {"lengths": [5.0, 2.0, 1.0]}, "lengths: expected whole numbers, found torch.float32; give"),
    "truth": (GRU, (X,), {"lengths": torch.ones(3).bool()}, "lengths: expected whole numbers, found torch.bool; give"),
    "single": (GRU, (X[:, 0],), {"lengths": [5]}, r"lengths: expected none for a single.*, found \[5\]; leave"),
    "packed": (GRU, (PACKED,), {"lengths": [5, 2, 1]}, "lengths: expected none with packed x.*, found some; leave"),
    "one number": (GRU, (X,), {"lengths": 5}, "lengths: expected whole numbers, one for each sequence, found 5; give"),
    "ragged": (GRU, (X,), {"lengths": [[5], [2, 1], [1]]}, "lengths: expected whole numbers, one .*; give"),
    "words": (GRU, (X,), {"lengths": ["a", "b", "c"]}, "lengths: expected whole numbers, one .*; give"),
    "packed features": (LSTM, (pack_padded_sequence(normal(2, 1, 9), [2]),), {}, "input: expected 3 features.*found 9"),
    "h's shape": (GRU, (X, H[:, :2]), {}, r"state: expected h of shape \[1, 3, 4\], found \[1, 2, 4\]; give"),
    "h's rank": (GRU, (X[:, 0], H), {}, r"state: expected h of shape \[1, 4\], found \[1, 3, 4\]; give"),
    "c's shape": (LSTM, (X, (H, H[..., :1])), {}, r"state: expected c of shape \[1, 3, 4\], found \[1, 3, 1\]; give"),
    "c missing": (LSTM, (X, H), {}, r"state: expected the tensors h, c, found a tensor of shape \[1, 3, 4\]; give"),
    "one of two": (LSTM, (X, (H,)), {}, "state: expected the tensors h, c, found 1 of Tensor; give"),
    "pair for h": (GRU, (X, (H, H)), {}, "state: expected one tensor h, found 2 of Tensor; give"),
    "mixture": (LSTM, (X, (H, {"c": H})), {}, "state: expected the tensors h, c, found 2 of Tensor, dict; give"),
    "no mappings": (Delayed, (X, H), {}, r"state: expected a list of 1 mappings, found a tensor of .*; give"),
    "too many mappings": (GRU, (X, [{"h": H[0]}] * 2), {}, "state: expected one mapping for each of 1 cells, found 2"),
    "names": (GRU, (X, [{"g": H[0]}]), {}, r"state: expected the shapes {'h': \[3, 4\]} for cell 0, found {'g'"),
    "shapes": (
        GRU,
        (X, [{"h": H}]),
        {},
        r"state: expected the shapes {'h': \[3, 4\]} .*found {'h': \[1, 3, 4\]}; give",
    ),
    "mask": (GRU, (X,), {"masks": {"0.0.weight_g": H}}, "masks: expected names among .*'0.0.weight_g'; did you mean"),
    "mask's shape": (
        GRU,
        (X,),
        {"masks": {"0.0.weight_h": H}},
        r"masks: 0.0.weight_h: expected shape \[12, 4\], found",
    ),
}


@pytest.mark.parametrize("backend", ["auto", "loop"])
@pytest.mark.parametrize("cell", [LSTM, Delayed])
def test_a_state_of_another_precision(cell, backend):
    stack = grid(cell, backend=backend)
    state = torch.utils._pytree.tree_map(lambda value: value.float(), stack(X)[1])
    with pytest.raises(
        UserError, match=r"state: expected torch.float64, as x is, found (h|last) of torch.float32; convert"
    ):
        stack(X, state)


def test_states_of_an_earlier_call_are_taken_under_autocast():
    """They have the weights' precision, x that of the layer before."""
    stack, x = sequence.make("gru", N, M), X.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stack(x, stack(x)[1])[0].isfinite().all()


@pytest.mark.parametrize("case", CALLS)
def test_calls(case):
    cell, arguments, options, message = CALLS[case]
    with pytest.raises(UserError, match=message):
        grid(cell)(*arguments, **options)


class Broken(cells.Cell):
    """A cell of one's own, with a mistake in its forward."""

    def __init__(self, result):
        super().__init__(N, M, {"h": M})
        self.result = result

    def forward(self, x, state):
        return self.result(state["h"])


FORWARDS = {
    "another name": (lambda h: (h, {"g": h}), r"the output \[4, 3\] and the state {'h': \(4, 3\)}.*found .*'g'"),
    "a wider output": (lambda h: (torch.cat([h, h]), {"h": h}), r"found an output \[8, 3\]"),
    "a wider state": (lambda h: (h, {"h": torch.cat([h, h])}), r"found .* the state {'h': \(8, 3\)}"),
    "no state": (lambda h: h, "found a Tensor"),
    "a tuple for the state": (lambda h: (h, (h,)), "found an output .*the state a tuple"),
}


@pytest.mark.parametrize("case", FORWARDS)
def test_forwards_of_new_cells(case):
    result, message = FORWARDS[case]
    with pytest.raises(UserError, match=f"Broken: forward: expected .*{message}.*mend"):
        sequence.Stack([[Broken(result)]])(X.float())


def test_a_state_of_a_cell_that_is_no_mapping():
    x = torch.zeros(N, 3)
    with pytest.raises(UserError, match="cell: state: expected a mapping of h, c, found a tuple; start"):
        LSTM(N, M)(x, (x, x))


@pytest.mark.parametrize("ask", ["backends", "draw_masks"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_questions_about_a_call_check_x_as_the_call_does(ask, batch_first):
    stack = grid(LSTM, batch_first=batch_first)
    for x in (normal(N), normal(5, 2, 9)):
        with pytest.raises(UserError, match="input: expected"):
            getattr(stack, ask)(x)


def test_an_input_of_another_precision_than_the_weights():
    for backend in ("auto", "loop"):
        stack = sequence.make("lstm", N, M, backend=backend)
        with pytest.raises(UserError, match=r"input: expected torch.float32, as the weights are, found torch.float64"):
            stack(X)
        with pytest.raises(UserError, match=r"input: expected torch.float32, as the weights are, found torch.int64"):
            stack(X.long())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert stack(X.bfloat16())[0].isfinite().all()


BUILDS = {
    "no layers": (lambda: sequence.Stack([]), "layers: expected at least one, found none; give"),
    "no cells": (lambda: sequence.Stack([[]]), r"layers\[0\]: expected 1 or 2 cells, found 0; give"),
    "three": (lambda: sequence.Stack([[GRU(3, 3)] * 3]), r"layers\[0\]: expected 1 or 2 cells, found 3; give"),
    "chain": (
        lambda: sequence.Stack([[GRU(3, 4), GRU(3, 4)], [GRU(4, 4)]]),
        r"layers\[1\]: expected cells of input size 8, found 4; match",
    ),
    "sides": (
        lambda: sequence.Stack([[GRU(3, 4), Elman(2, 4)]]),
        r"layers\[0\]: expected cells of input size 3, found 2; give both",
    ),
    "dropout": (lambda: grid(GRU, dropout=1.0), r"dropout: expected a share in \[0, 1\), found 1.0; change"),
    "negative": (lambda: grid(GRU, dropout=-0.1), r"dropout: expected a share in \[0, 1\), found -0.1; change"),
    "drop": (
        lambda: grid(GRU, weight_drop={"weight_h": 1.5}),
        r"weight_drop: weight_h: expected a share in \[0, 1\), found 1.5; change",
    ),
    "weight": (
        lambda: sequence.make("lstm", N, M, weight_drop={"weight_hh": 0.5}),
        r"weight_drop: expected a weight of the cells \(bias, weight_h, weight_x\), found 'weight_hh'; did you mean",
    ),
    "cell": (lambda: sequence.make("lstn", N, M), "cell: expected a known name, found 'lstn'; did you mean 'lstm'"),
    "option": (lambda: sequence.make({"name": "lstm", "gates": 3}, N, M), "cell 'lstm'.*'gates'"),
    "layers": (lambda: sequence.make("lstm", N, M, 0), "num_layers: expected at least 1, found 0; give"),
    "size": (lambda: sequence.make("lstm", N, 0), "hidden_size: expected at least 1, found 0; give"),
    "size of a highway": (lambda: sequence.make("irc-gru", N, 0), "hidden_size: expected at least 1, found 0; give"),
    "PyTorch's cell": (
        lambda: sequence.make("torch.nn:LSTMCell", N, M),
        "cell 'torch.nn:LSTMCell': expected a Cell, found an? LSTMCell; name",
    ),
    "PyTorch's cell alone": (
        lambda: cells.make("torch.nn:LSTMCell", N, M),
        "expected a Cell, found an? LSTMCell; name",
    ),
    "a class": (lambda: sequence.make(LSTM, N, M), "cell: expected a name or a table .*, found .*LSTM.*; put .*:LSTM"),
    "a cell": (lambda: sequence.make(LSTM(N, M), N, M), "cell: expected a name or a table .*, found an? LSTM; give"),
    "PyTorch's layer": (
        lambda: sequence.Stack([[torch.nn.LSTM(N, M)]]),
        r"layers\[0\]: expected a list of cells, found an? LSTM in it; cells.make",
    ),
    "a cell for a layer": (
        lambda: sequence.Stack([LSTM(N, M)]),
        r"layers\[0\]: expected a list of cells, found an? LSTM; cells.make",
    ),
}


@pytest.mark.parametrize("case", BUILDS)
def test_builds(case):
    build, message = BUILDS[case]
    with pytest.raises(UserError, match=message):
        build()


def test_a_weight_of_some_cells_is_known():
    stack = sequence.Stack([[Elman(N, M)], [GRU(M, M)]], weight_drop={"bias": 0.5, "weight_h": 0.25})
    assert stack.dropped == {"0.0.bias": 0.5, "0.0.weight_h": 0.25, "1.0.weight_h": 0.25}


def test_a_dropped_weight_that_is_computed_from_others_is_refused():
    """As its mask would have nothing to multiply; nothing is drawn in evaluation."""
    stack = grid(LSTM, 2, weight_drop={"weight_h": 0.5})
    weight_norm(stack.layers[1][0].cell, "weight_h")
    with pytest.raises(
        UserError, match=r"weight_drop: expected a parameter 1\.0\.weight_h, found a weight computed from"
    ):
        stack(X)
    assert stack.eval()(X)[0].isfinite().all()
