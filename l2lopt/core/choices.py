"""Arguments that are one of a few words: refused where they are another, however the function is called."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from l2lopt.core.errors import UserError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def checks_words(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: arguments annotated by a `Literal` must be one of its values.

    `registry.make` checks all options; this is for classes and functions that are called by themselves as well, where
    a misspelt word would choose whatever comes last.

    Raises:
        UserError: By the function, for another value.

    Example:
        >>> from typing import Literal
        >>> from l2lopt.core.choices import checks_words
        >>> @checks_words
        ... def pooled(reduction: Literal["mean", "sum"] = "mean"):
        ...     return reduction
        >>> pooled("men")
        Traceback (most recent call last):
        ...
        l2lopt.core.errors.UserError: pooled: reduction: expected 'mean' or 'sum', found 'men'; did you mean 'mean'?
    """
    signature = inspect.signature(function)
    words = {name: found for name, one in signature.parameters.items() if (found := _words(one))}
    subject = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError:
            return function(*args, **options)  # raises Python's own error
        for name, allowed in words.items():
            if name in given and given[name] not in allowed:
                expected = " or ".join(", ".join(map(repr, part)) for part in (allowed[:-1], allowed[-1:]) if part)
                remedy = did_you_mean(str(given[name]), map(str, allowed))
                raise UserError(f"{subject}: {name}", expected=expected, found=repr(given[name]), remedy=remedy)
        return function(*args, **options)

    return checked


def _words(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """The values that a parameter's annotation allows; none where it is no `Literal`."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return ()
    origin, parts = get_origin(parameter.annotation), get_args(parameter.annotation)
    if origin is Literal:
        return parts
    if origin in (Union, UnionType) and all(part is type(None) or get_origin(part) is Literal for part in parts):
        return tuple(value for part in parts for value in (get_args(part) or (None,)))
    return ()
