"""The vocabulary of a trained language model, and texts that the model writes."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from l2lopt.core import registry
from l2lopt.core.errors import UserError, at_least_0
from l2lopt.core.layout import Params
from l2lopt.core.seeding import generator
from l2lopt.core.types import Aux
from l2lopt.optimisee import MODEL, SampleRequest, SavedRun
from l2lopt.storage.run_log import existing, write_json
from l2lopt.storage.tensor_file import check_tensors
from optimisees.data.text import EOS, Corpus, Unit, Vocabulary

VOCABULARY = "vocabulary.json"
"""File of a run that holds the tokens."""


class Writer(Protocol):
    """A model that continues a text."""

    def init(self, seed: int) -> tuple[Params, Aux]:
        """Initial parameters."""

    def generate(
        self, params: Params, prompt: Tensor, tokens: int, temperature: float = 1.0, seed: int = 0
    ) -> Iterator[int]:
        """The tokens that follow a prompt, one at a time."""


def text_metrics(loss: float, unit: Unit) -> dict[str, float]:
    """The perplexity of a mean loss in nats per token, and of characters the bits of each; +∞ from e⁷⁰⁹ on."""
    bits = {"bits_per_character": loss / math.log(2)} if unit == "character" else {}
    # math.exp raises an error above 709, where a run that diverged easily gets.
    return {**bits, "perplexity": math.inf if loss > 709 else math.exp(loss)}


def continuation(
    logits_after: Callable[[Tensor], Tensor],
    vocabulary: Vocabulary,
    prompt: Tensor,
    tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    """The tokens that follow a prompt, each drawn from softmax(logits / temperature).

    Args:
        logits_after: (tokens that are new since the last call [T]) → logits of the next one, [vocabulary].
        vocabulary: Vocabulary of the tokens.
        prompt: Tokens, read after a line's end.
        tokens: Number of tokens to draw.
        temperature: Boldness of the draws, at least 0; at 0 the likeliest token is taken.
        seed: Seed of the draws.
    """
    at_least_0("sample", temperature=temperature)
    source, given = generator("sample", seed), torch.cat([vocabulary.encode([EOS]), prompt])
    with torch.no_grad():
        for _ in range(tokens):
            # On the CPU, where the generator is: it draws the same from a seed whatever the device.
            logits = logits_after(given).cpu().double()
            if not logits.isfinite().all():
                expected, remedy = "finite logits", "train it again, at a lower rate"
                raise UserError("sample", expected=expected, found="a model that has diverged", remedy=remedy)
            if temperature:
                # The largest is taken off first: a small temperature could make the quotients overflow.
                chances = ((logits - logits.max()) / temperature).softmax(0)
                given = torch.multinomial(chances, 1, generator=source)
            else:
                given = logits.argmax(0, keepdim=True)
            yield int(given)


def write_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes `vocabulary.json`, without which the parameters cannot be used."""
    write_json(folder / VOCABULARY, vocabulary.facts())


def continued(make: Callable[..., Writer], run: SavedRun, request: SampleRequest) -> str:
    """The prompt and the text that a trained language model continues it with; its training texts are not needed.

    Args:
        make: Class of the model.
        run: Finished training.
        request: Prompt, number of tokens, temperature, and the seed of the draws.

    Raises:
        UserError: For a missing or damaged vocabulary, and a prompt with tokens that are not in it.
    """
    remedy = "give a folder in which l2lopt train has trained one to the end"
    path = existing(run.folder / VOCABULARY, "a trained language model", remedy)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = Vocabulary(tuple(map(str, facts["tokens"])), facts["unit"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(str(path), expected="a vocabulary", found="damage", remedy=remedy) from None
    options = {**run.options, "data": Corpus.without_texts(vocabulary)}
    model: Writer = registry.make({"model": make}, "optimisee", "model", **options)
    check_tensors(run.folder / MODEL, model.init(0)[0], run.params, remedy)
    prompt = vocabulary.prompt(request.prompt)
    drawn = model.generate(run.params, prompt, request.tokens, request.temperature, request.seed)
    return vocabulary.decode([*prompt.tolist(), *drawn])
