"""Meta-training: unroll after unroll, the meta-gradient followed by Adam."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt import kernels
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.core.types import (
    Batch,
    BlockUpdate,
    Carry,
    Layout,
    Loss,
    Params,
    Report,
    Step,
    Target,
    generator,
    seed_of,
    silent,
)
from l2lopt.estimators import Blockwise, Unroll, UnrollState
from l2lopt.optimisee import Optimisee, Split, flat_loss
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.schedules import Shape, warm_up_then
from l2lopt.parallel import processes
from l2lopt.storage.checkpoint import Checkpoint, NoCheckpoint
from l2lopt.storage.run_log import NoRecords, Recorder


class Targets(Settings):
    """What the meta-loss measures after each update, as weights; those of weight 0 are not computed."""

    next: NonNegativeFloat = 1.0
    """The loss on the next training batch."""
    same: NonNegativeFloat = 0.0
    """The loss on the batch the update was made from."""
    heldout: NonNegativeFloat = 0.0
    """The loss on samples that the run's inner steps never see; each run holds out its own."""

    @model_validator(mode="after")
    def _some(self) -> "Targets":
        if not self.next + self.same + self.heldout:
            raise ValueError("at least one weight above 0")
        return self


class UnrollSettings(Settings):
    """How long the unrolls are and how they are differentiated."""

    length: PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] = 100
    """T, the inner steps of a run; two numbers draw it log-uniformly between them, anew for every run."""
    truncation: PositiveInt | None = None
    """K: a meta-update after every K steps, the run's state carried on; none: after the whole run."""
    curriculum: NonNegativeInt = 0
    """Short runs first: one begun at meta-update u of the first `curriculum` is T·u/curriculum long, at least one
    window; 0 begins with the whole length."""
    scaling: NonNegativeFloat = 0.0
    """Random scaling of parameters (Lv et al. 2017): a run optimises θ/c for c = exp(U(−scaling, scaling)), drawn anew
    for every coordinate and run, so that the rule meets gradients of many sizes; 0 leaves the problem as it is."""
    targets: Targets = Targets()
    """What the meta-loss measures."""
    estimator: Choice = "blockwise"
    """How the meta-gradient is got: the name of an unroll, or its name and options."""

    @field_validator("length")
    @classmethod
    def _rising(cls, length: int | list[int]) -> int | list[int]:
        if isinstance(length, list) and length[0] > length[1]:
            raise ValueError("the smaller number first")
        return length

    def draw_length(self, source: torch.Generator, update: int) -> int:
        """T for a run begun at meta-update `update`, counted from 1."""
        length = self.length
        if not isinstance(length, int):
            low, high = (math.log(bound) for bound in length)
            share = torch.rand((), generator=source, dtype=torch.float64).item()
            length = round(math.exp(low + share * (high - low)))
        if update >= self.curriculum:
            return length
        return min(length, max(self.truncation or 1, round(length * update / self.curriculum)))


class MetaTrainSettings(Settings):
    """How the meta-gradient is followed."""

    updates: PositiveInt = 320
    """Meta-updates in all."""
    rate: PositiveFloat = 5e-3
    """Adam's highest rate."""
    warm_up: NonNegativeInt = 10
    """Meta-updates of linear warm-up."""
    schedule: Shape = "cosine"
    """How the rate falls after it, down to `final` at the last update."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate at the end, as a share of the highest."""
    clip: PositiveFloat = 1.0
    """The largest norm of the meta-gradient, which is a mean over the steps of an unroll."""
    batch: PositiveInt = 1
    """Runs unrolled for every meta-update, their gradients averaged."""
    checkpoint_every: PositiveInt = 10
    """Meta-updates between two checkpoints."""
    validate_every: PositiveInt = 40
    """Meta-updates between two validations; the optimiser of the best score is kept."""

    @model_validator(mode="after")
    def _falls(self) -> "MetaTrainSettings":
        if self.schedule == "exponential" and not self.final:
            raise ValueError("final above 0 for an exponential schedule")
        return self


@dataclass
class MetaTrained:
    """What meta-training found.

    Attributes:
        phi: the meta-parameters of the best score.
        score: that score, lower is better.
        update: the meta-update after which it was reached.
        inner_steps: steps of all unrolls.
        skipped: unrolls that were not finite and were left out.
        scores: every validation, update → score.
    """

    phi: Params
    score: float = math.inf
    update: int = 0
    inner_steps: int = 0
    skipped: int = 0
    scores: dict[int, float] = field(default_factory=dict)


class _Slot(NamedTuple):
    """Where a run stands, as every rank knows it: its number, the meta-update it began at, the steps it has made."""

    number: int
    update: int
    done: int = 0


class _Run(NamedTuple):
    """An inner run under way, on the rank that makes it."""

    seed: int
    optimisee: Optimisee
    length: int
    layout: Layout
    scale: Tensor | None
    carry: Carry
    estimate: UnrollState


class _Piece(NamedTuple):
    """What every rank is told of a run's unroll: all per step, and whether the run ends with it."""

    finite: bool
    gradient: Params
    meta_loss: Tensor
    loss: Tensor
    update_size: Tensor
    steps: int
    ended: bool


def meta_train(
    optimiser: Optimiser,
    optimisees: Sequence[Optimisee],
    unroll: Unroll,
    settings: MetaTrainSettings,
    unrolls: UnrollSettings,
    *,
    score: Callable[[Optimiser], float],
    seed: int = 0,
    backend: str = "auto",
    records: Recorder | None = None,
    report: Report = silent,
    checkpoint: Checkpoint | None = None,
) -> MetaTrained:
    """Meta-trains `optimiser` in place; it ends with the meta-parameters of the best score.

    Every meta-update takes the next `truncation` steps of `batch` runs, averages the meta-gradients of those that are
    finite, each divided by its steps, clips and hands them to Adam. An unroll that is not finite is counted, left
    out, and its run begun anew.

    Within `distributed.together` each rank makes its own runs of the batch; all follow the same meta-gradient, and the
    end is that of one process to the bit. Rank 0 alone writes.

    Args:
        optimiser: the learned rule.
        optimisees: the problems; every run draws one and starts from fresh parameters.
        unroll: the way to the meta-gradient.
        settings: of the meta-updates.
        unrolls: of the inner runs.
        score: lower is better; taken before the first meta-update, every `validate_every`, and after the last.
        seed: of the runs.
        backend: of the steps that need no tape; see `kernels.fast`.
        records: where the figures go.
        report: progress.
        checkpoint: where the place is kept, and taken up again where one is there: the end is the same to the bit.
    """
    records, checkpoint = records or NoRecords(), checkpoint or NoCheckpoint()
    if processes.rank():
        records, report = NoRecords(), silent
    way = kernels.block_update(optimiser, backend)
    meta_optimiser = torch.optim.Adam(optimiser.parameters(), lr=settings.rate)
    result = MetaTrained(_copy(optimiser.phi()))
    slots: list[_Slot | None] = [None] * settings.batch
    runs: dict[int, _Run] = {}
    first, begun, planned = 1, 0, 0

    def begin(slot: _Slot) -> _Run:
        return _begin(optimiser, optimisees, unroll, unrolls, seed, slot)

    def plan(run: _Run) -> None:
        """Says what the largest meta-gradient so far will take."""
        nonlocal planned
        count = min(unrolls.truncation or run.length, run.length)
        if isinstance(unroll, Blockwise) and run.layout.size * count > planned:
            planned = run.layout.size * count
            loss = rescaled(flat_loss(run.optimisee, run.layout), run.scale)
            steps = inner_steps(run.optimisee, unrolls.targets, run.seed, 0, count)
            found = unroll.plan(way, loss, optimiser.phi(), run.carry, steps, count)
            logger = logging.getLogger("l2lopt")
            logger.info("a meta-gradient of %d steps: %s", count, found)
            pulled = isinstance(way, BlockUpdate) and way.pull is not None
            if "statistic" in run.carry.state.shared and not pulled:
                logger.info("the slope of the rule's statistic over a tensor is left out; the estimator taped keeps it")

    def advance(index: int, slot: _Slot) -> _Piece:
        """The next unroll of the run in a slot, which this rank begins if it is new."""
        if slot.done == 0:
            runs[index] = begin(slot)
            plan(runs[index])
        run = runs.pop(index)
        count = min(unrolls.truncation or run.length, run.length - slot.done)
        piece = unroll(
            way,
            rescaled(flat_loss(run.optimisee, run.layout), run.scale),
            optimiser.phi(),
            run.carry,
            inner_steps(run.optimisee, unrolls.targets, run.seed, slot.done, count),
            run.estimate,
        )
        moved = (piece.carry.params - run.carry.params).square().mean().sqrt() / count
        ended = not piece.finite or slot.done + count == run.length
        if not ended:
            runs[index] = run._replace(carry=piece.carry, estimate=piece.state)
        gradient = {name: value / count for name, value in piece.gradient.items()}
        return _Piece(piece.finite, gradient, piece.value / count, piece.losses[-1], moved, count, ended)

    def validate(update: int) -> None:
        value = score(optimiser)
        result.scores[update] = value
        records.write("validation", update, {"score": value})
        if value < result.score:
            result.score, result.update, result.phi = value, update, _copy(optimiser.phi())

    def due(update: int) -> bool:
        """Whether there is a validation after an update."""
        return update % settings.validate_every == 0 or update == settings.updates

    def keep(update: int) -> None:
        """The place, on rank 0; all ranks must come here."""
        place = _place(update, begun, slots, runs, result, optimiser, meta_optimiser)
        place[0]["validated"] = update in result.scores or not due(update)
        if processes.rank() == 0:
            checkpoint.save(*place)

    kept = checkpoint.load()
    if kept:
        first, begun, slots, runs = _take_up(kept, result, optimiser, meta_optimiser, begin)
    else:
        validate(0)
        keep(0)
    if due(first - 1) and first - 1 not in result.scores:  # killed while it was validated
        validate(first - 1)
        keep(first - 1)
    for update in range(first, settings.updates + 1):
        current: list[_Slot] = []
        for slot in slots:
            current.append(slot or _Slot(begun, update))
            begun += slot is None
        pieces = processes.share_out(lambda index: advance(index, current[index]), settings.batch)  # noqa: B023
        slots = [
            None if piece.ended else slot._replace(done=slot.done + piece.steps)
            for slot, piece in zip(current, pieces, strict=True)
        ]
        result.inner_steps += sum(piece.steps for piece in pieces)
        result.skipped += sum(not piece.finite for piece in pieces)
        figures = _follow(meta_optimiser, optimiser, settings, update, [piece for piece in pieces if piece.finite])
        figures |= {"skipped": float(result.skipped), "score": result.score}
        records.write("meta-train", update, figures)
        report("meta-train", update, settings.updates, figures)
        kept_now = update % settings.checkpoint_every == 0 or update == settings.updates
        if kept_now:
            keep(update)
        if due(update):
            validate(update)
            if kept_now:
                keep(update)
    with torch.no_grad():
        for name, value in optimiser.phi().items():
            value.copy_(result.phi[name])
    return result


def inner_steps(optimisee: Optimisee, targets: Targets, seed: int, first: int, count: int) -> Iterator[Step]:
    """Steps `first` … `first + count − 1` of the run `seed`, with what the meta-loss measures after each.

    The inner batches come from `inner` where held-out samples are measured, else from `train`.
    """
    split: Split = "inner" if targets.heldout else "train"
    batch = optimisee.batch(split, seed, first)
    for step in range(first, first + count):
        measured: list[tuple[Batch, float]] = []
        following = optimisee.batch(split, seed, step + 1)
        if targets.next:
            measured.append((following, targets.next))
        if targets.same:
            measured.append((batch, targets.same))
        if targets.heldout:
            measured.append((optimisee.batch("heldout", seed, step), targets.heldout))
        yield Step(batch, tuple(Target(*pair) for pair in measured))
        batch = following


def rescaled(loss: Loss, scale: Tensor | None) -> Loss:
    """The loss as a function of θ/c, c = `scale`: its gradient is c times as large. None changes nothing."""
    if scale is None:
        return loss
    return lambda params, aux, batch: loss(scale * params, aux, batch)


def _begin(
    optimiser: Optimiser,
    optimisees: Sequence[Optimisee],
    unroll: Unroll,
    settings: UnrollSettings,
    seed: int,
    slot: _Slot,
) -> _Run:
    """The inner run of a slot."""
    run_seed = seed_of("meta-train", seed, slot.number)
    optimisee = optimisees[int(torch.randint(len(optimisees), (), generator=generator("optimisee", run_seed)))]
    params, aux = optimisee.init(run_seed)
    layout = Layout.of(params)
    flat, scale = layout.ravel(params), None
    if settings.scaling:
        draw = torch.rand(flat.shape, generator=generator("scaling", run_seed), dtype=flat.dtype)
        scale = torch.exp(settings.scaling * (2 * draw - 1)).to(flat.device)
        flat = flat / scale
    carry = Carry(flat, aux, optimiser.init(layout, like=flat))
    estimate = unroll.init(carry, optimiser.phi(), run_seed)
    length = settings.draw_length(generator("length", run_seed), slot.update)
    return _Run(run_seed, optimisee, length, layout, scale, carry, estimate)


def _place(
    update: int,
    begun: int,
    slots: list[_Slot | None],
    runs: dict[int, _Run],
    result: MetaTrained,
    optimiser: Optimiser,
    meta_optimiser: torch.optim.Optimizer,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All that the meta-updates after `update` depend on, as facts and tensors; rank 0 gets the runs of all."""
    tensors = {f"best/{name}": value for name, value in result.phi.items()}
    for name, parameter in optimiser.phi().items():
        tensors[f"phi/{name}"] = parameter
        tensors |= {f"adam/{name}/{key}": value for key, value in meta_optimiser.state[parameter].items()}
    own = {index: pytree.tree_leaves((run.carry, run.estimate)) for index, run in runs.items()}
    for index, leaves in processes.collect(own).items():
        tensors |= {f"run/{index}/{number}": leaf for number, leaf in enumerate(leaves)}
    facts = {
        "update": update,
        "begun": begun,
        "runs": [None if slot is None else slot._asdict() for slot in slots],
        "score": result.score,
        "best_update": result.update,
        "inner_steps": result.inner_steps,
        "skipped": result.skipped,
        "scores": list(result.scores.items()),
    }
    return facts, tensors


def _take_up(
    kept: tuple[dict[str, Any], dict[str, Tensor]],
    result: MetaTrained,
    optimiser: Optimiser,
    meta_optimiser: torch.optim.Optimizer,
    begin: Callable[[_Slot], _Run],
) -> tuple[int, int, list[_Slot | None], dict[int, _Run]]:
    """Puts everything back as `_place` found it: the next update, the runs begun, the slots and this rank's runs."""
    facts, tensors = kept
    result.score, result.update, result.skipped = facts["score"], facts["best_update"], facts["skipped"]
    result.inner_steps, result.scores = facts["inner_steps"], dict(map(tuple, facts["scores"]))
    with torch.no_grad():
        for name, parameter in optimiser.phi().items():
            parameter.copy_(tensors[f"phi/{name}"])
            result.phi[name].copy_(tensors[f"best/{name}"])
            prefix = f"adam/{name}/"
            for key, value in tensors.items():
                if key.startswith(prefix):
                    # Adam keeps its step count on the CPU, the rest beside the parameter.
                    own = value if value.dim() == 0 else value.to(parameter)
                    meta_optimiser.state[parameter][key.removeprefix(prefix)] = own
    slots = [place and _Slot(**place) for place in facts["runs"]]
    runs: dict[int, _Run] = {}
    for index in range(processes.rank(), len(slots), processes.ranks()):
        slot = slots[index]
        if slot is not None:
            run = begin(slot)
            leaves, structure = pytree.tree_flatten((run.carry, run.estimate))
            found = [tensors[f"run/{index}/{number}"].to(leaf.device) for number, leaf in enumerate(leaves)]
            carry, estimate = pytree.tree_unflatten(found, structure)
            runs[index] = run._replace(carry=carry, estimate=estimate)
    return facts["update"] + 1, facts["begun"], slots, runs


def _follow(
    meta_optimiser: torch.optim.Optimizer,
    optimiser: Optimiser,
    settings: MetaTrainSettings,
    update: int,
    pieces: list[_Piece],
) -> dict[str, float]:
    """One meta-update from the finite pieces, and its figures; without any piece φ stays."""
    if not pieces:
        return dict.fromkeys(("meta_loss", "loss", "gradient_norm", "update_size"), math.nan) | {"rate": 0.0}
    for name, parameter in optimiser.phi().items():
        parameter.grad = torch.stack([piece.gradient[name] for piece in pieces]).mean(0).to(parameter)
    norm = torch.nn.utils.clip_grad_norm_(optimiser.parameters(), settings.clip)
    step = torch.tensor(update - 1)
    multiplier = warm_up_then(settings.schedule, step, settings.warm_up, settings.updates, settings.final)
    for group in meta_optimiser.param_groups:
        group["lr"] = settings.rate * float(multiplier)
    meta_optimiser.step()
    meta_optimiser.zero_grad()
    return {
        "meta_loss": _mean([piece.meta_loss for piece in pieces]),
        "loss": _mean([piece.loss for piece in pieces]),
        "gradient_norm": float(norm),
        "rate": settings.rate * float(multiplier),
        "update_size": _mean([piece.update_size for piece in pieces]),
    }


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())


def _copy(phi: Any) -> Params:
    return {name: value.detach().clone() for name, value in phi.items()}
