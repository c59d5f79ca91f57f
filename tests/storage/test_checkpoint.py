"""Checkpoints: which they refuse."""

import pytest
import torch

from l2lopt.core.errors import UserError
from l2lopt.storage import checkpoint
from l2lopt.storage.checkpoint import CheckpointFile


def test_one_of_the_same_work_is_loaded(tmp_path):
    facts, tensors = {"update": 3}, {"phi": torch.arange(3.0)}
    CheckpointFile(tmp_path / "c.safetensors", {"a": {"b": 1}}).save(facts, tensors)
    loaded = CheckpointFile(tmp_path / "c.safetensors", {"a": {"b": 1}}).load()
    assert loaded is not None
    assert loaded[0] == facts
    assert torch.equal(loaded[1]["phi"], tensors["phi"])


def test_what_is_loaded_does_not_hang_on_the_file(tmp_path):
    """Windows renames no new checkpoint over a file that is mapped; of a mapped one the tensors would change here."""
    path, tensors = tmp_path / "c.safetensors", {"phi": torch.arange(3.0)}
    CheckpointFile(path, {"a": 1}).save({}, tensors)
    loaded = CheckpointFile(path, {"a": 1}).load()
    assert loaded is not None
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    assert torch.equal(loaded[1]["phi"], tensors["phi"])


@pytest.mark.parametrize("package", ["torch", "l2lopt"])
def test_one_of_another_release_is_refused(tmp_path, monkeypatch, package):
    path = tmp_path / "c.safetensors"
    CheckpointFile(path, {"a": 1}).save({}, {"phi": torch.ones(1)})
    if package == "torch":
        monkeypatch.setattr(torch, "__version__", "0.4.1")
    else:
        monkeypatch.setattr(checkpoint, "version", lambda _: "0.4.1")
    with pytest.raises(UserError, match=rf"found {package} = 0\.4\.1"):
        CheckpointFile(path, {"a": 1}).load()
