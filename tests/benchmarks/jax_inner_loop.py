"""The inner loop of small classifiers in JAX: `jit(vmap(scan))`, for `bench_inner_loop.py`.

The same initial values, batches, losses and update rules as ours, a tensor at a time as JAX users write it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Tensors = dict[str, Any]
Model = Callable[[Tensors, Any], Any]
Rule = tuple[Callable[[Tensors], Any], Callable[[Tensors, Any, Tensors], tuple[Tensors, Any]]]
"""(state before the first update, (gradients, state, parameters) → update and state)."""


def mlp(params: Tensors, inputs: Any) -> Any:
    """Linear layers with ReLU between them."""
    layers = sorted({int(name.split(".")[0]) for name in params})
    for index in layers:
        inputs = inputs @ params[f"{index}.weight"].T + params[f"{index}.bias"]
        inputs = jax.nn.relu(inputs) if index != layers[-1] else inputs
    return inputs


def convnet(params: Tensors, inputs: Any) -> Any:
    """3×3 convolutions, batch norm, ReLU and pooling; then two linear layers."""
    x = inputs.reshape(-1, 1, 8, 8)
    for first in (1, 5, 9):
        x = lax.conv_general_dilated(x, params[f"{first}.weight"], (1, 1), "SAME")
        mean, variance = (reduce(x, (0, 2, 3), keepdims=True) for reduce in (jnp.mean, jnp.var))
        gain, bias = (params[f"{first + 1}.{name}"].reshape(1, -1, 1, 1) for name in ("weight", "bias"))
        x = jax.nn.relu((x - mean) / jnp.sqrt(variance + 1e-5) * gain + bias)
        n, channels, height, width = x.shape
        x = x.reshape(n, channels, height // 2, 2, width // 2, 2).max((3, 5))
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["14.weight"].T + params["14.bias"])
    return x @ params["16.weight"].T + params["16.bias"]


def adam(lr: float) -> Rule:
    """Optax's."""
    made = optax.adam(lr)
    return made.init, made.update


def newton_schulz(matrix: Any) -> Any:
    """Five steps with Jordan's coefficients."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / jnp.sqrt(jnp.maximum(jnp.square(x).sum(), 1e-14))
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def harness(fan_ins: Mapping[str, int], total: int) -> Rule:
    """`NormalisedMuon` at its defaults, for matrices and vectors."""

    def init(params: Tensors) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros, {name: jnp.zeros(()) for name in params}, jnp.zeros((), jnp.int32)

    def update(grads: Tensors, state: Any, params: Tensors) -> tuple[Tensors, Any]:
        m, v, idle, done = state
        step, warm_up = done + 1, float(max(total // 20, 1))
        m = {name: 0.9 * m[name] + 0.1 * g for name, g in grads.items()}
        v = {name: 0.99 * v[name] + 0.01 * g * g for name, g in grads.items()}
        idle = {name: jnp.where((g != 0).any(), 0.0, idle[name] + 1) for name, g in grads.items()}
        fall = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((done - warm_up) / (total - warm_up), 0, 1)))
        factor = jnp.where(done < warm_up, (done + 1) / warm_up, fall)
        found = {}
        for name, g in grads.items():
            if g.ndim > 1:
                nesterov = 0.9 * m[name] + 0.1 * g
                direction = newton_schulz(nesterov.reshape(len(g), -1)).reshape(g.shape)
            else:
                direction = m[name] / (1 - 0.9**step) / (jnp.sqrt(v[name] / (1 - 0.99**step)) + 1e-8)
            size = 0.9 ** idle[name] / jnp.sqrt((jnp.square(direction).mean() + 1e-20) * fan_ins[name])
            found[name] = -0.03 * factor * (size * direction + 0.1 * params[name])
        return found, (m, v, idle, step)

    return init, update


def loop(
    model: Model, rule: Rule, params: Mapping[str, np.ndarray], samples: Sequence[np.ndarray], places: np.ndarray
) -> Callable[[], np.ndarray]:
    """All steps of all rows from the initial values, compiled; each call gives the losses [steps, rows].

    Args:
        model: (parameters, inputs) → scores.
        rule: Optimiser.
        params: Initial values, each with a row for each run.
        samples: Inputs and targets.
        places: Places of each step's samples, [steps, rows, batch].
    """
    inputs, targets = (jnp.asarray(part) for part in samples)
    init, update = rule

    def loss(params: Tensors, index: Any) -> Any:
        scores = model(params, inputs[index])
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets[index]).mean()

    def step(params: Tensors, state: Any, index: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, index)
        change, state = update(grads, state, params)
        return jax.tree.map(jnp.add, params, change), state, value

    @jax.jit
    def run(params: Tensors, places: Any) -> Any:
        def body(carry: Any, index: Any) -> Any:
            params, state, values = jax.vmap(step)(*carry, index)
            return (params, state), values

        return lax.scan(body, (params, jax.vmap(init)(params)), places)

    begin, order = {name: jnp.asarray(value) for name, value in params.items()}, jnp.asarray(places)
    return lambda: np.array(run(begin, order)[1])  # a copy, which PyTorch may write to
