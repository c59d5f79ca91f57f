"""Learned optimisers as files."""

import functools
import json
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

import l2lopt
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
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


def test_tensors_of_another_shape_are_refused(path, monkeypatch):
    optimiser = made()
    optimiser.description = {**optimiser.description, "hidden_size": 7}
    monkeypatch.setattr(files, "_differing", lambda _: [])  # which would refuse to write it
    files.save(optimiser, path)
    with pytest.raises(UserError, match=r"head\.weight \[2, 7\].*head\.weight \[2, 20\]"):
        files.load(path)


def test_an_optimiser_without_description_is_refused(path):
    with pytest.raises(UserError, match=r"l2lopt\.optimisers\.make"):
        files.save(optimisers.coordinatewise(), path)
    assert not path.exists()


class Noting(optimisers.SGD):
    """Notes in `init` what it was told."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)

    def init(self, layout, *arguments, **options):
        self.size = layout.size
        return super().init(layout, *arguments, **options)


def test_what_a_rule_notes_while_it_works_is_no_option(path):
    """A meta-training would end in a refusal to write its result."""
    rule = optimisers.make(f"{__name__}:Noting")
    rule.init(Layout(("w",), ((3,),)))
    files.save(rule, path)
    rule.lr = 0.2
    with pytest.raises(UserError, match="expected the options of its description, found others: lr;"):
        files.save(rule, path)
    rule.lr, rule.part = 0.1, torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match=r"found others: part\.in_features"):
        files.save(rule, path)


class Frozen(optimisers.SGD):
    """Has a parameter beside φ that is not trained, and another one in every instance."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.fixed = torch.nn.Parameter(torch.rand(2), requires_grad=False)
        self.trained = torch.nn.Parameter(torch.rand(2))

    def phi(self):
        return {name: value for name, value in self.named_parameters() if value.requires_grad}


def test_parameters_that_phi_leaves_out_come_back(path):
    rule = optimisers.make(f"{__name__}:Frozen")
    files.save(rule, path)
    loaded = files.load(path, trusted=True)
    assert torch.equal(loaded.fixed, rule.fixed)
    assert torch.equal(loaded.trained, rule.trained)
    assert files.digest(loaded) == files.digest(rule) != files.digest(optimisers.make(f"{__name__}:Frozen"))


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


@contextmanager
def renamed(*kinds):
    before = [kind.__qualname__ for kind in kinds]
    for kind in kinds:
        kind.__qualname__ = f"Renamed{kind.__name__}"
    try:
        yield
    finally:
        for kind, name in zip(kinds, before, strict=True):
            kind.__qualname__ = name


def test_a_rename_or_a_new_attribute_leaves_the_digest_alone(monkeypatch):
    before = {name: files.digest(build()) for name, build in DESCRIBED.items()}
    kinds = {type(part) for build in DESCRIBED.values() for part in build().modules()}
    kinds = [kind for kind in kinds if kind.__module__.startswith("l2lopt.")]
    for kind in kinds:
        monkeypatch.setattr(kind, "__init__", with_other_attributes(kind.__init__))
    assert DESCRIBED["lstm"]().needs_loss is False
    with renamed(*kinds):
        assert {name: files.digest(build()) for name, build in DESCRIBED.items()} == before


def with_other_attributes(init):
    """A constructor that leaves one attribute more and some under other names."""

    @functools.wraps(init)
    def wrapped(self, *options, **named):
        init(self, *options, **named)
        self.needs_loss = False
        for name in {"lr", "eps", "p", "scale", "step_size"} & vars(self).keys():
            setattr(self, f"its_{name}", vars(self).pop(name))

    return wrapped


DESCRIBED = {
    **{name: functools.partial(files.load, name) for name in files.list_weights()},
    "gated": lambda: made(rule="gated", inputs=["log-and-sign", "momenta"]),
    **{
        name: functools.partial(optimisers.make, name, lr=0.1)
        for name in optimisers.HAND_DESIGNED
        if name != "scheduled"
    },
    "scheduled": lambda: optimisers.make("scheduled", optimiser="sgd", lr=0.1),
}
DIGESTS = {
    "lstm": "2:e2b0fe5b8052ee9f",
    "ihc-lstm": "2:8467cb385fce4a58",
    "coordinatewise-lstm": "2:aefd9cba8941ece9",
    "coordinatewise-ihc-lstm": "2:91dcd6ffcfeb38a2",
    "sgd": "2:a7e69f55735db3b3",
    "momentum": "2:acf2d84f234b3090",
    "adam": "2:f3d90d69418fd611",
    "adamw": "2:b8653914b4033c14",
    "normalised-adam": "2:f56b6cbe1fd982c8",
    "muon": "2:b5361875cd81fb95",
    "nadamw": "2:1418ab4d1b17ed61",
    "lion": "2:ad1aa2257e2ce7af",
    "dowg": "2:f259909979dd96bd",
    "normalised-muon": "2:f29d7e14c7edd5a1",
}


def test_a_digest_has_its_version_and_is_the_same_for_ever():
    """What stands in users' states; a new version of it needs a way to take up those."""
    assert {name: files.digest(DESCRIBED[name]()) for name in DIGESTS} == DIGESTS


def test_one_description_said_in_two_ways_has_one_digest():
    one = made(cell={"name": "lstm"}, inputs=["log-and-sign", {"name": "rnnprop"}])
    assert files.digest(one) == files.digest(made(inputs=["log-and-sign", "rnnprop"], cell="lstm"))


@pytest.mark.parametrize(
    "other",
    [
        {"rule": {"name": "direction-and-magnitude", "step_size": 0.02}},
        {"inputs": [{"name": "log-and-sign", "p": 5.0}, "rnnprop", "log-step"]},
        {"head_scale": 0.2},
        {"seed": 1},
    ],
)
def test_another_option_is_another_digest(other):
    assert files.digest(made(**other)) != files.digest(made())


def test_each_number_and_dtype_counts():
    names = [*made().phi()]
    digests = {files.digest(made()), files.digest(made().double())}
    for name in names:
        optimiser = made()
        with torch.no_grad():
            optimiser.phi()[name].view(-1)[0] += 1e-3
        digests.add(files.digest(optimiser))
    assert len(digests) == 2 + len(names)


def test_without_a_description_options_and_kinds_count():
    rates = torch.tensor([0.1, 0.2]), torch.tensor([0.1, 0.20001])
    rules = [optimisers.SGD(0.1), optimisers.SGD(0.2), optimisers.Momentum(0.1), Other(0.1), optimisers.adam(0.1)]
    rules += [optimisers.AdamW(0.1, eps=0.2), optimisers.AdamW(0.2, eps=0.1), *map(optimisers.SGD, rates)]
    rules += [optimisers.coordinatewise(rule=rule) for rule in ("additive", "bounded")]
    rules += [optimisers.coordinatewise(cell=cell) for cell in ("lstm", "gru", "ihc-lstm")]
    assert len({files.digest(rule) for rule in rules}) == len(rules)
    assert files.digest(optimisers.SGD(0.1)) == files.digest(optimisers.SGD(0.1))


def test_without_a_description_a_name_of_ours_does_not_count():
    rules = optimisers.coordinatewise(), optimisers.SGD(0.1)
    before = [files.digest(rule) for rule in rules]
    with renamed(optimisers.Coordinatewise, optimisers.SGD):
        assert [files.digest(rule) for rule in rules] == before


def test_a_description_of_another_table_does_for_a_digest():
    one, other = (optimisers.build({"name": "own", "lr": lr}, {"own": Other}) for lr in (0.1, 0.2))
    assert files.digest(one) != files.digest(other)


class Other(optimisers.SGD):
    """Somebody's own rule."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)


class Squash:
    """An option without a text of its own."""


def test_a_file_names_modules_only_where_it_is_trusted(path):
    """A file of weights is data: nothing in it is imported or called unasked."""
    files.save(made(cell="l2lopt.cells.lstm:LSTM"), path)
    with pytest.raises(UserError, match=r"cell 'l2lopt\.cells\.lstm:LSTM': expected a registered name in a file of w"):
        files.load(path)
    loaded = files.load(path, trusted=True)
    assert torch.equal(loaded.phi()["head.weight"], made().phi()["head.weight"])


def test_a_rule_that_is_not_finite_is_not_written_over_a_good_one(tmp_path):
    rule, path = l2lopt.load("lstm"), tmp_path / "rule.safetensors"
    l2lopt.save(rule, path)
    before = path.read_bytes()
    with torch.no_grad():
        next(rule.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="expected finite numbers"):
        l2lopt.save(rule, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weights_are_the_same_whatever_pytorchs_default_is(dtype):
    expected = files.digest(l2lopt.load("lstm"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert files.digest(l2lopt.load("lstm")) == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("rule", "name", "facts", "message"),
    [
        (None, "", None, "expected a file to write, found a folder"),
        (None, "a.safetensors", {"when": torch.ones(1)}, "save: training: expected values of JSON"),
        (torch.nn.Linear(2, 2), "a.safetensors", None, "save: expected an optimiser, found a Linear"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, rule, name, facts, message):
    with pytest.raises(UserError, match=message):
        l2lopt.save(rule or l2lopt.load("lstm"), tmp_path / name, facts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", optimisers.UNTUNED)
def test_a_rule_without_weights_is_not_recommended_to_who_asks_for_weights(name):
    with pytest.raises(UserError, match=f"{name}: .* it has no weights: give its name to LearnedOptimizer") as refusal:
        files.load(name)
    assert "one of" not in str(refusal.value)
