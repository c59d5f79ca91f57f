"""Passes as CUDA graphs: the bookkeeping, with a recorder that works in memory of its own as a graph does.

On a machine with a GPU the same tests run with PyTorch's own recorder.
"""

import gc

import pytest
import torch
from implementations import normal, seeded
from laws import assert_close, assert_same

from l2lopt import cells
from l2lopt.sequence import graphed, loop

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


class Recorded:
    """What `torch.cuda.make_graphed_callables` gives: one memory for arguments, one for results, one for gradients."""

    made = 0

    def __init__(self, function, samples, allow_unused_input):
        assert allow_unused_input
        type(self).made += 1
        self.inputs = samples
        with torch.enable_grad():
            self.results = function(*samples)
        self.static = tuple(result.detach().clone() for result in self.results)
        self.gradients = None
        recorder = self

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *arguments):
                for mine, given in zip(recorder.inputs, arguments, strict=True):
                    assert mine.shape == given.shape
                    mine.data.copy_(given)
                with torch.enable_grad():
                    recorder.results = function(*recorder.inputs)
                for mine, result in zip(recorder.static, recorder.results, strict=True):
                    mine.copy_(result)
                return tuple(result.detach() for result in recorder.static)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, *gradients):
                needed = [value for value in recorder.inputs if value.requires_grad]
                found = torch.autograd.grad(recorder.results, needed, gradients, allow_unused=True)
                if recorder.gradients is None:
                    recorder.gradients = [None if one is None else one.clone() for one in found]
                for mine, one in zip(recorder.gradients, found, strict=True):
                    assert (mine is None) == (one is None)
                    if mine is not None:
                        mine.copy_(one)
                static = iter([None if one is None else one.detach() for one in recorder.gradients])
                return tuple(next(static) if value.requires_grad else None for value in recorder.inputs)

        self.call = Graphed.apply

    def __call__(self, *arguments):
        return self.call(*arguments)


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    Recorded.made = 0
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", Recorded)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def made(cell):
    """How many graphs a cell has."""
    return sum(map(len, graphed._OF[cell].made.values()))


def gradients(run, cell, x, lengths=None, reverse=False, uses=1):
    """Outputs, and gradients of weights, x and state, of a loss that goes through the cell `uses` times."""
    x = x.clone().requires_grad_()
    state = {name: 0.1 * torch.ones(size, *x.shape[2:], device=DEVICE) for name, size in cell.state_sizes.items()}
    state = {name: value.to(x.dtype).requires_grad_() for name, value in state.items()}
    outputs = [run(cell, (k + 1) * x, state, lengths, reverse)[0] for k in range(uses)]
    loss = sum((output * (k + 1)).square().sum() for k, output in enumerate(outputs))
    return [o.detach() for o in outputs], torch.autograd.grad(loss, [x, *state.values(), *cell.parameters()])


@pytest.mark.parametrize("lengths", [None, [4, 0, 5]], ids=["whole", "lengths"])
@pytest.mark.parametrize("name", ["gru", "irc-lstm", "ihc-lstm", "sru"])
def test_gives_what_the_loop_gives_before_and_after_it_is_recorded(name, lengths):
    cell = seeded(cells.make(name, 4, 4)).to(DEVICE)
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    for call in range(6):
        x = normal(5, 4, 3, seed=call).to(DEVICE)
        assert_close(gradients(graphed.run, cell, x, lengths), gradients(loop.run, cell, x, lengths), 1e-10)
        assert made(cell) == (call + 1 >= graphed.ENOUGH)


def test_a_call_before_the_other_has_gone_back_has_a_graph_of_its_own():
    cell = seeded(cells.make("gru", 4, 4)).to(DEVICE)
    for call in range(5):
        x = normal(5, 4, 3, seed=call).to(DEVICE)
        assert_close(gradients(graphed.run, cell, x, uses=3), gradients(loop.run, cell, x, uses=3), 1e-10)
    assert made(cell) == 3


def test_every_kind_of_call_has_its_own_and_there_are_not_too_many(monkeypatch):
    monkeypatch.setattr(graphed, "MOST", 3)
    cell = seeded(cells.make("gru", 4, 4)).to(DEVICE)
    for call in range(4):
        for steps in (2, 3, 4, 5):
            for reverse in (False, True):
                x = normal(steps, 4, 3, seed=call).to(DEVICE)
                found = gradients(graphed.run, cell, x, None, reverse)
                assert_close(found, gradients(loop.run, cell, x, None, reverse), 1e-10)
    assert made(cell) == 3


def test_outputs_outlive_the_next_call():
    cell = seeded(cells.make("gru", 4, 4)).to(DEVICE)
    x = normal(5, 4, 3).to(DEVICE)
    for _ in range(3):
        kept, _ = gradients(graphed.run, cell, x)
    before = [output.clone() for output in kept]
    gradients(graphed.run, cell, 2 * x)
    assert_same(kept, before)


def test_without_a_gradient_nothing_is_recorded():
    cell = seeded(cells.make("gru", 4, 4)).to(DEVICE)
    with torch.no_grad():
        for _ in range(5):
            x = normal(5, 4, 3).to(DEVICE)
            graphed.run(cell, x, cell.initial_state(x[0]))
    assert made(cell) == 0


@pytest.mark.parametrize("name", ["gru", "irc-lstm", "sru"])
def test_a_graph_goes_with_its_cell(name):
    cell = seeded(cells.make(name, 4, 4)).to(DEVICE)
    for _ in range(4):
        gradients(graphed.run, cell, normal(5, 4, 3).to(DEVICE))
    before = len(graphed._OF)
    del cell
    gc.collect()
    assert len(graphed._OF) == before - 1


def test_what_cannot_be_recorded_goes_by_hand_and_says_so_once(monkeypatch, caplog):
    def fails(*arguments, **options):
        raise RuntimeError("no capture today\nand more")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fails)
    cell = seeded(cells.make("gru", 4, 4)).to(DEVICE)
    for call in range(6):
        x = normal(5, 4, 3, seed=call).to(DEVICE)
        assert_close(gradients(graphed.run, cell, x), gradients(loop.run, cell, x), 1e-10)
    assert [record.getMessage() for record in caplog.records] == ["no CUDA graph of GRU: no capture today"]


@pytest.mark.parametrize("size", [4, 16])
def test_gradients_outlive_the_next_backward_pass(size):
    """Those of several small batches are added up in `.grad`, which autograd lets be the very tensor it is given."""
    cell = seeded(cells.make("gru", size, size)).to(DEVICE)
    for call in range(5):
        sums = []
        for run in (graphed.run, loop.run):
            cell.zero_grad()
            for number in range(3):
                x = normal(5, size, 3, seed=10 * call + number).to(DEVICE)
                state = {
                    name: 0.1 * torch.ones(n, 3, dtype=x.dtype, device=DEVICE) for name, n in cell.state_sizes.items()
                }
                run(cell, x, state, None, False)[0].square().sum().backward()
            sums.append([value.grad.clone() for value in cell.parameters()])
        assert_close(*sums, 1e-10)
    assert made(cell) == 1
    first, _ = (gradients(graphed.run, cell, normal(5, size, 3, seed=n).to(DEVICE))[1] for n in (1, 2))
    assert_close(first, gradients(loop.run, cell, normal(5, size, 3, seed=1).to(DEVICE))[1], 1e-10)
