"""An application of the user's, in a module that no file of this project knows: it trains, samples, and is studied."""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
import tomli_w
from test_cli import called

import l2lopt
from l2lopt.experiments import comparison_study

LINE = '''
"""y = 3x from noisy samples, by one number."""

from operator import itemgetter

import torch

from l2lopt.core.references import Column, Reference, References
from l2lopt.estimators import Backprop
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import SGD
from l2lopt.storage.run_log import write_json


class Lines(References):
    noise: float = 0.0
    """Added to the reference's slope."""

    def beside_each(self, label):
        return [Reference("start", f"{label}, untrained", f"{label} untrained")]

    def beside_all(self):
        return [Reference("truth", "the truth", "truth")]

    def depends_on(self, kind):
        return {} if kind == "trained" else {"kind": kind, "noise": self.noise}

    def result(self, optimisee, run, report):
        slopes = {"start": 0.0, "truth": 3.0 + self.noise}
        slope = float(run.trained.params["slope"]) if run.trained else slopes[run.kind]
        return {"slope": slope, "error": abs(slope - 3.0)}

    def columns(self, result):
        return [Column("slope", itemgetter("slope")), Column("error", itemgetter("error"), digits=2, marked=True)]


class Line(Optimisee):
    def __init__(self, samples: int = 8, device: str = "cpu") -> None:
        self.samples = samples

    def init(self, seed):
        return {"slope": torch.zeros(())}, {}

    def batch(self, split, seed, step):
        x = torch.randn(self.samples, generator=torch.Generator().manual_seed(1000 * seed % 2**31 + step))
        return x, 3 * x

    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch), aux

    def evaluate(self, params, aux, batch):
        return (params["slope"] * batch[0] - batch[1]).square().mean()


class Writing(Line):
    sample_kind = "text"
    artefact_files = ("slope.json",)
    references = Lines

    def artefacts(self, params, aux, folder):
        write_json(folder / "slope.json", float(params["slope"]))

    @classmethod
    def sample(cls, run, request):
        return f"{request.prompt}{float(run.params['slope']):.1f} x, of {run.options.get('samples')}"


def made(samples: int = 8, device: str = "cpu") -> Writing:
    return Writing(samples)


def nothing(device: str = "cpu"):
    return 3


def descent(lr: float) -> SGD:
    return SGD(lr)


class Half(Backprop):
    pass
'''


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "my_line.py").write_text(LINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_line", None)


def config(name, **options):
    return {
        "threads": 1,
        "optimisee": {"name": f"my_line:{name}", **options},
        "optimiser": {"name": "torch.optim.SGD", "lr": 0.2},
        "train": {"steps": 20, "evaluate_every": 10},
    }


def written(folder, **choice):
    (folder / "own.toml").write_text(tomli_w.dumps({**config("Writing", samples=5), **choice}))
    return folder / "own.toml"


def test_four_methods_are_an_optimisee(tmp_path):
    """Training, meta-training and evaluation need no hook."""
    result = l2lopt.train(config("Line"), tmp_path / "trained")
    assert result.params["slope"].item() == pytest.approx(3, abs=0.1)
    settings = {
        "optimisee": "my_line:Line",
        "optimiser": {
            "name": "l2lopt.optimisers.coordinatewise:coordinatewise",
            "hidden_size": 3,
            "cell": "l2lopt.cells.lstm:LSTM",
            "inputs": ["l2lopt.optimisers.inputs:LogAndSign"],
            "rule": "l2lopt.optimisers.rules:Additive",
        },
        "unroll": {"length": 4, "estimator": "l2lopt.estimators.backprop:Backprop"},
        "meta": {"updates": 2},
        "validation": {"seeds": 1, "horizons": [3]},
        "evaluation": {"seeds": 2, "steps": 3, "horizons": [3], "baselines": []},
    }
    run = l2lopt.meta_train(settings, tmp_path / "learned")
    assert l2lopt.evaluate(run).table
    published = l2lopt.publish(run, tmp_path / "published.safetensors")
    with pytest.raises(l2lopt.UserError, match="expected a registered name in a file of weights"):
        l2lopt.load(published)
    assert l2lopt.load(published, trusted=True).phi()


@pytest.mark.parametrize("name", ["Writing", "made"])
def test_its_hooks_reach_the_command_line(tmp_path, monkeypatch, capsys, name):
    """Also where a function makes it, whose annotation says what it makes."""
    source, run = written(tmp_path, optimisee={"name": f"my_line:{name}", "samples": 5}), tmp_path / "run"
    code, out, err = called(monkeypatch, capsys, "train", source, "--run", run)
    assert (code, err) == (0, "")
    slope = json.loads((run / "slope.json").read_text())
    assert str(run / "slope.json") in out
    code, out, err = called(monkeypatch, capsys, "sample", run, "--prompt", "y = ")
    assert (code, out, err) == (0, f"y = {slope:.1f} x, of 5\n", "")
    with pytest.raises(
        l2lopt.UserError, match="expected a trained model of images, found the run of another optimisee"
    ):
        l2lopt.sample_images(run)
    (run / "notes.txt").write_text("mine")
    code, _, err = called(
        monkeypatch, capsys, "train", source, "--run", run, "--overwrite", "--set", "optimisee=quadratic"
    )
    assert (code, err) == (0, "")
    assert (run / "notes.txt").exists()


def test_what_it_left_is_cleared_when_it_is_trained_again(tmp_path):
    l2lopt.train(config("Writing"), tmp_path / "run")
    (tmp_path / "run" / "slope.json").write_text("old")
    changes = ["optimiser.lr=1e9", "train.steps=1"]
    l2lopt.train(config("Writing"), tmp_path / "run", overwrite=True, changes=changes)
    assert (tmp_path / "run" / "slope.json").read_text() != "old"


def test_it_is_studied_beside_its_references(tmp_path, monkeypatch, capsys):
    written(tmp_path)
    runs = [
        {"label": "SGD"},
        {"label": "Adam", "changes": ["optimiser.name=torch.optim.Adam", "optimiser.lr=0.01"], "versus": "SGD"},
    ]
    study = {"config": "own.toml", "seeds": [0, 1], "noise": 1.5, "runs": runs}
    (tmp_path / "study.toml").write_text(tomli_w.dumps(study))
    code, out, err = called(monkeypatch, capsys, "reproduce", tmp_path / "study.toml", "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "run" / "table.json").read_text())
    assert list(found) == ["SGD", "SGD, untrained", "Adam", "Adam, untrained", "the truth"]
    assert ["".join(own) for own in found.values()] == ["01", "01", "01", "01", "0"]  # the seeds of each row
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in out.splitlines() if line.startswith("| ")}
    assert rows["the truth"] == "| the truth | 4.500 | 1.50 | |"
    assert rows["SGD, untrained"] == "| SGD, untrained | 0.000 (0.000–0.000) | 3.00 (3.00–3.00) | |"
    sgd = [own["error"] for own in found["SGD"].values()]
    assert f"| **{sum(sgd) / 2:.2f}** ({min(sgd):.2f}–{max(sgd):.2f}) |" in rows["SGD"]  # lower than any reference
    assert " ↑ (" in rows["Adam"]  # 20 steps of 0.01 end further off than the second reference
    differences = [
        one["slope"] - other["slope"]
        for one, other in zip(*(found[label].values() for label in ("Adam", "SGD")), strict=True)
    ]
    assert f"better than SGD by {-sum(differences) / 2:.3f} (" in rows["Adam"]
    (tmp_path / "study.toml").write_text(tomli_w.dumps({**study, "nois": 2.0}))
    with pytest.raises(
        l2lopt.UserError, match=r"study\.toml: nois: expected a known key, found 'nois'; did you mean 'n"
    ):
        comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "other")
    for label in ("SGD, untrained", "the truth"):
        named = [{**runs[0]}, {**runs[1], "label": label}]
        (tmp_path / "study.toml").write_text(tomli_w.dumps({**study, "runs": named}))
        with pytest.raises(l2lopt.UserError, match=r"expected labels that differ, found .*; give the run"):
            comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "other")
    (tmp_path / "study.toml").write_text(tomli_w.dumps({**study, "noise": "much"}))
    with pytest.raises(l2lopt.UserError, match=r"study\.toml: noise: expected a valid number, found 'much'"):
        comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "other")


def test_a_study_without_references_shows_the_test_metrics(tmp_path):
    (tmp_path / "own.toml").write_text(tomli_w.dumps(config("Line")))
    (tmp_path / "study.toml").write_text(tomli_w.dumps({"runs": [{"label": "a", "config": "own.toml"}]}))
    paths = comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "run")
    losses = [
        json.loads((tmp_path / "run" / f"a-{seed}" / "result.json").read_text())["metrics"]["loss"] for seed in range(3)
    ]
    spread = f"{sum(losses) / 3:.3f} ({min(losses):.3f}–{max(losses):.3f})"
    assert (
        paths[0].read_text() == f"| | seeds | parameters | test loss |\n|---|---|---|---|\n| a | 3 | 1 | {spread} |\n"
    )
    (tmp_path / "study.toml").write_text(tomli_w.dumps({"runs": [{"label": "a"}]}))
    with pytest.raises(l2lopt.UserError, match=r"study\.toml: config: expected a value, found none; add the key"):
        comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "my_lime:Line",
            "optimisee 'my_lime:Line': expected a module 'my_lime', found no module 'my_lime'; install it",
        ),
        ("my_line:Lime", "optimisee 'my_line:Lime': expected 'Lime' in my_line, found none; did you mean 'Line'?"),
        ("my_line:nothing", "optimisee 'my_line:nothing': expected an Optimisee, found int; derive it from"),
        ("my_line:Lines", "expected an option 'device', found none; add device to the arguments of Lines"),
    ],
)
def test_a_mistake_in_the_name_ends_in_one_line_and_code_2(tmp_path, monkeypatch, capsys, name, message):
    source = written(tmp_path, optimisee={"name": name})
    code, _, err = called(monkeypatch, capsys, "train", source, "--run", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "run").exists()


def test_no_module_of_the_library_knows_an_application():
    """Only the registry of optimisees is imported, and only by experiments."""
    root, allowed = Path(__file__).parents[2] / "l2lopt", {"OPTIMISEES", "artefact_files", "build", "class_of", "make"}
    allowed |= {"InMemory", "ModuleOptimisee"}  # anybody's model and samples, which are no application
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("optimisees.") for name in names), path
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "optimisees":
                assert (node.module, path.parent.name) == ("optimisees", "experiments"), path
                assert {alias.name for alias in node.names} <= allowed, path


def _changed(tmp_path, old, new):
    """The module with other code, as after an edit and in a new process."""
    (tmp_path / "my_line.py").write_text(LINE.replace(old, new))
    sys.modules.pop("my_line", None)
    importlib.invalidate_caches()


def test_a_study_whose_optimisers_code_has_changed_is_not_read_from_its_files(tmp_path):
    own = {**config("Line"), "optimiser": {"name": "my_line:descent", "lr": 0.02}}
    (tmp_path / "own.toml").write_text(tomli_w.dumps(own))
    (tmp_path / "study.toml").write_text(tomli_w.dumps({"runs": [{"label": "a", "config": "own.toml"}], "seeds": [0]}))
    (table, _), found = comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "run"), []
    found.append(table.read_text())
    _changed(tmp_path, "SGD(lr)", "SGD(3 * lr)")
    with pytest.raises(l2lopt.UserError, match=r"source of my_line = \S+, found source of my_line = \S+; put it back"):
        comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "run")
    (table, _) = comparison_study.reproduce(tmp_path / "study.toml", tmp_path / "again")
    assert found != [table.read_text()]


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ({"optimisee": "my_line:Line"}, r"0\.described\.batches = \S+, "),
        (
            {"optimisee": "quadratic", "validation": {"on": ["my_line:Line"]}},
            r"validation\.0\.described\.batches = \S+",
        ),
        ({"optimisee": "quadratic", "unroll": {"estimator": "my_line:Half"}}, r"estimator\.source of my_line = \S+"),
    ],
    ids=["problem", "validation", "estimator"],
)
def test_a_meta_training_goes_on_with_the_code_that_it_was_begun_with(tmp_path, given, differs):
    settings = {**given, "unroll": {"length": 2, **given.get("unroll", {})}, "meta": {"updates": 1}}
    settings["validation"] = {"seeds": 1, "horizons": [2], **given.get("validation", {})}
    run = l2lopt.meta_train(settings, tmp_path / "run")
    _changed(tmp_path, "3 * x", "4 * x")
    with pytest.raises(l2lopt.UserError, match=differs):
        l2lopt.meta_train(settings, run, resume=True)
