"""Float64 oracles written from the definitions: scalar loops in Python, and `torch.func` for meta-gradients."""

import math

import torch


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def affine(bias, *products):
    """Σ W x + b, row by row."""
    return [b + sum(w * v for W, x in products for w, v in zip(W[k], x, strict=True)) for k, b in enumerate(bias)]


def lstm(phi, x, state):
    """Table I: f, i, o = σ(W x + U h + b); a = tanh(W_A x + U_A h + b_A); c' = f∘c + i∘a; h' = o∘tanh c'."""
    M = len(state["h"])
    z = affine(phi["bias"], (phi["weight_x"], x), (phi["weight_h"], state["h"]))
    i, f, a, o = z[:M], z[M : 2 * M], z[2 * M : 3 * M], z[3 * M :]
    c = [sigmoid(f[k]) * state["c"][k] + sigmoid(i[k]) * math.tanh(a[k]) for k in range(M)]
    h = [sigmoid(o[k]) * math.tanh(c[k]) for k in range(M)]
    return h, {"h": h, "c": c}


def stacked(phi, x, state):
    """Two LSTMs, the first one's output the second one's input."""
    after = {}
    for layer in ("0", "1"):
        own = {
            name.removeprefix(f"layers.{layer}."): value for name, value in phi.items() if f"layers.{layer}." in name
        }
        x, below = lstm(own, x, {name: state[f"{layer}.{name}"] for name in ("h", "c")})
        after |= {f"{layer}.{name}": value for name, value in below.items()}
    return x, after


CELLS = {"lstm": lstm, "stacked": stacked}
"""Name → (φ, x, state) → (h, state), all lists of one column."""


def log_and_sign(g, p=10.0):
    return (math.log(abs(g)) / p, math.copysign(1.0, g)) if abs(g) >= math.exp(-p) else (-1.0, math.exp(p) * g)


def momenta(gradients, betas=(0.5, 0.9, 0.99, 0.999), square_beta=0.999, eps=1e-8):
    """Each bias-corrected mean over the root of the mean square, after all `gradients`."""

    def mean(values, beta):
        weights = [(1 - beta) * beta ** (len(values) - 1 - k) for k in range(len(values))]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    scale = math.sqrt(mean([g * g for g in gradients], square_beta)) + eps
    return [mean(gradients, beta) / scale for beta in betas]


def rnnprop(history, betas=(0.9, 0.99), eps=1e-8):
    """(m̂, g) / (√v̂ + ε), m̂ and v̂ as the weighted averages that they are."""

    def average(values, beta):
        weights = [beta ** (len(values) - 1 - k) for k in range(len(values))]
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    scale = math.sqrt(average([g * g for g in history], betas[1])) + eps
    return average(history, betas[0]) / scale, history[-1] / scale


def additive(outputs, nominal, params, t, sizes, *, step_size=0.1):
    return [step_size * o[0] for o in outputs]


def direction_and_magnitude(
    outputs, nominal, params, t, sizes, *, step_size=0.01, horizon=50.0, weight_decay=0.1, log_scale=0.0
):
    """S_t·(d / RMS(d) − λ θ), t counted from 1."""
    direction = [(o[0] - m) * math.exp(o[1]) for o, m in zip(outputs, nominal, strict=True)]
    scale = step_size * math.exp(10 * log_scale) / (1 + (t - 1) / horizon)
    updates = []
    for size in sizes:
        part = direction[len(updates) : len(updates) + size]
        rms = math.sqrt(sum(d * d for d in part) / size)
        updates += [d / rms for d in part]
    return [scale * (d - weight_decay * theta) for d, theta in zip(updates, params, strict=True)]


def bounded(outputs, nominal, params, step, sizes, step_size=0.1):
    """s·tanh o."""
    return [step_size * math.tanh(o[0]) for o in outputs]


def gated(phi, forget, input_, g, theta, gates):
    """(θ', (f, i)) = f θ − i g, the gates with weights on θ and on themselves."""
    f, i = (
        sigmoid(o + phi["weight_params"][k] * theta + phi["weight_gates"][k] * gates[k] + phi["bias"][k])
        for k, o in enumerate((forget, input_))
    )
    return f * theta - i * g, (f, i)


def coordinatewise(phi, gradients, params, sizes, rule):
    """The updates [T][n] of a learned optimiser: log-and-sign, rnnprop and log-step into an LSTM and a rule."""
    cell = {name.removeprefix("cell."): value for name, value in phi.items() if name.startswith("cell.")}
    M = len(phi["head.weight"][0])
    states = [{"h": [0.0] * M, "c": [0.0] * M} for _ in params]
    updates = []
    for t in range(1, len(gradients) + 1):
        outputs, nominal = [], []
        for k in range(len(params)):
            means = rnnprop([g[k] for g in gradients[:t]])
            x = [*log_and_sign(gradients[t - 1][k]), *means, math.log(t) / 7]
            h, states[k] = lstm(cell, affine(phi["embedding.bias"], (phi["embedding.weight"], x)), states[k])
            outputs.append(affine(phi["head.bias"], (phi["head.weight"], h)))
            nominal.append(means[0])
        updates.append(rule(outputs, nominal, params, t, sizes))
        params = [theta + u for theta, u in zip(params, updates[-1], strict=True)]
    return updates


def warm_up_cosine(step, warm_up, total):
    """The multiplier of the update `step` = 0, 1, …."""
    if step < warm_up:
        return (step + 1) / warm_up
    if total is None:
        return 1.0
    return (1 + math.cos(math.pi * min((step - warm_up) / (total - warm_up), 1))) / 2


def meta_loss(phi, problem, order, objective):
    """L(φ) as one function of φ; in first order the optimiser's inputs ∇ℓ and ℓ are detached."""
    params, aux, state = problem.carry
    total = 0.0

    def summed(theta, aux, batch):
        loss, aux = problem.loss(theta, aux, batch)
        return loss.sum(), (loss, aux)

    for step in problem.steps:
        grads, (loss, aux) = torch.func.grad(summed, has_aux=True)(params, aux, step.batch)
        if order == 1:
            grads, loss = grads.detach(), loss.detach()
        aux = {name: value.detach() for name, value in aux.items()}
        update, state = problem.update(phi, grads, state, params, loss)
        params = params + update
        for target in step.targets:
            loss, _ = problem.loss(params, aux, target.batch)
            total = total + target.weight * (loss.log() if objective == "log-loss" else loss).mean()
    return total


def meta_gradient(problem, order, objective="loss"):
    """(dL/dφ, L)."""
    return torch.func.grad_and_value(meta_loss)(problem.phi, problem, order, objective)
