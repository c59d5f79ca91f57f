"""Free runs that are interrupted: they go on from their checkpoint to the same bits."""

from pathlib import Path

import pytest
import torch
from implementations import OPTIMISEES, OPTIMISERS, each
from killing import killed

from l2lopt import kernels
from l2lopt.core.errors import UserError
from l2lopt.core.types import Carry, silent
from l2lopt.evaluation import rows
from l2lopt.evaluation.free_runs import run_free
from l2lopt.experiments.run_cache import FileCache
from l2lopt.optimisers import SGD
from l2lopt.storage.checkpoint import CheckpointFile, read

MARKS = [0, 4, 9]


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch):
    monkeypatch.setattr(rows.Rows, "due", lambda self: True)
    monkeypatch.setattr(rows, "LOOK_EVERY", 0.0)


@pytest.fixture
def every_report(monkeypatch):
    """Steps are told one by one, so that there is a report to be killed at."""
    monkeypatch.setattr("l2lopt.evaluation.free_runs._Progress.stepped", lambda self, step: self.tell(step))


def same(one, other):
    assert one.steps == other.steps
    assert torch.equal(one.first, other.first)
    assert all(torch.equal(one.losses[split], other.losses[split]) for split in other.losses)


@pytest.mark.parametrize("label", each(OPTIMISERS))
def test_interrupted_runs_end_in_the_same_bits(tmp_path, every_report, label):
    quadratic, seeds = OPTIMISEES["quadratic"](), [3, 4]
    whole = run_free(kernels.fuse(OPTIMISERS[label]()), quadratic, seeds, MARKS)
    checkpoint, steps = CheckpointFile(tmp_path / "runs.safetensors", {}), []

    def work(report):
        rule = kernels.fuse(OPTIMISERS[label]())
        return run_free(rule, quadratic, seeds, MARKS, report=report, checkpoint=checkpoint)

    for moment in (3, 4, 3):  # a step, the reading at 4, and a step after it
        killed(work, moment)
        steps.append(checkpoint.load()[0]["place"])
    told = []
    same(work(lambda *event: told.append(event[1])), whole)
    assert told[0] > 4, "from the checkpoint on, and not from the beginning"
    assert len({str(place) for place in steps}) == 3


def test_running_statistics_are_in_the_checkpoint(tmp_path, every_report):
    task = OPTIMISEES["mlp with batch norm"]()
    checkpoint = CheckpointFile(tmp_path / "runs.safetensors", {})
    whole = run_free(SGD(0.05), task, [3], MARKS)

    def work(report=silent):
        return run_free(SGD(0.05), task, [3], MARKS, report=report, checkpoint=checkpoint)

    killed(work, 8)
    same(work(), whole)


def cached(cache, report=silent, rate=0.05):
    """Two runs by way of a store."""
    quadratic = OPTIMISEES["quadratic"]()
    return cache(
        {"rate": rate}, lambda kept: run_free(SGD(rate), quadratic, [3, 4], MARKS, report=report, checkpoint=kept)
    )


def test_a_store_has_the_checkpoint_until_the_runs_are_made(tmp_path, every_report):
    cache, begun = FileCache(tmp_path, {}), []
    killed(lambda report: cached(cache, report), 4)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
    cached(cache, rate=0.1)  # other runs have their own
    curves = cached(cache, lambda *event: begun.append(event[1]))
    assert begun[0] == 3
    same(curves, run_free(SGD(0.05), OPTIMISEES["quadratic"](), [3, 4], MARKS))
    assert [path.suffix for path in tmp_path.iterdir()] == [".json", ".json"]


@pytest.mark.parametrize("damage", ["bytes", "another release", "another shape"])
def test_a_checkpoint_that_does_not_suit_is_as_good_as_none(tmp_path, every_report, monkeypatch, damage):
    cache, begun = FileCache(tmp_path, {}), []
    killed(lambda report: cached(cache, report), 6)
    (path,) = tmp_path.iterdir()
    if damage == "bytes":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "another release":
        monkeypatch.setattr("l2lopt.storage.checkpoint.version", lambda name: "0.0.0")
    else:
        checkpoint = CheckpointFile(path, read(path)[0]["work"])
        facts, tensors = checkpoint.load()
        checkpoint.save(facts, tensors | {"first": torch.zeros(3)})
    cached(cache, lambda *event: begun.append(event[1]))
    assert begun[0] == 0


def test_a_full_disk_ends_no_run(monkeypatch, caplog):
    class Full(CheckpointFile):
        def save(self, facts, tensors):
            raise UserError("runs", expected="space", found="none", remedy="make some")

    kept = Full(Path("nowhere.safetensors"), {})
    curves = run_free(SGD(0.05), OPTIMISEES["quadratic"](), [3], MARKS, checkpoint=kept)
    same(curves, run_free(SGD(0.05), OPTIMISEES["quadratic"](), [3], MARKS))
    assert "no checkpoint of the runs: runs: expected space" in caplog.text


def test_looks_at_the_clock_follow_the_pace(monkeypatch):
    """After the first step as many as take `LOOK_EVERY` seconds, and no further than the next reading."""
    monkeypatch.setattr(rows, "LOOK_EVERY", 5.0)
    runs = rows.Rows(Carry(torch.zeros(1, 2), (), None), ["train"])
    assert runs.ahead(100) == 1
    runs.step, runs.seconds = 10, 20.0
    assert runs.ahead(100) == 2
    assert runs.ahead(11) == 1
    runs.seconds = 80.0
    assert runs.ahead(100) == 1
    runs.seconds = 0.0
    assert runs.ahead(100) == 90


def test_checkpoints_are_minutes_apart_and_cost_a_twentieth_at_most(monkeypatch):
    monkeypatch.undo()
    now, saved = [0.0], []
    monkeypatch.setattr(rows.time, "monotonic", lambda: now[0])

    class Slow(CheckpointFile):
        def save(self, facts, tensors):
            saved.append(now[0])
            now[0] += 60.0

    runs, kept = rows.Rows(Carry(torch.zeros(1, 2), (), None), ["train"]), Slow(Path("nowhere.safetensors"), {})
    for _ in range(200):
        now[0] += 10.0
        runs.save(kept)
    assert saved == [300.0, 1560.0]
