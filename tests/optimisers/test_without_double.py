"""Devices without float64, such as Apple's: every rule makes its step there, in tensors that only have a shape."""

from pathlib import Path

import laws
import pytest
import torch
from implementations import Problem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import optimisees
from l2lopt import optimisers
from l2lopt.core import precision
from l2lopt.core.layout import Layout
from l2lopt.core.precision import double
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.estimators import Blockwise
from l2lopt.optimisee import flat_loss
from l2lopt.optimisers.inputs import StepInputs
from l2lopt.optimisers.schedules import to_the_end

NAMES = sorted(
    {"sgd", "momentum", "adam", "adamw", "nadamw", "lion", "dowg", "normalised-adam"} & set(optimisers.HAND_DESIGNED)
)
CHOICES = [*({"name": name, "lr": 0.1} for name in NAMES), {"name": "adamw", "lr": 0.1, "total": 9}]
CHOICES += [{"name": "scheduled", "optimiser": {"name": "sgd", "lr": 0.1}, "total": 9}]


class NoDouble(TorchDispatchMode):
    """Refuses float64 on Apple's device, as PyTorch does there; on another device tensors of more than `most` numbers.

    Args:
        device: Device that knows no float64.
        most: Numbers that a tensor may have all the same.
    """

    def __init__(self, device="mps", most=0):
        super().__init__()
        self.device, self.most = device, most

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            wide = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 and leaf.numel() > self.most
            if wide and leaf.device.type == self.device:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it")
        return result


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_step_needs_no_double_precision(choice):
    with FakeTensorMode(), NoDouble():
        rule, layout = optimisers.build(choice), Layout(("w", "b"), ((3, 2), (3,)))
        flat = torch.ones(layout.size, device="mps")
        update, state = rule.update(flat, rule.init(layout, like=flat, total_steps=9), flat)
        again, _ = rule.update(flat, state, flat)
        assert (update.device.type, again.device.type, again.dtype) == ("mps", "mps", torch.float32)


@pytest.mark.parametrize("name", ["rnnprop", "momenta", "log-step", "parameter"])
def test_an_input_needs_no_double_precision(name):
    with FakeTensorMode(), NoDouble():
        item, grads = optimisers.INPUTS[name](), torch.ones(9, device="mps")
        step, finite = torch.ones((), dtype=torch.int64, device="mps"), torch.ones_like(grads, dtype=torch.bool)
        seen = StepInputs(grads, grads, step, torch.ones((), device="mps"), Layout(("w",), ((9,),)), finite)
        features, _ = item(seen, {key: torch.zeros_like(grads) for key in item.memory})
        assert (features.device.type, features.dtype) == ("mps", torch.float32)


@pytest.mark.parametrize("total", [0, 9])
def test_a_schedule_to_the_end_needs_no_double_precision(total):
    with FakeTensorMode(), NoDouble():
        step = torch.ones((), dtype=torch.int64, device="mps")
        assert to_the_end("cosine", step, step * total, 0.1).to(step).device.type == "mps"


def test_the_refusal_is_real():
    with FakeTensorMode(), NoDouble():
        step = torch.zeros((), dtype=torch.int64, device="mps")
        with pytest.raises(TypeError, match="MPS"):
            step.double()
        assert double(step).device.type == "cpu"
    assert double(torch.tensor(3)).dtype == torch.float64


@pytest.mark.parametrize("rule", ["direction-and-magnitude", "additive"])
def test_a_meta_gradient_needs_no_double_precision(rule, monkeypatch):
    """The CPU plays the device. A single number in float64 would be the CPU's there, too: see `double`."""
    optimiser, task = optimisers.make("coordinatewise", cell="lstm", rule=rule), optimisees.make("quadratic", size=5)
    params, aux = task.init(0)
    layout = Layout.of(params)
    theta = layout.ravel(params)
    batches = [task.batch("inner", 0, step) for step in range(4)]
    steps = [InnerStep(batch, (Target(batch, 1.0),)) for batch in batches]
    carry = Carry(theta, aux, optimiser.init(layout, like=theta))
    problem = Problem(optimiser.update_with, flat_loss(task, layout), optimiser.phi(), carry, steps)
    expected = laws.run(Blockwise(block=2), problem)
    monkeypatch.setattr(precision, "WITHOUT_DOUBLE", ("cpu",))
    with NoDouble("cpu", most=1):
        found = laws.run(Blockwise(block=2), problem)
        with pytest.raises(TypeError, match="MPS"):
            theta.double()
    assert all(value.dtype == torch.float32 for value in found.gradient.values())
    laws.assert_close(found.gradient, expected.gradient, 1e-4)


def test_numbers_are_widened_on_the_cpu():
    """The other order asks the device for float64."""
    root = Path(__file__).parents[2]
    for path in (*(root / "l2lopt").rglob("*.py"), *(root / "optimisees").rglob("*.py")):
        assert ".double().cpu()" not in path.read_text(encoding="utf-8"), path
