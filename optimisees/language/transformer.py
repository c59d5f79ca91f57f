"""A causal transformer as an optimisee: GPT-2's architecture at any size, on characters or words."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0, few
from l2lopt.core.layout import Params
from l2lopt.core.registry import Choice
from l2lopt.core.types import Aux
from l2lopt.optimisee import SampleRequest, SavedRun
from optimisees.data.datasets import InMemory
from optimisees.data.text import Corpus, corpus
from optimisees.language.artefacts import VOCABULARY, continuation, continued, text_metrics, write_vocabulary
from optimisees.module import ModuleOptimisee

STD = 0.02
"""Standard deviation of initial weights."""
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Transformer(ModuleOptimisee):
    """P(next token | all before it in the window) by a causal transformer (Radford et al. 2019, GPT-2).

    x = E[tokens] + P; for each layer x ← x + attention(norm(x)), x ← x + W₂ gelu(W₁ norm(x)); logits = W norm(x).
    Attention is causal, with learned positions P and queries, keys and values from one matrix [3·width, width]. The
    initial weights are N(0, 0.02²), those of the two matrices that lead back into x smaller by √(2·layers); biases 0.

    A sample is a window of consecutive tokens, the texts being cut into windows one after another; what is over at the
    end is left out. The loss is the mean cross-entropy of its tokens in nats. `inner` is the training text, `heldout`
    the validation text. Everything works under `vmap` and twice differentiated.

    Args:
        data: Corpus, or the choice of one in `text.CORPORA`; the Penn Treebank's characters by default, your own texts
            with {name = "files", train = …, valid = …, test = …, unit = "character"}.
        width: Size of the tokens' vectors.
        layers: Number of layers.
        heads: Number of attention heads, a divisor of the width.
        window: Number of tokens of a window.
        expansion: Hidden units of a layer's perceptron over the width.
        norm: Normalisation, "layer" (layer norm) or "rms" (RMS norm).
        tied: Whether E is the matrix W of the logits, too.
        dropout: Probability p for the embedded tokens and what leads back into x; in training alone.
        batch_size: Windows a step.
        evaluation_samples: Number of a split's windows in an evaluation, always the same; None: all.
        evaluation_size: Windows evaluated at once.
        dtype: Data type of the parameters.
        device: Device of data and parameters.

    Raises:
        UserError: For values out of range, and texts shorter than a window.

    Example:
        >>> from optimisees.data.text import Corpus, Vocabulary
        >>> vocabulary = Vocabulary.of(["abc"], "character")
        >>> text = vocabulary.encode(list("abcabcabcabc"))
        >>> model = Transformer(Corpus(vocabulary, text, text, text), width=8, layers=1, window=4, batch_size=2)
        >>> model.batch("train", 0, 0)["inputs"].shape
        torch.Size([2, 4])
    """

    sample_kind: ClassVar[Literal["text", "images"] | None] = "text"
    artefact_files: ClassVar[tuple[str, ...]] = (VOCABULARY,)

    @checks_words
    def __init__(
        self,
        data: Choice | Corpus | None = None,
        width: int = 64,
        layers: int = 2,
        heads: int = 2,
        window: int = 64,
        expansion: int = 4,
        norm: Literal["layer", "rms"] = "layer",
        tied: bool = False,
        dropout: float = 0.0,
        batch_size: int = 16,
        evaluation_samples: int | None = 400,
        evaluation_size: int = 400,
        dtype: Literal["float32", "float64"] = "float32",
        device: str = "cpu",
    ) -> None:
        few("transformer", layers=layers)
        above_0("transformer", width=width, heads=heads, window=window, expansion=expansion)
        if width % heads:
            expected, remedy = f"a divisor of the width, {width}", "change heads or width"
            raise UserError("transformer: heads", expected=expected, found=str(heads), remedy=remedy)
        if not 0 <= dropout < 1:
            remedy = "change the value"
            raise UserError("transformer: dropout", expected="in [0, 1)", found=str(dropout), remedy=remedy)
        chosen = {"name": "ptb", "unit": "character"} if data is None else data
        self.texts = chosen if isinstance(chosen, Corpus) else corpus(chosen)
        self.window = window
        sizes = width, layers, heads, window, expansion
        samples, valid = self._windows()
        super().__init__(
            lambda: CausalTransformer(len(self.texts.vocabulary.tokens), *sizes, norm, tied, dropout).to(
                getattr(torch, dtype)
            ),
            _cross_entropy,
            samples,
            batch_size if len(self.texts.train) else 1,
            device=device,
            evaluation_size=evaluation_size,
            evaluation_samples=evaluation_samples,
            validation=valid,
        )

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """The perplexity, and of characters the bits of each."""
        return text_metrics(loss, self.texts.vocabulary.unit)

    def fingerprint(self) -> dict[str, str]:
        """The digest of texts and vocabulary."""
        return {"data": self.texts.digest()}

    def summary(self) -> str:
        """The parameters' number."""
        return f"{sum(value.numel() for value in self.init(0)[0].values()):,} parameters"

    def artefacts(self, params: Params, aux: Aux, folder: Path) -> None:
        """The vocabulary."""
        write_vocabulary(self.texts.vocabulary, folder)

    @classmethod
    def sample(cls, run: SavedRun, request: SampleRequest) -> str:
        """The prompt, and the text that follows it; see `artefacts.continued`."""
        return continued(cls, run, request)

    def generate(
        self, params: Params, prompt: Tensor, tokens: int, temperature: float = 1.0, seed: int = 0
    ) -> Iterator[int]:
        """Goes on after a prompt [T], a token at a time, each drawn from P^(1/temperature) given the last window.

        Args:
            params: Trained parameters.
            prompt: Tokens, read after a line's end.
            tokens: Number of tokens to draw.
            temperature: Boldness of the draws, at least 0; at 0 the likeliest token is taken.
            seed: Seed of the draws.
        """
        before = torch.zeros(0, dtype=torch.int64)

        def logits_after(given: Tensor) -> Tensor:
            nonlocal before
            before = torch.cat([before, given.cpu()])[-self.window :]
            logits: Tensor = functional_call(self._testing, dict(params), (before[None].to(self.device),))
            return logits[0, -1]

        return continuation(logits_after, self.texts.vocabulary, prompt, tokens, temperature, seed)

    def _windows(self) -> tuple[InMemory, tuple[Tensor, Tensor]]:
        """Training and test windows, and those of the validation text."""
        if not len(self.texts.train):  # a model that is only to speak
            none = torch.zeros(1, self.window, dtype=torch.int64)
            return InMemory(none, none, none, none), (none, none)
        pairs = []
        for name, text in (("train", self.texts.train), ("valid", self.texts.valid), ("test", self.texts.test)):
            if len(text) <= self.window:
                found, remedy = f"{len(text)}", "lower window, or give a longer text"
                expected = f"more than the {self.window} tokens of a window"
                raise UserError(f"transformer: {name}", expected=expected, found=found, remedy=remedy)
            # Views of the text: no window is copied.
            pairs.append(tuple(part.unfold(0, self.window, self.window) for part in (text[:-1], text[1:])))
        train, valid, test = pairs
        return InMemory(*train, *test), (valid[0], valid[1])


class CausalTransformer(nn.Module):
    """Tokens [B, T] to logits [B, T, vocabulary]; see `Transformer`.

    Args:
        vocabulary: Number of tokens.
        width: Size of the tokens' vectors.
        layers: Number of layers.
        heads: Number of attention heads.
        window: Largest T.
        expansion: Hidden units of a layer's perceptron over the width.
        norm: "layer" or "rms".
        tied: Whether the embedding is the matrix of the logits, too.
        dropout: Probability p.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        window: int,
        expansion: int,
        norm: Literal["layer", "rms"],
        tied: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(window, width))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, expansion, norm, dropout) for _ in range(layers)))
        self.norm, self.lm_head = NORMS[norm](width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.positions, std=STD)
        initialise(self, layers)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each place's next token."""
        x = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[-1]])
        logits: Tensor = self.lm_head(self.norm(self.layers(x)))
        return logits


class Layer(nn.Module):
    """Attention and a perceptron, each behind a normalisation and added to what it was given.

    Args:
        width: Size of the vectors.
        heads: Number of attention heads.
        expansion: Hidden units of the perceptron over the width.
        norm: "layer" or "rms".
        dropout: Probability p for what is added.
        causal: Whether a place sees only the places so far; otherwise it sees all of them.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        expansion: int,
        norm: Literal["layer", "rms"],
        dropout: float,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = NORMS[norm](width), NORMS[norm](width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, expansion * width), nn.Linear(expansion * width, width)
        self.dropout_1, self.dropout_2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """X [B, T, width] after attention and perceptron."""
        x = x + self.dropout_1(self.out(self._attention(self.norm_1(x))))
        added: Tensor = self.dropout_2(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))
        return x + added

    def _attention(self, x: Tensor) -> Tensor:
        """softmax(q kᵀ / √d) v over the places that are seen, all heads side by side."""
        # By its parts: PyTorch's fused attention has no second derivative and no rule for vmap on every device.
        places, width = x.shape[-2:]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(width // self.heads)
        if self.causal:
            # No buffer: it would be a state of the loss, with a copy for each run.
            future = torch.ones(places, places, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(-2)


def initialise(model: nn.Module, layers: int) -> None:
    """Draws the weights of linear layers and embeddings as GPT-2's; biases are 0.

    Args:
        model: Model with some `Layer`s.
        layers: Number of these.
    """
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=STD)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for part in model.modules():
        if isinstance(part, Layer):
            for back in (part.out, part.down):
                nn.init.normal_(back.weight, std=STD / math.sqrt(2 * layers))


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens of the windows, nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
