"""CMA-ES in the place of Adam: its ranks, what a meta-update is, how it goes on after a kill, and what is refused."""

import copy
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_meta_training import InMemory, LearnedRate, Recorded
from test_resume import LONGER, RECIPE, SMALL, files, killed

import l2lopt
import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import seed_of
from l2lopt.estimators import Backprop, EvolutionStrategies
from l2lopt.evaluation.free_runs import run_free
from l2lopt.experiments import build, cost_forecast
from l2lopt.experiments import config as configs
from l2lopt.optimisers import Optimiser
from l2lopt.training.cma_es import ARRAYS, mean_ranks
from l2lopt.training.inner_runs import InnerRuns
from l2lopt.training.meta_train import meta_train
from l2lopt.training.settings import CMASettings, MetaTrainSettings, UnrollSettings

cmaes = pytest.importorskip("cmaes", reason='cmaes is missing: pip install "l2lopt[cma]"')

both = pytest.mark.parametrize("separable", [False, True], ids=["full", "separable"])
WHOLE = ["unroll.estimator=es", "unroll.truncation=11"]


class RateAndDecay(Optimiser):
    """Gradient descent with weight decay: three meta-parameters in two tensors."""

    def __init__(self, rate, decay):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor(rate, dtype=torch.float64))
        self.decay = torch.nn.Parameter(torch.tensor(decay, dtype=torch.float64))

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        return optimisers.SGD(1.0).init(layout, batch, like=like)

    def update(self, grads, state, params, *, loss=None):
        return -self.rate * grads - self.decay[0] * params - self.decay[1] * params.tanh(), state


@pytest.fixture(scope="module")
def quadratic():
    return optimisees.make("quadratic", size=3, dtype="float64")


def train(
    rule, problem, estimator=None, *, length=4, score=lambda _: 0.0, seed=0, records=None, checkpoint=None, **own
):
    cma = CMASettings(**{"population": 5, "sigma": 1e-3} | own.pop("cma", {}))
    settings = MetaTrainSettings(**{"updates": 3, "batch": 2, "cma": cma} | own)
    kept = {"score": lambda rule: {"any": score(rule)}, "seed": seed, "records": records, "checkpoint": checkpoint}
    return meta_train(
        rule, [problem], estimator or EvolutionStrategies(), settings, UnrollSettings(length=length), **kept
    )


@both
def test_a_rule_gets_better_on_problems_it_has_not_seen(quadratic, separable):
    def score(rule):
        return float(run_free(rule, quadratic, [1, 2, 3], [8]).losses["train"].mean())

    rule, records = LearnedRate(1e-4), Recorded()
    before = score(rule)
    cma = {"separable": separable}
    result = train(rule, quadratic, score=score, records=records, length=8, updates=12, validate_every=3, cma=cma)
    assert result.score < 0.5 * before
    assert float(rule.rate.detach()) > 1e-3
    assert score(rule) == result.score
    figures = [line for stage, _, line in records.lines if stage == "meta-train"]
    assert all(math.isfinite(figure) for line in figures for figure in line.values())
    assert figures[-1]["meta_loss"] < figures[0]["meta_loss"]
    assert (result.inner_steps, result.skipped) == (12 * 2 * 8, 0)


@both
def test_a_meta_update_is_the_packages_on_the_mean_rank_of_each_members_runs(quadratic, separable):
    """Each member's runs are made by themselves, by another estimator, from the same seeds."""
    start, population, batch, seed = (1e-3, [0.0, 1e-3]), 5, 3, 7
    rule = RateAndDecay(*start)
    # Later updates have the better score, so that φ is the last one's.
    scores = iter([3.0, 2.0])
    options = {"updates": 2, "batch": batch, "validate_every": 2, "seed": seed}
    cma = {"population": population, "separable": separable}
    train(rule, quadratic, EvolutionStrategies(rows=4), score=lambda _: next(scores), cma=cma, **options)

    kind = cmaes.SepCMA if separable else cmaes.CMA
    own = kind(np.array([start[0], *start[1]]), 1e-3, population_size=population)
    for update in (1, 2):
        own.reseed_rng(seed_of("cma", seed, update) % 2**32)
        members = [own.ask() for _ in range(population)]
        fitness = []
        for rate, *decay in members:
            member = RateAndDecay(rate, decay)
            runs = InnerRuns(member, [quadratic], Backprop(), UnrollSettings(length=4), batch, seed)
            runs.begun = batch * (update - 1)
            fitness.append([float(one.meta_loss) for one in runs.unroll(update)])
        ranks = np.argsort(np.argsort(fitness, axis=0), axis=0).mean(axis=1)
        own.tell(list(zip(members, ranks.tolist(), strict=True)))
    found = [float(rule.rate.detach()), *rule.decay.detach().tolist()]
    assert found == pytest.approx(own.mean.tolist(), rel=1e-9)
    assert found != pytest.approx([start[0], *start[1]], rel=1e-3)


class Rescaled(EvolutionStrategies):
    """Tells of each run another scale and origin of its meta-losses."""

    calls = 0

    def run_members(self, *given):
        self.calls += 1
        ends = super().run_members(*given)
        return ends._replace(values=8.0 ** (self.calls % 3) * ends.values + self.calls)


def test_neither_the_scale_nor_the_origin_of_a_runs_losses_matters(quadratic):
    rules = [RateAndDecay(1e-3, [0.0, 0.0]) for _ in range(2)]
    for rule, estimator in zip(rules, (EvolutionStrategies(), Rescaled()), strict=True):
        scores = iter([2.0, 1.0])
        train(rule, quadratic, estimator, score=lambda _, scores=scores: next(scores))
    assert all(torch.equal(value, rules[1].phi()[name]) for name, value in rules[0].phi().items())
    assert float(rules[0].rate.detach()) != 1e-3


LOSSES = st.sampled_from([math.nan, math.inf, -math.inf]) | st.integers(-3, 9).map(float)


@given(
    runs=st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(LOSSES, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    scale=st.integers(1, 1000),
    shift=st.integers(-1000, 1000),
)
def test_ranks(runs, scale, shift):
    wanted = []
    for run in runs:
        worst = [loss if math.isfinite(loss) else math.inf for loss in run]
        places = [[place for place, other in enumerate(sorted(worst), 1) if other == loss] for loss in worst]
        wanted.append([sum(place) / len(place) for place in places])
    found = mean_ranks(torch.tensor(runs, dtype=torch.float64))
    assert found.tolist() == pytest.approx(np.mean(wanted, axis=0).tolist(), rel=1e-12)
    other = torch.tensor(runs, dtype=torch.float64)
    other[0] = scale * other[0] + shift
    assert torch.equal(mean_ranks(other), found)


def test_phi_stays_where_no_member_is_finite(quadratic):
    rule, checkpoint, records = LearnedRate(1e25), InMemory(), Recorded()
    result = train(rule, quadratic, length=9, checkpoint=checkpoint, records=records)
    assert result.skipped == 6
    assert float(rule.rate.detach()) == 1e25
    facts, tensors = checkpoint.saved
    assert facts["cma"] == {"sigma": 1e-3, "generation": 0}
    assert tensors["cma_mean"].tolist() == [1e25]
    figures = [line for stage, _, line in records.lines if stage == "meta-train"]
    assert all(math.isnan(line["meta_loss"]) for line in figures)


@both
def test_killed_and_resumed_equals_the_whole_run(tmp_path, separable):
    """To the byte, the checkpoint included."""
    table = f"meta.cma={{population=4, sigma=0.05, separable={str(separable).lower()}}}"
    changes = [*LONGER, *WHOLE, table, "meta.updates=4"]
    whole = l2lopt.meta_train(RECIPE, tmp_path / "whole", changes=changes)
    for attempt, moment in enumerate((2, 3)):
        killed(tmp_path / "run", moment, changes, resume=attempt > 0)
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=changes, resume=True)
    assert files(tmp_path / "run") == files(whole)
    name = "checkpoint.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


class BlindAtTimes(EvolutionStrategies):
    """Finds no finite meta-loss in the second meta-update of two runs."""

    calls = 0

    def run_members(self, *given):
        self.calls += 1
        ends = super().run_members(*given)
        return ends._replace(values=ends.values * (math.nan if self.calls in (3, 4) else 1.0))


@both
def test_a_population_that_is_not_told_leaves_no_trace(quadratic, separable):
    """Meta-training that goes on from a checkpoint made then ends with the same bits as one that has drawn it."""
    ends = []
    for stops in ([4], [2, 4]):
        rule, checkpoint, estimator = RateAndDecay(1e-3, [0.0, 0.0]), InMemory(), BlindAtTimes()
        for stop in stops:
            options = {"updates": stop, "validate_every": 1, "cma": {"separable": separable}}
            train(rule, quadratic, estimator, checkpoint=checkpoint, **options)
        ends.append(checkpoint.saved)
    (facts, tensors), (other_facts, other_tensors) = ends
    assert facts == other_facts
    assert facts["cma"]["generation"] == 3
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(value, other_tensors[name]) for name, value in tensors.items())


@both
def test_nothing_else_changes_when_a_population_is_told(separable):
    """What a checkpoint has to hold: beside caches and what `should_stop` alone reads."""
    own = (cmaes.SepCMA if separable else cmaes.CMA)(np.zeros(3), 0.1, seed=1)
    own._funhist_values[:] = 0.0
    before = copy.deepcopy({name: value for name, value in vars(own).items() if name != "_rng"})
    members = [own.ask() for _ in range(own.population_size)]
    own.tell([(member, float(index)) for index, member in enumerate(members)])
    changed = {name for name, value in before.items() if not np.array_equal(value, getattr(own, name))}
    assert changed == {*ARRAYS, "_sigma", "_g", "_funhist_values"}


def saved(quadratic):
    checkpoint = InMemory()
    train(RateAndDecay(1e-3, [0.0, 0.0]), quadratic, checkpoint=checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    "change",
    [
        lambda facts, tensors: facts.pop("cma"),
        lambda facts, tensors: facts["cma"].update(sigma="0.1"),
        lambda facts, tensors: facts["cma"].update(sigma=0.0),
        lambda facts, tensors: facts["cma"].update(sigma=math.nan),
        lambda facts, tensors: facts["cma"].update(generation=-1),
        lambda facts, tensors: facts.update(cma=[1]),
        lambda facts, tensors: tensors.pop("cma_C"),
        lambda facts, tensors: tensors.update(cma_C=tensors["cma_C"][:2]),
        lambda facts, tensors: tensors.update(cma_pc=tensors["cma_pc"].float()),
        lambda facts, tensors: tensors["cma_mean"].fill_(math.inf),
    ],
)
def test_a_damaged_state_is_refused_in_one_line(quadratic, change):
    checkpoint = saved(quadratic)
    change(*checkpoint.saved)
    with pytest.raises(UserError, match=r"^checkpoint: expected a checkpoint of this work, found another \(.*anew$"):
        train(RateAndDecay(1e-3, [0.0, 0.0]), quadratic, checkpoint=checkpoint, updates=5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["unroll.estimator=blockwise"], 'meta.cma: expected the estimator "es"'),
        (["unroll.estimator=pes"], 'meta.cma: expected the estimator "es"'),
        (
            ["unroll.truncation=3"],
            "expected whole runs, found unroll.truncation = 3 of up to 6 steps; leave it out, or",
        ),
        (["unroll.length=[4, 12]"], "found unroll.truncation = 11 of up to 12 steps; leave it out, or set it to 12"),
        (["meta.cma.population=3"], "meta.cma.population"),
        (["meta.cma.sigma=0"], "meta.cma.sigma"),
        (["meta.cma.sgima=0.1"], "meta.cma.sgima"),
        (["meta.cma.population=10000", "optimiser.hidden_size=100"], "meta.cma: population = 10000: expected"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_made(tmp_path, changes, said):
    with pytest.raises(UserError) as caught:
        l2lopt.meta_train(RECIPE, tmp_path / "run", changes=[*SMALL, *WHOLE, "meta.cma={}", *changes])
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_without_the_package_there_is_a_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(UserError, match=r'expected the package cmaes, found none; pip install "l2lopt\[cma\] @ git'):
        build.build(configs.load(RECIPE, [*SMALL, *WHOLE, "meta.cma={}"]))


def test_the_table_may_be_set_in_a_config_that_is_an_object():
    config = configs.load(configs.load(RECIPE), ["meta.cma.sigma=0.5"])
    assert config.meta.cma == CMASettings(sigma=0.5)


def test_the_forecast_knows_the_number_of_members(monkeypatch):
    """By the usual population, 4 + 3 log n, and one run with the mean."""
    rows, plain = [], EvolutionStrategies.run_members

    def watched(self, update, loss, rules, starts, steps):
        rows.append(len(starts))
        return plain(self, update, loss, rules, starts, steps)

    monkeypatch.setattr(EvolutionStrategies, "run_members", watched)
    experiment = build.build(configs.load(RECIPE, [*SMALL, *WHOLE, "meta.cma={}"]))
    cost_forecast.measure_costs(experiment)
    count = sum(value.numel() for value in experiment.optimiser.phi().values())
    assert set(rows) == {5 + math.floor(3 * math.log(count))}


def test_it_goes_on_from_what_was_imitated(quadratic):
    """Its mean is its own: made before the imitation, it would throw that away at the first update."""
    rule = optimisers.make("hierarchical", cell="lstm", hidden_size=3, lr=0.3).double()
    imitation = {"steps": [3.0], "decays": [1.0], "runs": 1, "updates": 40, "rate": 0.1}
    cma = {"population": 4, "sigma": 1e-6}
    before = rule.phi()["head.bias"].detach().clone()
    train(rule, quadratic, EvolutionStrategies(pairs=1), updates=1, cma=cma, imitation=imitation, keep="last")
    assert (rule.phi()["head.bias"] - before).abs().max() > 0.1
