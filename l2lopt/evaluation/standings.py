"""Where the optimisers of a benchmark stand: its scores, task by task and over all tasks."""

import math
from collections.abc import Sequence
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

    The tasks of the meta-training are left out of all that is said over tasks, if there are others. Tasks on which the
    target's optimiser did not lower the loss are left out where a target is needed. A competitor without a run on a
    task has an infinite loss there.

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
        self.tasks = [task for task in result.tasks if task.split != "meta-training"] or list(result.tasks)
        """Tasks that count."""
        self.targeted = [task for task in self.tasks if task.name in self.targets]
        """Tasks that count and have a target."""

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

    def finals(self, entry: Competitor, tasks: Sequence[TaskInfo]) -> Tensor:
        """The final losses of a competitor, [T, S], finite or +∞.

        Args:
            entry: Competitor.
            tasks: Tasks of the rows, at least one.
        """
        rows = []
        for task in tasks:
            run = self.run(task.name, entry)
            row = torch.full((self.result.seeds,), torch.inf, dtype=torch.float64)
            rows.append(row if run is None else scores.finite_or_infinite(run.losses[self.split][task.steps]))
        return torch.stack(rows)

    def normalised(self, entry: Competitor, tasks: Sequence[TaskInfo]) -> Tensor:
        """The normalised final losses of a competitor, [T, S].

        Args:
            entry: Competitor.
            tasks: Tasks of the rows, at least one, all with a target.
        """
        rows = zip(self.finals(entry, tasks), tasks, strict=True)
        return torch.stack([self._normalised(row, task.name) for row, task in rows])

    def normalised_again(self, entry: Competitor, tasks: Sequence[TaskInfo]) -> Tensor:
        """The normalised final losses of a competitor in every resample, [B, T, S].

        Target and beginning move with the draws of the seeds, since they are means over the same problems.

        Args:
            entry: Competitor.
            tasks: Tasks of the rows, at least one, all with a target.
        """
        draws, losses = self.draws(len(tasks)), self.finals(entry, tasks)
        again = []
        for index, task in enumerate(tasks):
            run, plain = self._target_run(task.name), self.targets[task.name]
            assert run is not None, "a target has runs"
            found, drawn = run.losses[self.split], draws[:, index]
            own = scores.finite_or_infinite(found[max(found)])[drawn]
            room = (scores.beginning(found, run.first)[drawn] - own).mean(-1, keepdim=True)
            # Where the target did not lower the loss of the few problems drawn, the scale is that of all.
            room = torch.where(room > 0, room, plain.begin - plain.loss)
            again.append(scores.normalised(losses[index][drawn], own, room))
        return torch.stack(again, 1)

    def interquartile(self, entry: Competitor, tasks: Sequence[TaskInfo]) -> Interval | None:
        """The interquartile mean of the normalised final losses over the tasks with a target; None without any.

        The bounds are NaN where there is a single seed.

        Args:
            entry: Competitor.
            tasks: Tasks.
        """
        found = [task for task in tasks if task.name in self.targets]
        if not found:
            return None
        made = scores.interquartile_interval(self.normalised(entry, found), self.normalised_again(entry, found))
        return made if self.result.seeds > 1 else _unbounded(made)

    def duel(self, one: Competitor, other: Competitor) -> Duel:
        """How often the final losses of one competitor are below another's, over the tasks that count.

        The bounds are NaN where there is a single seed.
        """
        tasks = self.tasks
        made = scores.duel(self.finals(one, tasks), self.finals(other, tasks), self.draws(len(tasks)))
        if self.result.seeds > 1:
            return made
        return made._replace(below=_unbounded(made.below), improvement=_unbounded(made.improvement))

    def speed_ups(self, entry: Competitor) -> tuple[Tensor, Tensor]:
        """The speed-up on every task that counts and has a target, [T], and in every resample, [B, T].

        The target moves with the draws of the seeds, since it is a mean over the same problems.

        Args:
            entry: Competitor.
        """
        draws = self.draws(len(self.targeted))
        found = torch.zeros(len(self.targeted), dtype=torch.float64)
        again = torch.zeros(len(draws), len(self.targeted), dtype=torch.float64)
        for index, task in enumerate(self.targeted):
            run, target = self.run(task.name, entry), self._target_run(task.name)
            if run is None or target is None:
                continue
            steps, losses = scores.loss_matrix(run.losses[self.split])
            final = scores.finite_or_infinite(target.losses[self.split][task.steps])
            drawn = draws[:, index]
            found[index] = scores.speed_up(steps, losses.mean(-1), self.targets[task.name].loss, task.steps)
            again[:, index] = scores.speed_up(steps, losses[:, drawn].mean(-1), final[drawn].mean(-1), task.steps)
        return found, again

    def draws(self, tasks: int) -> Tensor:
        """The bootstrap's draws of the seeds, [B, T, S], the same for all competitors."""
        return scores.seed_draws(tasks, self.result.seeds, RESAMPLES, torch.Generator().manual_seed(_SEED))

    def seconds(self, run: TaskRun) -> float:
        """The time of one step of one seed: measured in quiet if it was, else as the runs were made."""
        return self.result.step_seconds.get(run.task, {}).get(run.optimiser, run.seconds)

    def lines(self) -> list[Score]:
        """The scores of every run, in the order of the result; without a target, +∞ and 0 stand for what needs one."""
        return [self._score(run) for run in self.result.runs]

    def _score(self, run: TaskRun) -> Score:
        losses, target = run.losses[self.split], self.targets.get(run.task)
        steps, matrix = scores.loss_matrix(losses)
        budget = max(losses)
        needed, quicker, scaled = torch.inf, 0.0, torch.inf
        if target is not None:
            needed = float(scores.steps_to_target(steps, matrix.mean(-1), target.loss))
            quicker = float(scores.speed_up(steps, matrix.mean(-1), target.loss, budget))
            scaled = float(scores.interquartile_mean(self._normalised(matrix[-1], run.task)))
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
            seconds_to_target=needed * self.seconds(run),
            speed_up=quicker,
            normalised=scaled,
        )

    def _normalised(self, finals: Tensor, task: str) -> Tensor:
        """The normalised final losses of a competitor on a task with a target, [S]."""
        run, target = self._target_run(task), self.targets[task]
        assert run is not None, "a target has runs"
        found = run.losses[self.split]
        own = scores.finite_or_infinite(found[max(found)])
        return scores.normalised(finals, own, target.begin - target.loss)

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


def _unbounded(found: Interval) -> Interval:
    """The value alone: a resample of a single seed says nothing of others."""
    return found._replace(low=math.nan, high=math.nan)
