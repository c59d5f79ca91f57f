"""One process at a time works in a run's folder, and a dead one keeps nobody out."""

import os
import subprocess
import sys

import pytest
from killing import Killed
from test_experiments import RECIPE, SMALL

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.storage import run_lock
from l2lopt.storage.run_lock import locked

HOLD = """
import sys, pathlib, time
from l2lopt.storage.run_lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
TRAIN = {"optimisee": {"name": "quadratic", "size": 3}, "optimiser": "torch.optim.SGD", "train": {"steps": 3}}


def test_a_second_owner_is_refused_with_the_first_ones_number(tmp_path):
    with locked(tmp_path / "run"):
        refused = rf"run: expected .*, found process {os.getpid()} on .*; wait .* another --run"
        with pytest.raises(UserError, match=refused), locked(tmp_path / "run"):
            pytest.fail("two owners")
        with pytest.raises(UserError), locked(tmp_path / "run"):
            pytest.fail("the refusal has freed the lock")
    with locked(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []


def test_a_killed_owner_holds_nothing(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {owner.pid} on"), locked(tmp_path):
            pytest.fail("two owners")
        owner.kill()
        owner.wait()
    assert (tmp_path / run_lock.NAME).exists()
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / run_lock.NAME).read_text()


def test_a_lock_that_is_removed_before_it_is_taken_is_taken_anew(tmp_path, monkeypatch):
    """Its owner ends between the two calls: nobody else would see a lock on a file without a name."""
    take, calls = run_lock._take, []

    def late(handle):
        if not calls:
            (tmp_path / run_lock.NAME).unlink()
        calls.append(handle)
        take(handle)

    monkeypatch.setattr(run_lock, "_take", late)
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UserError), locked(tmp_path):
            pytest.fail("two owners")


def test_a_file_system_without_locks_locks_nothing(tmp_path, monkeypatch):
    def unknown(handle):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock, "_take", unknown)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="expected a folder to write in"), locked(tmp_path / "file" / "run"):
        pytest.fail("no folder")


@pytest.mark.parametrize("again", [{"resume": True}, {"overwrite": True}, {}])
@pytest.mark.parametrize("verb", ["train", "meta_train"])
def test_a_run_under_way_is_left_alone(tmp_path, verb, again):
    config, changes = (TRAIN, []) if verb == "train" else (RECIPE, [*SMALL, "meta.updates=2"])
    run, refused = getattr(l2lopt, verb), []

    def report(*_):
        with pytest.raises(UserError, match=f"process {os.getpid()} on") as error:
            run(config, tmp_path / "run", changes=changes, **again)
        refused.append(error)
        raise Killed

    with pytest.raises(Killed):
        run(config, tmp_path / "run", changes=changes, report=report)
    assert refused
    run(config, tmp_path / "run", changes=changes, resume=True)
    assert not (tmp_path / "run" / run_lock.NAME).exists()
    assert (tmp_path / "run" / "config.toml").exists()


def test_a_lock_left_by_a_kill_is_no_run(tmp_path):
    (tmp_path / run_lock.NAME).write_text("process 1 on elsewhere")
    l2lopt.train(TRAIN, tmp_path)
    with pytest.raises(UserError, match="found an earlier run"):
        l2lopt.train(TRAIN, tmp_path)


def test_an_evaluation_locks_its_runs(tmp_path):
    changes = [*SMALL, "meta.updates=2"]
    run = l2lopt.meta_train(RECIPE, tmp_path / "run", changes=changes)
    with locked(run), pytest.raises(UserError, match=f"process {os.getpid()} on"):
        l2lopt.evaluate(run)


def test_the_owner_stands_at_the_beginning_wherever_the_lock_was_taken(tmp_path, monkeypatch):
    """On Windows a byte far behind the text is locked, and the handle stands there."""
    take = run_lock._take

    def far(handle):
        os.lseek(handle, 1 << 20, os.SEEK_SET)
        take(handle)

    monkeypatch.setattr(run_lock, "_take", far)
    with locked(tmp_path):
        assert (tmp_path / run_lock.NAME).read_text().startswith(f"process {os.getpid()} on ")
