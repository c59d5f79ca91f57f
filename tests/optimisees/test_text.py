"""Texts: tokens and vocabularies, and every mistake in one line."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.evaluation.suites import Task, has_data
from optimisees.data import conll, images
from optimisees.data.datasets import data_root
from optimisees.data.text import EOS, Corpus, Vocabulary, corpus, files, ptb, split

UNITS = pytest.mark.parametrize("unit", ["word", "character"])
TEXTS = st.text(st.characters(exclude_characters="\r", codec="utf-8"), max_size=40)


def written(folder, train=b"a b\nb c\n", valid=b"c d\n", test=b"a a\n"):
    paths = {}
    for name, content in (("train", train), ("valid", valid), ("test", test)):
        paths[name] = str(folder / f"{name}.txt")
        if content is not None:
            (folder / f"{name}.txt").write_bytes(content)
    return paths


def test_words_in_order_of_first_appearance_over_all_three(tmp_path):
    found = files(**written(tmp_path))
    assert found.vocabulary.tokens == ("a", "b", EOS, "c", "d")
    assert [text.tolist() for text in found[1:]] == [[0, 1, 2, 1, 3, 2], [3, 4, 2], [0, 0, 2]]


def test_rare_words_are_unknown_and_the_vocabulary_is_the_training_texts(tmp_path):
    paths = written(tmp_path, b"a b\na c\n", b"a d\n", b"b\n")
    found = files(**paths, minimum=2)
    assert found.vocabulary.tokens == ("<unk>", "a", EOS)
    assert [text.tolist() for text in found[1:]] == [[1, 0, 2, 1, 0, 2], [1, 0, 2], [0, 2]]
    assert corpus({"name": "files", **paths, "minimum": 3}).vocabulary.tokens == ("<unk>", EOS)
    for options in ({"minimum": 0}, {"minimum": 2, "unit": "character"}):
        with pytest.raises(UserError, match="text: minimum: expected"):
            files(**paths, **options)


def test_characters_and_line_ends(tmp_path):
    found = files(**written(tmp_path, b"\xef\xbb\xbfab\r\n \xc3\xa9", b"b\n\n", b"a"), unit="character")
    assert found.vocabulary.tokens == ("a", "b", EOS, " ", "é")
    assert [text.tolist() for text in found[1:]] == [[0, 1, 2, 3, 4, 2], [1, 2, 2], [0, 2]]


def test_a_line_whose_end_is_written_out_has_one_end(tmp_path):
    written_out = {"train": b" a b <eos> \n b c <eos>\n", "valid": b"c d <eos>", "test": b"a a <eos>\n"}
    assert files(**written(tmp_path, **written_out)).digest() == files(**written(tmp_path)).digest()
    assert split("<eos> a\n<eos>\na<eos>", "word") == [EOS, "a", EOS, EOS, "a<eos>", EOS]
    assert split("<eos>\n", "character") == [*"<eos>", EOS]
    vocabulary = Vocabulary.of(["a b"], "word")
    prompts = {"a <eos>": [0, 2], "a <eos>\n": [0, 2], "a <eos>\nb": [0, 2, 1], "<eos>": [2], "": []}
    assert {prompt: vocabulary.prompt(prompt).tolist() for prompt in prompts} == prompts


def test_ptb_is_found_by_the_environment(tmp_path, monkeypatch):
    (tmp_path / "ptb").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{name}.txt").write_text(f" the {name} \n")
    monkeypatch.setenv("L2LOPT_DATA", str(tmp_path))
    assert corpus("ptb").vocabulary.tokens == ("the", "train", EOS, "valid", "test")
    assert corpus({"name": "ptb", "root": str(tmp_path)}).digest() == ptb().digest()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpus({"name": "ptb", "root": "~"}).digest() == ptb().digest()
    monkeypatch.delenv("L2LOPT_DATA")
    with pytest.raises(UserError, match=r"ptb: expected a folder of data sets, found none; set L2LOPT_DATA"):
        ptb()


@UNITS
@given(text=TEXTS)
def test_every_line_is_closed_and_nothing_is_lost(unit, text):
    tokens = split(text, unit)
    lines = text.removesuffix("\n").split("\n") if text else []
    inside = [line.split()[:-1].count(EOS) for line in lines]
    assert tokens.count(EOS) == len(lines) + (0 if unit == "character" else sum(inside))
    if unit == "character":
        assert "".join("\n" if token == EOS else token for token in tokens) == "".join(f"{line}\n" for line in lines)
    else:
        assert [token for token in tokens if token != EOS] == [word for word in text.split() if word != EOS]


@UNITS
@given(text=TEXTS)
def test_encoded_and_decoded(unit, text):
    vocabulary = Vocabulary.of([text], unit)
    places = vocabulary.encode(split(text, unit))
    assert [vocabulary.tokens[place] for place in places] == split(text, unit)
    assert len(set(vocabulary.tokens)) == len(vocabulary.tokens)
    assert vocabulary.tokens == tuple(dict.fromkeys(split(text, unit)))
    told = vocabulary.decode(places.tolist())
    assert split(told, unit) == [token for token in split(text, unit) if unit == "character" or told or token != EOS]


@UNITS
@given(text=TEXTS)
def test_a_prompts_last_line_stays_open(unit, text):
    vocabulary = Vocabulary.of([text, "\n"], unit)
    expected = split(text, unit) if text.endswith("\n") else split(text, unit)[:-1]
    assert [vocabulary.tokens[place] for place in vocabulary.prompt(text)] == expected


def test_facts_make_the_vocabulary_again():
    vocabulary = Vocabulary.of(["a b", "c"], "word")
    facts = vocabulary.facts()
    assert Vocabulary(tuple(facts["tokens"]), facts["unit"]) == vocabulary


def test_other_texts_have_another_digest(tmp_path):
    one = files(**written(tmp_path))
    assert one.digest() == files(**written(tmp_path)).digest()
    others = [one._replace(test=one.valid), one._replace(train=one.train.flip(0)), Corpus.without_texts(one.vocabulary)]
    assert len({text.digest() for text in (one, *others)}) == 4


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"valid": None}, r"valid\.txt: expected a text, found nothing"),
        ({"train": b""}, r"train\.txt: expected a text, found an empty file"),
        ({"test": b"ab\xff\n"}, r"test\.txt: expected a text in UTF-8, found byte 0xff at 2; convert"),
        ({"valid": b"\n \n\n"}, r"valid\.txt: expected words, found none; give a file with more than empty lines"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, contents, message):
    with pytest.raises(UserError, match=message):
        files(**written(tmp_path, **contents))


@pytest.mark.parametrize(
    ("tokens", "prompt", "message"),
    [
        ("the cat <unk>", "the catt", "prompt: expected words of the vocabulary, found 'catt'; did you mean 'cat'?"),
        ("the cat <unk>", "zoo", "found 'zoo'; write <unk> for it"),
        ("the cat", "zoo", "found 'zoo'; leave it out"),
    ],
)
def test_an_unknown_word_in_a_prompt(tokens, prompt, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Vocabulary.of([tokens], "word").prompt(prompt)


def test_decoding_puts_no_blanks_around_lines():
    vocabulary = Vocabulary.of(["a b"], "word")
    assert vocabulary.decode([0, 1, 2, 1, 2, 2, 0]) == "a b\nb\n\na"
    assert torch.equal(vocabulary.prompt("a b\nb\n\na"), torch.tensor([0, 1, 2, 1, 2, 2, 0]))


@pytest.mark.parametrize("kind", ["text", "columns"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, kind):
    (tmp_path / "a.txt").write_text("a O\n")

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(UserError, match="that can be read, found Permission denied; give the path of a"):
        files(*[str(tmp_path / "a.txt")] * 3) if kind == "text" else conll.read(tmp_path / "a.txt")


def test_a_home_of_nobody_is_one_line(monkeypatch):
    with pytest.raises(UserError, match=r"~no-such-user/a\.txt: expected a text, found nothing"):
        files(*["~no-such-user/a.txt"] * 3)
    with pytest.raises(UserError, match="found '~no-such-user/pets'"):
        images.load("~no-such-user/pets")
    with pytest.raises(UserError, match="found ~no-such-user, which is no folder"):
        data_root("~no-such-user", "texts", make=True)
    assert not Path("~no-such-user").exists()
    monkeypatch.setenv("L2LOPT_DATA", "~no-such-user")
    assert not has_data(Task(optimisee="language-model", family="text", short=1, medium=1, long=1, needs="ptb"))
    with pytest.raises(UserError, match="a learned optimiser"):
        l2lopt.publish("~no-such-user", "mine.safetensors")
