"""Optimisers run free: on fresh problems, with no meta-gradient, their losses recorded on the way.

Ours run side by side, a row for each problem, in one vectorised pass; classes of `torch.optim.Optimizer` run problem by
problem, from the same initial values and on the same batches.
"""

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from l2lopt.core.layout import Layout, Params
from l2lopt.core.seeding import seed_of, seeded
from l2lopt.core.types import Aux, Carry, Loss, Report, detach, silent, stack
from l2lopt.evaluation.contestants import AtRates, Runner
from l2lopt.evaluation.rows import Rows
from l2lopt.evaluation.settings import SPLITS
from l2lopt.evaluation.torch_classes import OptimizerFactory
from l2lopt.kernels.graph import NotCompiledError
from l2lopt.kernels.inner_step import InnerSteps, compiled_steps, eager_steps
from l2lopt.optimisee import BatchesOfRows, Optimisee, Split, evaluate_rows, flat_loss, init_rows
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.closures import all_finite, closure_of
from l2lopt.optimisers.schedules import set_mode
from l2lopt.parallel import processes
from l2lopt.storage.checkpoint import Checkpoint, NoCheckpoint

Backend: TypeAlias = Literal["eager", "compile"]
"""Form of the inner steps."""
_log = logging.getLogger("l2lopt")
_reasons: set[str] = set()
"""Reasons against a compiled step that have been logged."""


class Curves(NamedTuple):
    """What runs showed on their way.

    Attributes:
        steps: Recorded steps.
        losses: Split → the test-mode losses on all of it, [recorded steps, S].
        first: Training-mode losses on the first batch, [S].
        seconds: Time of one step of one run.
        reading: Time of the evaluations, spread over all steps of all runs; 0 where the runs were not made just now.
    """

    steps: list[int]
    losses: dict[Split, Tensor]
    first: Tensor
    seconds: float
    reading: float = 0.0


RunCache: TypeAlias = Callable[[Mapping[str, Any], Callable[[Checkpoint], Curves]], Curves]
"""(what the runs depend on, how they are made and gone on with) → their curves: made now, or as they were stored."""


class _Course(NamedTuple):
    """How runs go and what is recorded of them; see `run_free`."""

    record: Sequence[int]
    splits: Sequence[Split]
    fit: Split
    total_steps: int
    report: Report
    stage: str
    backend: Backend
    checkpoint: Checkpoint


class _Progress:
    """The progress of a run: at each reading, and between two of them once a second at most.

    A step takes some microseconds or a minute, and between the last two readings are most of the steps.
    """

    def __init__(self, course: _Course) -> None:
        self.course, self.last, self.figures = course, max(course.record), dict[str, float]()
        self.told = time.monotonic()

    def read(self, step: int, losses: Mapping[Split, Sequence[Tensor]]) -> None:
        """Tells the losses of a reading, means over the runs."""
        self.figures = {split: float(values[-1].mean()) for split, values in losses.items()}
        self.tell(step)

    def stepped(self, step: int) -> None:
        """Tells a step, with the losses of the last reading."""
        if time.monotonic() - self.told >= 1:
            self.tell(step)

    def tell(self, step: int) -> None:
        self.told = time.monotonic()
        self.course.report(self.course.stage, step, self.last, self.figures)


def no_cache(work: Mapping[str, Any], make: Callable[[Checkpoint], Curves]) -> Curves:
    """The `RunCache` that stores nothing."""
    return make(NoCheckpoint())


def run_free(
    optimiser: Runner,
    optimisee: Optimisee,
    seeds: Sequence[int],
    record: Sequence[int],
    splits: Sequence[Split] = SPLITS,
    report: Report = silent,
    stage: str = "run",
    *,
    fit: Split = "train",
    total_steps: int | None = None,
    backend: Backend = "eager",
    checkpoint: Checkpoint | None = None,
) -> Curves:
    """Runs an optimiser on fresh problems, one for each seed.

    Once no parameter is a number any more nothing can change that: the steps that are left are not made, and their
    losses are NaN. Divergence is a result here, never an exception.

    A class of `torch.optim` gets a closure where its `step` takes one, so L-BFGS may evaluate the loss of a batch
    several times. Optimisers with methods `train` and `eval`, as the schedule-free ones, are in the first mode during
    steps and in the second while the losses are read; statistics of batch norm stay those of training. The global CPU
    generator is seeded for each problem, for optimisers that draw from it.

    Args:
        optimiser: Optimiser of ours, learned or hand-designed, or a function that makes a `torch.optim.Optimizer` from
            named parameters, or a list of such functions, one for each seed.
        optimisee: Problem.
        seeds: Seeds of initial values and batch order; equal seeds meet the same problem whatever the optimiser.
        record: Steps at which the test-mode loss on the whole splits is read, rising; the last ends the run.
        splits: Splits on which the losses are read.
        report: Progress.
        stage: Name of the progress.
        fit: Split on whose batches the steps are made.
        total_steps: Number of steps of the run that an optimiser of ours is told; by default the last of `record`.
        backend: Form of the steps of an optimiser of ours: "eager" or "compile"; see `kernels.inner_step`.
        checkpoint: Checkpoint that runs of an optimiser of ours go on from, if it has these runs, and that they write
            every few minutes; the losses are the same to the bit. Runs of a class of `torch.optim` begin anew.

    Example:
        >>> import optimisees, torch
        >>> quadratic = optimisees.make("quadratic", size=2)
        >>> curves = run_free(lambda params: torch.optim.Adam([p for _, p in params], lr=0.1), quadratic, [0], [0, 10])
        >>> curves.losses["train"].shape
        torch.Size([2, 1])
    """
    kept = checkpoint or NoCheckpoint()
    course = _Course(record, splits, fit, total_steps or max(record), report, stage, backend, kept)
    if isinstance(optimiser, Optimiser):
        return _side_by_side(optimiser, optimisee, seeds, course)
    factories = [optimiser] * len(seeds) if callable(optimiser) else optimiser
    runs = []
    for index, (factory, seed) in enumerate(zip(factories, seeds, strict=True)):
        told = course._replace(report=_part_of(report, index, len(seeds)))
        with seeded(seed_of("torch-optim", seed)):
            runs.append(_one_by_one(factory, optimisee, seed, told))
    return _joined(runs, splits)


def _side_by_side(optimiser: Optimiser, optimisee: Optimisee, seeds: Sequence[int], course: _Course) -> Curves:
    """The runs of an optimiser of ours, all rows in one vectorised pass."""
    layout, params, aux = init_rows(optimisee, seeds)
    loss, batches = flat_loss(optimisee, layout), BatchesOfRows(optimisee, course.fit, seeds)
    state = optimiser.init(layout, (len(seeds),), like=params, total_steps=course.total_steps)
    rows, nothing = Rows(Carry(params, aux, state), course.splits), params.new_full((len(seeds),), torch.nan)
    advance = _steps(loss, optimiser, rows.carry, batches, course.backend)
    rows.load(course.checkpoint)
    marks, progress, lost = sorted(set(course.record)), _Progress(course), False
    for mark in marks[rows.readings :]:
        while rows.step < mark and not lost:
            samples, places = batches.at(rows.step, rows.ahead(mark))
            start, count = time.perf_counter(), 1 if places is None else len(places)
            values, rows.carry = advance(rows.carry, samples, places)
            rows.seconds += _since(start, rows.carry.params)
            rows.first = values if rows.step == 0 else rows.first
            rows.step += count
            lost = _lost(values, rows.carry.params)
            progress.stepped(rows.step)
            if not lost:
                rows.save(course.checkpoint)
        start = time.perf_counter()
        for split, read in rows.losses.items():
            carry = rows.carry
            read.append(nothing if lost else evaluate_rows(optimisee, layout, split, seeds, carry.params, carry.aux))
        rows.reading, rows.readings = rows.reading + _since(start, rows.carry.params), rows.readings + 1
        progress.read(mark, rows.losses)
    taken = {split: torch.stack(values).cpu() for split, values in rows.losses.items()}
    made = max(1, rows.step * len(seeds))
    return Curves(marks, taken, rows.first.cpu(), rows.seconds / made, rows.reading / made)


def _steps(loss: Loss, optimiser: Optimiser, carry: Carry, batches: BatchesOfRows, backend: Backend) -> InnerSteps:
    """The steps of the runs: compiled, where that is wished for and possible."""
    if backend == "compile":
        try:
            return compiled_steps(loss, optimiser, carry, *batches.at(0))
        except NotCompiledError as reason:
            if str(reason) not in _reasons:
                _reasons.add(str(reason))
                _log.warning("backend compile: the inner steps stay eager: %s", reason)
    return eager_steps(loss, optimiser)


def _one_by_one(factory: OptimizerFactory, optimisee: Optimisee, seed: int, course: _Course) -> Curves:
    """The run of a class of `torch.optim` on one problem."""
    last, splits = max(course.record), course.splits
    params, aux = optimisee.init(seed)
    layout = Layout.of(params, optimisee.roles())
    params = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    made = factory(list(params.items()))
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    losses: dict[Split, list[Tensor]] = {split: [] for split in splits}
    marks, seconds, reading, steps, lost = set(course.record), 0.0, 0.0, 0, False
    value = first = next(iter(params.values())).new_full((), torch.inf)
    progress = _Progress(course)
    for step in range(last + 1):
        flat = layout.ravel(params).detach()
        lost = lost or (step > 0 and _lost(value[None], flat))
        if step in marks:
            for optimizer in optimizers:
                set_mode(optimizer, "eval")  # moves the parameters of schedule-free ones
            start, flat, rows = time.perf_counter(), layout.ravel(params).detach()[None], stack([aux])
            for split in splits:
                nothing = flat.new_full((1,), torch.nan)
                losses[split].append(nothing if lost else evaluate_rows(optimisee, layout, split, [seed], flat, rows))
            reading += _since(start, flat)
            progress.read(step, losses)
        if step < last and not lost:
            batch = optimisee.batch(course.fit, seed, step)  # before the clock, as for optimisers of ours
            start = time.perf_counter()
            for optimizer in optimizers:
                set_mode(optimizer, "train")
            value, aux, lost = _torch_step(optimizers, optimisee, params, aux, batch)
            first = value if step == 0 else first
            seconds += _since(start, flat)
            steps += 1
            progress.stepped(step + 1)
    taken = {split: torch.stack(values).cpu() for split, values in losses.items()}
    return Curves(sorted(marks), taken, first[None].cpu(), seconds / max(1, steps), reading / max(1, steps))


def _torch_step(
    optimizers: Sequence[Optimizer], optimisee: Optimisee, params: Params, aux: Aux, batch: Any
) -> tuple[Tensor, Aux, bool]:
    """One step on a batch: its loss before the step, the next aux, and whether the run is lost."""

    def evaluate() -> tuple[Tensor, Aux]:
        for value in params.values():
            value.grad = None
        with torch.enable_grad():
            loss, after = optimisee.loss(params, aux, batch)
            loss.backward()
        return loss.detach(), detach(after)

    value, after = evaluate()
    try:
        for optimizer in optimizers:
            if "closure" in inspect.signature(optimizer.step).parameters:
                closure = closure_of(optimizer, params.values(), value, lambda: evaluate()[0])
                optimizer.step(closure)  # type: ignore[arg-type]  # torch.optim calls a loss a float
            else:
                optimizer.step()
    except (RuntimeError, ValueError, ArithmeticError):
        if all_finite(value, params.values()):
            raise
        return value, after, True  # a class that refuses to go on from numbers that are none: the run has diverged
    return value, after, False


def _lost(losses: Tensor, params: Tensor) -> bool:
    """Whether no parameter is a number; the losses of the last step are looked at first, as they are few."""
    return not bool(losses.isfinite().any()) and bool(params.isnan().all())


def _since(start: float, like: Tensor) -> float:
    """Seconds since `start`, once the device of `like` has done its work."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter() - start


def _part_of(report: Report, index: int, count: int) -> Report:
    """The progress of part `index` of `count` equal parts, as progress of the whole."""

    def told(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        report(stage, index * total + done, count * total, figures)

    return told


def _first_rows(curves: Curves, count: int) -> Curves:
    """The curves of the first `count` runs."""
    losses = {split: values[:, :count] for split, values in curves.losses.items()}
    return curves._replace(losses=losses, first=curves.first[:count])


def _joined(parts: Sequence[Curves], splits: Sequence[Split]) -> Curves:
    """The curves of several groups of runs as those of all."""
    losses = {split: torch.cat([part.losses[split] for part in parts], dim=1) for split in splits}
    first = torch.cat([part.first for part in parts])
    seconds, reading = (fmean(times) for times in zip(*((part.seconds, part.reading) for part in parts), strict=True))
    return Curves(parts[0].steps, losses, first, seconds, reading)


def run_groups(
    optimiser: Runner | AtRates,
    optimisee: Optimisee,
    seeds: Sequence[int],
    record: Sequence[int],
    splits: Sequence[Split] = SPLITS,
    report: Report = silent,
    stage: str = "run",
    *,
    rows: int | None = None,
    cache: RunCache = no_cache,
    fit: Split = "train",
    backend: Backend = "eager",
) -> Curves:
    """`run_free`, `rows` problems at a time; each group can be cached, and the groups are shared out to the ranks.

    Args:
        optimiser: Optimiser or factories, as for `run_free`, or a contestant at its rates, which is told the length of
            its runs. A list of factories, or of rates, has one for each seed.
        optimisee: Problem.
        seeds: Seeds of all problems.
        record: Steps at which the losses are read, rising.
        splits: Splits on which they are read.
        report: Progress of all groups together.
        stage: Name of the progress.
        rows: Size of a group; None puts all problems, or a rank's share of them, into one. Classes of `torch.optim` in
            a baseline run in groups of one then, since nothing is gained by more.
        cache: Store of the groups' curves.
        fit: Split on whose batches the steps are made.
        backend: Form of the steps; "compile" makes all groups as large as the first, since a compiled step is one for
            its number of rows.
    """
    at_rates = optimiser if isinstance(optimiser, AtRates) else None
    one_by_one = at_rates is not None and at_rates.contestant.one_by_one
    size = rows or (1 if one_by_one else ceil(len(seeds) / processes.ranks()))
    groups = [slice(low, low + size) for low in range(0, len(seeds), size)]

    def make(index: int) -> Curves:
        group = groups[index]
        some, told = seeds[group], _part_of(report, index, len(groups))
        facts: dict[str, Any] = {"seeds": [*some], "record": [*record], "splits": [*splits], "fit": fit}
        facts |= {} if at_rates is None else at_rates.facts(group)
        total = None if at_rates is None else at_rates.length

        def run(checkpoint: Checkpoint) -> Curves:
            runner, filled = _of_group(optimiser, group), some
            if backend == "compile" and at_rates is not None and not one_by_one:
                runner, filled = at_rates.build_rows(group, size), [*some, *[some[-1]] * (size - len(some))]
            course: dict[str, Any] = {"fit": fit, "total_steps": total, "backend": backend, "checkpoint": checkpoint}
            return _first_rows(run_free(runner, optimisee, filled, record, splits, told, stage, **course), len(some))

        return cache(facts, run)

    return _joined(processes.share_out(make, len(groups)), splits)


def _of_group(optimiser: Runner | AtRates, group: slice) -> Runner:
    """The optimiser of some of the runs."""
    if isinstance(optimiser, AtRates):
        return optimiser.build(group)
    return optimiser if isinstance(optimiser, Optimiser) or callable(optimiser) else optimiser[group]


def record_steps(steps: int, horizons: Sequence[int], per_decade: int | None = None) -> list[int]:
    """Step 0, about `per_decade` steps a decade up to `steps`, 12 by default, and the horizons."""
    spaced = np.geomspace(1, steps, max(2, int(np.log10(max(steps, 2)) * (per_decade or 12))))
    return sorted({0, steps, *horizons, *(round(float(step)) for step in spaced)})
