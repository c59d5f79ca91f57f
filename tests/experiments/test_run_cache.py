"""The store of free runs: what was made once is read again, what differs is not mistaken for it."""

import importlib
import inspect
import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import l2lopt
import optimisees
from l2lopt import optimisers
from l2lopt.core.kinds import Role
from l2lopt.evaluation.free_runs import Curves
from l2lopt.evaluation.settings import Baseline, EvaluationSettings
from l2lopt.evaluation.tuned_runs import OptimiserRun, Problems, TunedRun, optimiser_run
from l2lopt.experiments import from_python, run_facts
from l2lopt.experiments.run_cache import FileCache, contestant_caches, file_digest, read_run, write_run
from l2lopt.parallel.jobs import load_result
from l2lopt.storage.run_log import write_json

ROOT = Path(__file__).parents[2]
CURVES = Curves(
    [0, 3],
    {"train": torch.tensor([[1.5, 2.0], [math.nan, math.inf]]), "test": torch.tensor([[0.1, 0.2], [0.3, 0.4]])},
    torch.tensor([1.0, math.nan]),
    0.25,
)


def counted(curves=CURVES):
    calls = []
    return calls, lambda checkpoint: calls.append(1) or curves


def same(one, other):
    """Equal but for numbers that are not finite, which are all NaN in a file."""
    expected = torch.where(other.isfinite(), other, torch.nan)
    return torch.equal(one.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


def test_a_group_is_made_once(tmp_path):
    calls, make = counted()
    cache = FileCache(tmp_path / "runs", {"optimisee": "mlp"})
    assert cache({"seeds": [1], "rates": 0.1}, make) is CURVES
    again = FileCache(tmp_path / "runs", {"optimisee": "mlp"})({"rates": 0.1, "seeds": [1]}, make)
    assert len(calls) == 1
    assert (again.steps, again.seconds) == (CURVES.steps, CURVES.seconds)
    assert same(again.first, CURVES.first)
    assert all(same(again.losses[split], CURVES.losses[split]) for split in CURVES.losses)


@pytest.mark.parametrize("work", [{"optimisee": "convnet"}, {"optimisee": "mlp", "weights": "a"}])
def test_another_work_is_made_anew(tmp_path, work):
    calls, make = counted()
    FileCache(tmp_path, {"optimisee": "mlp"})({"seeds": [1]}, make)
    FileCache(tmp_path, work)({"seeds": [1]}, make)
    FileCache(tmp_path, {"optimisee": "mlp"})({"seeds": [2]}, make)
    assert len(calls) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"work": 1}', None])
def test_a_damaged_group_is_made_anew(tmp_path, damage):
    calls, make = counted()
    cache = FileCache(tmp_path, {})
    cache({"seeds": [1]}, make)
    (path,) = tmp_path.iterdir()
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "losses": {"train": [["much"]]}}) if damage is None else damage)
    cache({"seeds": [1]}, make)
    assert len(calls) == 2
    cache({"seeds": [1]}, make)
    assert len(calls) == 2


def test_a_run_is_read_as_it_was_written(tmp_path):
    losses = {split: {0: rows[0], 3: rows[1]} for split, rows in CURVES.losses.items()}
    run = OptimiserRun(
        "baseline",
        losses,
        CURVES.first,
        0.5,
        {"train": {3: TunedRun(0.1, 3)}, "test": {3: TunedRun(0.3, 3)}},
        ["an edge"],
    )
    work = {"seed": 0, "evaluation": {"steps": 3}}
    write_run(tmp_path / "run.json", work, run)
    again = read_run(tmp_path / "run.json", work)
    assert (again.kind, again.seconds, again.chosen, again.warnings) == ("baseline", 0.5, run.chosen, run.warnings)
    assert all(same(again.losses[split][step], losses[split][step]) for split in losses for step in (0, 3))
    assert read_run(tmp_path / "run.json", {**work, "seed": 1}) is None
    assert read_run(tmp_path / "none.json", work) is None
    (tmp_path / "run.json").write_text('{"work": {"seed": 0')
    assert read_run(tmp_path / "run.json", work) is None


def test_the_cache_serves_a_comparison(tmp_path, monkeypatch):
    """Baselines of both kinds: the second time no run is made, and the losses are those of the first."""
    quadratic = optimisees.make("quadratic", size=3)
    settings = EvaluationSettings(seeds=2, steps=6, horizons=[3], tuning_seeds=1)
    cache = FileCache(tmp_path, {"optimisee": "quadratic"})

    def runs():
        for choice in ("adam", "torch.optim:RMSprop"):
            one = FileCache(tmp_path, {**cache.work, "optimiser": choice})
            baseline = Baseline(optimiser=choice, rates=[0.01, 0.1])
            yield optimiser_run(baseline.contestant(), Problems(quadratic, settings, cache=one))

    first = list(runs())
    monkeypatch.setattr("l2lopt.evaluation.free_runs.run_free", None)
    for one, other in zip(first, runs(), strict=True):
        assert one.chosen == other.chosen
        assert all(torch.equal(row, other.losses["test"][step]) for step, row in one.losses["test"].items())


def test_a_files_digest_is_that_of_its_content(tmp_path):
    assert file_digest(tmp_path / "none") is None
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a").startswith("ba7816bf")


def test_runs_of_an_installed_class_depend_on_its_release(monkeypatch):
    """An update of the package may change what its optimiser does."""

    def facts(optimiser):
        run_facts._versions.cache_clear()
        return run_facts.run_facts({}, Baseline(optimiser=optimiser, rates=[0.1]))

    foreign, ours = facts("numpy.somewhere:Optimiser"), facts("adam")
    monkeypatch.setattr(run_facts, "version", lambda _: "0.0.1")
    assert facts("numpy.somewhere:Optimiser") == foreign | {"version of numpy": "0.0.1"} != foreign
    assert facts("adam") == ours
    run_facts._versions.cache_clear()


def with_defaults(entry, **defaults):
    """An entry of a table with other defaults, or further options."""
    signature = inspect.signature(entry)
    known = {name: p.replace(default=defaults.get(name, p.default)) for name, p in signature.parameters.items()}
    added = [name for name in defaults if name not in known]
    known |= {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name]) for name in added}

    def made(**options):
        return entry(**options)

    made.__signature__ = signature.replace(parameters=[*known.values()])
    return made


ADAM = {"name": "adam", "eps": 1e-6}
CHANGED = [
    (ADAM, "OPTIMISERS", "adam", {"betas": (0.5, 0.9)}, True),
    (ADAM, "OPTIMISERS", "adam", {"eps": 0.1}, False),  # which is given
    (ADAM, "OPTIMISERS", "adam", {"later": 1}, False),
    (ADAM, "OPTIMISERS", "sgd", {"later": 1}, False),
    (ADAM, "OPTIMISEES", "quadratic", {"noise": 0.5}, True),
    (ADAM, "OPTIMISEES", "quadratic", {"size": 12}, False),
    ({"name": "scheduled", "optimiser": ADAM}, "OPTIMISERS", "adam", {"betas": (0.5, 0.9)}, True),
    ({"name": "scheduled", "optimiser": "adam"}, "OPTIMISERS", "adam", {"eps": 0.1}, True),
    ("normalised-muon", "DIRECTIONS", "orthogonalised", {"eps": 0.1}, True),
    ("normalised-muon", "OPTIMISERS", "normalised-muon", {"lr": 0.1}, False),  # its rates are given
    ("torch.optim:RMSprop", "OPTIMISERS", "adam", {"eps": 0.1}, False),
]


@pytest.mark.parametrize(("choice", "table", "name", "defaults", "anew"), CHANGED)
def test_runs_depend_on_the_defaults_that_were_in_use(tmp_path, monkeypatch, choice, table, name, defaults, anew):
    """And on no other: an option that is added later leaves what is stored as it is."""
    calls, make = counted()
    problem, baseline = {"name": "quadratic", "size": 3}, Baseline(optimiser=choice, rates=[0.1], label="row")

    def run():
        caches = contestant_caches(tmp_path, problem, optimisees.build(problem), [baseline])
        return caches["row"]({"seeds": [1]}, make)

    run()
    run()
    assert len(calls) == 1
    entries = optimisees.OPTIMISEES if table == "OPTIMISEES" else getattr(optimisers, table)
    monkeypatch.setitem(entries, name, with_defaults(entries[name], **defaults))
    run()
    run()
    assert len(calls) == 1 + anew


def test_rules_depend_on_their_defaults_in_every_part():
    inputs = [{"name": "rnnprop", "eps": 1e-6}, "log-step"]
    rule = optimisers.make("coordinatewise", cell={"name": "stacked", "cell": "gru"}, inputs=inputs)
    found = run_facts.run_defaults(optimisees.make("quadratic"), rule)
    part = {option: value for option, value in found.items() if option.startswith(("optimiser.cell", "optimiser.in"))}
    gru = {"update": "'new'", "reset": "'before'", "biases": "'one'", "gate_bias": "False", "activation": "'tanh'"}
    expected = {"layers": "2", **{f"cell.{option}": value for option, value in gru.items()}}
    assert part == {
        "optimiser.inputs.0.betas": "(0.9, 0.99)",
        "optimiser.inputs.1.scale": "7.0",
        **{f"optimiser.cell.{option}": value for option, value in expected.items()},
    }
    assert found["optimiser.rule"] == "'direction-and-magnitude'"
    assert found["optimiser.rule.horizon"] == "50.0"
    assert run_facts.run_defaults("a_module:problem", {"weights": "lstm"}) == {}
    rule.description = None
    assert run_facts.run_defaults(optimisees.make("quadratic"), rule) == {}


def test_runs_without_a_word_on_defaults_stay(tmp_path):
    """Those of earlier releases."""
    calls, make = counted()
    FileCache(tmp_path, {})({"seeds": [1]}, make)
    FileCache(tmp_path, {}, {"optimiser.eps": "0.1"})({"seeds": [1]}, make)
    assert len(calls) == 1
    losses = {split: {0: CURVES.first} for split in CURVES.losses}
    run, path = OptimiserRun("learned", losses, CURVES.first, 0.5), tmp_path / "run.json"
    write_run(path, {}, run)
    assert read_run(path, {}, {"optimiser.eps": "0.1"})
    write_run(path, {}, run, {"optimiser.eps": "0.1"})
    assert read_run(path, {}, {"optimiser.eps": "0.1", "optimiser.later": "1"})
    assert read_run(path, {}, {"optimiser.eps": "0.2"}) is None


def test_the_runs_of_figure_3_are_found():
    """With all defaults of today: none of their files says any."""
    folder = ROOT / "runs" / "reference" / "fig3-width16" / "runs"
    found = 0
    for path in sorted(folder.glob("*.json"))[:40]:
        work = json.loads(json.loads(path.read_text())["work"])
        if "optimiser" in work:
            baseline = Baseline(optimiser=work["optimiser"], rates=[0.1], schedule=work["schedule"])
            beside = run_facts.run_defaults(work["optimisee"], baseline)
            group = {name: work.pop(name) for name in ("rates", "seeds", "splits", "record", "length", "fit")}
            assert {"optimisee.blocks", "optimisee.heldout"} < beside.keys()
            found += bool(FileCache(folder, work, beside).read(group).steps)
    assert found


MODULE = """
import torch
import optimisees
from l2lopt.cells.lstm import LSTM
import beside_it

class Halved(torch.optim.SGD):
    pass

class Cell(LSTM):
    pass

def problem(device="cpu"):
    return optimisees.make("mlp", hidden=[%d])
"""
CHOICES = [
    "of_my_own:Halved",
    {"name": "scheduled", "optimiser": "of_my_own:Halved"},
    {"name": "torch.optim:Muon", "rest": {"name": "of_my_own:Halved"}},
]


@pytest.mark.parametrize("changed", ["of_my_own", "beside_it", "neither"])
def test_runs_of_a_module_of_ones_own_depend_on_what_it_makes(tmp_path, monkeypatch, changed):
    """The name stays where the code changes: its files have a digest, and a problem is described as well."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "not_imported.py").write_text("no python")
    found = []
    for width in (2, 3):
        (tmp_path / "of_my_own.py").write_text(MODULE % (width if changed == "of_my_own" else 2))
        (tmp_path / "beside_it.py").write_text(f"FACTOR = {width if changed == 'beside_it' else 2}")
        for name in ("of_my_own", "beside_it"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        run_facts._versions.cache_clear()
        made = importlib.import_module("of_my_own").problem()
        problems = [
            run_facts.problem_facts(choice, made)
            for choice in ("of_my_own:problem", {"name": "augmented", "optimisee": "of_my_own:problem"})
        ]
        classes = [run_facts.run_facts({}, Baseline(optimiser=choice, rates=[0.1])) for choice in CHOICES]
        classes.append(run_facts.run_facts({}, optimisers.make("coordinatewise", cell="of_my_own:Cell")))
        found.append((problems, classes))
    for name in ("of_my_own", "beside_it"):
        sys.modules.pop(name)
    (problems, classes), (other_problems, other_classes) = found
    assert [one != other for one, other in zip(problems, other_problems, strict=True)] == [changed != "neither"] * 2
    described = [[one["described"] for one in own] for own in (problems, other_problems)]
    assert (described[0] != described[1]) == (changed == "of_my_own")
    assert [one != other for one, other in zip(classes, other_classes, strict=True)] == [changed != "neither"] * 4
    named = {"name": "mlp", "hidden": [2]}
    assert "described" not in run_facts.problem_facts(named, optimisees.build(named))


def zero_headed(activation, criterion=nn.functional.cross_entropy, measured=1.0, momentum=0.1):
    """A problem whose first loss is that of any model."""

    def model():
        made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum), activation(), nn.Linear(8, 3))
        nn.init.zeros_(made[3].weight)
        nn.init.zeros_(made[3].bias)
        return made

    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    task = l2lopt.make_optimisee(model, criterion, (inputs, (inputs.sum(1) > 0).long()), batch_size=20)
    whole = task.evaluate
    task.evaluate = lambda *args: measured * whole(*args)
    return task


def test_problems_alike_at_their_first_values_are_told_apart():
    made = [
        zero_headed(nn.Tanh),
        zero_headed(nn.ReLU),
        zero_headed(nn.Tanh, partial(nn.functional.cross_entropy, label_smoothing=0.1)),
        zero_headed(nn.Tanh, measured=5.0),
        zero_headed(nn.Tanh, momentum=0.01),
        zero_headed(nn.Tanh),
        zero_headed(nn.Tanh),
    ]
    made[-2].roles = lambda: {"0.weight": Role("head")}
    first = made[-1].batch
    made[-1].batch = lambda split, seed, step: first(split, seed, 2 * step)  # equal at step 0
    described = [from_python.describe(task) for task in made]
    assert len({one["first_loss"] for one in described}) == 1
    assert len({repr(one) for one in described}) == len(made)
    assert from_python.describe(zero_headed(nn.Tanh)) == described[0]


def test_losses_in_float64_come_back_as_they_were(tmp_path):
    work, third = {"optimisee": "quadratic"}, torch.tensor([1 / 3], dtype=torch.float64)
    curves = Curves([0, 5], {"test": torch.stack([third, third / 7])}, third, 0.1)
    cache = FileCache(tmp_path, work)
    cache({"splits": ["test"]}, lambda checkpoint: curves)
    again = cache({"splits": ["test"]}, None)
    assert torch.equal(again.losses["test"], curves.losses["test"])
    assert torch.equal(again.first, third)
    run = OptimiserRun("learned", {split: {0: third, 5: third / 7} for split in ("train", "inner", "test")}, third, 0.1)
    write_run(tmp_path / "run.json", work, run)
    assert torch.equal(read_run(tmp_path / "run.json", work).losses["test"][5], third / 7)


def test_work_with_an_infinite_number_is_known_again(tmp_path):
    """JSON has no word for it, and `meta.clip = inf` is in the work of a study."""
    losses = {split: {0: rows[0]} for split, rows in CURVES.losses.items()}
    run = OptimiserRun("baseline", losses, CURVES.first, 0.5, {}, [])
    work = {"recipe": {"meta": {"clip": math.inf}, "sizes": (3, 4)}}
    write_run(tmp_path / "run.json", work, run)
    assert read_run(tmp_path / "run.json", work) is not None
    assert read_run(tmp_path / "run.json", {"recipe": {"meta": {"clip": 1.0}, "sizes": (3, 4)}}) is None
    write_json(tmp_path / "job.json", {"work": work, "loss": 0.5}, seal=True)
    assert load_result(tmp_path / "job.json", work) == {"loss": 0.5}
