"""Optimisers compared on the same fresh problems: learned ones beside hand-designed ones whose rates are tuned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Report, silent
from l2lopt.evaluation.free_runs import Curves, RunCache, Runner, no_cache, record_steps, run_groups
from l2lopt.evaluation.settings import SPLITS, Baseline, BaselineAtRates, EvaluationSettings
from l2lopt.optimisee import Optimisee, Split
from l2lopt.report.interval import half_width

ByStep = dict[int, Tensor]
"""Step → the loss of each problem, [S]."""


class Row(NamedTuple):
    """A line of `evaluation.csv`."""

    optimiser: str
    kind: str
    seed: int
    step: int
    split: str
    loss: float


class TunedRun(NamedTuple):
    """A baseline's run: its rate, and the length its schedule is made for."""

    rate: float
    length: int


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
        chosen: Baseline → horizon → the run chosen for it.
        seconds: Optimiser → seconds of one inner step on one problem.
        warnings: Rates that are an end of their grid.
    """

    rows: list[Row]
    table: list[Comparison]
    chosen: dict[str, dict[int, TunedRun]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OptimiserRun:
    """One optimiser's part of a comparison.

    Attributes:
        kind: "learned" or "baseline".
        losses: Split → step → the loss of each problem, [S].
        first: Training-mode losses on the first batch, [S].
        seconds: Time of one inner step on one problem.
        chosen: Horizon → the run chosen for it; empty for a learned optimiser.
        warnings: Rates that are an end of their grid.
    """

    kind: str
    losses: dict[Split, ByStep]
    first: Tensor
    seconds: float
    chosen: dict[int, TunedRun] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Setting:
    """The problems of a comparison, and how its runs are made.

    Attributes:
        optimisee: Problem.
        settings: Seeds, steps, horizons.
        seed: Seed of all seeds.
        report: Progress.
        cache: Store of the runs' curves.
    """

    optimisee: Optimisee
    settings: EvaluationSettings
    seed: int
    report: Report
    cache: RunCache

    def run(
        self, optimiser: Runner | BaselineAtRates, record: Sequence[int], stage: str, seeds: Sequence[int] | None = None
    ) -> Curves:
        """The runs on the reported problems, or on the tuning problems of `seeds`, whose test losses nobody sees."""
        problems, splits = (self.reported, SPLITS) if seeds is None else (seeds, SPLITS[:1])
        rows = self.settings.rows
        return run_groups(
            optimiser, self.optimisee, problems, record, splits, self.report, stage, rows=rows, cache=self.cache
        )

    @property
    def reported(self) -> list[int]:
        """Seeds of the reported problems; no tuning sees them."""
        return [seed_of("evaluation", self.seed, index) for index in range(self.settings.seeds)]

    @property
    def tuning(self) -> list[int]:
        """Seeds of the problems on which the rates are chosen."""
        return [seed_of("tuning", self.seed, index) for index in range(self.settings.tuning_seeds)]


def evaluate(
    learned: Mapping[str, Runner],
    optimisee: Optimisee,
    settings: EvaluationSettings,
    *,
    seed: int = 0,
    report: Report = silent,
) -> Evaluation:
    """Learned optimisers against tuned baselines on the same fresh problems.

    For every horizon each baseline gets the rate of its grid with the lowest mean loss on the whole training set at
    that horizon, chosen on `tuning_seeds` problems that are not reported. A baseline's curve is made of the runs so
    chosen: at step t it shows the run tuned for the nearest horizon not before t. A non-finite loss counts as a
    divergence, is never dropped, and makes the mean infinite.

    Args:
        learned: Label → optimiser, or factory of a `torch.optim.Optimizer` as `run_free` takes it.
        optimisee: Problem.
        settings: Seeds, steps, horizons, baselines.
        seed: Seed of all seeds.
        report: Progress.

    Raises:
        UserError: For two optimisers of one name, a horizon beyond the end, or a baseline that does not take the
            parameters.
    """
    horizons = settings.checked_horizons()
    names = [*learned, *(baseline.name for baseline in settings.baselines)]
    if len(set(names)) < len(names):
        raise UserError("evaluation", expected="a name for each optimiser", found=", ".join(names), remedy="add labels")
    for baseline in settings.baselines:
        baseline.check(optimisee)  # before hours of work
    runs = {
        name: learned_run(optimiser, optimisee, settings, seed=seed, report=report, stage=name)
        for name, optimiser in learned.items()
    }
    runs |= {
        baseline.name: baseline_run(baseline, optimisee, settings, seed=seed, report=report)
        for baseline in settings.baselines
    }
    return compare(runs, horizons)


def learned_run(
    optimiser: Runner,
    optimisee: Optimisee,
    settings: EvaluationSettings,
    *,
    seed: int = 0,
    report: Report = silent,
    stage: str = "run",
    cache: RunCache = no_cache,
) -> OptimiserRun:
    """An optimiser as it is on the problems of a comparison; the arguments are those of `evaluate` and `run_groups`."""
    setting = _Setting(optimisee, settings, seed, report, cache)
    run = setting.run(optimiser, record_steps(settings.steps, settings.checked_horizons()), stage)
    return OptimiserRun("learned", _by_step(run), run.first, run.seconds)


def baseline_run(
    baseline: Baseline,
    optimisee: Optimisee,
    settings: EvaluationSettings,
    *,
    seed: int = 0,
    report: Report = silent,
    cache: RunCache = no_cache,
) -> OptimiserRun:
    """A baseline tuned for every horizon, on the problems of a comparison; the arguments are those of `learned_run`."""
    setting = _Setting(optimisee, settings, seed, report, cache)
    chosen = _tune(baseline, setting)
    losses, first, seconds = _baseline_curve(baseline, chosen, setting)
    return OptimiserRun("baseline", losses, first, seconds, chosen, _edges(baseline, chosen))


def compare(runs: Mapping[str, OptimiserRun], horizons: Sequence[int]) -> Evaluation:
    """The runs side by side; all must be on the same problems.

    Args:
        runs: Name → run.
        horizons: Steps at which the table reads the losses.
    """
    result = Evaluation([], _table(runs, horizons))
    for name, run in runs.items():
        result.seconds[name] = run.seconds
        result.warnings.extend(run.warnings)
        if run.kind == "baseline":
            result.chosen[name] = run.chosen
        for split, by_step in run.losses.items():
            for step, losses in by_step.items():
                for index, loss in enumerate(losses.tolist()):
                    result.rows.append(Row(name, run.kind, index, step, split, loss))
    return result


def _tune(baseline: Baseline, setting: _Setting) -> dict[int, TunedRun]:
    """Horizon → the best run of the grid, schedules of later horizons tried too; every rate is a row on every seed."""
    horizons, seeds = setting.settings.checked_horizons(), setting.tuning
    rates = torch.tensor(baseline.rates, dtype=torch.float64)
    tried: dict[int, dict[TunedRun, float]] = {horizon: {} for horizon in horizons}
    for length in horizons if baseline.schedule == "cosine" else horizons[-1:]:
        marks = [horizon for horizon in horizons if horizon <= length]
        # Each rate in turn on all seeds: every rate meets the same problems.
        grid = BaselineAtRates(baseline, rates.repeat_interleave(len(seeds)), length)
        run = setting.run(grid, marks, f"tune {baseline.name}", seeds * len(rates))
        for horizon, losses in _by_step(run)["train"].items():
            # NaN compares as false, so min() could choose a rate that diverged: it counts as infinite.
            means = losses.view(len(rates), len(seeds)).double().mean(1).nan_to_num(nan=torch.inf)
            tried[horizon] |= {TunedRun(r, length): m for r, m in zip(baseline.rates, means.tolist(), strict=True)}
    return {horizon: min(means, key=means.__getitem__) for horizon, means in tried.items()}


def _baseline_curve(
    baseline: Baseline, chosen: Mapping[int, TunedRun], setting: _Setting
) -> tuple[dict[Split, ByStep], Tensor, float]:
    """The losses of the runs chosen for each horizon, each where its horizon is the next; those on the first batch."""
    record = record_steps(setting.settings.steps, setting.settings.checked_horizons())
    curve: dict[Split, ByStep] = {split: {} for split in SPLITS}
    seconds, first = 0.0, 0
    for run in dict.fromkeys(chosen.values()):
        served = [horizon for horizon, choosing in chosen.items() if choosing == run]
        marks = [step for step in record if step <= max(served)]
        taken = setting.run(BaselineAtRates(baseline, run.rate, run.length), marks, baseline.name)
        seconds = max(seconds, taken.seconds)
        for horizon in served:
            first = max((earlier + 1 for earlier in chosen if earlier < horizon), default=0)
            for split, by_step in _by_step(taken).items():
                curve[split] |= {step: losses for step, losses in by_step.items() if first <= step <= horizon}
    return curve, taken.first, seconds


def _edges(baseline: Baseline, chosen: Mapping[int, TunedRun]) -> list[str]:
    edges = {min(baseline.rates): "lower", max(baseline.rates): "upper"}
    return [
        f"{baseline.name}: the best rate at step {horizon}, {run.rate:g}, is the {edges[run.rate]} end of its grid"
        for horizon, run in chosen.items()
        if run.rate in edges
    ]


def _by_step(run: Curves) -> dict[Split, ByStep]:
    return {split: dict(zip(run.steps, losses, strict=True)) for split, losses in run.losses.items()}


def _table(runs: Mapping[str, OptimiserRun], horizons: Sequence[int]) -> list[Comparison]:
    lines = []
    for horizon in horizons:
        for split in SPLITS:
            losses = {name: run.losses[split][horizon].double().nan_to_num(nan=torch.inf) for name, run in runs.items()}
            baselines = [name for name, run in runs.items() if run.kind == "baseline"]
            best = min(baselines, key=lambda name: float(losses[name].mean()), default="")
            for name, values in losses.items():
                run = runs[name]
                mean, low, high = interval(values)
                versus = best if run.kind == "learned" else ""
                paired = interval(values - losses[best]) if versus else (torch.nan,) * 3
                # Before its first step a network with batch norm may have any test-mode loss.
                begin = torch.minimum(run.losses[split][0], run.first)
                diverged = int((~values.isfinite() | (values > begin)).sum())
                lines.append(Comparison(name, run.kind, horizon, split, mean, low, high, versus, *paired, diverged))
    return lines


def interval(values: Tensor) -> tuple[float, float, float]:
    """Mean and 95 % interval of Student's t; NaN bounds for fewer than two values."""
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return mean, torch.nan, torch.nan
    half = half_width(float(values.std()), count)
    return mean, mean - half, mean + half
