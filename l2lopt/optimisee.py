"""The contract of an optimisee: a model, a loss and its data, all pure functions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError
from l2lopt.core.types import Aux, Batch, Layout, Loss, ModuleLoss, ModuleParts, Params, stack

Split: TypeAlias = Literal["train", "inner", "heldout", "test"]
"""`train`: the training samples. `inner` and `heldout`: the same samples shared out anew by each seed, for
meta-training on samples that the inner steps did not see; where the data have a validation set of their own, the
training samples and that set. `test`: never trained on."""


class StepFacts(NamedTuple):
    """What a training loop wants to know of a step.

    Attributes:
        rate: what the optimiser's rate is multiplied by: the batch's share of a full one, where batches differ in size.
        samples: in the batch; 0 where nobody counts them.
        unit: what they are called.
        figures: what is worth recording of the step beside its loss.
    """

    rate: float = 1.0
    samples: int = 0
    unit: str = "samples"
    figures: Mapping[str, float] = {}


class Optimisee(ABC):
    """What an optimiser works on. Nothing here has a hidden state: equal arguments give equal results, always."""

    @abstractmethod
    def init(self, seed: int) -> tuple[Params, Aux]:
        """Fresh parameters, and the loss's own state before the first step."""

    @abstractmethod
    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """The batch of step 0, 1, … of the run `seed`: the data and every random number the loss uses."""

    @abstractmethod
    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The training-mode loss, mean nats per sample, and the state after it. Works under `torch.func` and `vmap`."""

    @abstractmethod
    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The test-mode loss, mean nats per sample."""

    @abstractmethod
    def whole(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """All of a split, or always the same part of it, as batches with the number of samples in each."""

    def metrics(self, params: Params, aux: Aux, batch: Batch) -> dict[str, Tensor]:
        """What else is worth knowing in test mode, such as the accuracy, each a mean over samples; none by default."""
        return {}

    def readings(self, loss: float) -> dict[str, float]:
        """What the field reads off a mean test-mode loss, such as the perplexity; nothing by default."""
        return {}

    def pictures(self, params: Params) -> dict[str, Tensor]:
        """What to look at in training, name → images [n, channels, height, width] in [0, 1]; nothing by default."""
        return {}

    def step_facts(self, batch: Batch, aux: Aux) -> StepFacts:
        """Of a training step on `batch` that left `aux`."""
        return StepFacts()

    def epoch(self, split: Split, seed: int, number: int) -> int:
        """The step at which pass `number` = 0, 1, … over the split begins.

        Raises:
            UserError: if there are no such passes, as by default.
        """
        found, remedy = "one that has none", "give the number of steps"
        raise UserError("epochs", expected="an optimisee with epochs", found=found, remedy=remedy)

    def fingerprint(self) -> dict[str, str]:
        """What tells its data from others, name → digest; a run goes on with the same alone; none by default."""
        return {}

    def files(self) -> dict[str, Any]:
        """What its parameters cannot be used without, such as a vocabulary: a file's name → JSON; none by default."""
        return {}

    def told(self) -> str:
        """A line on its size, said before it is trained; empty by default."""
        return ""

    def parts(self) -> ModuleParts | None:
        """What `loss` is made of if it is a criterion on one module's outputs; None unless the optimisee says so."""
        return None


def flat_loss(optimisee: Optimisee, layout: Layout) -> Loss:
    """The optimisee's loss as a function of the flat vector: θ [n] to a loss, or θ [S, n] to a loss per row.

    A `ModuleLoss` if the optimisee offers the parts.
    """

    def loss(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        return optimisee.loss(layout.unravel(params), aux, batch)

    def either(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        return over_rows(loss)(params, aux, batch) if params.dim() == 2 else loss(params, aux, batch)

    parts = optimisee.parts()
    return either if parts is None else ModuleLoss(either, layout, parts)


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap` of a function of trees whose tensors have a row for each run; a single row is taken as it is.

    So a large model that is run by itself keeps the memory formats and the autocast that vmap does not know.
    """

    def mapped(*trees: Any) -> Any:
        leaves = pytree.tree_leaves(trees)
        if len(leaves[0]) > 1:
            return vmap(function)(*trees)
        return pytree.tree_map(lambda leaf: leaf[None], function(*pytree.tree_map(lambda leaf: leaf[0], trees)))

    return mapped


def init_rows(optimisee: Optimisee, seeds: Sequence[int]) -> tuple[Layout, Tensor, Aux]:
    """Fresh runs side by side, a row for each seed: the layout, θ [S, n] and the aux with S rows."""
    params, aux = zip(*(optimisee.init(seed) for seed in seeds), strict=True)
    layout = Layout.of(params[0])
    return layout, torch.stack([layout.ravel(row) for row in params]), stack(list(aux))


def batch_rows(optimisee: Optimisee, split: Split, seeds: Sequence[int], step: int) -> Batch:
    """The batches of several runs at one step, a row for each seed."""
    return stack([optimisee.batch(split, seed, step) for seed in seeds])


def evaluate_rows(
    optimisee: Optimisee, layout: Layout, split: Split, seeds: Sequence[int], params: Tensor, aux: Aux
) -> Tensor:
    """The test-mode loss of each row on the whole split, [S]."""

    def loss(row: Tensor, aux: Aux, batch: Batch) -> Tensor:
        return optimisee.evaluate(layout.unravel(row), aux, batch)

    with torch.no_grad():
        total, samples = params.new_zeros(len(seeds)), 0
        for parts in zip(*(optimisee.whole(split, seed) for seed in seeds), strict=True):
            (first, count), *others = parts
            if all(batch is first for batch, _ in others):  # one data set for all: no copy per row
                total += count * over_rows(lambda row, aux, batch=first: loss(row, aux, batch))(params, aux)
            else:
                total += count * over_rows(loss)(params, aux, stack([batch for batch, _ in parts]))
            samples += count
        return total / samples


def measure(optimisee: Optimisee, split: Split, seed: int, params: Params, aux: Aux) -> dict[str, float]:
    """The test-mode loss ("loss") and the metrics of one run on the whole split, means over samples, and readings."""
    totals: dict[str, float] = {}
    samples = 0
    with torch.no_grad():
        for batch, count in optimisee.whole(split, seed):
            found = {"loss": optimisee.evaluate(params, aux, batch), **optimisee.metrics(params, aux, batch)}
            totals |= {name: totals.get(name, 0.0) + count * float(value) for name, value in found.items()}
            samples += count
    means = {name: total / samples for name, total in totals.items()}
    return means | optimisee.readings(means["loss"])
