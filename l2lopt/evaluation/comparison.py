"""Optimisers run free on the same fresh problems: learned ones beside hand-made ones whose rates are tuned."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt
from scipy import stats
from torch import Tensor

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.core.types import Report, seed_of, silent
from l2lopt.optimisee import Optimisee, Split, batch_rows, evaluate_rows, flat_loss, init_rows
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes

SPLITS: tuple[Split, ...] = ("train", "test")


class Baseline(Settings):
    """A hand-made optimiser and the rates to choose from."""

    optimiser: Choice
    """Name, or name and options, without the rate."""
    rates: list[PositiveFloat] = Field(min_length=1)
    """The grid, rising; at least seven half-decades make the comparison fair."""
    schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` gives `adamw` a warm-up over the first twentieth of the horizon and a cosine to its end."""
    label: str | None = None
    """Its name in the results; the optimiser's own name by default."""

    @property
    def name(self) -> str:
        """Its name in the results."""
        return self.label or (self.optimiser if isinstance(self.optimiser, str) else str(self.optimiser.get("name")))

    def build(self, rates: float | Tensor, horizon: int) -> Optimiser:
        """The optimiser at a rate, or with a rate for every row, for a run of `horizon` steps."""
        extra = {"warm_up": horizon // 20, "total": horizon} if self.schedule == "cosine" else {}
        return optimisers.build(self.optimiser, optimisers.HANDMADE, lr=rates, **extra)


def half_decades(lowest: float, count: int) -> list[float]:
    """`count` rates from `lowest` up, each √10 times the last."""
    return [float(f"{lowest * 10 ** (k / 2):.3g}") for k in range(count)]


def default_baselines() -> list[Baseline]:
    """SGD, momentum, Adam, and AdamW with warm-up and cosine, nine rates each."""
    return [
        Baseline(optimiser="sgd", rates=half_decades(1e-2, 9)),
        Baseline(optimiser="momentum", rates=half_decades(1e-3, 9)),
        Baseline(optimiser="adam", rates=half_decades(1e-4, 9)),
        Baseline(optimiser="adamw", rates=half_decades(1e-4, 9), schedule="cosine"),
    ]


class EvaluationSettings(Settings):
    """How optimisers are compared."""

    seeds: PositiveInt = 20
    """Fresh problems, the same for every optimiser; at least 10 for an interval worth reading."""
    steps: PositiveInt = 1000
    """Inner steps of each run."""
    horizons: list[PositiveInt] = Field(default=[100, 200, 1000], min_length=1)
    """Where the table reads the losses, and for which the baselines' rates are chosen."""
    tuning_seeds: PositiveInt = 5
    """Problems on which the rates are chosen; never the reported ones."""
    rows: PositiveInt | None = None
    """Runs made side by side, in one vectorised pass; none: all. 1 suits large models: the memory is that of one run,
    and a study that is stopped goes on after the last run it has made."""
    baselines: list[Baseline] = Field(default_factory=default_baselines)
    """What the learned optimisers are compared with."""

    def checked_horizons(self) -> list[int]:
        """The horizons, rising, the last one the end of the run."""
        if max(self.horizons, default=0) > self.steps:
            found, remedy = f"{max(self.horizons)}", "lower the horizon or raise evaluation.steps"
            raise UserError("evaluation.horizons", expected=f"at most {self.steps}", found=found, remedy=remedy)
        return sorted({*self.horizons, self.steps})


class Row(NamedTuple):
    """A line of `evaluation.csv`."""

    optimiser: str
    kind: str
    seed: int
    step: int
    split: str
    loss: float


class Tuned(NamedTuple):
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
    """What an evaluation found.

    Attributes:
        rows: every loss that was measured.
        table: means and paired differences at the horizons.
        chosen: baseline → horizon → the run chosen for it.
        seconds: optimiser → seconds per inner step and row.
        warnings: rates that sit at an edge of their grid.
    """

    rows: list[Row]
    table: list[Comparison]
    chosen: dict[str, dict[int, Tuned]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Curves(NamedTuple):
    """What runs showed on their way.

    Attributes:
        steps: that were recorded.
        losses: split → the test-mode losses on all of it, [recorded steps, S].
        first: the training-mode losses on the first batch, [S].
        seconds: per step and row.
    """

    steps: list[int]
    losses: dict[Split, Tensor]
    first: Tensor
    seconds: float


Keep: TypeAlias = Callable[[Mapping[str, Any], Callable[[], Curves]], Curves]
"""(what a run is, how it is made) → its curves: made, or as they were kept from before."""


def made(work: Mapping[str, Any], make: Callable[[], Curves]) -> Curves:
    """The `Keep` that keeps nothing."""
    return make()


@dataclass(frozen=True)
class FreeRun:
    """One optimiser's part of an evaluation.

    Attributes:
        kind: "learned" or "baseline".
        losses: split → step → the loss of each problem, [S].
        first: see `Curves`.
        seconds: per inner step and problem.
        chosen: of a baseline, horizon → the run chosen for it.
        warnings: rates that sit at an edge of their grid.
    """

    kind: str
    losses: dict[Split, dict[int, Tensor]]
    first: Tensor
    seconds: float
    chosen: dict[int, Tuned] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def run_free(
    optimiser: Optimiser,
    optimisee: Optimisee,
    seeds: Sequence[int],
    record: Sequence[int],
    splits: Sequence[Split] = SPLITS,
    report: Report = silent,
    stage: str = "run",
) -> Curves:
    """Runs an optimiser on fresh problems, a row for each seed, all rows in one vectorised pass.

    Once no parameter is a number any more nothing can change that: the steps that are left are not made.

    Args:
        optimiser: learned or hand-made.
        optimisee: the problem.
        seeds: of initial values and batch order; the same seeds meet the same problem whatever the optimiser.
        record: the steps at which the test-mode loss on the whole splits is taken, rising; the last ends the run.
        splits: which.
        report: progress.
        stage: its name.
    """
    layout, params, aux = init_rows(optimisee, seeds)
    loss = flat_loss(optimisee, layout)
    state = optimiser.init(layout, (len(seeds),), like=params)
    losses: dict[Split, list[Tensor]] = {split: [] for split in splits}
    marks, seconds, steps, values = set(record), 0.0, 0, params.new_zeros(len(seeds))
    first = params.new_full((len(seeds),), torch.inf)
    for step in range(max(record) + 1):
        lost = _nowhere(values, params)
        if step in marks:
            for split in splits:
                nothing = params.new_full((len(seeds),), torch.nan)
                found = nothing if lost else evaluate_rows(optimisee, layout, split, seeds, params, aux)
                losses[split].append(found)
            report(stage, step, max(record), {split: float(losses[split][-1].mean()) for split in splits})
        if step < max(record) and not lost:
            batch = batch_rows(optimisee, "train", seeds, step)
            start = time.perf_counter()
            theta = params.requires_grad_()
            values, aux = loss(theta, aux, batch)
            (grads,) = torch.autograd.grad(values.sum(), theta)
            with torch.no_grad():
                change, state = optimiser.update_(grads, state, params.detach(), loss=values.detach())
                params = params.detach() + change
            aux = {name: value.detach() for name, value in aux.items()}
            first = values.detach() if step == 0 else first
            if params.is_cuda:
                torch.cuda.synchronize(params.device)
            seconds += time.perf_counter() - start
            steps += 1
    taken = {split: torch.stack(values).cpu() for split, values in losses.items()}
    return Curves(sorted(marks), taken, first.cpu(), seconds / max(1, steps * len(seeds)))


def _nowhere(losses: Tensor, params: Tensor) -> bool:
    """Whether no parameter is a number; the losses of the last step are looked at first, as they are few."""
    return not bool(losses.isfinite().any()) and bool(params.isnan().all())


def run_groups(
    build: Callable[[slice], Optimiser],
    optimisee: Optimisee,
    seeds: Sequence[int],
    record: Sequence[int],
    splits: Sequence[Split] = SPLITS,
    report: Report = silent,
    stage: str = "run",
    *,
    rows: int | None = None,
    keep: Keep = made,
    work: Callable[[slice], Mapping[str, Any]] = lambda _: {},
) -> Curves:
    """`run_free`, `rows` problems at a time, each group a piece that can be kept, and shared out to the ranks.

    Args:
        build: the optimiser of a part of the problems.
        optimisee: see `run_free`, as for the next five.
        seeds: of all problems.
        record: rising.
        splits: which.
        report: progress.
        stage: its name.
        rows: of a group; None: all, or a rank's share of them.
        keep: where the groups' curves are kept.
        work: what the runs of a group are, besides their seeds, steps and splits.
    """
    size = rows or ceil(len(seeds) / processes.ranks())
    groups = [slice(low, low + size) for low in range(0, len(seeds), size)]

    def make(index: int) -> Curves:
        group = groups[index]
        own, facts = seeds[group], {"seeds": [*seeds[group]], "record": [*record], "splits": [*splits]}
        facts |= work(group)

        def told(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
            report(stage, index * total + done, len(groups) * total, figures)

        return keep(facts, lambda: run_free(build(group), optimisee, own, record, splits, told, stage))

    parts = processes.share_out(make, len(groups))
    losses = {split: torch.cat([part.losses[split] for part in parts], dim=1) for split in splits}
    first = torch.cat([part.first for part in parts])
    return Curves(parts[0].steps, losses, first, fmean(part.seconds for part in parts))


def record_steps(steps: int, horizons: Sequence[int], per_decade: int = 12) -> list[int]:
    """Step 0, about `per_decade` steps a decade up to `steps`, and the horizons."""
    spaced = np.geomspace(1, steps, max(2, int(np.log10(max(steps, 2)) * per_decade)))
    return sorted({0, steps, *horizons, *(round(float(step)) for step in spaced)})


def evaluate(
    learned: Mapping[str, Optimiser],
    optimisee: Optimisee,
    settings: EvaluationSettings,
    *,
    seed: int = 0,
    report: Report = silent,
) -> Evaluation:
    """Learned optimisers against tuned baselines on the same fresh problems.

    For every horizon each baseline gets the rate of its grid with the lowest mean loss on the whole training set at
    that horizon, chosen on `tuning_seeds` problems that are not reported. A baseline's curve is made of the runs so
    chosen: at step t stands the run tuned for the nearest horizon not before t. A non-finite loss counts as a
    divergence, is never dropped, and makes the mean infinite.

    Args:
        learned: label → optimiser.
        optimisee: the problem.
        settings: seeds, steps, horizons, baselines.
        seed: of all seeds.
        report: progress.
    """
    horizons = settings.checked_horizons()
    names = [*learned, *(baseline.name for baseline in settings.baselines)]
    if len(set(names)) < len(names):
        raise UserError("evaluation", expected="a name for each optimiser", found=", ".join(names), remedy="add labels")
    runs = {
        name: learned_run(optimiser, optimisee, settings, seed=seed, report=report, stage=name)
        for name, optimiser in learned.items()
    }
    runs |= {
        baseline.name: baseline_run(baseline, optimisee, settings, seed=seed, report=report)
        for baseline in settings.baselines
    }
    return compared(runs, horizons)


def learned_run(
    optimiser: Optimiser,
    optimisee: Optimisee,
    settings: EvaluationSettings,
    *,
    seed: int = 0,
    report: Report = silent,
    stage: str = "run",
    keep: Keep = made,
) -> FreeRun:
    """A learned optimiser on the problems of an evaluation; the arguments are those of `evaluate` and `run_groups`."""
    record, seeds = record_steps(settings.steps, settings.checked_horizons()), _reported(settings, seed)
    run = run_groups(
        lambda _: optimiser, optimisee, seeds, record, report=report, stage=stage, rows=settings.rows, keep=keep
    )
    return FreeRun("learned", _by_step(run), run.first, run.seconds)


def baseline_run(
    baseline: Baseline,
    optimisee: Optimisee,
    settings: EvaluationSettings,
    *,
    seed: int = 0,
    report: Report = silent,
    keep: Keep = made,
) -> FreeRun:
    """A baseline tuned for every horizon, on the problems of an evaluation; the arguments are as in `learned_run`."""
    chosen = _tune(baseline, optimisee, settings, seed, report, keep)
    losses, first, seconds = _baseline_curve(baseline, chosen, optimisee, settings, seed, report, keep)
    return FreeRun("baseline", losses, first, seconds, chosen, _edges(baseline, chosen))


def compared(runs: Mapping[str, FreeRun], horizons: Sequence[int]) -> Evaluation:
    """What the runs by name show side by side; all must be on the same problems."""
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


def _reported(settings: EvaluationSettings, seed: int) -> list[int]:
    """The seeds of the problems that are reported; no tuning sees them."""
    return [seed_of("evaluation", seed, index) for index in range(settings.seeds)]


def _tune(
    baseline: Baseline,
    optimisee: Optimisee,
    settings: EvaluationSettings,
    seed: int,
    report: Report,
    keep: Keep,
) -> dict[int, Tuned]:
    """Horizon → the best run of the grid, schedules of later horizons tried too; every rate is a row on every seed."""
    horizons = settings.checked_horizons()
    seeds = [seed_of("tuning", seed, index) for index in range(settings.tuning_seeds)]
    rates = torch.tensor(baseline.rates, dtype=torch.float64)
    rows = rates.repeat_interleave(len(seeds))
    tried: dict[int, dict[Tuned, float]] = {horizon: {} for horizon in horizons}
    for length in horizons if baseline.schedule == "cosine" else horizons[-1:]:
        marks = [horizon for horizon in horizons if horizon <= length]
        run = run_groups(
            lambda group, length=length: baseline.build(rows[group], length),  # type: ignore[misc]
            optimisee,
            seeds * len(rates),
            marks,
            ("train",),
            report,
            f"tune {baseline.name}",
            rows=settings.rows,
            keep=keep,
            work=lambda group, length=length: {"rates": rows[group].tolist(), "length": length},  # type: ignore[misc]
        )
        for horizon, losses in _by_step(run)["train"].items():
            means = losses.view(len(rates), len(seeds)).double().mean(1).nan_to_num(nan=torch.inf)
            tried[horizon] |= {Tuned(r, length): m for r, m in zip(baseline.rates, means.tolist(), strict=True)}
    return {horizon: min(means, key=means.__getitem__) for horizon, means in tried.items()}


def _baseline_curve(
    baseline: Baseline,
    chosen: Mapping[int, Tuned],
    optimisee: Optimisee,
    settings: EvaluationSettings,
    seed: int,
    report: Report,
    keep: Keep,
) -> tuple[dict[Split, dict[int, Tensor]], Tensor, float]:
    """The losses of the runs chosen for each horizon, each where its horizon is the next; those on the first batch."""
    record = record_steps(settings.steps, settings.checked_horizons())
    curve: dict[Split, dict[int, Tensor]] = {split: {} for split in SPLITS}
    seconds, first = 0.0, 0
    for run in dict.fromkeys(chosen.values()):
        served = [horizon for horizon, choosing in chosen.items() if choosing == run]
        marks = [step for step in record if step <= max(served)]
        taken = run_groups(
            lambda _, run=run: baseline.build(run.rate, run.length),  # type: ignore[misc]
            optimisee,
            _reported(settings, seed),
            marks,
            report=report,
            stage=baseline.name,
            rows=settings.rows,
            keep=keep,
            work=lambda _, run=run: {"rates": run.rate, "length": run.length},  # type: ignore[misc]
        )
        seconds = max(seconds, taken.seconds)
        for horizon in served:
            first = max((earlier + 1 for earlier in chosen if earlier < horizon), default=0)
            for split, by_step in _by_step(taken).items():
                curve[split] |= {step: losses for step, losses in by_step.items() if first <= step <= horizon}
    return curve, taken.first, seconds


def _edges(baseline: Baseline, chosen: Mapping[int, Tuned]) -> list[str]:
    edges = {min(baseline.rates): "lower", max(baseline.rates): "upper"}
    return [
        f"{baseline.name}: the best rate at step {horizon}, {run.rate:g}, is the {edges[run.rate]} end of its grid"
        for horizon, run in chosen.items()
        if run.rate in edges
    ]


def _by_step(run: Curves) -> dict[Split, dict[int, Tensor]]:
    return {split: dict(zip(run.steps, losses, strict=True)) for split, losses in run.losses.items()}


def _table(runs: Mapping[str, FreeRun], horizons: Sequence[int]) -> list[Comparison]:
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
    half = float(stats.t.ppf(0.975, count - 1)) * float(values.std()) / count**0.5
    return mean, mean - half, mean + half
