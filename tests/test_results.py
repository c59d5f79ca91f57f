"""Reported results: each says how it was made by a command that exists, and what is said of them is in their files."""

import csv
import re
from pathlib import Path

import pytest
from scipy import stats
from test_docs import check_commands, fences, without_code

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "runs" / "reference"
FOLDERS = sorted(path.parent.name for path in REFERENCE.glob("*/README.md"))


def read(path):
    return (REFERENCE / path).read_text(encoding="utf-8")


def test_every_result_says_how_it_was_made():
    without = {path.name for path in REFERENCE.iterdir()} - set(FOLDERS)
    assert without == {"tasks"}, "a README.md is due, or the page that includes the folder"
    for folder in FOLDERS:
        text = read(f"{folder}/README.md")
        assert text.startswith("# "), folder
        assert re.search(
            r"\bl2lopt (reproduce|benchmark|meta-train|train|demo) |\bl2lopt demo\n|tests/benchmarks/bench_", text
        ), folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_commands_are_right(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = read(f"{folder}/README.md")
    for language, _, code in fences(text):
        assert language == "bash"
        check_commands(code)
    paths = re.findall(r"\b((?:tests|configs)/[\w./-]+\.(?:py|toml))\b", text)
    assert all((ROOT / path).is_file() for path in paths), paths


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_shows_in_the_documentation(folder):
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(read(f"{folder}/README.md")))
    assert all(link.startswith("https://") for link in links), f"which the documentation cannot follow: {links}"


def missing_figures(text):
    """The figures, with and without intervals, of a text about the small benchmark that its report does not have."""
    report = read("benchmark-small/report.md")
    for value, *bounds in re.findall(r"([−+][\d.]+ %) \[(−?[\d.]+), (−?[\d.]+)\]", text):
        low, high = (bound if bound[0] == "−" or float(bound) == 0 else f"+{bound}" for bound in bounds)
        if f"| {value} | {low} % to {high} % |" not in report:
            yield value, low, high
    yield from (value for value in re.findall(r"[−+][\d.]+ %", text) if f"| {value} |" not in report)
    yield from (found for found in re.findall(r"\b(?:\d+ of \d+\b|\d+\.\d+×)", text) if found not in report)


def test_what_is_said_of_the_small_benchmark_is_in_its_report():
    said = read("benchmark-small/README.md").partition("What it says")[2]
    assert len(re.findall(r"[−+][\d.]+ % \[", said)) == 10
    assert list(missing_figures(said)) == []


def test_figures_that_a_report_does_not_have_are_found():
    said = "| Prodigy | +2.9 % [2.1, 4.3] |, +99.9 %, 16 of 15; and +2.9 % [2.1, 4.4], 8 of 15"
    assert list(missing_figures(said)) == [("+2.9 %", "+2.1", "+4.3"), "+99.9 %", "16 of 15"]


def difference(first, second, split):
    """Mean paired difference of two optimisers at the end of `fig3-width16`, with Student's 95 % interval."""
    losses = {}
    for row in csv.DictReader(read("fig3-width16/evaluation.csv").splitlines()):
        if (row["split"], row["step"]) == (split, "1000"):
            losses.setdefault(row["optimiser"], {})[row["seed"]] = float(row["loss"])
    paired = [losses[first][seed] - loss for seed, loss in losses[second].items()]
    mean = sum(paired) / len(paired)
    low, high = stats.t.interval(0.95, len(paired) - 1, mean, stats.sem(paired))
    return f"{mean:+.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")


OTHERS = {"SGD": "sgd", "Adam": "adam", "Muon": "muon", "the harness": "harness"}
RULES = ("LSTM per tensor", "IHC-LSTM per tensor")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("line", "pair"),
    [
        *((f"{rule} against {said}", (rule, name)) for rule in RULES for said, name in OTHERS.items()),
        ("IHC-LSTM against LSTM, per tensor", ("IHC-LSTM per tensor", "LSTM per tensor")),
    ],
)
def test_differences_of_figure_3_are_those_of_its_losses(line, pair, split):
    said = re.search(rf"^\| {line} \| (.*) \| (.*) \|$", read("fig3-width16/README.md"), re.M)
    assert said[1 + ("train", "test").index(split)] == difference(*pair, split)
