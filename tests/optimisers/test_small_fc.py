"""The small fully connected rule against the equations of its source, written out in NumPy on whole tensors."""

import numpy as np
import pytest
import torch
from implementations import normal, seeded

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisers.small_fc import factored_axes

SHAPES = {"matrix": (4, 3), "square": (3, 3), "kernel": (5, 4, 2, 3), "bias": (6,), "gain": (), "row": (1, 7)}
LAYOUT = Layout(tuple(SHAPES), tuple(SHAPES.values()))


def oracle(phi, gradients, params, step_mult, exp_mult):
    """θ after each step: {name: array} for every gradient {name: array}, by the source's accumulators and inputs."""

    def decay(initial, offset):
        return np.clip(1 - np.exp((np.log(1 - np.array(initial)) / 10 + offset) * 10), 0, 1)

    momentum, rms = decay([0.9, 0.99, 0.999], phi["momenta_decay"]), decay([0.999], phi["squares_decay"])
    adafactor = decay([0.9, 0.99, 0.999], phi["factored_decay"])
    params = {name: np.atleast_1d(value).astype(float) for name, value in params.items()}
    state, trace = {}, []
    for t, by_name in enumerate(gradients):
        for name, p in params.items():
            g = np.atleast_1d(by_name[name])[..., None]
            mom, ms, v_row, v_col, v = state.get(name, (0.0, 0.0, 0.0, 0.0, 0.0))
            mom, ms = mom * momentum + g * (1 - momentum), ms * rms + g**2 * (1 - rms)
            inputs = [g, p[..., None], mom, ms, mom / np.sqrt(ms + 1e-6), 1 / np.sqrt(ms + 1e-6)]
            square = g * g + 1e-30
            if p.ndim > 1:
                second, longest = np.argsort(p.shape, kind="stable")[-2:]
                v_row = v_row * adafactor + (1 - adafactor) * square.mean(longest, keepdims=True)
                v_col = v_col * adafactor + (1 - adafactor) * square.mean(second, keepdims=True)
                row_factor = np.maximum(v_row / (v_row.mean(second, keepdims=True) + 1e-9), 1e-9) ** -0.5
                col_factor = np.maximum(v_col, 1e-9) ** -0.5
                full = np.ones((*p.shape, 3))
                inputs += [g * row_factor * col_factor, v_row * full, v_col * full]
                inputs += [(v_row + 1e-8) ** -0.5 * full, (v_col + 1e-8) ** -0.5 * full, mom * row_factor * col_factor]
            else:
                v = v * adafactor + (1 - adafactor) * square
                inputs += [g * np.maximum(v + 1e-9, 1e-9) ** -0.5, v, v, (v + 1e-8) ** -0.5, (v + 1e-8) ** -0.5]
                inputs += [mom * (v + 1e-6) ** -0.5]
            state[name] = mom, ms, v_row, v_col, v
            x = np.concatenate(inputs, -1)
            assert x.shape[-1] == 28
            x = x / np.sqrt(1e-5 + (x**2).mean(tuple(range(p.ndim)), keepdims=True))
            scales = np.array([1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000])
            x = np.concatenate([x, np.broadcast_to(np.tanh(t / scales - 1), (*p.shape, 11))], -1)
            layers = sorted(name for name in phi if name.endswith("weight"))
            for name_of_layer in layers:
                x = x @ phi[name_of_layer].T + phi[name_of_layer.replace("weight", "bias")]
                x = np.maximum(x, 0) if name_of_layer != layers[-1] else x
            params[name] = p - x[..., 0] * np.exp(x[..., 1] * exp_mult) * step_mult
        trace.append(dict(params))
    return trace


def steps(rule, gradients, params):
    """θ as a flat vector after each step."""
    state = rule.init(LAYOUT, like=params)
    for gradient in gradients:
        update, state = rule.update(gradient, state, params)
        params = params + update
        yield params


def arrays(flat):
    return {name: value.numpy() for name, value in LAYOUT.unravel(flat).items()}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("silent", [False, True])
def test_equals_the_equations_of_its_source(layers, silent):
    rule = optimisers.SmallFC(
        hidden_size=5, hidden_layers=layers, step_scale=0.02, exponent_scale=0.3, rests=not silent
    )
    seeded(rule, scale=0.2)
    gradients, params = 0.1 * normal(6, LAYOUT.size), normal(LAYOUT.size, seed=1)
    gradients[2:, ::3] *= 1e-6
    if silent:
        gradients[:, 4::5] = 0.0
        gradients[3:, ::2] = 0.0
    phi = {name: value.detach().numpy() for name, value in rule.phi().items()}
    expected = oracle(phi, [arrays(gradient) for gradient in gradients], arrays(params), 0.02, 0.3)
    with torch.no_grad():
        for found, wanted in zip(steps(rule, gradients, params), expected, strict=True):
            for name, value in arrays(found).items():
                np.testing.assert_allclose(np.atleast_1d(value), wanted[name], rtol=1e-9, atol=1e-12)


def test_what_has_no_gradient_for_some_time_comes_to_rest():
    gradients = normal(60, LAYOUT.size)
    gradients[5:, 0] = 0.0
    rules = [seeded(optimisers.SmallFC(step_scale=0.1, rests=rests)) for rests in (True, False)]
    with torch.no_grad():
        resting, published = (
            torch.stack(list(steps(rule, gradients, normal(LAYOUT.size)))).diff(dim=0)[:, 0] for rule in rules
        )
    assert torch.equal(resting[:24], published[:24])  # up to 20 steps after the last gradient
    assert resting[-1].abs() < 0.1 * published[-1].abs()


@pytest.mark.parametrize(
    ("shape", "axes"), [((4, 3), (1, 0)), ((3, 3), (0, 1)), ((5, 4, 2, 3), (1, 0)), ((2, 2, 2), (1, 2)), ((6,), None)]
)
def test_the_two_longest_axes(shape, axes):
    assert factored_axes(shape) == axes


@pytest.mark.parametrize(
    "options", [{"hidden_size": 0}, {"hidden_layers": 0}, {"step_scale": 0.0}, {"exponent_scale": -1.0}, {"lr": 0.0}]
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        optimisers.make("small-fc", **options)
