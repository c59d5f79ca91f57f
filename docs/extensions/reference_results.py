"""The directive `reference-results`: everything in runs/reference/, as it stands there.

A result is shown by being put there: its `README.md` says how it was made, `table.md` has the numbers and stands before
the README's subsections, and its pictures are shown below. Nothing is retyped.
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[2] / "runs" / "reference"
ELSEWHERE = {"tasks"}
"""Folders that another page includes."""


def section(folder: Path, up: str) -> list[str]:
    """A folder of results as Markdown.

    Args:
        folder: Folder with a `README.md`, and with a `table.md` and pictures if it has them.
        up: Path from the page's folder to the repository's root.
    """
    base = f"{up}runs/reference/{folder.name}"
    table = folder / "table.md"
    text = demoted((folder / "README.md").read_text(encoding="utf-8"), 1)
    head, subsection, rest = text.partition("\n### ")
    lines = [head, ""]
    if table.exists():
        lines += [demoted(table.read_text(encoding="utf-8"), 2), ""]
    lines += [subsection + rest, ""]
    for picture in sorted(folder.rglob("*.png")):
        place = picture.relative_to(folder)
        caption = " ".join(re.split(r"[-/]", place.with_suffix("").as_posix()))
        lines += [f"![{caption}]({base}/{place.as_posix()})", "", f"*{caption}*", ""]
    return lines


def demoted(text: str, levels: int) -> str:
    """Markdown whose headings are some levels lower; those inside fenced blocks are code and stay."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.S | re.M)
    return "".join(
        re.sub(r"^#", "#" * (levels + 1), part, flags=re.M) if index % 2 == 0 else part
        for index, part in enumerate(parts)
    )


class ReferenceResults(SphinxDirective):
    """`{reference-results}`: a section for each folder of results."""

    def run(self) -> list[nodes.Node]:
        """The sections."""
        up = "../" * (self.env.docname.count("/") + 1)
        folders = sorted(path for path in FOLDER.iterdir() if path.is_dir() and path.name not in ELSEWHERE)
        for path in FOLDER.rglob("*.md"):
            self.env.note_dependency(str(path))
        text = "\n".join(line for folder in folders for line in section(folder, up))
        made: list[nodes.Node] = self.parse_text_to_nodes(text, allow_section_headings=True)
        return made


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("reference-results", ReferenceResults)
    return {"version": "1", "parallel_read_safe": True}
