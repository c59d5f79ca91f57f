"""Sentences of artificial languages; see `text.artificial`, which makes a corpus of them."""

from functools import lru_cache

import torch
from torch import Tensor

from l2lopt.core.seeding import generator

_LETTERS, _LONGEST_WORD, _LONGEST_SENTENCE = 16, 8, 40
_ENDS = 0.15
"""Probability that a word is the last one of its sentence."""
_CONTRAST = 1.5
"""Standard deviation of the logits of what follows what: the larger, the more can be foretold."""


@lru_cache(maxsize=8)
def artificial_texts(language: int, words: int, classes: int, sentences: int) -> tuple[str, str, str]:
    """Training, validation and test sentences, a line each.

    Args:
        language: Seed of everything.
        words: Size of the lexicon.
        classes: Number of word classes.
        sentences: Number of sentences in all three together.
    """
    draw = generator("artificial text", language)
    lexicon = _lexicon(words, draw)
    # Word w is the one of rank w // classes in the class w % classes.
    ranks = torch.arange(1, -(-words // classes) + 1, dtype=torch.float64).reciprocal().expand(classes, -1).clone()
    ranks[words <= torch.arange(ranks.numel()).view(-1, classes).T] = 0
    follows = _chain(classes + 1, classes, draw)
    state = torch.full((sentences,), classes)  # the row of the first word
    lines: list[list[str]] = [[] for _ in range(sentences)]
    alive = torch.ones(sentences, dtype=torch.bool)
    for _ in range(_LONGEST_SENTENCE):
        state = _next(follows[state], draw)
        chosen = _next(ranks[state], draw) * classes + state
        for line in alive.nonzero().flatten().tolist():
            lines[line].append(lexicon[int(chosen[line])])
        alive &= torch.rand(sentences, generator=draw, dtype=torch.float64) > _ENDS
    text = [" ".join(line) + "\n" for line in lines]
    tenth = sentences // 10
    return "".join(text[: -2 * tenth]), "".join(text[-2 * tenth : -tenth]), "".join(text[-tenth:])


def _lexicon(words: int, draw: torch.Generator) -> list[str]:
    """Words of 1 to 8 letters."""
    follows = _chain(_LETTERS + 1, _LETTERS, draw)
    lengths = torch.randint(1, _LONGEST_WORD + 1, (words,), generator=draw).tolist()
    state, letters = torch.full((words,), _LETTERS), []
    for _ in range(_LONGEST_WORD):
        state = _next(follows[state], draw)
        letters.append(state)
    spelt = torch.stack(letters, 1).tolist()
    return ["".join(chr(ord("a") + letter) for letter in word[:n]) for word, n in zip(spelt, lengths, strict=True)]


def _chain(rows: int, states: int, draw: torch.Generator) -> Tensor:
    """Probabilities of the states that follow each row's, [rows, states]."""
    return (_CONTRAST * torch.randn(rows, states, generator=draw, dtype=torch.float64)).softmax(-1)


def _next(weights: Tensor, draw: torch.Generator) -> Tensor:
    """A state for each row of weights [rows, states] that need not sum to 1."""
    # By cumulated weights: `torch.multinomial` does not promise the same draws from one version to the next.
    sums = weights.cumsum(-1)
    marks = torch.rand(len(weights), 1, generator=draw, dtype=torch.float64) * sums[:, -1:]
    return (sums <= marks).sum(-1).clamp(max=weights.shape[-1] - 1)
