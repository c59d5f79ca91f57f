"""PyTorch's own tests of its optimisers, transcribed: what concerns states, copies, hooks and printing.

See `test_torchs_own_tests`.
"""

from copy import deepcopy
from io import BytesIO

import laws
import pytest
import torch
from implementations import normal
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchs_tests import closure_of, each_input, each_rule, tensors

named = pytest.mark.parametrize("names", [False, True], ids=["unnamed", "named"])
from_to_named = pytest.mark.parametrize(
    ("names", "others"),
    [
        (True, False),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((False, False), (False, True), (True, True))),
    ],
)


def with_names(params, names):
    return [(f"name{index}", param) for index, param in enumerate(params)] if names else params


def convolved(make, names=False):
    """A small model, its optimiser and a step on it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))
    given = torch.rand(1, 4, 16, 16)
    optimizer = make(model.named_parameters() if names else model.parameters())

    def step(optimizer):
        optimizer.zero_grad()
        loss = model(given).square().sum()
        loss.backward()
        optimizer.step(loss=loss)

    return model, optimizer, step


@each_input
def test_optimizer_can_be_printed(make):
    assert "LearnedOptimizer" in repr(make([nn.Parameter(torch.randn(2, 3)) for _ in range(2)]))


@each_input
@from_to_named
def test_state_dict_deterministic(make, names, others):
    """A copy that loads the state goes on as the original does, to the bit, and its state stays its own."""
    weight, bias, given = tensors()
    optimizer = make(with_names([weight, bias], names))
    for _ in range(3):
        optimizer.step(closure_of(optimizer, weight, bias, given))
    again = deepcopy([weight, bias])
    other = make(with_names(again, others))
    saved = deepcopy(optimizer.state_dict())
    other.load_state_dict(optimizer.state_dict())
    laws.assert_same(other.state_dict()["state"], saved["state"])
    for _ in range(3):
        optimizer.step(closure_of(optimizer, weight, bias, given))
        other.step(closure_of(other, *again, given))
    laws.assert_same([value.detach() for value in again], [weight.detach(), bias.detach()])
    one, two = optimizer.state_dict(), other.state_dict()
    laws.assert_same(one["state"], two["state"])
    for group in (*one["param_groups"], *two["param_groups"]):
        group.pop("param_names", None)
    assert str(one["param_groups"]) == str(two["param_groups"])
    if "step" in one["state"][0]:
        assert not torch.equal(saved["state"][0]["step"], one["state"][0]["step"])


@each_input
def test_can_load_older_state_dict(make):
    """One without the options that came later."""
    _, optimizer, step = convolved(make)
    for _ in range(2):
        step(optimizer)
    older = deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        for option in ("foreach", "differentiable", "maximize", "capturable"):
            group.pop(option, None)
    optimizer.load_state_dict(older)
    step(optimizer)


@each_rule
@from_to_named
def test_can_load_from_to_named_state_dict(make, names, others):
    model, optimizer, step = convolved(make, names)
    step(optimizer)
    other = make(model.named_parameters() if others else model.parameters())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    step(other)
    if names or others:
        assert other.state_dict()["param_groups"][0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@each_input
@named
def test_save_load_equality_with_weights_only(make, names):
    weight, bias, given = tensors()
    optimizer = make(with_names([weight, bias], names))
    for _ in range(3):
        optimizer.step(closure_of(optimizer, weight, bias, given))
    buffer = BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    laws.assert_same(loaded["state"], optimizer.state_dict()["state"])
    assert str(loaded["param_groups"]) == str(optimizer.state_dict()["param_groups"])


@each_input
def test_load_nontensor_step(make):
    params = [nn.Parameter(normal(2, 3, seed=k).float()) for k in range(2)]
    for param in params:
        param.grad = torch.rand_like(param)
    optimizer = make(params)
    for _ in range(3):
        optimizer.step(lambda: None)
    saved = deepcopy(optimizer.state_dict())
    for own in saved["state"].values():
        if "step" in own:
            own["step"] = own["step"].item()
    optimizer.load_state_dict(saved)
    optimizer.step(lambda: None)
    assert all(own.get("step", torch.tensor(4)) == 4 for own in optimizer.state.values())


@each_rule
def test_state_dict_with_other_dtypes(make):
    """bfloat16 parameters: a state in float32 loads in float32."""
    weight, bias, given = tensors()
    params = [nn.Parameter(value.detach().bfloat16()) for value in (weight, bias)]
    optimizer = make(params)
    for _ in range(3):
        optimizer.step(closure_of(optimizer, *params, given.bfloat16()))
    other = make(deepcopy(params))
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        for name, value in one.items():
            if torch.is_tensor(value):
                assert value.dtype == two[name].dtype
                assert not value.is_floating_point() or value.dtype in (torch.float32, torch.float64)


@each_rule
def test_state_dict_hooks(make):
    """test_state_dict_pre_hook, test_state_dict_post_hook and test_state_dict_pre_post_hook."""
    optimizer = make([nn.Parameter(torch.rand(2, 3))])
    optimizer.register_state_dict_pre_hook(lambda own: own.state.update(test=1))
    assert optimizer.state_dict()["state"]["test"] == 1

    def after(own, state_dict):
        return state_dict | {"seen": state_dict["state"].pop("test", None)}

    optimizer.register_state_dict_post_hook(after)
    saved = optimizer.state_dict()
    assert "test" not in saved["state"]
    assert saved["seen"] == 1


@each_rule
def test_load_state_dict_hooks(make):
    """test_load_state_dict_pre_hook_and_prepend, test_load_state_dict_post_hook, test_load_state_dict_pre_post_hook."""
    optimizer, seen = make([nn.Parameter(torch.rand(2, 3))]), []

    def first(own, state_dict):
        state_dict["param_groups"][0]["lr"] = 0.2

    def second(own, state_dict):
        copy = deepcopy(state_dict)
        copy["param_groups"][0]["lr"] = 0.3
        return copy

    handle = optimizer.register_load_state_dict_pre_hook(second)
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(own.param_groups[0]["lr"]))
    optimizer.load_state_dict(optimizer.state_dict())
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(first)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(second, prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [0.3, 0.2, 0.2]


@each_rule
def test_step_all_hooks(make):
    """With test_step_pre_hook and test_step_post_hook."""
    params, calls = [nn.Parameter(torch.ones(2))], []
    optimizer, other = make(params), torch.optim.SGD(params)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(0)),
        register_optimizer_step_post_hook(lambda *_: calls.append(5)),
    ]
    for each in (optimizer, other):
        handles.append(each.register_step_pre_hook(lambda *_: calls.append(1)))
        handles.append(each.register_step_post_hook(lambda *_: calls.append(2)))
    for each in (optimizer, other, optimizer):
        each.step()
    assert calls == [0, 1, 2, 5] * 3
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(calls) == 12


@each_rule
def test_deepcopy_copies_all_public_attrs(make):
    weight, bias, given = tensors()
    optimizer = make([weight, bias])
    optimizer.step(closure_of(optimizer, weight, bias, given))
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert {name for name in vars(deepcopy(optimizer)) if not name.startswith("_")} == public


@each_input
def test_non_empty_state(make):
    weight, bias, given = tensors()
    optimizer = make([weight, bias])
    optimizer.step(closure_of(optimizer, weight, bias, given))
    assert all(len(state) > 0 for state in optimizer.state.values())
    assert set(optimizer.state) == {weight, bias}
