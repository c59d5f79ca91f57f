"""When a cell goes through time by the loop, and what autograd's tools see of the other ways."""

import laws
import pytest
import torch
from implementations import normal
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from l2lopt import sequence


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
    assert stack.backends(x) == {"0.0": ("loop", "hooks or parametrizations are at work")}
    output = stack(x)[0]
    output.sum().backward()
    assert not (change == "hook" and output.any())


@pytest.mark.parametrize("name", ["lstm", "gru", "irc-t-lstm", "ihc-lstm"])
def test_checkpointing_gives_the_same_gradient(name):
    stack, x = sequence.make(name, 4, 4).double(), normal(5, 2, 4)
    gradients = []
    for run in (stack, lambda value: checkpoint(stack, value, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        run(leaf)[0].square().sum().backward()
        gradients.append(leaf.grad)
    laws.assert_same(*gradients)


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
