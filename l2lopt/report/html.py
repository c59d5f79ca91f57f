"""One self-contained HTML page: inline figures that follow the reader's light or dark scheme, data as links."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from html import escape
from string import Template
from xml.etree import ElementTree

from l2lopt.report.panels import NOTE, TITLE, Box
from l2lopt.report.style import IN_THE_DARK, Line

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_LEAST = 1.22
"""Least pixels of a point: 9 points are 11 pixels."""
_CLIP = re.compile(r"url\(#([^)]+)\)")
_XLINK = "{http://www.w3.org/1999/xlink}"
_MARKS = {
    "o": '<circle cx="17" cy="7" r="3"/>',
    "s": '<path d="M14 4h6v6h-6z"/>',
    "^": '<path d="M17 3.5l3.5 6.5h-7z"/>',
    "v": '<path d="M17 10.5l3.5-6.5h-7z"/>',
    "D": '<path d="M17 3l4 4-4 4-4-4z"/>',
    "<": '<path d="M13.5 7l6.5-3.5v7z"/>',
    ">": '<path d="M20.5 7l-6.5-3.5v7z"/>',
    "P": '<path d="M15.7 3.5h2.6v2.2h2.2v2.6h-2.2v2.2h-2.6v-2.2h-2.2v-2.6h2.2z"/>',
}
"""Matplotlib's markers, drawn in the middle of a line of 34 by 14 pixels."""

_STYLE = Template("""
:root { color-scheme: light dark; $light --ink: #1d1f24; --soft: #5c616b; --page: #f6f7f9; --card: #ffffff;
  --edge: #dcdfe5; --link: #0b57a4; --good: #dff1e6; --bad: #fae3dc; }
@media (prefers-color-scheme: dark) { :root { $dark --ink: #e8e9ec; --soft: #a2a7b2; --page: #0e1013; --card: #16181d;
  --edge: #31353d; --link: #7fb8f0; --good: #17382a; --bad: #47251b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0.4em 0; }
h2 { font-size: 1.2rem; margin: 2em 0 0.5em; }
h3 { font-size: 1rem; margin: 1.4em 0 0.4em; }
p, li { max-width: 75ch; overflow-wrap: anywhere; }
a { color: var(--link); }
.lead { font-size: 1.1rem; border-left: 4px solid var(--link); padding: 0.1em 0 0.1em 0.9em; }
.soft, figcaption small { color: var(--soft); }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
caption, tfoot td { text-align: left; padding: 8px 10px; color: var(--soft); }
caption { font-weight: 600; color: var(--ink); }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; border-top: 1px solid var(--edge); }
tfoot td { white-space: normal; }
thead th { border-top: 0; vertical-align: bottom; white-space: normal; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); max-width: 46vw;
  overflow-wrap: break-word; white-space: normal; min-width: 9.5em; }
td.good { background: var(--good); }
td.bad { background: var(--bad); }
figure { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 8px; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; overflow: hidden; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { fill: currentColor; font-family: system-ui, sans-serif !important; }
figcaption { font-weight: 600; font-size: 0.9rem; overflow-wrap: anywhere; padding: 0 4px 4px; }
figcaption small { display: block; font-weight: 400; font-size: 0.85rem; }
.scroll, figure { margin-top: 12px; }
.grid figure { margin: 0; }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, $narrow), 1fr)); }
.wide { grid-template-columns: repeat(auto-fill, minmax(min(100%, $broad), 1fr)); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0.6em 0; padding: 0;
  font-size: 0.9rem; }
.legend svg { vertical-align: -2px; margin-right: 6px; }
summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
""")

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def page(title: str, body: Iterable[str]) -> str:
    """A whole page that needs no other file.

    Args:
        title: Text of the browser's tab.
        body: Parts of the page, HTML already.
    """
    light = "".join(f"{_variable(colour)}: {colour}; " for colour in IN_THE_DARK)
    dark = "".join(f"{_variable(colour)}: {other}; " for colour, other in IN_THE_DARK.items())
    style = _STYLE.substitute(light=light, dark=dark, narrow="300px", broad="380px")
    return _PAGE.substitute(title=escape(title), style=style, body="\n".join(body))


def section(name: str, heading: str, parts: Iterable[str]) -> str:
    """A part of a page with its heading.

    Args:
        name: Identifier, to link to.
        heading: Heading, plain text.
        parts: Contents, HTML already.
    """
    inside = "\n".join(parts)
    return f'<section id="{escape(name)}">\n<h2>{escape(heading)}</h2>\n{inside}\n</section>'


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text.

    Args:
        text: Plain text; everything in it is escaped.
        kind: Class in the page's style.
    """
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def folded(summary: str, parts: Iterable[str]) -> str:
    """Contents that the reader unfolds.

    Args:
        summary: Line to click on, plain text.
        parts: Contents, HTML already.
    """
    return f"<details>\n<summary>{escape(summary)}</summary>\n" + "\n".join(parts) + "\n</details>"


def scrolling(table: str) -> str:
    """A table that is moved sideways within a narrow page."""
    return f'<div class="scroll" tabindex="0">{table}</div>'


def data_link(name: str, text: str) -> str:
    """A link to the data of a figure, which are within the link itself.

    Args:
        name: Name of the file that the reader's browser saves.
        text: Contents of the file.
    """
    content = base64.b64encode(text.encode()).decode()
    return f'<a download="{escape(name)}" href="data:text/csv;charset=utf-8;base64,{content}">{escape(name)}</a>'


def legend(lines: Mapping[str, Line]) -> str:
    """The lines of a figure with their labels, in a list that wraps.

    Args:
        lines: Label → line.
    """
    items = "".join(f"<li>{_swatch(line)}{escape(label)}</li>" for label, line in lines.items())
    return f'<ul class="legend">{items}</ul>'


def grid(figures: Iterable[str], wide: bool = False) -> str:
    """Figures side by side, as many as the window has room for."""
    return f'<div class="grid{" wide" if wide else ""}">\n' + "\n".join(figures) + "\n</div>"


def figure(svg: str, caption: str, remark: str = "") -> str:
    """A figure with its caption.

    Args:
        svg: Image from `inline_panels`.
        caption: Caption, plain text; it is the image's name for a reader that does not see it.
        remark: Smaller text below it.
    """
    small = f"<small>{escape(remark)}</small>" if remark else ""
    named = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return f"<figure>\n<figcaption>{escape(caption)}{small}</figcaption>\n{named}\n</figure>"


def inline_panels(svg: str, prefix: str, boxes: Sequence[Box]) -> list[str]:
    """The panels of a sheet as images of their own, for a page.

    A panel has neither title nor note: the page says them in text that wraps. Its colours are variables of the page, so
    that they follow the reader's scheme.

    Args:
        svg: Text of the SVG file of a sheet.
        prefix: Beginning of all identifiers, another one for each sheet of a page.
        boxes: Part of each panel.
    """
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    named = {str(element.get("id")): element for element in root.iter() if "id" in element.attrib}
    found = []
    for index, box in enumerate(boxes):
        panel = deepcopy(named[f"panel-{index}"])
        for parent in list(panel.iter()):
            for child in [child for child in parent if child.get("id") in (TITLE, NOTE)]:
                parent.remove(child)
        # No narrower, or its text would be too small: a narrow window scrolls within the figure.
        least = f"min-width: {_LEAST * box.width:.0f}px"
        image = ElementTree.Element("svg", {"viewBox": " ".join(f"{value:g}" for value in box), "style": least})
        # Matplotlib defines a marker where it is first used and a clip at the end: outside of most panels.
        used, inside = _references(panel), {element.get("id") for element in panel.iter()}
        defined = ElementTree.SubElement(image, "defs")
        defined.extend(deepcopy(named[name]) for name in sorted(used) if name not in inside)
        image.append(panel)
        for element in image.iter():
            _adapt(element, f"{prefix}-{index}-")
        found.append(ElementTree.tostring(image, encoding="unicode"))
    return found


def _references(panel: ElementTree.Element) -> set[str]:
    """The identifiers that a panel refers to."""
    values = [(name, value) for element in panel.iter() for name, value in element.attrib.items()]
    clips = {match[1] for _, value in values for match in _CLIP.finditer(value)}
    return clips | {value[1:] for name, value in values if name == f"{_XLINK}href"}


def _adapt(element: ElementTree.Element, prefix: str) -> None:
    """Gives an element the page's identifiers and colours."""
    for name, value in list(element.attrib.items()):
        if name == "id":
            element.set(name, f"{prefix}{value}")
        elif name == f"{_XLINK}href":
            del element.attrib[name]
            element.set("href", value.replace("#", f"#{prefix}", 1))
        elif "url(#" in value:
            element.set(name, value.replace("url(#", f"url(#{prefix}"))
        elif name in ("style", "fill", "stroke"):
            element.set(name, _COLOUR.sub(lambda match: f"var({_variable(match[0])}, {match[0]})", value))


def _variable(colour: str) -> str:
    return f"--c-{colour[1:].lower()}"


def _swatch(line: Line) -> str:
    colour = f"var({_variable(line.colour)}, {line.colour})"
    dash = " ".join(f"{line.width * part:g}" for part in line.dash[1])
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    stroke = f'<path d="M0 7h34" fill="none" stroke="{colour}" stroke-width="{line.width:g}"{dashes}/>'
    mark = f'<g fill="{colour}">{_MARKS.get(line.marker, _MARKS["o"])}</g>'
    return f'<svg width="34" height="14" viewBox="0 0 34 14" aria-hidden="true">{stroke}{mark}</svg>'
