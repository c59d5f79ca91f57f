"""Benchmarks from suite to report: what is cached, left out, refused."""

import json
import logging
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import l2lopt
import optimisees
from l2lopt import cli
from l2lopt.core.errors import UserError
from l2lopt.evaluation import free_runs
from l2lopt.evaluation.benchmark_result import read_result
from l2lopt.experiments import benchmark as benchmarks
from l2lopt.experiments import benchmark_jobs, comparison_study
from l2lopt.storage.run_log import write_json, write_text

from test_studies import written  # isort: skip

CHANGES = [
    'tasks=["digits-mlp-20-sigmoid", "quadratic-20-noisy"]',
    "seeds=2",
    "tuning_seeds=1",
    """competitors=[
        {optimiser="adamw", rates=[0.001, 0.01], schedule="cosine", untuned=0.001},
        {optimiser="normalised-muon", rates=[0.03], untuned=0.03, leagues=["untuned"]},
        {optimiser={weights="lstm"}, rates=[1.0], untuned=1.0, leagues=["untuned"]},
    ]""".replace("\n", ""),
]


@pytest.fixture
def made(monkeypatch):
    """The groups of runs that are made from here on, as (stage, record)."""
    groups, plain = [], free_runs.run_free

    def counted(*args, **options):
        groups.append(args[5] if len(args) > 5 else options.get("stage"))
        return plain(*args, **options)

    monkeypatch.setattr(free_runs, "run_free", counted)
    return groups


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """No clock: a step takes a millisecond."""
    monkeypatch.setattr(benchmark_jobs.protocol, "step_seconds", lambda *_: 1e-3)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Figures have tests of their own."""

    def write(result, folder):
        write_text(folder / "benchmark.json", json.dumps(result.to_json()))
        return [folder / "benchmark.json"]

    monkeypatch.setattr(benchmarks, "write_report", write)
    monkeypatch.setattr(benchmarks, "write_board", lambda *_: None)


def test_a_benchmark_is_made_once(tmp_path, made):
    first = l2lopt.benchmark("smoke", tmp_path / "one", changes=CHANGES, steps=8)
    assert made
    made.clear()
    again = l2lopt.benchmark("smoke", tmp_path / "two", changes=CHANGES, steps=8)
    assert not made
    assert json.dumps(again.to_json()) == json.dumps(first.to_json())
    assert {(run.optimiser, run.league) for run in first.runs} == {
        ("adamw", "untuned"),
        ("adamw", "self-tuned"),
        ("adamw", "tuned"),
        ("normalised-muon", "untuned"),
        ("lstm", "untuned"),
    }
    assert [task.split for task in first.tasks] == ["meta-training", "held-out"]
    assert read_result(tmp_path / "one" / "benchmark.json").runs[0].losses["test"][8].shape == (2,)


def test_runs_of_an_earlier_result_stand_beside(tmp_path, monkeypatch):
    first = l2lopt.benchmark("smoke", tmp_path / "one", changes=CHANGES, steps=8)
    own = ["competitors=[{optimiser={name='momentum'}, rates=[0.1], untuned=0.1, leagues=['untuned']}]"]
    file = tmp_path / "one" / "benchmark.json"
    found = l2lopt.benchmark("smoke", tmp_path / "two", changes=CHANGES[:3] + own, steps=8, beside=file)
    assert [run.optimiser for run in found.runs[:2]] == ["momentum"] * 2
    assert json.dumps(found.to_json()["runs"][2:]) == json.dumps(first.to_json()["runs"])
    monkeypatch.setattr(benchmark_jobs, "make_runs", lambda *_: pytest.fail("runs were made before the refusal"))
    for given, message in (({"steps": 9}, "9 steps of .*, found 8"), ({"changes": ["seeds=3"]}, "3 seeds, found 2")):
        asked = {"changes": CHANGES[:3] + own, "steps": 8} | given
        asked["changes"] = [*CHANGES[:3], *own, *given.get("changes", [])]
        with pytest.raises(UserError, match=f"beside: expected {message}"):
            l2lopt.benchmark("smoke", tmp_path / "other", beside=file, **asked)
    run_command = ["l2lopt", "benchmark", "smoke", "--run", str(tmp_path / "three"), "--beside", str(tmp_path / "none")]
    monkeypatch.setattr("sys.argv", run_command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert not (tmp_path / "three").exists()


def test_steps_are_timed_once(tmp_path, monkeypatch):
    """For each schedule by itself, and not again where the times are in the cache."""
    timed = []
    monkeypatch.setattr(benchmark_jobs.protocol, "step_seconds", lambda *given: timed.append(given) or 1e-3)
    rates = {"optimiser": "adam", "rates": [0.1], "untuned": 0.1, "leagues": ["untuned"]}
    both = {"constant": rates, "falling": rates | {"schedule": "cosine"}}
    task = {"quadratic": {"name": "quadratic", "size": 3}}
    for _ in range(2):
        l2lopt.benchmark(tasks=task, optimisers=both, folder=tmp_path / "run", steps=4)
    assert len(timed) == 4  # alone and side by side, for two optimisers
    (path,) = tmp_path.rglob("step-seconds.json")
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"seconds": {key: found[:1] for key, found in kept["seconds"].items()}}))
    l2lopt.benchmark(tasks=task, optimisers=both, folder=tmp_path / "run", steps=4)
    assert len(timed) == 8  # a file that was changed by hand is not read


def test_times_that_another_benchmark_writes_meanwhile_stay(tmp_path, monkeypatch):
    path, work = tmp_path / "cache" / "step-seconds.json", {"machine": benchmark_jobs.environment()}

    def timed(*_):
        write_json(path, {"work": work, "seconds": {"of another": [1.0, 2.0]}})
        return 1e-3

    monkeypatch.setattr(benchmark_jobs.protocol, "step_seconds", timed)
    rates = {"optimiser": "adam", "rates": [0.1], "untuned": 0.1, "leagues": ["untuned"]}
    task = {"quadratic": {"name": "quadratic", "size": 3}}
    l2lopt.benchmark(tasks=task, optimisers={"adam": rates}, folder=tmp_path / "run", cache=path.parent, steps=4)
    seconds = json.loads(path.read_text())["seconds"]
    assert len(seconds) == 2
    assert seconds["of another"] == [1.0, 2.0]


def listed(output, target):
    """A loss whose Python sees the numbers."""
    return (output - target).square().mean() * (1 + 0 * sum(output.tolist()[0]))


def branching(output, target):
    """A loss that chooses by the numbers."""
    return (output - target).abs().mean() if output.sum() > 0 else (output - target).square().mean()


@pytest.mark.parametrize("criterion", [listed, branching])
def test_models_that_vmap_refuses_run_by_themselves(tmp_path, monkeypatch, criterion):
    timed = []
    monkeypatch.setattr(benchmark_jobs.protocol, "step_seconds", lambda *given: timed.append(given[-1]) or 1e-3)
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    own = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 1), criterion, (inputs, inputs[:, :1]), batch_size=20)
    sgd = {"optimiser": "sgd", "rates": [0.1], "untuned": 0.1, "leagues": ["untuned"]}
    changes = ["seeds=3", "tuning_seeds=1"]
    asked = {"tasks": {"mine": own}, "optimisers": {"sgd": sgd}, "folder": tmp_path / "own", "steps": 5}
    with pytest.raises(UserError, match="in a benchmark set rows to 1"):
        l2lopt.benchmark(**asked, changes=changes)
    (run,) = l2lopt.benchmark(**asked, changes=[*changes, "rows=1"]).runs
    assert run.losses["test"][5].isfinite().tolist() == [True] * 3
    assert timed[-2:] == [1, 1]


def test_runs_are_shared_with_a_wider_benchmark(tmp_path, made):
    l2lopt.benchmark("smoke", tmp_path / "one", changes=CHANGES, steps=8)
    made.clear()
    more = [change.replace('"quadratic-20-noisy"', '"quadratic-20-noisy", "rosenbrock-10"') for change in CHANGES]
    l2lopt.benchmark("smoke", tmp_path / "two", changes=more, steps=8)
    # Of the new task: AdamW untuned, its tuning, one run that is self-tuned and tuned; one run of each of the others.
    assert len(made) == 5


def test_another_default_makes_the_runs_of_its_optimiser_anew(tmp_path, made, monkeypatch):
    l2lopt.benchmark("smoke", tmp_path / "one", changes=CHANGES, steps=8)
    whole, plain = len(made), benchmark_jobs.run_facts.run_defaults

    def changed(problem, entrant):
        found = plain(problem, entrant)
        return found | {name: "0.1" for name in found if name == "optimiser.direction.eps"}

    monkeypatch.setattr(benchmark_jobs.run_facts, "run_defaults", changed)
    l2lopt.benchmark("smoke", tmp_path / "two", changes=CHANGES, steps=8)
    assert len(made) == whole + 2  # normalised-muon, on two tasks


def test_a_stop_loses_one_group_of_runs(tmp_path, made, monkeypatch):
    plain = free_runs.run_free

    def stopped(*args, **options):
        if len(made) == 4:
            raise KeyboardInterrupt
        return plain(*args, **options)

    with monkeypatch.context() as context:
        context.setattr(free_runs, "run_free", stopped)
        with pytest.raises(KeyboardInterrupt):
            l2lopt.benchmark("smoke", tmp_path / "stopped", changes=CHANGES, steps=8)
    l2lopt.benchmark("smoke", tmp_path / "stopped", changes=CHANGES, steps=8)
    whole = len(made)
    made.clear()
    l2lopt.benchmark("smoke", tmp_path / "whole", changes=CHANGES, steps=8, cache=tmp_path / "elsewhere")
    assert whole == len(made)


def test_other_weights_are_other_runs(tmp_path, made):
    rules = {"rule": {"optimiser": {"name": "coordinatewise", "seed": 0}, "rates": [1.0], "untuned": 1.0}}
    task = {"quadratic": optimisees.make("quadratic", size=3)}
    first = l2lopt.benchmark(tasks=task, optimisers=rules, folder=tmp_path / "one", steps=4)
    rules["rule"]["optimiser"]["seed"] = 1
    other = l2lopt.benchmark(tasks=task, optimisers=rules, folder=tmp_path / "two", steps=4)
    one, two = (result.runs[0].losses["train"][4] for result in (first, other))
    assert not torch.equal(one, two)


def test_own_tasks_and_optimisers(tmp_path):
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    own = l2lopt.make_optimisee(
        lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, (inputs, (inputs[:, 0] > 0).long())
    )
    result = l2lopt.benchmark(
        tasks={"mine": own},
        optimisers={"SGD": {"optimiser": "torch.optim:SGD", "rates": [0.1, 1.0], "untuned": 0.1}},
        folder=tmp_path / "own",
        steps=5,
        changes=["seeds=2", "tuning_seeds=1"],
    )
    assert [(task.name, task.split, task.parameters) for task in result.tasks] == [("mine", "own", 10)]
    assert [(run.optimiser, run.league) for run in result.runs] == [("SGD", "untuned"), ("SGD", "tuned")]
    with pytest.raises(UserError, match="problems made in Python"):
        l2lopt.benchmark(tasks={"mine": own}, folder=tmp_path / "own", jobs=2)


@pytest.mark.parametrize(("suite", "name"), [(None, benchmarks.OWN), ("smoke", "smoke"), (Path("smoke"), "smoke")])
def test_competitors_for_tasks_of_ones_own_are_those_of_the_suite_that_is_named(tmp_path, monkeypatch, suite, name):
    plans = []
    monkeypatch.setattr(benchmark_jobs, "make_runs", lambda plan, *_: plans.append(plan) or ([], [], {}))
    l2lopt.benchmark(suite, tmp_path / "run", tasks={"quadratic": "quadratic"})
    expected = benchmarks.load_suite(name)[1]
    assert {one.name for one in plans[0].suite.competitors} <= {one.name for one in expected.competitors}
    assert plans[0].suite.seeds == expected.seeds
    assert len({benchmarks.load_suite(one)[1].seeds for one in (benchmarks.OWN, "smoke")}) == 2


def test_what_has_no_league_here_is_left_out_with_a_line(tmp_path, caplog):
    """A self-tuned rate is chosen on tasks of the meta-training, and own tasks are none."""
    task = {"quadratic": {"name": "quadratic", "size": 3}}
    rivals = {name: {"optimiser": name, "rates": [0.1], "leagues": ["self-tuned"]} for name in ("sgd", "adam")}
    rivals["sgd"]["leagues"].append("untuned")  # without a rate there
    settings = {"tasks": task, "folder": tmp_path / "run", "steps": 4, "changes": ["seeds=1", "tuning_seeds=1"]}
    with pytest.raises(UserError, match="competitors: expected at least one, found none with a league here"):
        l2lopt.benchmark(optimisers=rivals, **settings)
    rivals["adam"]["leagues"] = ["tuned"]
    with caplog.at_level(logging.WARNING, "l2lopt"):
        result = l2lopt.benchmark(optimisers=rivals, **settings)
    assert {run.optimiser for run in result.runs} == {"adam"}
    assert "chooses their self-tuned rate, or without a rate: sgd" in " ".join(caplog.messages)


QUADRATIC = {"q": {"name": "quadratic", "size": 3}}


def test_a_rule_with_a_part_of_ones_own_takes_part_where_it_is_trusted(tmp_path):
    rule, file = l2lopt.optimisers.make("coordinatewise", hidden_size=3, cell="l2lopt.cells.gru:GRU"), "own.safetensors"
    l2lopt.save(rule, tmp_path / file)
    tasks, own = {"q": optimisees.make("quadratic", size=3)}, {"rates": [1.0], "untuned": 1.0, "leagues": ["untuned"]}
    choice = {"weights": str(tmp_path / file)}
    with pytest.raises(UserError, match="say trusted = true beside weights"):
        l2lopt.benchmark(tasks=tasks, optimisers={"own": {**own, "optimiser": choice}}, folder=tmp_path / "a", steps=2)
    given = {"own": {**own, "optimiser": {**choice, "trusted": True}}}
    result = l2lopt.benchmark(tasks=tasks, optimisers=given, folder=tmp_path / "b", steps=2)
    assert {run.optimiser for run in result.runs} == {"own"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimisers": {"mine": torch.nn.Linear(2, 2)}}, "optimiser 'mine': expected a table, found a Linear"),
        ({"optimisers": {"adam": "adam"}}, "optimiser 'adam': expected a table, found 'adam'"),
        ({"tasks": {"m": torch.nn.Linear(2, 2)}}, "task 'm': expected an Optimisee, or the choice of one"),
        ({"tasks": {}}, "tasks: expected at least one"),
        ({"tasks": ["quadratic"]}, "tasks: expected a name for each, found a list"),
        ({"optimisers": ["adam"]}, "optimisers: expected a name for each, found a list"),
        ({"steps": 0}, "steps: expected at least 1, found 0"),
        ({"steps": "5"}, "steps: expected at least 1, found a str"),
        ({"jobs": 2.0}, "jobs: expected at least 1, found a float"),
        ({"jobs": 0}, "jobs: expected at least 1, found 0"),
        (
            {"tasks": {"q": {"name": "quadratic", "size": np.int64(3)}}},
            r"task 'q': size: expected a plain value, found .*; write int, float or list",
        ),
        (
            {"optimisers": {"sparse": {"optimiser": "torch.optim:SparseAdam", "rates": [0.1]}}},
            "optimiser 'sparse': expected one that can step, found SparseAdam does not support dense",
        ),
    ],
)
def test_arguments_that_make_no_benchmark_are_refused(tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        l2lopt.benchmark(**{"tasks": QUADRATIC, "folder": tmp_path / "run", **given})


def test_a_task_without_held_out_samples_is_refused_where_rates_are_chosen(tmp_path, made):
    samples = torch.ones(20, 4), torch.zeros(20).long()
    task = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, samples, heldout=0.0)
    own = {"tasks": {**QUADRATIC, "own": task}, "folder": tmp_path / "run", "steps": 2, "changes": ["seeds=1"]}
    with pytest.raises(UserError, match="task 'own': expected held-out samples to choose rates on, found none"):
        l2lopt.benchmark(optimisers={"sgd": {"optimiser": "sgd", "rates": [0.1, 1.0]}}, **own)
    assert not made
    single = {"optimiser": "sgd", "rates": [0.1], "untuned": 0.1, "leagues": ["untuned"]}
    assert len(l2lopt.benchmark(optimisers={"sgd": single}, **own).runs) == 2


def test_a_script_may_name_its_own_class(tmp_path, monkeypatch):
    """Its code is in the keys of the runs, as that of a module is."""
    keys = []
    for factor in (1, 2):
        script = tmp_path / "script.py"
        script.write_text(f"FACTOR = {factor}")
        main = types.ModuleType("__main__")
        main.__file__, main.Mine = str(script), type("Mine", (torch.optim.SGD,), {})
        monkeypatch.setitem(sys.modules, "__main__", main)
        mine = {"optimiser": "__main__:Mine", "rates": [0.1], "untuned": 0.1, "leagues": ["untuned"]}
        given = {"optimisers": {"mine": mine}, "cache": tmp_path / "cache", "changes": ["seeds=1"]}
        assert l2lopt.benchmark(tasks=QUADRATIC, folder=tmp_path / "run", steps=2, **given).runs
        keys.append({path.name for path in (tmp_path / "cache").glob("*.json")})
    assert keys[0] < keys[1]


def test_half_precision_is_refused_before_any_run(tmp_path):
    """Its losses would count as divergence of the optimisers."""
    inputs = torch.ones(20, 4).half()
    samples, loss = (inputs, inputs[:, :1]), torch.nn.functional.mse_loss
    task = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 1).half(), loss, samples)
    with pytest.raises(UserError, match="expected float32, float64 or bfloat16, found float16"):
        l2lopt.benchmark(tasks={"half": task}, folder=tmp_path / "run", steps=2)


def test_the_self_tuned_league_is_in_the_forecast(tmp_path, made, caplog):
    """Without it the answer would be that nothing is to be run, while its rates and its runs are still to be made."""
    changes = [change for change in CHANGES if not change.startswith("competitors")]
    caplog.set_level(logging.INFO, "l2lopt")
    for leagues, count in (('"untuned"', 2), ('"untuned", "self-tuned"', 2), ('"untuned", "self-tuned"', 0)):
        caplog.clear()
        made.clear()
        competitor = f'{{optimiser="sgd", rates=[0.01, 0.02], untuned=0.01, leagues=[{leagues}]}}'
        l2lopt.benchmark("smoke", tmp_path / "run", changes=[*changes, f"competitors=[{competitor}]"], steps=8)
        told = [text for text in caplog.messages if "pairs of task and optimiser to run" in text]
        assert len(told) == int(count > 0)
        assert all(text.startswith(f"{count} of 2 pairs") for text in told)
        assert bool(made) == (count > 0)


def test_several_ranks_forecast_without_sharing_out_anything(tmp_path, monkeypatch, caplog):
    """The first alone forecasts: what it shared out, the others would never answer."""
    suite = benchmarks.load_suite("smoke", CHANGES)[1]
    plan = benchmark_jobs.Plan(suite, (benchmarks.PlannedTask("a", "a", "own", 4, "quadratic"),), tmp_path)
    monkeypatch.setattr(benchmark_jobs.processes, "ranks", lambda: 2)
    monkeypatch.setattr(benchmark_jobs, "_task_runs", None)
    with caplog.at_level(logging.INFO, "l2lopt"):
        benchmark_jobs._log_forecast(plan, {(0, 0): benchmark_jobs.StepTime(1e-3, 1e-3)}, [], 1)
    assert "1 of 1 pairs" in caplog.text
    assert "shared by 2 processes" in caplog.text


def test_jobs_are_refused_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks.processes, "ranks", lambda: 2)
    with pytest.raises(UserError, match="jobs: expected 1 under torchrun, found 2"):
        l2lopt.benchmark("smoke", tmp_path / "run", changes=CHANGES, jobs=2)


def test_what_is_not_there_is_left_out_with_a_line(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    changes = [CHANGES[0].replace("digits-mlp-20-sigmoid", "mnist-mlp-50-relu"), *CHANGES[1:3]]
    absent = '{optimiser="not_installed_here:Adam", rates=[0.1], untuned=0.1, leagues=["untuned"]}'
    changes.append(f'competitors=[{{optimiser="adam", rates=[0.1], untuned=0.1, leagues=["untuned"]}}, {absent}]')
    with caplog.at_level(logging.WARNING, "l2lopt"):
        result = l2lopt.benchmark("smoke", tmp_path / "some", changes=changes, steps=3)
    assert [task.name for task in result.tasks] == ["quadratic-20-noisy"]
    assert {run.optimiser for run in result.runs} == {"adam"}
    said = " ".join(caplog.messages)
    assert "mnist-mlp-50-relu" in said
    assert "pip install not_installed_here" in said


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (['tasks=["digits-mlp-2-sigmoid"]'], "digits-mlp-20-sigmoid"),
        (["seeds=0"], "seeds"),
        (["budgt='short'"], "budget"),
        (['competitors=[{optimiser="adm", rates=[0.1]}]'], "adam"),
        (['competitors=[{optimiser={weights="lsm"}, rates=[0.1]}]'], "lstm"),
        (['competitors=[{optimiser={weights="lstm", lr=1}, rates=[0.1]}]'], "expected a known key, found 'lr'"),
        (['competitors=[{optimiser={weights=["lstm"]}, rates=[0.1]}]'], "weights: expected a valid string, found"),
        (['competitors=[{optimiser={weights="lstm", trusted=3}, rates=[0.1]}]'], "trusted: expected a valid boolean"),
    ],
)
def test_mistakes_are_told_before_any_run(tmp_path, made, changes, word):
    with pytest.raises(UserError, match=word):
        l2lopt.benchmark("smoke", tmp_path / "run", changes=changes)
    assert not made


def test_the_command_line(tmp_path, monkeypatch, capsys):
    arguments = ["benchmark", "--run", str(tmp_path / "run"), "--steps", "3"]
    for change in CHANGES:
        arguments += ["--set", change]
    monkeypatch.setattr("sys.argv", ["l2lopt", *arguments])
    cli.main()
    assert "report.html" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["l2lopt", "benchmark", "no-such-suite"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "smoke" in capsys.readouterr().err


BASELINE = {"optimiser": "sgd", "rates": [0.01, 0.1], "schedule": "cosine"}
SHARED = {
    "config": {
        "optimisee": {"name": "quadratic", "size": 3, "noise": 0.1},
        "evaluation": {
            **{"seeds": 2, "steps": 4, "horizons": [4], "tuning_seeds": 1, "multipliers": []},
            "baselines": [BASELINE, {"optimiser": {"name": "adam"}, "rates": [0.1]}],
        },
    },
    "study": {
        "meta_seeds": [0],
        "problems": [{"label": "quadratic"}],
        "optimisers": [{"label": "rule", "config": "../recipe.toml", "optimiser": {"weights": "lstm"}}],
    },
}
"""A study of the runs of a benchmark on one task."""


def test_a_study_makes_no_run_again_that_a_benchmark_has_made(tmp_path, made, monkeypatch, caplog):
    """With its cache; another seed, and a study without that cache, make their own."""
    rates = {"rates": [0.1], "untuned": 0.1, "leagues": ["untuned"]}
    first = l2lopt.benchmark(
        tasks={"quadratic": SHARED["config"]["optimisee"]},
        optimisers={
            "sgd": {**BASELINE, "leagues": ["tuned"]},
            "adam": {"optimiser": "adam", **rates},
            "rule": {"optimiser": {"weights": "lstm"}, **rates, "rates": [1.0], "untuned": 1.0},
        },
        folder=tmp_path / "benchmark",
        steps=4,
        changes=["seeds=2", "tuning_seeds=1"],
    )
    source = written(tmp_path, SHARED["study"], SHARED["config"])
    made.clear()
    with caplog.at_level(logging.INFO, "l2lopt"):
        l2lopt.reproduce(source, tmp_path / "study", cache=tmp_path / "cache")
    assert not made
    assert "pieces to make" not in caplog.text  # nor is any step timed for a forecast
    monkeypatch.setattr(comparison_study, "_forecast", lambda *args: None)  # it takes some steps of its own
    for run in first.runs:
        path = tmp_path / "study" / "quadratic" / ("rule-0/free-run" if run.optimiser == "rule" else run.optimiser)
        losses = json.loads(path.with_suffix(".json").read_text())["losses"]
        assert losses["test"]["4"] == run.losses["test"][4].tolist()
    arguments = ["--run", tmp_path / "more", "--cache", tmp_path / "cache", "--set", "evaluation.seeds=3"]
    monkeypatch.setattr("sys.argv", ["l2lopt", "reproduce", *map(str, [source, *arguments])])
    cli.main()
    assert len(made) == 3  # the reported runs of each, and not those of the tuning
    made.clear()
    l2lopt.reproduce(source, tmp_path / "alone")
    assert len(made) == 4
    with pytest.raises(UserError, match="expected a study that compares optimisers"):
        l2lopt.reproduce("ptb-cells", tmp_path / "cells", cache=tmp_path / "cache")


@pytest.mark.slow
def test_several_processes_give_the_same(tmp_path):
    one = l2lopt.benchmark("smoke", tmp_path / "one", changes=CHANGES, steps=8)
    two = l2lopt.benchmark("smoke", tmp_path / "two", changes=CHANGES, steps=8, cache=tmp_path / "other", jobs=2)
    for run, other in zip(one.runs, two.runs, strict=True):
        assert run.rates == other.rates
        for split in ("train", "test"):
            assert all(torch.equal(run.losses[split][step], other.losses[split][step]) for step in run.losses[split])


def test_a_cache_that_is_a_file_is_refused_before_any_run(tmp_path, made):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match="file: expected a folder to write in, found File exists; choose another --cache"
    ):
        l2lopt.benchmark("smoke", tmp_path / "run", changes=CHANGES, steps=4, cache=tmp_path / "file")
    assert not made
