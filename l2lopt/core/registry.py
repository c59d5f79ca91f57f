"""Choosing an implementation by name: one table of name → class or function, its options checked against the signature.

A *choice*, as a config has it, is a name or a mapping with the key `name` and the options beside it. A name is a key of
the table, or "module:attribute" for a class or function of any module that Python can import, such as
"mypackage.mymodule:make". Importing a module and calling what is in it runs code, so a config can run any code that is
installed: read the names in a config from someone else before you use it. Files of weights are meant to be passed on;
they are built inside `only_registered`, where such names are refused.
"""

import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from l2lopt.core.errors import UserError, did_you_mean, shown, with_article

Table: TypeAlias = Mapping[str, Callable[..., Any]]
Choice: TypeAlias = str | dict[str, Any]
_PLAIN = (str, int, float, list, dict, NoneType)
"""Classes of what a config may hold."""
_UNIONS = (typing.Union, UnionType)
_NOUNS = {"str": "a text", "int": "a number", "float": "a number", "bool": "true or false", "dict": "a table"}
"""Names of classes → what a config calls their values."""
_CLOSED = ContextVar("closed", default=False)
"""Whether names of modules are refused."""


@contextmanager
def only_registered() -> Iterator[None]:
    """Refuses "module:attribute" names inside the block: for choices that come from a file anyone may have written."""
    token = _CLOSED.set(True)
    try:
        yield
    finally:
        _CLOSED.reset(token)


def make(table: Table, kind: str, name: str, /, **options: Any) -> Any:
    """Builds `find(table, kind, name)(**options)` after checking the options' names and types.

    Args:
        table: Name → class or function.
        kind: Noun for the table's entries in error messages ("cell", "optimiser").
        name: Name of the entry, or "module:attribute".
        options: Keyword arguments of the entry.

    Raises:
        UserError: For an unknown name or option, a missing one, one of the wrong type, and for a tensor that would not
            fit into the memory.

    Example:
        >>> from l2lopt.core import registry
        >>> registry.make({"twice": lambda x: 2 * x}, "function", "twice", x=4)
        8
        >>> registry.make({}, "distribution", "statistics:NormalDist", sigma=2.0)
        NormalDist(mu=0.0, sigma=2.0)
    """
    from l2lopt.core.memory import watched  # imported here: PyTorch takes seconds, and a config is checked without it

    name, options = _current_spelling(table, name, options)
    # Numbers of NumPy as Python's, without importing it.
    options = {key: value.item() if _is_numpys(value) else value for key, value in options.items()}
    entry, where = find(table, kind, name), f"{kind} {name!r}"
    checked = _check(where, _options_model(entry), options)
    with watched(where):
        return entry(**checked)


def _is_numpys(value: Any) -> bool:
    """Whether a value is a single number of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0


def find(table: Table, kind: str, name: str) -> Callable[..., Any]:
    """The class or function that a name stands for: an entry of the table, or an attribute of any module.

    "module:attribute" imports the module, which runs its code: use such names only from configs that you trust.

    Args:
        table: Name → class or function.
        kind: Noun for the table's entries in error messages.
        name: Name of the entry, or "module:attribute", where the attribute may be dotted.

    Raises:
        UserError: For an unknown name, a module that cannot be imported, a missing attribute, or one that cannot be
            called.
    """
    if name in table:
        return table[name]
    module_name, colon, path = name.partition(":")
    if not colon:
        remedy = did_you_mean(name, table, _old_names(table))
        raise UserError(kind, expected="a known name", found=repr(name), remedy=remedy)
    where = f"{kind} {name!r}"
    if _CLOSED.get():
        remedy = "if you trust it, load it with l2lopt.load(path, trusted=True), or say trusted = true beside weights"
        raise UserError(where, expected="a registered name in a file of weights", found="a module's", remedy=remedy)
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        remedy = 'write it as "package.module:name"'
        raise UserError(where, expected="a module and a name in it", found=repr(name), remedy=remedy)
    found = _module(where, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            remedy = did_you_mean(part, [known for known in dir(found) if not known.startswith("_")])
            raise UserError(where, expected=f"{part!r} in {module_name}", found="none", remedy=remedy)
        found = getattr(found, part)
    try:
        inspect.signature(found)
    except (TypeError, ValueError):
        remedy = "name one that says which arguments it takes"
        raise UserError(where, expected="a class or function", found=type(found).__name__, remedy=remedy) from None
    entry: Callable[..., Any] = found
    return entry


def product(entry: Callable[..., Any]) -> Any:
    """The class whose instance an entry makes: the entry itself, or what a function's annotation says; else None."""
    return entry if isinstance(entry, type) else _hints(entry).get("return")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's annotations; none where they name what only a type checker imports."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def _module(where: str, name: str) -> Any:
    """The module called `name`, imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        found = f"no module {error.name!r}" if missing else f"an import that fails: {error}"
        remedy = "install it, or put its folder into PYTHONPATH" if missing else "mend the module"
        raise UserError(where, expected=f"a module {name!r}", found=found, remedy=remedy) from None
    except Exception as error:  # whatever the user's module does
        found = f"an import that fails: {type(error).__name__}: {error}"
        raise UserError(where, expected=f"a module {name!r}", found=found, remedy="mend the module") from error


def build(table: Table, kind: str, choice: Choice, /, **extra: Any) -> Any:
    """`make` for a choice: a name, or a mapping of `name` and options; `extra` options are the caller's alone.

    Raises:
        UserError: For what `make` refuses, and for a mapping without a name or with one of the caller's options.
    """
    given: object = choice  # whatever a caller takes for a choice, such as a class
    if not isinstance(given, str | Mapping):
        remedy = by_name(given) or f"give the name of a {kind}"
        found = repr(given) if isinstance(given, type) else f"a {type(given).__name__}"
        raise UserError(kind, expected="a name or a table with the key 'name'", found=found, remedy=remedy)
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = options.pop("name", None)
    if not isinstance(name, str):
        remedy = f"add name = one of {', '.join(sorted(table))}"
        raise UserError(kind, expected="a table with the key 'name'", found=f"{choice}", remedy=remedy)
    name, options = _current_spelling(table, name, options)
    for option in options.keys() & extra.keys():
        raise UserError(
            f"{kind} {name!r}", expected=f"no {option} here", found=option, remedy="drop the key: it is set for you"
        )
    return make(table, kind, name, **options, **_taken(table, kind, name, extra))


def checked_kind(kind: str, choice: Choice, made: Any, wanted: type[Any]) -> Any:
    """What a choice has made, if it is of the kind that was asked for; a module's function may make anything.

    Args:
        kind: Noun for the table's entries in error messages.
        choice: Choice that was built.
        made: Object that it has made.
        wanted: Class of which it must be.

    Raises:
        UserError: For an object of another class.
    """
    if not isinstance(made, wanted):
        chosen = choice if isinstance(choice, str) else choice.get("name")
        expected, found = (with_article(name) for name in (wanted.__name__, type(made).__name__))
        raise UserError(f"{kind} {chosen!r}", expected=expected, found=found, remedy="name one that makes it")
    return made


def _old_names(table: Table) -> dict[str, str]:
    """Earlier name → name, from the `old_names` of the entries that have any."""
    return {old: name for name, entry in table.items() for old in getattr(entry, "old_names", ())}


def _current_spelling(table: Table, name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A choice as it is spelt today: configs of earlier versions stay readable.

    An entry that was renamed lists its earlier names in `old_names`; one whose options were renamed has a table
    `old_options`, earlier name → name. An option given under both names is left alone, and refused as unknown.
    """
    name = name if name in table else _old_names(table).get(name, name)
    renamed = getattr(table.get(name), "old_options", {})
    new = {option: renamed.get(option, option) for option in options}
    return name, {old if new[old] in options else new[old]: value for old, value in options.items()}


def _taken(table: Table, kind: str, name: str, extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """The caller's own options, which an entry must have in its signature."""
    for option in extra:
        entry = find(table, kind, name)
        if option not in _options_model(entry).model_fields:
            remedy = f"add {option} to the arguments of {getattr(entry, '__name__', name)}"
            raise UserError(f"{kind} {name!r}", expected=f"an option {option!r}", found="none", remedy=remedy)
    return extra


def explain(where: str, error: ValidationError, known: Mapping[str, Any], data: Any) -> UserError:
    """The first finding of a pydantic `error` about `data` as a `UserError`; `known` are the keys at its top."""
    findings = error.errors(include_url=False)
    # An unknown key explains a missing one beside it.
    first = next((finding for finding in findings if finding["type"] == "extra_forbidden"), findings[0])
    path = _keys(first["loc"], data)
    place = f"{where}: {'.'.join(path)}" if path else where
    if first["type"] == "extra_forbidden":
        remedy = did_you_mean(path[-1], _fields_at(known, path[:-1]))
        return UserError(place, expected="a known key", found=repr(path[-1]), remedy=remedy)
    if first["type"] == "missing":
        place = f"{where}: {'.'.join([*path, str(first['loc'][-1])])}"
        return UserError(place, expected="a value", found="none", remedy="add the key")
    # A value that may be of several types has a finding for each of them.
    expected = dict.fromkeys(_expectation(other["msg"]) for other in findings if _keys(other["loc"], data) == path)
    found, remedy = first["input"], by_name(first["input"]) or "change the value"
    if not isinstance(found, _PLAIN) and len(path) == 1:
        # An object: pydantic says of a named tuple only how many items it has.
        expected = dict.fromkeys(_kinds(getattr(known.get(path[0]), "annotation", None))) or expected
    return UserError(place, expected=" or ".join(expected), found=shown(found), remedy=remedy)


def _kinds(annotation: Any) -> list[str]:
    """The classes that an annotation allows, with their articles."""
    members = typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else (annotation,)
    classes = [kind for member in members if isinstance(kind := typing.get_origin(member) or member, type)]
    return [_NOUNS.get(kind.__name__) or with_article(kind.__name__) for kind in classes if kind is not NoneType]


def by_name(value: Any) -> str | None:
    """A remedy for a class or function where a config has its name; None for anything else."""
    if not (callable(value) and hasattr(value, "__qualname__")):
        return None
    module = "mymodule" if value.__module__ == "__main__" else value.__module__
    return f"put it into a module and name it {f'{module}:{value.__qualname__}'!r}"


def _keys(location: tuple[int | str, ...], data: Any) -> list[str]:
    """The keys and indices of a finding's place in `data`, without pydantic's marks for the members of a union."""
    path: list[str] = []
    for part in location:
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))
        if inside:
            path.append(str(part))
            data = data[part]
    return path


def _expectation(message: str) -> str:
    message = message[:1].lower() + message[1:]
    for clutter in ("input should be ", "value error, ", "an instance of "):
        message = message.removeprefix(clutter)
    return {"Sequence": "a list", "a valid dictionary": "a table"}.get(message, message)


def _fields_at(fields: Mapping[str, Any], path: list[str]) -> list[str]:
    """The keys that a model allows at `path` below its top."""
    named = False
    for key in path:
        if key.isdigit() or named:  # an item of a list, or of a table whose keys are names, has that one's model
            named = False
            continue
        annotation = getattr(fields.get(key), "annotation", None)
        named = typing.get_origin(annotation) is dict
        models = [a for a in (annotation, *typing.get_args(annotation)) if isinstance(a, type)]
        fields = next((m.model_fields for m in models if issubclass(m, BaseModel)), {})
    return list(fields)


def _check(where: str, model: type[BaseModel], options: dict[str, Any]) -> dict[str, Any]:
    try:
        checked = model.model_validate(options)
    except ValidationError as error:
        raise explain(where, error, model.model_fields, options) from None
    return {name: getattr(checked, name) for name in options}


@cache
def _options_model(entry: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model of the keyword arguments of `entry`."""
    function = inspect.getattr_static(entry, "__init__") if isinstance(entry, type) else entry
    hints = _hints(function)
    fields: dict[str, Any] = {
        parameter.name: (
            hints.get(parameter.name, Any),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in inspect.signature(entry).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)  # those of a base without options
        and not parameter.name.startswith("_")
    }
    config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    return create_model(getattr(entry, "__name__", "options"), __config__=config, **fields)
