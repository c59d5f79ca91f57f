"""The package from outside: its names, its version, how little it loads, and what an installation finds by name."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

import l2lopt
from l2lopt import terminal
from l2lopt.experiments import config as configs
from l2lopt.parallel import processes
from l2lopt.weights import files

from test_cli import called  # isort: skip

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "matplotlib", "scipy", "numpy", "sklearn", "tensorboard"}
"""Packages that take long to import."""
LIGHT = [
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["trian"],
    ["train", "none.toml"],
    ["train", "digits-train", "--set", "train.stesp=3"],
    ["train", "digits-train", "--seed", "-1"],
    ["meta-train", "demo", "--set", "unroll.length=-3"],
    ["demo", "--set", "unroll.length"],
    ["evaluate", "."],
    ["plot", "nowhere"],
    ["sample", "nowhere"],
    ["reproduce", "nothing"],
    ["benchmark", "nothing"],
]
"""Commands that do no work: help, and mistakes."""


def after(code, folder):
    """The last line that a program prints, as a value."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return eval(done.stdout.splitlines()[-1])


def test_the_package_loads_little(tmp_path):
    loaded = after("import sys, l2lopt; dir(l2lopt); l2lopt.__version__; print(set(sys.modules))", tmp_path)
    assert not loaded & {*HEAVY, "pydantic", "rich"}


def test_help_and_mistakes_are_answered_before_what_works_is_loaded(tmp_path):
    code = f"""
import sys
from l2lopt import cli
found = []
for command in {LIGHT}:
    sys.argv = ["l2lopt", *command]
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code
    found.append((code, set(sys.modules) & {HEAVY}))
print(found)
"""
    found = after(code, tmp_path)
    assert [code for code, _ in found] == [0] * 3 + [2] * (len(LIGHT) - 3)
    assert not set().union(*(loaded for _, loaded in found))


def test_characters_that_a_terminal_does_not_know_are_replaced(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "l2lopt", "demo", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "8?8 digits" in done.stdout


def test_a_pytorch_that_cannot_distribute_is_one_process(monkeypatch):
    monkeypatch.setattr(processes, "dist", SimpleNamespace(is_available=lambda: False))
    with processes.together():
        assert (processes.rank(), processes.ranks()) == (0, 1)


def test_only_public_names_are_offered():
    assert dir(l2lopt) == sorted([*l2lopt.__all__, "__version__"])
    assert set(l2lopt.__all__) <= set(l2lopt._HOME)
    assert l2lopt.paint is l2lopt.sample_images
    with pytest.raises(AttributeError, match="no attribute 'pant'"):
        _ = l2lopt.pant


def test_there_is_one_version(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert l2lopt.__version__ == version("l2lopt") == project["version"]
    assert called(monkeypatch, capsys, "--version") == (0, f"l2lopt {project['version']}\n", "")
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["digits-train", "configs/digits-train.toml"])
def test_a_shipped_config_runs_from_an_empty_folder(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    changes = ["--set", "train.steps=2", "--set", "train.warm_up=0"]
    code, out, err = called(monkeypatch, capsys, "train", name, *changes)
    assert (code, err) == (0, "")
    assert "parameters of step 2 of 2" in out
    assert configs.load("runs/digits-train/config.toml", kind=configs.TrainConfig).train.steps == 2


def test_a_shipped_file_is_found_by_name_and_by_its_path_and_a_file_of_ones_own_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = configs.shipped("studies/fig3.toml")
    for name in ("fig3", "configs/studies/fig3.toml", Path("./configs/studies/fig3.toml")):
        assert configs.find(name, "studies", "a study") == shipped
    for name in ("studies/fig3.toml", "fig3.toml", "configs/../configs/demo.toml", "x" * 300):
        with pytest.raises(l2lopt.UserError, match="expected a study, found"):
            configs.find(name, "studies", "a study")
    Path("configs/studies").mkdir(parents=True)
    for name in ("fig3", "configs/studies/fig3.toml"):
        Path(name).touch()
        assert configs.find(name, "studies", "a study") == Path(name)


@pytest.mark.parametrize("name", [None, *files.list_weights()])
def test_what_is_known_of_weights_fits_80_columns(monkeypatch, capsys, name):
    monkeypatch.setattr(terminal.console, "width", 80)
    code, out, _ = called(monkeypatch, capsys, "weights", *([] if name is None else [name]))
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    if name is not None and name.startswith("coordinatewise"):
        assert "control: the rule without its network" in out  # in one line, as the heads are
        assert "step 1,000" in out
    elif name is not None:
        assert "| the harness, tuned on each task | −4.0 % [−4.8, −3.3] |" in out
        assert "- GPTs: " in out
