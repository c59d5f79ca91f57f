"""Token files in CoNLL columns: what they hold, what is wrong with them, and scores as seqeval gives them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2lopt.core.errors import UserError
from optimisees.data import conll
from optimisees.labelling.labelled import by_position

pytest.importorskip("seqeval", reason='seqeval is missing: pip install "l2lopt[labelling]"')
from seqeval.metrics import classification_report, f1_score

OPINIONS = """\
The\tDT\tB-ESE
committee\tNN\tI-ESE
,\t,\tO
as\tRB\tB-ESE
usual\tJJ\tI-ESE
,\t,\tO
has\tVBZ\tB-DSE
refused\tVBN\tI-DSE
.\t.\tO

He\tPRP\tO
refused\tVBD\tB-DSE
.\t.\tO
"""
"""Expressive (ESE) and direct (DSE) subjective expressions, after the example of Irsoy and Cardie 2014."""


def three(folder, train=OPINIONS, valid=OPINIONS, test=OPINIONS):
    """Their paths."""
    paths = []
    for name, content in (("train", train), ("valid", valid), ("test", test)):
        paths.append(str(folder / f"{name}.conll"))
        (folder / f"{name}.conll").write_bytes(content if isinstance(content, bytes) else content.encode())
    return paths


def test_a_file_is_its_sentences(tmp_path):
    unseen = "Nobody x O\nrefused x B-DSE\n"
    data = conll.files(*three(tmp_path, test=unseen))
    assert data.classes == ("O", "B-DSE", "I-DSE", "B-ESE", "I-ESE")
    assert data.tokens == ("<unk>", ",", "refused", ".")  # those that occur twice
    assert data.train.lengths.tolist() == [9, 3]
    assert data.train.classes[:, 0].tolist() == [3, 4, 0, 3, 4, 0, 1, 2, 0]
    assert data.train.classes[:3, 1].tolist() == [0, 1, 0]
    assert data.train.inputs[:, 0].tolist() == [0, 0, 1, 0, 0, 1, 0, 2, 3]
    assert data.test.inputs[:, 0].tolist() == [0, 2]
    assert data.train.places(1, 1) == f"{tmp_path / 'train.conll'}:12: refused"
    assert len(conll.files(*three(tmp_path), minimum=1).tokens) == 1 + 9
    assert data.digest() != conll.files(*three(tmp_path)).digest()


words = st.text(st.characters(codec="utf-8", exclude_characters=" \t\n\r\ufeff"), min_size=1, max_size=5)
labels = st.sampled_from(["O", "B-DSE", "I-DSE", "B-é"])
sentences = st.lists(st.lists(st.tuples(words, labels), min_size=1, max_size=5), min_size=1, max_size=5)


@given(sentences, st.sampled_from([" ", "\t", "  "]), st.sampled_from(["\n", "\r\n"]), st.integers(0, 3), st.booleans())
def test_what_was_written_is_read(tmp_path_factory, written, between, newline, ending, third):
    path = tmp_path_factory.mktemp("conll") / "a.conll"
    lines = [[between.join((word, *["x"] * third, label)) for word, label in sentence] for sentence in written]
    text = f"{newline}{newline}".join(newline.join(sentence) for sentence in lines) + newline * ending
    path.write_bytes(text.encode())
    found = conll.read(path)
    assert [[(row.token, row.label) for row in sentence] for sentence in found] == written
    first = [text.split(newline)[row.line - 1] for sentence in found for row in sentence]
    assert first == [line for sentence in lines for line in sentence]
    assert {row.columns for sentence in found for row in sentence} == {2 + third}


START = "-DOCSTART- -X- O\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{START}\na x O\nb x O\n\n{START}\nc x O\n",
        f"{START}a x O\nb x O\n{START}c x O\n",  # without blank lines
        f"-DOCSTART-\n\n{START}\na x O\nb x O\n\nc x O\n\n{START}\n",  # documents without sentences
    ],
)
def test_the_starts_of_documents_are_no_sentences(tmp_path, text):
    path = tmp_path / "a.conll"
    path.write_text(text)
    found = conll.read(path)
    assert [[row.token for row in sentence] for sentence in found] == [["a", "b"], ["c"]]
    lines = text.splitlines()
    assert all(lines[row.line - 1].startswith(row.token) for sentence in found for row in sentence)


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("train", "a O\nb x O\n", "train.conll:2: expected 2 columns, found 3; give every line the columns of"),
        ("test", "a O\n", "test.conll:1: expected 3 columns, found 2"),
        ("train", "a\n", "train.conll:1: expected 2 columns, found 1"),
        ("test", "a x O\n\nb x B-PER\n", r"test.conll:3: expected a label of .*train.conll: O, B-DSE, .*, found B-PER"),
        ("valid", "a x I-PER\n", "valid.conll:1: expected a label of .*, found I-PER; mend the label, or train on it"),
        ("train", "a x PER\n", "train.conll:1: expected a BIO label, found PER; write O, or B- or I- and the type"),
        ("train", "a x B-\n", "train.conll:1: expected a BIO label, found B-"),
        ("train", "a x O\n\n\nb x O\n", "train.conll:3: expected a sentence, found an empty one; leave one blank"),
        ("train", "\na x O\n", "train.conll:1: expected a sentence, found an empty one"),
        ("train", "", "train.conll: expected tokens and labels, found an empty file"),
        ("test", " \n\n", "test.conll: expected tokens and labels, found an empty file"),
        ("test", START, "test.conll: expected tokens and labels, found nothing but -DOCSTART-"),
        ("train", f"{START}\n\na x O\n", "train.conll:3: expected a sentence, found an empty one"),
        ("valid", b"a x O\n\xff x O\n", "valid.conll:2: expected text in UTF-8, found byte 0xff; convert the file"),
    ],
)
def test_a_mistake_is_named_by_its_line(tmp_path, part, content, message):
    paths = three(tmp_path, **{part: content})
    with pytest.raises(UserError, match=message):
        conll.files(*paths)


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="none: expected tokens and labels, found nothing"):
        conll.read(tmp_path / "none")
    with pytest.raises(UserError, match="expected tokens and labels, found a folder"):
        conll.read(tmp_path)


def test_without_seqeval_there_is_a_command(tmp_path, monkeypatch):
    def refusing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(conll.importlib, "import_module", refusing)
    with pytest.raises(UserError, match=re.escape('found none; pip install "l2lopt[labelling] @ git+https://')):
        conll.files(*three(tmp_path))


NAMES = ("O", "B-DSE", "I-DSE", "B-ESE", "I-ESE")
pairs = st.lists(st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=1, max_size=8), min_size=1, max_size=5)


@given(pairs)
def test_scores_are_seqevals(drawn):
    true, found = ([[pair[k] for pair in one] for one in drawn] for k in (0, 1))
    scores = conll.by_entity(NAMES, true, found)
    by_name = [[[NAMES[k] for k in one] for one in part] for part in (true, found)]
    if not scores.labels:
        assert {label for part in by_name for one in part for label in one} == {"O"}
        return
    report = classification_report(*by_name, output_dict=True, zero_division=0)
    assert scores.f1 == report["micro avg"]["f1-score"] == f1_score(*by_name, zero_division=0)
    for name, own in scores.labels.items():
        assert {"f1-score" if key == "f1" else key: value for key, value in own.items()} == report[name]
    assert len(scores.labels) == len(report) - 3


def test_scores_by_hand():
    """DSE: one of two found, one of two true. ESE: found a token too long, so not at all."""
    true = [[1, 2, 0, 1, 0, 3, 4, 0]]
    found = [[1, 2, 0, 0, 1, 3, 4, 4]]
    f1, by_label = conll.by_entity(NAMES, true, found)
    assert by_label["DSE"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2.0}
    assert by_label["ESE"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1.0}
    assert f1 == pytest.approx(1 / 3)


@given(pairs)
def test_scores_by_position_are_scikit_learns(drawn):
    from sklearn.metrics import precision_recall_fscore_support

    true, found = ([[pair[k] for pair in one] for one in drawn] for k in (0, 1))
    scores = by_position(NAMES, true, found)
    flat = [[k for one in part for k in one] for part in (true, found)]
    there = sorted({*flat[0], *flat[1]})
    columns = precision_recall_fscore_support(*flat, labels=there, zero_division=0)
    assert list(scores.labels) == [NAMES[k] for k in there]
    for name, own in zip(("precision", "recall", "f1", "support"), columns, strict=True):
        assert [row[name] for row in scores.labels.values()] == pytest.approx(own.tolist())
    assert scores.f1 == pytest.approx(columns[2].mean())


def test_scores_of_other_sequences_are_refused():
    with pytest.raises(UserError, match="labels: expected a label for every position"):
        by_position(NAMES, [[0, 1]], [[0]])
