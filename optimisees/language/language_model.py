"""Language models with any cell, by the recipe of Merity et al. 2018 (AWD-LSTM), as an optimisee."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt import cells
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0, at_least_0, few
from l2lopt.core.layout import Params
from l2lopt.core.references import References
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import generator, seed_of, seeded
from l2lopt.core.types import Aux, Batch
from l2lopt.optimisee import Optimisee, SampleRequest, SavedRun, Split, StepInfo
from l2lopt.sequence import Stack, StackState
from l2lopt.sequence.masks import check_share, draw
from optimisees import precision
from optimisees.data.text import Corpus, corpus
from optimisees.language.artefacts import VOCABULARY, continuation, continued, text_metrics, write_vocabulary
from optimisees.language.references import NGrams
from optimisees.language.windows import cut_windows

_COLUMNS: Mapping[Split, int] = {"train": 10, "inner": 10, "heldout": 10, "test": 1}
"""Of the text in evaluation."""
_CHUNK = 128
"""Time steps of an evaluation that are in memory at once."""


class Counts(NamedTuple):
    """Parameters of a language model.

    Attributes:
        total: Number of all parameters.
        recurrent: Number in the cells, without `gate_bias`: the papers' count.
        gate_biases: Number in the cells' `gate_bias`.
    """

    total: int
    recurrent: int
    gate_biases: int

    def summary(self) -> str:
        """In a line."""
        beside = f" (and {self.gate_biases:,} in gate biases)" if self.gate_biases else ""
        return f"{self.total:,} parameters, {self.recurrent:,} of them in the recurrent layers{beside}"


class LanguageModel(Optimisee):
    """P(next token | all before it) by a stack of recurrent layers between an embedding and its transpose.

    x_t = E[token_t]; h_t = the layers over x; logits = E h_t + b. The loss of a window is the mean cross-entropy of its
    tokens in nats, plus `activation`·mean(dropped h²) + `temporal`·mean((h_t − h_{t−1})²), which the test-mode loss
    leaves out. Aux holds the cells' states, detached, and that cross-entropy alone. A batch is a window of consecutive
    tokens in `batch_size` columns with every mask; the first one of an epoch, and every one of `heldout` and `test`,
    starts from blank states. Evaluation carries the states over the whole text.

    Windows are `window` tokens long, or drawn: max(5, int N(base, 5²)), base = `window` with probability 0.95, else
    half of it, and the rate is then multiplied by length/`window`. The lengths are those of the epoch, the same for
    all seeds, so that runs can go side by side.

    `inner` is the training text and `heldout` the validation text.

    Dropout, in training alone, multiplies by masks of 0 and 1/(1 − p), one for all steps of a window.

    Args:
        data: Corpus, or the choice of one in `text.CORPORA`.
        cell: Cell of every layer, a name or a table of name and options.
        embedding_size: Size of the tokens' vectors and, as E is used twice, of the last layer.
        hidden_size: Size of the other layers.
        layers: Number of layers.
        word_dropout: Probability p for the embedding's rows.
        input_dropout: Probability p for the first layer's input.
        hidden_dropout: Probability p between two layers.
        output_dropout: Probability p for the last layer's output.
        weight_drop: Probability p for every recurrent weight, see `cells.Cell.recurrent_weights`.
        activation: Factor α of the activation regularisation.
        temporal: Factor β of the temporal regularisation.
        batch_size: Number of columns in training.
        window: Number of tokens of a full window.
        variable: Whether the lengths are drawn.
        shifted: Whether each seed begins to read at a place of its own in the text, so that short runs see all of it.
        initial: `authors` sets the initial values of the cells' authors, see `cells.init_as_published`.
        evaluation_tokens: Number of tokens of each text to evaluate on, from its start; by default all.
        backend: The layers' way through time, "auto", "fast" or "loop", see `sequence.Stack`.
        autocast: Whether training computes matrix products in bfloat16; parameters, states and loss do not change.
        dtype: Data type of the parameters.
        device: Device of all tensors. Masks are drawn there: other kinds of devices draw other ones.

    Raises:
        UserError: For values out of range and texts that are too short.
    """

    sample_kind: ClassVar[Literal["text", "images"] | None] = "text"
    artefact_files: ClassVar[tuple[str, ...]] = (VOCABULARY,)
    references: ClassVar[type[References]] = NGrams

    @checks_words
    def __init__(
        self,
        data: Choice | Corpus = "ptb",
        cell: Choice = "lstm",
        embedding_size: int = 400,
        hidden_size: int = 1150,
        layers: int = 3,
        word_dropout: float = 0.1,
        input_dropout: float = 0.4,
        hidden_dropout: float = 0.25,
        output_dropout: float = 0.4,
        weight_drop: float = 0.25,
        activation: float = 2.0,
        temporal: float = 1.0,
        batch_size: int = 20,
        window: int = 70,
        variable: bool = True,
        shifted: bool = False,
        initial: Literal["torch", "authors"] = "torch",
        evaluation_tokens: int | None = None,
        backend: str = "auto",
        autocast: bool = False,
        dtype: Literal["float32", "float64"] = "float32",
        device: str = "cpu",
    ) -> None:
        where = "language-model"
        sizes = {"embedding_size": embedding_size, "hidden_size": hidden_size}
        few(where, layers=layers)
        above_0(where, batch_size=batch_size, window=window, **sizes)
        if evaluation_tokens is not None and evaluation_tokens < 2:
            where, found = f"{where}: evaluation_tokens", str(evaluation_tokens)
            raise UserError(where, expected="at least 2", found=found, remedy="change the value")
        at_least_0(where, activation=activation, temporal=temporal)
        drops = {"words": word_dropout, "inputs": input_dropout, "hidden": hidden_dropout, "outputs": output_dropout}
        self.drops = {name: check_share(f"{where}: dropout of {name}", share) for name, share in drops.items()}
        self.texts = data if isinstance(data, Corpus) else corpus(data)
        self.cell, self.initial, self.weight_drop = cell, initial, check_share(f"{where}: weight_drop", weight_drop)
        self.sizes = [embedding_size, *[hidden_size] * (layers - 1), embedding_size]
        self.activation, self.temporal, self.backend = activation, temporal, backend
        self.batch_size, self.window, self.variable, self.shifted = batch_size, window, variable, shifted
        self.evaluation_tokens, self.dtype, self.device = evaluation_tokens, getattr(torch, dtype), torch.device(device)
        self.autocast = autocast
        precision.tell_if_emulated(device, autocast)
        with seeded(0):
            made = self._cells()
        self.stack, self._made = self._stacked(made).to(self.device), made
        self._whole: dict[Split, tuple[Batch, int]] = {}
        self._begins: dict[Split, list[int]] = {}

    def init(self, seed: int) -> tuple[Params, Aux]:
        """The embedding from U(±0.1), b = 0 and the cells' own initial values; blank states."""
        with seeded(seed_of("init", seed)):
            embedding = torch.empty(self.vocabulary_size, self.sizes[0], dtype=self.dtype).uniform_(-0.1, 0.1)
            drawn = self._stacked(self._cells()).named_parameters()
            stack = {f"stack.{name}": value.detach() for name, value in drawn}
        own = {"embedding": embedding, "bias": torch.zeros(self.vocabulary_size, dtype=self.dtype)}
        aux = self._blank(self.batch_size) | {"cross_entropy": torch.zeros((), dtype=self.dtype)}
        return {name: value.to(self.device) for name, value in (own | stack).items()}, aux

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """{"tokens" [T, B], "targets" [T, B], "goes_on", "masks"}; without "goes_on" the states are blank."""
        number, place = self._place(split, step)
        begins = self._windows(split, number)
        first, last = begins[place], begins[place + 1]
        rows = self._read(split, seed, first, last)
        goes_on = torch.tensor(place > 0 and split in ("train", "inner"), device=self.device)
        masks = self._draw(seed_of("masks", split, seed, step))
        return {
            "tokens": rows[:-1],
            "targets": rows[1:],
            "goes_on": goes_on,
            "masks": masks,
        }

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The regularised cross-entropy of a window, and the states after it."""
        masks, tokens = batch["masks"], batch["tokens"]
        blank = self._blank(tokens.shape[1])
        # `where` and no branch: under vmap nobody can ask a tensor for its truth.
        aux = {name: torch.where(batch["goes_on"], aux[name], blank[name]) for name in blank}
        x = _embedded(params, tokens) * masks["words"][tokens].unsqueeze(-1) * masks["inputs"]
        inner = {name.removeprefix("stack."): mask for name, mask in masks.items() if name.startswith("stack.")}
        for name in [name for name in inner if name.startswith("dropout.")]:
            inner[name] = inner[name].expand(len(tokens), -1, -1)
        with precision.autocast(self.device, self.autocast):
            raw, states = self._run(params, x, aux, inner)
            output = raw * masks["outputs"]
            cross_entropy = self._cross_entropy(params, output, batch["targets"])
        loss = cross_entropy + self.activation * output.square().mean()
        if len(raw) > 1:
            loss = loss + self.temporal * (raw[1:] - raw[:-1]).square().mean()
        after = _named(states) | {"cross_entropy": cross_entropy}
        return loss, {name: value.detach().to(self.dtype) for name, value in after.items()}

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The mean cross-entropy without any mask, the states blank before the first step and carried from there on."""
        states = self._blank(batch["tokens"].shape[1])
        total = params["bias"].new_zeros(())
        for tokens, targets in zip(batch["tokens"].split(_CHUNK), batch["targets"].split(_CHUNK), strict=True):
            output, after = self._run(params, _embedded(params, tokens), states, {})
            total = total + len(tokens) * self._cross_entropy(params, output, targets)
            states = _named(after)
        return total / len(batch["tokens"])

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The whole text at once, in 10 columns, `test` in 1; the few tokens that do not fill a row are left out."""
        if split not in self._whole:
            text = self._text(split)[: self.evaluation_tokens]
            columns = _in_columns(text, min(_COLUMNS[split], len(text) // 2)).to(self.device)
            self._whole[split] = {"tokens": columns[:-1], "targets": columns[1:]}, columns[1:].numel()
        yield self._whole[split]

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """The perplexity, and of characters the bits of each."""
        return text_metrics(loss, self.texts.vocabulary.unit)

    def step_info(self, batch: Batch, aux: Aux) -> StepInfo:
        """The window's share of a full one, its tokens, and its perplexity without regularisation."""
        figures = self.derived_metrics(float(aux["cross_entropy"]))
        return StepInfo(len(batch["tokens"]) / self.window, batch["tokens"].numel(), "tokens", figures)

    def epoch_start(self, split: Split, seed: int, number: int) -> int:
        """Passes over the text."""
        begins = self._begins.setdefault(split, [0])
        while len(begins) <= number:
            begins.append(begins[-1] + len(self._windows(split, len(begins) - 1)) - 1)
        return begins[number]

    def fingerprint(self) -> dict[str, str]:
        """The digest of the texts."""
        return {"corpus": self.texts.digest()}

    def artefacts(self, params: Params, aux: Aux, folder: Path) -> None:
        """The vocabulary."""
        write_vocabulary(self.texts.vocabulary, folder)

    @classmethod
    def sample(cls, run: SavedRun, request: SampleRequest) -> str:
        """The prompt, and the text that follows it; see `artefacts.continued`."""
        return continued(cls, run, request)

    def summary(self) -> str:
        """The parameters' number."""
        return self.counts().summary()

    def counts(self) -> Counts:
        """How many parameters there are."""
        sizes = {name: parameter.numel() for name, parameter in self.stack.named_parameters()}
        biases = sum(size for name, size in sizes.items() if name.endswith(("gate_bias", "highway_bias")))
        cells = sum(sizes.values())
        return Counts(cells + self.vocabulary_size * (self.sizes[0] + 1), cells - biases, biases)

    def generate(
        self, params: Params, prompt: Tensor, tokens: int, temperature: float = 1.0, seed: int = 0
    ) -> Iterator[int]:
        """Goes on after a prompt [T], a token at a time, each drawn from P^(1/temperature).

        Args:
            params: Trained parameters.
            prompt: Tokens, read after a line's end.
            tokens: Number of tokens to draw.
            temperature: Boldness of the draws, at least 0; at 0 the likeliest token is taken.
            seed: Seed of the draws.
        """
        states = self._blank(1)

        def logits_after(given: Tensor) -> Tensor:
            nonlocal states
            output, after = self._run(params, _embedded(params, given[:, None].to(self.device)), states, {})
            states = _named(after)
            return self._logits(params, output[-1, 0])

        return continuation(logits_after, self.texts.vocabulary, prompt, tokens, temperature, seed)

    @property
    def vocabulary_size(self) -> int:
        """V."""
        return len(self.texts.vocabulary.tokens)

    def _cells(self) -> list[cells.Cell]:
        """One a layer, drawn from PyTorch's global generator."""
        made = [cells.build(self.cell, n, m) for n, m in pairwise(self.sizes)]
        return [cells.init_as_published(cell) for cell in made] if self.initial == "authors" else made

    def _stacked(self, made: Sequence[cells.Cell]) -> Stack:
        """The layers."""
        name = self.cell if isinstance(self.cell, str) else self.cell["name"]
        recurrent = made[0].recurrent_weights
        if self.weight_drop and not recurrent:
            remedy = "set weight_drop to 0, or name the cell's weights in its recurrent_weights"
            raise UserError("language-model", expected="a cell with weights to drop", found=repr(name), remedy=remedy)
        drop = dict.fromkeys(recurrent, self.weight_drop) if self.weight_drop else None
        return Stack([[cell] for cell in made], weight_drop=drop, backend=self.backend).to(self.dtype).eval()

    def _blank(self, columns: int) -> Aux:
        """The states before a text, the cells' own."""
        states = dict[str, Tensor]()
        for number, (cell, size) in enumerate(zip(self._made, self.sizes, strict=False)):
            x = torch.zeros(size, columns, dtype=self.dtype, device=self.device)
            states |= {
                f"{number}.{name}": value.detach().mT.contiguous() for name, value in cell.initial_state(x).items()
            }
        return states

    def _run(self, params: Params, x: Tensor, states: Aux, masks: Params) -> tuple[Tensor, StackState]:
        """The layers' outputs [T, B, E] and states."""
        own = {name.removeprefix("stack."): value for name, value in params.items() if name.startswith("stack.")}
        given: list[dict[str, Tensor]] = [{} for _ in self.sizes[1:]]
        for name, value in states.items():
            layer, _, state = name.partition(".")
            given[int(layer)][state] = value
        run: tuple[Tensor, StackState] = functional_call(self.stack, own, (x, given), {"masks": masks})
        return run

    def _logits(self, params: Params, output: Tensor) -> Tensor:
        return nn.functional.linear(output, params["embedding"], params["bias"])

    def _cross_entropy(self, params: Params, output: Tensor, targets: Tensor) -> Tensor:
        """The mean over a window, nats per token."""
        return nn.functional.cross_entropy(self._logits(params, output.flatten(0, 1)), targets.flatten())

    def _draw(self, seed: int) -> Params:
        """Every mask of a window."""
        source = torch.Generator(self.device).manual_seed(seed)
        like = torch.zeros(1, 1, self.sizes[0], dtype=self.dtype, device=self.device)
        drops, batch = self.drops, self.batch_size
        masks = {
            "words": draw((self.vocabulary_size,), drops["words"], like, source),
            "inputs": draw((batch, self.sizes[0]), drops["inputs"], like, source),
            "outputs": draw((batch, self.sizes[-1]), drops["outputs"], like, source),
        }
        for layer, size in enumerate(self.sizes[1:-1]):
            masks[f"stack.dropout.{layer}"] = draw((batch, size), drops["hidden"], like, source)
        return masks | {f"stack.{name}": mask for name, mask in self.stack.draw_masks(like, source).items()}

    def _text(self, split: Split) -> Tensor:
        texts = {"heldout": self.texts.valid, "test": self.texts.test}
        return texts.get(split, self.texts.train)

    def _read(self, split: Split, seed: int, first: int, last: int) -> Tensor:
        """The rows `first` to `last` of the text in training's columns, [last − first + 1, B]."""
        text = self._text(split)
        shift = int(torch.randint(len(text), (), generator=generator("shift", seed))) if self.shifted else 0
        columns = torch.arange(self.batch_size) * (len(text) // self.batch_size)
        places = torch.arange(first, last + 1)[:, None] + columns + shift
        return text[places % len(text)].to(self.device)

    def _place(self, split: Split, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number there."""
        begins = self._begins.setdefault(split, [0])
        while begins[-1] <= step:
            self.epoch_start(split, 0, len(begins))
        number = bisect_right(begins, step) - 1
        return number, step - begins[number]

    def _windows(self, split: Split, number: int) -> Sequence[int]:
        """Where the windows of an epoch begin, and where the last one ends."""
        rows = len(self._text(split)) // self.batch_size - 1
        if rows < 1:
            found, remedy = f"{len(self._text(split))}", "lower batch_size, or give a longer text"
            expected = f"at least {2 * self.batch_size} tokens for {self.batch_size} columns"
            raise UserError(f"language-model: {split}", expected=expected, found=found, remedy=remedy)
        return cut_windows(rows, self.window, seed_of("windows", number) if self.variable else None)


def _embedded(params: Params, tokens: Tensor) -> Tensor:
    """Their rows of E."""
    return nn.functional.embedding(tokens, params["embedding"])


def _in_columns(text: Tensor, columns: int) -> Tensor:
    """A text [N] as columns [N // columns, columns], one after the other; what is over is left out."""
    rows = len(text) // columns
    return text[: rows * columns].view(columns, rows).T.contiguous()


def _named(state: StackState) -> Aux:
    """A stack's state as tensors by layer and name."""
    if isinstance(state, Tensor):
        state = (state,)  # type: ignore[assignment]  # one state where layers have several
    if isinstance(state, tuple):
        state = [dict(zip("hc", layer, strict=False)) for layer in zip(*state, strict=True)]
    return {f"{layer}.{name}": value for layer, part in enumerate(state) for name, value in part.items()}
