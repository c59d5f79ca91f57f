"""Sequences with a class at every position: how they are held, and how what was found is scored."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.core.errors import UserError

Classes: TypeAlias = Sequence[Sequence[int]]
"""The class of each position of each sequence."""


class Sequences(NamedTuple):
    """Padded sequences, time first; what stands beyond a length is never read.

    Attributes:
        inputs: [T, B] of int64, the places of tokens in a vocabulary, or [T, B, N], real numbers.
        classes: [T, B] of int64.
        lengths: [B], each from 1 to T.
        places: (sequence, position) → what to call it, such as "test.conll:17: token"; counted from 0.
    """

    inputs: Tensor
    classes: Tensor
    lengths: Tensor
    places: Callable[[int, int], str]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], classes: Sequence[Tensor], places: Callable[[int, int], str]) -> "Sequences":
        """Sequences [T_b] or [T_b, N] and their classes [T_b], padded with 0 to the longest.

        Raises:
            UserError: Without a sequence or for an empty one, and where there is not a class for every position.
        """
        found = [[len(one) for one in part] for part in (inputs, classes)]
        if found[0] != found[1] or not all(found[0]) or not found[0]:
            number = next((k for k, pair in enumerate(zip_longest(*found)) if pair[0] != pair[1] or not pair[0]), 0)
            said = [f"{part[number]} positions" if number < len(part) else "no sequence" for part in found]
            expected, remedy = "a class for every position, of which there is at least one", "give them equal lengths"
            where = f"sequence {number}: inputs and classes"
            raise UserError(where, expected=expected, found=" and ".join(said), remedy=remedy)
        lengths = torch.tensor([len(one) for one in classes])
        pad = torch.nn.utils.rnn.pad_sequence
        return cls(pad(list(inputs)), pad(list(classes)), lengths, places)


class Scores(NamedTuple):
    """The quality of found labels beside the true ones, each number in [0, 1].

    Attributes:
        f1: F1 score over all labels, as the source of the data defines it.
        labels: label → "precision", "recall", "f1" and "support" (how many there are in truth).
    """

    f1: float
    labels: Mapping[str, Mapping[str, float]]


class Labelling(NamedTuple):
    """Labels that a model finds in sequences.

    Attributes:
        true: True classes.
        found: Classes that the model found.
        scores: Worth of the found classes.
    """

    true: Classes
    found: Classes
    scores: Scores


class Labelled(NamedTuple):
    """A task of sequence labelling.

    Attributes:
        classes: Names of the classes.
        train: Training sequences.
        valid: Sequences of the split `heldout`.
        test: Sequences that are never trained on.
        scored: (true, found) → scores.
        tokens: Vocabulary, or None where inputs are real numbers.
        rate: Positions per second, where positions are times.
    """

    classes: tuple[str, ...]
    train: Sequences
    valid: Sequences
    test: Sequences
    scored: Callable[[Classes, Classes], Scores]
    tokens: tuple[str, ...] | None = None
    rate: float | None = None

    def digest(self) -> str:
        """A digest of classes, vocabulary and sequences."""
        found = hashlib.sha256(repr((self.classes, self.tokens)).encode())
        for part in (self.train, self.valid, self.test):
            for tensor in part[:3]:
                found.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode() + tensor.numpy().tobytes())
        return found.hexdigest()


def by_position(names: Sequence[str], true: Classes, found: Classes) -> Scores:
    """Precision, recall and F1 = 2PR/(P + R) of every class over positions; `f1` is their mean (macro F1).

    A class without any position that is it or is taken for it does not count. A share of nothing is 0.

    Raises:
        UserError: For another number of labels found than true.
    """
    if [len(one) for one in true] != [len(one) for one in found]:
        expected, remedy = "a label for every position", "label the same sequences"
        raise UserError("labels", expected=expected, found="another number", remedy=remedy)
    truth, guess = (torch.tensor([k for one in part for k in one], dtype=torch.int64) for part in (true, found))
    pairs = torch.bincount(truth * len(names) + guess, minlength=len(names) ** 2).view(len(names), -1).double()
    labels = {}
    for k, name in enumerate(names):
        hits, actual, taken = (float(number) for number in (pairs[k, k], pairs[k].sum(), pairs[:, k].sum()))
        if actual or taken:
            precision, recall = hits / max(taken, 1.0), hits / max(actual, 1.0)
            f1 = 2 * hits / (actual + taken)
            labels[name] = {"precision": precision, "recall": recall, "f1": f1, "support": actual}
    return Scores(sum(own["f1"] for own in labels.values()) / len(labels), labels)
