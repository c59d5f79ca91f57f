"""The runs of a contestant: rates chosen on problems that nobody reports, then the reported problems."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Report, silent
from l2lopt.evaluation.contestants import Contestant, Runner
from l2lopt.evaluation.free_runs import Curves, RunCache, no_cache, record_steps, run_free, run_groups
from l2lopt.evaluation.scores import finite_or_infinite
from l2lopt.evaluation.settings import SPLITS, Baseline, EvaluationSettings
from l2lopt.evaluation.step_backend import StepBackend, step_backend
from l2lopt.optimisee import Optimisee, Split
from l2lopt.optimisers import Optimiser
from l2lopt.storage.checkpoint import Checkpoint

_log = logging.getLogger("l2lopt")
MUCH_READING, WORTH_SAYING = 0.1, 1.0
"""Share of evaluations in the time of a contestant's runs above which a line says so, if they took so many seconds."""
ByStep: TypeAlias = dict[int, Tensor]
"""Step → the loss of each problem, [S]."""

CHOSEN_ON: Mapping[Split, Split] = {"train": "inner", "test": "heldout"}
"""Reported split → the split whose loss chooses the rate for it. The runs of the tuning train on "inner" alone, so
that the samples of "heldout" are new to them, and nobody sees those of "test"; the reported runs train on "train"."""


class TunedRun(NamedTuple):
    """A run that is reported: its rate, and the length it is made for."""

    rate: float
    length: int


Choices: TypeAlias = dict[Split, dict[int, TunedRun]]
"""Split → horizon → the run chosen for it."""
Tried: TypeAlias = dict[Split, dict[int, dict[TunedRun, float]]]
"""Split → horizon → run that was tried → its mean loss."""


def choice_facts(chosen: Choices) -> dict[str, dict[str, dict[str, float]]]:
    """Choices for JSON."""
    return {
        split: {str(horizon): tuned._asdict() for horizon, tuned in by_horizon.items()}
        for split, by_horizon in chosen.items()
    }


@dataclass(frozen=True)
class OptimiserRun:
    """One optimiser's part of a comparison.

    Attributes:
        kind: "learned" or "baseline".
        losses: Split → step → the loss of each problem, [S].
        first: Training-mode losses on the first batch, [S].
        seconds: Time of one inner step on one problem.
        chosen: Runs that were chosen; empty where there was nothing to choose.
        warnings: Rates that are an end of their grid.
        cut: Whether its curve is made of several runs, one after another.
    """

    kind: str
    losses: dict[Split, ByStep]
    first: Tensor
    seconds: float
    chosen: Choices = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    cut: bool = False


@dataclass(frozen=True)
class Problems:
    """The problems of a comparison, and how runs on them are made.

    Attributes:
        optimisee: Problem.
        settings: Seeds, steps, horizons.
        seed: Seed of all seeds.
        report: Progress.
        cache: Store of the runs' curves.
    """

    optimisee: Optimisee
    settings: EvaluationSettings
    seed: int = 0
    report: Report = silent
    cache: RunCache = no_cache

    @property
    def reported(self) -> list[int]:
        """Seeds of the reported problems; no tuning sees them."""
        return [seed_of("evaluation", self.seed, index) for index in range(self.settings.seeds)]

    @property
    def tuning(self) -> list[int]:
        """Seeds of the problems on which the rates are chosen."""
        return [seed_of("tuning", self.seed, index) for index in range(self.settings.tuning_seeds)]


def optimiser_run(contestant: Contestant, problems: Problems) -> OptimiserRun:
    """A contestant on the problems of a comparison, at the best of its rates for every horizon and split.

    Its curve is made of the chosen runs: at step t it shows the one for the nearest horizon not before t. A contestant
    with a single rate takes it; one that knows its end then has a run for each horizon.

    Args:
        contestant: Contestant that runs.
        problems: Problems, and how runs on them are made.

    Raises:
        UserError: For a problem without held-out samples, where there are rates to choose from.
    """
    made: list[Curves] = []

    def noted(work: Mapping[str, Any], make: Callable[[Checkpoint], Curves]) -> Curves:
        def run(checkpoint: Checkpoint) -> Curves:
            made.append(make(checkpoint))
            return made[-1]

        return problems.cache(work, run)

    run = _best_run(contestant, replace(problems, cache=noted))
    reading, whole = reading_time(made)
    if reading > max(MUCH_READING * whole, WORTH_SAYING):
        hint = "fewer evaluation samples of the problem, or fewer horizons, take less"
        _log.info(
            "%s: evaluations took %.0f %% of the time of its runs; %s", contestant.name, 100 * reading / whole, hint
        )
    return run


def reading_time(runs: Sequence[Curves]) -> tuple[float, float]:
    """The seconds that some runs took for evaluations, and for evaluations and steps.

    Args:
        runs: Curves of runs that were made just now.
    """
    counts = [run.steps[-1] * len(run.first) for run in runs]
    reading = sum(count * run.reading for count, run in zip(counts, runs, strict=True))
    return reading, reading + sum(count * run.seconds for count, run in zip(counts, runs, strict=True))


def _best_run(contestant: Contestant, problems: Problems) -> OptimiserRun:
    """`optimiser_run` itself."""
    horizons = problems.settings.checked_horizons()
    form = step_backend(contestant, problems.optimisee, problems.settings)
    if len(contestant.rates) > 1:
        chosen = _tune(contestant, problems, form)
        made = _curve(contestant, chosen, problems, form)
        return OptimiserRun(contestant.kind, *made, chosen, _edges(contestant, chosen), cut=len(horizons) > 1)
    lengths = {horizon: horizon if contestant.knows_end else horizons[-1] for horizon in horizons}
    as_it_is = {horizon: TunedRun(contestant.rates[0], length) for horizon, length in lengths.items()}
    made = _curve(contestant, dict.fromkeys(SPLITS, as_it_is), problems, form)
    return OptimiserRun(contestant.kind, *made, cut=contestant.knows_end and len(horizons) > 1)


def check_baseline(baseline: Baseline, optimisee: Optimisee) -> None:
    """Builds a baseline for a problem and has a class of `torch.optim` make a step, before hours of work.

    Args:
        baseline: Baseline.
        optimisee: Problem.

    Raises:
        UserError: For an unknown name or option, or parameters or gradients that the class refuses.
    """
    baseline.check(optimisee)
    built = baseline.build(baseline.rates[0], 1)
    if isinstance(built, Optimiser):
        return
    check_step(built, optimisee, f"optimiser {baseline.name!r}")


def check_step(factory: Runner, optimisee: Optimisee, where: str, fit: Split = "train") -> None:
    """Has a `torch.optim.Optimizer` make a step on fresh parameters of a problem.

    Args:
        factory: Function that makes the optimiser from named parameters.
        optimisee: Problem.
        where: Subject of the error.
        fit: Split on whose first batch the step is made.

    Raises:
        UserError: For an optimiser that cannot make it.
    """
    params, aux = optimisee.init(0)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    optimisee.loss(leaves, aux, optimisee.batch(fit, 0, 0))[0].backward()  # whose errors are the problem's
    try:
        run_free(factory, optimisee, [0], [1], splits=(), fit=fit)
    except (UserError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # the class's own
        remedy = "change its options, or choose another"
        raise UserError(where, expected="one that can step", found=str(error), remedy=remedy) from error


def check_heldout(optimisee: Optimisee, where: str) -> None:
    """Refuses a problem on which no rate can be chosen, before hours of work.

    Args:
        optimisee: Problem.
        where: Subject of the error.

    Raises:
        UserError: For a problem without held-out samples.
    """
    try:
        next(iter(optimisee.evaluation_batches("heldout", 0)))
    except UserError as error:
        expected, remedy = (
            "held-out samples to choose rates on",
            "raise heldout, or give single rates and no multipliers",
        )
        raise UserError(where, expected=expected, found=error.found, remedy=remedy) from None


def _run(
    contestant: Contestant,
    tuned: TunedRun | tuple[Tensor, int],
    marks: Sequence[int],
    splits: Sequence[Split],
    problems: Problems,
    form: StepBackend,
    tuning: bool,
) -> Curves:
    """Runs at a rate, or at one for each run, on the reported problems or on those of the tuning."""
    rates, length = tuned
    seeds, stage = problems.reported, contestant.name
    if tuning:
        assert isinstance(rates, Tensor)
        # Each rate in turn on all seeds: every rate meets the same problems.
        seeds = problems.tuning * (len(rates) // len(problems.tuning))
        stage = f"tune {contestant.name}"
    return run_groups(
        contestant.at(rates, length),
        problems.optimisee,
        seeds,
        marks,
        splits,
        problems.report,
        stage,
        rows=form.rows,
        cache=problems.cache,
        fit="inner" if tuning else "train",
        backend=form.backend,
    )


def tuning_losses(contestant: Contestant, problems: Problems) -> Tried:
    """The mean losses of every rate on the problems of the tuning, a rate that diverged at infinity.

    Args:
        contestant: Contestant whose rates are tried.
        problems: Problems, and how runs on them are made.

    Returns:
        Reported split → horizon → run → mean loss on the split that chooses for it, see `CHOSEN_ON`.
    """
    return _tried(contestant, problems, step_backend(contestant, problems.optimisee, problems.settings))


def _tried(contestant: Contestant, problems: Problems, form: StepBackend) -> Tried:
    """The mean losses of every rate; each is a row on every seed."""
    horizons, seeds = problems.settings.checked_horizons(), problems.tuning
    rates = torch.tensor(contestant.rates, dtype=torch.float64)
    tried: Tried = {split: {horizon: {} for horizon in horizons} for split in SPLITS}
    for length in horizons if contestant.knows_end else horizons[-1:]:
        # A schedule that ends later is tried for an earlier horizon, too.
        marks = [horizon for horizon in horizons if horizon <= length]
        grid = rates.repeat_interleave(len(seeds)), length
        taken = _run(contestant, grid, marks, tuple(CHOSEN_ON.values()), problems, form, tuning=True)
        found = _by_step(taken)
        for split, judge in CHOSEN_ON.items():
            for horizon, losses in found[judge].items():
                # NaN compares as false, so min() could choose a rate that diverged.
                means = finite_or_infinite(losses).view(len(rates), len(seeds)).mean(1)
                pairs = zip(contestant.rates, means.tolist(), strict=True)
                tried[split][horizon] |= {TunedRun(rate, length): mean for rate, mean in pairs}
    return tried


def _tune(contestant: Contestant, problems: Problems, form: StepBackend) -> Choices:
    """The best run of the grid for every split and horizon."""
    return {
        split: {horizon: min(means, key=means.__getitem__) for horizon, means in by_horizon.items()}
        for split, by_horizon in _tried(contestant, problems, form).items()
    }


def _curve(
    contestant: Contestant, chosen: Choices, problems: Problems, form: StepBackend
) -> tuple[dict[Split, ByStep], Tensor, float]:
    """The losses of the runs chosen for each horizon, each where its horizon is the next; those on the first batch."""
    settings = problems.settings
    record = record_steps(settings.steps, settings.checked_horizons(), settings.readings)
    served: dict[TunedRun, list[tuple[Split, int]]] = {}
    for split, by_horizon in chosen.items():
        for horizon, run in by_horizon.items():
            served.setdefault(run, []).append((split, horizon))
    curve: dict[Split, ByStep] = {split: {} for split in SPLITS}
    seconds, firsts = 0.0, []
    for run, places in served.items():
        # Only what is shown of it is read: an evaluation of all runs takes as long as several steps of them.
        shown = {place: _shown(record, chosen, *place) for place in places}
        splits = tuple(split for split in SPLITS if any(split == place[0] for place in places))
        marks = sorted(set[int]().union(*shown.values()))
        taken = _run(contestant, run, marks, splits, problems, form, tuning=False)
        by_step, seconds = _by_step(taken), max(seconds, taken.seconds)
        firsts.append(taken.first)
        for (split, _), steps in shown.items():
            curve[split] |= {step: by_step[split][step] for step in steps}
    return {split: dict(sorted(by_step.items())) for split, by_step in curve.items()}, firsts[0], seconds


def _shown(record: Sequence[int], chosen: Choices, split: Split, horizon: int) -> list[int]:
    """The recorded steps at which the run chosen for a horizon is shown: those for which it is the next horizon."""
    begin = max((earlier + 1 for earlier in chosen[split] if earlier < horizon), default=0)
    return [step for step in record if begin <= step <= horizon]


def _edges(contestant: Contestant, chosen: Choices) -> list[str]:
    edges = {min(contestant.rates): "lower", max(contestant.rates): "upper"}
    return [
        f"{contestant.name}: the best rate for the {split} loss at step {horizon}, {run.rate:g}, is the "
        f"{edges[run.rate]} end of its grid"
        for split, by_horizon in chosen.items()
        for horizon, run in by_horizon.items()
        if run.rate in edges
    ]


def _by_step(run: Curves) -> dict[Split, ByStep]:
    return {split: dict(zip(run.steps, losses, strict=True)) for split, losses in run.losses.items()}
