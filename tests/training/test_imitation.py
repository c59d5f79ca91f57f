"""The warm start by imitation: the best constants by loops of their own, and a rule that then says them."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import optimisees
from l2lopt import estimators, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import seed_of
from l2lopt.optimisers.controls import Bounds
from l2lopt.training import imitation
from l2lopt.training.imitation import imitate
from l2lopt.training.inner_runs import InnerRuns, RunPosition, inner_steps
from l2lopt.training.settings import ImitationSettings, Targets, UnrollSettings

STEPS, DECAYS, LENGTH = [0.5, 3.0], [1.0, 4.0], 8
UNROLLS = UnrollSettings(length=LENGTH, targets=Targets(next=0.0, end=1.0, end_batches=1))


@pytest.fixture(scope="module")
def problem():
    return optimisees.make("quadratic", size=3)


def rule(**options):
    return optimisers.make("hierarchical", **{"cell": "lstm", "hidden_size": 4, "lr": 0.3, "seed": 1} | options)


def settings(**options):
    return ImitationSettings(**{"steps": STEPS, "decays": DECAYS, "runs": 2, "temperature": 1e-4} | options)


def es(**options):
    return estimators.make("es", **{"pairs": 1, "objective": "log-loss"} | options)


def ends(problem, number):
    """The log loss at the end of run `number` for the harness and each pair of constants."""
    runs = InnerRuns(rule(), [problem], es(), UNROLLS, 1, seed_of("imitation", 0, 0))
    run = runs._begin(RunPosition(number, 1))
    batches = [problem.batch("train", run.seed, step) for step in range(LENGTH + 1)]
    found = {}
    for pair in [(1.0, 1.0), *((a, b) for a in STEPS for b in DECAYS)]:
        harness = optimisers.make("normalised-muon", lr=0.3 * pair[0], weight_decay=0.1 * pair[1] / pair[0])
        theta, aux = run.carry.params, run.carry.aux
        state = harness.init(run.layout, like=theta, total_steps=LENGTH)
        for batch in batches[:-1]:
            theta = theta.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(run.loss(theta, aux, batch)[0], theta)
            with torch.no_grad():
                change, state = harness.update(gradient, state, theta)
                theta = theta + change
        found[pair] = math.log(float(run.loss(theta.detach(), aux, batches[-1])[0]))
    return found


def test_it_says_the_constants_that_are_best_in_plain_loops(problem):
    losses = ends(problem, 0)
    best = min(losses, key=losses.get)
    assert best != (1.0, 1.0)
    learned = rule()
    figures = imitate(learned, [problem], es(), UNROLLS, settings(updates=80, runs=1, rate=0.1), seed=0)
    assert figures["gain"] == pytest.approx(losses[1.0, 1.0] - losses[best], rel=1e-3)
    assert figures["lessons"] == 1
    assert figures["error"] < 0.01
    run = InnerRuns(learned, [problem], es(), UNROLLS, 1, seed_of("imitation", 0, 0))._begin(RunPosition(0, 1))
    phi = {name: value.detach()[None] for name, value in learned.phi().items()}
    steps = list(inner_steps(problem, UNROLLS.targets, run.seed, 0, LENGTH, LENGTH))
    reached = es().run_members(learned.update_with, run.loss, phi, [run.carry], steps).values / LENGTH
    assert float(reached) == pytest.approx(losses[best], abs=0.1)


@pytest.mark.parametrize("control", ["step", "decay"])
def test_the_output_of_a_control_gives_it_back(control):
    bounds = Bounds(4.0, 16.0, "angle")
    for value in (-1.2, 0.0, 0.7):
        output = torch.tensor(bounds.output(control, value), dtype=torch.float64)
        assert float(bounds.bounded(control, output)) == pytest.approx(value)
    assert math.isfinite(bounds.output(control, 50.0))
    assert Bounds(math.inf, math.inf, "angle").output(control, 5.0) == 5.0
    assert Bounds(1.0, 1.0, "angle").output(control, 5.0) == 0.0


def test_it_depends_on_the_seed_alone(problem):
    found = []
    for seed in (0, 0, 1):
        learned = rule()
        imitate(learned, [problem], es(), UNROLLS, settings(updates=5, temperature=0.5), seed=seed)
        found.append(torch.cat([value.detach().flatten() for value in learned.phi().values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_more_constants_than_rows_are_tried_in_groups(problem):
    gains = []
    for pairs in (1, 20):
        gains.append(imitate(rule(), [problem], es(pairs=pairs), UNROLLS, settings(updates=1), seed=0)["gain"])
    assert gains[0] == pytest.approx(gains[1], rel=1e-4)


@pytest.mark.parametrize(
    ("optimiser", "estimator", "message"),
    [
        ({"name": "coordinatewise"}, "es", "meta.imitation: expected a hierarchical optimiser .* found Coordinatewise"),
        ({"name": "hierarchical", "controls": ["mix"]}, "es", "meta.imitation: expected a hierarchical optimiser"),
        ({"name": "hierarchical", "embedding": True}, "es", "meta.imitation: expected a rule without an embedding"),
        ({"name": "hierarchical"}, "backprop", "meta.imitation: expected evolution strategies, found Backprop"),
    ],
)
def test_what_cannot_imitate_is_refused(problem, optimiser, estimator, message):
    learned = optimisers.make(**optimiser)
    with pytest.raises(UserError, match=message):
        imitate(learned, [problem], estimators.make(estimator), UNROLLS, settings())


def test_lessons_are_whole_runs_whatever_the_curriculum(problem):
    gains = []
    for unrolls in (UNROLLS, UNROLLS.model_copy(update={"curriculum": 50})):
        gains.append(imitate(rule(), [problem], es(), unrolls, settings(updates=1), seed=0)["gain"])
    assert gains[0] == gains[1]


def test_the_runs_may_lie_on_a_gpu(monkeypatch):
    """By tensors that have a device and no values: the grid of constants is made on the CPU."""
    learned, asked = rule(), []

    class OnAGpu:
        pairs = 1

        def run_members(self, update, loss, rules, starts, steps):
            asked.append(len(starts))
            return SimpleNamespace(values=torch.zeros(len(starts), device="cuda"))

    monkeypatch.setattr(imitation, "constant", lambda *args: {"head.bias": torch.zeros(3)})
    monkeypatch.setattr(imitation, "_told", lambda *args: torch.zeros(1))
    no_values = pytest.raises(DataDependentOutputException)  # which the best pair is asked for
    with FakeTensorMode(allow_non_fake_inputs=True), no_values:
        imitation._lesson(learned, OnAGpu(), settings(), None, None, None, [0, 1])
    assert asked == [3, 3]
