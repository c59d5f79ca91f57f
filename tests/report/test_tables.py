"""Tables as Markdown, as HTML and as spans for a terminal."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2lopt.core.errors import UserError
from l2lopt.report.tables import Span, Table, spans

TABLE = Table(
    ("problem", "train, step 10"),
    (("mine", "**0.1** (0.09–0.2)"), ("sgd", ""), ("2-gram", None)),
    notes=("sgd: 2 runs diverged",),
    legend="**Bold**: below sgd.",
)


class Reader(HTMLParser):
    """The tags and texts of a document."""

    def __init__(self, document):
        super().__init__()
        self.tags, self.cells, self.bold, self.open = [], [], [], []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open.append(tag)
        if tag in ("td", "th", "caption"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th", "caption"} & set(self.open):
            self.cells[-1] += data
            self.bold += [data] if self.open[-1] == "strong" else []


def test_markdown_has_notes_as_a_list_and_the_legend_last():
    assert TABLE.markdown().splitlines() == [
        "| problem | train, step 10 |",
        "|---|---|",
        "| mine | **0.1** (0.09–0.2) |",
        "| sgd |  |",
        "| 2-gram | |",
        "",
        "- sgd: 2 runs diverged",
        "",
        "**Bold**: below sgd.",
    ]
    assert Table(("", "a"), ()).markdown() == "| | a |\n|---|---|"
    assert Table(("a",), (("1",),), title="first").markdown().splitlines()[:3] == ["**first**", "", "| a |"]


def test_a_cell_in_markdown_stays_one_cell_of_one_row():
    line = Table(("a", "b"), (("one|two", "three\nfour"),)).markdown().splitlines()[-1]
    assert line == r"| one\|two | three four |"


def test_html_is_one_table_with_everything_in_it():
    found = Reader(TABLE.html())
    assert found.cells[:4] == ["problem", "train, step 10", "mine", "0.1 (0.09–0.2)"]
    assert found.cells[-2:] == ["sgd: 2 runs diverged", "Bold: below sgd."]
    assert found.bold[0] == "0.1"
    assert "Bold" in found.bold
    assert found.tags.count("table") == 1
    assert Reader(Table(("a",), (("1",),), title="<first>").html()).cells[0] == "<first>"


def test_cells_that_stand_out_have_their_class():
    text = Table(("a", "b"), (("x", "1"), ("y", "2"))).html({(1, 1): "bad", (0, 0): '"'})
    assert '<th scope="row">y</th><td class="bad">2</td>' in text
    assert '<th scope="row" class="&quot;">x</th><td>1</td>' in text


texts = st.text(st.characters(exclude_characters="*\r", exclude_categories=("Cs", "Cc")), max_size=12)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), texts)
def test_html_escapes_all_texts(rows, note):
    """Whatever a label holds, a reader of HTML finds it again, and no element beside the table's own."""
    found = Reader(Table(("a", "b"), tuple(rows), notes=(note,)).html())
    assert found.cells == ["a", "b", *(cell for row in rows for cell in row), note]
    assert set(found.tags) == {"table", "thead", "tbody", "tfoot", "tr", "th", "td"}


@given(texts, texts, texts)
def test_spans_hold_the_text_without_its_marks(before, inner, after):
    shown = list(spans(f"{before}**{inner}**{after}" if inner else before + after))
    assert "".join(span.text for span in shown) == before + inner + after
    assert [span.text for span in shown if span.bold] == ([inner] if inner else [])


def test_what_looks_like_html_is_text_in_markdown():
    """GitHub would drop "<tuned>", and a line break would end the row or the list."""
    found = Table(("a <b>",), (("adam <tuned>",),), title="on <x>", notes=("one\ntwo <i>",)).markdown()
    assert "<" not in found
    assert found.splitlines()[0] == "**on &lt;x>**"
    assert "| adam &lt;tuned> |" in found
    assert "- one two &lt;i>" in found


def test_a_lone_mark_is_text():
    assert list(spans("2**3")) == [Span("2**3", False)]
    assert list(spans(None)) == []


def test_a_row_of_another_length_is_refused():
    with pytest.raises(UserError, match="expected 2 cells, found 1"):
        Table(("a", "b"), (("1",),))
