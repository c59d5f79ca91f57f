"""The directives `settings` and `choices`: tables of a config's keys, and of what may be named in it.

Both read the code when the documentation is built: the keys from the settings' fields and the text below each, the
choices from a registry and the docstrings of its entries.
"""

import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docutils import nodes
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from l2lopt.core.registry import Choice

NUMBERS = {"Gt": "above", "Ge": "at least", "Lt": "below", "Le": "at most"}
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "table", Any: "anything"}


def found(path: str) -> Any:
    """The object that "module:name" stands for."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def kind_of(annotation: Any) -> str:
    """A type in the words of a config's reader."""
    if annotation == Choice:
        return "name, or table with `name`"
    if get_origin(annotation) is Annotated:
        inner, *limits = get_args(annotation)
        words = [
            f"{word} {getattr(limit, kind.lower())}"
            for limit in limits
            for kind, word in NUMBERS.items()
            if type(limit).__name__ == kind
        ]
        return " ".join([kind_of(inner), *words])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(kind_of(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of: {kind_of(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return f"table of: {kind_of(get_args(annotation)[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return f"table, see `{annotation.__name__}`"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def limits(field: Any) -> str:
    """The bounds of a number."""
    words = []
    for limit in field.metadata:
        word = NUMBERS.get(type(limit).__name__)
        if word:
            words.append(f"{word} {getattr(limit, type(limit).__name__.lower()):g}")
    return " ".join(words)


def default_of(field: Any) -> str:
    """A field's value where a config leaves it out."""
    if field.default is not PydanticUndefined:
        return "none" if field.default is None else f"`{toml(field.default)}`"
    if field.default_factory is None:
        return "must be given"
    made = field.default_factory()
    text = toml(made)
    return f"`{text}`" if len(text) < 80 else f"{len(made)}, see the text"


def toml(value: Any) -> str:
    """A value as TOML would write it on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(one) for one in value) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def plain(text: str) -> str:
    """Text of a docstring in a cell of a Markdown table."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text).strip())
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*_<>\[\]$])", r"\\\1", parts[index])
    return "".join(parts).replace("|", "\\|")


def groups(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """A group of settings and those inside it, each with what its keys begin with."""
    yield prefix, model
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield from groups(field.annotation, f"{prefix}{name}.")


def settings_table(model: type[BaseModel], prefix: str) -> list[str]:
    """The keys of one group, those that are groups themselves left out."""
    lines = ["```{table}", ":class: settings", "", "| key | value | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            continue
        kind = " ".join(filter(None, [kind_of(field.annotation), limits(field)]))
        lines.append(
            f"| `{prefix}{name}` | {plain(kind)} | {plain(default_of(field))} | {plain(field.description or '')} |"
        )
    return [*lines, "```", ""]


class SettingsTables(SphinxDirective):
    """`{settings} l2lopt.experiments.config:Config`: a section for each group of a config's settings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The sections."""
        text: list[str] = []
        for prefix, model in groups(found(self.arguments[0])):
            title = f"`[{prefix.rstrip('.')}]`" if prefix else f"`{model.__name__}`"
            text += [f"### {title}", "", plain(inspect.cleandoc(model.__doc__ or "")), ""]
            text += settings_table(model, prefix)
        made: list[nodes.Node] = self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)
        return made


def summary(entry: Callable[..., Any]) -> str:
    """The first sentence of a docstring."""
    doc = inspect.cleandoc(entry.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.)(?<!al\.) (?=[A-Z])", doc)[0]


def options(entry: Callable[..., Any]) -> str:
    """The options of an entry with their defaults."""
    out = []
    for name, parameter in inspect.signature(entry).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        given = parameter.default is not parameter.empty
        shown = toml(parameter.default) if parameter.default is not None else "none"
        out.append(f"`{name} = {shown}`" if given else f"`{name}`")
    return ", ".join(out)


class Choices(SphinxDirective):
    """`{choices} l2lopt.estimators:ESTIMATORS`: a table of the names in a registry, their options and what they are."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table."""
        lines = ["```{table}", ":class: settings", "", "| name | options | |", "|---|---|---|"]
        for name, entry in found(self.arguments[0]).items():
            lines.append(f"| `{name}` | {options(entry).replace('|', chr(92) + '|')} | {plain(summary(entry))} |")
        made: list[nodes.Node] = self.parse_text_to_nodes("\n".join([*lines, "```"]))
        return made


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directives."""
    app.add_directive("settings", SettingsTables)
    app.add_directive("choices", Choices)
    return {"version": "1", "parallel_read_safe": True}
