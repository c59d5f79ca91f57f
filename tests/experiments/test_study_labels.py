"""Labels of studies: names, titles and folders that say the sizes a study is run with."""

from pathlib import Path

import pytest

from l2lopt.core.errors import UserError
from l2lopt.experiments import comparison_jobs, comparison_study, study_labels, training_study
from l2lopt.experiments import config as configs
from l2lopt.experiments.comparison_jobs import Job

STUDIES = Path(__file__).parents[2] / "configs" / "studies"


def problems(name, *changes):
    path = STUDIES / f"{name}.toml"
    location = comparison_jobs.located(comparison_study.load(path), str(path), "somewhere", changes)
    folders = [comparison_jobs.resolve(location, Job(0, 0, None)).paths[0].parent.name] if name == "digits-mlp" else []
    return [problem.label for problem in location.study.problems], folders


def rows(name, *changes):
    path = STUDIES / f"{name}.toml"
    study = training_study._labelled(comparison_study.load(path), path, changes)
    return {run.label: run.versus for run in study.runs}


def test_shipped_studies_have_the_names_that_their_results_have():
    assert problems("fig3-width16")[0] == ["ResNet-34 of width 16 on CIFAR-10"]
    assert problems("harness")[0] == [
        "digits, MLP 64-50-50-10, ReLU",
        "digits, MLP 64-20-10, sigmoid",
        "digits, ConvNet with batch norm",
        "MNIST, MLP 784-50-10",
        "CIFAR-10, MLP 3072-64-64-10",
        "Penn Treebank, character GPT",
        "CIFAR-10, ResNet-34 of width 16",
    ]
    assert problems("transfer")[0][::3] == ["digits, MLP 64-50-50-10", "CIFAR-10, MLP 3072-50-10"]
    assert [*rows("labelling-har")][:3] == [
        "3 layers, bidirectional",
        "1 layer, bidirectional",
        "3 layers, forward only",
    ]


def test_a_changed_size_is_in_the_name_of_the_problem():
    assert problems("fig3-width16", "optimisee.width=4")[0] == ["ResNet-34 of width 4 on CIFAR-10"]


def test_changes_without_a_place_in_the_label_stand_behind_it_and_in_the_folder():
    """The last one of a key, and none that leaves the problem as it is."""
    changes = ("optimisee.hidden=[3]", "evaluation.seeds=2", "optimisee.hidden = [4, 5]", "optimisee.activation=relu")
    labels, folders = problems("digits-mlp", *changes)
    assert labels == ["digits MLP (hidden=[4, 5], activation=relu)"]
    assert folders == ["digits-mlp-hidden-4-5-activation-relu"]
    assert problems("digits-mlp", "evaluation.seeds=2") == (["digits MLP"], ["digits-mlp"])


def test_the_row_that_another_is_set_against_keeps_its_name(tmp_path):
    runs = [{"label": "width {optimisee.width}"}, {"label": "b", "versus": "width {optimisee.width}"}]
    study = training_study.parse({"config": "c.toml", "runs": runs}, "study.toml")
    (tmp_path / "c.toml").write_text("optimiser = 'adam'\n[optimisee]\nname = 'resnet'\nwidth = 16\n")
    made = training_study._labelled(study, tmp_path / "study.toml", ["optimisee.width=4"])
    assert {run.label: run.versus for run in made.runs} == {"width 4": None, "b": "width 4"}


def test_labels_that_changes_make_alike_are_refused():
    labels = ["3 layers, bidirectional", "3 layers, forward only", "3 layers, bidirectional"]
    message = "study: runs: expected labels that lead to different folders, found '3 layers, b.*; drop the change"
    with pytest.raises(UserError, match=message):
        study_labels.check_folders(labels, "study: runs")


@pytest.mark.parametrize("key", ["optimisee.width", "optimisee", "seed.of"])
def test_a_key_without_a_value_is_refused(key):
    config = configs.load({"optimisee": {"name": "mlp"}})
    with pytest.raises(UserError, match=f"study: label .*: expected a key with a value, found {key}; name a key"):
        study_labels.filled(f"width {{{key}}}", config, "study")


@pytest.mark.parametrize("label", ["{}", "a set {1, 2}", "{a b}"])
def test_other_braces_are_text(label):
    assert study_labels.filled(label, configs.load({"optimisee": "mlp"}), "study") == label
