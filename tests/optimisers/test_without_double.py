"""Devices without float64, such as Apple's: every rule makes its step there, in tensors that only have a shape."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from l2lopt import optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.precision import double
from l2lopt.optimisers.inputs import StepInputs
from l2lopt.optimisers.schedules import to_the_end

NAMES = sorted(
    {"sgd", "momentum", "adam", "adamw", "nadamw", "lion", "dowg", "normalised-adam"} & set(optimisers.HAND_DESIGNED)
)
CHOICES = [*({"name": name, "lr": 0.1} for name in NAMES), {"name": "adamw", "lr": 0.1, "total": 9}]
CHOICES += [{"name": "scheduled", "optimiser": {"name": "sgd", "lr": 0.1}, "total": 9}]


class NoDouble(TorchDispatchMode):
    """Refuses float64 on Apple's device, as PyTorch does there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "mps" and leaf.dtype == torch.float64:
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
