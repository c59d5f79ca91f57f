"""When a cell goes through time by the loop, and what autograd's tools see of the other ways."""

import laws
import pytest
import torch
from implementations import normal, seeded
from stacks import M, N
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from l2lopt import cells, sequence
from l2lopt.cells.highway import Feedback, Residual, Simplified
from l2lopt.cells.lstm import LSTMCore

WATCHED = ("loop", "hooks or parametrizations are at work")


def zeroed(module, arguments, result):
    return 0 * result[0], result[1]


@pytest.mark.parametrize("name", ["lstm", "irc-gru"])
@pytest.mark.parametrize("change", ["hook", "pruned", "spectral norm"])
def test_hooks_and_parametrizations_of_a_cell_take_the_loop(name, change):
    stack, x = sequence.make(name, 3, 4).double(), normal(5, 2, 3)
    cell = stack.layers[0][0].cell
    weight = next(key for key, value in cell.named_parameters() if value.dim() == 2)
    owner, _, key = weight.rpartition(".")
    if change == "hook":
        cell.register_forward_hook(zeroed)
    elif change == "pruned":
        prune.l1_unstructured(cell.get_submodule(owner), key, 0.5)
    else:
        parametrizations.spectral_norm(cell.get_submodule(owner), key)
    stack.eval()
    assert stack.backends(x) == {"0.0": WATCHED}
    output = stack(x)[0]
    output.sum().backward()
    assert not (change == "hook" and output.any())


@pytest.mark.parametrize("place", ["whole", "layer"])
def test_hooks_of_stacked_cells_take_the_loop(place):
    cell = cells.make("stacked", N, M).double()
    (cell if place == "whole" else cell.layers[1]).register_forward_hook(zeroed)
    stack, x = sequence.Stack([[cell]]), normal(5, 2, N)
    assert stack.backends(x) == {"0.0": WATCHED}
    assert not stack(x)[0].any()


def test_a_forward_of_an_instances_own_takes_the_loop():
    stack, x = sequence.make("lstm", N, M).double(), normal(5, 2, N)
    cell = stack.layers[0][0].cell
    cell.forward = lambda x, state, forward=cell.forward: zeroed(cell, (x, state), forward(x, state))
    assert stack.backends(x) == {"0.0": WATCHED}
    assert not stack(x)[0].any()


def test_hooks_of_all_modules_see_every_cell():
    stack, x, seen = sequence.make("lstm", N, M).double(), normal(5, 2, N), []
    handle = register_module_forward_hook(lambda module, arguments, result: seen.append(type(module)))
    try:
        stack(x)
        assert stack.backends(x) == {"0.0": WATCHED}
    finally:
        handle.remove()
    assert seen.count(cells.LSTM) == 5
    assert stack.backends(x) == {"0.0": ("by-hand", None)}


class Doubled(Residual):
    """An IRC of one's own."""

    def forward(self, x, h):
        return 2 * super().forward(x, h)


class DoubledFeedback(Feedback):
    """Its feedback alone."""

    def forward(self, h):
        return 2 * super().forward(h)


class Added(nn.Module):
    """A highway that shares nothing with ours."""

    recurrent_weights = ("w",)

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(N, M))

    def forward(self, x, h):
        return x + self.w @ h


class DoubledLSTMCore(LSTMCore):
    """A core of one's own."""

    def forward(self, v, x, state):
        return super().forward(2 * v, x, state)


def with_a_feedback_of_its_own():
    highway = Residual(N, M, False)
    highway.feedback = DoubledFeedback(N, M, False)
    return highway


OWN = {
    "Doubled": lambda: (Doubled(N, M, False), LSTMCore(N, M)),
    "DoubledFeedback": lambda: (with_a_feedback_of_its_own(), LSTMCore(N, M)),
    "Added": lambda: (Added(), LSTMCore(N, M)),
    "DoubledLSTMCore": lambda: (Residual(N, M, False), DoubledLSTMCore(N, M)),
}


@pytest.mark.parametrize("name", OWN)
def test_parts_of_ones_own_take_the_loop(name):
    cell, x = seeded(Simplified(N, M, *OWN[name]())), normal(5, 2, N)
    stack = sequence.Stack([[cell]])
    assert stack.backends(x) == {"0.0": ("loop", f"{name} has no hand-derived pass")}
    laws.assert_same(stack(x), sequence.Stack([[cell]], backend="loop")(x))


def replica(cell):
    """As `nn.DataParallel` and FSDP of flat parameters leave it: its weights are no parameters any more."""
    copy = cell._replicate_for_data_parallel()
    for name, value in cell.named_parameters():
        setattr(copy, name, value * 1)
    return copy


def with_a_buffer(cell):
    bias = cell.bias.detach().clone()
    del cell.bias
    cell.register_buffer("bias", bias)
    return cell


def without_a_bias(cell):
    cell.bias = None
    return cell


@pytest.mark.parametrize("change", [replica, with_a_buffer, without_a_bias])
def test_weights_that_are_no_parameters_take_the_loop(change):
    cell, x = change(seeded(cells.make("lstm", N, M))), normal(5, 2, N).mT
    assert sequence.backend(cell, x) == ("loop", "a weight is no parameter of the cell")
    output, _ = sequence.run(cell, x, cell.initial_state(x[0]))
    assert output.shape == (5, M, 2)


def tied(**options):
    """An LSTM whose two matrices are one parameter."""
    cell = seeded(cells.make("lstm", M, M))
    cell.weight_h = cell.weight_x
    return sequence.Stack([[cell]], **options)


def test_tied_weights_have_the_loops_gradients():
    x, found = normal(5, 2, M), []
    for backend in ("fast", "loop"):
        stack = tied(backend=backend)
        weights = list(stack.parameters())
        output = stack(x)[0]
        first = torch.autograd.grad(output.pow(3).sum(), weights, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), weights)
        found.append((output, first, torch.autograd.grad(stack(x)[0].pow(3).sum(), weights), second))
    laws.assert_close(*found, tolerance=1e-10)


def test_weight_drop_of_one_of_two_tied_weights_leaves_the_other():
    stack, x = tied(weight_drop={"weight_h": 0.5}), normal(5, 2, M)
    masks = stack.draw_masks(x, torch.Generator().manual_seed(0))
    apart = seeded(sequence.make("lstm", M, M))
    cell, ours = apart.layers[0][0].cell, stack.layers[0][0].cell
    with torch.no_grad():
        cell.weight_x.copy_(ours.weight_x)
        cell.weight_h.copy_(ours.weight_x * masks["0.0.weight_h"])
        cell.bias.copy_(ours.bias)
    laws.assert_close(stack(x, masks=masks), apart(x))


@pytest.mark.parametrize("name", ["lstm", "gru", "ihc-lstm", "sru", "t-lstm"])
@pytest.mark.parametrize("lengths", [None, [4, 2]], ids=["whole", "lengths"])
def test_batches_of_gradients_are_the_single_ones(name, lengths):
    """`is_grads_batched`, which `jacobian(vectorize=True)` takes, and `vmap` over `grad`."""
    stack, x = sequence.make(name, M, M).double(), normal(4, 2, M).requires_grad_()
    output = stack(x, lengths=lengths)[0]
    given, several = [x, *stack.parameters()], normal(3, *output.shape, seed=1)

    def gradients(adjoint, **options):
        return torch.autograd.grad(output, given, adjoint, retain_graph=True, **options)

    single = tuple(torch.stack(parts) for parts in zip(*map(gradients, several), strict=True))
    laws.assert_close(gradients(several, is_grads_batched=True), single, 1e-11)
    laws.assert_close(torch.vmap(gradients)(several), single, 1e-11)


class Step(nn.Module):
    """A mean over the outputs, with a state that comes in."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def forward(self, x, state):
        output, state = self.stack(x, state)
        return output.mean(), state


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_batch_sizes_may_be_symbols(name):
    """As in `torch.export` with a dynamic batch, and in `torch.compile` from the second size on."""
    step = Step(sequence.make(name, N, M, 2).double())
    x, other = normal(3, 4, N), normal(3, 7, N)
    with torch.no_grad():
        state, between = step.stack(x)[1], step.stack(other)[1]
    sizes = torch.export.Dim("batch", min=2)
    states = ({1: sizes},) * 2 if name == "lstm" else {1: sizes}
    exported = torch.export.export(step, (x, state), dynamic_shapes=({1: sizes}, states)).module()
    laws.assert_close(exported(other, between), step(other, between))


def test_a_compiled_stack_takes_other_batch_sizes():
    stack = sequence.make("gru", N, M).double()
    compiled = torch.compile(stack, backend="eager", fullgraph=True)
    for batch in (4, 7, 9):
        x = normal(3, batch, N)
        laws.assert_close(compiled(x), stack(x))


@pytest.mark.parametrize("name", ["lstm", "gru", "irc-t-lstm", "ihc-lstm"])
def test_checkpointing_gives_the_same_gradient(name):
    stack, x = sequence.make(name, 4, 4).double(), normal(5, 2, 4)
    gradients = []
    for run in (stack, lambda value: checkpoint(stack, value, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        run(leaf)[0].square().sum().backward()
        gradients.append(leaf.grad)
    laws.assert_same(*gradients)


def test_a_layer_that_is_to_take_the_loop_says_so():
    stack = sequence.make("lstm", N, M, backend="loop")
    assert stack.backends(torch.zeros(5, 2, N)) == {"0.0": ("loop", "backend='loop' was chosen")}


def test_the_meta_device_takes_the_loop():
    assert sequence.make("lstm", 4, 3).to("meta")(torch.empty(5, 2, 4, device="meta"))[0].shape == (5, 2, 3)


class Output(nn.Module):
    """The output alone, which a tracer can return."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def forward(self, x):
        return self.stack(x)[0]


# PyTorch's own words: that tracing is deprecated, and that the checks of shapes are not among what it records.
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["lstm", "gru", "sru", "t-lstm"])
def test_a_traced_stack_equals_itself(name):
    both_ways = name in ("lstm", "gru")
    stack = Output(sequence.make(name, 4, 4, num_layers=2, bidirectional=both_ways).double()).eval()
    traced = torch.jit.trace(stack, normal(5, 2, 4))
    x = normal(5, 2, 4, seed=1)
    outputs = traced(x), stack(x)
    laws.assert_close(*outputs)
    gradients = [
        torch.autograd.grad(output.square().sum(), [*run.parameters()])
        for output, run in zip(outputs, (traced, stack), strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        laws.assert_close(one, other)
