"""Studies of trained optimisees: what their results depend on, and what they refuse."""

import pytest
import tomli_w

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.experiments import comparison_study
from l2lopt.weights import files


def written(folder, optimiser):
    """A study of one run, of a problem that trains in no time."""
    config = {"threads": 1, "optimisee": {"name": "quadratic", "size": 3}, "optimiser": optimiser}
    (folder / "own.toml").write_text(tomli_w.dumps({**config, "train": {"steps": 3, "evaluate_every": 3}}))
    study = {"config": "own.toml", "seeds": [0], "runs": [{"label": "a"}]}
    (folder / "study.toml").write_text(tomli_w.dumps(study))
    return folder / "study.toml"


def test_a_result_of_other_weights_in_the_same_file_is_not_read(tmp_path):
    def save(seed):
        files.save(optimisers.make("coordinatewise", hidden_size=2, seed=seed), tmp_path / "rule.safetensors")

    save(0)
    source = written(tmp_path, {"weights": str(tmp_path / "rule.safetensors")})
    table, _ = comparison_study.reproduce(source, tmp_path / "run")
    before = table.read_text()
    assert comparison_study.reproduce(source, tmp_path / "run")[0].read_text() == before
    save(1)
    with pytest.raises(UserError, match=r"expected weights = \w+, found weights = \w+; put it back"):
        comparison_study.reproduce(source, tmp_path / "run")
    assert comparison_study.reproduce(source, tmp_path / "again")[0].read_text() != before


@pytest.mark.parametrize("change", ["seed=3", "label = other"])
def test_changes_that_the_study_would_undo_are_refused(tmp_path, change):
    source = written(tmp_path, "torch.optim.SGD")
    key, where = change.partition("=")[0].strip(), {"seed=3": "seeds"}.get(change, "the labels")
    with pytest.raises(UserError, match=f"--set: expected no {key}, which the study gives, .*; change {where} in "):
        comparison_study.reproduce(source, tmp_path / "run", changes=["train.steps=2", change])
    with pytest.raises(UserError, match=f"expected no {key}, which the study gives"):
        comparison_study.reproduce("digits-mlp", tmp_path / "run", changes=[change, "meta.updates=1"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("last", ["mlp", "autoencoder"])
def test_optimisees_of_unlike_metrics_are_in_one_table(tmp_path, last):
    """After all trainings it would end in a traceback, or without the metric that the first one has not."""
    source = written(tmp_path, "torch.optim.SGD")
    problems = {name: f"optimisee={{name='{name}', dataset='digits', hidden=[2]}}" for name in ("autoencoder", "mlp")}
    runs = [{"label": name, "changes": [change]} for name, change in problems.items()]
    runs.sort(key=lambda run: run["label"] == last)
    source.write_text(tomli_w.dumps({"config": "own.toml", "seeds": [0], "runs": runs}))
    table, _ = comparison_study.reproduce(source, tmp_path / "run")
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.read_text().splitlines()]
    assert {*head} >= {"test loss", "test accuracy"}
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert cells["mlp"]["test accuracy"]
    assert not cells["autoencoder"]["test accuracy"].strip("–-")
    assert all(row["test loss"] for row in cells.values())
