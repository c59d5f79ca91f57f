"""Float64 oracles written from the definitions: scalar loops in Python, and `torch.func` for meta-gradients."""

import math
from functools import partial

import torch

from l2lopt.estimators.exchange import Playback


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def affine(bias, *products):
    """Σ W x + b, row by row."""
    return [b + sum(w * v for W, x in products for w, v in zip(W[k], x, strict=True)) for k, b in enumerate(bias)]


def lstm(phi, x, state):
    """Table I: f, i, o = σ(W x + U h + b); a = tanh(W_A x + U_A h + b_A); c' = f∘c + i∘a; h' = o∘tanh c'."""
    M = len(state["h"])
    bias = [sum(both) for both in zip(phi["bias"], phi.get("bias_h", [0.0] * 4 * M), strict=True)]
    z = affine(bias, (phi["weight_x"], x), (phi["weight_h"], state["h"]))
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


def lists(values, M):
    """Rows of M each."""
    return [values[k : k + M] for k in range(0, len(values), M)]


def matrix(W, x):
    """W x, row by row."""
    return affine([0.0] * len(W), (W, x))


def extra(phi, name, M):
    """The bias of that name, 0 where there is none."""
    return phi.get(name, [0.0] * M)


def linear(z):
    """z."""
    return z


def rnn(phi, x, state, *, activation):
    """h' = f(W x + U h + b)."""
    h = [activation(z) for z in affine(phi["bias"], (phi["weight_x"], x), (phi["weight_h"], state["h"]))]
    return h, {"h": h}


def gru(phi, x, state, *, update="new", reset="before", activation=math.tanh):
    """Table I, eqs. 1-3: i, r = σ(W x + U h + b); a = tanh(W_A x + U_A (r∘h) + b_A); h' = (1−i)∘h + i∘a; a of eq. 9."""
    h, M = state["h"], len(state["h"])
    W, U = lists(phi["weight_x"], M), lists(phi["weight_h"], M)
    b, b_h = (lists(phi.get(name, [0.0] * 3 * M), M) for name in ("bias", "bias_h"))
    r, i = ([sum(z) for z in zip(affine(b[g], (W[g], x), (U[g], h)), b_h[g], strict=True)] for g in (0, 1))
    r = [sigmoid(z) for z in r]
    i = [sigmoid(z + extra(phi, "gate_bias", M)[k]) for k, z in enumerate(i)]
    if reset == "before":
        back = affine(b_h[2], (U[2], [r[k] * h[k] for k in range(M)]))
    else:
        back = [r[k] * z for k, z in enumerate(affine(b_h[2], (U[2], h)))]
    a = [activation(z + back[k]) for k, z in enumerate(affine(b[2], (W[2], x)))]
    new = i if update == "new" else [1 - share for share in i]
    h = [(1 - new[k]) * h[k] + new[k] * a[k] for k in range(M)]
    return h, {"h": h}


def leaky(phi, x, state, *, activation=math.tanh):
    """Eq. 8 by eq. 7: h' = h + ξ∘(−h + a); a = f(W_A x + U_A h + b_A), or f(W_A x)."""
    h, M = state["h"], len(state["h"])
    steps, a = phi["step"], matrix(phi["weight_x"], x)
    if "weight_h" in phi:
        back = affine(phi["bias"], (phi["weight_h"], h))
        a = [one + other for one, other in zip(a, back, strict=True)]
    h = [h[k] + sigmoid(steps[k % len(steps)]) * (-h[k] + activation(a[k])) for k in range(M)]
    return h, {"h": h}


def sru(phi, x, state):
    """Table I: f, p = σ(W x + ω∘c + b); a = W_A x; c' = f∘c + (1−f)∘a; h' = p∘c' + (1−p)∘x."""
    M, c = len(state["c"]), state["c"]
    z, omega, b = matrix(phi["weight_x"], x), phi["weight_c"], phi["bias"]
    f = [sigmoid(z[k] + omega[k] * c[k] + b[k] + extra(phi, "gate_bias", M)[k]) for k in range(M)]
    p = [sigmoid(z[M + k] + omega[M + k] * c[k] + b[M + k] + extra(phi, "highway_bias", M)[k]) for k in range(M)]
    c = [f[k] * c[k] + (1 - f[k]) * z[2 * M + k] for k in range(M)]
    return [p[k] * c[k] + (1 - p[k]) * x[k] for k in range(M)], {"c": c}


def t_lstm(phi, x, state):
    """Table I: f, o = σ(W x_t + U x_{t−1} + b), a the same without σ; c' = f∘c + (1−f)∘a; h' = o∘c'."""
    M, c = len(state["c"]), state["c"]
    z = lists(affine(phi["bias"], (phi["weight_x"], x), (phi["weight_before"], state["x"])), M)
    f = [sigmoid(z[0][k] + extra(phi, "gate_bias", M)[k]) for k in range(M)]
    c = [f[k] * c[k] + (1 - f[k]) * z[2][k] for k in range(M)]
    return [sigmoid(z[1][k]) * c[k] for k in range(M)], {"x": x, "c": c}


def fastgrnn(phi, x, state):
    """Table I: f = σ(W_F x + U_F h + b_F); a = tanh(W_A x + U_A h + b_A); h' = f∘h + (β(1−f) + κ)∘a."""
    h, M = state["h"], len(state["h"])
    f, a = lists(affine(phi["bias"], (phi["weight_x"], x), (phi["weight_h"], h)), M)
    f = [sigmoid(f[k] + extra(phi, "gate_bias", M)[k]) for k in range(M)]
    beta, kappa = sigmoid(phi["beta"]), sigmoid(phi["kappa"])
    h = [f[k] * h[k] + (beta * (1 - f[k]) + kappa) * math.tanh(a[k]) for k in range(M)]
    return h, {"h": h}


def gru_core(phi, z, a, x, state):
    """i, r = σ(W v); h' = (1−i)∘h + i∘(r∘a)."""
    M = len(a)
    i = [sigmoid(z[0][k] + extra(phi, "core.gate_bias", M)[k]) for k in range(M)]
    h = [(1 - i[k]) * state["h"][k] + i[k] * sigmoid(z[1][k]) * a[k] for k in range(M)]
    return h, {"h": h}


def lstm_core(phi, z, a, x, state):
    """f, i, o = σ(W v); c' = f∘c + i∘a; h' = o∘tanh c'."""
    M = len(a)
    f = [sigmoid(z[0][k] + extra(phi, "core.gate_bias", M)[k]) for k in range(M)]
    c = [f[k] * state["c"][k] + sigmoid(z[1][k]) * a[k] for k in range(M)]
    h = [sigmoid(z[2][k]) * math.tanh(c[k]) for k in range(M)]
    return h, {"h": h, "c": c}


def sru_core(phi, z, a, x, state):
    """f, p = σ(W v); c' = f∘c + (1−f)∘a; h' = p∘c' + (1−p)∘x."""
    M = len(a)
    f = [sigmoid(z[0][k] + extra(phi, "core.gate_bias", M)[k]) for k in range(M)]
    p = [sigmoid(z[1][k] + extra(phi, "core.highway_bias", M)[k]) for k in range(M)]
    c = [f[k] * state["c"][k] + (1 - f[k]) * a[k] for k in range(M)]
    h = [p[k] * c[k] + (1 - p[k]) * x[k] for k in range(M)]
    return h, {"h": h, "c": c}


def t_lstm_core(phi, z, a, x, state):
    """f, o = σ(W v); c' = f∘c + (1−f)∘a; h' = o∘c'."""
    M = len(a)
    f = [sigmoid(z[0][k] + extra(phi, "core.gate_bias", M)[k]) for k in range(M)]
    c = [f[k] * state["c"][k] + (1 - f[k]) * a[k] for k in range(M)]
    h = [sigmoid(z[1][k]) * c[k] for k in range(M)]
    return h, {"h": h, "c": c}


def fastgrnn_core(phi, z, a, x, state):
    """f = σ(W_F v); h' = f∘h + β(1−f)∘a."""
    M, beta = len(a), sigmoid(phi["core.beta"])
    f = [sigmoid(z[0][k] + extra(phi, "core.gate_bias", M)[k]) for k in range(M)]
    h = [f[k] * state["h"][k] + beta * (1 - f[k]) * a[k] for k in range(M)]
    return h, {"h": h}


def simplified(phi, x, state, *, highway, core, diagonal=False, gamma_on="h"):
    """The core on v = x + α∘F (IRC) or v = (1−g)∘x + g∘F, g = σ(W_G x + Γ h + b_G) (IHC); F = U_V h or ω_V∘h."""
    h, N = state["h"], len(x)
    U = phi["highway.feedback.weight_h"]
    back = [math.tanh(U[k]) * h[k] for k in range(N)] if diagonal else matrix(U, h)
    if highway == "irc":
        v = [x[k] + sigmoid(phi["highway.alpha"][k]) * back[k] for k in range(N)]
    else:
        gate = matrix(phi["highway.gamma"], h if gamma_on == "h" else back)
        if "highway.weight_g" in phi:
            from_x = affine(phi["highway.bias_g"], (phi["highway.weight_g"], x))
            gate = [gate[k] + from_x[k] for k in range(N)]
        v = [(1 - sigmoid(gate[k])) * x[k] + sigmoid(gate[k]) * back[k] for k in range(N)]
    return core(phi, lists(matrix(phi["core.weight_v"], v), len(h)), matrix(phi["core.weight_x"], x), x, state)


def no_feedback(phi, x, state, *, core):
    """The core on v = x (eqs. 12-14)."""
    z = lists(matrix(phi["core.weight_v"], x), len(state["h"]))
    return core(phi, z, matrix(phi["core.weight_x"], x), x, state)


def coupled_gru(phi, x, state, *, coupled=True, least=0.0):
    """Compagnon et al. 2021; x and h are left's numbers, then right's."""
    phi = {name.removeprefix("cell."): value for name, value in phi.items()}
    M, sides = len(state["h"]) // 2, []
    b, b_h = lists(phi["bias"], M), lists(phi["bias_h"], M)
    W, U = lists(phi["weight_x"], M), lists(phi["weight_h"], M)
    for side, h in zip(lists(x, len(x) // 2), lists(state["h"], M), strict=True):
        from_x, from_h = ([affine(c[g], (A[g], y)) for g in range(3)] for c, A, y in ((b, W, side), (b_h, U, h)))
        r, z = ([sigmoid(from_x[g][k] + from_h[g][k]) for k in range(M)] for g in (0, 1))
        n = [math.tanh(from_x[2][k] + r[k] * from_h[2][k]) for k in range(M)]
        sides.append((h, z, n, affine(b_h[3], (U[3], h)) if coupled else None))
    new = []
    for (h, z, n, mine), (_, _, other, theirs) in (sides, sides[::-1]):
        c = [least + (1 - least) * sigmoid(mine[k] + theirs[k]) if coupled else 0.0 for k in range(M)]
        new += [z[k] * h[k] + (1 - z[k]) * ((1 - c[k]) * n[k] + c[k] * other[k]) for k in range(M)]
    return new, {"h": new}


GRUS = {
    f"gru {update} {reset} {biases}": partial(gru, update=update, reset=reset)
    for update in ("new", "kept")
    for reset in ("before", "after")
    for biases in ("none", "one", "two")
}
CORES = {
    "gru": gru_core,
    "lstm": lstm_core,
    "sru": sru_core,
    "t-lstm": t_lstm_core,
    "fastgrnn": fastgrnn_core,
}
SIMPLIFIED = {
    f"{highway}-{name}": partial(simplified, highway=highway, core=core, diagonal=name in ("sru", "t-lstm"))
    for highway in ("irc", "ihc")
    for name, core in CORES.items()
} | {f"no-irc-{name}": partial(no_feedback, core=core) for name, core in CORES.items()}
CELLS = {
    "rnn": partial(rnn, activation=math.tanh),
    "rnn relu": partial(rnn, activation=lambda z: max(z, 0.0)),
    "gru": gru,
    **GRUS,
    "gru new with gate bias": gru,
    "gru kept with gate bias": partial(gru, update="kept"),
    "gru linear": partial(gru, activation=linear),
    "gru relu": partial(gru, activation=lambda z: max(z, 0.0)),
    "gru kept after linear": partial(gru, update="kept", reset="after", activation=linear),
    "leaky": leaky,
    "leaky linear": partial(leaky, activation=linear),
    "leaky scalar without recurrence": leaky,
    "lstm": lstm,
    "lstm two biases": lstm,
    "stacked": stacked,
    "sru": sru,
    "sru with gate bias": sru,
    "t-lstm": t_lstm,
    "t-lstm with gate bias": t_lstm,
    "fastgrnn": fastgrnn,
    "fastgrnn with gate bias": fastgrnn,
    **SIMPLIFIED,
    **{f"{name} with gate bias": oracle for name, oracle in SIMPLIFIED.items()},
    **{f"{name} without gate input": oracle for name, oracle in SIMPLIFIED.items() if name.startswith("ihc")},
    **{f"{name} uvh": partial(oracle, gamma_on="uvh") for name, oracle in SIMPLIFIED.items() if name.startswith("ihc")},
    "ihc-lstm uvh without gate input": partial(SIMPLIFIED["ihc-lstm"], gamma_on="uvh"),
    "coupled-gru": coupled_gru,
    "coupled-gru siamese": partial(coupled_gru, coupled=False),
    "coupled-gru held open": partial(coupled_gru, least=0.3),
}
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


def activity(g, adam):
    """The share of its update that a coordinate takes: 1 with a gradient, else min(1, 10 |m̂| / (√v̂ + ε))."""
    return 1.0 if g else min(1.0, 10 * abs(adam))


def additive(outputs, nominal, params, t, sizes, *, step_size=0.1, shares=None):
    return [step_size * a * o[0] for o, a in zip(outputs, shares or [1.0] * len(outputs), strict=True)]


def direction_and_magnitude(
    outputs, nominal, params, t, sizes, *, step_size=0.01, horizon=50.0, weight_decay=0.1, log_scale=0.0, shares=None
):
    """S_t·(a d / RMS(d) − λ θ), t counted from 1."""
    direction = [(o[0] - m) * math.exp(o[1]) for o, m in zip(outputs, nominal, strict=True)]
    scale = step_size * math.exp(10 * log_scale) / (1 + (t - 1) / horizon)
    updates = []
    for size in sizes:
        part = direction[len(updates) : len(updates) + size]
        rms = math.sqrt(sum(d * d for d in part) / size)
        updates += [d / rms for d in part]
    updates = [a * d for a, d in zip(shares or [1.0] * len(updates), updates, strict=True)]
    return [scale * (d - weight_decay * theta) for d, theta in zip(updates, params, strict=True)]


def bounded(outputs, nominal, params, step, sizes, step_size=0.1):
    """s·tanh o."""
    return [step_size * math.tanh(o[0]) for o in outputs]


def gated(phi, forget, input_, g, theta, gates, scale=1.0):
    """(θ', (f, i)) = f θ − s i g, the gates with weights on θ and on themselves."""
    f, i = (
        sigmoid(o + phi["weight_params"][k] * theta + phi["weight_gates"][k] * gates[k] + phi["bias"][k])
        for k, o in enumerate((forget, input_))
    )
    return f * theta - scale * math.exp(10 * phi.get("log_scale", 0.0)) * i * g, (f, i)


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
        shares = [activity(g, adam) for g, adam in zip(gradients[t - 1], nominal, strict=True)]
        updates.append(rule(outputs, nominal, params, t, sizes, shares=shares))
        params = [theta + u for theta, u in zip(params, updates[-1], strict=True)]
    return updates


def warm_up_then(shape, step, warm_up, total, final=0.0):
    """The multiplier of the update `step` = 0, 1, …."""
    if step < warm_up:
        return (step + 1) / warm_up
    if shape == "inverse":
        return max(final, 100 / (100 + step - warm_up))
    if total is None:
        return 1.0
    p = min((step - warm_up) / (total - warm_up), 1)
    return {
        "constant": 1.0,
        "linear": 1 - (1 - final) * p,
        "cosine": final + (1 - final) * (1 + math.cos(math.pi * p)) / 2,
        "exponential": math.exp(p * math.log(final)) if final else None,
        "warm-up-stable-decay": 1.0 if p < 0.8 else final + (1 - final) * 5 * (1 - p),
    }[shape]


def warm_up_cosine(step, warm_up, total):
    return warm_up_then("cosine", step, warm_up, total)


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
        update, state = problem.update(phi, grads, state, params, loss=loss)
        params = params + update
        parts = {}
        for number, target in enumerate(step.targets):
            parts.setdefault(target.part or number, []).append(target)
        for targets in parts.values():
            weights = torch.tensor([target.weight for target in targets], dtype=torch.float64)
            losses = torch.stack([problem.loss(params, aux, target.batch)[0] for target in targets], -1)
            loss = losses @ (weights / weights.sum()).to(losses.dtype)
            total = total + weights.sum() * (loss.log() if objective == "log-loss" else loss).mean()
    return total


def meta_gradient(problem, order, objective="loss"):
    """(dL/dφ, L)."""
    return torch.func.grad_and_value(meta_loss)(problem.phi, problem, order, objective)


def replayed(optimiser, phi, window):
    """A block's part of the first-order meta-gradient, by autograd through the optimiser's own steps."""
    leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
    state, theta, total = window.state, window.params, torch.zeros(())
    for t in range(len(window.grads)):
        state = state._replace(layout=window.state.layout.meeting(Playback(window.meetings[t], {})))
        update, state = optimiser.update_with(leaves, window.grads[t], state, theta, loss=window.losses[t])
        theta = theta + update
        total = total + (window.sources[t] * theta).sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradient = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradient, strict=True))
