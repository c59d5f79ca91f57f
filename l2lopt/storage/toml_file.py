"""Tables of TOML: read from files and from the command line, and checked for what a run could not write again."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import tomli_w

from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import existing

DEEPEST = 32
"""Levels of tables and lists in one another that are read; PyTorch, pydantic and JSON recurse into them."""
_INFINITE = ("meta.clip",)
"""Keys whose value may be infinite: no limit."""


def read_toml(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The tables of a TOML file; a byte order mark is passed over.

    Args:
        path: File to read.
        what: Description of the file for the error, such as "a config file".
        remedy: Advice for a missing file.

    Raises:
        UserError: For a missing file, for one that cannot be read or is not TOML, and for a value that `check` refuses.
    """
    existing(path, what, remedy)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError, OSError) as error:  # an error of TOML, or of UTF-8, is a ValueError
        raise UserError(str(path), expected="a TOML file", found=str(error), remedy="mend that place") from None
    check(str(path), table)
    return table


def value(text: str) -> Any:
    """The value that a text stands for on a command line: one of TOML, or the text itself where it is none.

    Raises:
        ValueError: For several lines of TOML, of which only the first could be read as a value.
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    if len(table) > 1:
        raise ValueError("several values")
    return table["value"]


def assignment(key: str, given: Any) -> str:
    r"""A change "key = value" that `value` reads as the same value, whatever characters are in it.

    Example:
        >>> from l2lopt.storage import toml_file
        >>> print(toml_file.assignment("label", 'the "best"'))
        label = "the \"best\""
    """
    return f"{key} = {tomli_w.dumps({'value': given}).partition('=')[2].strip()}"


def check(where: str, table: Any, path: str = "", depth: int = 0) -> None:
    """Refuses values that no run could write into its own config, and names that are no text.

    Args:
        where: Subject for the error, such as the file.
        table: Tables, lists and values.
        path: Keys that lead to them.
        depth: Number of tables and lists around them.

    Raises:
        UserError: For a number that is not finite, a whole one beyond TOML's 64 bits, a text that is not Unicode, a key
            or `name` that is no text, a number of NumPy or a path in place of a plain one, and for too many tables or
            lists in one another.
    """
    where_ = f"{where}: {path}" if path else where
    if depth > DEEPEST:
        remedy = "write it with fewer"
        raise UserError(where, expected=f"at most {DEEPEST} levels of tables", found="more", remedy=remedy)
    if isinstance(table, float) and not math.isfinite(table) and (math.isnan(table) or path not in _INFINITE):
        raise UserError(where_, expected="a finite number", found=str(table), remedy="change the value")
    if isinstance(table, int) and not -(2**63) <= table < 2**63:
        found = f"one of {table.bit_length()} bits"
        raise UserError(
            where_, expected="a whole number from -2^63 to 2^63 - 1", found=found, remedy="change the value"
        )
    if isinstance(table, str) and any("\ud800" <= c <= "\udfff" for c in table):
        raise UserError(where_, expected="a text in UTF-8", found=ascii(table), remedy="change the value")
    # NumPy's, which is not imported for it; its float64 and its text are Python's as well.
    is_numpys = type(table).__module__ == "numpy" and not isinstance(table, float | str)
    if isinstance(table, PurePath) or is_numpys:
        remedy = f"write {'str' if isinstance(table, PurePath) else 'int, float or list'}(…)"
        raise UserError(where_, expected="a plain value", found=repr(table), remedy=remedy)
    if isinstance(table, Mapping):
        for key, item in table.items():
            if not isinstance(key, str):
                raise UserError(where_, expected="texts as keys", found=repr(key), remedy="change the key")
            if key == "name" and not isinstance(item, str):
                raise UserError(f"{where_}.name", expected="a text", found=repr(item), remedy="change the value")
            check(where, item, f"{path}.{key}" if path else key, depth + 1)
    if isinstance(table, list | tuple):
        for number, item in enumerate(table):
            check(where, item, f"{path}.{number}", depth + 1)
