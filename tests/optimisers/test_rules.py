"""The update rules, against scalar oracles."""

import math

import laws
import oracles
import pytest
import torch
from implementations import RULES, normal, seeded, step_inputs

from l2lopt.core.layout import Layout
from l2lopt.optimisers.rules import Additive, Bounded, DirectionAndMagnitude, Gated, root_mean_square

LAYOUT = Layout(("scalar", "matrix", "vector"), ((), (2, 2), (3,)))
SIZES = (1, 4, 3)


def see(params, step, grads=None):
    return step_inputs(torch.ones_like(params) if grads is None else grads, params, step, layout=LAYOUT)


def apply(rule, outputs, nominal, params, step, grads=None):
    features = {"rnnprop": torch.stack([nominal, torch.full_like(nominal, 1e9)])}
    memory = {name: torch.zeros_like(params) for name in rule.memory}
    return rule(outputs, features, see(params, step, grads), memory)[0]


def measure(values):
    return LAYOUT.tensors.spread(root_mean_square(values, LAYOUT))


def rolled_out(rule, oracle, step, tolerance=1e-13, **options):
    outputs, nominal, params = normal(rule.outputs, 8), normal(8, seed=1), normal(8, seed=2)
    wanted = oracle(outputs.T.tolist(), nominal.tolist(), params.tolist(), step, SIZES, **options)
    laws.assert_close(apply(rule, outputs, nominal, params, step), torch.tensor(wanted, dtype=torch.float64), tolerance)


@pytest.mark.parametrize("step", [1, 40])
def test_additive(step):
    rolled_out(Additive(0.3), oracles.additive, step, step_size=0.3)


def test_bounded():
    rolled_out(Bounded(0.3), oracles.bounded, 1, step_size=0.3)
    huge = torch.tensor([[1e6, -1e6] * 4], dtype=torch.float64)
    assert apply(Bounded(0.3), huge, huge[0], huge[0], 1).abs().eq(0.3).all()


@pytest.mark.parametrize("scale", [None, 0.5])
def test_gated_over_three_steps(scale):
    """Against scalar loops; the gates of one step enter those of the next."""
    rule = seeded(Gated(1.0, -1.0, scale))
    phi = laws.as_lists(dict(rule.named_parameters()))
    outputs, grads, theta = normal(3, 2, 8), normal(3, 8, seed=1), normal(8, seed=2)
    memory, gates, wanted = dict.fromkeys(rule.memory, torch.zeros(8).double()), [(0.0, 0.0)] * 8, theta.tolist()
    for step in range(3):
        update, memory = rule(outputs[step], {}, see(theta, step + 1, grads[step]), memory)
        theta = theta + update
        moved = [
            oracles.gated(phi, *outputs[step, :, k].tolist(), float(grads[step, k]), wanted[k], gates[k], scale or 1.0)
            for k in range(8)
        ]
        wanted, gates = [after for after, _ in moved], [gate for _, gate in moved]
    laws.assert_close(theta, torch.tensor(wanted, dtype=torch.float64))


def test_gated_with_its_default_biases_starts_as_slow_gradient_descent():
    rule, grads, theta = Gated().double(), normal(8), normal(8, seed=1)
    update = apply(rule, torch.zeros(2, 8).double(), theta, theta, 1, grads)
    decay, rate = 1 / (1 + math.exp(10)), 1 / (1 + math.exp(4))
    laws.assert_close(update, -decay * theta - rate * grads)


@pytest.mark.parametrize("horizon", [64.0, 50.0])
@pytest.mark.parametrize("step", [4, 1000])
@pytest.mark.parametrize("log_scale", [0.0, -0.1])
def test_direction_and_magnitude(horizon, step, log_scale):
    rule = DirectionAndMagnitude(0.02, horizon, weight_decay=0.3).double()
    torch.nn.init.constant_(rule.log_scale, log_scale)
    options = {"step_size": 0.02, "horizon": horizon, "weight_decay": 0.3, "log_scale": log_scale}
    rolled_out(rule, oracles.direction_and_magnitude, step, **options)


def test_without_nominal_the_inputs_are_not_looked_at():
    rule = DirectionAndMagnitude(nominal=False).double()
    outputs, params = normal(2, 8), normal(8, seed=2)
    wanted = oracles.direction_and_magnitude(outputs.T.tolist(), [0.0] * 8, params.tolist(), 1, SIZES)
    update, _ = rule(outputs, {}, see(params, 1), {})
    laws.assert_close(update, torch.tensor(wanted, dtype=torch.float64), 1e-13)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_normalised_directions_have_root_mean_square_1_in_each_tensor(size):
    values = size * normal(2, 8)
    for part in LAYOUT.split(values / measure(values)):
        laws.assert_close(part.square().mean(-1), torch.ones(2, dtype=torch.float64))


def test_steps_by_fan_in_are_relative_to_the_size_of_initial_weights():
    """Tensors (), (2, 2), (3,): the root mean square of their updates is s/√1, s/√2 and, after that matrix, s/√2."""
    rule = DirectionAndMagnitude(0.1, weight_decay=0.0, nominal=False, by_fan_in=True).double()
    outputs, params = normal(2, 8), normal(8, seed=2)
    update, _ = rule(outputs, {}, see(params, 1), {})
    sizes = [part.square().mean().sqrt().item() for part in LAYOUT.split(update)]
    assert sizes == pytest.approx([0.1, 0.1 / 2**0.5, 0.1 / 2**0.5], rel=1e-12)


def test_step_fades_with_the_horizon():
    rule = DirectionAndMagnitude(0.01, horizon=64.0, weight_decay=0.0).double()
    sizes = [apply(rule, normal(2, 8), normal(8), normal(8), step).norm().item() for step in (1, 65, 129)]
    assert sizes == pytest.approx([0.01 * 8**0.5 / k for k in (1, 2, 3)], rel=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_a_direction_of_zero_gives_a_finite_update_and_derivative(name):
    rule, zero = RULES[name]().double(), torch.zeros(8, dtype=torch.float64)
    outputs = torch.zeros(rule.outputs, 8, dtype=torch.float64, requires_grad=True)
    update = apply(rule, outputs, zero, zero, 1, grads=zero)
    laws.assert_same(update, zero)
    assert torch.autograd.grad(update.sum(), outputs)[0].isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_rows_do_not_see_each_other(name):
    rule = RULES[name]().double()
    outputs, nominal, params = normal(rule.outputs, 2, 8), normal(2, 8, seed=1), normal(2, 8, seed=2)
    rows = apply(rule, outputs, nominal, params, 3)
    for k in range(2):
        laws.assert_close(rows[k], apply(rule, outputs[:, k], nominal[k], params[k], 3))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_without_statistic_is_coordinatewise(name):
    """And one with a statistic does mix the coordinates of a tensor, though never two tensors."""
    rule = RULES[name]().double()
    outputs, nominal, params = normal(rule.outputs, 8), normal(8, seed=1), normal(8, seed=2)
    derivative = torch.func.jacrev(lambda outputs: apply(rule, outputs, nominal, params, 1))(outputs).abs().sum(1).ne(0)
    tensor = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    mixed = torch.eye(8, dtype=torch.bool) if not rule.statistic else tensor[:, None] == tensor
    mixed[0, 0] = not rule.statistic  # a tensor of one coordinate moves by its sign alone
    assert torch.equal(derivative & ~torch.eye(8, dtype=torch.bool), mixed & ~torch.eye(8, dtype=torch.bool))
