"""The directive `colab`: a link that opens a tutorial in Colab, and the notebook that it opens.

The tutorials are Markdown. Beside the HTML the build leaves each as a notebook in `notebooks/`, without outputs; Colab
opens those of the branch that the site is published from.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from myst_nb.core.read import read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

BRANCH = "gh-pages"


class Colab(SphinxDirective):
    """`{colab}`: the link for the page it stands on."""

    def run(self) -> list[nodes.Node]:
        """A paragraph with the link."""
        name = Path(self.env.docname).name
        repository = self.config.colab_repository.removeprefix("https://github.com/")
        address = f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/notebooks/{name}.ipynb"
        made: list[nodes.Node] = self.parse_text_to_nodes(f"[Open in Colab]({address})")
        return made


def for_colab(text: str, repository: str) -> str:
    """A tutorial's source by itself: without the link to Colab, and with links to other pages in the repository."""

    def absolute(found: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs/tutorials", found[1]))
        return f"]({repository}/blob/main/{place}{found[2] or ''})"

    return re.sub(r"\]\(([\w./-]+\.md)(#[\w-]+)?\)", absolute, text.replace("```{colab}\n```\n", ""))


def _write(app: Sphinx, error: Exception | None) -> None:
    """Writes the notebooks beside the pages."""
    if error is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    for path in sorted((Path(app.srcdir) / "tutorials").glob("*.md")):
        text = for_colab(path.read_text(encoding="utf-8"), app.config.colab_repository)
        if "{code-cell}" in text:
            notebook = read_myst_markdown_notebook(text, MdParserConfig(), path=str(path))
            nbformat.write(notebook, folder / f"{path.stem}.ipynb")


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive and the writing."""
    app.add_config_value("colab_repository", "", "html")
    app.add_directive("colab", Colab)
    app.connect("build-finished", _write)
    return {"version": "1", "parallel_read_safe": True}
