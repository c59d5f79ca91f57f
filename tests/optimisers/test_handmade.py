"""The hand-designed optimisers against their namesakes in `torch.optim`."""

import math
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import get_args

import laws
import oracles
import pytest
import torch
from implementations import normal

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisers import SGD, AdamW, Lion, Momentum, NAdamW, Scheduled, adam, scheduled
from l2lopt.optimisers.schedules import Schedule, to_the_end, warm_up_cosine, warm_up_then

RATE = 0.02
NAMESAKES = {
    "sgd": (SGD, torch.optim.SGD, {}, None),
    "momentum": (Momentum, torch.optim.SGD, {"momentum": 0.9}, None),
    "nesterov": (Momentum, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, None),
    "adam": (adam, torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-6}, None),
    "adamw": (AdamW, torch.optim.AdamW, {"weight_decay": 0.2}, None),
    "nadamw": (NAdamW, partial(torch.optim.NAdam, decoupled_weight_decay=True), {"weight_decay": 0.2}, None),
    "adamw with warm-up": (AdamW, torch.optim.AdamW, {}, {"warm_up": 10, "total": None}),
    "adamw with warm-up and cosine": (AdamW, torch.optim.AdamW, {}, {"warm_up": 10, "total": 180}),
}
SHAPES = {"matrix": (3, 2), "vector": (4,)}
LAYOUT = Layout(tuple(SHAPES), tuple(SHAPES.values()))


def start(dtype):
    return LAYOUT.unravel(normal(10).to(dtype))


def gradient(theta, step):
    """The gradient of Σ_k a_k θ_k² / 2 + cos(3 θ_k) + θ_k θ_{k+1} / 4, a bumpy function, with noise at each step."""
    curvature = torch.linspace(0.5, 2, theta.shape[-1], dtype=theta.dtype)
    noise = 0.1 * normal(theta.shape[-1], seed=step).to(theta.dtype)
    return curvature * theta - 3 * torch.sin(3 * theta) + (theta.roll(1, -1) + theta.roll(-1, -1)) / 4 + noise


def ours(optimiser, steps, theta, gradient=gradient, batch=()):
    state, trail = optimiser.init(LAYOUT, batch, like=theta), []
    for step in range(steps):
        change, state = optimiser.update(gradient(theta, step), state, theta)
        theta = theta + change
        trail.append(theta)
    return torch.stack(trail)


def theirs(kind, options, schedule, steps, dtype, gradient=gradient):
    params = {name: torch.nn.Parameter(value) for name, value in start(dtype).items()}
    with default_dtype(dtype):  # of NAdam's product of momenta
        return _theirs(params, kind, options, schedule, steps, gradient)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _theirs(params, kind, options, schedule, steps, gradient):
    optimiser = kind(params.values(), lr=RATE, **options)
    if not callable(schedule):
        schedule = partial(oracles.warm_up_cosine, **schedule) if schedule else lambda step: 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, schedule)
    trail = []
    for step in range(steps):
        for name, g in LAYOUT.unravel(gradient(LAYOUT.ravel(params).detach(), step)).items():
            params[name].grad = g
        optimiser.step()
        scheduler.step()
        trail.append(LAYOUT.ravel(params).detach())
    return torch.stack(trail)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("name", NAMESAKES)
def test_equals_its_namesake(name, dtype, tolerance):
    make, kind, options, schedule = NAMESAKES[name]
    optimiser = make(RATE, **options, **(schedule or {}))
    trail = ours(optimiser, 200, LAYOUT.ravel(start(dtype)))
    laws.assert_close(trail, theirs(kind, options, schedule, 200, dtype), tolerance)
    assert (trail[-1] - trail[0]).abs().max() > 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMESAKES)
def test_a_bad_gradient_spreads_as_in_its_namesake(name, bad):
    def spoilt(theta, step):
        return gradient(theta, step).index_fill(-1, torch.tensor([4]), bad) if step == 2 else gradient(theta, step)

    make, kind, options, schedule = NAMESAKES[name]
    trail = ours(make(RATE, **options, **(schedule or {})), 5, LAYOUT.ravel(start(torch.float64)), spoilt)
    assert trail[1].isfinite().all()
    assert not trail[2, 4].isfinite()
    laws.assert_close(trail, theirs(kind, options, schedule, 5, torch.float64, spoilt))


@pytest.mark.parametrize("name", NAMESAKES)
def test_a_rate_per_row_is_separate_runs(name):
    make, _, options, schedule = NAMESAKES[name]
    rates, theta = [0.001, 0.02, 0.1], normal(10)
    options = options | (schedule or {})
    rows = ours(make(torch.tensor(rates, dtype=torch.float64), **options), 20, theta.expand(3, 10), batch=(3,))
    for row, rate in enumerate(rates):
        laws.assert_close(rows[:, row], ours(make(rate, **options), 20, theta))


def test_lion_is_its_formula():
    """Coordinate by coordinate, as the authors' program does it: decay first, then the sign, then the mean."""
    theta, m, trail = normal(10).tolist(), [0.0] * 10, []
    for step in range(50):
        grads = gradient(torch.tensor(theta, dtype=torch.float64), step).tolist()
        for k, g in enumerate(grads):
            theta[k] *= 1 - 0.01 * 0.3
            theta[k] -= 0.01 * math.copysign(1.0, 0.8 * m[k] + 0.2 * g)
            m[k] = 0.95 * m[k] + 0.05 * g
        trail.append(list(theta))
    found = ours(Lion(0.01, (0.8, 0.95), 0.3), 50, normal(10))
    laws.assert_close(found, torch.tensor(trail, dtype=torch.float64))


@pytest.mark.parametrize(("warm_up", "total"), [(0, None), (7, None), (0, 30), (7, 30), (1, 2)])
@pytest.mark.parametrize(
    ("shape", "final"), [*product(get_args(Schedule), [0.2, 1.0]), ("linear", 0.0), ("cosine", 0.0)]
)
def test_schedule(shape, final, warm_up, total):
    steps = torch.arange(50)
    expected = [oracles.warm_up_then(shape, step, warm_up, total, final) for step in range(50)]
    found = warm_up_then(shape, steps, warm_up, total, final).tolist()
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


def test_a_schedules_default_is_the_cosine_to_0():
    steps = torch.arange(50)
    laws.assert_same(warm_up_cosine(steps, 7, 30), warm_up_then("cosine", steps, 7, 30))


@pytest.mark.parametrize("shape", get_args(Schedule))
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_any_optimiser_under_a_schedule_is_its_namesake_with_that_rate(name, shape):
    """The decay of AdamW is multiplied as well, as a scheduler of `torch.optim` does."""
    make, kind, options, _ = NAMESAKES[name]
    schedule = {"warm_up": 7, "total": 150, "final": 0.1}
    trail = ours(Scheduled(make(RATE, **options), shape, **schedule), 200, LAYOUT.ravel(start(torch.float64)))

    def multiplier(step):
        return oracles.warm_up_then(shape, step, *schedule.values())

    laws.assert_close(trail, theirs(kind, options, multiplier, 200, torch.float64))
    assert (trail[-1] - trail[0]).abs().max() > 0.1


def test_adamws_own_schedule_is_the_same_one():
    one = ours(AdamW(RATE, warm_up=10, total=180), 200, normal(10))
    laws.assert_close(one, ours(Scheduled(AdamW(RATE), "cosine", 10, 180), 200, normal(10)))


def test_a_rate_of_the_schedule_multiplies_the_update():
    """A rate for each row, and `update_` as well."""
    rates, inner = torch.tensor([0.5, 2.0], dtype=torch.float64), AdamW(RATE, weight_decay=0.2)
    rule = Scheduled(inner, "linear", 2, 9, lr=rates)
    rows = ours(rule, 9, normal(10).expand(2, 10), batch=(2,))
    for row, rate in enumerate(rates.tolist()):
        laws.assert_close(
            rows[:, row], ours(Scheduled(AdamW(RATE * rate, weight_decay=0.2), "linear", 2, 9), 9, normal(10))
        )
    state, theta = rule.init(LAYOUT, (2,), like=normal(10)), normal(2, 10)
    laws.assert_same(rule.update_(theta, state, theta), rule.update(theta, state, theta))
    with pytest.raises(UserError, match="a rate above 0"):
        Scheduled(inner, lr=0.0)


def test_a_schedule_of_a_schedule_multiplies():
    inner = Scheduled(SGD(1.0), "linear", total=4)
    trail = ours(Scheduled(inner, "linear", total=4), 4, torch.zeros(10), lambda theta, step: torch.ones(10))
    assert trail[:, 0].tolist() == [-1.0, -1.5625, -1.8125, -1.875]


def test_a_scheduled_optimiser_is_built_by_name_and_knows_it():
    made = optimisers.make("scheduled", optimiser={"name": "momentum", "momentum": 0.5}, lr=0.1, total=9)
    assert isinstance(made.optimiser, Momentum)
    assert (made.optimiser.momentum, made.optimiser.lr, made.total) == (0.5, 0.1, 9)
    again = optimisers.build(dict(made.description))
    laws.assert_same(ours(again, 9, normal(10)), ours(made, 9, normal(10)))
    assert scheduled({"name": "sgd", "lr": 0.2}).optimiser.lr == 0.2


@pytest.mark.parametrize(
    "build",
    [
        lambda: Scheduled(SGD(0.1), warm_up=-1),
        lambda: Scheduled(SGD(0.1), warm_up=5, total=4),
        lambda: Scheduled(SGD(0.1), final=1.5),
        lambda: Scheduled(SGD(0.1), final=float("nan")),
        lambda: Scheduled(SGD(0.1), "exponential", total=4),
        lambda: SGD(0.0),
        lambda: SGD(float("nan")),
        lambda: AdamW(torch.tensor([0.1, -0.1])),
        lambda: Momentum(0.1, momentum=1.0),
        lambda: adam(0.1, betas=(0.9, -0.1)),
        lambda: adam(0.1, betas=(0.9,)),
        lambda: adam(0.1, eps=-1e-8),
        lambda: AdamW(0.1, weight_decay=-1.0),
        lambda: AdamW(0.1, warm_up=5, total=4),
        lambda: NAdamW(0.1, momentum_decay=-1.0),
        lambda: Lion(0.1, betas=(0.9, 1.0)),
    ],
    ids=[
        "warm-up",
        "end",
        "final",
        "final NaN",
        "exponential to 0",
        "zero",
        "NaN",
        "a row",
        "momentum",
        "betas",
        "one beta",
        "eps",
        "decay",
        "total",
        "momentum decay",
        "lion",
    ],
)
def test_values_out_of_range_are_refused(build):
    with pytest.raises(UserError):
        build()


@pytest.mark.parametrize("kind", ["adam", "adamw", "nadamw", "muon"])
def test_a_coordinate_without_a_gradient_has_a_finite_derivative(kind):
    """As a dead unit's: √ has an infinite one at 0, and 0·∞ would spread NaN to all. The others' are autograd's."""

    def end(theta, seen):
        layout = Layout(("vector",), ((len(theta),),))
        rule = optimisers.make(kind, lr=0.05)
        state = rule.init(layout, like=theta)
        for _ in range(3):
            update, state = rule.update(2 * theta * seen, state, theta)
            theta = theta + update
        return theta

    theta, seen = normal(3).requires_grad_(), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    (found,) = torch.autograd.grad(end(theta, seen).sum(), theta)
    alone = theta.detach()[[0, 2]].requires_grad_()
    (wanted,) = torch.autograd.grad(end(alone, torch.ones_like(alone)).sum(), alone)
    laws.assert_close(found[[0, 2]], wanted)
    assert found[1].isfinite()
    with torch.no_grad():
        laws.assert_same(end(theta, seen), end(theta.detach(), seen))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimisers.Muon(0.1, scale="moonlihgt"), "Muon: scale: expected 'moonlight' or 'original', found"),
        (lambda: optimisers.Muon(0.1, coefficients="x"), "Muon: coefficients: expected 'keller-jordan', "),
        (lambda: optimisers.hierarchical(mix="angel"), "hierarchical: mix: expected 'angle' or 'logit', found 'angel'"),
        (lambda: optimisers.NormalisedMuon(schedule="cosin"), "NormalisedMuon: schedule: expected 'cosine', "),
        (
            lambda: optimisers.NormalisedMuon(direction="torch.nn:Identity"),
            "direction '.*': expected an Input",
        ),
        (lambda: Scheduled(SGD(0.1), "cosin", total=4), "Scheduled: shape: expected 'constant', "),
        (lambda: SGD("a"), "lr: expected a rate above 0, found a"),
        (lambda: SGD(None), "lr: expected a rate above 0, found None"),
        (lambda: SGD(torch.tensor(1 + 1j)), "lr: expected a rate above 0, found tensor"),
        (lambda: AdamW(0.1, betas=0.9), "betas: expected two numbers, found 0.9"),
    ],
)
def test_mistakes_are_told_by_the_classes_themselves(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("shape", ["cosine", "linear", "warm-up-stable-decay", "exponential"])
def test_a_run_that_is_all_warm_up_ends_where_it_ends(shape):
    steps = torch.arange(6)
    found = torch.stack([warm_up_then(shape, step, warm_up=3, total=3, final=0.1) for step in steps])
    laws.assert_close(found, torch.tensor([1 / 3, 2 / 3, 1.0, 0.1, 0.1, 0.1], dtype=torch.float64))


@pytest.mark.parametrize("total", [1, 2, 3])
def test_nothing_moves_after_the_known_end(total):
    """Also in a run of one update, which is all warm-up."""
    found = [float(to_the_end("cosine", torch.tensor(step), torch.tensor(total), 0.05)) for step in range(total + 2)]
    assert found[0] == 1
    assert found[total:] == [0, 0]
