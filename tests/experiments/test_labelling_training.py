"""Sequence labelling from the command line: training, mistakes by line, figures, resuming, and studies of it."""

import json
import os
import random
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import tomli_w
from activities import small_har
from killing import interrupted, killed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import called
from test_training import files

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.experiments import build, comparison_study, runs, training_study
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from l2lopt.report import figures as report
from l2lopt.report import style
from optimisees import SequenceLabelling
from optimisees.labelling import figures

ROOT = Path(__file__).parents[2]
needs_seqeval = pytest.mark.usefixtures("_seqeval")


@pytest.fixture
def _seqeval():
    pytest.importorskip("seqeval", reason='seqeval is missing: pip install "l2lopt[labelling]"')


@pytest.fixture
def _without_figures(monkeypatch):
    monkeypatch.setattr(report, "training_curve", lambda *args, **options: [])
    monkeypatch.setattr(figures, "labelled_sequence", lambda *args, **options: [])


def tokens(folder, sentences=40):
    """Three files: what follows "says" is a direct expression of one or two words; `data` of a config."""
    source, names = random.Random(0), {}
    for part, count in (("train", sentences), ("valid", sentences // 4), ("test", sentences // 4)):
        written = []
        for number in range(count):
            said = [("fine", "B-DSE"), ("indeed", "I-DSE")][: source.choice((1, 2))]
            rows = [(source.choice(["she", "he"]), "O"), ("says", "O"), *said, ("now", "O")][: source.choice((3, 5))]
            written.append("\n".join(f"{token}\t{number}\t{label}" for token, label in rows))
        (folder / f"{part}.conll").write_text("\n\n".join(written) + "\n")
        names[part] = str(folder / f"{part}.conll")
    return {"name": "conll", **names}


def config(data, **settings):
    sizes = {"layers": 2, "hidden_size": 4, "embedding_size": 3, "dropout": 0.1, "batch_size": 8}
    return {
        "threads": 1,
        "optimisee": {"name": "sequence-labelling", "data": data, **sizes},
        "optimiser": {"name": "torch.optim.Adam", "lr": 0.02},
        "train": {"epochs": 3, "clip": 1.0, "checkpoint_every": 3, **settings},
    }


def signals(folder, **settings):
    """A small UCI HAR, a piece of which has a change of activity, and the config."""
    root = small_har(folder, recordings=1, windows=1)
    made = config({"name": "har", "root": str(root), "valid": [4], "test": [2, 9], "length": 200}, **settings)
    made["optimisee"]["batch_size"] = 2
    return made


def written(folder, settings):
    """The config as a file."""
    (folder / "labelling.toml").write_text(configs.dump(configs.load(settings, kind=TrainConfig)))
    return folder / "labelling.toml"


@needs_seqeval
def test_a_conll_file_trains_and_its_mistakes_are_named_by_their_lines(tmp_path, monkeypatch, capsys):
    from seqeval.metrics import accuracy_score, classification_report

    run, source = tmp_path / "run", written(tmp_path, config(tokens(tmp_path)))
    code, out, err = called(monkeypatch, capsys, "train", source, "--run", run)
    assert (code, err) == (0, "")
    facts, found = (json.loads((run / name).read_text()) for name in ("result.json", "labels.json"))
    test = (tmp_path / "test.conll").read_text().splitlines()
    guessed = list(test)
    mistakes = (run / "mistakes.txt").read_text().splitlines()
    assert mistakes
    for mistake in mistakes:
        number, token, true, other = re.fullmatch(
            rf"{re.escape(str(tmp_path))}/test\.conll:(\d+): (\w+): (\S+) taken for (\S+)", mistake
        ).groups()
        columns = test[int(number) - 1].split("\t")
        assert (columns[0], columns[2]) == (token, true)
        assert other != true
        guessed[int(number) - 1] = f"{columns[0]}\t{columns[1]}\t{other}"

    def labels(lines):
        return [[line.split("\t")[2] for line in part.split("\n")] for part in "\n".join(lines).split("\n\n")]

    both = labels(test), labels(guessed)
    report = classification_report(*both, output_dict=True, zero_division=0)
    assert facts["metrics"]["f1"] == found["f1"] == report["micro avg"]["f1-score"]
    assert facts["metrics"]["accuracy"] == pytest.approx(accuracy_score(*both))
    assert found["labels"].keys() == report.keys() - {"micro avg", "macro avg", "weighted avg"}
    for name, own in found["labels"].items():
        assert {"f1-score" if key == "f1" else key: value for key, value in own.items()} == report[name]
    assert (found["mistakes"], found["positions"]) == (len(mistakes), sum(line != "" for line in test))
    assert f"{len(mistakes)} of {found['positions']} test labels are wrong: {run / 'mistakes.txt'}" in out
    assert f"test f1: {found['f1']:.5f}" in out
    vocabulary = json.loads((run / "vocabulary.json").read_text())
    assert set(vocabulary["tokens"]) == {"<unk>", "she", "he", "says", "fine", "indeed", "now"}
    assert vocabulary["labels"] == ["O", "B-DSE", "I-DSE"]
    example = found["example"]
    changes = [sum(one != other for one, other in pairwise(sentence)) for sentence in both[0]]
    shown = "\n".join(test).split("\n\n")[changes.index(max(changes))]
    assert example["tokens"] == [line.split("\t")[0] for line in shown.split("\n")]
    for name in ("training-curve.png", "labelled-sequence.png", "labelled-sequence.svg"):
        assert (run / "figures" / name).stat().st_size > 1000
    assert str(run / "figures" / "labelled-sequence.png") in out


@pytest.mark.slow
def test_activities_train_with_tensorboard_and_a_figure(tmp_path, monkeypatch, capsys):
    run, source = tmp_path / "run", written(tmp_path, signals(tmp_path))
    code, _, err = called(monkeypatch, capsys, "train", source, "--run", run)
    assert (code, err) == (0, "")
    board = EventAccumulator(str(run)).Reload()
    assert {"train/loss", "test/loss", "test/accuracy", "test/f1"} <= set(board.Tags()["scalars"])
    facts, found = (json.loads((run / name).read_text()) for name in ("result.json", "labels.json"))
    last = board.Scalars("test/f1")[-1]
    assert (last.step, last.value) == (facts["steps"], pytest.approx(facts["metrics"]["f1"]))
    assert found["labels"].keys() <= {"WALKING", "SITTING", "LAYING"}
    assert found["example"]["place"].startswith("subject 2, 0.00 s")
    assert len(found["example"]["signals"]) == len(found["example"]["true"]) == 200
    assert len(set(found["example"]["true"])) == 2
    mistakes = (run / "mistakes.txt").read_text().splitlines()
    assert len(mistakes) == found["mistakes"] == round((1 - facts["metrics"]["accuracy"]) * found["positions"])
    assert all(re.fullmatch(r"subject [29], \d\.\d\d s: [A-Z]+ taken for [A-Z]+", line) for line in mistakes)
    (run / "figures" / "labelled-sequence.png").unlink()
    l2lopt.plot(run)  # from the records alone
    assert (run / "figures" / "labelled-sequence.png").exists()
    for damage in ("{", '{"example": 3}', json.dumps({"example": found["example"] | {"true": []}})):
        (run / "labels.json").write_text(damage)
        with pytest.raises(UserError, match=r"labels\.json: expected labels, found damage; train again"):
            l2lopt.plot(run)


def test_a_figure_shows_both_labellings(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(style, "write_figure", lambda figure, folder, name: drawn.append(figure) or [])
    words = figures.Example("a:1: $", ["O", "B-X", "I-X", "B-Y"], [0, 1, 2], [0, 1, 3], ["$", "b", "$c$"], None, None)
    figures.labelled_sequence(words, tmp_path)
    (panel,) = drawn[0].axes
    assert [line.get_label() for line in panel.lines] == ["true", "found"]
    assert [list(line.get_ydata()) for line in panel.lines] == [[0, 1, 2], [0, 1, 3]]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["O", "B-X", "I-X", "B-Y"]
    drawn[0].canvas.draw()  # a $ in a token is no formula
    moving = figures.Example("s", ["a", "b", "c"], [2, 2, 0], [2, 0, 0], None, [[1.0, 2.0]] * 3, 50.0)
    figures.labelled_sequence(moving, tmp_path)
    upper, lower = drawn[1].axes
    assert len(upper.lines) == 2
    assert [list(line.get_ydata()) for line in lower.lines] == [[1, 1, 0], [1, 0, 0]]
    assert list(lower.lines[0].get_xdata()) == [0, 0.02, 0.04]
    for figure in drawn:
        figures.plt.close(figure)


@pytest.mark.usefixtures("_without_figures")
@pytest.mark.parametrize("patience", [None, 4])
def test_killed_and_resumed_equals_the_whole_run(tmp_path, patience):
    settings = signals(tmp_path, epochs=5, **({"patience": patience} if patience else {}))
    settings["optimisee"]["batch_size"], settings["optimisee"]["data"]["length"] = 10, 40
    l2lopt.train(settings, tmp_path / "whole")
    for moment in (1, 3, 5):
        killed(partial(l2lopt.train, settings, tmp_path / "run", resume=True), moment)
    l2lopt.train(settings, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    for name in ("labels.json", "mistakes.txt", "vocabulary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@needs_seqeval
@pytest.mark.usefixtures("_without_figures")
def test_other_files_are_refused_on_resuming(tmp_path):
    settings = config(tokens(tmp_path))
    killed(partial(l2lopt.train, settings, tmp_path / "run"), 4)
    (tmp_path / "valid.conll").write_text("she\t0\tO\n")
    with pytest.raises(UserError, match=r"checkpoint\.safetensors: expected data = \w+, found data = \w+"):
        l2lopt.train(settings, tmp_path / "run", resume=True)


@needs_seqeval
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimisee.data.test={folder}/odd.conll", "odd.conll:2: expected 3 columns, found 2"),
        ("optimisee.data.test={folder}/none.conll", "none.conll: expected tokens and labels, found nothing"),
        ("optimisee.data.tes=x", "data 'conll': tes: expected a known key, found 'tes'; did you mean 'test'?"),
        ("optimisee.cell=gruu", "cell: expected a known name, found 'gruu'; did you mean 'gru'?"),
        ("optimisee.data=har", "data: expected a folder that holds the data sets, found none; set L2LOPT_DATA"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    source = written(tmp_path, config(tokens(tmp_path)))
    (tmp_path / "odd.conll").write_text("she\t0\tO\nsays\tO\n")
    changes = ("--set", change.format(folder=tmp_path))
    code, _, err = called(monkeypatch, capsys, "train", source, "--run", tmp_path / "run", *changes)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "run").exists()


def study(folder, **changes):
    (folder / "labelling.toml").write_text(tomli_w.dumps(signals(folder)))
    own = {
        "config": "labelling.toml",
        "changes": ["train.epochs=1"],
        "seeds": [0, 1],
        "labellers": [{"label": "2 layers"}, {"label": "Forward", "changes": ["optimisee.bidirectional=false"]}],
    }
    (folder / "study.toml").write_text(tomli_w.dumps({**own, **changes}))
    return folder / "study.toml"


@pytest.mark.usefixtures("_without_figures")
def test_a_study_makes_its_table_and_goes_on_where_it_stood(tmp_path, monkeypatch, capsys):
    source, trained = study(tmp_path), interrupted(monkeypatch, runs, "train", 2)
    with pytest.raises(KeyboardInterrupt):
        comparison_study.reproduce(source, tmp_path / "run")
    code, out, err = called(monkeypatch, capsys, "reproduce", source, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert [args[1].name for args in trained] == ["2-layers-0", "forward-0", "forward-0", "2-layers-1", "forward-1"]
    text = (tmp_path / "run" / "table.md").read_text()
    assert text.strip() in out
    found = json.loads((tmp_path / "run" / "table.json").read_text())
    for label in ("2 layers", "Forward"):
        results = [
            json.loads((tmp_path / "run" / f"{label.lower().replace(' ', '-')}-{seed}" / "result.json").read_text())
            for seed in (0, 1)
        ]
        spreads = []
        for name in ("accuracy", "f1"):
            values = [result["metrics"][name] for result in results]
            assert [found[label][seed][name] for seed in "01"] == values
            spreads.append(f"{sum(values) / 2:.3f} ({min(values):.3f}–{max(values):.3f})")
        # W of 9 → 4 and of M → 4, V 4 → 4 and b; GRUs without biases; U and c
        forward = 4 * (9 + 4 + 1) + 3 * 4 * (4 + 4) + 3 * 4 + 3
        both = 2 * (4 * (9 + 4 + 1) + 3 * 4 * (8 + 4)) + 3 * 8 + 3
        assert f"| {label} | 2 | {forward if label == 'Forward' else both} | {' | '.join(spreads)} |" in text
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(trained) == 5  # nothing is trained again
    (tmp_path / "run" / "forward-1" / "found.json").write_text("{")
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(trained) == 6
    assert json.loads((tmp_path / "run" / "table.json").read_text()) == found
    with pytest.raises(UserError, match=r"expected train\.epochs = 1, found train\.epochs = 2"):
        comparison_study.reproduce(source, tmp_path / "run", changes=["train.epochs=2"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labellers": []}, "labellers: expected"),
        ({"seed": [3]}, "seed: expected a known key, found 'seed'; did you mean 'seeds'?"),
        (
            {"labellers": [{"label": "a"}, {"label": "b", "changes": ["optimisee=mlp"]}]},
            "study.toml: b: expected an optimisee with LabellingScores, found one with References",
        ),
        ({"labellers": [{"label": "a", "changes": ["optimisee.cell=x"]}]}, "cell: expected a known name, found 'x'"),
    ],
)
def test_a_studys_mistakes_end_in_one_line_before_any_work(tmp_path, monkeypatch, capsys, changes, message):
    code, _, err = called(monkeypatch, capsys, "reproduce", study(tmp_path, **changes), "--run", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "run").exists()


def test_every_field_of_a_study_is_documented():
    for model in (training_study.TrainingStudy, training_study.Run, SequenceLabelling.references):
        assert all(field.description for field in model.model_fields.values())


@needs_seqeval
def test_the_config_for_files_of_the_users_own(tmp_path):
    """`configs/labelling-conll.toml` needs no more than their paths."""
    data = tokens(tmp_path)
    changes = [f"optimisee.data.{part}={data[part]!r}" for part in ("train", "valid", "test")]
    built = build.build_training(configs.load(ROOT / "configs/labelling-conll.toml", changes, kind=TrainConfig))
    assert built.optimisee.data.classes == ("O", "B-DSE", "I-DSE")


@pytest.mark.slow
@pytest.mark.skipif("L2LOPT_DATA" not in os.environ, reason="L2LOPT_DATA names no folder of data sets")
def test_the_study_of_activities_is_sound(monkeypatch, tmp_path):
    """Its configs build on the real data, and the wider forward network has the bidirectional one's size to 2 %."""
    made = []
    monkeypatch.setattr(training_study, "run_jobs", lambda make, pieces, jobs, report: made.extend(pieces))
    monkeypatch.setattr(
        training_study, "_make", lambda references, piece, report: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        comparison_study.reproduce(ROOT / "configs/studies/labelling-har.toml", tmp_path / "run")
    networks = [build.build_training(piece.config).optimisee for piece in made[:4]]
    sizes = [sum(value.numel() for value in network.init(0)[0].values()) for network in networks]
    assert [(network.layers, network.bidirectional) for network in networks] == [
        (3, True),
        (1, True),
        (3, False),
        (3, False),
    ]
    assert len(made) == 24  # eight networks, three seeds
    assert sizes[3] == pytest.approx(sizes[0], rel=0.02)
