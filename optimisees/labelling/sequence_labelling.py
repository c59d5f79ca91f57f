"""Sequence labelling: a class for every position, by recurrent layers that see both sides of it, as an optimisee."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt import cells, sequence
from l2lopt.core import registry
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import above_0, few
from l2lopt.core.layout import Params
from l2lopt.core.references import References
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import generator, seed_of, seeded
from l2lopt.core.types import Aux, Batch, Report, silent
from l2lopt.optimisee import Optimisee, Split, StepInfo
from l2lopt.sequence import Stack
from l2lopt.sequence.masks import check_share, draw
from optimisees.data.conll import files
from optimisees.data.datasets import check_classes
from optimisees.labelling.activities import activities
from optimisees.labelling.artefacts import write_labels
from optimisees.labelling.labelled import Labelled, Labelling, Sequences
from optimisees.labelling.references import LabellingScores

DEEP_GRU = "deep-gru"
"""The layers of Adamson 2015, see `sequence.deep_bidirectional_gru`, in the place of a cell's name."""
DATA: Mapping[str, Callable[..., Labelled]] = {"conll": files, "har": activities}
_CHUNK = 64
"""Sequences of an evaluation that are in memory at once."""


class SequenceLabelling(Optimisee):
    """P(class of position t | all positions) = softmax(U h_t + c), h_t from the last of a stack's layers.

    A sample is a position: the loss is the mean cross-entropy of a batch's positions in nats. Padding is left out of it
    and of every gradient, whatever it holds. All sequences are drawn once an epoch, in an order of each seed's own; an
    incomplete last batch is dropped. `heldout` are the data's own sequences for validation, the same for all seeds.

    Dropout, in training alone, multiplies the input of every layer but the first, and h, by masks of 0 and 1/(1 − p),
    one for all positions of a sequence.

    Args:
        data: Task, or the choice of one in `DATA`.
        cell: Cell of every layer, or `deep-gru` (seed 003: a plain layer, GRUs above it), a name or a table of name and
            options. That of `deep-gru` is its `activation`, "tanh" or "relu".
        layers: Number of layers.
        hidden_size: Size M of h in each direction.
        bidirectional: h_t = [h→, h←] of 2M numbers; without it only what has been seen up to t.
        embedding_size: Size of tokens' vectors, where the inputs are tokens.
        dropout: Probability p of a zero in a mask.
        batch_size: Number of sequences per training step.
        evaluation_sequences: Number of a split's sequences that an evaluation takes, drawn once and for all; by default
            all. Accuracy and F1 at the end of a training, and labels, are of all in any case.
        dtype: Data type of the parameters and of real inputs.
        device: Device of all tensors.

    Raises:
        UserError: For values out of range and data that cannot be used, such as those of one class.
    """

    artefact_files: ClassVar[tuple[str, ...]] = (
        "vocabulary.json",
        "labels.json",
        "mistakes.txt",
        "figures/labelled-sequence.*",
    )
    references: ClassVar[type[References]] = LabellingScores

    @checks_words
    def __init__(
        self,
        data: Choice | Labelled = "har",
        cell: Choice = DEEP_GRU,
        layers: int = 3,
        hidden_size: int = 32,
        bidirectional: bool = True,
        embedding_size: int = 50,
        dropout: float = 0.0,
        batch_size: int = 16,
        dtype: Literal["float32", "float64"] = "float32",
        device: str = "cpu",
        evaluation_sequences: int | None = None,
    ) -> None:
        where = "sequence-labelling"
        sizes = {"hidden_size": hidden_size, "embedding_size": embedding_size}
        few(where, layers=layers)
        above_0(where, batch_size=batch_size, **sizes)
        above_0(where, evaluation_sequences=1 if evaluation_sequences is None else evaluation_sequences)
        self.data = data if isinstance(data, Labelled) else registry.build(DATA, "data", data)
        check_classes(f"{where}: data", self.data.classes, (part.classes for part in self.data[1:4]))
        self.cell, self.layers, self.bidirectional = cell, layers, bidirectional
        self.hidden_size, self.embedding_size = hidden_size, embedding_size
        self.dropout, self.batch_size = check_share(f"{where}: dropout", dropout), batch_size
        self.dtype, self.device = getattr(torch, dtype), torch.device(device)
        with seeded(0):
            self.stack = self._stacked()
        train, valid, test = (self._placed(part) for part in (self.data.train, self.data.valid, self.data.test))
        self._splits: dict[Split, Sequences] = {"train": train, "inner": train, "heldout": valid, "test": test}
        self._whole = {split: (_batch(part), int(part.lengths.sum())) for split, part in self._splits.items()}
        self._evaluated = {split: self._some(split, evaluation_sequences) for split in self._splits}

    def fingerprint(self) -> dict[str, str]:
        """The digest of the sequences and their labels."""
        return {"data": self.data.digest()}

    def artefacts(self, params: Params, aux: Aux, folder: Path) -> None:
        """Vocabulary, scores and mistakes on the test sequences; see `artefacts.write_labels`."""
        write_labels(self.data, self.label(params), folder)

    @classmethod
    def figures(cls, folder: Path) -> list[Path]:
        """The example of `labels.json`, if it is there."""
        from optimisees.labelling.figures import labelled_sequence, read_labelled  # Matplotlib: only figures need it

        path = folder / "labels.json"
        return labelled_sequence(read_labelled(path), folder / "figures") if path.exists() else []

    def init(self, seed: int) -> tuple[Params, Aux]:
        """Embeddings from N(0, 0.1²), U and c from U(±1/√width) and the cells' own initial values; no accuracy yet."""
        with seeded(seed_of("init", seed)):
            params = {f"stack.{name}": value.detach() for name, value in self._stacked().named_parameters()}
            bound = 1 / math.sqrt(self.width)
            for name, shape in (("weight", (len(self.data.classes), self.width)), ("bias", (len(self.data.classes),))):
                params[f"output.{name}"] = torch.empty(shape, dtype=self.dtype).uniform_(-bound, bound)
            if self.data.tokens is not None:
                params["embedding"] = 0.1 * torch.randn(len(self.data.tokens), self.embedding_size, dtype=self.dtype)
        aux = {"accuracy": torch.zeros((), dtype=self.dtype, device=self.device)}
        return {name: value.to(self.device) for name, value in params.items()}, aux

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """{"inputs" [T, B] or [T, B, N], "classes" [T, B], "lengths" [B], "masks"}, T that of the longest of all."""
        part = self._splits[split]
        size, (epoch, place) = self._size(split), divmod(step, self.epoch_start(split, seed, 1))
        order = torch.randperm(len(part.lengths), generator=generator("order", split, seed, epoch))
        chosen = order[place * size : (place + 1) * size].to(self.device)
        source = generator("masks", split, seed, step)
        like = torch.zeros((), dtype=self.dtype)
        masks = {
            str(layer): draw((size, self.width), self.dropout, like, source).to(self.device)
            for layer in range(self.layers if self.dropout else 0)
        }
        return _batch(part, chosen) | {"masks": masks}

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The mean cross-entropy with the batch's masks, and the accuracy with them."""
        batch = _trimmed(batch)
        logits = self._logits(params, batch)
        hits = ((logits.argmax(-1) == batch["classes"]) & _alive(batch)).sum()
        return _cross_entropy(logits, batch), {"accuracy": (hits / batch["lengths"].sum()).to(self.dtype)}

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The mean cross-entropy without any mask."""
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for part in _chunks(batch):
            total = total + part["lengths"].sum() * _cross_entropy(self._logits(params, part), part)
        return total.div(batch["lengths"].sum())

    def metrics(self, params: Params, aux: Aux, batch: Batch) -> dict[str, Tensor]:
        """The accuracy over positions, and the F1 of the data's `scored`."""
        true, found, scores = self._labelling(params, batch)
        pairs = [pair for one, other in zip(true, found, strict=True) for pair in zip(one, other, strict=True)]
        figures = {"accuracy": sum(one == other for one, other in pairs) / len(pairs), "f1": scores.f1}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}

    def whole_metrics(self, params: Params, aux: Aux, split: Split, report: Report = silent) -> dict[str, float]:
        """Accuracy and F1 of all sequences, where an evaluation takes fewer."""
        if self._evaluated[split] is self._whole[split]:
            return {}
        with torch.no_grad():
            found = self.metrics(params, aux, self._whole[split][0])
        return {name: float(value) for name, value in found.items()}

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """All sequences at once, or `evaluation_sequences` of them, and the number of their positions."""
        yield self._evaluated[split]

    def step_info(self, batch: Batch, aux: Aux) -> StepInfo:
        """The batch's positions, and its accuracy under dropout."""
        return StepInfo(1.0, int(batch["lengths"].sum()), "positions", {"accuracy": float(aux["accuracy"])})

    def epoch_start(self, split: Split, seed: int, number: int) -> int:
        """Passes of full batches."""
        return number * (len(self._splits[split].lengths) // self._size(split))

    def label(self, params: Params, split: Split = "test") -> Labelling:
        """The likeliest class of every position of a split."""
        with torch.no_grad():
            return self._labelling(params, self._whole[split][0])

    @property
    def width(self) -> int:
        """Size of h."""
        return (1 + self.bidirectional) * self.hidden_size

    def _labelling(self, params: Params, batch: Batch) -> Labelling:
        found = [_cut(self._logits(params, part).argmax(-1), part["lengths"]) for part in _chunks(batch)]
        joined = [one for part in found for one in part]
        true = _cut(batch["classes"], batch["lengths"])
        return Labelling(true, joined, self.data.scored(true, joined))

    def _stacked(self) -> Stack:
        """The layers, drawn from PyTorch's global generator."""
        real = self.data.train.inputs
        inputs = real.shape[-1] if self.data.tokens is None else self.embedding_size
        sizes, both = (inputs, self.hidden_size, self.layers), self.bidirectional
        name = self.cell if isinstance(self.cell, str) else self.cell.get("name")
        if name == DEEP_GRU:
            stack: Stack = registry.build({DEEP_GRU: _deep_gru}, "cell", self.cell)(*sizes, bidirectional=both)
        else:
            if isinstance(name, str):  # a pair cell would take the batch for its two sides
                registry.find({DEEP_GRU: _deep_gru, **cells.CELLS}, "cell", name)
            stack = sequence.make(self.cell, *sizes, bidirectional=both)
        return stack.to(self.dtype).eval()

    def _logits(self, params: Params, batch: Batch) -> Tensor:
        """[T, B, classes]; those of padding are c."""
        x, masks = batch["inputs"], batch.get("masks", {})
        if self.data.tokens is not None:
            x = nn.functional.embedding(x, params["embedding"])
        own = {name.removeprefix("stack."): value for name, value in params.items() if name.startswith("stack.")}
        between = {f"dropout.{layer}": masks[str(layer)].expand(len(x), -1, -1) for layer in range(len(masks) - 1)}
        h, _ = functional_call(self.stack, own, (x,), {"lengths": batch["lengths"], "masks": between})
        if masks:
            h = h * masks[str(self.layers - 1)]
        return nn.functional.linear(h, params["output.weight"], params["output.bias"])

    def _size(self, split: Split) -> int:
        """Sequences of a batch."""
        return min(self.batch_size, len(self._splits[split].lengths))

    def _some(self, split: Split, count: int | None) -> tuple[Batch, int]:
        """What an evaluation is made of."""
        part = self._splits[split]
        if count is None or count >= len(part.lengths):
            return self._whole[split]
        chosen = torch.randperm(len(part.lengths), generator=generator("evaluation sequences", split))[:count]
        batch = _batch(part, chosen.to(self.device))
        return batch, int(batch["lengths"].sum())

    def _placed(self, part: Sequences) -> Sequences:
        """On the device, real inputs in the parameters' dtype."""
        inputs = part.inputs if self.data.tokens is not None else part.inputs.to(self.dtype)
        classes, lengths = part.classes.to(self.device), part.lengths.to(self.device)
        return Sequences(inputs.to(self.device), classes, lengths, part.places)


def _deep_gru(activation: Literal["tanh", "relu"] = "tanh") -> Callable[..., Stack]:
    """The function that makes the layers of `deep-gru`, with the options that a config may give them."""
    return partial(sequence.deep_bidirectional_gru, activation=activation)


def _batch(part: Sequences, chosen: Tensor | None = None) -> Batch:
    """All sequences, or the chosen ones."""
    if chosen is None:
        return {"inputs": part.inputs, "classes": part.classes, "lengths": part.lengths}
    return {"inputs": part.inputs[:, chosen], "classes": part.classes[:, chosen], "lengths": part.lengths[chosen]}


def _trimmed(batch: Batch) -> Batch:
    """Without the steps that are padding in every sequence, where `vmap` lets lengths be looked at."""
    if torch._C._functorch.is_batchedtensor(batch["lengths"]):
        return batch
    steps = int(batch["lengths"].max())
    return {**batch, "inputs": batch["inputs"][:steps], "classes": batch["classes"][:steps]}


def _chunks(batch: Batch) -> Iterator[Batch]:
    """A few sequences at a time."""
    parts = (batch["inputs"].split(_CHUNK, 1), batch["classes"].split(_CHUNK, 1), batch["lengths"].split(_CHUNK))
    for inputs, classes, lengths in zip(*parts, strict=True):
        yield _trimmed({"inputs": inputs, "classes": classes, "lengths": lengths})


def _cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over positions that are no padding."""
    alive = _alive(batch)
    logs = logits.log_softmax(-1).gather(-1, torch.where(alive, batch["classes"], 0)[..., None])[..., 0]
    return torch.where(alive, logs, 0.0).sum().neg().div(alive.sum())


def _alive(batch: Batch) -> Tensor:
    """Whether a position is no padding, [T, B]."""
    steps = torch.arange(len(batch["classes"]), device=batch["classes"].device)
    alive: Tensor = steps[:, None] < batch["lengths"]
    return alive


def _cut(classes: Tensor, lengths: Tensor) -> list[list[int]]:
    """Those [T, B] of each sequence, without padding."""
    return [one[:length] for one, length in zip(classes.T.tolist(), lengths.tolist(), strict=True)]
