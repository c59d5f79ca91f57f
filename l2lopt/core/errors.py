"""The one exception for user mistakes: what was expected, what came, what to do."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

MANY = 10_000
"""The most parts, such as layers, that anything is made of: beyond, making them would take hours."""

LONG = 200
"""The most characters in which an error shows a value; a longer one is shown by its class."""


class UserError(ValueError):
    """A mistake the user can mend; its text is one line, and the command line ends on it with exit code 2.

    Args:
        where: Subject of the mistake: a file, a config key, an argument.
        expected: Description of what would have been right.
        found: Description of what came instead.
        remedy: The next thing for the user to do, as an imperative.

    Example:
        >>> from l2lopt import UserError
        >>> print(UserError("lr", expected="a rate above 0", found="-1", remedy="give a positive rate"))
        lr: expected a rate above 0, found -1; give a positive rate
    """

    def __init__(self, where: str, *, expected: str, found: str, remedy: str) -> None:
        self.where, self.expected, self.found, self.remedy = where, expected, found, remedy
        text = f"{where}: expected {expected}, found {found}; {remedy}"
        super().__init__(printable(" ".join(text.split())))

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can come from another process."""
        return partial(UserError, expected=self.expected, found=self.found, remedy=self.remedy), (self.where,)


def printable(text: str, but: str = "") -> str:
    r"""A text in which every character that is not printed stands as its escape, but for those in `but`.

    Names in files from elsewhere may hold control sequences, which would act on the terminal that shows them.

    Example:
        >>> from l2lopt.core.errors import printable
        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def install(extra: str) -> str:
    """The remedy for a missing package: the command that installs it with ours, which is not on the index yet."""
    return f'pip install "l2lopt[{extra}] @ git+https://github.com/l2lopt/l2lopt"'


def shown(value: Any) -> str:
    """A value for an error: as Python writes it, but a tensor by its shape and dtype, and what is long by its class.

    Example:
        >>> from l2lopt.core.errors import shown
        >>> import torch
        >>> shown(0.5), shown(torch.zeros(40, 3))
        ('0.5', 'a Tensor [40, 3] of float32')
    """
    name = with_article(type(value).__name__)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if isinstance(value, str) or len(text) <= LONG else name


def with_article(name: str) -> str:
    """A noun, such as the name of a class, with "a" or "an" before it."""
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


@contextmanager
def within(where: str) -> Iterator[None]:
    """Puts `where` before the subject of every `UserError` of the block, such as the file that a mistake is in."""
    try:
        yield
    except UserError as error:
        rest = {"expected": error.expected, "found": error.found, "remedy": error.remedy}
        raise UserError(f"{where}: {error.where}", **rest) from None


def at_least_0(where: str, **values: float) -> None:
    """Refuses values below 0, infinity and NaN, each under its own name."""
    for name, value in values.items():
        if not value >= 0:
            raise UserError(f"{where}: {name}", expected="at least 0", found=str(value), remedy="change the value")
    finite(where, **values)


def above_0(where: str, **values: float) -> None:
    """Refuses values that are not above 0, infinity and NaN, each under its own name."""
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{where}: {name}", expected="above 0", found=str(value), remedy="change the value")
    finite(where, **values)


def finite(where: str, **values: float) -> None:
    """Refuses infinities and NaN, each under its own name."""
    for name, value in values.items():
        # Not `math.isfinite`, which fails on whole numbers that no float can hold.
        if not abs(value) < math.inf:
            remedy = "change the value"
            raise UserError(f"{where}: {name}", expected="a finite number", found=str(value), remedy=remedy)


def few(where: str, **values: int) -> None:
    """Refuses numbers of parts, made one after the other, that are not from 1 to `MANY`, each under its own name."""
    for name, value in values.items():
        if not 1 <= value <= MANY:
            expected = f"from 1 to {MANY}"
            raise UserError(f"{where}: {name}", expected=expected, found=str(value), remedy="change the value")


def did_you_mean(name: str, known: Iterable[str], older: Iterable[str] = ()) -> str:
    """A remedy for a misspelt `name`: the nearest of the names, or else all of the `known`.

    Args:
        name: The name that nobody knows.
        known: Names to choose from.
        older: Earlier names of the same things, which are still read: suggested if one is the nearest, never listed.
    """
    known = sorted(known)
    near = get_close_matches(name, [*known, *older], n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known) or 'nothing: there are none'}"
