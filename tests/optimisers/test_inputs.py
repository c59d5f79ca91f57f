"""What a learned rule sees, against scalar oracles."""

import math

import laws
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import INPUTS, normal, step_inputs

from l2lopt.core.errors import UserError
from l2lopt.optimisers.inputs import LogAndSign, LogStep, Loss, Momenta, Parameter, RNNprop

magnitudes = st.one_of(
    st.sampled_from([0.0, math.exp(-10), 1e-30, 1e30]),
    st.floats(-30, 30).map(lambda exponent: 10**exponent),
    st.floats(0.99, 1.01).map(lambda near: near * math.exp(-10)),
)
gradients = st.builds(math.copysign, magnitudes, st.sampled_from([1.0, -1.0]))


def see(item, g, step=1, memory=None):
    memory = memory or {name: torch.zeros_like(g) for name in item.memory}
    return item(step_inputs(g, torch.zeros_like(g), step, g.new_full(g.shape[:-1], 0.7)), memory)


@given(st.lists(gradients, min_size=1, max_size=5), st.sampled_from([1.0, 10.0, 25.0]))
def test_log_and_sign(values, p):
    features, _ = see(LogAndSign(p), torch.tensor(values, dtype=torch.float64))
    for k, g in enumerate(values):
        torch.testing.assert_close(features[:, k].tolist(), list(oracles.log_and_sign(g, p)), rtol=1e-13, atol=1e-13)


@given(gradients.filter(bool))
def test_log_and_sign_derivative_is_finite(g):
    derivative = torch.func.jacrev(lambda g: see(LogAndSign(), g)[0])(torch.tensor(g, dtype=torch.float64))
    assert derivative.isfinite().all()


@given(st.lists(gradients.filter(lambda g: abs(g) < 1e15), min_size=1, max_size=6))
def test_rnnprop(values):
    item, memory = RNNprop(), None
    for t, g in enumerate(values, start=1):
        features, memory = see(item, torch.tensor([g], dtype=torch.float64), t, memory)
        expected = oracles.rnnprop(values[:t])
        torch.testing.assert_close(features[:, 0].tolist(), list(expected), rtol=1e-9, atol=1e-9)


@given(st.lists(gradients.filter(lambda g: abs(g) < 1e15), min_size=1, max_size=6))
def test_momenta(values):
    item, memory = Momenta(), None
    for t, g in enumerate(values, start=1):
        features, memory = see(item, torch.tensor([g], dtype=torch.float64), t, memory)
        torch.testing.assert_close(features[:, 0].tolist(), oracles.momenta(values[:t]), rtol=1e-8, atol=1e-8)


def test_the_parameter_is_seen_as_it_is():
    params = normal(2, 3)
    assert torch.equal(Parameter()(step_inputs(params, params, 1, None), {})[0], params[None])


def test_the_loss_is_seen_by_every_coordinate_of_its_row():
    losses, grads = torch.tensor([2.0, 1e-9], dtype=torch.float64), normal(2, 3)
    features, _ = Loss()(step_inputs(grads, grads, 1, losses), {})
    for row, loss in enumerate(losses.tolist()):
        for k in range(3):
            assert features[:, row, k].tolist() == pytest.approx(oracles.log_and_sign(loss, 10.0), rel=1e-12)


def test_a_loss_that_is_not_given_is_asked_for():
    with pytest.raises(UserError, match="expected the loss of this step, found none; pass loss="):
        Loss()(step_inputs(normal(3), normal(3), 1, None), {})


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_log_step(step):
    features, _ = see(LogStep(), normal(2, 3), step)
    assert features.tolist() == [[[pytest.approx(math.log(step) / 7, rel=1e-15)] * 3] * 2]


@pytest.mark.parametrize("name", INPUTS)
def test_features_and_memory_are_as_declared(name):
    item, g = INPUTS[name](), normal(2, 5)
    features, memory = see(item, g)
    assert features.shape == (item.size, 2, 5)
    assert {key: value.shape for key, value in memory.items()} == dict.fromkeys(item.memory, g.shape)


@pytest.mark.parametrize("name", INPUTS)
def test_no_coordinate_sees_another(name):
    item, order = INPUTS[name](), torch.tensor([3, 0, 4, 1, 2])
    g, h = normal(5), normal(5, seed=1)

    def twice(g, h):
        return see(item, h, 2, see(item, g)[1])[0]

    laws.assert_same(twice(g[order], h[order]), twice(g, h)[:, order])


@pytest.mark.parametrize("name", INPUTS)
def test_derivative_at_a_gradient_of_zero_is_finite(name):
    """Second order differentiates the inputs, and gradients that are exactly 0 are common."""
    derivative = torch.func.jacrev(lambda g: see(INPUTS[name](), g)[0])(torch.zeros(2, dtype=torch.float64))
    assert derivative.isfinite().all()


@pytest.mark.parametrize("p", [0.0, -1.0])
def test_log_and_sign_refuses_p(p):
    with pytest.raises(UserError, match="expected above 0"):
        LogAndSign(p)


def test_no_momenta_are_refused():
    with pytest.raises(UserError, match="momenta: betas: expected at least one, found none"):
        Momenta(betas=[])
