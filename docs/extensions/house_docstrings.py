"""Our docstrings as Sphinx reads them.

They are plain text with `code` in single backticks, formulas such as u_t and [*batch, n], and indented equations. What
reStructuredText would take for its own markup is protected, and a name in backticks becomes a link where there is
exactly one thing of that name.
"""

import re
from importlib import import_module
from typing import Any, TypeVar

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Examples?|Note|Notes):$")
STARRED = re.compile(r"\s+\*{1,2}\w+:")
NAME = re.compile(r"[A-Za-z_][\w.]*")
OTHERS = re.compile(
    r"(torch|torchvision|numpy|np|scipy|pydantic|pydantic_core|annotated_types|matplotlib|PIL|higher|tensorboard|typer|"
    r"rich|collections|pathlib|typing|abc|argparse|logging|concurrent|types|contextlib|builtins|contextvars|_thread)(\.|$)"
)
"""Packages whose names are links where their inventories are at hand, and text elsewhere."""
BARE = {
    "Tensor",
    "FieldInfo",
    "NoneType",
    "MinLen",
    "MaxLen",
    "Ge",
    "Le",
    "Gt",
    "Lt",
    "AllowInfNan",
    "StringConstraints",
}
"""Names of such packages as autodoc writes them inside unions and the limits of pydantic's fields."""


def protected(text: str) -> str:
    """A line of prose in which `*`, `|` and a last `_` mean themselves, and code that is no name is plain code."""
    parts = re.split(r"(`[^`]+`)", text)
    for index, part in enumerate(parts):
        if index % 2:
            code = part if NAME.fullmatch(part[1:-1]) else f"`{part}`"
            # Markup has to end at the end of a word.
            parts[index] = code + ("\\ " if re.match(r"\w", parts[index + 1]) else "")
        else:
            plain = part.replace("*", r"\*").replace("|", r"\|")
            parts[index] = re.sub(r"(\w)_(?![\w{])", r"\1\\_", plain)
    return "".join(parts)


def rewrite(lines: list[str]) -> list[str]:
    """A docstring's lines, its markup protected and its indented equations literal."""
    out: list[str] = []
    inside = False
    literal: int | None = None
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line and not line.startswith(" "):
            inside = bool(SECTION.match(line))
        if literal is not None and line.strip() and indent < literal:
            literal = None
        example = line.lstrip().startswith((">>>", "..."))
        output = bool(out) and bool(out[-1].strip()) and example is False and _follows_example(lines, number)
        if literal is not None or example or output or not line.strip():
            out.append(line)
            continue
        after = lines[number + 1 : number + 3]
        opens = line.endswith(":") and len(after) == 2 and not after[0].strip() and after[1].strip()
        if opens and not (inside and indent == 0):
            deeper = len(after[1]) - len(after[1].lstrip())
            if deeper > indent and not after[1].lstrip().startswith((">>>", "- ")):
                literal = deeper
                out.append(protected(line) + ":")
                continue
        starred = STARRED.match(line)
        head = starred[0] if starred and inside else ""
        out.append(head + protected(line[len(head) :]))
    return out


def _follows_example(lines: list[str], number: int) -> bool:
    """Whether a line is the output of an example: it is in one block with a line of `>>>` above it."""
    for line in reversed(lines[:number]):
        if not line.strip():
            return False
        if line.lstrip().startswith((">>>", "...")):
            return True
    return False


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = rewrite(lines)
    if what in ("attribute", "data", "property"):
        _TEXTS[name] = list(lines)


def _restored(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The text of an attribute as it was: napoleon takes what stands before a colon for a type."""
    lines[:] = _TEXTS.pop(name, lines)


_TEXTS: dict[str, list[str]] = {}


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """A signature in which a function that is a default stands by its name; Sphinx cannot parse "<function silent>"."""
    return signature and re.sub(r"<(?:function|class) '?(?:[\w.]+\.)?(\w+)'?>", r"\1", signature), result


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples, which `Attributes` describes, and what pydantic adds to a model."""
    if name in {"model_config", "model_fields", "model_computed_fields"} or type(obj).__name__ == "_tuplegetter":
        return True
    return None


def _public(name: str, known: Any) -> str | None:
    """The one documented thing that a name can mean: the name itself, or the end of exactly one longer name."""
    if name in known:
        return name
    short = name.rpartition(".")[2]
    if name.startswith("l2lopt.") and f"l2lopt.{short}" in known:
        return f"l2lopt.{short}"  # a public name by the place where it is defined
    if name.islower() and name.isalpha() and f"l2lopt.{name}" not in known:
        return None  # a word such as `cache`, which some attribute is called as well
    found = {full for full in known if full.endswith(f".{name}")}
    if len(found) > 1 and f"l2lopt.{name}" in found:
        return f"l2lopt.{name}"
    return found.pop() if len(found) == 1 else None


def _missing(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> Any:
    """The target of a name that Sphinx did not find by itself; text where there is none and none is due."""
    if node.get("refdomain") != "py":
        return None
    target = str(node.get("reftarget", ""))
    domain = env.domains.python_domain
    if NAME.fullmatch(target) and (found := _public(target, domain.objects)):
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found, node, contnode)
    prose = node.get("reftype") == "obj"
    return contnode if prose or OTHERS.match(target) or _unlisted(target) else None


def _unlisted(target: str) -> bool:
    """Whether a name has no description because none is due: a type variable, or something private."""
    module, _, name = target.rpartition(".")
    if target in BARE or name.startswith("_") or not NAME.fullmatch(target):
        return True
    try:
        return isinstance(getattr(import_module(module), name, None), TypeVar)
    except (ImportError, ValueError):
        return False


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects them, before and after napoleon's at 500."""
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    app.connect("autodoc-process-docstring", _restored, priority=600)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)
    app.connect("missing-reference", _missing, priority=900)  # after the inventories
    return {"version": "1", "parallel_read_safe": True}
