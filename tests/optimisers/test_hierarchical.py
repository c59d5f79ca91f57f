"""The hierarchical rule against loops over tensors, the laboratory's rule and its harness."""

import math
import pickle

import laws
import pytest
import torch
from implementations import hierarchical, normal, problem, seeded
from torch.func import vmap

from l2lopt import kernels, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.estimators import Backprop, Blockwise
from l2lopt.optimisers.controls import CONTROLS
from l2lopt.optimisers.facts import FACTS, LARGEST_LOSS, USUAL

SHAPES = {"a": (4, 3), "ab": (4,), "embed.weight": (5, 3), "b": (2, 4), "bb": (2,), "lm_head": (3, 2)}
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})
OF_THE_LABORATORY = [
    *("progress", "length", "gradient-size", "signal", "slow-signal", "weight-size"),
    *("matrix", "fan-in", "depth", "loss", "loss-trend", "loss-progress"),
]
"""Its facts but for the last, which is 1."""


def gradients(steps, *batch, seed=0):
    return normal(steps, *batch, LAYOUT.size, seed=seed)


@pytest.mark.parametrize("cell", ["none", "lstm", "ihc-lstm", "gru"])
@pytest.mark.parametrize("total", [None, 7])
def test_untrained_it_is_the_harness(cell, total):
    rule, harness = optimisers.make("hierarchical", cell=cell).double(), optimisers.make("normalised-muon")
    theta, g = normal(2, LAYOUT.size, seed=1), gradients(6, 2)
    g[2, 0, 3], g[3:, :, :12] = float("nan"), 0.0
    ours, theirs = (
        laws.roll(r.update, r.init(LAYOUT, (2,), like=theta, total_steps=total), g, theta)[0] for r in (rule, harness)
    )
    laws.assert_close(ours, theirs, 1e-12)


# The equations again, tensor by tensor and in plain loops; rows, batches and groupings are not known here.


def root_mean_square(values):
    return math.sqrt(sum(x * x for x in values) / len(values))


def mean_product(one, other):
    return sum(x * y for x, y in zip(one, other, strict=True)) / len(one)


def log_share(part, whole):
    return math.log(part / (whole + 1e-30) + 1e-4) / 3 + 1


def sign(x):
    return math.copysign(1, x) if x else 0.0


def clamped(x, limit):
    return max(-limit, min(limit, x))


def newton_schulz(values, shape):
    x = torch.tensor(values, dtype=torch.float64).reshape(shape)
    x = x / max(x.norm(), 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.flatten().tolist()


def schedule(step, total):
    warm = max(1, math.floor(0.05 * total))
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


class Loops:
    """One run of the rule with a layer of tanh, by the equations of its docstring."""

    def __init__(self, phi, facts, controls, total, lr=0.3, decay=0.1, bounds=(4.0, 16.0)):
        self.phi = {name: value.tolist() for name, value in phi.items()}
        self.facts, self.controls, self.total = facts, controls, total
        self.lr, self.decay, self.bounds, self.step, self.losses = lr, decay, bounds, 0, None
        self.state = [
            {"m": [0.0] * size, "v": [0.0] * size, "s": [0.0] * size, "idle": 0, "moved": 0.0} for size in LAYOUT.sizes
        ]

    def update(self, grads, params, loss):
        told = LARGEST_LOSS if not math.isfinite(loss) else max(1e-6, min(1e4, loss))
        fast, slow, first = self.losses or (told, told, told)
        if self.losses:
            fast, slow = 0.9 * fast + 0.1 * told, 0.98 * slow + 0.02 * told
        self.losses = fast, slow, first
        said = {"loss": math.log(told) / 3, "loss-trend": clamped(3 * math.log(fast / slow), 3)}
        said["loss-progress"] = math.log(slow / first) / 2
        parts = zip(LAYOUT.split(grads), LAYOUT.split(params), strict=True)
        found = [x for k, (g, theta) in enumerate(parts) for x in self.tensor(k, g.tolist(), theta.tolist(), said)]
        self.step += 1
        return torch.tensor(found, dtype=torch.float64)

    def tensor(self, k, g, theta, said):
        own, t, shape, kind = self.state[k], self.step + 1, LAYOUT.shapes[k], LAYOUT.roles[k].kind
        fan = LAYOUT.fan_ins[k]
        for name, beta, power in (("m", 0.9, 1), ("s", 0.98, 1), ("v", 0.99, 2)):
            own[name] = [beta * old + (1 - beta) * x**power for old, x in zip(own[name], g, strict=True)]
        m, s, v = ([x / (1 - b**t) for x in own[name]] for name, b in (("m", 0.9), ("s", 0.98), ("v", 0.99)))
        own["idle"] = 0 if any(g) else own["idle"] + 1
        size = root_mean_square(g)
        own["usual"] = 0.98 * own["usual"] + 0.02 * size if "usual" in own else size
        weight = root_mean_square(theta)
        own.setdefault("start", weight)
        if any(g):
            own.setdefault("first", size)
        progress = math.log(size / own.get("first", size) + 1e-8) / 2
        square = sum(v) / len(v)
        facts = {
            "progress": 2 * self.step / self.total - 1,
            "length": min(max(math.log(self.total) - 5.3, -3), 2),
            "age": math.log(t) / 3 - 1,
            "gradient-size": clamped(math.log(size / own["usual"] + 1e-8), 3),
            "gradient-progress": clamped(progress, 3),
            "signal": log_share(mean_product(m, m), square),
            "slow-signal": log_share(mean_product(s, s), square),
            "alignment": mean_product(g, m) / (size * root_mean_square(m)) if size else 0.0,
            "weight-size": clamped(math.log(weight * math.sqrt(fan) + 1e-3), 4),
            "growth": clamped(math.log((weight + 1e-8) / (own["start"] + 1e-8)), 3),
            "update-to-weight": clamped(math.log(own["moved"] / (weight + 1e-8) + 1e-8) / 3 + 1, 3),
            **{name: 2.0 * (kind == name) - 1 for name in ("matrix", "vector", "embedding", "head")},
            "fan-in": math.log(fan) / 3 - 1,
            "depth": 2 * k / (len(LAYOUT.names) - 1) - 1,
            **said,
        }
        x = [facts[name] for name in self.facts]
        h = [
            math.tanh(sum(w * f for w, f in zip(row, x, strict=True)) + b)
            for row, b in zip(self.phi["cell.layer.weight"], self.phi["cell.layer.bias"], strict=True)
        ]
        o = dict.fromkeys(CONTROLS, 0.0) | {
            name: sum(w * y for w, y in zip(row, h, strict=True)) + b
            for name, row, b in zip(self.controls, self.phi["head.weight"], self.phi["head.bias"], strict=True)
        }
        p = math.tanh(o["momentum"])
        nesterov = [0.9 * x + 0.1 * y for x, y in zip(own["m"], g, strict=True)]
        towards, total = (s if p > 0 else g), 1 - 0.9 ** (t + 1)
        momentum = [(1 - abs(p)) * x + abs(p) * total * y for x, y in zip(nesterov, towards, strict=True)]
        mean = [(1 - abs(p)) * x + abs(p) * y for x, y in zip(m, towards, strict=True)]
        adam = [x / (math.sqrt(y) + 1e-8) for x, y in zip(mean, v, strict=True)]
        active = [1 if x else min(1, abs(y) / 0.1) for x, y in zip(g, adam, strict=True)]
        d = newton_schulz(momentum, shape) if kind == "matrix" else adam
        d = self.normal(d)
        for name, other in (
            ("mix", adam),
            ("sign", [a * sign(x) for a, x in zip(active, momentum, strict=True)]),
            ("slow", [a * x for a, x in zip(active, s, strict=True)]),
        ):
            if name in self.controls:
                limit = math.pi / 2 if o[name] > 0 else 0.25
                angle = limit * math.tanh(o[name] / limit)
                pair = zip(d, self.normal(other), strict=True)
                d = [math.cos(angle) * x + math.sin(angle) * y for x, y in pair]
        d = self.normal(d)
        step, decay = (
            math.log(b) * math.tanh(o[n] / math.log(b)) for n, b in zip(("step", "decay"), self.bounds, strict=True)
        )
        rate = self.lr * schedule(self.step, self.total)
        size = 0.9 ** own["idle"] * math.exp(step) / math.sqrt(fan)
        if kind == "embedding":
            size *= math.sqrt(min(max(shape[0] / shape[1], 1), shape[1]))
        own["moved"] = rate * size
        return [-rate * (size * x + math.exp(decay) * self.decay * y) for x, y in zip(d, theta, strict=True)]

    @staticmethod
    def normal(values):
        size = root_mean_square(values)
        return [x / size for x in values] if size else values


@pytest.mark.parametrize(
    ("controls", "facts"),
    [(["step", "decay", "mix"], list(USUAL)), (list(CONTROLS), [*FACTS]), (["momentum"], ["progress"])],
    ids=["usual", "every one", "momentum"],
)
def test_equals_a_loop_over_tensors(controls, facts):
    rule = hierarchical(cell="none", controls=controls, facts=facts, weight_decay=0.1)
    g, theta = gradients(7), normal(LAYOUT.size, seed=1)
    g[3:5, :12], g[2] = 0.0, 1e-3 * g[2]
    state, loops = rule.init(LAYOUT, like=theta, total_steps=9), Loops(rule.phi(), facts, controls, 9)
    for step, grads in enumerate(g):
        loss = torch.tensor([2.0, 1.0, float("nan"), 0.5, -1.0, 0.4, 0.3][step], dtype=torch.float64)
        change, state = rule.update(grads, state, theta, loss=loss)
        laws.assert_close(change, loops.update(grads, theta, float(loss)), 1e-9)
        theta = theta + change.detach()


# The rule that the laboratory evolved, as it was written there but for float64 and one run at a time.


def of_the_laboratory(phi, grads, theta, losses, total, lr=0.05, decay=0.1):
    w, b, head, bias = phi
    tensors = LAYOUT.tensors
    fan, size = (torch.tensor(x, dtype=torch.float64) for x in (LAYOUT.fan_ins, [math.prod(s) for s in LAYOUT.shapes]))
    matrix = torch.tensor([role.kind == "matrix" for role in LAYOUT.roles])

    def mean(x):
        return torch.stack([part.mean() for part in LAYOUT.split(x)])

    def rms(x):
        return (mean(x.square()) + 1e-20).sqrt()

    def normal_(d):
        return d / tensors.spread(rms(d) + 1e-8)

    m, s, v = (torch.zeros_like(theta) for _ in range(3))
    fast = slow = first = usual = torch.zeros(())
    updates = []
    for t, (g, loss) in enumerate(zip(grads, losses, strict=True)):
        m, s, v = 0.9 * m + 0.1 * g, 0.98 * s + 0.02 * g, 0.99 * v + 0.01 * g.square()
        mh, sh, vh = m / (1 - 0.9 ** (t + 1)), s / (1 - 0.98 ** (t + 1)), v / (1 - 0.99 ** (t + 1))
        adam, nesterov = mh / (vh.sqrt() + 1e-8), 0.9 * m + 0.1 * g
        parts = zip(LAYOUT.shapes, matrix, LAYOUT.split(adam), LAYOUT.split(nesterov), strict=True)
        muon = torch.cat(
            [torch.tensor(newton_schulz(x.tolist(), shape)) if is_one else a for shape, is_one, a, x in parts]
        )
        usual = rms(g) if t == 0 else 0.98 * usual + 0.02 * rms(g)
        first = loss if t == 0 else first
        fast, slow = (loss, loss) if t == 0 else (0.9 * fast + 0.1 * loss, 0.98 * slow + 0.02 * loss)
        one = torch.ones_like(fan)
        x = torch.stack(
            [
                one * (t / total - 0.5) * 2,
                one * (math.log(total) - 5.3),
                (rms(g) / (usual + 1e-20) + 1e-8).log().clamp(-3, 3),
                (mean(mh.square()) / (mean(vh) + 1e-20) + 1e-4).log() / 3 + 1,
                (mean(sh.square()) / (mean(vh) + 1e-20) + 1e-4).log() / 3 + 1,
                (rms(theta) * fan.sqrt() + 1e-3).log().clamp(-4, 4),
                matrix * 2.0 - 1,
                fan.log() / 3 - 1,
                torch.linspace(-1, 1, len(size), dtype=torch.float64),
                one * loss.log() / 3,
                one * ((fast / slow).log() * 3).clamp(-3, 3),
                one * (slow / first).log() / 2,
                one,
            ]
        )
        c = (head @ torch.tanh(w @ x + b[:, None]) + bias[:, None]).clamp(-4, 4)
        mix = tensors.spread(torch.sigmoid(2 * c[2] + 4))
        d = normal_(mix * normal_(muon) + (1 - mix) * normal_(adam)) / tensors.spread(fan.sqrt())
        rate = lr * schedule(t, total)
        change = -rate * (tensors.spread(c[0].exp()) * d + tensors.spread(decay * (1.5 * c[1]).exp()) * theta)
        updates.append(change)
        theta = theta + change
    return updates


def test_it_can_be_the_laboratorys_rule():
    """Without bounds, with the logit, and with what its facts differ in: a 13th one, which is 1, is a part of b."""
    w, b, head, bias = (0.3 * normal(*shape, seed=k) for k, shape in enumerate([(8, 13), (8,), (4, 8), (4,)]))
    free = {"step_bound": math.inf, "decay_bound": math.inf, "mix": "logit", "embedding_scale": 1.0}
    rule = optimisers.make("hierarchical", cell="none", facts=OF_THE_LABORATORY, lr=0.05, **free).double()
    scale = torch.tensor([1.0, 1.5, 1.0])  # its decay is λ e^{1.5 c}; its fourth output serves nothing
    values = (w[:, :12], b + w[:, 12], head[:3] * scale[:, None], bias[:3] * scale)
    with torch.no_grad():
        for parameter, value in zip(rule.parameters(), values, strict=True):
            parameter.copy_(value)
    rule.requires_grad_(False)
    grads, theta, losses = gradients(8), normal(LAYOUT.size, seed=1), normal(8, seed=2).exp()
    wanted = of_the_laboratory((w, b, head, bias), grads, theta, losses, 20)
    state = rule.init(LAYOUT, like=theta, total_steps=20)
    for g, loss, change in zip(grads, losses, wanted, strict=True):
        found, state = rule.update(g, state, theta, loss=loss)
        laws.assert_close(found, change, 1e-6)  # its roots are of x + 10⁻²⁰ and divided by RMS + 10⁻⁸
        theta = theta + found


# Laws.


@pytest.mark.parametrize(
    "law", [laws.assert_is_local, laws.assert_batch_rows_are_separate_runs, laws.assert_permutes_with_its_coordinates]
)
def test_the_control_of_momentum_keeps_the_laws(law):
    law(hierarchical(controls=list(CONTROLS)))


def test_blocks_give_the_tapes_meta_gradient():
    """Exactly, but for the facts of θ."""
    task = problem("hierarchical without facts of θ", length=3)
    ours, tape = laws.run(Blockwise(block=30), task), laws.run(Backprop(), task)
    laws.assert_close(vars(ours), vars(tape), 1e-10)


def test_a_copy_by_pickle_is_the_rule():
    rule = hierarchical()
    laws.assert_same(pickle.loads(pickle.dumps(rule)).phi(), rule.phi())


def test_rows_may_have_a_phi_of_their_own():
    """`vmap` over φ, states and losses gives what separate rules give."""
    rules = [seeded(optimisers.make("hierarchical", hidden_size=3), seed=k) for k in range(3)]
    theta, g, losses = normal(3, LAYOUT.size, seed=1), gradients(3, 3), normal(3, 3).exp()
    phi = {name: torch.stack([rule.phi()[name].detach() for rule in rules]) for name in rules[0].phi()}
    single = rules[0].init(LAYOUT, like=theta, total_steps=9)
    state = torch.utils._pytree.tree_map(lambda x: torch.stack([x] * 3), single)
    separate = [single] * 3

    def update(phi, g, state, params, loss):
        return rules[0].update_with(phi, g, state, params, loss=loss)

    for grads, loss in zip(g, losses, strict=True):
        change, state = vmap(update)(phi, grads, state, theta, loss)
        alone = [rule.update(grads[k], separate[k], theta[k], loss=loss[k]) for k, rule in enumerate(rules)]
        separate = [after for _, after in alone]
        laws.assert_close(change, torch.stack([u for u, _ in alone]).detach(), 1e-12)
        theta = theta + change


@pytest.mark.parametrize(("bound", "largest"), [("step_bound", 4.0), ("step_bound", 1.5)])
def test_the_step_stays_within_its_bound(bound, largest):
    """Whatever the network says, the RMS of the update of each tensor is that of the harness times [1/bound, bound]."""
    harness = optimisers.make("normalised-muon", weight_decay=0.0)
    theta, g = normal(LAYOUT.size, seed=1), gradients(1)[0]
    wanted, _ = harness.update(g, harness.init(LAYOUT, like=theta, total_steps=9), theta)
    for sign in (-1.0, 1.0):
        rule = optimisers.make("hierarchical", weight_decay=0.0, **{bound: largest}).double().requires_grad_(False)
        rule.head.bias[0] = sign * 100.0
        found, _ = rule.update(g, rule.init(LAYOUT, like=theta, total_steps=9), theta, loss=theta.sum())
        ratio = found.square().mean().sqrt() / wanted.square().mean().sqrt()
        laws.assert_close(ratio, torch.tensor(largest**sign, dtype=torch.float64), 1e-9)


@pytest.mark.parametrize("loss", [None, float("nan"), math.inf, -math.inf, 0.0, -3.0, 1e30])
@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e15, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_stays_finite(loss, scale, dtype):
    rule = seeded(optimisers.make("hierarchical", facts=[*FACTS], hidden_size=3), scale=0.3).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    layout = Layout((*LAYOUT.names, "none"), (*LAYOUT.shapes, (0, 3)))
    for form in (rule.requires_grad_(False), kernels.fuse(rule, "cpu")):
        theta = torch.zeros(layout.size, dtype=dtype)
        state = form.init(layout, like=theta)
        for step in range(3):
            told = None if loss is None or step == 1 else torch.tensor(loss).to(dtype)
            change, state = form.update(scale * normal(layout.size, seed=step).to(dtype), state, theta, loss=told)
            assert change.isfinite().all()
            assert change.dtype == dtype
            theta = theta + change
        leaves = torch.utils._pytree.tree_leaves((state.coordinates, state.groups, state.shared))
        assert all(leaf.isfinite().all() for leaf in leaves)
        assert {value.dtype for value in state.coordinates.values()} == {dtype}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"facts": ["progres"]}, "facts: expected known names, found 'progres'; did you mean 'progress'"),
        ({"facts": []}, "facts: expected at least one, and each at most once, found none"),
        ({"controls": ["step", "step"]}, "controls: expected at least one, and each at most once"),
        ({"controls": ["stop"]}, "controls: expected known names, found 'stop'; did you mean 'step'"),
        ({"step_bound": 0.5}, "hierarchical: step_bound: expected at least 1, found 0.5"),
        ({"decay_bound": math.nan}, "hierarchical: decay_bound: expected at least 1, found nan"),
        ({"cell": "lstmm"}, "cell"),
        ({"cell": "sru"}, "cell 'sru': expected input_size = hidden_size"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        optimisers.make("hierarchical", **options)


def test_an_embedding_serves_cells_that_add_inputs_and_outputs():
    rule = optimisers.make("hierarchical", cell="sru", embedding=True, hidden_size=3)
    assert rule.embedding.weight.shape == (3, len(USUAL))
    laws.assert_is_local(seeded(rule))


def test_phi_depends_on_the_seed_alone():
    first, again, other = (optimisers.make("hierarchical", seed=seed).phi() for seed in (1, 1, 2))
    laws.assert_same(first, again)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert first["head.weight"].eq(0).all()
    assert optimisers.make("hierarchical", head_scale=0.1).phi()["head.weight"].ne(0).all()
    with pytest.raises(UserError, match="head_scale: expected a finite number, found nan"):
        optimisers.make("hierarchical", head_scale=math.nan)
