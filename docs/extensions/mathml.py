"""Formulas as MathML, which browsers draw by themselves: the pages need no script and no network."""

import re
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

SPACE = "http://www.w3.org/1998/Math/MathML"
ACCENTS = "\u02c9\u02c6\u02dc"
"""Bar, hat and tilde, as docutils writes them."""
MISREAD = re.compile(r"frac\d|underbrace")
"""Spellings that docutils takes for others: \\frac12 for 12 over the next letter."""
ElementTree.register_namespace("", SPACE)


def converted(tex: str, as_block: bool) -> str:
    r"""A formula as MathML.

    Args:
        tex: LaTeX, of the commands that docutils knows: \left( and not \big(, for instance.
        as_block: Whether it stands on lines of its own.

    Raises:
        SphinxError: For a command that is not known, or would be misread.
    """
    if misread := MISREAD.search(tex):
        raise SphinxError(f"{misread[0]}: write \\frac{{1}}{{2}} and no underbrace: {tex}")
    try:
        found: str = tex2mathml(tex.strip(), as_block=as_block)
    except (ValueError, AttributeError) as error:  # an unknown command; an unbalanced one
        raise SphinxError(f"{error}: {tex}") from error
    return with_accents(found)


def with_accents(mathml: str) -> str:
    """The formula with indices beside accented letters; docutils puts them under the letter, as under a sum."""
    root = ElementTree.fromstring(mathml)
    for element in root.iter(f"{{{SPACE}}}munderover"):
        letter, index, mark = element
        if letter.tag == f"{{{SPACE}}}mi" and mark.text and mark.text in ACCENTS:
            accented = ElementTree.Element(f"{{{SPACE}}}mover", {"accent": "true"})
            accented.extend([letter, mark])
            element.tag = f"{{{SPACE}}}msub"
            element[:] = [accented, index]
    return ElementTree.tostring(root, encoding="unicode")


def inline(self: Any, node: nodes.math) -> None:
    """Writes a formula of a line."""
    self.body.append(converted(node.astext(), as_block=False))
    raise nodes.SkipNode


def block(self: Any, node: nodes.math_block) -> None:
    """Writes a formula on lines of its own, which scrolls where it is wider than the page."""
    self.body.append(f'<div class="math">{converted(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the renderer."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"version": "1", "parallel_read_safe": True}
