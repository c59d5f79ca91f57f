"""The inner runs of meta-training: optimisees trained by the learned optimiser, unroll after unroll."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt import kernels
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout, Params
from l2lopt.core.seeding import generator, seed_of
from l2lopt.core.types import Carry, InnerStep, Loss, Target, Update
from l2lopt.estimators import EstimatorState, MetaGradientEstimator
from l2lopt.optimisee import Optimisee, Split, flat_loss
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes
from l2lopt.training.settings import Targets, UnrollSettings

T = TypeVar("T")
_log = logging.getLogger("l2lopt")


class RunPosition(NamedTuple):
    """How far a run is, as every rank knows it. Checkpoints name its fields.

    Attributes:
        number: The run's number, 0, 1, … in the order in which runs begin.
        update: The meta-update at which the run began, counted from 1.
        done: The number of inner steps made.
    """

    number: int
    update: int
    done: int = 0


class InnerRun(NamedTuple):
    """A run under way, on the rank that makes it.

    Attributes:
        seed: The run's seed.
        optimisee: The problem that the run has drawn.
        length: T, the number of inner steps after which the run ends.
        layout: The layout of the parameters.
        loss: The loss as a function of the flat vector that the run optimises.
        carry: Parameters, aux and optimiser state before the next inner step.
        estimator_state: The estimator's state before the next unroll.
    """

    seed: int
    optimisee: Optimisee
    length: int
    layout: Layout
    loss: Loss
    carry: Carry
    estimator_state: EstimatorState


class UnrollSummary(NamedTuple):
    """What one unroll of a run gives to the meta-update, on every rank.

    Attributes:
        finite: Whether the meta-loss, the meta-gradient and the parameters are all finite.
        gradient: The meta-gradient divided by the number of steps, like φ.
        meta_loss: The meta-loss divided by the number of steps.
        loss: The training loss at the last step.
        update_size: The root mean square of the unroll's change of θ, divided by the number of steps.
        steps: The number of inner steps.
        ended: Whether the run is over: it has its length, or is not finite.
    """

    finite: bool
    gradient: Params
    meta_loss: Tensor
    loss: Tensor
    update_size: Tensor
    steps: int
    ended: bool


class InnerRuns:
    """The runs of a meta-batch, each of them carried on from unroll to unroll and then followed by a new one.

    Within `processes.together` every rank makes the runs of some indices and knows the position of all. Everything is a
    function of `seed`, a run's number and φ, so the results do not depend on the number of ranks.

    Args:
        optimiser: The learned optimiser.
        optimisees: The problems; every run draws one and begins with fresh parameters.
        estimator: The estimator of the meta-gradient.
        settings: The length of runs, and how they are measured.
        count: The number of runs at a time.
        seed: The seed of all runs.
        backend: The backend of the optimiser's steps that need no tape; see `kernels.fuse`.

    Raises:
        UserError: If a part of φ is frozen: all of it would be trained.
    """

    def __init__(
        self,
        optimiser: Optimiser,
        optimisees: Sequence[Optimisee],
        estimator: MetaGradientEstimator,
        settings: UnrollSettings,
        count: int,
        seed: int,
        backend: str = "auto",
    ) -> None:
        phi = optimiser.phi()
        if len({value.requires_grad for value in phi.values()}) > 1:
            frozen = ", ".join(name for name, value in phi.items() if not value.requires_grad)
            remedy = "set requires_grad of all, or make a rule whose phi() leaves them out"
            raise UserError("optimiser", expected="none frozen beside trained ones", found=frozen, remedy=remedy)
        self.optimiser, self.optimisees, self.estimator = optimiser, optimisees, estimator
        self.settings, self.seed, self.backend = settings, seed, backend
        self.update = kernels.block_update(optimiser, backend)
        self.positions: list[RunPosition | None] = [None] * count  # None: a new run begins there
        self.runs: dict[int, InnerRun] = {}
        self.begun = 0
        self._losses: dict[tuple[int, Layout], Loss] = {}
        self._largest_planned = 0

    def unroll(self, meta_update: int) -> list[UnrollSummary]:
        """Makes the next unroll of every run, and gives the summaries of all on every rank.

        Args:
            meta_update: The meta-update that the unrolls are for, counted from 1.
        """
        positions: list[RunPosition] = []
        for position in self.positions:
            # Every rank numbers all new runs, also those of others: a number does not depend on the ranks.
            positions.append(position or RunPosition(self.begun, meta_update))
            self.begun += position is None
        summaries = processes.share_out(lambda index: self._unroll(index, positions[index]), len(positions))
        self.positions = [
            None if summary.ended else position._replace(done=position.done + summary.steps)
            for position, summary in zip(positions, summaries, strict=True)
        ]
        return summaries

    def whole(self, meta_update: int, work: Callable[[Update, Loss, Carry, Sequence[InnerStep]], T]) -> list[T]:
        """Begins a new run of every index and has `work` make all of it; gives what it returned, on every rank.

        Args:
            meta_update: The meta-update that the runs are for, counted from 1.
            work: (update, loss, carry before the first step, all steps) → a pytree.
        """
        first, self.begun = self.begun, self.begun + len(self.positions)

        def made(index: int) -> T:
            run = self._begin(RunPosition(first + index, meta_update))
            steps = inner_steps(run.optimisee, self.settings.targets, run.seed, 0, run.length, run.length)
            return work(self.update, run.loss, run.carry, list(steps))

        return processes.share_out(made, len(self.positions))

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that the next unrolls depend on beside φ, as facts and tensors.

        Collective: every rank must call it, and rank 0 alone gets the tensors.
        """
        # Leaves are saved by their place, so a state must keep the order of its names from step to step.
        here = {index: pytree.tree_leaves((run.carry, run.estimator_state)) for index, run in self.runs.items()}
        tensors = {
            f"run/{index}/{number}": leaf
            for index, leaves in processes.collect(here).items()
            for number, leaf in enumerate(leaves)
        }
        positions = [None if position is None else position._asdict() for position in self.positions]
        return {"begun": self.begun, "runs": positions}, tensors

    def load_state_dict(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Puts back what `state_dict` gave; the optimiser must have the φ of that moment already."""
        self.begun = facts["begun"]
        self.positions = [position and RunPosition(**position) for position in facts["runs"]]
        self.runs = {}
        for index in range(processes.rank(), len(self.positions), processes.ranks()):
            position = self.positions[index]
            if position is None:
                continue
            # What the seed tells is drawn again; the checkpoint has only what the steps have changed.
            run = self._begin(position)
            leaves, structure = pytree.tree_flatten((run.carry, run.estimator_state))
            saved = [tensors[f"run/{index}/{number}"].to(leaf.device) for number, leaf in enumerate(leaves)]
            carry, estimator_state = pytree.tree_unflatten(saved, structure)
            self.runs[index] = run._replace(carry=carry, estimator_state=estimator_state)

    def _unroll(self, index: int, position: RunPosition) -> UnrollSummary:
        """The next unroll of the run at `index`, which this rank begins if it is new."""
        if position.done == 0:
            self.runs[index] = self._begin(position)
            self._plan(self.runs[index])
        run = self.runs.pop(index)
        count = min(self.settings.truncation or run.length, run.length - position.done)
        windows = position.done, count, run.length, self.settings.truncation
        steps = inner_steps(run.optimisee, self.settings.targets, run.seed, *windows)
        found = self.estimator(self.update, run.loss, self.optimiser.phi(), run.carry, steps, run.estimator_state)
        kept = (run.carry, run.estimator_state), (found.carry, found.state)
        if pytree.tree_structure(kept[0]) != pytree.tree_structure(kept[1]):  # a checkpoint has them by their places
            expected, remedy = "names and order of init", "return the same names in the same order"
            where = "meta-training: aux and optimiser state"
            raise UserError(where, expected=expected, found="others after an update", remedy=remedy)
        update_size = (found.carry.params - run.carry.params).square().mean().sqrt() / count
        ended = not found.finite or position.done + count == run.length
        if not ended:
            self.runs[index] = run._replace(carry=found.carry, estimator_state=found.state)
        gradient = {name: value / count for name, value in found.gradient.items()}
        return UnrollSummary(found.finite, gradient, found.value / count, found.losses[-1], update_size, count, ended)

    def _begin(self, position: RunPosition) -> InnerRun:
        """The run of that number, before its first step."""
        # Each draw below has a stream of its own, so that one draw more or fewer moves no other.
        seed = seed_of("meta-train", self.seed, position.number)
        drawn = torch.randint(len(self.optimisees), (), generator=generator("optimisee", seed))
        optimisee = self.optimisees[int(drawn)]
        params, aux = optimisee.init(seed)
        layout = Layout.of(params, optimisee.roles())
        flat, scale = layout.ravel(params), None
        if self.settings.scaling:
            draw = torch.rand(flat.shape, generator=generator("scaling", seed), dtype=flat.dtype)
            scale = torch.exp(self.settings.scaling * (2 * draw - 1)).to(flat.device)
            flat = flat / scale
        length = self.settings.draw_length(generator("length", seed), position.update)
        carry = Carry(flat, aux, self.optimiser.init(layout, like=flat, total_steps=length))
        estimator_state = self.estimator.init(carry, self.optimiser.phi(), seed)
        # One object for all runs of a problem with these shapes: what is compiled for a loss is found by it.
        loss = self._losses.setdefault((int(drawn), layout), flat_loss(optimisee, layout))
        return InnerRun(seed, optimisee, length, layout, rescaled(loss, scale), carry, estimator_state)

    def _plan(self, run: InnerRun) -> None:
        """Logs what the largest meta-gradient of the run's problem takes, before any is computed.

        Raises:
            UserError: If the estimator knows that its memory is not there.
        """
        # Of the longest run, not of this one: a long run that comes late would be refused after hours.
        longest = self.settings.longest
        count = min(self.settings.truncation or longest, longest)
        if run.layout.size * count <= self._largest_planned:
            return
        self._largest_planned = run.layout.size * count
        steps = inner_steps(run.optimisee, self.settings.targets, run.seed, 0, count, longest)
        plan = self.estimator.plan(self.update, run.loss, self.optimiser.phi(), run.carry, steps, count)
        if plan is not None:
            _log.info("a meta-gradient of %d steps: %s", count, plan)


def inner_steps(
    optimisee: Optimisee,
    targets: Targets,
    seed: int,
    first: int,
    count: int,
    length: int | None = None,
    truncation: int | None = None,
) -> Iterator[InnerStep]:
    """Steps `first` … `first + count − 1` of a run, each with the batches that the meta-loss measures after it.

    The inner batches come from the split `inner` if the meta-loss measures held-out samples, else from `train`.

    Args:
        optimisee: The problem.
        targets: The weights of the losses in the meta-loss.
        seed: The run's seed.
        first: The number of the first step, counted from 0.
        count: The number of steps.
        length: The number of steps of the whole run, after the last of which its end is measured; None: no end.
        truncation: The number of steps of one unroll of it; None: all.
    """
    split: Split = "inner" if targets.holds_out else "train"
    batch = optimisee.batch(split, seed, first)
    for step in range(first, first + count):
        measured: list[Target] = []
        following = optimisee.batch(split, seed, step + 1)
        if targets.next:
            measured.append(Target(following, targets.next))
        if targets.same:
            measured.append(Target(batch, targets.same))
        if targets.heldout:
            measured.append(Target(optimisee.batch("heldout", seed, step), targets.heldout))
        if step + 1 == length:
            # Meta-gradients are divided by the number of steps, and the end is no mean over them. Every unroll of the
            # run has such a mean, and the last one alone the end.
            share = count * math.ceil(length / (truncation or length)) / targets.end_batches
            for number in range(targets.end_batches if targets.end else 0):
                found = optimisee.batch(split, seed, step + 1 + number)
                measured.append(Target(found, share * targets.end, "end"))
            for number in range(targets.end_batches if targets.end_heldout else 0):
                found = optimisee.batch("heldout", seed, step + number)
                measured.append(Target(found, share * targets.end_heldout, "held-out end"))
        yield InnerStep(batch, tuple(measured))
        batch = following  # the same object: estimators then know that they have its gradient already


def rescaled(loss: Loss, scale: Tensor | None) -> Loss:
    """The loss as a function of θ/c with c = `scale`: its gradient is c times that of the loss. None: the loss."""
    if scale is None:
        return loss
    return lambda params, aux, batch: loss(scale * params, aux, batch)
