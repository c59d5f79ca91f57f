"""Muon and the harness against `torch.optim` and against their definitions, step by step."""

import math

import laws
import pytest
import torch
from implementations import normal

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisers.directions import newton_schulz
from l2lopt.optimisers.normalised_muon import usual_embedding_scale

SHAPES = {"w": (3, 5), "b": (3,), "v": (6, 3), "embed.weight": (7, 4), "c": (4, 2, 3, 3)}
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})
ORTHOGONALISED = ("w", "v", "c")


def gradient(step):
    return normal(LAYOUT.size, seed=50 + step) * (1 + step)


def steps(optimiser, count, total_steps=None, theta=None, layout=LAYOUT):
    theta = normal(LAYOUT.size, seed=1) if theta is None else theta
    state, trail = optimiser.init(layout, like=theta, total_steps=total_steps), []
    for step in range(count):
        update, state = optimiser.update(gradient(step), state, theta)
        theta = theta + update
        trail.append(theta)
    return trail, state


@pytest.mark.parametrize(("scale", "theirs"), [("moonlight", "match_rms_adamw"), ("original", "original")])
def test_muon_is_torchs_with_adamw_on_the_rest(scale, theirs, monkeypatch):
    """In float64: PyTorch's products are in bfloat16, and are given ours in their place."""
    module = pytest.importorskip("torch.optim._muon")
    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", lambda grad, *_: newton_schulz(grad))
    params = {name: torch.nn.Parameter(value) for name, value in LAYOUT.unravel(normal(LAYOUT.size, seed=1)).items()}
    two = [params[name] for name in ("w", "v")]
    rest = [params[name] for name in ("b", "embed.weight")]
    muon = torch.optim.Muon(two, lr=0.02, momentum=0.9, weight_decay=0.3, adjust_lr_fn=theirs)
    adamw = torch.optim.AdamW(rest, lr=0.005, betas=(0.8, 0.99), weight_decay=0.3)
    ours = optimisers.make(
        "muon", lr=0.02, momentum=0.9, weight_decay=0.3, betas=(0.8, 0.99), rest_lr=0.005, scale=scale
    )
    trail, _ = steps(ours, 6)
    for step in range(6):
        for name, value in LAYOUT.unravel(gradient(step)).items():
            params[name].grad = value
        muon.step()
        adamw.step()
        found = LAYOUT.unravel(trail[step])
        for name in ("w", "v", "b", "embed.weight"):
            laws.assert_close(found[name], params[name].detach(), 1e-12)


def test_muons_own_products_are_near_torchs():
    pytest.importorskip("torch.optim._muon")
    param = torch.nn.Parameter(normal(20, 30).float())
    theirs = torch.optim.Muon([param], lr=0.1, weight_decay=0.0)
    layout = Layout(("w",), ((20, 30),))
    ours = optimisers.make("muon", lr=0.1, weight_decay=0.0, scale="original", precision="bfloat16")
    g = normal(600, seed=3).float()
    update, _ = ours.update(g, ours.init(layout, like=g), param.detach().ravel())
    before, param.grad = param.detach().clone(), g.view(20, 30)
    theirs.step()
    torch.testing.assert_close(update.view(20, 30), param.detach() - before, rtol=0, atol=0.01 * 0.1)


def test_a_rate_per_row_is_separate_runs():
    rates = [0.01, 0.05, 0.2]
    for name in ("muon", "normalised-muon"):
        many = optimisers.make(name, lr=torch.tensor(rates, dtype=torch.float64))
        theta = normal(3, LAYOUT.size)
        grads = normal(3, LAYOUT.size, seed=2)
        found, _ = many.update(grads, many.init(LAYOUT, (3,), like=theta), theta)
        for row, rate in enumerate(rates):
            one = optimisers.make(name, lr=rate)
            alone, _ = one.update(grads[row], one.init(LAYOUT, like=theta), theta[row])
            laws.assert_close(found[row], alone, 1e-12)


@pytest.mark.parametrize(
    ("shape", "factor"),
    [
        ((4, 64), 1),
        ((64, 64), 1),
        ((80, 20), 2),
        ((90, 10), 3),
        ((10**9, 16), 4),
        ((50, 1), 1),
        ((0, 4), 1),
        ((3, 0), 1),
    ],
)
def test_the_step_of_an_embedding_grows_with_its_words_up_to_the_harness_step(shape, factor):
    assert usual_embedding_scale(shape) == pytest.approx(factor)
    layout = Layout.of({"embed.weight": torch.zeros(min(shape[0], 100), shape[1])})
    scales = optimisers.make("normalised-muon").scales(layout, torch.zeros(1))
    assert scales.tolist() == pytest.approx([usual_embedding_scale(layout.shapes[0])] * len(scales))


def schedule(t, total):
    if not total:
        return (t + 1) / 10 if t < 10 else 1 / (1 + (t - 10) / 100)
    warm_up = max(1, int(0.05 * total))
    if t < warm_up:
        return (t + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (t - warm_up) / max(1, total - warm_up))))


@pytest.mark.parametrize(("total", "of_embeddings"), [(None, None), (8, None), (60, None), (8, 12.5)])
def test_the_harness_is_its_definition(total, of_embeddings):
    """Written again with a loop over tensors and steps, float64; the embedding has 7 words and 4 columns."""
    theta = normal(LAYOUT.size, seed=1)
    trail, state = steps(optimisers.make("normalised-muon", embedding_scale=of_embeddings), 12, total)
    assert int(state.shared["total_steps"]) == (total or 0)
    factor = of_embeddings or math.sqrt(7 / 4)
    m = v = torch.zeros_like(theta)
    for t in range(12):
        g = gradient(t)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        adam = (m / (1 - 0.9 ** (t + 1))) / ((v / (1 - 0.99 ** (t + 1))).sqrt() + 1e-8)
        pieces = []
        for name, fan_in, d, look, own in zip(
            LAYOUT.names, (5, 5, 3, 4, 18), *map(LAYOUT.split, (adam, 0.9 * m + 0.1 * g, theta)), strict=True
        ):
            if name in ORTHOGONALISED:
                d = newton_schulz(look.view(SHAPES[name][0], -1)).flatten()
            d = d / (d.square().mean().sqrt() * math.sqrt(fan_in)) * (factor if name == "embed.weight" else 1)
            pieces.append(own - 0.03 * schedule(t, total) * (d + 0.1 * own))
        theta = torch.cat(pieces)
        laws.assert_close(trail[t], theta, 1e-9)


def test_a_tensor_that_gets_no_gradient_any_more_comes_to_rest_and_one_that_never_had_one_only_decays():
    optimiser, theta = optimisers.make("normalised-muon", weight_decay=0.1), normal(LAYOUT.size, seed=1)
    state, sizes = optimiser.init(LAYOUT, like=theta), []
    for step in range(200):
        g = LAYOUT.unravel(gradient(step % 7).clone())
        g["embed.weight"].zero_()
        g["v"][2] = 0
        if step >= 20:
            g["w"].zero_()
        update, state = optimiser.update(LAYOUT.ravel(g), state, theta)
        rate = 0.03 * schedule(step, None)
        moved = LAYOUT.unravel(update + rate * 0.1 * theta)
        assert moved["embed.weight"].abs().max() < 1e-15
        assert moved["v"][2].abs().max() < 1e-15
        sizes.append(moved["w"].norm())
        theta = theta + update
    assert sizes[20] > 0.5 * sizes[19]
    assert sizes[-1] < 1e-6 * sizes[19]


def test_a_gradient_that_is_not_finite_moves_nothing_of_its_own():
    optimiser, theta = optimisers.make("normalised-muon"), normal(LAYOUT.size, seed=1)
    state = optimiser.init(LAYOUT, like=theta)
    _, state = optimiser.update(gradient(0), state, theta)
    bad = gradient(1)
    bad[::3], bad[1::9] = float("nan"), float("inf")
    update, after = optimiser.update(bad, state, theta)
    skipped = ~bad.isfinite()
    assert update.isfinite().all()
    assert not update[skipped].any()
    for name, value in after.coordinates.items():
        assert torch.equal(value[skipped], state.coordinates[name][skipped])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("muon", {"lr": 0.0}),
        ("muon", {"lr": 0.1, "momentum": 1.0}),
        ("muon", {"lr": 0.1, "scale": "moon"}),
        ("muon", {"lr": 0.1, "coefficients": "jordan"}),
        ("normalised-muon", {"lr": -1.0}),
        ("normalised-muon", {"weight_decay": -0.1}),
        ("normalised-muon", {"warm_up": 1.0}),
        ("normalised-muon", {"embedding_scale": 0.0}),
        ("normalised-muon", {"direction": "up"}),
        ("normalised-muon", {"schedule": "cosin"}),
    ],
)
def test_options_out_of_range_are_refused(name, options):
    with pytest.raises(UserError):
        optimisers.make(name, **options)


def test_a_rate_that_is_learned_is_part_of_phi():
    """As of the other rules; the rest's is the same number unless it has its own."""
    rate = torch.nn.Parameter(torch.tensor(0.1))
    assert list(optimisers.Muon(rate).phi()) == ["lr"]
    assert list(optimisers.Muon(rate, rest_lr=torch.nn.Parameter(torch.tensor(0.2))).phi()) == ["lr", "rest_lr"]
    layout, theta = Layout(("w", "b"), ((3, 2), (2,))), normal(8)
    rule = optimisers.Muon(rate)
    update, _ = rule.update_with({"lr": 2 * rate}, normal(8, seed=1), rule.init(layout, like=theta), theta)
    wanted, _ = optimisers.Muon(0.2).update(normal(8, seed=1), rule.init(layout, like=theta), theta)
    laws.assert_close(update.detach(), wanted, 1e-6)
    (gradient,) = torch.autograd.grad(update.sum(), rate)
    laws.assert_close(gradient, (wanted.sum() / 0.1).to(gradient), 1e-5)
