"""A run that is killed and resumed ends as one that was not, to the byte."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from killing import interrupted, kill_and_resume
from killing import killed as killed_work
from test_experiments import SMALL

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.experiments import build
from l2lopt.experiments import config as configs
from l2lopt.storage import tensor_file
from l2lopt.storage.checkpoint import CheckpointFile, flat

LONGER = [
    *SMALL,
    "meta.updates=9",
    "meta.checkpoint_every=1",
    "meta.batch=2",
    "unroll.length=[4, 11]",
    "unroll.scaling=0.5",
    "unroll.curriculum=5",
    "mixed_with=[{name='quadratic', size=3}]",
]
RECIPE = configs.shipped("digits-coordinatewise.toml")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return l2lopt.meta_train(RECIPE, tmp_path_factory.mktemp("runs") / "whole", changes=LONGER)


def killed(folder, moment, changes=LONGER, **options):
    killed_work(partial(l2lopt.meta_train, RECIPE, folder, changes=changes, **options), moment)


def files(folder):
    return {name: (folder / name).read_bytes() for name in ("optimiser.safetensors", "metrics.jsonl", "config.toml")}


@pytest.mark.parametrize("moments", [[1], [2], [5], [9], [1, 1, 1], [3, 2, 4]])
def test_killed_and_resumed_equals_the_whole_run(whole, tmp_path, moments):
    for attempt, moment in enumerate(moments):
        killed(tmp_path / "run", moment, resume=attempt > 0)
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=LONGER, resume=True)
    assert files(tmp_path / "run") == files(whole)


@pytest.mark.parametrize(
    "estimator",
    [
        *("name='es', pairs=2", "name='pes', pairs=2", "name='blockwise', share=0.4"),
        "name='mixed', exact={name='blockwise', share=0.4}, evolution={name='es', pairs=4}, exact_members='plus'",
    ],
)
def test_an_estimators_state_is_resumed(tmp_path, estimator):
    changes = [*LONGER, f"unroll.estimator={{{estimator}}}", "meta.updates=5"]
    whole = l2lopt.meta_train(RECIPE, tmp_path / "whole", changes=changes)
    killed(tmp_path / "run", 3, changes)
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=changes, resume=True)
    assert files(tmp_path / "run") == files(whole)


def test_a_finished_run_resumed_stays_as_it_is(whole):
    before = files(whole)
    l2lopt.meta_train(RECIPE, whole, changes=LONGER, resume=True)
    assert files(whole) == before


def test_a_finished_run_without_its_checkpoint_is_not_begun_anew(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "checkpoint.safetensors").unlink()
    before = files(run)
    with pytest.raises(UserError, match=r"expected checkpoint\.safetensors, found a finished run without it; put it"):
        l2lopt.meta_train(RECIPE, run, changes=[*LONGER, "seed=5"], resume=True)
    assert files(run) == before
    with pytest.raises(UserError, match="overwrite: expected no resume beside it, found both"):
        l2lopt.meta_train(RECIPE, run, changes=LONGER, resume=True, overwrite=True)
    (run / "optimiser.safetensors").unlink()
    l2lopt.meta_train(RECIPE, run, changes=LONGER, resume=True)
    assert files(run) == before


def test_sparse_checkpoints_resume_as_well(tmp_path):
    changes = [*LONGER, "meta.checkpoint_every=4"]
    whole = l2lopt.meta_train(RECIPE, tmp_path / "whole", changes=changes)
    killed(tmp_path / "run", 7, changes)
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=changes, resume=True)
    assert files(tmp_path / "run") == files(whole)


def test_a_line_cut_short_is_dropped(whole, tmp_path):
    killed(tmp_path / "run", 4)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "meta-tr')
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=LONGER, resume=True)
    assert files(tmp_path / "run") == files(whole)


def test_a_checkpoint_of_another_config_is_refused_with_what_differs(whole):
    before = files(whole)
    with pytest.raises(UserError, match=r"expected unroll\.truncation = 3, found unroll\.truncation = 2"):
        l2lopt.meta_train(RECIPE, whole, changes=[*LONGER, "unroll.truncation=2"], resume=True)
    assert files(whole) == before


def test_the_evaluation_may_change(whole):
    before = files(whole)
    l2lopt.meta_train(RECIPE, whole, changes=[*LONGER, "evaluation.seeds=4"], resume=True)
    assert files(whole)["optimiser.safetensors"] == before["optimiser.safetensors"]
    l2lopt.meta_train(RECIPE, whole, changes=LONGER, resume=True)
    assert files(whole) == before


def test_a_checkpoint_on_other_data_is_refused(tmp_path):
    files = {name: str(tmp_path / f"{name}.txt") for name in ("train", "valid", "test")}
    for path in files.values():
        Path(path).write_text("the cat sat\n" * 30)
    task = {"name": "language-model", "data": {"name": "files", **files}, "embedding_size": 3, "layers": 1, "window": 5}
    recipe = {"optimisee": task | {"batch_size": 2}, "meta": {"updates": 2, "validate_every": 2, "checkpoint_every": 1}}
    recipe |= {"unroll": {"length": 2}, "validation": {"seeds": 1, "horizons": [1]}, "threads": 1}
    l2lopt.meta_train(recipe, tmp_path / "run")
    Path(files["valid"]).write_text("the dog sat\n" * 30)
    with pytest.raises(UserError, match=r"expected 0\.corpus = \w+, found 0\.corpus = \w+"):
        l2lopt.meta_train(recipe, tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    CheckpointFile(tmp_path / "c.safetensors", {"a": 1}).save({}, {})
    monkeypatch.setattr("l2lopt.storage.checkpoint.version", lambda name: "99.0")
    with pytest.raises(UserError, match=r"expected l2lopt = .*, found l2lopt = 99\.0"):
        CheckpointFile(tmp_path / "c.safetensors", {"a": 1}).load()


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    CheckpointFile(path, {"a": 1}).save({}, {})
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"expected a whole safetensors file.*remove it to begin anew"):
        CheckpointFile(path, {"a": 1}).load()


def test_nested_tables_become_one():
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": 3}) == {"a.b": 1, "a.c.d": [2], "e": 3}


@pytest.mark.slow
def test_real_kills(tmp_path):
    """SIGKILL at random moments of a run of some seconds."""
    changes = [*SMALL, "meta.updates=300", "meta.checkpoint_every=1", "meta.validate_every=25", "threads=1"]
    sets = [part for change in changes for part in ("--set", change)]
    kill_and_resume(["meta-train", RECIPE, *sets], tmp_path / "run", pause=0.3)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_run_killed_in_a_validation_loses_no_update(tmp_path, monkeypatch):
    whole = l2lopt.meta_train(RECIPE, tmp_path / "whole", changes=LONGER)
    for moment, update in ((2, 2), (1, 2), (2, 4)):  # the validation after update 2; that again; the one after 4
        with monkeypatch.context() as patch:
            interrupted(patch, build.Experiment, "score", moment)
            with pytest.raises(KeyboardInterrupt):
                l2lopt.meta_train(RECIPE, tmp_path / "run", changes=LONGER, resume=True)
        header, _ = tensor_file.read(tmp_path / "run" / "checkpoint.safetensors", "l2lopt.checkpoint", "", "")
        assert header["facts"]["update"] == update
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=LONGER, resume=True)
    assert files(tmp_path / "run") == files(whole)


def test_a_validation_whose_checkpoint_is_not_written_is_recorded_once(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupted(patch, CheckpointFile, "save", 4)  # the first, update 1, 2 before its validation, and after it
        with pytest.raises(KeyboardInterrupt):
            l2lopt.meta_train(RECIPE, tmp_path / "run", changes=LONGER)
    assert '"stage": "validation", "step": 2' in (tmp_path / "run" / "metrics.jsonl").read_text()
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=LONGER, resume=True)
    assert files(tmp_path / "run") == files(whole)
