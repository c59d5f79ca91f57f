"""A full disk ends in one line, damages nothing, and the run goes on once there is space."""

import errno
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.storage import disk_space, tensor_file
from l2lopt.storage.disk_space import disk_full, needs_space
from l2lopt.storage.run_log import Records, write_text

CONFIG = {
    "optimisee": {"name": "quadratic", "size": 3},
    "optimiser": "torch.optim.SGD",
    "train": {"steps": 6, "evaluate_every": 2, "checkpoint_every": 2},
}


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["ENOSPC", "EFBIG", "EDQUOT"])
def test_the_users_mistake_names_the_file(name):
    number = getattr(errno, name)
    with pytest.raises(UserError, match=r"a\.txt: expected space .*; make space"), needs_space(Path("a.txt")):
        raise OSError(number, os.strerror(number))


def test_an_error_of_rust_counts_as_well():
    with pytest.raises(UserError, match="expected space"), needs_space(Path("a")):
        raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), SafetensorError("(os error 13)"), ValueError("28")])
def test_other_errors_stay_what_they_are(error):
    assert disk_full(error) is None
    with pytest.raises(type(error)) as raised, needs_space(Path("a")):
        raise error
    assert raised.value is error


def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path, monkeypatch):
    write_text(tmp_path / "a.txt", "first")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=r"a\.txt: expected space"):
            write_text(tmp_path / "a.txt", "second")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "first")]


LIMITED = """
import resource, signal, sys
from l2lopt.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
@pytest.mark.parametrize("size", [10, 300, 900, 2000, 20000])
def test_a_full_disk_ends_in_one_line(tmp_path, size):
    """A limit on the sizes of files stands for it: config, records, events, checkpoint and figures fail in turn."""
    config = tmp_path / "c.toml"
    config.write_text('optimisee = "quadratic"\noptimiser = "torch.optim.SGD"\ntrain = {steps = 20}\n')
    command = ["train", config, "--run", tmp_path / "run", "--resume"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(size), *map(str, command)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "expected space for it on the disk" in done.stderr
    l2lopt.train(config, tmp_path / "run", resume=True)
    l2lopt.train(config, tmp_path / "whole")
    for name in ("model.safetensors", "metrics.jsonl", "result.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_under_the_output_ends_in_one_line():
    with Path("/dev/full").open("w") as output:
        command = [sys.executable, "-m", "l2lopt", "weights"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("l2lopt: the disk: expected space")


class Full:
    """A file on a disk that has become full."""

    def __init__(self, file):
        self.file = file

    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        full()

    def close(self):
        self.file.close()


@pytest.mark.parametrize("part", ["lines", "events"])
def test_a_log_that_does_not_fit_goes_on_once_there_is_space(tmp_path, monkeypatch, part):
    l2lopt.train(CONFIG, tmp_path / "whole")

    def fill(records):
        if part == "lines":
            records._lines = Full(records._lines)
        else:
            records._board._records._writer = Full(records._board._file)

    class Filling(Records):
        def write(self, stage, step, figures):
            if (stage, step) == ("train", 5):
                fill(self)
            super().write(stage, step, figures)

    with monkeypatch.context() as patch:
        patch.setattr("l2lopt.experiments.runs.Records", Filling)
        with pytest.raises(UserError, match="metrics.jsonl: " if part == "lines" else "events.out.tfevents"):
            l2lopt.train(CONFIG, tmp_path / "run")
    l2lopt.train(CONFIG, tmp_path / "run", resume=True)
    for name in ("model.safetensors", "metrics.jsonl", "result.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
@pytest.mark.parametrize("part", ["lines", "events"])
def test_a_real_full_device(tmp_path, part):
    records = Records(tmp_path)
    device = Path("/dev/full").open("a") if part == "lines" else Path("/dev/full").open("ab")  # noqa: SIM115  # closed by the records
    if part == "lines":
        records._lines.close()
        records._lines = device
    else:
        records._board._file.close()
        records._board._file = records._board._records._writer = device
    with pytest.raises(UserError, match="expected space"), closing(records):
        records.write("train", 1, {"loss": 1.0})


def test_tensors_that_do_not_fit(tmp_path, monkeypatch):
    def rust(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")

    monkeypatch.setattr(tensor_file, "save_file", rust)
    with pytest.raises(UserError, match=r"a\.safetensors: expected space"):
        tensor_file.write(tmp_path / "a.safetensors", "key", {}, {"a": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []


def test_windows_numbers_a_full_disk_otherwise(monkeypatch):
    monkeypatch.setattr(disk_space, "_FULL_IN_RUST", {39, 112})
    assert disk_full(SafetensorError("(os error 112)")) is not None
    assert disk_full(SafetensorError("(os error 28)")) is None
    assert disk_full(OSError(errno.ENOSPC, "full")) is not None
