"""The fallback takes over where the loss diverges or an update is not finite."""

import logging
import math
from copy import deepcopy

import laws
import pytest
import torch
from descent import LSTM, descend, start
from implementations import normal, seeded

from l2lopt import LearnedOptimizer, optimisers
from l2lopt.core.layout import Layout


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


def test_the_fallback_survives_gradients_that_are_not_finite():
    params = start()
    optimizer = guarded(params, LSTM())
    params["vector"].grad = torch.tensor([1.0, math.nan, math.inf, 1e200], dtype=torch.float64)
    optimizer.step()
    optimizer.step(loss=math.nan)
    assert params["vector"].isfinite().all()
    assert optimizer.state[params["vector"]]["fallback.v"].isfinite().all()
