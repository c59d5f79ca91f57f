"""What loads is what was written; files have the permissions that the user's umask leaves."""

import json
import os
import stat
from contextlib import closing
from pathlib import Path

import pytest
import torch
from implementations import write_pictures
from safetensors.torch import save_file

import l2lopt
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.evaluation.board import board
from l2lopt.experiments import run_folder
from l2lopt.optimisee import SavedRun
from l2lopt.storage import tensor_file
from l2lopt.storage.checkpoint import CheckpointFile
from l2lopt.storage.run_log import Records, existing, write_json, write_text
from l2lopt.weights import files
from optimisees.data import images


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "left"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path, umask, mask, left):
    umask(mask)
    write_text(tmp_path / "a.txt", "a")
    write_json(tmp_path / "a.json", {}, seal=True)
    files.save(optimisers.make("sgd", lr=0.1), tmp_path / "a.safetensors")
    images.load(str(write_pictures(tmp_path / "pictures", size=(2, 2), train=1, test=1)))
    cache = next((tmp_path / ".l2lopt-cache").iterdir())
    assert stat.S_IMODE(cache.stat().st_mode) == left
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("a.*")}
    assert found == dict.fromkeys(("a.txt", "a.json", "a.safetensors"), left)


def test_a_name_as_long_as_the_file_system_takes_is_written(tmp_path):
    path = tmp_path / ("x" * 250 + ".txt")
    write_text(path, "a")
    assert path.read_text() == "a"


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected a config, found File name too long"):
        existing(tmp_path / ("x" * 5000), "a config", "do this")
    with pytest.raises(UserError, match="expected a folder to write in, found File name too long"):
        run_folder.claimed(tmp_path / ("x" * 5000), False, False).__enter__()


def test_a_place_that_cannot_be_written_in_is_refused(tmp_path):
    """As a folder of another user's: below a file there is none."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.txt", Path("/proc/l2lopt/a.txt")):
        with pytest.raises(UserError, match=r"(file|/proc/l2lopt): expected a folder to write in, found "):
            write_text(path, "a")
    with pytest.raises(UserError, match="expected a folder to write in"):
        l2lopt.save(network(), tmp_path / "file" / "a.safetensors")
    with pytest.raises(
        UserError, match="expected a file that can be written, found File name too long; choose another"
    ):
        l2lopt.save(network(), tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="expected a folder to write in"), board(tmp_path / "file" / "tensorboard"):
        pass


def test_the_home_folder_may_be_said_in_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    l2lopt.save(network(), "~/mine.safetensors")
    assert (tmp_path / "mine.safetensors").exists()
    assert l2lopt.load("~/mine.safetensors").description == network().description
    with pytest.raises(UserError, match="~nobody-here/x: expected a learned optimiser"):
        l2lopt.load("~nobody-here/x")
    l2lopt.save(network(), "~/run/optimiser.safetensors")
    assert l2lopt.load("~/run").description == network().description  # as of a folder that meta-training has left


def network():
    return optimisers.make("coordinatewise", hidden_size=3)


def rewritten(path, **changes):
    """The file with other tensors under a right digest."""
    header, tensors = tensor_file.read(path, "l2lopt", "", "")
    tensor_file.write(path, "l2lopt", header, tensors | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.fill_(torch.nan), r"expected finite numbers, found others in head\.weight"),
        (lambda w: w.double() * 1e300 * 1e8, r"expected finite numbers, found others in head\.weight"),
        (lambda w: w.to(torch.int64), r"expected head\.weight float, found head\.weight int64"),
        (lambda w: w.to(torch.bool), r"expected head\.weight float, found head\.weight bool"),
        (lambda w: w[:1], r"expected head\.weight \[2, 3\], found head\.weight \[1, 3\]"),
        (lambda w: w.T.contiguous(), r"expected head\.weight \[2, 3\], found head\.weight \[3, 2\]"),
    ],
)
def test_other_numbers_than_weights_are_are_refused_by_the_files_name(tmp_path, change, message):
    path = tmp_path / "own.safetensors"
    files.save(network(), path)
    rewritten(path, **{"head.weight": change(network().phi()["head.weight"].detach().clone() + 1)})
    with pytest.raises(UserError, match=rf"own\.safetensors: {message}"):
        files.load(path)


def test_weights_of_another_precision_load(tmp_path):
    path, rule = tmp_path / "own.safetensors", network()
    files.save(rule.double(), path)
    loaded = files.load(path).phi()
    assert all(torch.equal(loaded[name], value.float()) for name, value in rule.phi().items())


def test_weights_of_earlier_releases_load(tmp_path):
    """As version 0.1.0 wrote them: the same header, without a digest."""
    header = {"version": 1, "release": "0.1.0", "optimiser": network().description, "training": {}}
    save_file(dict(network().phi()), tmp_path / "old.safetensors", metadata={"l2lopt": json.dumps(header)})
    assert torch.equal(files.load(tmp_path / "old.safetensors").phi()["head.weight"], network().phi()["head.weight"])


@pytest.mark.parametrize("name", files.list_weights())
def test_the_shipped_weights_have_a_digest(tmp_path, name):
    content = bytearray(files.find(name).read_bytes())
    content[-4] ^= 1  # the lowest bit of the last number
    (tmp_path / "flipped.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"flipped\.safetensors: expected a learned optimiser, whole, found damage"):
        files.load(tmp_path / "flipped.safetensors")


def test_a_mistake_in_a_description_names_the_file(tmp_path):
    path = tmp_path / "own.safetensors"
    rule = network()
    rule.description = {**rule.description, "cell": "lstmm"}
    files.save(rule, path)
    with pytest.raises(UserError, match=r"own\.safetensors: cell: expected a known name, found 'lstmm'"):
        files.load(path)


def test_a_description_of_a_giant_is_refused_before_its_memory_is_taken(tmp_path, monkeypatch):
    path = tmp_path / "own.safetensors"
    rule = network()
    rule.description = {**rule.description, "hidden_size": 5000}
    monkeypatch.setattr(files, "_differing", lambda _: [])  # which would refuse to write it
    files.save(rule, path)
    with pytest.raises(UserError, match=r"own\.safetensors: .*expected at most .* of memory, found a need of"):
        files.load(path)


def test_a_checkpoint_of_foreign_facts_is_refused_by_name(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    recipe = {"optimisee": {"name": "quadratic", "size": 2}, "optimiser": "torch.optim.Adam", "train": {"steps": 3}}
    l2lopt.train(recipe, tmp_path)
    header, tensors = tensor_file.read(path, "l2lopt.checkpoint", "", "")
    assert header["facts"].keys() == {"step", "place"}
    for facts, own in (({}, tensors), ({"step": 1, "place": {}}, tensors), (header["facts"], {})):
        tensor_file.write(path, "l2lopt.checkpoint", header | {"facts": facts}, own)
        with pytest.raises(UserError, match=r"checkpoint\.safetensors: expected a checkpoint of this work"):
            l2lopt.train(recipe, tmp_path, resume=True)
    name = "params/theta"
    for other in (tensors[name][:1], tensors[name].long()):
        tensor_file.write(path, "l2lopt.checkpoint", header, tensors | {name: other})
        with pytest.raises(UserError, match=r"checkpoint\.safetensors: expected a checkpoint of this work"):
            l2lopt.train(recipe, tmp_path, resume=True)


def test_a_checkpoint_of_other_fields_is_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    tensor_file.write(path, "l2lopt.checkpoint", {"work": [], "facts": {}}, {})
    with pytest.raises(
        UserError, match=r"c\.safetensors: header: expected the fields of a checkpoint, found 'work' of"
    ):
        CheckpointFile(path, {}).load()


def test_a_model_with_nan_is_not_sampled_from(tmp_path):
    recipe = {"optimisee": {"name": "quadratic", "size": 2}, "optimiser": "torch.optim.Adam", "train": {"steps": 1}}
    l2lopt.train(recipe, tmp_path)
    path = tmp_path / "model.safetensors"
    assert isinstance(run_folder.saved(tmp_path, "a model")[1], SavedRun)
    header, tensors = tensor_file.read(path, "l2lopt.model", "", "")
    tensor_file.write(path, "l2lopt.model", header, {name: value * torch.nan for name, value in tensors.items()})
    with pytest.raises(UserError, match=r"model\.safetensors: expected finite numbers"):
        run_folder.saved(tmp_path, "a model")


@pytest.mark.parametrize("line", ["{}", "[]", "3", '{"step": 1}', '{"stage": "a"}', '{"stage": "a", "step": "1"}', "{"])
def test_a_log_goes_on_after_a_line_that_is_none(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    known = ['{"stage": "train", "step": 1, "loss": 0.5}', '{"stage": "train", "step": 2, "loss": 0.25}']
    path.write_text(f"{known[0]}\n{line}\n{known[1]}")  # and a last line without its end
    with closing(Records(tmp_path, 2)) as records:
        records.write("train", 3, {"loss": 0.125})
    assert path.read_text().splitlines() == [*known, '{"stage": "train", "step": 3, "loss": 0.125}']
