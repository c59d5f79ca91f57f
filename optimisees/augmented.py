"""Problems changed in a way that leaves them problems of their kind: what `augmented` is made of.

Other scales of the parameters, permuted pixels, wrong labels, fewer samples: from one problem many, so that a learned
optimiser cannot know the few by heart (Metz et al. 2022).
"""

from collections.abc import Callable, Iterator, Mapping
from math import log
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Params
from l2lopt.core.seeding import generator
from l2lopt.core.types import Aux, Batch, Report, silent
from l2lopt.optimisee import IndexedBatches, Optimisee, Split, StepInfo
from optimisees.data.datasets import InMemory
from optimisees.module import ModuleOptimisee

_FACTOR = "factor."


class Reparametrised(Optimisee):
    """ℓ(c·θ) in the place of ℓ(θ), from θ/c, with a factor c for each parameter tensor and run.

    The values of the loss are those of the problem, its gradient is c times as large, and a relative step has another
    effect. log c is uniform in [−log `scale`, log `scale`], drawn by the run's seed; the factors are a part of aux.

    Args:
        problem: Problem.
        scale: Largest factor, at least 1.

    Raises:
        UserError: For a scale below 1.
    """

    def __init__(self, problem: Optimisee, scale: float) -> None:
        if not 1 <= scale < float("inf"):
            remedy = "change the value"
            raise UserError("augmented: reparametrised", expected="at least 1", found=str(scale), remedy=remedy)
        self.problem, self.scale = problem, scale
        # Of one inside another each has factors of its own.
        self._prefix: str = _FACTOR + (problem._prefix if isinstance(problem, Reparametrised) else "")

    def init(self, seed: int) -> tuple[Params, Aux]:
        """θ/c, and the problem's aux with c."""
        params, aux = self.problem.init(seed)
        source = generator("reparametrised" + self._prefix.removeprefix(_FACTOR), seed)
        drawn = (2 * torch.rand(len(params), generator=source, dtype=torch.float64) - 1) * log(self.scale)
        factors = {name: one.exp().to(value) for (name, value), one in zip(params.items(), drawn, strict=True)}
        scaled = {name: value / factors[name] for name, value in params.items()}
        return scaled, aux | {f"{self._prefix}{name}": value for name, value in factors.items()}

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """The problem's."""
        return self.problem.batch(split, seed, step)

    def indexed_batches(self, split: Split) -> IndexedBatches | None:
        """The problem's."""
        return self.problem.indexed_batches(split)

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The problem's at c·θ."""
        own, factors, there = self._apart(params, aux)
        loss, after = self.problem.loss(there, own, batch)
        return loss, after | factors

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The problem's at c·θ."""
        own, _, there = self._apart(params, aux)
        return self.problem.evaluate(there, own, batch)

    def metrics(self, params: Params, aux: Aux, batch: Batch) -> dict[str, Tensor]:
        """The problem's at c·θ."""
        own, _, there = self._apart(params, aux)
        return self.problem.metrics(there, own, batch)

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The problem's."""
        return self.problem.evaluation_batches(split, seed)

    def whole_metrics(self, params: Params, aux: Aux, split: Split, report: Report = silent) -> dict[str, float]:
        """The problem's at c·θ."""
        own, _, there = self._apart(params, aux)
        return self.problem.whole_metrics(there, own, split, report)

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """The problem's."""
        return self.problem.derived_metrics(loss)

    def step_info(self, batch: Batch, aux: Aux) -> StepInfo:
        """The problem's."""
        return self.problem.step_info(batch, aux)

    def epoch_start(self, split: Split, seed: int, number: int) -> int:
        """The problem's."""
        return self.problem.epoch_start(split, seed, number)

    def fingerprint(self) -> dict[str, str]:
        """The problem's."""
        return self.problem.fingerprint()

    def summary(self) -> str:
        """The problem's."""
        return self.problem.summary()

    def roles(self) -> Mapping[str, Role]:
        """The problem's."""
        return self.problem.roles()

    def _apart(self, params: Params, aux: Aux) -> tuple[Aux, Aux, Params]:
        """The problem's aux, the factors, and c·θ."""
        factors = {f"{self._prefix}{name}": aux[f"{self._prefix}{name}"] for name in params}
        own = {name: value for name, value in aux.items() if name not in factors}
        return own, factors, {name: factors[f"{self._prefix}{name}"] * value for name, value in params.items()}


def changed_samples(
    problem: Optimisee, permuted_pixels: bool, label_noise: float, train_share: float, seed: int
) -> ModuleOptimisee:
    """A problem on a data set in memory, with these samples changed once and for all; test samples keep their labels.

    Args:
        problem: Problem.
        permuted_pixels: Whether the pixels of all images are in another order, one for all, colours together.
        label_noise: Share of the training samples that get the label of another class, any with the same chance.
        train_share: Share of the training samples that are left.
        seed: Seed of what is drawn.

    Raises:
        UserError: For shares out of range, and for a problem that has no such samples.
    """
    if type(problem) is not ModuleOptimisee:
        found, remedy = type(problem).__name__, "leave only `reparametrised`, which all problems allow"
        raise UserError("augmented", expected="samples in memory, as of classifiers", found=found, remedy=remedy)
    for name, share, fits in (
        ("label_noise", label_noise, 0 <= label_noise <= 1),
        ("train_share", train_share, 0 < train_share <= 1),
    ):
        if not fits:
            remedy = "change the value"
            raise UserError(f"augmented: {name}", expected="a share", found=str(share), remedy=remedy)
    data, validation = InMemory(*(part.cpu() for part in problem.data)), problem.validation
    if permuted_pixels:
        moved = _permutation(data, generator("permuted pixels", seed))
        data = InMemory(*map(moved, data))
        validation = validation and (moved(validation[0].cpu()), moved(validation[1].cpu()))
    if label_noise:
        data = data._replace(train_targets=_mislabelled(data.train_targets, label_noise, seed))
    if train_share < 1:
        count = len(data.train_inputs)
        rows = torch.randperm(count, generator=generator("fewer samples", seed))[: round(train_share * count)].sort()
        inputs, targets = data.train_inputs[rows.values], data.train_targets[rows.values]
        data = data._replace(train_inputs=inputs, train_targets=targets)
    return problem.with_samples(data, validation)


def _permutation(data: InMemory, draw: torch.Generator) -> Callable[[Tensor], Tensor]:
    """What puts the pixels of images [n, channels, height, width] or [n, pixels] in one other order."""
    shape = data.train_inputs.shape[1:]
    of_images = len(shape) == 3 and data.train_inputs.dtype == torch.uint8
    if not of_images and not (len(shape) == 1 and data.train_inputs.is_floating_point()):
        found, remedy = f"inputs of shape {list(shape)}", "leave permuted_pixels out"
        raise UserError("augmented: permuted_pixels", expected="images", found=found, remedy=remedy)
    pixels = shape[1] * shape[2] if of_images else shape[0]
    order = torch.randperm(pixels, generator=draw)

    def moved(part: Tensor) -> Tensor:
        if part.shape[1:] != shape:  # labels
            return part
        return part.flatten(2)[:, :, order].view_as(part) if of_images else part[:, order]

    return moved


def _mislabelled(labels: Tensor, share: float, seed: int) -> Tensor:
    """Classes [n], of which a share are others."""
    if labels.dim() != 1 or labels.dtype != torch.int64:
        found, remedy = f"targets of shape {list(labels.shape[1:])}", "leave label_noise out"
        raise UserError("augmented: label_noise", expected="samples with a class each", found=found, remedy=remedy)
    draw, classes = generator("label noise", seed), int(labels.max()) + 1
    rows = torch.randperm(len(labels), generator=draw)[: round(share * len(labels))]
    moves: Any = torch.randint(1, classes, (len(rows),), generator=draw)
    return labels.index_copy(0, rows, (labels[rows] + moves) % classes)
