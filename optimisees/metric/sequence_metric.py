"""Metrics of sequences learned by siamese and coupled GRUs (Compagnon et al. 2021), as an optimisee on UCI HAR."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from l2lopt import sequence
from l2lopt.cells.coupled_gru import coupling
from l2lopt.core import registry
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0
from l2lopt.core.layout import Params
from l2lopt.core.references import References
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import generator, seed_of, seeded
from l2lopt.core.types import Aux, Batch, Report, silent
from l2lopt.optimisee import IndexedBatches, Optimisee, Split, StepInfo
from optimisees.data import har
from optimisees.data.datasets import data_root
from optimisees.data.har import Windows
from optimisees.metric.artefacts import FILES, write_embeddings
from optimisees.metric.references import RawSignals
from optimisees.metric.retrieval import retrieval
from optimisees.metric.structural_loss import Distance, StructuralLoss, distance

ENCODERS: Mapping[str, Choice] = {
    "siamese": {"name": "gru", "update": "kept", "reset": "after", "biases": "two"},
    "coupled": "coupled-gru",
}
"""Name → the cell. Siamese: `nn.GRU` over each sequence. Coupled: over pairs, each side's candidate state mixed with
the other's; an output exists only for a pair."""
NEIGHBOURS = (1, 5, 10)
"""Numbers of neighbours of which a training reports recall and accuracy."""
_log = logging.getLogger("l2lopt")


class SequenceMetric(Optimisee):
    """Sequences of one activity near to each other, those of others far, by the distance of their last hidden states.

    The loss is the structural loss of a batch's matrix of distances, which for the coupled encoder takes a joint pass
    over its n(n−1)/2 pairs. A batch has equally many windows of every activity, drawn without replacement. Aux holds
    the loss's running means.

    Subjects are left out whole: `test` is those of `test_subjects`, `train` all others, `heldout` those of
    `heldout_subjects` and `inner` the rest. Channels are standardised by the mean and deviation of `inner`.

    Args:
        test_subjects: Subjects left out of training.
        heldout_subjects: Further subjects, for validation and meta-training.
        encoder: Name in `ENCODERS`.
        hidden_size: Size M of the hidden state.
        distance: "euclidean" or "cosine".
        least_coupling: Bound in [0, 1) that the coupled encoder's c stays above, see `cells.CoupledGRU`.
        loss: Options of `StructuralLoss`.
        per_class: Number of windows of every activity in a batch.
        evaluation_size: Number of windows in a batch of an evaluation.
        evaluation_windows: Number of windows of a split that an evaluation uses, always the same; by default all. The
            siamese encoder's retrieval at the end of a training is among all of them in any case.
        data: Folder of the data sets, by default the value of L2LOPT_DATA; or windows.
        dtype: Data type of the parameters and windows.
        device: Device of all tensors.

    Raises:
        UserError: For values out of range, missing or malformed data, fewer than two activities, and a split without
            one of them.
    """

    artefact_files: ClassVar[tuple[str, ...]] = FILES
    references: ClassVar[type[References]] = RawSignals

    @checks_words
    def __init__(
        self,
        test_subjects: Sequence[int],
        heldout_subjects: Sequence[int] = (),
        encoder: Literal["siamese", "coupled"] = "siamese",
        hidden_size: int = 100,
        distance: Distance = "euclidean",
        loss: dict[str, Any] | None = None,
        per_class: int = 4,
        evaluation_size: int = 40,
        evaluation_windows: int | None = None,
        data: str | Windows | None = None,
        dtype: Literal["float32", "float64"] = "float32",
        device: str = "cpu",
        least_coupling: float = 0.0,
    ) -> None:
        where = "sequence-metric"
        if least_coupling and encoder != "coupled":
            found, remedy = f"the {encoder} one", "leave least_coupling out"
            raise UserError(f"{where}: least_coupling", expected="the coupled encoder", found=found, remedy=remedy)
        above_0(where, hidden_size=hidden_size, per_class=per_class, evaluation_size=evaluation_size)
        above_0(where, evaluation_windows=1 if evaluation_windows is None else evaluation_windows)
        if evaluation_size < 2 or (evaluation_windows is not None and evaluation_windows < 2):
            found = f"{evaluation_size} and {evaluation_windows}"
            expected, remedy = "evaluation_size and evaluation_windows from 2 on, for pairs", "raise them"
            raise UserError(where, expected=expected, found=found, remedy=remedy)
        if per_class < 2:
            expected = "from 2 on, for pairs of a class"
            raise UserError(f"{where}: per_class", expected=expected, found=str(per_class), remedy="raise it")
        self.structural: StructuralLoss = registry.make(
            {"structural": StructuralLoss}, "loss", "structural", **loss or {}
        )
        self.encoder, self.hidden_size, self.distance = encoder, hidden_size, distance
        self.least_coupling = least_coupling
        self.per_class, self.evaluation_size, self.few = per_class, evaluation_size, evaluation_windows
        self.dtype, self.device = getattr(torch, dtype), torch.device(device)
        whole = data if isinstance(data, Windows) else har.load(data_root(data))
        whole.check(f"{where}: data")
        self._digest = whole.digest()
        train, test = whole.split(test_subjects)
        inner, heldout = train.split(heldout_subjects) if heldout_subjects else (train, None)
        parts: dict[Split, Windows | None] = {"train": train, "inner": inner, "heldout": heldout, "test": test}
        self._windows = {split: part.standardised(inner) for split, part in parts.items() if part is not None}
        self._inputs = {split: part.signals.to(self.device, self.dtype) for split, part in self._windows.items()}
        self._targets = {split: part.labels.to(self.device) for split, part in self._windows.items()}
        self.channels = train.signals.shape[1]
        self._whole: dict[Split, list[tuple[Batch, int]]] = {}
        with seeded(0):
            self.stack = self._fresh()
        for split in ("train", "inner"):
            self._members(split)

    def fingerprint(self) -> dict[str, str]:
        """The digest of all windows, before any split."""
        return {"windows": self._digest}

    def init(self, seed: int) -> tuple[Params, Aux]:
        """The cell's own initial values, and the loss before its first batch."""
        with seeded(seed_of("init", seed)):
            drawn = {name: value.detach() for name, value in self._fresh().named_parameters()}
        params = {name: value.to(self.device) for name, value in drawn.items()}
        return params, self.structural.init(self.dtype, self.device)

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """{"inputs" [n, 9, T], "targets" [n]}, n = classes · `per_class`."""
        return self._at(split, self._drawn(split, seed, step, 1)[0])

    def indexed_batches(self, split: Split) -> IndexedBatches:
        """The split's windows and their labels, by their places."""
        samples = {"inputs": self.inputs(split), "targets": self._targets[split]}
        return IndexedBatches(samples, partial(self._drawn, split))

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The structural loss, and its running means after the batch."""
        return self.structural(self.distances(params, batch["inputs"]), batch["targets"], aux)

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The structural loss about the means as they stand."""
        d = self.distances(params, batch["inputs"])
        return self.structural(d, batch["targets"], aux, moving=False)[0]

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The split's windows in an order drawn once, `evaluation_size` at a time, and a last one beside the others."""
        if split not in self._whole:
            parts = list(self._order(split)[: self.few].split(self.evaluation_size))
            if len(parts) > 1 and len(parts[-1]) == 1:  # which makes no pair
                parts[-2:] = [torch.cat(parts[-2:])]
            self._whole[split] = [(self._at(split, rows), len(rows)) for rows in parts]
        yield from self._whole[split]

    def metrics(self, params: Params, aux: Aux, batch: Batch) -> dict[str, Tensor]:
        """The "coupling" of the coupled encoder, see `coupling`, over as many pairs as the batch has windows."""
        if self.encoder == "siamese":
            return {}
        # Neighbours in the batch, whose order is drawn: all pairs would double the cost of an evaluation.
        return {"coupling": self.coupling(params, batch["inputs"], batch["inputs"].roll(1, 0)).mean()}

    def coupling(self, params: Params, left: Tensor, right: Tensor) -> Tensor:
        """The coupled encoder's c of pairs of windows, [P, 9, T] twice → [T, M, P], from step to step.

        Where it is near 0 the sides have exchanged nothing, and the encoder works as the siamese one.
        """
        x = torch.stack((left, right)).permute(3, 0, 1, 2)
        after: Tensor = functional_call(self.stack, params, (x,))[0]
        before = torch.cat([torch.zeros_like(after[:1]), after[:-1]])
        own = {name.rpartition(".")[2]: value for name, value in params.items()}
        return coupling(own, before.permute(3, 1, 0, 2), self.least_coupling)[:, 0].movedim(0, 1)

    def whole_metrics(self, params: Params, aux: Aux, split: Split, report: Report = silent) -> dict[str, float]:
        """Recall, mean average precision and the neighbours' accuracy among other subjects' windows, of `retrieval`.

        The windows are all of the split; of the coupled encoder, which takes a pass over every pair of them, those of
        an evaluation. None for a split of one subject, and where training has diverged.
        """
        rows, windows = self._order(split), self.windows(split)
        if self.encoder == "coupled" and self.few is not None and self.few < len(rows):
            _log.info("recall, mAP and k-NN are of %d of %d %s windows", self.few, len(rows), split)
            rows = rows[: self.few]
        labels, subjects = windows.labels[rows], windows.subjects[rows]
        fewest = len(subjects) - int(subjects.bincount().max())
        ks = tuple(k for k in NEIGHBOURS if k <= fewest)
        if not ks:
            _log.warning("no recall, mAP and k-NN: all %s windows are of one subject, whose own do not count", split)
        # Looked at here: the distance of two outputs that are not finite is 0, which would rank them first.
        if not ks or not all(value.isfinite().all() for value in params.values()):
            return {}
        distances = self.all_distances(params, self.inputs(split)[rows.to(self.device)], report)
        if not distances.isfinite().all():
            return {}
        found = retrieval(distances, labels, subjects, ks)
        recall = {f"recall@{k}": found.recall[k] for k in ks}
        accuracy = {f"accuracy, {k}-NN": found.accuracy[k] for k in ks}
        return {**recall, "mAP": found.mean_average_precision, **accuracy}

    def artefacts(self, params: Params, aux: Aux, folder: Path) -> None:
        """The embeddings of the test windows, for TensorBoard's projector; none of the coupled encoder."""
        if self.encoder == "siamese":
            with torch.no_grad():
                write_embeddings(self.embed(params, self.inputs("test")), self.windows("test"), folder)

    def step_info(self, batch: Batch, aux: Aux) -> StepInfo:
        """The windows of a batch, and the mean distances so far."""
        figures = {f"{kind}_distance": float(aux[f"{kind}.mean"]) for kind in ("positive", "negative")}
        return StepInfo(samples=len(batch["targets"]), unit="windows", figures=figures)

    def windows(self, split: Split) -> Windows:
        """A split's windows, standardised.

        Raises:
            UserError: For `heldout` where no subjects are held out.
        """
        if split not in self._windows:
            where, remedy = "sequence-metric: heldout_subjects", "name some of the training subjects"
            raise UserError(where, expected="subjects held out", found="none", remedy=remedy)
        return self._windows[split]

    def inputs(self, split: Split) -> Tensor:
        """A split's windows [n, 9, T] in the parameters' precision."""
        self.windows(split)
        return self._inputs[split]

    def embed(self, params: Params, inputs: Tensor) -> Tensor:
        """Each window's last hidden state, [n, 9, T] → [n, M]; of the siamese encoder alone.

        Raises:
            UserError: For the coupled one.
        """
        if self.encoder != "siamese":
            found, remedy = f"the {self.encoder} one", "ask for distances: its outputs exist only for pairs"
            raise UserError("embedding", expected="the siamese encoder", found=found, remedy=remedy)
        return self._last(params, inputs.permute(2, 0, 1))

    def between(self, params: Params, left: Tensor, right: Tensor) -> Tensor:
        """The distances of pairs of windows, [P, 9, T] twice → [P]; the same if left and right are exchanged."""
        if self.encoder == "siamese":
            return distance(self.embed(params, left), self.embed(params, right), self.distance)
        h = self._last(params, torch.stack((left, right)).permute(3, 0, 1, 2))
        return distance(h[0], h[1], self.distance)

    def distances(self, params: Params, inputs: Tensor) -> Tensor:
        """All distances of a batch, [n, 9, T] → [n, n], symmetric, 0 on the diagonal."""
        n = len(inputs)
        if self.encoder == "siamese":
            h = self.embed(params, inputs)
            return distance(h[:, None], h, self.distance) * (1 - torch.eye(n, dtype=h.dtype, device=h.device))
        i, j = torch.triu_indices(n, n, 1, device=inputs.device)
        places = torch.zeros(n, n, dtype=torch.long, device=inputs.device)
        places[i, j] = places[j, i] = torch.arange(1, len(i) + 1, device=inputs.device)
        pairs = self.between(params, inputs[i], inputs[j])
        return torch.cat([pairs.new_zeros(1), pairs])[places]

    def all_distances(self, params: Params, inputs: Tensor, report: Report = silent, size: int = 512) -> Tensor:
        """`distances` of any number of windows without a tape, `size` pairs (or windows) at a time.

        For the coupled encoder and n = 990 that is 489,555 pairs of 128 steps: some minutes. Beside the matrix [n, n]
        it holds a batch: of 512 pairs at M = 100 some 0.3 GB.

        Args:
            params: Parameters of the encoder.
            inputs: [n, 9, T].
            report: Progress in pairs, or in windows.
            size: Number of windows in a batch.
        """
        n, done = len(inputs), 0
        with torch.no_grad():
            if self.encoder == "siamese":
                h = torch.cat([self.embed(params, part) for part in inputs.split(size)])
                found = torch.cat([distance(part[:, None], h, self.distance) for part in h.split(max(1, size // 8))])
                report("windows", n, n, {})
                return found.fill_diagonal_(0)
            found, (i, j) = torch.zeros(n, n, dtype=inputs.dtype), torch.triu_indices(n, n, 1)
            for rows, columns in zip(i.split(size), j.split(size), strict=True):
                d = self.between(params, inputs[rows], inputs[columns]).to(found.device)
                found[rows, columns] = found[columns, rows] = d
                done += len(rows)
                report("pairs", done, len(i), {})
            return found

    def _fresh(self) -> sequence.Stack:
        """An encoder, drawn from PyTorch's global generator."""
        cell = ENCODERS[self.encoder]
        if self.least_coupling:
            cell = {"name": "coupled-gru", "least_coupling": self.least_coupling}
        return sequence.make(cell, self.channels, self.hidden_size).to(self.dtype).eval()

    def _last(self, params: Params, x: Tensor) -> Tensor:
        """The last hidden states [..., n, M] over x [T, ..., n, 9]."""
        output: Tensor = functional_call(self.stack, params, (x,))[0]
        return output[-1]

    def _order(self, split: Split) -> Tensor:
        """All windows by their places, in an order drawn once and for all, with which every evaluation begins."""
        source = generator("whole", split)
        return torch.randperm(len(self.windows(split).labels), generator=source)

    def _drawn(self, split: Split, seed: int, first: int, count: int) -> Tensor:
        """The windows of `count` steps from `first` on, [count, classes · `per_class`], by a seed for each step."""
        members, found = self._members(split), []
        for step in range(first, first + count):
            source = generator("windows", split, seed, step)
            drawn = [own[torch.randperm(len(own), generator=source)[: self.per_class]] for own in members]
            found.append(torch.cat(drawn))
        return torch.stack(found)

    def _at(self, split: Split, rows: Tensor) -> Batch:
        rows = rows.to(self.device)
        return {"inputs": self.inputs(split)[rows], "targets": self._targets[split][rows]}

    def _members(self, split: Split) -> list[Tensor]:
        """The windows of each activity."""
        own = self.windows(split)
        found = [torch.nonzero(own.labels == label).flatten() for label in range(len(own.activities))]
        for name, rows in zip(own.activities, found, strict=True):
            if len(rows) < self.per_class:
                where, expected = f"sequence-metric: {split}", f"at least {self.per_class} windows of {name}"
                raise UserError(where, expected=expected, found=str(len(rows)), remedy="lower per_class")
        return found
