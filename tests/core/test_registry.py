"""Choices by name: what is built, and the one line that a mistake gives."""

import sys
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import implementations
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2lopt import cells, estimators, optimisers
from l2lopt.core import registry
from l2lopt.core.errors import UserError, did_you_mean
from optimisees import OPTIMISEES


class Widget:
    """Something to build."""

    def __init__(
        self, size: int, rate: float = 0.5, mode: Literal["slow", "fast"] = "slow", parts: Sequence[int] = ()
    ) -> None:
        self.options = (size, rate, mode, list(parts))


def gadget(flag: bool = False, limit: int | None = None) -> tuple[bool, int | None]:
    return flag, limit


class Plain(torch.nn.Module):
    """Something without options, whose base takes any arguments."""


TABLE = {"widget": Widget, "gadget": gadget}


@pytest.mark.parametrize(
    ("choice", "extra", "expected"),
    [
        ({"name": "widget", "size": 3, "mode": "fast"}, {}, (3, 0.5, "fast", [])),
        ({"name": "widget", "rate": 2, "parts": [1, 2]}, {"size": 1}, (1, 2, "slow", [1, 2])),
        ("widget", {"size": 3, "parts": (4,)}, (3, 0.5, "slow", [4])),
    ],
)
def test_builds_a_class(choice, extra, expected):
    assert registry.build(TABLE, "thing", choice, **extra).options == expected


def test_builds_a_class_without_options():
    assert isinstance(registry.make({"plain": Plain}, "thing", "plain"), Plain)
    with pytest.raises(UserError, match="'args'; choose one of nothing"):
        registry.make({"plain": Plain}, "thing", "plain", args=1)


@pytest.mark.parametrize("choice", ["gadget", {"name": "gadget"}])
def test_builds_a_function(choice):
    assert registry.build(TABLE, "thing", choice) == (False, None)
    assert registry.build(TABLE, "thing", choice, flag=True, limit=7) == (True, 7)


def test_a_choice_is_left_as_it_was():
    choice = {"name": "gadget", "flag": True}
    registry.build(TABLE, "thing", choice)
    assert choice == {"name": "gadget", "flag": True}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("wigdet", "thing: expected a known name, found 'wigdet'; did you mean 'widget'?"),
        ("zzz", "thing: expected a known name, found 'zzz'; choose one of gadget, widget"),
        (
            {"size": 1},
            "thing: expected a table with the key 'name', found {'size': 1}; add name = one of gadget, widget",
        ),
        (
            {"name": 3},
            "thing: expected a table with the key 'name', found {'name': 3}; add name = one of gadget, widget",
        ),
        ({"name": "widget"}, "thing 'widget': size: expected a value, found none; add the key"),
        (
            {"name": "widget", "size": 1, "raet": 1.0},
            "thing 'widget': raet: expected a known key, found 'raet'; did you mean 'rate'?",
        ),
        (
            {"name": "gadget", "zzz": 1},
            "thing 'gadget': zzz: expected a known key, found 'zzz'; choose one of flag, limit",
        ),
        ({"name": "widget", "size": "3"}, "size: expected a valid integer, found '3'; change the value"),
        ({"name": "widget", "size": True}, "size: expected a valid integer, found True; change the value"),
        ({"name": "widget", "size": 1.0}, "size: expected a valid integer, found 1.0; change the value"),
        ({"name": "widget", "size": 1, "rate": "fast"}, "rate: expected a valid number, found 'fast'; change"),
        ({"name": "widget", "size": 1, "mode": "medium"}, "mode: expected 'slow' or 'fast', found 'medium'; change"),
        ({"name": "widget", "size": 1, "parts": [1, "2"]}, "parts.1: expected a valid integer, found '2'; change"),
        ({"name": "gadget", "flag": 1}, "flag: expected a valid boolean, found 1; change the value"),
        ({"name": "gadget", "limit": "x"}, "'gadget': limit: expected a valid integer, found 'x'; change the value"),
        ({"name": "gadget", "flag": "a\nb"}, "flag: expected a valid boolean, found"),
        ({"name": "gadget", "kind": 1}, "kind: expected a known key"),
    ],
)
def test_a_mistake_is_one_line_with_expected_found_and_remedy(choice, message):
    with pytest.raises(UserError) as caught:
        registry.build(TABLE, "thing", choice)
    text = str(caught.value)
    assert message in text
    assert len(text.splitlines()) == 1
    assert text == f"{caught.value.where}: expected {caught.value.expected}, found {caught.value.found}; " + (
        caught.value.remedy
    )


class Renamed:
    old_names = ("rnamed", "gizmo")
    old_options: ClassVar = {"truncation": "window"}

    def __init__(self, window: int = 1, seed: int = 0) -> None:
        self.window, self.seed = window, seed


@pytest.mark.parametrize("name", ["renamed", "gizmo"])
@pytest.mark.parametrize("option", ["window", "truncation"])
def test_old_spellings_stay_readable(name, option):
    table = TABLE | {"renamed": Renamed}
    assert registry.make(table, "thing", name, **{option: 3}).window == 3
    built = registry.build(table, "thing", {"name": name, option: 3}, seed=4)
    assert (built.window, built.seed) == (3, 4)
    assert registry.build(table, "thing", name, seed=4).seed == 4


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("zzz", "choose one of gadget, renamed, widget"),
        ("gizm", "did you mean 'gizmo'"),
        ({"name": "gizmo", "truncation": 1, "window": 1}, "thing 'renamed': truncation: expected a known key"),
        ({"name": "gizmo", "truncation": "a"}, "thing 'renamed': window: expected a valid integer"),
    ],
)
def test_mistakes_are_told_in_new_spellings(choice, message):
    with pytest.raises(UserError, match=message):
        registry.build(TABLE | {"renamed": Renamed}, "thing", choice)


def test_an_option_that_the_caller_gives_cannot_be_chosen():
    with pytest.raises(UserError, match="flag"):
        registry.build(TABLE, "thing", {"name": "gadget", "flag": True}, flag=False)


@given(st.text(), st.text(), st.text(), st.text())
def test_errors_are_one_line_whatever_they_quote(where, expected, found, remedy):
    assert len(str(UserError(where, expected=expected, found=found, remedy=remedy)).splitlines()) == 1


@given(st.text(), st.lists(st.text(min_size=1), unique=True))
def test_did_you_mean_names_a_known_name_or_all(name, known):
    remedy = did_you_mean(name, iter(known))
    nearest = [other for other in known if remedy == f"did you mean {other!r}?"]
    assert nearest or remedy == f"choose one of {', '.join(sorted(known)) or 'nothing: there are none'}"


@pytest.mark.parametrize(
    ("registered", "tested"),
    [
        (cells.CELLS | cells.PAIR_CELLS, implementations.CELLS),
        (cells.CELLS | cells.PAIR_CELLS, oracles.CELLS),
        (optimisers.OPTIMISERS, implementations.OPTIMISERS),
        (optimisers.INPUTS, implementations.INPUTS),
        (optimisers.RULES, implementations.RULES),
        (
            estimators.ESTIMATORS,
            implementations.DETERMINISTIC_ESTIMATORS
            | implementations.MODULE_ESTIMATORS
            | implementations.RANDOM_ESTIMATORS,
        ),
        (OPTIMISEES, implementations.OPTIMISEES),
    ],
    ids=["cells", "oracles of cells", "optimisers", "inputs", "rules", "unrolls", "optimisees"],
)
def test_every_registered_implementation_is_tested(registered, tested):
    assert set(registered) <= {label.split()[0].strip(",") for label in tested}


def test_an_entry_without_the_callers_option_is_told_of_it():
    def lonely(size: int = 1) -> int:
        return size

    with pytest.raises(
        UserError, match="thing 'lonely': expected an option 'seed', found none; add seed to the arguments"
    ):
        registry.build({"lonely": lonely}, "thing", "lonely", seed=1)


@pytest.fixture
def _mine(tmp_path, monkeypatch):
    """A module of the user's, `mine.things`, with a class, functions and a number; and one that fails."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "things.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from nowhere import Thing\n"
        "class Box:\n    class Inner:\n"
        "        def __init__(self, size: int = 1) -> None:\n            self.size = size\n"
        "def make(size: int, _cache={}) -> int:\n    return 2 * size\n"
        "def vague(size) -> Thing:\n    return size\n"
        "number = 3\n"
    )
    (tmp_path / "mine" / "broken.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "mine" / "wrong.py").write_text("size = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_mine")
def test_a_name_may_be_a_modules():
    assert registry.build(TABLE, "thing", {"name": "mine.things:make", "size": 4}) == 8
    assert registry.build(TABLE, "thing", "mine.things:make", size=4) == 8
    assert registry.make(TABLE, "thing", "mine.things:Box.Inner", size=3).size == 3
    assert registry.make(TABLE, "thing", "mine.things:vague", size="x") == "x"  # without types nothing is checked
    assert registry.build({"mine.things:make": gadget}, "thing", "mine.things:make") == (False, None)


@pytest.mark.usefixtures("_mine")
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "mine.none:make",
            "thing 'mine.none:make': expected a module 'mine.none', found no module 'mine.none'; install",
        ),
        (
            "other.things:make",
            "expected a module 'other.things', found no module 'other'; install it, or put its folder",
        ),
        ("mine.broken:make", "expected a module 'mine.broken', found an import that fails: No module named 'a_module_"),
        ("mine.wrong:make", "found an import that fails: ZeroDivisionError: division by zero; mend the module"),
        ("mine.things:mak", "expected 'mak' in mine.things, found none; did you mean 'make'?"),
        ("mine.things:Box.Iner", "expected 'Iner' in mine.things, found none; did you mean 'Inner'?"),
        ("mine.things:number", "expected a class or function, found int; name one"),
        ("mine.things:", "expected a module and a name in it, found 'mine.things:'; write it as"),
        (":make", "expected a module and a name in it"),
        ("mine.things:make:x", "expected a module and a name in it"),
        ("../things:make", "expected a module and a name in it"),
        ({"name": "mine.things:make"}, "thing 'mine.things:make': size: expected a value, found none; add the key"),
        ({"name": "mine.things:make", "size": "x"}, "size: expected a valid integer, found 'x'"),
        ({"name": "mine.things:make", "sise": 1}, "sise: expected a known key, found 'sise'; did you mean 'size'?"),
    ],
)
def test_a_mistake_in_a_modules_name_is_one_line(choice, message):
    with pytest.raises(UserError) as caught:
        registry.build(TABLE, "thing", choice)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.usefixtures("_mine")
def test_a_modules_name_must_take_the_callers_options():
    with pytest.raises(UserError, match="expected an option 'device', found none; add device to the arguments of make"):
        registry.build(TABLE, "thing", {"name": "mine.things:make", "size": 1}, device="cpu")


@pytest.mark.usefixtures("_mine")
def test_files_of_weights_cannot_name_modules():
    with registry.only_registered(), pytest.raises(UserError, match="expected a registered name in a file of weights"):
        registry.make(TABLE, "thing", "mine.things:make", size=4)
    assert "mine.things" not in sys.modules
    assert registry.make(TABLE, "thing", "mine.things:make", size=4) == 8


class Samples(NamedTuple):
    """Data of an entry."""

    inputs: torch.Tensor


def over(data: str | Samples | None = None, size: int = 1, table: dict[str, int] | None = None) -> None:
    """An entry that takes data."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": torch.zeros(2, 3)}, "data: expected a text or a Samples, found a Tensor [2, 3] of float32; change"),
        ({"data": (torch.zeros(500),) * 2}, "data: expected a text or a Samples, found a tuple; change the value"),
        ({"size": torch.zeros(2).numpy()}, "size: expected a number, found a ndarray [2] of float32; change the value"),
        ({"table": [0] * 500}, "table: expected a table, found a list; change the value"),
    ],
)
def test_an_object_is_shown_by_its_class_beside_the_class_that_is_wanted(options, message):
    with pytest.raises(UserError) as caught:
        registry.make({"over": over}, "thing", "over", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "expected"), [(Widget, Widget), (gadget, tuple[bool, int | None]), (lambda: 1, None), (len, None)]
)
def test_an_entry_tells_what_it_makes(entry, expected):
    assert registry.product(entry) == expected
