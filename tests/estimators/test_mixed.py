"""The mixture of exact meta-gradients and evolution: its formula, its mean, its variance, what it refuses.

The laws of any estimator are in `test_evolution.py`.
"""

from math import cos, exp, sin
from statistics import fmean, variance

import laws
import pytest
import torch
from implementations import normal, problem
from torch.func import vmap

from l2lopt import estimators
from l2lopt.core.errors import UserError
from l2lopt.estimators import Backprop, Mixed
from l2lopt.estimators.mixed import weighted_mean

SIGMA, K = 0.01, 300.0
PHI = {
    "smooth": torch.tensor([0.3, -0.2, 2.0], dtype=torch.float64),
    "rough": torch.tensor([0.11, -0.4], dtype=torch.float64),
}


def meta_loss(phi):
    """½ |smooth − 1|² + Σ sin(K rough): K σ = 3, so that the sine turns around within the perturbations."""
    return 0.5 * (phi["smooth"] - 1).square().sum() + (K * phi["rough"]).sin().sum()


def toy():
    """A run of one step after which the loss is `meta_loss(φ)` and a constant."""
    task = problem("sgd", "quadratic", "next batch", seeds=0, length=1)

    def update(phi, g, state, params, loss=None):
        return (meta_loss(phi) / 4).expand_as(g), state  # θ has four coordinates, and their sum is the loss

    return task._replace(update=update, loss=lambda theta, aux, batch: (theta.sum(-1), aux), phi=PHI)


def make(exact="backprop", pairs=5, **options):
    return Mixed(exact, {"name": "es", "pairs": pairs, "sigma": SIGMA}, **options)


def called(unroll, task, seed=3):
    return unroll(*task[:4], task.steps, unroll.init(task.carry, task.phi, seed))


def value_of(rule):
    """The meta-loss, written out."""
    return sum(0.5 * (a - 1) ** 2 for a in rule["smooth"]) + sum(sin(K * b) for b in rule["rough"])


def gradient_of(rule):
    return {"smooth": [a - 1 for a in rule["smooth"]], "rough": [K * cos(K * b) for b in rule["rough"]]}


def written_out(rules, pairs, both):
    """The mixture of plain numbers, its weights of the exact gradient, by tensor."""
    rules = [{name: value[k].tolist() for name, value in rules.items()} for k in range(2 * pairs)]
    mixture, weights = {}, {}
    for name, phi in PHI.items():
        exact, evolution = [], []
        for plus, minus in zip(rules[:pairs], rules[pairs:], strict=True):
            ends = [gradient_of(rule)[name] for rule in ([plus, minus] if both else [plus])]
            exact.append([fmean(numbers) for numbers in zip(*ends, strict=True)])
            difference = value_of(plus) - value_of(minus)
            noise = [p - at for p, at in zip(plus[name], phi.tolist(), strict=True)]
            evolution.append([e * difference / (2 * SIGMA**2) for e in noise])
        of_exact, of_evolution = (
            sum(variance(numbers) for numbers in zip(*sample, strict=True)) for sample in (exact, evolution)
        )
        weights[name] = w = (1 / of_exact) / (1 / of_exact + 1 / of_evolution) if of_exact > 1e-20 else 1.0
        means = zip(zip(*exact, strict=True), zip(*evolution, strict=True), strict=True)
        mixture[name] = torch.tensor([w * fmean(x) + (1 - w) * fmean(y) for x, y in means], dtype=torch.float64)
    return mixture, weights


@pytest.mark.parametrize("members", ["both", "plus"])
@pytest.mark.parametrize("exact", ["backprop", {"name": "taped", "order": 2}, {"name": "blockwise", "block": 3}])
def test_is_the_formula_written_out(exact, members):
    unroll, task = make(exact, exact_members=members), toy()
    found = called(unroll, task)
    runs = unroll.evolution.run_pairs(*task[:4], task.steps, unroll.init(task.carry, task.phi, 3))
    wanted, weights = written_out(runs.rules, 5, members == "both")
    assert weights["smooth"] > 0.999
    assert 0.01 < weights["rough"] < 0.6  # neither of them all
    laws.assert_close(found.gradient, wanted, 1e-9)
    assert found.finite


def drawn(sigma, pairs, draws, both=True):
    """Samples of sin(K φ) at φ = 0.11: exact and evolution's, [draws, P]."""
    noise, at = sigma * normal(draws, pairs, seed=1), 0.11
    plus, minus = (K * (at + noise)).cos() * K, (K * (at - noise)).cos() * K
    difference = (K * (at + noise)).sin() - (K * (at - noise)).sin()
    return (plus + minus) / 2 if both else plus, noise * difference / (2 * sigma**2)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("turns", [0.01, 0.1, 1.0, 3.0, 10.0])
def test_varies_no_more_than_the_steadier_of_the_two(turns, both):
    """Of one sine, perturbed by `turns` radians: smooth up to 0.1, chaotic from 3; to 10 % with eight pairs."""
    exact, evolution = drawn(turns / K, 8, 20_000, both)
    mixture, _ = vmap(weighted_mean)(exact, evolution)
    smaller = min(exact.mean(1).var(), evolution.mean(1).var())
    assert mixture.var() < 1.1 * smaller


@pytest.mark.parametrize(("turns", "gain"), [(0.01, 1e4), (3.0, 3.0)])
def test_varies_less_than_the_worse_of_the_two(turns, gain):
    """Smooth: less than evolution by far; chaotic: less than the exact gradient."""
    exact, evolution = drawn(turns / K, 8, 20_000)
    mixture, _ = vmap(weighted_mean)(exact, evolution)
    assert gain * mixture.var() < max(exact.mean(1).var(), evolution.mean(1).var())


def test_the_mean_over_draws_is_the_gradient_of_the_smoothed_loss():
    task, unroll = toy(), make(pairs=8, exact_members="plus")
    found = [called(unroll, task, seed).gradient for seed in range(60)]
    damping = exp(-((K * SIGMA) ** 2) / 2)
    wanted = {"smooth": PHI["smooth"] - 1, "rough": K * (K * PHI["rough"]).cos() * damping}
    for name, value in wanted.items():
        each = torch.stack([gradient[name] for gradient in found])
        error = each.std(0) / len(each) ** 0.5
        assert ((each.mean(0) - value).abs() < 4 * error).all(), name


@pytest.mark.parametrize("objective", ["loss", "log-loss"])
def test_is_the_exact_gradient_of_a_smooth_run(objective):
    """Evolution of so few pairs is far from it."""
    task, second = problem(length=3), {"name": "backprop", "order": 2}
    unroll = Mixed(second, {"name": "es", "pairs": 4, "sigma": 1e-5}, objective)
    wanted = laws.run(Backprop(2, objective=objective), task).gradient
    laws.assert_close(laws.run(unroll, task).gradient, wanted, 1e-4)
    alone = laws.run(unroll.evolution, task).gradient
    assert any((alone[name] - value).norm() > 0.3 * value.norm() for name, value in wanted.items())


class Spoilt(Backprop):
    """An exact gradient that is `bad` in one number of one tensor at the third member."""

    def __init__(self, bad):
        super().__init__()
        self.bad, self.calls = bad, 0

    def __call__(self, *arguments):
        found = super().__call__(*arguments)
        self.calls += 1
        if self.calls == 3:
            found.gradient["rough"][0] = self.bad
        return found


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_an_exact_gradient_that_is_not_finite_or_explodes_has_no_weight(bad):
    """In its tensor alone, though only one number of one member is bad."""
    task, unroll = toy(), make()
    sound, alone = called(unroll, task), called(unroll.evolution, task)
    unroll.exact = Spoilt(bad)
    found = called(unroll, task)
    assert found.finite
    laws.assert_close(found.gradient["rough"], alone.gradient["rough"])
    laws.assert_same(found.gradient["smooth"], sound.gradient["smooth"])


def test_an_exact_gradient_of_no_number_leaves_evolution():
    """The derivative of the square root at 0, where the loss is as before."""
    task, unroll = toy(), make()

    def update(phi, g, state, params, loss=None):
        change, state = task.update(phi, g, state, params)
        return change + (0 * phi["rough"]).sqrt().sum(), state

    found, alone = called(unroll, task._replace(update=update)), called(unroll.evolution, task)
    assert found.finite
    laws.assert_close(found.gradient["rough"], alone.gradient["rough"])


def test_weights_of_samples_that_do_not_vary_or_overflow():
    steady, varying = torch.ones(3, 2, dtype=torch.float64), normal(3, 2)
    assert [float(weighted_mean(*pair)[1]) for pair in ((steady, varying), (varying, steady))] == [1.0, 0.0]
    laws.assert_same(weighted_mean(steady, steady)[0], steady[0])
    mean, weight = weighted_mean(1e200 * varying, varying)
    assert weight == 0
    laws.assert_same(mean, varying.mean(0))
    for sample in (steady, varying):  # the estimate that is not finite counts for nothing
        mean, weight = weighted_mean(sample, varying.index_fill(0, torch.tensor([1]), torch.inf))
        assert weight == 1
        laws.assert_same(mean, sample.mean(0))


def test_members_that_sample_coordinates_draw_anew():
    """A share of the coordinates adds to the exact gradient's variance, which then has less weight."""
    task = problem(length=3, mixture="next batch")
    seen = []

    class Watched(estimators.Blockwise):
        def __call__(self, update, loss, phi, carry, steps, state=()):
            seen.append(tuple(state.tolist()))
            return super().__call__(update, loss, phi, carry, steps, state)

    unroll = make(pairs=4)
    unroll.exact = Watched(share=0.5)
    first = called(unroll, task)
    called(unroll, task._replace(carry=first.carry), seed=4)
    assert len(set(seen)) == len(seen) == 16


def test_its_plan_is_that_of_all_members(monkeypatch):
    task = problem()
    unroll = make("blockwise", exact_members="plus")
    whole, one = (part.plan(*task[:4], task.steps, 4) for part in (unroll, unroll.exact))
    assert whole.memory == one.memory > 0
    assert make("backprop").plan(*task[:4], task.steps, 4) is None
    monkeypatch.setattr(unroll.exact, "plan", lambda *_: one)
    assert unroll.plan(*task[:4], task.steps, 4).seconds == 5 * one.seconds


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"evolution": "pes"}, "expected 'es'.* found persistent"),
        ({"evolution": {"name": "es", "persistent": True}}, "expected 'es'.* found persistent"),
        ({"evolution": {"name": "es", "shaping": "standardised"}}, "shaping: expected 'none', found 'standardised'"),
        ({"evolution": {"name": "es", "floor": 0.1}}, "floor: expected 0 for the loss, found 0.1"),
        ({"evolution": {"name": "es", "pairs": 3}}, "pairs: expected at least 4"),
        ({"evolution": {"name": "es", "objective": "log-loss"}}, "no objective here"),
        ({"exact": {"name": "backprop", "objective": "loss"}}, "no objective here"),
        ({"exact": "mixed"}, "choose one of backprop, blockwise, higher"),
        ({"exact": "es"}, "expected a known name"),
        ({"evolution": "blockwise"}, "expected a known name"),
        ({"objective": "logloss"}, "objective"),
    ],
    ids=str,
)
def test_what_cannot_be_mixed_is_refused(options, told):
    with pytest.raises(UserError, match=told):
        estimators.make("mixed", **options)
