"""The protocol of a benchmark: leagues, rates, and numbers against a plain loop of torch.optim."""

import math

import pytest
import torch

import optimisees
from l2lopt.core.errors import UserError
from l2lopt.evaluation import benchmark as protocol
from l2lopt.evaluation.benchmark_result import TaskInfo
from l2lopt.evaluation.suites import Competitor, Suite
from l2lopt.evaluation.tuned_runs import Problems
from l2lopt.kernels.cpu.normalised_muon import FusedNormalisedMuon
from l2lopt.optimisee import evaluate_split
from l2lopt.optimisers import NormalisedMuon
from l2lopt.weights import files

STEPS, SEEDS = 12, 2


def suite(*competitors):
    return Suite(tasks=["any"], seeds=SEEDS, tuning_seeds=2, competitors=list(competitors))


def runs_of(competitor, optimisee, self_tuned=None, steps=STEPS):
    """The runs of a competitor on a task of a few steps, by league."""
    made = protocol.entry(competitor, optimisee)
    problems = Problems(optimisee, protocol.settings_of(suite(competitor), steps))
    task = TaskInfo("task", "family", "held-out", steps, 1)
    return {
        run.league: run for run in protocol.task_runs(made, task, protocol.with_one_form(made, problems), self_tuned)
    }


def by_hand(make, optimisee, seed, steps=STEPS):
    """A run of torch.optim on one problem, one parameter tensor after the other; its losses at the end."""
    params, aux = optimisee.init(seed)
    params = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimizer = make(params.values())
    for step in range(steps):
        optimizer.zero_grad()
        loss, aux = optimisee.loss(params, aux, optimisee.batch("train", seed, step))
        loss.backward()
        aux = {name: value.detach() for name, value in aux.items()}
        optimizer.step()
    return {split: evaluate_split(optimisee, split, seed, params, aux)["loss"] for split in ("train", "test")}


@pytest.mark.parametrize(
    "task",
    [
        {"name": "mlp", "hidden": [8], "activation": "tanh"},
        pytest.param({"name": "convnet", "channels": [4, 4], "hidden": 8, "batch_size": 16}, marks=pytest.mark.slow),
        pytest.param({"name": "autoencoder", "hidden": [8, 4], "activation": "tanh"}, marks=pytest.mark.slow),
    ],
    ids=lambda task: task["name"],
)
def test_numbers_are_those_of_a_plain_loop(task):
    """Untuned and tuned, the chosen rates included: no vmap, no class of ours, the same problems."""
    optimisee = optimisees.build(task | {"dtype": "float64"})
    rates = [0.003, 0.03]
    runs = runs_of(Competitor(optimiser="adam", rates=rates, untuned=0.003), optimisee)
    problems = Problems(optimisee, protocol.settings_of(suite(Competitor(optimiser="adam", rates=rates)), STEPS))
    for league, run in runs.items():
        for split in ("train", "test"):
            rate = run.rates[split]
            assert rate in ([0.003] if league == "untuned" else rates)
            wanted = [
                by_hand(lambda params, rate=rate: torch.optim.Adam(params, lr=rate), optimisee, seed)[split]
                for seed in problems.reported
            ]
            torch.testing.assert_close(
                run.losses[split][STEPS].double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=0
            )


def test_each_league_has_its_rates():
    optimisee = optimisees.make("quadratic", size=3)
    grid = [0.001, 0.01, 0.1]
    runs = runs_of(Competitor(optimiser="sgd", rates=grid, untuned=0.02), optimisee, self_tuned=0.01)
    assert [*runs] == ["untuned", "self-tuned", "tuned"]
    assert [run.trials for run in runs.values()] == [1, 1, 3]
    assert runs["untuned"].rates == {"train": 0.02, "test": 0.02}
    assert runs["self-tuned"].rates == {"train": 0.01, "test": 0.01}
    assert runs["tuned"].rates["test"] in grid
    losses = {league: float(run.losses["test"][STEPS].mean()) for league, run in runs.items()}
    assert losses["tuned"] <= losses["self-tuned"]
    assert [*runs_of(Competitor(optimiser="sgd", rates=grid, leagues=["tuned"]), optimisee)] == ["tuned"]
    assert [*runs_of(Competitor(optimiser="sgd", rates=grid), optimisee)] == ["tuned"]  # no setting, no chosen rate


def test_the_self_tuned_rate_is_the_best_over_tasks():
    losses = {"a": {0.1: 1.0, 1.0: 1.1}, "b": {0.1: 3.0, 1.0: 2.0}}
    assert protocol.self_tuned_rate(losses) == 1.0  # log 1.1 < log 1.5
    assert protocol.self_tuned_rate({"a": losses["a"]}) == 0.1


def test_no_single_task_decides_the_self_tuned_rate():
    """A run that diverges counts as ten times the best one, and so does any that is worse."""
    ones = {name: {0.1: 2.0, 1.0: 1.0} for name in "abcde"}
    assert protocol.self_tuned_rate({**ones, "diverged": {0.1: 1.0, 1.0: math.inf}}) == 1.0
    assert protocol.self_tuned_rate({**ones, "far": {0.1: 1.0, 1.0: 1e9}}) == 1.0
    assert protocol.self_tuned_rate({"diverged": {0.1: math.inf, 1.0: math.inf}, **ones}) == 1.0
    assert protocol.self_tuned_rate({"solved": {0.1: 0.0, 1.0: 1e-9}, "b": {0.1: 2.0, 1.0: 1.0}}) == 0.1
    assert protocol.self_tuned_rate({"below": {0.1: -1.0, 1.0: -2.0}, "b": {0.1: 2.0, 1.0: 1.0}}) == 1.0


def test_kinds_and_rules():
    kinds = {"lstm": {"weights": "lstm"}, "harness": "normalised-muon", "new": "coordinatewise", "adam": "adam"}
    competitors = {label: Competitor(optimiser=choice, rates=[1.0], label=label) for label, choice in kinds.items()}
    assert [protocol.kind_of(one) for one in competitors.values()] == ["learned", "harness", "learned", "baseline"]
    rule = protocol.learned_rule(competitors["lstm"])
    assert files.digest(rule) == files.digest(files.load("lstm"))
    assert protocol.learned_rule(competitors["harness"]) is None


def test_a_learned_rule_takes_part_in_the_dtype_of_the_problem():
    optimisee = optimisees.make("mlp", hidden=[4], dtype="float64")
    runs = runs_of(Competitor(optimiser={"weights": "lstm"}, rates=[1.0], untuned=1.0, leagues=["untuned"]), optimisee)
    assert runs["untuned"].losses["train"][STEPS].dtype == torch.float64
    assert runs["untuned"].kind == "learned"


def test_a_competitor_that_refuses_the_parameters_is_told_before_any_run():
    optimisee = optimisees.make("mlp", hidden=[4])
    with pytest.raises(UserError):
        protocol.entry(Competitor(optimiser="torch.optim:Muon", rates=[0.1]), optimisee)


@pytest.mark.parametrize(("runs", "optimiser"), [(1, "adam"), (3, "adam"), (3, "torch.optim:SGD")])
def test_a_step_is_timed(runs, optimiser):
    optimisee = optimisees.make("quadratic", size=3)
    made = protocol.entry(Competitor(optimiser=optimiser, rates=[0.1]), optimisee)
    assert 0 < protocol.step_seconds(made, 5, runs) < 1


def test_rows_are_counted():
    one = Competitor(optimiser="adam", rates=[0.1, 1.0], untuned=0.1)
    assert protocol.rows_of(one, suite(one)) == 4 * SEEDS + 2 * 2
    alone = Competitor(optimiser="adam", rates=[0.1], untuned=0.1, leagues=["untuned"])
    assert protocol.rows_of(alone, suite(alone)) == SEEDS


def test_the_harness_is_the_default_of_its_name():
    """The report calls this one the harness."""
    fused = Competitor(optimiser="normalised-muon", rates=[0.03]).build(0.03, 5)
    assert isinstance(fused, FusedNormalisedMuon)
    assert isinstance(fused.reference, NormalisedMuon)
