"""Token files in CoNLL columns: a token a line, its BIO label in the last column, a blank line between sentences."""

import importlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from l2lopt.core.errors import UserError, above_0, install
from l2lopt.storage.run_log import read_bytes
from optimisees.labelling.labelled import Classes, Labelled, Scores, Sequences

UNKNOWN = "<unk>"
"""Stands for every token that is not in the vocabulary."""
DOCUMENT = "-DOCSTART-"
"""The token of a line between documents, as CoNLL-2003 has them."""
_LABEL = re.compile(r"O|[BI]-\S+")


class Row(NamedTuple):
    """A line of a file, with its number from 1."""

    line: int
    columns: int
    token: str
    label: str


def files(train: str, valid: str, test: str, minimum: int = 2) -> Labelled:
    """Three files in CoNLL columns, such as those of CoNLL-2003 or of Irsoy and Cardie's opinion expressions.

    The vocabulary is that of the training file, and so are the classes.

    Args:
        train: Path of the training file.
        valid: Path of the validation sentences.
        test: Path of the test sentences.
        minimum: Least number of a token's occurrences in the training file for a vector of its own; all others share
            that of `<unk>`, which learns from the rarer ones.

    Raises:
        UserError: For what `read` refuses, a label that the training file does not have, and a missing seqeval.
    """
    above_0("conll", minimum=minimum)
    _seqeval()
    trained = read(train)
    others = [read(path, trained[0][0].columns) for path in (valid, test)]
    labels = tuple(sorted({row.label for sentence in trained for row in sentence}, key=_outside_first))
    for path, sentences in zip((valid, test), others, strict=True):
        for row in (row for sentence in sentences for row in sentence):
            if row.label not in labels:
                expected, remedy = f"a label of {train}: {', '.join(labels)}", "mend the label, or train on it"
                raise UserError(f"{path}:{row.line}", expected=expected, found=row.label, remedy=remedy)
    counts = Counter(row.token for sentence in trained for row in sentence)
    counts.pop(UNKNOWN, None)
    tokens = (UNKNOWN, *(token for token, count in counts.items() if count >= minimum))
    numbers, classes = ({name: k for k, name in enumerate(own)} for own in (tokens, labels))
    first, second, third = (
        _numbered(path, sentences, numbers, classes)
        for path, sentences in zip((train, valid, test), (trained, *others), strict=True)
    )
    return Labelled(labels, first, second, third, partial(by_entity, labels), tokens)


def read(path: str | Path, columns: int | None = None) -> list[list[Row]]:
    """The sentences of a file; columns stand apart by blanks or tabs, the first is the token, the last its label.

    A label is O, or B- (the first token of an entity) or I- (a later one) and the entity's type. An I- after anything
    else begins an entity, as seqeval takes it. A line whose token is `DOCUMENT` is left out, with a blank behind it.

    Args:
        path: Path of the file, in UTF-8.
        columns: Number of columns; by default that of the first line.

    Raises:
        UserError: For a missing or empty file, one that is not UTF-8, and by the number of its line for one with
            another number of columns, another kind of label, or a blank line where a sentence should stand.
    """
    sentences: list[list[Row]] = [[]]
    begun = False
    for number, line in enumerate(_text(Path(os.path.expanduser(path))).rstrip(" \t\n").split("\n"), 1):
        parts = re.split(r"[ \t]+", line.strip(" \t"))
        behind, begun = begun, parts[0] == DOCUMENT
        if begun or (behind and parts == [""]):
            if sentences[-1]:  # without a blank line before it
                sentences.append([])
            continue
        if parts == [""]:
            if not sentences[-1]:
                found, remedy = "an empty one", "leave one blank line between sentences"
                raise UserError(f"{path}:{number}", expected="a sentence", found=found, remedy=remedy)
            sentences.append([])
            continue
        columns = columns or max(len(parts), 2)
        if len(parts) != columns:
            remedy = "give every line the columns of the first one"
            raise UserError(f"{path}:{number}", expected=f"{columns} columns", found=f"{len(parts)}", remedy=remedy)
        if not _LABEL.fullmatch(parts[-1]):
            found, remedy = parts[-1], "write O, or B- or I- and the type"
            raise UserError(f"{path}:{number}", expected="a BIO label", found=found, remedy=remedy)
        sentences[-1].append(Row(number, columns, parts[0], parts[-1]))
    filled = [sentence for sentence in sentences if sentence]  # the last is empty behind a document without any
    if not filled:
        remedy = "give another file"
        raise UserError(str(path), expected="tokens and labels", found=f"nothing but {DOCUMENT}", remedy=remedy)
    return filled


def by_entity(labels: Sequence[str], true: Classes, found: Classes) -> Scores:
    """Precision, recall and F1 of every type by whole entities, and the F1 of all together (micro F1), by seqeval.

    Raises:
        UserError: Without the package seqeval.
    """
    names = [[[labels[k] for k in sentence] for sentence in part] for part in (true, found)]
    precision_recall_f1: Any = _seqeval().precision_recall_fscore_support
    types = sorted({label[2:] for part in names for sentence in part for label in sentence if label != "O"})
    if not types:
        return Scores(0.0, {})
    *_, f1, _ = precision_recall_f1(*names, average="micro", zero_division=0)
    columns = precision_recall_f1(*names, average=None, zero_division=0)
    rows = zip(types, *(column.tolist() for column in columns), strict=True)
    keys = ("precision", "recall", "f1", "support")
    return Scores(float(f1), {name: dict(zip(keys, map(float, row), strict=True)) for name, *row in rows})


def _seqeval() -> Any:
    """The package's module of metrics."""
    try:
        return importlib.import_module("seqeval.metrics.sequence_labeling")
    except ImportError:
        remedy = install("labelling")
        raise UserError("conll", expected="the package seqeval", found="none", remedy=remedy) from None


def _outside_first(label: str) -> tuple[bool, str, str]:
    """O, then type by type."""
    return label != "O", label[2:], label[:1]


def _numbered(
    path: str, sentences: Sequence[Sequence[Row]], tokens: dict[str, int], classes: dict[str, int]
) -> Sequences:
    def place(sentence: int, position: int) -> str:
        row = sentences[sentence][position]
        return f"{path}:{row.line}: {row.token}"

    inputs = [torch.tensor([tokens.get(row.token, 0) for row in sentence]) for sentence in sentences]
    return Sequences.of(inputs, [torch.tensor([classes[row.label] for row in one]) for one in sentences], place)


def _text(path: Path) -> str:
    content = read_bytes(path, "tokens and labels", "give the path of a file in CoNLL columns")
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line, found = content[: error.start].count(b"\n") + 1, f"byte {content[error.start]:#04x}"
        remedy = "convert the file to UTF-8"
        raise UserError(f"{path}:{line}", expected="text in UTF-8", found=found, remedy=remedy) from None
    if not text.strip():
        found, remedy = "an empty file", "give another file"
        raise UserError(str(path), expected="tokens and labels", found=found, remedy=remedy)
    return text
