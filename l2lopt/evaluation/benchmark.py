"""The protocol of a benchmark: what an optimiser runs on a task in each league, and at which rate.

Three leagues, as a table of tuned optimisers alone says nothing to those who do not tune, and one of untuned ones alone
rewards whoever had the tasks in mind (Schneider et al. 2019, DeepOBS; Dahl et al. 2023, AlgoPerf, whose two tracks are
"tuned from outside" and "self-tuned"):

- *untuned*: one setting for all tasks, the author's or the usual one. Optimisers without a rate belong here, and what a
  learned rule gives as it is shipped (Metz et al. 2022, VeLOdrome).
- *self-tuned*: the one rate of its grid that is best over the meta-training tasks, on all tasks. What a careful user
  carries from project to project, and the fair rival of a rule that was meta-trained on these tasks.
- *tuned*: the best of k rates on each task, the same k for nearly all.

What is fair about it: all optimisers meet the same initial values and the same batches, seed by seed, and have the same
budget of steps, which those with a schedule are told. A rate is chosen on other seeds than the reported ones, for the
training loss by what the runs train on and for the test loss by samples held out from them; a choice at an end of its
grid is said. A run that diverges is counted and makes its mean infinite; none is dropped. Seconds are measured apart
from the runs, before them, while nothing else runs, eagerly and one run at a time, as in a user's own loop.

Figures of merit are in `evaluation.scores`: interquartile means and bootstrap intervals (Agarwal et al. 2021, rliable),
the steps to a target that another optimiser has set, and performance profiles (Dolan and Moré 2002; AlgoPerf).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from l2lopt import kernels, optimisers
from l2lopt.evaluation import contestants
from l2lopt.evaluation.benchmark_result import Kind, League, TaskInfo, TaskRun
from l2lopt.evaluation.contestants import Contestant
from l2lopt.evaluation.free_runs import run_free
from l2lopt.evaluation.settings import SPLITS, EvaluationSettings
from l2lopt.evaluation.step_backend import step_backend
from l2lopt.evaluation.suites import Competitor, Suite
from l2lopt.evaluation.tuned_runs import Problems, optimiser_run, tuning_losses
from l2lopt.optimisee import Optimisee, common_dtype
from l2lopt.optimisers import Optimiser
from l2lopt.weights import files

WORST = 10.0
"""Ratio of a rate's loss to the best rate's from which it counts no worse, in the choice of a self-tuned rate."""
TIMED = 0.3
"""Seconds over which a step is timed."""


class Entry(NamedTuple):
    """A competitor on a task.

    Attributes:
        competitor: Optimiser, its rates and its leagues.
        optimisee: Problem of the task.
        rule: The learned rule in the dtype of the problem; None for a baseline.
    """

    competitor: Competitor
    optimisee: Optimisee
    rule: Optimiser | None

    def at(self, rates: Sequence[float]) -> Contestant:
        """The contestant with these rates to choose from."""
        if self.rule is not None:
            return contestants.learned(self.competitor.name, kernels.fuse(self.rule), rates)
        return self.competitor.model_copy(update={"rates": [*rates]}).contestant()


def entry(competitor: Competitor, optimisee: Optimisee) -> Entry:
    """A competitor made ready for a task.

    Args:
        competitor: Optimiser, its rates and its leagues.
        optimisee: Problem of the task.

    Raises:
        UserError: For an unknown name or option, weights that cannot be loaded, parameters that the class refuses, or
            a dtype that rules do not compute in.
    """
    rule, dtype = learned_rule(competitor), common_dtype([optimisee])
    if rule is None:
        competitor.check(optimisee)
        return Entry(competitor, optimisee, None)
    return Entry(competitor, optimisee, rule.to(dtype))


def learned_rule(competitor: Competitor) -> Optimiser | None:
    """The learned rule of a competitor, new at each call; None for a baseline.

    Raises:
        UserError: For weights that cannot be loaded.
    """
    choice = competitor.optimiser
    if isinstance(choice, dict) and "weights" in choice:
        return files.from_choice(choice)
    name = choice if isinstance(choice, str) else choice.get("name")
    return optimisers.build(choice) if name in optimisers.LEARNED else None


def kind_of(competitor: Competitor) -> Kind:
    """What a competitor is to readers."""
    choice = competitor.optimiser
    name = choice if isinstance(choice, str) else choice.get("name", choice.get("weights"))
    if name in optimisers.LEARNED or (isinstance(choice, dict) and "weights" in choice):
        return "learned"
    return "harness" if name == "normalised-muon" else "baseline"


def settings_of(suite: Suite, steps: int) -> EvaluationSettings:
    """The settings of a task's runs: one horizon, the task's budget.

    Args:
        suite: Suite that the task is run in.
        steps: Budget of the task.
    """
    return EvaluationSettings(
        seeds=suite.seeds,
        steps=steps,
        horizons=[steps],
        tuning_seeds=suite.tuning_seeds,
        rows=suite.rows,
        baselines=[],
        multipliers=[],
    )


def with_one_form(made: Entry, problems: Problems) -> Problems:
    """The problems with one form of the inner steps for all leagues, so that one compilation serves them all."""
    form = step_backend(made.at(_grid(made.competitor)), problems.optimisee, problems.settings)
    settings = problems.settings.model_copy(update={"backend": form.backend, "rows": form.rows})
    return replace(problems, settings=settings)


def rates_tried(made: Entry, problems: Problems) -> dict[float, float]:
    """Each rate of the grid → its mean loss on held-out samples at the end, on the problems of the tuning."""
    (tried,) = tuning_losses(made.at(_grid(made.competitor)), problems)["test"].values()
    return {run.rate: loss for run, loss in tried.items()}


def self_tuned_rate(losses: Mapping[str, Mapping[float, float]]) -> float:
    """The one rate for all tasks: the lowest mean over tasks of log(loss / the best rate's loss).

    A ratio counts as at most `WORST`, and so does a run that diverged: no single task decides.

    Args:
        losses: Name of a task → rate → loss, the same rates for every task.
    """

    def regret(rate: float) -> float:
        return fmean(_log_ratio(by_rate[rate], min(by_rate.values())) for by_rate in losses.values())

    return min(next(iter(losses.values())), key=regret)


def _log_ratio(loss: float, best: float) -> float:
    if not math.isfinite(loss) or (best <= 0 < loss):
        return math.log(WORST)
    # Below 0 ratios say nothing: such a task decides nothing.
    return min(math.log(loss / best), math.log(WORST)) if best > 0 else 0.0


def task_runs(made: Entry, task: TaskInfo, problems: Problems, self_tuned: float | None) -> list[TaskRun]:
    """The runs of a competitor on a task, one for each of its leagues.

    Args:
        made: Competitor on the task.
        task: Task.
        problems: Problems of the task, and how runs on them are made.
        self_tuned: Rate of the self-tuned league; None where no task has chosen one.
    """
    competitor = made.competitor
    rates: dict[League, Sequence[float]] = {}
    if "untuned" in competitor.leagues and competitor.untuned is not None:
        rates["untuned"] = [competitor.untuned]
    if "self-tuned" in competitor.leagues and self_tuned is not None:
        rates["self-tuned"] = [self_tuned]
    if "tuned" in competitor.leagues:
        rates["tuned"] = _grid(competitor)
    return [_task_run(made, task, problems, league, grid) for league, grid in rates.items()]


def _task_run(made: Entry, task: TaskInfo, problems: Problems, league: League, rates: Sequence[float]) -> TaskRun:
    run = optimiser_run(made.at(rates), problems)
    chosen = {split: run.chosen[split][task.steps].rate if run.chosen else rates[0] for split in SPLITS}
    return TaskRun(
        task.name,
        made.competitor.name,
        kind_of(made.competitor),
        league,
        {split: chosen[split] for split in ("train", "test")},
        len(rates),
        {split: run.losses[split] for split in ("train", "test")},
        run.first,
        run.seconds,
        tuple(run.warnings),
    )


def step_seconds(made: Entry, steps: int, runs: int = 1) -> float:
    """The time of one eager step of one run, without compilation: what a user's own training loop takes.

    Args:
        made: Competitor on the task.
        steps: Budget of the task, which schedules are told.
        runs: Number of runs made together, of which the time is divided.
    """
    rate = made.competitor.untuned or made.competitor.rates[0]
    runner = made.at([rate]).at(rate, steps).build(slice(0, runs))

    def run(count: int) -> float:
        return run_free(runner, made.optimisee, list(range(runs)), [count], (), total_steps=steps).seconds

    first = run(3)  # whatever is made once is made here
    return run(min(200, max(3, math.ceil(TIMED / max(first * runs, 1e-6)))))


def rows_of(competitor: Competitor, suite: Suite) -> int:
    """The number of runs that a competitor makes on a task, at most."""
    leagues = {*competitor.leagues}
    # In the tuned league the training and the test loss may choose another rate each.
    reported = ("untuned" in leagues) + ("self-tuned" in leagues) + 2 * ("tuned" in leagues)
    tries = len(competitor.rates) if {"tuned", "self-tuned"} & leagues else 0
    return reported * suite.seeds + tries * suite.tuning_seeds


def _grid(competitor: Competitor) -> Sequence[float]:
    """The rates that are tried on each task."""
    needed = competitor.untuned if competitor.untuned is not None else competitor.rates[0]
    return competitor.rates if {"tuned", "self-tuned"} & {*competitor.leagues} else [needed]
