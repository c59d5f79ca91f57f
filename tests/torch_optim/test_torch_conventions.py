"""What any `torch.optim.Optimizer` does: mistaken parameters, copies, scalers, hooks, compiled models."""

import gc
import math
import weakref
from copy import deepcopy

import laws
import pytest
import torch
from descent import LSTM, bumpy, descend, start
from implementations import normal
from torch.optim.optimizer import register_optimizer_step_post_hook

from l2lopt import LearnedOptimizer, optimisers

ONE, TWO = torch.nn.Parameter(torch.ones(1, 1)), torch.nn.Parameter(torch.ones(1, 1))


MISTAKES = {
    "a bare tensor": (ONE, TypeError, "should be an iterable of Tensors or dicts"),
    "no parameters": ([], ValueError, "empty parameter list"),
    "one twice in a group": ([ONE, ONE], UserWarning, "a parameter group with duplicate parameters"),
    "a set": ({ONE, TWO}, FutureWarning, "need to be organized in ordered collections"),
    "one in two groups": ([{"params": ONE}, {"params": ONE}], ValueError, "appear in more than one parameter group"),
    "some names": ([("one", ONE), TWO], ValueError, "Some param names are missing"),
    "names in a later group": (
        [{"params": [ONE]}, {"params": [("two", TWO)]}],
        ValueError,
        "cannot add param group with names to the optimizer",
    ),
    "a tensor that is no leaf": ([2 * ONE], ValueError, "can't optimize a non-leaf Tensor"),
}
"""Label → (parameters, what torch.optim raises, its message): what all of torch's classes are tested on."""


def takes_sets():
    try:
        torch.optim.SGD({ONE, TWO}, lr=0.1)
    except (FutureWarning, TypeError):
        return False
    return True


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistaken_parameters_are_refused_as_torch_does(mistake):
    params, error, message = MISTAKES[mistake]
    if mistake == "a set" and takes_sets():
        pytest.skip(f"PyTorch {torch.__version__} takes sets of parameters")
    for kind in (torch.optim.SGD, LearnedOptimizer):
        # torch.optim changes the groups it is given, so that each class has its own.
        own = [dict(one) if isinstance(one, dict) else one for one in params] if isinstance(params, list) else params
        with pytest.raises(error, match=message):
            kind(own, optimisers.SGD(0.1)) if kind is LearnedOptimizer else kind(own, lr=0.1)


def test_a_copy_has_all_public_attributes():
    optimizer = LearnedOptimizer(start().values(), LSTM())
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert {name for name in vars(deepcopy(optimizer)) if not name.startswith("_")} == public


def test_a_scaler_skips_steps_and_unscales():
    scaled, plain = start(torch.float32), start(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    first, second = LearnedOptimizer(scaled.values(), LSTM()), LearnedOptimizer(plain.values(), LSTM())
    for step in range(5):
        loss = bumpy(scaled, step)
        scaler.scale(loss).backward()
        if step == 2:
            scaled["matrix"].grad[0, 0] = math.inf
        scaler.step(first, loss=loss)
        scaler.update()
        first.zero_grad()
        if step != 2:
            descend(plain, second, [step])
    assert scaler.get_scale() == 512.0
    laws.assert_same(dict(scaled), dict(plain))
    assert first.state[scaled["matrix"]]["step"].item() == 4


def test_hooks():
    params, calls = start(), []
    optimizer = LearnedOptimizer(params.values(), LSTM())
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("before", sorted(kwargs))))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("all"))
    descend(params, optimizer, range(1))
    handle.remove()
    assert calls == [("before", ["loss"]), "after", "all"]
    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: state | {"note": 1})
    saved = optimizer.state_dict()
    assert saved.pop("note") == 1

    def with_h_cleared(optimizer, state):
        cleared = {key: own | {"cell.h": torch.zeros_like(own["cell.h"])} for key, own in state["state"].items()}
        return {**state, "state": cleared}

    def look(optimizer):
        calls.append(float(optimizer.state[params["matrix"]]["cell.h"].abs().max()))

    optimizer.register_load_state_dict_pre_hook(with_h_cleared)
    optimizer.register_load_state_dict_post_hook(look)
    optimizer.load_state_dict(saved)
    assert calls[3:] == ["saving", 0.0]


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_a_compiled_model_trains_alike():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    twin = deepcopy(model)
    for module, call in ((model, model), (twin, torch.compile(twin, backend="eager"))):
        optimizer = LearnedOptimizer(module.named_parameters(), LSTM())
        for step in range(3):
            optimizer.zero_grad()
            call(normal(5, 3, seed=step).float()).square().mean().backward()
            optimizer.step()
    laws.assert_same(twin.state_dict(), model.state_dict())


def test_it_goes_when_nobody_holds_it():
    params = start()
    optimizer = LearnedOptimizer(params.values(), LSTM(), fallback="adam")
    descend(params, optimizer, range(2))
    gone = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    gc.enable()
    assert gone() is None


@pytest.mark.parametrize(
    "rule", ["lstm", "normalised-muon", {"name": "muon", "lr": 1e-3}, "coordinatewise-lstm"], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_step_under_autocast_is_the_same(rule, dtype):
    found = []
    for enabled in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 130 * 140).view(130, 140).sin())
        optimizer = LearnedOptimizer([weight], rule, steps=5)
        weight.grad = torch.linspace(-9, 9, 130 * 140).view(130, 140).cos()
        with torch.autocast("cpu", dtype, enabled=enabled):
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("rule", ["lstm", "ihc-lstm", "normalised-muon", {"name": "small-fc"}], ids=str)
@pytest.mark.parametrize("size", [3e16, 1e18, 1.5e19])
def test_huge_gradients_leave_numbers(rule, size):
    """Their squares are numbers, and the sum of these is none."""
    weight = torch.nn.Parameter(torch.ones(300, 300))
    optimizer = LearnedOptimizer([weight], rule, steps=9)
    for gradient in (torch.full((300, 300), size), torch.ones(300, 300)):
        weight.grad = gradient
        optimizer.step()
    assert weight.isfinite().all()
