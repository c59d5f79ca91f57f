"""PyTorch's own tests of its optimisers (test/test_optim.py), transcribed: with a learned rule, the harness and Muon.

The names are those of the tests there. What is left out tests `foreach`, `fused`, `capturable` and `differentiable`,
which these optimisers do not have, and tables of PyTorch's own classes.
"""

from copy import deepcopy
from io import BytesIO

import laws
import pytest
import torch
from implementations import normal
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from l2lopt import LearnedOptimizer, UserError

RULES = {
    "learned": "lstm",
    "harness": {"name": "normalised-muon", "weight_decay": 0.0},
    "muon": {"name": "muon", "lr": 0.01, "weight_decay": 0.0},
}
each_rule = pytest.mark.parametrize("weights", [pytest.param(value, id=name) for name, value in RULES.items()])


def tensors(contiguous=True):
    """A weight, a bias and an input, as PyTorch's tests have them."""
    torch.manual_seed(0)
    weight = torch.rand((10, 5)) if contiguous else torch.rand((10, 5, 2))[..., 0]
    bias = torch.rand(10) if contiguous else torch.rand((10, 2))[..., 0]
    return nn.Parameter(weight), nn.Parameter(bias), torch.rand(5)


def closure_of(optimizer, weight, bias, given):
    """The loss of PyTorch's tests."""

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(given) + bias).pow(2).sum()
        loss.backward()
        return loss

    return closure


@each_rule
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    "schedulers",
    [
        (),
        (lambda opt: StepLR(opt, gamma=0.99999, step_size=10),),
        (lambda opt: ExponentialLR(opt, gamma=0.99), lambda opt: ReduceLROnPlateau(opt)),
    ],
)
def test_forloop_goes_right_direction(weights, contiguous, schedulers):
    weight, bias, given = tensors(contiguous)
    optimizer = LearnedOptimizer([weight, bias], weights)
    closure, schedulers = closure_of(optimizer, weight, bias, given), [make(optimizer) for make in schedulers]
    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        for scheduler in schedulers:
            scheduler.step(loss.detach()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    assert closure().item() < first


@each_rule
def test_param_group_with_lrscheduler_goes_right_direction(weights):
    weight, bias, given = tensors()
    optimizer = LearnedOptimizer([{"params": [weight]}, {"params": [bias], "lr": 0.01}], weights)
    closure, scheduler = closure_of(optimizer, weight, bias, given), StepLR(optimizer, gamma=0.9, step_size=1)
    first = closure().item()
    for _ in range(20):
        optimizer.step(closure)
        scheduler.step()
    assert closure().item() < first
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.9**20, 0.01 * 0.9**20])


@each_rule
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr(weights, shape):
    runs = []
    for lr in (0.5, torch.full(shape, 0.5)):
        weight, bias, given = tensors()
        optimizer = LearnedOptimizer([weight, bias], weights, lr=lr)
        for _ in range(5):
            optimizer.step(closure_of(optimizer, weight, bias, given))
        runs.append((weight.detach(), bias.detach()))
        if isinstance(lr, torch.Tensor):
            assert optimizer.param_groups[0]["lr"] is lr  # not changed, and still the caller's
            assert lr.item() == 0.5
    laws.assert_close(runs[0], runs[1], 1e-6)


def test_param_groups_weight_decay():
    """A group's decay shrinks its parameters where the gradient is 0."""
    weight, bias, _ = tensors()
    before = weight.detach().clone(), bias.detach().clone()
    optimizer = LearnedOptimizer(
        [{"params": [weight]}, {"params": [bias], "weight_decay": 0.1}], {"name": "sgd", "lr": 1.0}
    )
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for param in (weight, bias):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    laws.assert_same((weight.detach(), bias.detach()), (before[0], before[1] - 0.1 * before[1]))


@each_rule
def test_complex(weights):
    """Refused, as by PyTorch's Muon."""
    param = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(UserError, match="expected a dense real gradient"):
        LearnedOptimizer([param], weights).step(loss=1.0)


@each_rule
def test_step_is_noop_when_params_have_no_grad(weights):
    weight, bias, _ = tensors()
    before = weight.detach().clone(), bias.detach().clone()
    optimizer = LearnedOptimizer([weight, bias], weights)
    optimizer.step(lambda: torch.tensor([1]))
    laws.assert_same((weight.detach(), bias.detach()), before)


@pytest.mark.parametrize("name", ["harness", "muon"])
def test_step_is_noop_for_zero_grads(name):
    """To the bit. (A learned rule moves as its network says, and of no gradient it says something, too.)"""
    param = nn.Parameter(torch.randn(5, 4))
    before, optimizer = param.detach().clone(), LearnedOptimizer([param], RULES[name])
    for _ in range(3):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert torch.equal(param, before)


@each_rule
def test_optimizer_can_be_printed(weights):
    weight, bias, _ = tensors()
    assert "LearnedOptimizer" in repr(LearnedOptimizer([weight, bias], weights))


@each_rule
@pytest.mark.parametrize("named", [True, False])
def test_state_dict_deterministic(weights, named):
    """A copy that loads the state goes on as the original does, to the bit, and its state stays its own."""
    weight, bias, given = tensors()
    pair = [("weight", weight), ("bias", bias)] if named else [weight, bias]
    optimizer = LearnedOptimizer(pair, weights)
    for _ in range(3):
        optimizer.step(closure_of(optimizer, weight, bias, given))
    again = deepcopy([weight, bias])
    other = LearnedOptimizer(list(zip(["weight", "bias"], again, strict=True)) if named else again, weights)
    saved = deepcopy(optimizer.state_dict())
    other.load_state_dict(optimizer.state_dict())
    laws.assert_same(other.state_dict()["state"], saved["state"])
    for _ in range(3):
        optimizer.step(closure_of(optimizer, weight, bias, given))
        other.step(closure_of(other, *again, given))
    laws.assert_same([value.detach() for value in again], [weight.detach(), bias.detach()])
    laws.assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert not torch.equal(saved["state"][0]["step"], optimizer.state_dict()["state"][0]["step"])


@each_rule
def test_save_load_equality_with_weights_only(weights):
    weight, bias, given = tensors()
    optimizer = LearnedOptimizer([weight, bias], weights)
    for _ in range(3):
        optimizer.step(closure_of(optimizer, weight, bias, given))
    buffer = BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    laws.assert_same(loaded["state"], optimizer.state_dict()["state"])
    assert str(loaded["param_groups"]) == str(optimizer.state_dict()["param_groups"])


@each_rule
def test_state_dict_with_other_dtypes(weights):
    """bfloat16 parameters: a state in float32 loads in float32."""
    weight, bias, given = tensors()
    params = [nn.Parameter(value.detach().bfloat16()) for value in (weight, bias)]
    optimizer = LearnedOptimizer(params, weights)
    for _ in range(3):
        optimizer.step(closure_of(optimizer, *params, given.bfloat16()))
    other = LearnedOptimizer(deepcopy(params), weights)
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        for name, value in one.items():
            if torch.is_tensor(value):
                assert value.dtype == two[name].dtype
                assert not value.is_floating_point() or value.dtype == torch.float32


@each_rule
def test_step_hooks(weights):
    weight, bias, given = tensors()
    optimizer, calls = LearnedOptimizer([weight, bias], weights), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    optimizer.step(closure_of(optimizer, weight, bias, given))
    for handle in handles:
        handle.remove()
    optimizer.step(closure_of(optimizer, weight, bias, given))
    assert calls == ["before", "after"]


@each_rule
def test_deepcopy_copies_all_public_attrs(weights):
    weight, bias, given = tensors()
    optimizer = LearnedOptimizer([weight, bias], weights)
    optimizer.step(closure_of(optimizer, weight, bias, given))
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert {name for name in vars(deepcopy(optimizer)) if not name.startswith("_")} == public


@each_rule
def test_grads_are_never_inplaced_into(weights):
    weight, bias, given = tensors()
    optimizer = LearnedOptimizer([weight, bias], weights, weight_decay=0.1)
    loss = closure_of(optimizer, weight, bias, given)()
    before = [param.grad.clone() for param in (weight, bias)]
    versions = [param.grad._version for param in (weight, bias)]
    optimizer.step(loss=loss)
    assert [param.grad._version for param in (weight, bias)] == versions
    laws.assert_same([weight.grad, bias.grad], before)


@each_rule
def test_non_empty_state(weights):
    weight, bias, given = tensors()
    optimizer = LearnedOptimizer([weight, bias], weights)
    optimizer.step(closure_of(optimizer, weight, bias, given))
    assert all(len(state) > 0 for state in optimizer.state.values())
    assert set(optimizer.state) == {weight, bias}


@each_rule
def test_mixed_dtypes(weights):
    """Parameters of two dtypes move as each kind by itself would."""
    one, two = nn.Parameter(normal(4, 3).float()), nn.Parameter(normal(4, 3, seed=1))
    pair = deepcopy([one, two])
    grads = [normal(4, 3, seed=2 + k) for k in range(4)]
    together, *apart = (
        LearnedOptimizer(params, weights)
        for params in ([("one", one), ("two", two)], [("one", pair[0])], [("two", pair[1])])
    )
    for g in grads:
        for param in (one, two, *pair):
            param.grad = g.to(param.dtype)
        for optimizer in (together, *apart):
            optimizer.step(loss=1.0)
    laws.assert_same([one.detach(), two.detach()], [value.detach() for value in pair])


@each_rule
def test_gradscaler(weights):
    """An infinite gradient is a step that is left out; all others are those without a scaler."""
    runs = []
    for scaled in (True, False):
        weight, bias, given = tensors()
        optimizer, scaler = (
            LearnedOptimizer([weight, bias], weights),
            torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled),
        )
        for step in range(4):
            if step == 2 and not scaled:
                continue
            optimizer.zero_grad()
            loss = (weight.mv(given) + bias).pow(2).sum()
            scaler.scale(loss).backward()
            if step == 2:
                weight.grad[0, 0] = torch.inf
            scaler.step(optimizer, loss=loss)
            scaler.update()
        runs.append((weight.detach(), bias.detach()))
    laws.assert_close(runs[0], runs[1], 1e-6)
