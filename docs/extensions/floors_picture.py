"""The directive `floors`: the packages on their floors, from the table in tests/test_floors.py."""

import ast
import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "test_floors.py"
WIDTH, HEIGHT, GAP, LEFT = 176, 34, 12, 40
"""Of a box, between two, and left of the first, in pixels."""


def floors() -> dict[str, int]:
    """Package → floor, as the test has it. The file is read and not imported, as it needs pytest."""
    for node in ast.parse(TABLE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(name, "id", None) for name in node.targets] == ["FLOORS"]:
            table: dict[str, int] = ast.literal_eval(node.value)
            return table
    raise LookupError(f"FLOORS in {TABLE}")


def purpose(unit: str) -> str:
    """The first sentence of a package's docstring."""
    path = ROOT / unit.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return doc.split("\n\n")[0].replace("\n", " ")


def pages_of_packages() -> dict[str, str]:
    """Package → name of the page that describes its modules; `__main__` has none."""
    pages = Path(__file__).parents[1].glob("api/*.md")
    found = {page.stem: re.findall(r"^```\{modules\} (\S+)", page.read_text(encoding="utf-8"), re.M) for page in pages}
    return {package: name for name, packages in found.items() for package in packages}


def picture(link: Any) -> str:
    """The picture as SVG: the highest floor above, a box for each package, a link behind each box.

    Args:
        link: Package → address of its page.
    """
    table = floors()
    levels = sorted(set(table.values()), reverse=True)
    widest = max(sum(floor == level for floor in table.values()) for level in levels)
    width, height = LEFT + widest * (WIDTH + GAP), len(levels) * (HEIGHT + GAP) + GAP
    parts = [f'<svg class="floors" viewBox="0 0 {width} {height}" role="img" aria-label="Packages on their floors">']
    for row, level in enumerate(levels):
        y = GAP + row * (HEIGHT + GAP)
        parts.append(f'<text class="note" x="4" y="{y + 22}">{level}</text>')
        for place, unit in enumerate(sorted(name for name, floor in table.items() if floor == level)):
            x = LEFT + place * (WIDTH + GAP)
            parts.append(
                f'<a href="{escape(link(unit))}"><title>{escape(purpose(unit))}</title>'
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
                f'<text x="{x + 10}" y="{y + 22}">{escape(unit)}</text></a>'
            )
    return "\n".join([*parts, "</svg>"])


class Floors(SphinxDirective):
    """`{floors}`: the picture, and a table of what each package is for."""

    def run(self) -> list[nodes.Node]:
        """The picture as HTML, then the table, which every other output has as well."""
        table = floors()
        up, pages = "../" * self.env.docname.count("/"), pages_of_packages()

        def link(unit: str) -> str:
            return f"{up}api/{pages.get(unit, 'cli')}.html"

        rows = [f"| {floor} | `{unit}` | {purpose(unit)} |" for unit, floor in table.items()]
        text = "\n".join(["| floor | | |", "|--:|---|---|", *rows])
        beside: list[nodes.Node] = self.parse_text_to_nodes(text)
        return [nodes.raw("", picture(link), format="html"), *beside]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("floors", Floors)
    return {"version": "1", "parallel_read_safe": True}
