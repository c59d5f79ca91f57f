"""The contract of an optimisee: a model, a loss and its data, all pure functions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Layout, Params
from l2lopt.core.phi_rows import mapped_rows
from l2lopt.core.references import References
from l2lopt.core.settings import Split as Split
from l2lopt.core.types import Aux, Batch, Loss, ModuleLoss, ModuleParts, Report, silent, stack


class StepInfo(NamedTuple):
    """Facts about one training step that a training loop uses beside the loss.

    Attributes:
        rate: Factor on the optimiser's rate: the batch's share of a full batch, where batches differ in size.
        samples: Number of samples in the batch; 0 where nobody counts them.
        unit: Plural noun for these samples.
        figures: Further numbers to record for this step, by name.
    """

    rate: float = 1.0
    samples: int = 0
    unit: str = "samples"
    figures: Mapping[str, float] = {}


MODEL = "model.safetensors"
"""Name of the file in a run's folder that holds the trained parameters."""


class SavedRun(NamedTuple):
    """A finished training, as its folder holds it.

    Attributes:
        folder: The run's folder.
        options: Options of its optimisee, without the name.
        params: Trained parameters.
    """

    folder: Path
    options: Mapping[str, Any]
    params: Params


@dataclass(frozen=True)
class SampleRequest:
    """The sample that a user asks a trained model for.

    Attributes:
        prompt: Beginning of a text.
        tokens: Number of tokens that follow the prompt.
        temperature: Boldness of the draws; 0 takes the likeliest token.
        count: Number of images.
        seed: Seed of the draws.
    """

    prompt: str = ""
    tokens: int = 100
    temperature: float = 1.0
    count: int = 8
    seed: int = 0


class IndexedBatches(NamedTuple):
    """Batches that are made of samples in memory by their places alone.

    Attributes:
        samples: Pytree of tensors whose first axis counts the samples.
        drawn: (seed, first step, number of steps) → places of the samples of each step's batch, [steps, batch], int64.
    """

    samples: Batch
    drawn: Callable[[int, int, int], Tensor]


class Optimisee(ABC):
    """A model with a loss and data: the problem that an optimiser works on.

    Nothing here has a hidden state: equal arguments give equal results, always. Seeds are whole numbers below 2⁶³, of
    which `core.seeding.generator` makes generators. `init`, `batch`, `loss` and `evaluate` suffice for meta-training,
    evaluation and training; every other method is a hook with a default. A class that wants more (samples, files beside
    its parameters, yardsticks in a study) overrides those hooks, and nothing outside it changes.

    Example:
        >>> import torch
        >>> from l2lopt.core.seeding import generator
        >>> from l2lopt.optimisee import Optimisee
        >>> class Line(Optimisee):
        ...     def init(self, seed):
        ...         return {"weight": torch.zeros(())}, {}
        ...     def batch(self, split, seed, step):
        ...         x = torch.randn(8, generator=generator("line", split, seed, step))
        ...         return x, 3 * x
        ...     def loss(self, params, aux, batch):
        ...         return self.evaluate(params, aux, batch), aux
        ...     def evaluate(self, params, aux, batch):
        ...         return (params["weight"] * batch[0] - batch[1]).square().mean()
        >>> line = Line()
        >>> loss, _ = line.loss({"weight": torch.tensor(3.0)}, {}, line.batch("train", 0, 0))
        >>> loss.item()
        0.0
    """

    sample_kind: ClassVar[Literal["text", "images"] | None] = None
    """Kind of the samples that `sample` makes; None where it makes none."""
    artefact_files: ClassVar[tuple[str, ...]] = ()
    """Patterns, relative to a run's folder, of all files that `artefacts`, `figures` and `sample` leave there. Those of
    an earlier run are removed where a run is overwritten."""
    references: ClassVar[type[References]] = References
    """The view that a study takes of such optimisees: columns, results, and yardsticks beside the trained runs."""

    @abstractmethod
    def init(self, seed: int) -> tuple[Params, Aux]:
        """Fresh parameters, and the loss's own state before the first step."""

    @abstractmethod
    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """The batch of step 0, 1, … of the run `seed`: the data and every random number the loss uses."""

    @abstractmethod
    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The training-mode loss, mean per sample, in nats if a cross-entropy, and the state after it.

        Works under `torch.func` and `vmap`.
        """

    @abstractmethod
    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The test-mode loss, mean per sample, in nats if a cross-entropy."""

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """Batches that make up a split, or always the same part of it, each with its number of samples.

        By default the batch of step 0, counted as one sample.
        """
        yield self.batch(split, seed, 0), 1

    def indexed_batches(self, split: Split) -> IndexedBatches | None:
        """`batch` in the form of samples and their places, from which many runs gather theirs at once.

        `batch(split, seed, step)` is `samples` at `drawn(seed, step, 1)[0]`. None, as by default, where batches are
        made in other ways.
        """
        return None

    def metrics(self, params: Params, aux: Aux, batch: Batch) -> dict[str, Tensor]:
        """Further numbers in test mode, such as the accuracy, each a mean over samples; none by default."""
        return {}

    def whole_metrics(self, params: Params, aux: Aux, split: Split, report: Report = silent) -> dict[str, float]:
        """Numbers of a whole split that no mean over samples gives, such as retrieval; none by default.

        They are computed once, of the parameters that a training ends with.

        Args:
            params: Parameters.
            aux: State of the loss after training.
            split: Split to measure.
            report: Progress of long work.
        """
        return {}

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """Functions of the mean test-mode loss that the field reports, such as the perplexity; none by default."""
        return {}

    def images(self, params: Params) -> dict[str, Tensor]:
        """Images to record while training goes on, name → [n, channels, height, width] in [0, 1]; none by default."""
        return {}

    def step_info(self, batch: Batch, aux: Aux) -> StepInfo:
        """Facts about a training step on `batch` that left `aux`; by default a step of full size."""
        return StepInfo()

    def epoch_start(self, split: Split, seed: int, number: int) -> int:
        """The step at which pass `number` = 0, 1, … over the split begins.

        Raises:
            UserError: If there are no such passes, as by default.
        """
        found, remedy = "one that has none", "give the number of steps"
        raise UserError("epochs", expected="an optimisee with epochs", found=found, remedy=remedy)

    def fingerprint(self) -> dict[str, str]:
        """Digests that tell its data from others, by name; a run resumes with equal ones only. None by default."""
        return {}

    def summary(self) -> str:
        """A line on its size, logged before training; empty by default."""
        return ""

    def module_parts(self) -> ModuleParts | None:
        """The module and the criterion that `loss` consists of, if it does; None by default."""
        return None

    def roles(self) -> Mapping[str, Role]:
        """What parameters are to an optimiser (see `core.kinds`), by name, where names and shapes do not tell it.

        None by default.
        """
        return {}

    def artefacts(self, params: Params, aux: Aux, folder: Path) -> None:  # noqa: B027  nothing is the hook's default
        """Writes files that belong beside trained parameters, such as a vocabulary; none by default.

        Args:
            params: Trained parameters.
            aux: State of the loss after training.
            folder: Folder of the run, which has `model.safetensors` and `result.json` already.
        """

    @classmethod
    def figures(cls, folder: Path) -> list[Path]:
        """Draws figures from the files that `artefacts` left in a run's folder, and gives their paths.

        It needs neither the data nor an instance, so that figures can be drawn anew anywhere. None by default.

        Raises:
            UserError: For a damaged file.
        """
        return []

    @classmethod
    def sample(cls, run: SavedRun, request: SampleRequest) -> str | list[Path]:
        """A sample of a trained model: a text, or the paths of images written into the run's folder.

        It needs no data: the class builds what it samples from out of the run. `sample_kind` says which kind it gives.

        Raises:
            UserError: For a request that cannot be met; always, by default.
        """
        remedy = "sample a trained language model or image model"
        raise UserError(str(run.folder), expected="a model that can be sampled", found=cls.__name__, remedy=remedy)


def flat_loss(optimisee: Optimisee, layout: Layout) -> Loss:
    """The optimisee's loss as a function of the flat vector: θ [n] to a loss, or θ [S, n] to a loss per row.

    A `ModuleLoss` if the optimisee offers the parts.
    """

    def loss(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        return optimisee.loss(layout.unravel(params), aux, batch)

    def either(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        return over_rows(loss)(params, aux, batch) if params.dim() == 2 else loss(params, aux, batch)

    parts = optimisee.module_parts()
    return either if parts is None else ModuleLoss(either, layout, parts)


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap` of a function of trees whose tensors have a row for each run; a single row is taken as it is.

    So a large model that is run by itself keeps the memory formats and the autocast that vmap does not know.
    """

    def mapped(*trees: Any) -> Any:
        leaves = pytree.tree_leaves(trees)
        if len(leaves[0]) > 1:
            return mapped_rows(function)(*trees)
        return pytree.tree_map(lambda leaf: leaf[None], function(*pytree.tree_map(lambda leaf: leaf[0], trees)))

    return mapped


def init_rows(optimisee: Optimisee, seeds: Sequence[int]) -> tuple[Layout, Tensor, Aux]:
    """Fresh runs side by side, a row for each seed: the layout, θ [S, n] and the aux with S rows."""
    params, aux = zip(*(optimisee.init(seed) for seed in seeds), strict=True)
    layout = Layout.of(params[0], optimisee.roles())
    return layout, torch.stack([layout.ravel(row) for row in params]), stack(list(aux))


def batch_rows(optimisee: Optimisee, split: Split, seeds: Sequence[int], step: int) -> Batch:
    """The batches of several runs at one step, a row for each seed."""
    made = {seed: optimisee.batch(split, seed, step) for seed in dict.fromkeys(seeds)}
    return stack([made[seed] for seed in seeds])


class BatchesOfRows:
    """The batches of several runs, step after step, a row for each seed; places are drawn many steps ahead.

    Args:
        optimisee: Problem.
        split: Split on which the runs are made.
        seeds: Seed of each run.
    """

    AHEAD = 64
    """Number of steps drawn at once."""

    def __init__(self, optimisee: Optimisee, split: Split, seeds: Sequence[int]) -> None:
        self.optimisee, self.split, self.seeds = optimisee, split, seeds
        self._indexed = optimisee.indexed_batches(split)
        self._first, self._places = 0, torch.empty(0)

    def at(self, step: int, count: int = 1) -> tuple[Batch, Tensor | None]:
        """What the batches of one or more steps are made of.

        Args:
            step: First step.
            count: Number of steps, at most; it may be fewer.

        Returns:
            Samples and places [steps, S, batch]; or, where batches are made in other ways, that of `step` and None.
        """
        if self._indexed is None:
            return batch_rows(self.optimisee, self.split, self.seeds, step), None
        if not self._first <= step < self._first + len(self._places):
            self._first = step
            drawn = {seed: self._indexed.drawn(seed, step, self.AHEAD) for seed in dict.fromkeys(self.seeds)}
            places = torch.stack([drawn[seed] for seed in self.seeds], dim=1)
            device = next(leaf.device for leaf in pytree.tree_leaves(self._indexed.samples))
            self._places = places.to(device)
        first = step - self._first
        return self._indexed.samples, self._places[first : first + count]


def evaluate_rows(
    optimisee: Optimisee, layout: Layout, split: Split, seeds: Sequence[int], params: Tensor, aux: Aux
) -> Tensor:
    """The test-mode loss of each row on the whole split, [S]."""

    def loss(row: Tensor, aux: Aux, batch: Batch) -> Tensor:
        return optimisee.evaluate(layout.unravel(row), aux, batch)

    rows_of = {seed: [row for row, other in enumerate(seeds) if other == seed] for seed in dict.fromkeys(seeds)}
    with torch.no_grad():
        # Wider than a half-precision loss, whose sum over many samples would overflow or lose its digits.
        total, samples = params.new_zeros(len(seeds), dtype=torch.promote_types(params.dtype, torch.float32)), 0
        for parts in zip(*(optimisee.evaluation_batches(split, seed) for seed in rows_of), strict=True):
            (first, count), *others = parts
            if all(batch is first for batch, _ in others):  # one data set for all: no copy per row
                total += count * over_rows(lambda row, aux, batch=first: loss(row, aux, batch))(params, aux).to(total)
            elif len(rows_of) == len(seeds):
                total += count * over_rows(loss)(params, aux, stack([batch for batch, _ in parts])).to(total)
            else:  # several rows of each seed, as a grid of rates has: no copy per row either
                for (batch, _), rows in zip(parts, rows_of.values(), strict=True):
                    some = pytree.tree_map(lambda leaf, rows=rows: leaf[rows], (params, aux))
                    own = over_rows(lambda row, aux, batch=batch: loss(row, aux, batch))(*some)
                    total[rows] += count * own.to(total)
            samples += count
        return total / samples


def common_dtype(problems: Sequence[Optimisee]) -> torch.dtype:
    """The dtype of the problems' parameters.

    Raises:
        UserError: For problems of several dtypes, of one that rules do not compute in, or without parameters.
    """
    dtypes = {value.dtype for problem in problems for value in problem.init(0)[0].values()}
    if len(dtypes) != 1:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no parameters"
        remedy = "set dtype alike in all" if dtypes else "let some require a gradient"
        raise UserError("optimisees", expected="one dtype", found=found, remedy=remedy)
    (dtype,) = dtypes
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        # float16 cannot hold the least numbers that rules divide by: a gradient of 0 would become one of NaN.
        expected, found = "float32, float64 or bfloat16", str(dtype).removeprefix("torch.")
        raise UserError("optimisees", expected=expected, found=found, remedy="choose one of these for the parameters")
    return dtype


def evaluate_split(optimisee: Optimisee, split: Split, seed: int, params: Params, aux: Aux) -> dict[str, float]:
    """The test-mode loss ("loss") and the metrics of one run on the whole split, means over samples, and readings."""
    totals: dict[str, float] = {}
    samples = 0
    with torch.no_grad():
        for batch, count in optimisee.evaluation_batches(split, seed):
            found = {"loss": optimisee.evaluate(params, aux, batch), **optimisee.metrics(params, aux, batch)}
            totals |= {name: totals.get(name, 0.0) + count * float(value) for name, value in found.items()}
            samples += count
    means = {name: total / samples for name, total in totals.items()}
    return means | optimisee.derived_metrics(means["loss"])
