"""Records: lines, events and files written by rename."""

import json
import math
import os
import time
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import Records, clear_unfinished, existing, write_json, write_text, written_whole


def test_figures_reach_the_lines_and_tensorboard(tmp_path):
    with closing(Records(tmp_path)) as records:
        records.write("meta-train", 1, {"loss": 2.5, "norm": math.inf})
        records.write("meta-train", 2, {"loss": 1.5, "norm": 3.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"stage": "meta-train", "step": 1, "loss": 2.5, "norm": None},
        {"stage": "meta-train", "step": 2, "loss": 1.5, "norm": 3.0},
    ]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("meta-train/loss")] == [(1, 2.5), (2, 1.5)]


def test_a_stage_that_is_made_again_stands_once_in_tensorboard(tmp_path):
    """A kill between a checkpoint and the end of the validation after it: the validation is made again."""
    with closing(Records(tmp_path)) as records:
        for step in (1, 2, 3):
            records.write("meta-train", step, {"loss": 1.0 / step, "norm": math.inf})
            records.write("validation", step, {"score": 0.5})
    with closing(Records(tmp_path, 2, "validation")) as records:
        records.write("validation", 2, {"score": 0.25})
        records.write("meta-train", 3, {"loss": 0.125})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("meta-train/loss")] == [(1, 1.0), (2, 0.5), (3, 0.125)]
    assert [(e.step, e.value) for e in events.Scalars("validation/score")] == [(1, 0.5), (2, 0.25)]
    assert [e.step for e in events.Scalars("meta-train/norm")] == [1, 2]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        ("meta-train", 1),
        ("validation", 1),
        ("meta-train", 2),
        ("validation", 2),
        ("meta-train", 3),
    ]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "first")

    def interrupted():
        with written_whole(path) as temporary:
            temporary.write_text("sec")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert path.read_text() == "first"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_what_killed_processes_have_left_is_cleared_once_nobody_can_be_writing_it(tmp_path):
    names = [".free-run-0123456789ab.json", ".tmpA1b2C3", "free-run.json", ".mine.txt", ".tmpA1b2C3d", ".tmp"]
    for folder in (tmp_path, tmp_path / "a" / "b", tmp_path / ".hidden"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).write_text("half")
            os.utime(folder / name, (time.time() - 4000,) * 2)
    young = tmp_path / "a" / ".free-run-ba9876543210.json"
    young.write_text("half")
    clear_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == set(names[2:])
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == set(names[2:])
    assert {path.name for path in (tmp_path / ".hidden").iterdir()} == set(names)
    assert young.exists()
    clear_unfinished(tmp_path / "absent")


def test_json_holds_no_bare_nan(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1.0, math.nan], "b": {"c": math.inf}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1.0, None], "b": {"c": None}}


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_path_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "none"
    with pytest.raises(UserError, match=r"expected a config.*do this"):
        existing(path, "a config", "do this")
