"""The learned optimisers that come with the package."""

import re
from pathlib import Path

import laws
import pytest
import torch
from rich.cells import cell_len
from safetensors.torch import load_file

import l2lopt
from l2lopt import optimisers, terminal
from l2lopt.core.errors import UserError
from l2lopt.evaluation.free_runs import run_free
from l2lopt.experiments.config import Config
from l2lopt.weights import files
from optimisees import mlp

from test_cli import called  # isort: skip

NAMES = ["coordinatewise-ihc-lstm", "coordinatewise-lstm", "ihc-lstm", "lstm"]
COORDINATEWISE, PER_TENSOR = NAMES[:2], NAMES[2:]


def test_they_are_listed():
    assert l2lopt.list_weights() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_how_they_were_made(name):
    header = files.header(name)
    training = header["training"]
    config = Config.model_validate(training["config"])
    assert config.optimiser["cell"] == header["optimiser"]["cell"] == name.removeprefix("coordinatewise-")
    assert (header["optimiser"]["name"] == "hierarchical") == (name in PER_TENSOR)
    assert min(training[key] for key in ("seconds", "inner_steps", "meta_updates", "best_update")) > 0
    assert (files.HOME / f"{name}.safetensors").stat().st_size < 100_000


@pytest.mark.parametrize("name", PER_TENSOR)
def test_the_headers_benchmark_is_that_of_the_readme(name):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"[+−][\d.]+ % \[[^\]]+\]", files.header(name)["training"]["benchmark"])
    assert len(said) == 5
    assert all(figure in readme for figure in said)


@pytest.mark.parametrize("name", COORDINATEWISE)
def test_the_header_has_comparisons(name):
    for rows in files.header(name)["training"]["comparisons"].values():
        shown = {row["optimiser"] for row in rows}
        assert {"LSTM", "IHC-LSTM", "control: the rule without its network", "adam"} <= shown


@pytest.mark.parametrize("name", NAMES)
def test_they_come_as_they_are_in_their_files(name):
    phi = {key: value.detach() for key, value in sorted(l2lopt.load(name).phi().items())}
    laws.assert_same(phi, dict(sorted(load_file(files.HOME / f"{name}.safetensors").items())))


@pytest.mark.parametrize("name", NAMES)
def test_they_train_a_network_they_have_not_seen(name):
    """In 100 steps much further than Adam at its usual rate; how they stand beside others is in their headers."""
    problem = mlp([24, 24], "relu")
    learned, adam = (
        float(run_free(rule, problem, [1, 2, 3], [100], ("train",)).losses["train"].mean())
        for rule in (files.load(name), optimisers.make("adam", lr=1e-3))
    )
    assert learned < 0.2 * adam


def test_a_name_goes_wherever_a_file_does(tmp_path):
    model = torch.nn.Linear(3, 2)
    by_name = l2lopt.LearnedOptimizer(model.parameters(), "lstm")
    by_path = l2lopt.LearnedOptimizer(model.parameters(), files.HOME / "lstm.safetensors")
    assert by_name.param_groups[0]["weights"] == by_path.param_groups[0]["weights"]
    config = {"optimisee": {"name": "mlp", "hidden": [4]}, "optimiser": {"weights": "lstm"}, "train": {"steps": 3}}
    assert l2lopt.train(config, tmp_path / "run").step == 3


def test_a_name_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="ltsm: expected a learned optimiser, found nothing; did you mean 'lstm'"):
        l2lopt.load("ltsm")


def test_the_command_line_shows_them(monkeypatch, capsys):
    code, out, _ = called(monkeypatch, capsys, "weights")
    assert code == 0
    assert [line.partition(":")[0] for line in out.splitlines()] == NAMES
    code, out, _ = called(monkeypatch, capsys, "weights", "coordinatewise-lstm")
    assert code == 0
    assert "control" in out


@pytest.fixture
def on_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(terminal.console, "_width", None)  # a width that was set would go before the variable


@pytest.mark.usefixtures("on_80_columns")
@pytest.mark.parametrize("name", [None, *NAMES])
def test_what_the_command_line_shows_fits_80_columns(monkeypatch, capsys, name):
    code, out, _ = called(monkeypatch, capsys, "weights", *([name] if name else []))
    assert (code, max(map(cell_len, out.splitlines())) <= 80) == (0, True)


@pytest.mark.usefixtures("on_80_columns")
def test_long_names_are_wrapped_and_nothing_of_them_is_lost(monkeypatch, capsys, tmp_path):
    long = "x" * 100
    lines = [
        {"optimiser": long, "split": "test", "horizon": 10**k, "mean": 0.5, "kind": "learned"} for k in range(4, 12)
    ]
    facts = {key: 10**40 for key in ("meta_updates", "inner_steps", "seconds")}
    files.save(optimisers.make("normalised-muon"), tmp_path / "mine", facts | {"comparisons": {"a b " * 40: lines}})
    code, out, _ = called(monkeypatch, capsys, "weights", tmp_path / "mine")
    shown = out.splitlines()
    assert (code, max(map(cell_len, shown)) <= 80) == (0, True)
    assert out.count("x") == 100 + str(tmp_path).count("x")
    assert "".join(out.split()).count("ab" * 40) == 1
