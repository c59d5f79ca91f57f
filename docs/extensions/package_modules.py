"""The directive `modules`: every module of a package, from its docstrings."""

import ast
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import l2lopt

ROOT = Path(l2lopt.__file__).parents[1]
PUBLIC = set(l2lopt.__all__)


def modules(package: str) -> list[str]:
    """Dotted names of a module, or of a package and all that is in it; private ones left out."""
    path = ROOT / package.replace(".", "/")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return sorted(name for name in names if not name.rpartition(".")[2].startswith("_"))


def public_names(module: str) -> list[str]:
    """Names of a module that `l2lopt` itself offers, which are described there."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return sorted(defined & PUBLIC)


class Modules(SphinxDirective):
    """`{modules} l2lopt.estimators`: a section for each module, with all its public members."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """The sections."""
        text: list[str] = []
        for name in modules(self.arguments[0]):
            text += [f"## {name}", "", "```{eval-rst}", f".. automodule:: {name}", "   :ignore-module-all:"]
            moved = public_names(name)
            # A function of a package that is called as one of its modules: the module's description is the longer one.
            twice = {other.rpartition(".")[2] for other in modules(self.arguments[0]) if other.startswith(f"{name}.")}
            if left := sorted({*moved, *twice}):
                text.append(f"   :exclude-members: {', '.join(left)}")
            text += ["```", ""]
            if moved and name != "l2lopt":
                links = ", ".join(f"{{py:obj}}`l2lopt.{one}`" for one in moved)
                text += [f"Public, and described [there](index.md): {links}.", ""]
        found: list[nodes.Node] = self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)
        return found


class PublicNames(SphinxDirective):
    """`{public-names}`: everything in `l2lopt.__all__`."""

    def run(self) -> list[nodes.Node]:
        """A description of each, in the order of the alphabet."""
        text: list[str] = []
        for name in sorted(PUBLIC, key=str.lower):
            kind = "class" if isinstance(getattr(l2lopt, name), type) else "function"
            kind = "exception" if kind == "class" and issubclass(getattr(l2lopt, name), BaseException) else kind
            text += [f"## {name}", "", "```{eval-rst}", f".. auto{kind}:: l2lopt.{name}", "```", ""]
        found: list[nodes.Node] = self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)
        return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directives."""
    app.add_directive("modules", Modules)
    app.add_directive("public-names", PublicNames)
    return {"version": "1", "parallel_read_safe": True}
