"""Records: lines, events and files written by rename."""

import json
import math
import signal
import threading
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import Records, existing, interrupted_after, write_json, write_text, written_whole


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


def test_an_interruption_waits_until_tensorboard_has_all_of_a_call(tmp_path, monkeypatch):
    """In the middle of it the interruption would leave a lock of TensorBoard's held that `close` waits for."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with closing(Records(tmp_path)) as records:
            added = records._board.add_scalar

            def interrupted(*given):
                signal.raise_signal(signal.SIGINT)
                added(*given)

            monkeypatch.setattr(records._board, "add_scalar", interrupted)
            with pytest.raises(KeyboardInterrupt):
                records.write("train", 1, {"loss": 2.5, "rate": 0.5})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for name in ("loss", "rate") for event in events.Scalars(f"train/{name}")] == [2.5, 0.5]


def test_other_threads_write_without_a_handler(tmp_path):
    failed = []

    def write():
        try:
            with interrupted_after():
                pass
        except ValueError as error:  # `signal.signal` outside the main thread
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert not failed


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


def test_json_holds_no_bare_nan(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1.0, math.nan], "b": {"c": math.inf}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1.0, None], "b": {"c": None}}


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_path_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "none"
    with pytest.raises(UserError, match=r"expected a config.*do this"):
        existing(path, "a config", "do this")
