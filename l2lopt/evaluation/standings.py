"""Where the optimisers of a benchmark stand: its scores, task by task and over all tasks."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.evaluation import scores
from l2lopt.evaluation.benchmark_result import LEAGUES, BenchmarkResult, Kind, League, LossSplit, TaskInfo, TaskRun
from l2lopt.evaluation.scores import Duel, Interval

RESAMPLES = 1000
"""Number of bootstrap resamples."""
_SEED = 0
"""Seed of the bootstrap: the same result gives the same intervals."""


class Competitor(NamedTuple):
    """An optimiser in one league.

    Attributes:
        optimiser: Name.
        kind: Kind.
        league: League.
    """

    optimiser: str
    kind: Kind
    league: League

    @property
    def label(self) -> str:
        """Name and league."""
        return f"{self.optimiser}, {self.league}"


class Target(NamedTuple):
    """What a task's losses are measured by.

    Attributes:
        begin: Mean loss at the beginning.
        loss: Mean final loss of the target's optimiser.
    """

    begin: float
    loss: float


class Score(NamedTuple):
    """The scores of one competitor on one task, a line of `scores.csv`.

    Attributes:
        task: Name of the task.
        optimiser: Name of the optimiser.
        kind: Kind of the optimiser.
        league: League.
        split: Split of the losses.
        rate: Rate of the runs.
        final: Mean final loss; infinite if a run has diverged to what is no number.
        best: Mean over seeds of the lowest loss recorded.
        diverged: Number of seeds that end above their beginning or at no finite loss.
        steps_to_target: Steps until the mean curve reaches the target; infinite if it never does.
        seconds_to_target: Time of these steps.
        speed_up: Budget over steps to the target; 0 if it is never reached.
        normalised: Interquartile mean over seeds of the normalised final loss.
    """

    task: str
    optimiser: str
    kind: Kind
    league: League
    split: LossSplit
    rate: float
    final: float
    best: float
    diverged: int
    steps_to_target: float
    seconds_to_target: float
    speed_up: float
    normalised: float


class Standings:
    """The scores of a benchmark on one split.

    The tasks of the meta-training are left out of all that is said over tasks, if there are others, and so are tasks on
    which the target's optimiser has learned nothing. A competitor without a run on a task has an infinite loss there.

    Args:
        result: Result of the benchmark.
        split: Split whose losses are compared.
    """

    def __init__(self, result: BenchmarkResult, split: LossSplit = "test") -> None:
        self.result, self.split = result, split
        self.runs = {(run.task, run.optimiser, run.league): run for run in result.runs}
        found = dict.fromkeys(Competitor(run.optimiser, run.kind, run.league) for run in result.runs)
        self.competitors = sorted(found, key=lambda entry: LEAGUES.index(entry.league))
        """Competitors, league by league, in the order of the result."""
        self.targets = {task.name: target for task in result.tasks if (target := self._target(task.name))}
        """Name of a task → target, where there is one."""
        scored = [task for task in result.tasks if task.name in self.targets]
        self.tasks = [task for task in scored if task.split != "meta-training"] or scored
        """Tasks that count."""

    def field(self, league: League) -> list[Competitor]:
        """The competitors one would choose between: the learned rules and the harness untuned, the rest in a league.

        Args:
            league: League of the baselines.
        """
        untuned = {entry.optimiser for entry in self.competitors if entry.league == "untuned"}
        chosen = [
            entry
            for entry in self.competitors
            if entry.league == ("untuned" if entry.kind != "baseline" and entry.optimiser in untuned else league)
        ]
        order = ("learned", "harness", "baseline")
        return sorted(chosen, key=lambda entry: order.index(entry.kind))

    def run(self, task: str, entry: Competitor) -> TaskRun | None:
        """The runs of a competitor on a task; None where there are none."""
        return self.runs.get((task, entry.optimiser, entry.league))

    def finals(self, entry: Competitor, tasks: Sequence[TaskInfo] | None = None, scaled: bool = False) -> Tensor:
        """The final losses of a competitor, [T, S], finite or +∞.

        Args:
            entry: Competitor.
            tasks: Tasks with a target; by default all that count.
            scaled: Whether the losses are normalised.
        """
        rows = []
        for task in self.tasks if tasks is None else tasks:
            run = self.run(task.name, entry)
            row = torch.full((self.result.seeds,), torch.inf, dtype=torch.float64)
            if run is not None:
                row = scores.finite_or_infinite(run.losses[self.split][task.steps])
            rows.append(scores.normalised(row, *self.targets[task.name]) if scaled else row)
        return torch.stack(rows) if rows else torch.empty(0, self.result.seeds, dtype=torch.float64)

    def normalised(self, entry: Competitor, tasks: Sequence[TaskInfo] | None = None) -> Interval | None:
        """The interquartile mean of the normalised final losses over tasks and seeds; None without tasks.

        Args:
            entry: Competitor.
            tasks: Tasks with a target; by default all that count.
        """
        values = self.finals(entry, tasks, scaled=True)
        if not len(values):
            return None
        draws = self.draws if tasks is None else self._draws(len(values))
        return scores.interquartile_interval(values, draws)

    def duel(self, one: Competitor, other: Competitor) -> Duel | None:
        """How often the final losses of one competitor are below another's; None without tasks."""
        return scores.duel(self.finals(one), self.finals(other), self.draws) if self.tasks else None

    def speed_ups(self, entry: Competitor) -> tuple[Tensor, Tensor]:
        """The speed-up on every task that counts, [T], and in every resample, [B, T].

        The target moves with the draws of the seeds, since it is a mean over the same problems.

        Args:
            entry: Competitor.
        """
        found, again = [], []
        for index, task in enumerate(self.tasks):
            run, target = self.run(task.name, entry), self._target_run(task.name)
            assert target is not None  # or the task would not count
            if run is None:
                found.append(torch.zeros((), dtype=torch.float64))
                again.append(torch.zeros(len(self.draws), dtype=torch.float64))
                continue
            steps, losses = scores.loss_matrix(run.losses[self.split])
            final = scores.finite_or_infinite(target.losses[self.split][task.steps])
            drawn = self.draws[:, index]
            found.append(scores.speed_up(steps, losses.mean(-1), self.targets[task.name].loss, task.steps))
            again.append(scores.speed_up(steps, losses[:, drawn].mean(-1), final[drawn].mean(-1), task.steps))
        empty = torch.empty(0, dtype=torch.float64)
        if not found:
            return empty, empty[None]
        return torch.stack(found), torch.stack(again, dim=-1)

    def seconds(self, task: str, optimiser: str, run: TaskRun) -> float:
        """The time of one step: measured in quiet if it was, else as the runs were made."""
        return self.result.step_seconds.get(task, {}).get(optimiser, run.seconds)

    def scores(self) -> list[Score]:
        """The scores of every run, in the order of the result; without a target, +∞ and 0 stand for what needs one."""
        return [self._score(run) for run in self.result.runs]

    @cached_property
    def draws(self) -> Tensor:
        """The bootstrap's seeds for the tasks that count."""
        return self._draws(len(self.tasks))

    def _draws(self, tasks: int) -> Tensor:
        return scores.seed_draws(tasks, self.result.seeds, RESAMPLES, torch.Generator().manual_seed(_SEED))

    def _score(self, run: TaskRun) -> Score:
        losses, target = run.losses[self.split], self.targets.get(run.task)
        steps, matrix = scores.loss_matrix(losses)
        budget = max(losses)
        needed, quicker, scaled = torch.inf, 0.0, torch.inf
        if target is not None:
            needed = float(scores.steps_to_target(steps, matrix.mean(-1), target.loss))
            quicker = float(scores.speed_up(steps, matrix.mean(-1), target.loss, budget))
            scaled = float(scores.interquartile_mean(scores.normalised(matrix[-1], *target)))
        return Score(
            run.task,
            run.optimiser,
            run.kind,
            run.league,
            self.split,
            run.rates[self.split],
            final=float(matrix[-1].mean()),
            best=float(matrix.amin(0).mean()),
            diverged=int(scores.diverged(losses, run.first).sum()),
            steps_to_target=needed,
            seconds_to_target=needed * self.seconds(run.task, run.optimiser, run),
            speed_up=quicker,
            normalised=scaled,
        )

    def _target_run(self, task: str) -> TaskRun | None:
        """The runs of the target's optimiser in the league of the most effort."""
        name = self.result.target_optimiser
        return next((run for league in LEAGUES[::-1] if (run := self.runs.get((task, name, league)))), None)

    def _target(self, task: str) -> Target | None:
        """The target of a task; None where its optimiser did not run, diverged or did not lower the loss."""
        run = self._target_run(task)
        if run is None:
            return None
        losses = run.losses[self.split]
        begin = float(scores.beginning(losses, run.first).mean())
        loss = float(scores.finite_or_infinite(losses[max(losses)]).mean())
        return Target(begin, loss) if loss < begin < torch.inf else None
