"""Training by epochs with averaged SGD, language models from the command line, and studies of them."""

import json
import math
import os
import random
import re
from functools import partial
from operator import itemgetter
from pathlib import Path

import laws
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from killing import interrupted, kill_and_resume, killed
from test_cli import called
from test_training import files

import l2lopt
import optimisees
from l2lopt.core.errors import UserError
from l2lopt.core.references import Column
from l2lopt.core.seeding import seed_of
from l2lopt.experiments import build, comparison_study, training_study
from l2lopt.experiments import config as configs
from l2lopt.experiments import runs as experiments
from l2lopt.experiments.config import TrainConfig
from l2lopt.optimisee import evaluate_split
from l2lopt.report import figures as plotting
from l2lopt.training import train as training
from l2lopt.training.train import TrainSettings
from optimisees import LanguageModel
from optimisees.data.text import EOS, ptb
from optimisees.language.n_grams import KneserNey

from implementations import TEXTS  # isort: skip

ROOT = Path(__file__).parents[2]
MODEL = partial(LanguageModel, TEXTS, "irc-gru", 3, 4, 2, batch_size=3, window=6, dtype="float64")
needs_ptb = pytest.mark.skipif(not os.environ.get("L2LOPT_DATA"), reason="L2LOPT_DATA names no folder of data sets")


@pytest.fixture
def _without_figures(monkeypatch):
    monkeypatch.setattr(plotting, "training_curve", lambda *args, **options: [])


def texts(folder, unit="word", lines=60):
    """Three files of sentences with some order in them, and the config's table that names them."""
    source, names = random.Random(0), {}
    for name, count in (("train", lines), ("valid", lines // 3), ("test", lines // 3)):
        words = [f"the {source.choice(['cat', 'dog'])} {source.choice(['sat', 'ran away'])}" for _ in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(words))
        names[name] = str(folder / f"{name}.txt")
    return {"name": "files", "unit": unit, **names}


def config(folder, unit="word", **settings):
    sizes = {"embedding_size": 4, "hidden_size": 5, "layers": 2, "batch_size": 3, "window": 8}
    return {
        "threads": 1,
        "optimisee": {"name": "language-model", "data": texts(folder, unit), "cell": "irc-gru", **sizes},
        "optimiser": {"name": "torch.optim.SGD", "lr": 2.0, "weight_decay": 1.2e-6},
        "train": {"epochs": 4, "clip": 0.25, "average": 2, "checkpoint_every": 3, **settings},
    }


class Kept:
    """A recorder that keeps the lines."""

    def __init__(self):
        self.lines = []

    def write(self, stage, step, figures):
        self.lines.append((stage, step, dict(figures)))

    def of(self, stage, name="loss"):
        return {step: figures[name] for found, step, figures in self.lines if found == stage}


def test_averaged_sgd_is_the_mean_of_what_followed():
    """Every evaluation, the rates, and the parameters of the lowest loss, by a loop by hand."""
    task, kept = MODEL(), Kept()
    settings = TrainSettings(epochs=4, average=2, clip=0.25)
    factory = partial(torch.optim.SGD, lr=6.0, weight_decay=1e-3)
    result = training.train(task, factory, settings, seed=1, records=kept)
    seed = seed_of("train", 1)
    params, aux = task.init(seed)
    leaves = [value.requires_grad_() for value in params.values()]
    optimizer = torch.optim.SGD(leaves, lr=6.0, weight_decay=1e-3)
    ends, iterates, losses, standing = [task.epoch_start("inner", seed, k) for k in (1, 2, 3, 4)], [], {}, {}
    losses[0], standing[0] = evaluate_split(task, "heldout", seed, params, aux), params
    for step in range(1, ends[-1] + 1):
        batch = task.batch("inner", seed, step - 1)
        loss, aux = task.loss(params, aux, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.25)
        optimizer.param_groups[0]["lr"] = 6.0 * len(batch["tokens"]) / 6
        assert kept.of("train", "rate")[step] == pytest.approx(optimizer.param_groups[0]["lr"])
        assert kept.of("train", "perplexity")[step] == pytest.approx(math.exp(aux["cross_entropy"]))
        assert kept.of("train")[step] == pytest.approx(float(loss.detach()))
        optimizer.step()
        iterates.append({name: value.detach().clone() for name, value in params.items()})
        if step in ends:
            own = iterates[ends[1] :] if step > ends[1] else iterates[-1:]
            standing[step] = {name: torch.stack([one[name] for one in own]).mean(0) for name in params}
            losses[step] = evaluate_split(task, "heldout", seed, standing[step], aux)
    found = kept.of("heldout")
    assert list(found) == [0, *ends]
    laws.assert_close(torch.tensor(list(found.values())), torch.tensor([own["loss"] for own in losses.values()]), 1e-7)
    best = min(losses, key=lambda step: losses[step]["loss"])
    assert result.step == best > ends[1]
    laws.assert_close(result.params, standing[best], 1e-10)
    assert result.watched["perplexity"] == pytest.approx(math.exp(losses[best]["loss"]))
    assert result.metrics == pytest.approx(evaluate_split(task, "test", seed, standing[best], aux))
    assert result.speed > 0


@given(losses=st.lists(st.floats(0, 10), min_size=2, max_size=30), patience=st.integers(1, 6))
def test_the_trigger_is_that_of_awd(losses, patience):
    """Its published loop, over the losses after each epoch."""
    settings = TrainSettings(average="non-monotonic", patience_to_average=patience)
    best_val_loss = []
    for epoch, val_loss in enumerate(losses[1:], 1):
        expected = len(best_val_loss) > patience and val_loss > min(best_val_loss[:-patience])
        assert settings.averages(losses[: epoch + 1]) == expected
        best_val_loss.append(val_loss)
    assert not settings.averages(losses[:1])
    assert [TrainSettings(average=2).averages(losses[:k]) for k in (1, 2)] == [False, False]
    assert TrainSettings(average=2).averages([*losses, 1.0])


def test_non_monotonic_averaging_begins_after_the_first_rise():
    """At a rate that makes the validation loss go up and down."""
    kept = Kept()
    settings = TrainSettings(epochs=9, average="non-monotonic", patience_to_average=1)
    training.train(MODEL(), partial(torch.optim.SGD, lr=8.0), settings, records=kept)
    plain, never = Kept(), settings.model_copy(update={"average": 100})
    training.train(MODEL(), partial(torch.optim.SGD, lr=8.0), never, records=plain)
    one, other = (list(lines.of("heldout").values()) for lines in (kept, plain))
    begun = next(k for k in range(len(other)) if settings.averages(other[: k + 1]))
    assert one[: begun + 1] == other[: begun + 1]
    assert all(a != b for a, b in zip(one[begun + 1 :], other[begun + 1 :], strict=True))
    assert begun < 8


@pytest.mark.usefixtures("_without_figures")
@pytest.mark.parametrize("changes", [[], ["train.average=non-monotonic", "train.patience_to_average=1"]])
def test_killed_and_resumed_equals_the_whole_run(tmp_path, changes):
    settings = config(tmp_path)
    l2lopt.train(settings, tmp_path / "whole", changes=changes)
    for moment in (1, 4, 9, 20):
        killed(partial(l2lopt.train, settings, tmp_path / "run", changes=changes, resume=True), moment)
    l2lopt.train(settings, tmp_path / "run", changes=changes, resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    assert (tmp_path / "run" / "vocabulary.json").read_bytes() == (tmp_path / "whole" / "vocabulary.json").read_bytes()


@pytest.mark.slow
def test_real_kills(tmp_path):
    """SIGKILL at random moments of a run of some seconds."""
    settings = config(tmp_path, epochs=60, average=20, checkpoint_every=10)
    (tmp_path / "config.toml").write_text(configs.dump(configs.load(settings, kind=TrainConfig)))
    kill_and_resume(["train", tmp_path / "config.toml"], tmp_path / "run", pause=0.3)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@pytest.mark.usefixtures("_without_figures")
def test_other_texts_are_refused_on_resuming(tmp_path):
    settings = config(tmp_path)
    killed(partial(l2lopt.train, settings, tmp_path / "run"), 5)
    (tmp_path / "valid.txt").write_text("the cat sat\n" * 20)
    with pytest.raises(UserError, match=r"checkpoint\.safetensors: expected corpus = \w+, found corpus = \w+"):
        l2lopt.train(settings, tmp_path / "run", resume=True)


def test_epochs_of_samples():
    task, kept = optimisees.mlp((3,), batch_size=500), Kept()
    result = training.train(task, partial(torch.optim.SGD, lr=0.1), TrainSettings(epochs=3), records=kept)
    assert (result.steps, list(kept.of("test"))) == (6, [0, 2, 4, 6])  # 1,300 samples: two full batches
    with pytest.raises(UserError, match=r"epochs: expected an optimisee with epochs, found one that has none"):
        training.train(optimisees.Quadratic(2), partial(torch.optim.SGD, lr=0.1), TrainSettings(epochs=1))


@pytest.mark.parametrize("unit", ["word", "character"])
def test_trains_and_speaks_from_the_command_line(tmp_path, monkeypatch, capsys, unit):
    (tmp_path / "lm.toml").write_text(configs.dump(configs.load(config(tmp_path, unit, epochs=2), kind=TrainConfig)))
    run = tmp_path / "run"
    code, out, err = called(monkeypatch, capsys, "train", tmp_path / "lm.toml", "--run", run)
    assert (code, err) == (0, "")
    reading = "perplexity" if unit == "word" else "bits_per_character"
    assert re.search(rf"train: \d+/\d+ +{reading} [\d.]+ +heldout {reading} [\d.]+ +tokens/s \d", out)
    assert re.search(r"[\d,]+ parameters, [\d,]+ of them in the recurrent layers", out)
    facts = json.loads((run / "result.json").read_text())
    assert f"test perplexity: {math.exp(facts['metrics']['loss']):.5f}" in out
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").unlink()  # a run is enough
    ask = ("sample", run, "--prompt", "the cat", "--tokens", 12)
    code, out, err = called(monkeypatch, capsys, *ask)
    assert (code, err) == (0, "")
    assert out.startswith("the cat")
    assert len(out.replace("\n", " \n ").split(" ")) > 8 if unit == "word" else len(out) == len("the cat") + 12 + 1
    assert called(monkeypatch, capsys, *ask)[1] == out
    assert called(monkeypatch, capsys, *ask, "--seed", 1)[1] != out
    cold = [called(monkeypatch, capsys, *ask, "--temperature", 0, "--seed", seed)[1] for seed in (0, 1)]
    assert cold[0] == cold[1]
    word = "catt" if unit == "word" else "é"
    for arguments, message in (
        ((run, "--prompt", word), f"prompt: expected {unit}s of the vocabulary, found '{word}'"),
        ((run, "--temperature", -1), "sample: temperature: expected at least 0, found -1.0"),
        ((tmp_path, "--prompt", "the"), "config.toml: expected a trained language model, found nothing"),
        ((run, "--count", 8), "expected no count of a trained language model, found --count; leave it out"),
    ):
        code, _, err = called(monkeypatch, capsys, "sample", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
    (run / "vocabulary.json").write_text("{")
    assert "expected a vocabulary, found damage" in called(monkeypatch, capsys, "sample", run)[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimisee.data=ptbb", "data: expected a known name, found 'ptbb'; did you mean 'ptb'?"),
        ("optimisee.data=ptb", "ptb: expected a folder of data sets, found none; set L2LOPT_DATA"),
        ("optimisee.data.unit=letter", "data 'files': unit: expected 'word' or 'character', found 'letter'"),
        ("optimisee.data.train=none.txt", "none.txt: expected a text, found nothing"),
        ("optimisee.cell=gruu", "cell: expected a known name, found 'gruu'; did you mean 'gru'?"),
        ("optimisee.batch_size=1000", "language-model: inner: expected at least 2000 tokens for 1000 columns, found"),
        ("optimisee=quadratic", "epochs: expected an optimisee with epochs, found one that has none"),
        ("optimisee.weight_dropp=0.1", "weight_dropp: expected a known key, found 'weight_dropp'; did you mean"),
        ("train.average=yes", "train.average: expected"),
        ("train.epochs=0", "train.epochs: expected greater than 0"),
        ("train.warm_up=9999", "train.warm_up: expected at most"),
        ("optimisee.hidden_size=0", "language-model: hidden_size: expected above 0"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    (tmp_path / "lm.toml").write_text(configs.dump(configs.load(config(tmp_path), kind=TrainConfig)))
    arguments = ("train", tmp_path / "lm.toml", "--run", tmp_path / "run", "--set", change)
    code, _, err = called(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimiser", ["normalised-muon", "{weights='lstm'}", "{weights='ihc-lstm', max_update=0.05}"])
@pytest.mark.usefixtures("_without_figures")
def test_the_small_config_takes_learned_rules_and_the_harness(tmp_path, monkeypatch, capsys, optimiser):
    """Beside SGD, by the option of the command line. How good they are at it is the studies' matter."""
    sizes = {"embedding_size": 6, "hidden_size": 5, "batch_size": 3, "window": 8}
    names = ", ".join(f"{key} = '{value}'" for key, value in texts(tmp_path).items())
    changes = [f"optimisee.data={{{names}}}", *(f"optimisee.{key}={value}" for key, value in sizes.items())]
    changes += ["threads=1", "train.epochs=2", f"optimiser={optimiser}"]
    sets = [part for change in changes for part in ("--set", change)]
    small = ROOT / "configs/ptb-small.toml"
    code, _, err = called(monkeypatch, capsys, "train", small, "--run", tmp_path / "run", *sets)
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["stage"] == "train"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["diverged"] is None
    assert (len(losses), result["steps"]) == (result["steps"],) * 2
    assert min(losses) < losses[0] - 0.03


STUDY = {
    "config": "lm.toml",
    "changes": ["train.epochs=1"],
    "n_grams": [1, 3],
    "runs": [
        {"label": "LSTM", "changes": ["optimisee.cell=lstm"], "seeds": [0, 1]},
        {"label": "IRC-LSTM", "changes": ["optimisee.cell={name='irc-lstm', gate_bias=true}"], "versus": "LSTM"},
    ],
}


def study(folder, **changes):
    (folder / "lm.toml").write_text(tomli_w.dumps(config(folder)))
    (folder / "study.toml").write_text(tomli_w.dumps({**STUDY, **changes}))
    return folder / "study.toml"


@pytest.mark.usefixtures("_without_figures")
def test_a_study_makes_its_table_and_goes_on_where_it_stood(tmp_path, monkeypatch, capsys):
    source, trained = study(tmp_path), interrupted(monkeypatch, experiments, "train", 2)
    changes = ["optimisee.layers=2"]
    with pytest.raises(KeyboardInterrupt):
        comparison_study.reproduce(source, tmp_path / "run", changes=changes)
    code, out, err = called(monkeypatch, capsys, "reproduce", source, "--run", tmp_path / "run", "--set", *changes)
    assert (code, err) == (0, "")
    assert [args[1].name for args in trained] == [
        "lstm-0",
        "irc-lstm-0",
        "irc-lstm-0",
        "lstm-1",
    ]  # every run's first seed comes first
    text = (tmp_path / "run" / "table.md").read_text()
    assert text.strip() in out
    assert text.startswith("**With optimisee.layers=2**\n\n| ")
    found = json.loads((tmp_path / "run" / "table.json").read_text())
    own = {
        name: json.loads((tmp_path / "run" / name / "result.json").read_text())
        for name in {args[1].name for args in trained}
    }
    tests = [own[f"lstm-{seed}"]["metrics"]["perplexity"] for seed in (0, 1)]
    assert [found["runs"]["LSTM"][seed]["test"] for seed in "01"] == tests
    assert found["runs"]["IRC-LSTM"]["0"]["valid"] == own["irc-lstm-0"]["watched"]["perplexity"]
    assert f"| {sum(tests) / 2:.1f} ({min(tests):.1f}–{max(tests):.1f}) |" in text
    difference = found["runs"]["IRC-LSTM"]["0"]["test"] - tests[0]
    assert f"{'**worse**' if difference > 0 else 'better'} than LSTM by {abs(difference):.1f} |" in text
    assert re.search(r"\| IRC-LSTM \| 1 \| [\d,]+ \+ 9 \|", text)
    corpus = build.build_training(configs.load(tmp_path / "lm.toml", kind=TrainConfig)).optimisee.texts
    words = corpus.vocabulary.tokens
    for order, label in ((1, "unigram"), (3, "Kneser-Ney 3-gram")):
        model = KneserNey(corpus.train.numpy(), len(words), words.index(EOS), order)
        assert f"| {label} | | | | {model.perplexity(corpus.valid.numpy()):.1f} | " in text
    comparison_study.reproduce(source, tmp_path / "run", changes=changes)
    assert len(trained) == 4  # nothing is trained again
    (tmp_path / "run" / "lstm-0" / "found.json").write_text("{")
    comparison_study.reproduce(source, tmp_path / "run")  # the same recipe, although nobody asked for the two layers
    assert (tmp_path / "run" / "table.md").read_text().splitlines()[:2] == text.splitlines()[2:4]
    assert (tmp_path / "run" / "lstm-0" / "result.json").exists()
    with pytest.raises(UserError, match=r"expected train\.epochs = 1, found train\.epochs = 2"):
        comparison_study.reproduce(source, tmp_path / "run", changes=["train.epochs=2"])


@pytest.mark.slow
def test_jobs_side_by_side_make_the_same_table(tmp_path):
    source = study(tmp_path)
    for jobs in (1, 2):
        comparison_study.reproduce(source, tmp_path / f"run-{jobs}", jobs=jobs)
    numbers = [re.findall(r"\d+\.\d", (tmp_path / f"run-{jobs}" / "table.md").read_text()) for jobs in (1, 2)]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) > 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": []}, "runs: expected"),
        ({"run": 3}, "run: expected a known key, found 'run'; did you mean 'runs'?"),
        ({"config": "none.toml"}, "none.toml: expected a config file, found nothing"),
        ({"runs": [{"label": "a", "versus": "b"}]}, "a: expected a run's label, found b; choose one of a"),
        ({"runs": [{"label": "a"}, {"label": "A"}]}, "runs: expected labels that lead to different folders"),
        (
            {"runs": [{"label": "a"}, {"label": "b", "changes": ["optimisee.evaluation_tokens=9"]}]},
            "b: expected the texts of the first run, found others",
        ),
        (
            {"runs": [{"label": "a", "changes": ["optimisee=mlp"]}]},
            "n_grams: expected a known key, found 'n_grams'; choose one of",
        ),
        ({"runs": [{"label": "a", "changes": ["optimisee.cell=x"]}]}, "cell: expected a known name, found 'x'"),
    ],
)
def test_a_studys_mistakes_end_in_one_line_before_any_work(tmp_path, monkeypatch, capsys, changes, message):
    code, _, err = called(monkeypatch, capsys, "reproduce", study(tmp_path, **changes), "--run", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "run").exists()


def test_every_field_of_a_study_is_documented():
    for model in (training_study.TrainingStudy, training_study.Run, LanguageModel.references):
        assert all(field.description for field in model.model_fields.values())


@needs_ptb
def test_the_penn_treebank_and_its_5_grams():
    """10,000 words; the 5-grams' test perplexity in the literature is 141.2 (Mikolov et al. 2011)."""
    corpus = ptb()
    words = corpus.vocabulary.tokens
    assert (len(words), words[:3], words.index(EOS)) == (10_000, ("aer", "banknote", "berlitz"), 24)
    assert [len(text) for text in corpus[1:]] == [929_589, 73_760, 82_430]
    for order, expected in ((5, 141.2), (1, 639.4)):
        model = KneserNey(corpus.train.numpy(), 10_000, 24, order)
        assert model.perplexity(corpus.test.numpy()) == pytest.approx(expected, abs=0.05)


@needs_ptb
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("ptb-cells", 12 * 3), ("ptb-without-irc", 7 * 3), ("ptb-rates", 15), ("ptb-optimisers", 11)],
    ids=["cells", "without IRC", "rates", "optimisers"],
)
def test_the_studies_of_cells_are_sound(name, count, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(training_study, "run_jobs", lambda make, pieces, jobs, report: made.extend(pieces))
    monkeypatch.setattr(
        training_study, "_make", lambda references, piece, report: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        comparison_study.reproduce(ROOT / f"configs/studies/{name}.toml", tmp_path)
    trained = [piece for piece in made if piece.kind == "trained"]
    assert (len(trained), len(made)) == (count, count + 2)
    assert {(piece.config.train.epochs, piece.config.optimisee["hidden_size"]) for piece in trained} == {(3, 200)}


def test_a_diverged_run_is_neither_better_nor_worse():
    column, runs = Column("", itemgetter("test")), ({"0": {"test": None}}, {"0": {"test": 2.0}})
    assert training_study.against(column, "LSTM", *runs) == "diverged, it or LSTM"
    assert training_study.against(column, "LSTM", *reversed(runs)) == "diverged, it or LSTM"


def test_a_tie_is_neither_better_nor_worse():
    column, runs = Column("", itemgetter("test")), ({"0": {"test": 2.0}}, {"0": {"test": 2.0}})
    assert training_study.against(column, "LSTM", *runs) == "equal to LSTM on average"


def test_warm_up_may_be_as_long_as_the_epochs(tmp_path):
    settings = config(tmp_path, epochs=400, warm_up=1500)
    assert build.build_training(configs.load(settings, kind=TrainConfig)).config.train.warm_up == 1500


@pytest.mark.usefixtures("_without_figures")
def test_the_validation_perplexity_is_that_of_the_validation_text(tmp_path):
    """Where nothing is chosen by it, training watches the test text."""
    runs = [{"label": "LSTM", "changes": ["optimisee.cell=lstm", "train.average=none"]}]
    comparison_study.reproduce(study(tmp_path, runs=runs), tmp_path / "run")
    found = json.loads((tmp_path / "run" / "table.json").read_text())["runs"]["LSTM"]["0"]
    model = l2lopt.load_trained(tmp_path / "run" / "lstm-0")
    for name, split in (("valid", "heldout"), ("test", "test")):
        figures = evaluate_split(model.optimisee, split, 0, model.params, model.aux)
        assert found[name] == pytest.approx(figures["perplexity"])
    assert found["valid"] != pytest.approx(found["test"], rel=1e-4)
