"""Reported results: each says how it was made by a command that exists, and what is said of them is in their files."""

import csv
import json
import math
import re
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest
import torch
from scipy import stats
from test_docs import check_commands, fences, without_code

import l2lopt
from l2lopt.core.layout import Layout

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
    assert len(re.findall(r"[−+][\d.]+ % \[", said)) == 9
    assert list(missing_figures(said)) == []


def test_figures_that_a_report_does_not_have_are_found():
    said = "| Prodigy | +3.3 % [2.1, 5.0] |, +99.9 %, 16 of 15; and +3.3 % [2.1, 5.1], 8 of 15"
    assert list(missing_figures(said)) == [("+3.3 %", "+2.1", "+5.0"), "+99.9 %", "16 of 15"]


def difference(first, second, split, own=None):
    """Mean paired difference of two optimisers at the end of `fig3-width16`, with Student's 95 % interval.

    `own` are losses by seed in the place of the first one's, of the networks that are compared.
    """
    losses = {}
    for row in csv.DictReader(read("fig3-width16/evaluation.csv").splitlines()):
        if (row["split"], row["step"]) == (split, "1000"):
            losses.setdefault(row["optimiser"], {})[row["seed"]] = float(row["loss"])
    own = losses[first] if own is None else own
    paired = [loss - losses[second][seed] for seed, loss in own.items()]
    mean, low, high = interval(paired)
    return f"{mean:+.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")


def interval(values):
    """The mean with the ends of Student's 95 % interval."""
    mean = fmean(values)
    return mean, *stats.t.interval(0.95, len(values) - 1, mean, stats.sem(values))


OTHERS = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adamw",
    "Muon": "muon",
    "the harness": "harness",
    "the harness, S = 0.04": "harness, S = 0.04",
}
RULES = {" per tensor": OTHERS, ", the paper's rule": ("SGD", "Adam", "AdamW", "Muon")}
CELLS = ("LSTM", "IHC-LSTM")
UNTRAINED = ("2:df7854cce81dc514", "2:70c176f49fcf12c4")
"""The additive rule before meta-training, of both cells, as the files of its runs name it."""
NETWORKS = (1284150548488319988, 6252209983638861168)
"""Seeds of the first two networks."""


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("line", "pair"),
    [
        *(
            (f"{cell}{rule} against {said}", (f"{cell}{rule}", OTHERS[said]))
            for rule, others in RULES.items()
            for cell in CELLS
            for said in others
        ),
        *(
            (f"{rule} against itself untrained", (rule, f"{rule}, untrained"))
            for rule in (f"{cell}, the paper's rule" for cell in CELLS)
        ),
        ("the harness against Muon", ("harness", "muon")),
        ("IHC-LSTM against LSTM, per tensor", ("IHC-LSTM per tensor", "LSTM per tensor")),
        ("IHC-LSTM against LSTM, the paper's rule", ("IHC-LSTM, the paper's rule", "LSTM, the paper's rule")),
    ],
)
def test_differences_of_figure_3_are_those_of_its_losses(line, pair, split):
    said = re.search(rf"^\| {line} \| (.*) \| (.*) \|$", read("fig3-width16/README.md"), re.M)
    assert said[1 + ("train", "test").index(split)] == difference(*pair, split)
    if pair[1] in ("sgd", "adam") or line.startswith("IHC-LSTM against LSTM"):
        assert difference(*pair, split) in (ROOT / "docs/claims.md").read_text(encoding="utf-8")


def test_rates_beside_the_chosen_ones_leave_every_meta_trained_rule_ahead():
    said, found = re.sub(r"\s+", " ", read("fig3-width16/README.md")), {}
    for path in (REFERENCE / "fig3-width16" / "runs").glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        work = json.loads(run["work"])
        if (work.get("optimiser"), work["rates"]) in (("sgd", 0.316), ("momentum", 0.0316)) and len(run["losses"]) == 2:
            for split, (*_, last) in run["losses"].items():
                found.setdefault((work["optimiser"], split), []).append(last[0])
    assert [len(losses) for losses in found.values()] == [10] * 4
    ends = {key: fmean(losses) for key, losses in found.items()}
    sgd, momentum = ([f"{ends[name, split]:.2f}" for split in ("train", "test")] for name in ("sgd", "momentum"))
    assert "SGD at 0.316 ends at {} and {}, above".format(*sgd) in said
    assert "momentum at 0.0316 for either loss at {} and {}:".format(*momentum) in said
    learned = {}
    for row in csv.DictReader(
        [*read("fig3-width16/evaluation.csv").splitlines(), *read("fig3-width16/additive.csv").splitlines()[1:]]
    ):
        if row["step"] == "1000" and "LSTM" in row["optimiser"] and "untrained" not in row["optimiser"]:
            learned.setdefault((row["optimiser"], row["split"]), []).append(float(row["loss"]))
    assert len(learned) == 12
    for (_, split), losses in learned.items():
        assert fmean(losses) < min(ends["sgd", split], ends["momentum", split])


def test_the_validations_of_three_meta_seeds_are_those_that_were_made():
    found = {}
    for row in csv.DictReader(read("fig3-width16/meta-training.csv").splitlines()):
        found.setdefault((row["meta_seed"], row["cell"]), []).append(float(row["score"]))
    assert len(found) == 6
    text = read("fig3-width16/README.md")
    for (seed, cell), scores in found.items():
        numbers = " | ".join(f"{score:.3f}" for score in [*scores, min(scores) - scores[0]]).replace("-", "−")
        assert f"| {seed}, {cell} | {numbers} |" in text
    lstm, ihc_lstm = ([min(found[seed, cell]) for seed in "012"] for cell in CELLS)
    mean, low, high = interval([a - b for a, b in zip(ihc_lstm, lstm, strict=True)])
    assert f"by {-mean:.3f} in the mean, 95 % interval −{high:.3f} to {-low:.3f} " in text
    said = f"the validation's score of three meta-seeds −{-mean:.3f} [−{-low:.3f}, {high:.3f}];"
    assert said in (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    gains = {cell: interval([found[seed, cell][0] - min(found[seed, cell]) for seed in "012"]) for cell in CELLS}
    shown = {cell: f"{{:.3f}} [{{:.3f}}, {{:.3f}}] for the {cell}".format(*gain) for cell, gain in gains.items()}
    assert f"gains is {shown['IHC-LSTM']} and {shown['LSTM']}".replace("[-", "[−") in text


def test_the_validations_of_the_additive_rule_are_those_that_were_made():
    text = read("fig3-width16/README.md").partition("**The additive rule**")[2]
    gated = {}
    for row in csv.DictReader(read("fig3-width16/meta-training.csv").splitlines()):
        if row["meta_seed"] == "0":
            gated.setdefault(row["cell"], []).append(float(row["score"]))
    for cell in CELLS:
        records = [json.loads(line) for line in read(f"fig3-width16/additive-{cell.lower()}.jsonl").splitlines()]
        scores = {record["step"]: record["score"] for record in records if record["stage"] == "validation"}
        assert [*scores] == [0, 75, 150, 225, 300]
        best = min(scores.values())
        numbers = " | ".join(f"{score:.3f}" for score in [*scores.values(), best - min(gated[cell])])
        assert f"| {cell} | {numbers.replace('-', '−')} |" in text
        path = REFERENCE / "fig3-width16" / f"additive-{cell.lower()}.safetensors"
        assert l2lopt.weights.files.header(path)["training"]["score"] == best


def test_the_losses_of_the_additive_rule_are_those_that_are_said():
    text = read("fig3-width16/README.md").partition("**The additive rule**")[2]
    claims = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    losses = {}
    for row in csv.DictReader(read("fig3-width16/additive.csv").splitlines()):
        own = losses.setdefault((row["optimiser"].partition(",")[0], row["split"], row["step"]), {})
        own[row["seed"]] = float(row["loss"])
    for cell in CELLS:
        own = {split: losses[cell, split, "1000"] for split in ("train", "test")}
        assert [*own["train"]] == [*own["test"]] == [*"0123456789"]
        means = [f"{fmean(own[split].values()):.2f}" for split in own]
        assert re.search(rf"the {cell} (ends )?at {means[0]} (in training\s+)?and {means[1]} ", text)
        others = {said: OTHERS[said] for said in ("SGD", "Adam", "AdamW", "Muon")}
        for said, other in {**others, "the paper's rule": f"{cell}, the paper's rule"}.items():
            shown = [difference(None, other, split, own[split]) for split in own]
            assert f"| {cell}, additive rule against {said} | {' | '.join(shown)} |" in text
            if said in ("SGD", "Adam"):
                assert all(one in claims for one in shown)
    shown = []
    for split in ("train", "test"):
        pairs = zip(*(losses[cell, split, "1000"].values() for cell in CELLS), strict=True)
        mean, low, high = interval([other - one for one, other in pairs])
        shown.append(f"{mean:+.2f} [{low:.2f}, {high:.2f}]".replace("-", "−"))
    assert f"| IHC-LSTM against LSTM, additive rule | {' | '.join(shown)} |" in text


def test_the_additive_rule_ends_above_guessing_without_its_meta_training():
    text, ends = re.sub(r"\s+", " ", read("fig3-width16/README.md")), {}
    for path in (REFERENCE / "fig3-width16" / "runs").glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        work = json.loads(run["work"])
        if work.get("rule") in UNTRAINED:
            ends[work["rule"], work["seeds"][0]] = run["losses"]["train"][-1][0]
    shown = [f"{ends[rule, seed]:.2f}" for rule in UNTRAINED for seed in NETWORKS]
    assert "at {} and {} in training loss with the LSTM and at {} and {} with the IHC-LSTM".format(*shown) in text
    assert all(float(loss) > math.log(10) for loss in shown)


def test_what_further_meta_training_has_brought_is_what_was_recorded():
    text = read("fig3-width16/README.md")
    agreed = []
    for cell in CELLS:
        records = [json.loads(line) for line in read(f"fig3-width16/further-{cell.lower()}.jsonl").splitlines()]
        scores = [record["score"] for record in records if record["stage"] == "validation"]
        assert f"| {cell} | {' | '.join(f'{score:.3f}' for score in scores)} |" in text
        updates = [record["agreement"] for record in records if record["stage"] == "meta-train"]
        assert len(updates) == 20
        agreed.append(f"{fmean(updates):.3f}")
    assert " and ".join(agreed) + " of their mean squared norm" in text
    header = l2lopt.weights.files.header(REFERENCE / "fig3-width16" / "ihc-lstm-further.safetensors")["training"]
    assert (header["best_update"], header["score"]) == (20, scores[-1])


def test_the_rule_that_was_meta_trained_further_has_the_losses_that_are_said():
    further = {}
    for row in csv.DictReader(read("fig3-width16/meta-trained-further.csv").splitlines()):
        further.setdefault((row["split"], row["step"]), {})[row["seed"]] = float(row["loss"])
    text = read("fig3-width16/README.md").replace("\n", " ")
    means = [fmean(further[split, "1000"].values()) for split in ("train", "test")]
    assert "ends here at {:.3f} in training and {:.3f} in test loss".format(*means) in text
    for other, said in (("IHC-LSTM per tensor", "against itself as shipped that is"), ("muon", "against Muon")):
        shown = [difference(None, other, split, further[split, "1000"]) for split in ("train", "test")]
        assert f"{said} {' and '.join(shown)}" in text


COLUMNS = {
    "`lstm`": "LSTM per tensor",
    "`ihc-lstm`": "IHC-LSTM per tensor",
    "harness": "harness",
    "Muon": "muon",
    "AdamW": "adamw",
    "Adam": "adam",
    "SGD": "sgd",
}
"""What the README's columns are called in the reports."""


def readme_row(folder):
    """A line of the README's table by optimiser, less those without a figure."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = re.search(rf"^\| \[[^\]]*\]\(\S*/{folder}\)[^|]*\| (.*) \|$", text, re.M)[1].split(" | ")
    assert "| | " + " | ".join(COLUMNS) + " |" in text
    return {name: cell for name, cell in zip(COLUMNS.values(), cells, strict=True) if cell != "–"}


def test_the_readme_has_the_losses_of_figure_3():
    table = dict(re.findall(r"^\| ([^|]*) \| [^|]* \| ([\d.]+)[^|]*\|$", read("fig3-width16/table.md"), re.M))
    assert readme_row("fig3-width16") == {name: table[name] for name in COLUMNS.values()}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"S = 0.04, from which the rules begin, the harness has {table['harness, S = 0.04']} at width 16" in text
    own = [table[f"{cell}, the paper's rule"] for cell in CELLS]
    assert re.search(r"a network per coordinate, has {} \(LSTM\) and\s+{} \(IHC-LSTM\)".format(*own), text)
    ends = {cell: [] for cell in CELLS}
    for row in csv.DictReader(read("fig3-width16/additive.csv").splitlines()):
        if (row["split"], row["step"]) == ("test", "1000"):
            ends[row["optimiser"].partition(",")[0]].append(float(row["loss"]))
    additive = [f"{fmean(losses):.2f}" for losses in ends.values()]
    assert "additive updates in place of its gates {} and {}, below tuned Adam".format(*additive) in text


def test_the_readme_has_the_perplexities_of_the_language_model():
    text, page = read("ptb-optimisers/table.md"), read("ptb-optimisers/README.md")
    rows = re.findall(r"^\| ([^|,]*?)(?:, [\d.]+, cosine)? \|.* \| ([\d.]+) \| [\d,]+ \| [^|]*\|$", text, re.M)
    best = {}
    for name, value in rows:
        best[name.lower()] = min(float(value), best.get(name.lower(), 1e9))
    row = readme_row("ptb-optimisers")
    assert row == {name: str(best[name.lower()]) for name in row}
    # What the first three columns were before their step of embeddings was chosen on this run.
    before = re.search(r"the harness ended at ([\d.]+), the LSTM at ([\d.]+) and the IHC-LSTM at\s+([\d.]+),", page)
    said = f"before they ended at {before[2]}, {before[3]} and {before[1]}."
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_row_of_table_ii_is_as_its_records_say():
    text = re.sub(r"\s+", " ", read("ptb-irc-gru/README.md"))
    rows = list(csv.DictReader(read("ptb-irc-gru/perplexity.csv").splitlines()))
    assert [int(row["epoch"]) for row in rows] == list(range(51))
    told = re.search(r"\| after epoch \| ((?:\d+ \| )+)", text)[1].rstrip("| ").split(" | ")
    for split in ("training", "validation"):
        shown = [f"{float(rows[int(epoch)][split]):#.3g}".rstrip(".") for epoch in told]
        assert f"| {split} | {' | '.join(shown)} |" in text
    result = json.loads(read("ptb-irc-gru/result.json"))
    model = result["optimisee"]
    assert (model["cell"], model["autocast"], result["diverged"]) == ("irc-gru", True, None)
    assert result["step"] == result["steps"] == int(rows[-1]["step"])
    test, valid = result["metrics"]["perplexity"], [float(row["validation"]) for row in rows]
    assert f"| test | {test:.2f} | 76.51 |" in text
    assert f"| validation | {valid[-1]:.2f} |" in text
    assert f"falls from {valid[30]:.1f} to {valid[31]:.1f}, and by {valid[31] - valid[50]:.1f} over" in text
    assert f"passed by {76.51 - test:.1f}," in text
    assert f"in place of {valid[1]:.1f} and {valid[2]:.1f}, at" in text
    lines = (ROOT / "docs/claims.md").read_text(encoding="utf-8").splitlines()
    claim = next(line for line in lines if line.startswith("| IRC-GRU 76.51,"))
    assert f" {test:.2f} in the test" in claim


def losses_of_the_full_network():
    """(optimiser, split, step) → the losses on both networks."""
    losses = {}
    for name in ("evaluation", "additive", "additive-further"):
        for row in csv.DictReader(read(f"fig3-batch32/{name}.csv").splitlines()):
            losses.setdefault((row["optimiser"], row["split"], int(row["step"])), []).append(float(row["loss"]))
    return losses


def on_both_networks(losses, learned, other):
    """Of training and test loss: the differences with their interval, and this alone."""
    found = []
    for split in ("train", "test"):
        pairs = zip(losses[learned, split, 1000], losses[other, split, 1000], strict=True)
        differences = [one - other for one, other in pairs]
        shown = "{:.2f} [{:.2f}, {:.2f}]".format(*interval(differences)).replace("-", "−")
        found.append((", ".join(f"{value:.2f}" for value in differences).replace("-", "−") + f": {shown}", shown))
    return found


def test_what_is_said_of_the_full_network_is_in_its_losses():
    losses = losses_of_the_full_network()
    text, (lstm, rule) = read("fig3-batch32/README.md"), ("LSTM per tensor", "IHC-LSTM per tensor")
    lines = (ROOT / "docs/claims.md").read_text(encoding="utf-8").splitlines()
    claims = {
        said: next(line for line in lines if "fig3-batch32" in line and f"below {said} on the full" in line)
        for said in ("SGD", "Adam")
    }
    rows = {
        f"{learned} against {said}": (learned, OTHERS[said], claims.get(said, claims["SGD"]))
        for learned, said in product((lstm, rule), ("SGD", "Adam", "the harness", "Muon"))
    }
    of_cells = next(line for line in lines if line.startswith("| The IHC-LSTM is below the LSTM |"))
    rows["IHC-LSTM against LSTM, per tensor"] = rule, lstm, of_cells
    for said, (learned, other, claim) in rows.items():
        cells = on_both_networks(losses, learned, other)
        assert all(shown in claim for _, shown in cells)
        assert f"| {said} | {cells[0][0]} | {cells[1][0]} |" in text
    told = re.search(
        r"the IHC-LSTM is ([\d.]+), SGD's ([\d.]+) and Adam's ([\d.]+); the\s+LSTM's ([\d.]+), behind Adam's. "
        r"On the second they are ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+)\.",
        text,
    )
    order = rule, "sgd", "adam", lstm
    assert told.groups() == tuple(f"{losses[name, 'train', 251][k]:.2f}" for k in (0, 1) for name in order)
    names = (lstm, rule, "sgd", "adam", "harness", "muon")
    test = {name: fmean(losses[name, "test", 1000]) for name in names}
    assert readme_row("fig3-batch32") == {name: f"{value:#.3g}" for name, value in test.items()}
    ends = [fmean(losses[name, split, 1000]) for name in ("muon", "harness") for split in ("train", "test")]
    assert re.search(r"  Muon ends at {:.3f} and {:.3f}, ".format(*ends), text)
    assert "network ends at {:.3f} and {:.3f}, between".format(*ends[2:]) in text
    assert "test loss {:.3g}, {:.3g}, {:.3g} and {:.3g};".format(*list(test.values())[:4]) in claims["SGD"]


def test_what_is_said_of_the_additive_rule_on_the_full_network_is_in_its_losses():
    losses, (lstm, rule) = losses_of_the_full_network(), (f"{cell}, additive rule" for cell in CELLS)
    text = read("fig3-batch32/README.md").partition("**A rule per coordinate at this size.**")[2]
    lines = (ROOT / "docs/claims.md").read_text(encoding="utf-8").splitlines()
    claim = next(line for line in lines if "with the additive rule" in line and "on the full ResNet-34" in line)
    rows = {f"{one} against {said}": (one, OTHERS[said]) for one in (lstm, rule) for said in ("SGD", "Adam", "Muon")}
    rows["IHC-LSTM against LSTM, additive rule"] = rule, lstm
    for said, pair in rows.items():
        cells = on_both_networks(losses, *pair)
        assert f"| {said} | {cells[0][0]} | {cells[1][0]} |" in text
        assert all(shown in claim for _, shown in cells) or "Muon" in said
    early = "with {:.2f} and {:.2f} in training loss, SGD at {:.2f} and Adam at {:.2f}, and lose"
    assert early.format(*(fmean(losses[name, "train", 251]) for name in (lstm, rule, "sgd", "adam"))) in text
    for name in (lstm, rule):
        ends = [f"{fmean(losses[name, split, 1000]):.2f}" for split in ("train", "test")]
        assert "{} and {}".format(*ends) in re.sub(r"\s+", " ", text)


def test_other_rates_did_on_the_full_network_what_is_said():
    text, found = read("fig3-batch32/README.md"), {}
    for row in csv.DictReader(read("fig3-batch32/rates.csv").splitlines()):
        if row["step"] == "1000":
            key = row["optimiser"], float(row["rate"]), int(row["seed"])
            found.setdefault(key, []).append(float(row["loss"]))
    own = losses_of_the_full_network()
    for said, (there, best) in {"SGD": (0.1, 0.1), "Adam": (0.001, 0.000316), "Muon": (0.0316, 0.01)}.items():
        name = said.lower()
        for seed in (0, 1):
            found[name, best, seed] = [own[name, split, 1000][seed] for split in ("train", "test")]
        rates = sorted(rate for other, rate, seed in found if (other, seed) == (name, 0))
        below = [there / 10] if there > best else []
        assert rates == pytest.approx([*below, there / 10**0.5, there, there * 10**0.5], rel=2e-3)
        shown = [" and ".join(f"{loss:#.3g}" for loss in found[name, rate, 0]) for rate in rates]
        assert f"| {said}, {there} | {'' if below else '– | '}{' | '.join(shown)} |" in text
        for split in (0, 1):
            order = sorted(rates, key=lambda rate: found[name, rate, 0][split])
            assert order[said == "Muon"] == best
    text = re.sub(r"\s+", " ", text)

    def lower(name, was, now, seed):
        pairs = zip(found[name, was, seed], found[name, now, seed], strict=True)
        return "{:.2f} and {:.2f}".format(*(one - other for one, other in pairs))

    first, second = ([lower("adam", 0.001, 0.000316, k), lower("muon", 0.0316, 0.01, k)] for k in (0, 1))
    assert "Adam ends {} lower and Muon {}, and on the second".format(*first) in text
    assert "not looked at for it, {}, and {}. So".format(*second) in text
    assert f"ends {lower('muon', 0.01, 0.00316, 0)} below 0.01 on the first network" in text
    names = ("LSTM per tensor", "IHC-LSTM per tensor", "harness")
    ends = ["{:.3f} and {:.3f}".format(*(own[name, split, 1000][0] for split in ("train", "test"))) for name in names]
    assert "{} (LSTM) and {} (IHC-LSTM), the harness at {}.".format(*ends) in text


def test_what_eight_meta_updates_on_the_full_network_did_is_in_their_records_and_losses():
    losses = losses_of_the_full_network()
    text = read("fig3-batch32/README.md").partition("**Meta-trained further at this size.**")[2]
    lines = (ROOT / "docs/claims.md").read_text(encoding="utf-8").splitlines()
    claim = next(line for line in lines if "meta-trained further on the full ResNet-34" in line)
    for cell in CELLS:
        name = f"additive-{cell.lower()}-further"
        records = [json.loads(line) for line in read(f"fig3-batch32/{name}.jsonl").splitlines()]
        updates = [f"{record['meta_loss']:.2f}" for record in records if record["stage"] == "meta-train"]
        before, after = (record["score"] for record in records if record["stage"] == "validation")
        assert f"| {cell} | {' | '.join(updates)} | {before:.3f} | {after:.3f} |" in text
        header = l2lopt.weights.files.header(REFERENCE / "fig3-batch32" / f"{name}.safetensors")["training"]
        assert (header["score"], header["meta_updates"]) == (after, len(updates)) == (after, 8)
        learned = f"{cell}, additive rule, further"
        others = {said: OTHERS[said] for said in ("SGD", "Adam", "Muon")}
        for said, other in {**others, "the rule it began with": f"{cell}, additive rule"}.items():
            cells = on_both_networks(losses, learned, other)
            assert f"| {cell} against {said} | {cells[0][0]} | {cells[1][0]} |" in text
            assert all(shown in claim for _, shown in cells) or said not in ("SGD", "Adam")
            assert not any("−" in cell.partition(":")[0] for cell, _ in cells)  # behind on either network
    cells = on_both_networks(losses, *(f"{cell}, additive rule, further" for cell in reversed(CELLS)))
    assert f"| IHC-LSTM against LSTM, meta-trained further | {cells[0][0]} | {cells[1][0]} |" in text
    of_cells = next(line for line in lines if line.startswith("| The IHC-LSTM is below the LSTM |"))
    assert f"meta-trained further there {cells[0][1]} and {cells[1][1]};" in of_cells
    names = [*(f"{cell}, additive rule{more}" for more in (", further", "") for cell in CELLS), "sgd", "adam"]
    at = {step: [f"{fmean(losses[name, 'train', step]):.2f}" for name in names] for step in (63, 251)}
    said = "at step 63 at {} (LSTM) and {} (IHC-LSTM) in training loss, where before they are at {} and {}, and"
    text = re.sub(r"\s+", " ", text)
    assert said.format(*at[63]) in text
    assert "at step 251 at {} and {}, before {} and {}, SGD {} and Adam {}.".format(*at[251]) in text
    assert "at step 251, training loss: {}, {}, SGD {} and Adam {} |".format(*at[251][:2], *at[251][4:]) in claim


@pytest.mark.parametrize("cell", ["LSTM", "IHC-LSTM"])
def test_the_rates_that_the_papers_rule_learned_are_those_of_its_weights(cell):
    """s i of the update −(1 − f)∘θ − s i∘g, the mean of 400 coordinates after 100 gradients of one size."""
    rule = l2lopt.load(REFERENCE / f"fig3-width16/{cell.lower()}.safetensors")
    text = read("fig3-width16/README.md").partition("| size of the gradients |")[2]
    said = re.search(rf"^\| {cell} \| (.*) \|$", text, re.M)
    scale = rule.rule.scale * float(torch.exp(10 * rule.rule.log_scale.detach()))
    drawn = torch.Generator().manual_seed(0)
    params, found = 0.05 * torch.randn(400, generator=drawn), []
    for size in (1e-5, 1e-3, 1e-2, 1e-1):
        state = rule.init(Layout(("w",), ((400,),)), like=params)
        with torch.no_grad():
            for step in range(1, 101):
                grads, loss = size * torch.randn(400, generator=drawn), torch.tensor(2.3 * step**-0.08)
                _, state = rule.update(grads, state, params, loss=loss)
        found.append(scale * float(state.coordinates["rule.input"].mean()))
        assert (1 - state.coordinates["rule.forget"]).mean() < 1e-4
    assert [float(number) for number in said[1].split(" | ")] == pytest.approx(found, rel=0.1)


def test_the_knees_of_the_distance_curves_are_as_sharp_as_said():
    text, table, sharp = read("har/README.md"), read("har/steps.md"), {}
    for scaling in ("", "-each"):
        lines = read(f"har/steps-neighbour-curves{scaling}.csv").splitlines()
        rows = {int(row.pop("k")): row for row in csv.DictReader(lines)}
        values = {k: {label: float(value) for label, value in row.items()} for k, row in rows.items()}
        for label in values[205]:
            at = [values[k + 50][label] - values[k][label] for k in (205, 890)]
            before = [values[k][label] - values[k - 50][label] for k in (205, 890)]
            found = sharp.setdefault(label, [])
            found += [f"{one / other:.1f}" for one, other in zip(at, before, strict=True)]
    assert len(sharp) == 12
    for label, shown in sharp.items():
        assert f"| {label} | {' | '.join(shown)} |" in text
        recall, *_, mean_precision = re.search(rf"^\| {re.escape(label)} \| (.*) \|$", table, re.M)[1].split(" | ")[:4]
        if label.startswith("coupled"):
            said = f"{recall.strip('* ↓')} | {mean_precision.strip('* ↓')} |"
            assert re.search(rf"^\| {re.escape(label)} \| 0\.\d+ \| {re.escape(said)}$", text, re.M)
