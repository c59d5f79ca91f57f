"""Studies and benchmarks made once more, in a folder and a process that have seen others before."""

import csv
import os
import sys
import time

import pytest
import test_training_study
import tomli_w

import l2lopt
from l2lopt.experiments import benchmark as benchmarks
from l2lopt.experiments import comparison_study, run_folder

CHOICE = {"name": "quadratic", "size": 3}
ADAM = {"optimiser": "adam", "rates": [0.1], "untuned": 0.1}

DATA = """
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

from l2lopt.experiments.make_optimisee import make_optimisee


def made(device="cpu"):
    factor = float(Path(__file__).with_name("factor.txt").read_text())
    inputs = torch.arange(40.0)[:, None] / 40
    return make_optimisee(lambda: torch.nn.Linear(1, 1), mse_loss, (inputs, factor * inputs), batch_size=8)
"""


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch):
    monkeypatch.setattr(benchmarks, "write_report", lambda *_: [])
    monkeypatch.setattr(benchmarks, "write_board", lambda *_: None)
    monkeypatch.setattr(run_folder, "draw_evaluation", lambda *_: [])


def benchmark(folder, choice=CHOICE):
    changes = ["seeds=1", "tuning_seeds=1"]
    given = {"optimisers": {"adam": ADAM}, "steps": 2, "changes": changes, "cache": folder / "cache"}
    return l2lopt.benchmark(folder=folder / "run", tasks={"own": choice}, **given)


def study(folder, choice=CHOICE):
    """A comparison of an optimiser as it is with a baseline."""
    evaluation = {"seeds": 1, "steps": 2, "horizons": [2], "multipliers": []}
    evaluation["baselines"] = [{"optimiser": "adam", "rates": [0.1]}]
    own = {"threads": 1, "optimisee": choice, "evaluation": evaluation}
    (folder / "own.toml").write_text(tomli_w.dumps(own))
    taken = {"label": "descent", "config": "own.toml", "optimiser": {"name": "sgd", "lr": 0.1}, "tuned": False}
    made = {"meta_seeds": [0], "problems": [{"label": "own"}], "optimisers": [taken]}
    (folder / "compared.toml").write_text(tomli_w.dumps(made))
    return comparison_study.reproduce(folder / "compared.toml", folder / "run", cache=folder / "cache")


def training_study(folder):
    source = test_training_study.written(folder, "torch.optim.SGD")
    return comparison_study.reproduce(source, folder / "run")


@pytest.mark.parametrize("make", [benchmark, study, training_study])
def test_what_killed_processes_have_left_goes(tmp_path, make):
    for name in ("run/own/.free-run-0123456789ab.json", "cache/.0a1b2c3d-0123456789ab.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - 4000,) * 2)
    make(tmp_path)
    assert not list((tmp_path / "run").rglob(".free-run-*"))
    assert bool(list((tmp_path / "cache").rglob(".0a1b2c3d-*"))) == (make is training_study)


def losses(made, folder):
    """The losses of all optimisers at the end."""
    if not isinstance(made, list):
        return [run.losses["test"][2].tolist() for run in made.runs]
    with (folder / "run" / "own" / "evaluation.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("make", [benchmark, study])
def test_data_that_have_changed_since_are_read_again(tmp_path, monkeypatch, make):
    (tmp_path / "my_data.py").write_text(DATA)
    monkeypatch.syspath_prepend(tmp_path)
    factor, choice = tmp_path / "factor.txt", {"name": "my_data:made"}
    factor.write_text("1.0")
    first = losses(make(tmp_path, choice), tmp_path)
    factor.write_text("9.0")
    second = losses(make(tmp_path, choice), tmp_path)
    assert second != first
    factor.write_text("1.0")
    assert losses(make(tmp_path, choice), tmp_path) == first
    sys.modules.pop("my_data")
