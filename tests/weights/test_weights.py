"""Learned optimisers as files."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.weights import files


@pytest.fixture
def path(tmp_path):
    return tmp_path / "optimiser.safetensors"


def made(**options):
    return optimisers.make("coordinatewise", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rule": {"name": "additive", "step_size": 0.5}, "inputs": ["log-and-sign"], "hidden_size": 3, "seed": 7},
        {"inputs": [{"name": "log-and-sign", "p": 5.0}, "rnnprop"], "cell": {"name": "lstm"}},
    ],
)
def test_a_saved_optimiser_comes_back(path, options):
    optimiser = made(**options)
    with torch.no_grad():
        for parameter in optimiser.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    files.save(optimiser, path, {"updates": 3})
    loaded = files.load(path)
    assert loaded.description == optimiser.description
    assert files.header(path)["training"] == {"updates": 3}
    for name, value in optimiser.phi().items():
        assert torch.equal(loaded.phi()[name], value)
    for mine, theirs in zip(optimiser.modules(), loaded.modules(), strict=True):
        assert {k: v for k, v in vars(mine).items() if isinstance(v, float)} == {
            k: v for k, v in vars(theirs).items() if isinstance(v, float)
        }


def test_equal_optimisers_make_equal_bytes(path):
    files.save(made(), path, {"b": 1, "a": 2})
    first = path.read_bytes()
    files.save(made(), path, {"a": 2, "b": 1})
    assert path.read_bytes() == first


@pytest.mark.parametrize("kept", [0, 4, 100, 4000, -1])
def test_a_file_cut_short_is_refused(path, kept):
    files.save(made(), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="expected a whole safetensors file"):
        files.load(path)


def test_a_foreign_file_is_refused(path):
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(UserError, match=r"expected a learned optimiser, found other tensors"):
        files.load(path)


def test_another_layout_is_refused(path):
    other = {"version": 99, "release": "7.1", "optimiser": {}, "training": {}}
    save_file({}, path, metadata={"l2lopt": json.dumps(other)})
    with pytest.raises(UserError, match=r"found layout 99, written by l2lopt 7\.1; use l2lopt 7\.1 to read it"):
        files.load(path)
    save_file({}, path, metadata={"l2lopt": json.dumps({"version": 0})})
    with pytest.raises(UserError, match=r"found layout 0, written by another release"):
        files.load(path)


def test_tensors_of_another_shape_are_refused(path):
    optimiser = made()
    optimiser.description = {**optimiser.description, "hidden_size": 7}
    files.save(optimiser, path)
    with pytest.raises(UserError, match=r"head\.weight \[2, 7\].*head\.weight \[2, 20\]"):
        files.load(path)


def test_an_optimiser_without_description_is_refused(path):
    with pytest.raises(UserError, match=r"l2lopt\.optimisers\.make"):
        files.save(optimisers.coordinatewise(), path)
    assert not path.exists()


def test_a_digest_sees_what_a_rule_does():
    """Options changed by hand and buffers count; where a rule's parts lie in memory does not."""
    one = optimisers.make("sgd", lr=1.0)
    other = deepcopy(one)
    other.lr = 0.1
    assert files.digest(one) != files.digest(other)
    one, other = deepcopy(one), deepcopy(one)
    one.register_buffer("scale", torch.ones(2))
    other.register_buffer("scale", torch.zeros(2))
    assert files.digest(one) != files.digest(other)
    one, other = optimisers.make("sgd", lr=1.0), optimisers.make("sgd", lr=1.0)
    one.squash, other.squash = Squash(), Squash()
    assert files.digest(one) == files.digest(other)


class Squash:
    """An option without a text of its own."""
