"""A misspelt word is refused by every class and function that takes one of a few, not by the registry alone."""

import inspect
from typing import Literal, get_args, get_origin

import pytest

import optimisees
from l2lopt import cells, sequence
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from optimisees import OPTIMISEES

ENTRIES = {
    **{name: entry for name, entry in cells.CELLS.items() if isinstance(entry, type)},
    **OPTIMISEES,
    "deep-gru": sequence.deep_bidirectional_gru,
}
TAKING = [
    (name, argument)
    for name, entry in ENTRIES.items()
    for argument, parameter in inspect.signature(entry).parameters.items()
    if get_origin(parameter.annotation) is Literal
]


def test_the_table_has_entries_of_each_kind():
    assert {("gru", "update"), ("mlp", "loss"), ("draw", "binarise"), ("deep-gru", "activation")} <= {*TAKING}
    assert len(TAKING) > 20


@pytest.mark.parametrize(("name", "argument"), TAKING)
def test_another_word_is_refused(name, argument):
    """Before anything is made or read, and with the nearest word."""
    entry = ENTRIES[name]
    word = get_args(inspect.signature(entry).parameters[argument].annotation)[0]
    needed = {
        key: 3
        for key, parameter in inspect.signature(entry).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    with pytest.raises(UserError, match=rf": {argument}: expected .*{word}.*, found '{word}x'; did you mean '{word}'"):
        entry(**{**needed, argument: f"{word}x"})


def test_what_is_no_literal_is_left_alone():
    @checks_words
    def taken(one: Literal["a", "b"] | None = None, /, other: str = "c", **rest: Literal["d"]):
        return one, other, rest

    assert taken() == (None, "c", {})
    assert taken("b", other="e", more="f") == ("b", "e", {"more": "f"})
    with pytest.raises(UserError, match="taken: one: expected 'a', 'b' or None, found 'c'"):
        taken("c")
    with pytest.raises(TypeError, match=r"unexpected|positional"):
        taken(None, "c", "d")
    assert inspect.signature(optimisees.mlp).parameters["loss"].default == "cross-entropy"
