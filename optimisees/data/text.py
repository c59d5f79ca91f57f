"""Texts for language models: three files, by word or by character, as the numbers of tokens in one vocabulary."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.core import registry
from l2lopt.core.errors import UserError, above_0
from l2lopt.core.registry import Choice
from l2lopt.storage.run_log import read_bytes
from optimisees.data.artificial_text import artificial_texts

Unit: TypeAlias = Literal["word", "character"]
EOS = "<eos>"
"""Closes every line."""
UNKNOWN = "<unk>"
"""Stands for every word that is not in the vocabulary."""
ROOT = "L2LOPT_DATA"
"""The environment variable that names the folder of data sets."""


class Vocabulary(NamedTuple):
    """The tokens of a text, each known by its place.

    Attributes:
        tokens: All different.
        unit: Kind of a token other than `<eos>`.
    """

    tokens: tuple[str, ...]
    unit: Unit

    @classmethod
    def of(cls, texts: Sequence[str], unit: Unit) -> "Vocabulary":
        """The tokens of all `texts` in the order of their first appearance."""
        return cls(tuple(dict.fromkeys(token for text in texts for token in split(text, unit))), unit)

    def encode(self, tokens: Sequence[str], where: str = "text") -> Tensor:
        """The tokens' places, [T] of int64.

        Raises:
            UserError: For a token that is not in the vocabulary.
        """
        places = {token: place for place, token in enumerate(self.tokens)}
        for token in tokens:
            if token not in places:
                near = get_close_matches(token, places, n=1)
                other = f"write {UNKNOWN} for it" if UNKNOWN in places else "leave it out"
                remedy = f"did you mean {near[0]!r}?" if near else other
                expected = f"{self.unit}s of the vocabulary"
                raise UserError(where, expected=expected, found=repr(token), remedy=remedy)
        return torch.tensor([places[token] for token in tokens], dtype=torch.int64)

    def prompt(self, text: str) -> Tensor:
        """The places of what a text begins with, its last line still open unless it ends in `<eos>` itself.

        Raises:
            UserError: For what `encode` refuses.
        """
        last, tokens = _tokens(text.rpartition("\n")[2], self.unit), split(f"{text}\n", self.unit)
        return self.encode(tokens if last[-1:] == [EOS] else tokens[:-1], "prompt")

    def decode(self, places: Sequence[int]) -> str:
        """The text of these places, a new line for every `<eos>`."""
        parts = ["\n" if self.tokens[place] == EOS else self.tokens[place] for place in places]
        if self.unit == "character":
            return "".join(parts)
        return " ".join(parts).replace(" \n", "\n").replace("\n ", "\n")

    def facts(self) -> dict[str, object]:
        """Tokens and unit, for JSON."""
        return {"tokens": list(self.tokens), "unit": self.unit}


class Corpus(NamedTuple):
    """Three texts, [T] each, and their vocabulary."""

    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def without_texts(cls, vocabulary: Vocabulary) -> "Corpus":
        """For a model that is only to speak."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(vocabulary, none, none, none)

    def digest(self) -> str:
        """A digest of vocabulary and texts."""
        found = hashlib.sha256(repr(self.vocabulary).encode())
        for text in self[1:]:
            found.update(f"{len(text)}".encode() + text.numpy().tobytes())
        return found.hexdigest()


def split(text: str, unit: Unit) -> list[str]:
    """The tokens of a text: its words, or its characters, and `<eos>` at the end of every line.

    Some files have it written out: as a line's last word it is that end, not a word before it.
    """
    lines = [_tokens(line, unit) for line in text.removesuffix("\n").split("\n")] if text else []
    return [token for line in lines for token in (line if line[-1:] == [EOS] else [*line, EOS])]


def files(train: str, valid: str, test: str, unit: Unit = "word", minimum: int = 1) -> Corpus:
    """Any three text files in UTF-8.

    The vocabulary is that of all three, as the Penn Treebank's, unless `minimum` is above 1.

    Args:
        train: Path of the training text.
        valid: Path of the validation text.
        test: Path of the test text.
        unit: Whether a token is a word (what white space separates) or a character.
        minimum: Least number of a word's occurrences in the training text. Above 1 the vocabulary is that of the
            training text, and every other word, in all three, is `<unk>`.

    Raises:
        UserError: For a file that is missing, empty, not UTF-8, or without any token; for a minimum below 1, and one
            above 1 of characters.
    """
    above_0("text", minimum=minimum)
    if minimum > 1 and unit == "character":
        found, remedy = str(minimum), "leave it out, or take words"
        raise UserError("text: minimum", expected="1 with characters", found=found, remedy=remedy)
    texts = [_read(Path(os.path.expanduser(path)), unit) for path in (train, valid, test)]
    if minimum == 1:
        vocabulary = Vocabulary.of(texts, unit)
        return Corpus(vocabulary, *(vocabulary.encode(split(text, unit)) for text in texts))
    counts = Counter(split(texts[0], unit))
    known = {EOS, UNKNOWN, *(token for token, count in counts.items() if count >= minimum)}
    split_texts = [[token if token in known else UNKNOWN for token in split(text, unit)] for text in texts]
    vocabulary = Vocabulary(tuple(dict.fromkeys([UNKNOWN, *split_texts[0]])), unit)
    return Corpus(vocabulary, *(vocabulary.encode(tokens) for tokens in split_texts))


def ptb(root: str | None = None, unit: Unit = "word") -> Corpus:
    """Mikolov's Penn Treebank, `ptb/ptb.{train,valid,test}.txt` under the root: 10,000 words.

    Args:
        root: Folder of the data sets; by default the value of the environment variable `L2LOPT_DATA`.
        unit: Kind of a token, see `files`.

    Raises:
        UserError: Without a root, and as `files`.
    """
    folder = root or os.environ.get(ROOT)
    if not folder:
        remedy = f"set {ROOT} to the folder that holds ptb/ptb.train.txt, or give data.root"
        raise UserError("ptb", expected="a folder of data sets", found="none", remedy=remedy)
    train, valid, test = (str(Path(folder) / "ptb" / f"ptb.{name}.txt") for name in ("train", "valid", "test"))
    return files(train, valid, test, unit)


def artificial(
    language: int = 0, words: int = 200, classes: int = 6, sentences: int = 3000, unit: Unit = "character"
) -> Corpus:
    """Sentences of an artificial language, for which no file is needed: about 25 characters each.

    A language has letters that follow one another with probabilities of its own (a Markov chain over 16 letters), a
    lexicon of words spelt by them, each in one of some word classes, and a syntax, which is a Markov chain over these
    classes. Within a class the k-th word has a probability in proportion to 1/k, as Zipf found for real ones. Every
    word ends the sentence with probability 0.15. So there is something to learn at each scale: frequencies of
    letters, spelling, frequencies of words, syntax; and nothing beyond a sentence.

    Args:
        language: Seed of everything: equal numbers give equal texts.
        words: Size of the lexicon.
        classes: Number of word classes, at most that of the words.
        sentences: Number of sentences, of which 8 in 10 are for training and 1 each for validation and testing.
        unit: Kind of a token, see `files`.

    Raises:
        UserError: For values out of range.

    Example:
        >>> artificial(words=20, sentences=100).vocabulary.unit
        'character'
    """
    above_0("artificial text", classes=classes)
    for name, value, least in (("words", words, classes), ("sentences", sentences, 10)):
        if value < least:
            where, remedy = f"artificial text: {name}", "change the value"
            raise UserError(where, expected=f"at least {least}", found=str(value), remedy=remedy)
    texts = artificial_texts(language, words, classes, sentences)
    vocabulary = Vocabulary.of(texts, unit)
    return Corpus(vocabulary, *(vocabulary.encode(split(text, unit)) for text in texts))


CORPORA: Mapping[str, Callable[..., Corpus]] = {"ptb": ptb, "files": files, "artificial": artificial}


def corpus(choice: Choice) -> Corpus:
    """The corpus of a choice: a name in `CORPORA`, or a mapping of name and options."""
    found: Corpus = registry.build(CORPORA, "data", choice)
    return found


def _tokens(line: str, unit: Unit) -> list[str]:
    """The tokens that a line is written with."""
    return line.split() if unit == "word" else list(line)


def _read(path: Path, unit: Unit) -> str:
    content = read_bytes(path, "a text", "give the path of a text file")
    if not content:
        raise UserError(str(path), expected="a text", found="an empty file", remedy="give another file")
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        found, remedy = f"byte {content[error.start]:#04x} at {error.start}", "convert the file to UTF-8"
        raise UserError(str(path), expected="a text in UTF-8", found=found, remedy=remedy) from None
    if all(token == EOS for token in split(text, unit)):
        found, remedy = "none", "give a file with more than empty lines"
        raise UserError(str(path), expected=f"{unit}s", found=found, remedy=remedy)
    return text
