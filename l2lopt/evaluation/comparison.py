"""Optimisers compared on the same fresh problems: learned ones beside hand-designed ones whose rates are tuned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.types import Report, silent
from l2lopt.evaluation import contestants
from l2lopt.evaluation.contestants import Contestant
from l2lopt.evaluation.free_runs import RunCache, no_cache
from l2lopt.evaluation.scores import beginning, finite_or_infinite
from l2lopt.evaluation.settings import SPLITS, EvaluationSettings
from l2lopt.evaluation.torch_classes import OptimizerFactory
from l2lopt.evaluation.tuned_runs import Choices, OptimiserRun, Problems, check_baseline, check_heldout, optimiser_run
from l2lopt.optimisee import Optimisee, Split
from l2lopt.optimisers import Optimiser
from l2lopt.report.interval import half_width

NO_CACHES: Mapping[str, RunCache] = MappingProxyType({})


class Row(NamedTuple):
    """A line of `evaluation.csv`."""

    optimiser: str
    kind: str
    seed: int
    step: int
    split: str
    loss: float


class Comparison(NamedTuple):
    """A line of the table: one optimiser at one horizon on one split.

    Intervals are 95 % of Student's t over seeds. `difference` is paired, seed by seed: this optimiser's loss less
    that of `versus`, the baseline of the lowest mean at this horizon on this split; NaN for the baselines themselves.
    """

    optimiser: str
    kind: str
    horizon: int
    split: str
    mean: float
    low: float
    high: float
    versus: str
    difference: float
    difference_low: float
    difference_high: float
    diverged: int


@dataclass(frozen=True)
class Evaluation:
    """The result of a comparison.

    Attributes:
        rows: Every loss that was read.
        table: Means and paired differences at the horizons.
        chosen: Optimiser → split → horizon → the run chosen for it, where there was something to choose.
        seconds: Optimiser → seconds of one inner step on one problem.
        warnings: Rates that are an end of their grid.
        cut: Optimisers whose curves are made of several runs, one after another.
        proper: Optimiser → name in figures, of those that have one beside that in the tables.
    """

    rows: list[Row]
    table: list[Comparison]
    chosen: dict[str, Choices] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    proper: dict[str, str] = field(default_factory=dict)


def evaluate(
    learned: Mapping[str, Optimiser | OptimizerFactory],
    optimisee: Optimisee,
    settings: EvaluationSettings,
    *,
    controls: Mapping[str, Optimiser] = MappingProxyType({}),
    seed: int = 0,
    report: Report = silent,
    caches: Mapping[str, RunCache] = NO_CACHES,
) -> Evaluation:
    """Learned optimisers against tuned baselines on the same fresh problems.

    For every horizon and split each baseline gets the best rate of its grid, chosen on `tuning_seeds` problems that are
    not reported: for the training set by the mean loss on what it trains on there, for the test set by that on samples
    held out from it. Each learned optimiser of ours runs as it is, and in a second row with the best of
    `settings.multipliers`, chosen alike. A curve is made of the runs so chosen: at step t it shows the run for the
    nearest horizon not before t. A non-finite loss counts as a divergence, is never dropped, and makes the mean
    infinite.

    Args:
        learned: Label → optimiser, or factory of a `torch.optim.Optimizer` as `run_free` takes it.
        optimisee: Problem.
        settings: Seeds, steps, horizons, baselines.
        controls: Label → optimiser that takes part as it is and has no second row, such as a learned one before its
            meta-training.
        seed: Seed of all seeds.
        report: Progress.
        caches: Name of an optimiser in the results → store of its runs' curves, of those that have one.

    Raises:
        UserError: For two optimisers of one name, a horizon beyond the end, a baseline that does not take the
            parameters, or a problem without held-out samples, where there are rates to choose from.
    """
    horizons = settings.checked_horizons()
    entered = [contestant for name, rule in learned.items() for contestant in rows_of(name, rule, settings)]
    entered += [contestants.learned(name, rule) for name, rule in controls.items()]
    entered += [baseline.contestant() for baseline in settings.baselines]
    names = [contestant.name for contestant in entered]
    if len(set(names)) < len(names):
        raise UserError("evaluation", expected="a name for each optimiser", found=", ".join(names), remedy="add labels")
    for baseline in settings.baselines:
        check_baseline(baseline, optimisee)  # before hours of work
    if any(len(contestant.rates) > 1 for contestant in entered):
        check_heldout(optimisee, "evaluation")
    runs = {}
    for contestant in entered:
        problems = Problems(optimisee, settings, seed, report, caches.get(contestant.name, no_cache))
        runs[contestant.name] = optimiser_run(contestant, problems)
    result = compare(runs, horizons)
    result.proper.update(proper_names(settings))
    return result


def tunes(settings: EvaluationSettings, learned: bool = True) -> bool:
    """Whether there are rates to choose from: of a baseline, or, if there are learned optimisers to tune, of theirs."""
    return any(len(baseline.rates) > 1 for baseline in settings.baselines) or (
        learned and len(settings.multipliers) > 1
    )


def proper_names(settings: EvaluationSettings) -> dict[str, str]:
    """Baseline → name in figures."""
    return {baseline.name: baseline.proper_name for baseline in settings.baselines}


def rows_of(name: str, optimiser: Optimiser | OptimizerFactory, settings: EvaluationSettings) -> list[Contestant]:
    """A learned optimiser as it is, and, if it is one of ours, at the best of several `settings.multipliers`."""
    rows = [contestants.learned(name, optimiser)]
    if len(settings.multipliers) > 1 and isinstance(optimiser, Optimiser):
        rows.append(contestants.learned(contestants.tuned_name(name), optimiser, settings.multipliers))
    return rows


def compare(
    runs: Mapping[str, OptimiserRun],
    horizons: Sequence[int],
    parts: Mapping[str, Sequence[OptimiserRun]] = MappingProxyType({}),
) -> Evaluation:
    """The runs side by side; all must be on the same problems.

    Args:
        runs: Name → run.
        horizons: Steps at which the table reads the losses.
        parts: Name → the runs whose losses that of the name is the mean of, all of whose divergences count.
    """
    result = Evaluation([], _table(runs, horizons, parts))
    for name, run in runs.items():
        result.seconds[name] = run.seconds
        result.warnings.extend(run.warnings)
        if run.chosen:
            result.chosen[name] = run.chosen
        if run.cut:
            result.cut.append(name)
        for split, by_step in run.losses.items():
            for step, losses in by_step.items():
                for index, loss in enumerate(losses.tolist()):
                    result.rows.append(Row(name, run.kind, index, step, split, loss))
    return result


def _table(
    runs: Mapping[str, OptimiserRun], horizons: Sequence[int], parts: Mapping[str, Sequence[OptimiserRun]]
) -> list[Comparison]:
    lines = []
    for horizon in horizons:
        for split in SPLITS:
            losses = {name: finite_or_infinite(run.losses[split][horizon]) for name, run in runs.items()}
            baselines = [name for name, run in runs.items() if run.kind == "baseline"]
            best = min(baselines, key=lambda name: float(losses[name].mean()), default="")
            for name, values in losses.items():
                run = runs[name]
                mean, low, high = interval(values)
                versus = best if run.kind == "learned" else ""
                paired = interval(values - losses[best]) if versus else (torch.nan,) * 3
                diverged = sum(_diverged(part, split, horizon) for part in parts.get(name, [run]))
                lines.append(Comparison(name, run.kind, horizon, split, mean, low, high, versus, *paired, diverged))
    return lines


def _diverged(run: OptimiserRun, split: Split, horizon: int) -> int:
    """The number of runs whose loss at a step is not finite, or above the first."""
    values = finite_or_infinite(run.losses[split][horizon])
    # Before its first step a network with batch norm may have any test-mode loss.
    begin = beginning(run.losses[split], run.first)
    return int((~values.isfinite() | (values > begin)).sum())


def interval(values: Tensor) -> tuple[float, float, float]:
    """Mean and 95 % interval of Student's t; NaN bounds for fewer than two values."""
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return mean, torch.nan, torch.nan
    half = half_width(float(values.std()), count)
    return mean, mean - half, mean + half
