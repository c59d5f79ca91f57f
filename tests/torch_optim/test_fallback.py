"""The fallback takes over where the loss diverges or an update is not finite."""

import logging
import math
from copy import deepcopy

import laws
import pytest
import torch
from descent import LSTM, descend, start
from implementations import normal, seeded, step_inputs

from l2lopt import LearnedOptimizer, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisers import inputs


def guarded(params, rule, **options):
    return LearnedOptimizer(params.values(), rule, fallback={"name": "adam", "lr": 0.01}, **options)


def warnings_of(caplog):
    return [
        record.message for record in caplog.records if record.name == "l2lopt" and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize(("bad", "said"), [(math.nan, "nan"), (math.inf, "inf"), (31.0, "31"), (29.0, None)])
def test_a_loss_that_has_diverged_brings_in_the_fallback(bad, said, caplog):
    """The fallback has seen every gradient, so it goes on as if it had run all the time."""
    params, other = start(), start()
    optimizer, adam = guarded(params, LSTM()), optimisers.adam(0.01)
    layout = Layout.of(other)
    state = adam.init(layout, like=layout.ravel(other))
    for step in range(6):
        grads = normal(layout.size, seed=step)
        for param, grad in zip(params.values(), layout.split(grads), strict=True):
            param.grad = grad.view(param.shape).clone()
        before = layout.ravel(params).detach()
        optimizer.step(loss=torch.tensor(bad if step == 3 else 3.0))
        update, state = adam.update(grads, state, before)
        by_adam = torch.allclose(layout.ravel(params).detach() - before, update.detach(), rtol=1e-9)
        assert by_adam == (said is not None and step >= 3)
    assert optimizer.param_groups[0]["fallen_back"] == (said is not None)
    assert len(warnings_of(caplog)) == (said is not None)
    assert said is None or f"the loss is {said} and was 3 at first" in warnings_of(caplog)[0]


def test_an_update_that_is_not_finite_brings_in_the_fallback(caplog):
    params = start()
    optimizer = guarded(params, seeded(LSTM(rule="additive")))
    expected = start()
    descend(params, optimizer, range(2))
    with torch.no_grad():
        optimizer.state[params["matrix"]]["cell.h"][0, 0, 0] = math.nan
    saved = deepcopy(optimizer.state_dict())
    held = {name: value.detach().clone() for name, value in params.items()}
    after = descend(params, optimizer, range(2, 6))
    assert all(value.isfinite().all() for value in after.values())
    assert len(warnings_of(caplog)) == 1
    assert "not finite" in warnings_of(caplog)[0]
    for name, value in expected.items():
        value.data.copy_(held[name])
    other = guarded(expected, seeded(LSTM(rule="additive")))
    other.load_state_dict(saved)
    laws.assert_same(descend(expected, other, range(2, 6)), after)
    resumed = guarded(expected, seeded(LSTM(rule="additive")))
    resumed.load_state_dict(optimizer.state_dict())
    laws.assert_same(descend(expected, resumed, range(6, 8)), descend(params, optimizer, range(6, 8)))


def test_all_groups_with_a_fallback_take_it_together():
    """Half a model by the rule and half by its fallback would be an optimiser that nobody has tried."""
    params = list(start().values())
    groups = [{"params": [param]} for param in params]
    groups[1]["fallback"] = None
    optimizer = LearnedOptimizer(groups, LSTM(), fallback="adam")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step(loss=torch.tensor(1.0))
    assert not any(group["fallen_back"] for group in optimizer.param_groups)
    optimizer.step(loss=torch.tensor(math.nan))
    fallen = [group["fallen_back"] for group in optimizer.param_groups]
    assert fallen == [number != 1 for number in range(len(params))]
    assert len(params) > 2


@pytest.mark.parametrize("fallback", ["adam", None])
def test_a_group_that_is_added_takes_the_fallback_with_the_others(fallback):
    """Its own fallback alone decides: without one it has the rule, as a group of the beginning has."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = LearnedOptimizer([first], LSTM(), fallback="adam")
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    optimizer.step(loss=1.0)
    optimizer.add_param_group({"params": [second], "fallback": fallback})
    assert not optimizer.param_groups[1]["fallen_back"]
    optimizer.param_groups.pop()
    optimizer.step(loss=math.nan)
    optimizer.add_param_group({"params": [second], "fallback": fallback})
    assert optimizer.param_groups[1]["fallen_back"] == (fallback is not None)
    optimizer.step(loss=1.0)
    assert ("fallback.m" in optimizer.state[second]) == (fallback is not None)
    taken = optimizer.param_groups.pop()
    taken["fallen_back"] = False  # what a group says itself is kept
    optimizer.add_param_group(taken)
    assert not optimizer.param_groups[1]["fallen_back"]


def test_the_fallback_survives_gradients_that_are_not_finite():
    params = start()
    optimizer = guarded(params, LSTM())
    params["vector"].grad = torch.tensor([1.0, math.nan, math.inf, 1e200], dtype=torch.float64)
    optimizer.step()
    optimizer.step(loss=math.nan)
    assert params["vector"].isfinite().all()
    assert optimizer.state[params["vector"]]["fallback.v"].isfinite().all()


def test_a_hand_designed_rule_has_the_fallback_that_was_asked_for():
    """Its update of a gradient that is not a number is none either; the fallback's is one."""
    params = start()
    optimizer = LearnedOptimizer(params.values(), {"name": "sgd", "lr": 0.1}, fallback="adam")
    params["vector"].grad = torch.tensor([1.0, math.nan, math.inf, 1.0], dtype=torch.float64)
    optimizer.step()
    assert params["vector"].isfinite().all()
    assert optimizer.param_groups[0]["fallen_back"]


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        ([-2.0, 15.9], False),  # 8 times the size of the first one: the rise is 9 times its size
        ([-2.0, 16.1], True),
        ([-2.0, -30.0], False),
        ([0.0, 5.0], False),
        ([0.0, 5.0, 49.0], False),
        ([0.0, 5.0, 51.0], True),
        ([0.0, -1.0, 8.1], True),
    ],
)
def test_the_guard_has_a_scale_whatever_the_first_loss_is(losses, falls):
    """That of a density's logarithm may be negative."""
    params = start()
    optimizer = guarded(params, LSTM())
    for loss in losses:
        assert not optimizer.param_groups[0]["fallen_back"]
        optimizer.step(loss=loss)
    assert optimizer.param_groups[0]["fallen_back"] == falls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_rule_that_sees_the_loss_takes_one_that_is_not_finite_for_1(bad, dtype):
    """Fused and by the reference alike."""
    moved = []
    for loss in (bad, 1.0):
        params = start(dtype)
        optimizer = LearnedOptimizer(params.values(), seeded(LSTM(inputs=["rnnprop", "loss"])))
        for value in (2.0, loss, 2.0):
            for param in params.values():
                param.grad = torch.ones_like(param)
            optimizer.step(loss=value)
        moved.append({name: value.detach() for name, value in params.items()})
        assert all(
            value.isfinite().all() for value in optimizer.state[params["vector"]].values() if torch.is_tensor(value)
        )
    laws.assert_same(*moved)
    rule = inputs.Loss()
    seen = step_inputs(normal(3), normal(3), 1, torch.tensor([bad, 0.5], dtype=torch.float64)[0])
    assert rule(seen, {})[0][:, 0].tolist() == [0.0, 1.0]


class Polyak(optimisers.Optimiser):
    """A step of the loss over the squared norm of the gradient."""

    coordinatewise = False
    needs_loss = True

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        return optimisers.SGD(1.0).init(layout, batch, like=like)

    def update(self, grads, state, params, *, loss=None):
        return -grads * (loss / grads.square().sum(-1))[..., None], state


def test_a_fallback_that_needs_the_loss_asks_for_it():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = LearnedOptimizer([param], "dowg", fallback=Polyak())
    param.grad = torch.ones(3)
    with pytest.raises(UserError, match="input 'loss': expected the loss of this step, found none"):
        optimizer.step()
    optimizer.step(loss=1.0)
    before = param.detach().clone()
    optimizer.step(loss=1e6)  # the fallback from here on
    laws.assert_close(param.detach() - before, torch.full((3,), -1e6 / 3), 1e-6)


@pytest.mark.parametrize("lost", [1, 5])
def test_the_end_of_a_fallback_is_told(lost, caplog):
    """And not that of the rule, which stands still; also where the fallback takes over after its end."""
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = LearnedOptimizer([param], "dowg", fallback="normalised-muon", steps=3)
    for step in range(8):
        param.grad = torch.ones(3, 2)
        optimizer.step(loss=math.nan if step == lost else 1.0)
    (told,) = [message for message in warnings_of(caplog) if "updates are 0" in message]
    assert "after 3 steps" in told
    assert f"this is step {max(4, lost + 1)}" in told
