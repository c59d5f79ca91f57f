"""The result of a benchmark: tasks, runs and their losses, written to a JSON file and read again."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import read_bytes, write_text

League: TypeAlias = Literal["untuned", "self-tuned", "tuned"]
"""How the settings of a run were found. "untuned": one setting for all tasks. "self-tuned": the one rate that is best
on the meta-training tasks, used on all. "tuned": the best of `TaskRun.trials` rates tried on each task."""
LEAGUES: tuple[League, ...] = ("untuned", "self-tuned", "tuned")
"""The leagues, by rising effort."""
TaskSplit: TypeAlias = Literal["meta-training", "validation", "held-out", "own"]
"""What a task is for. "meta-training": seen by learned rules, and by the choice of self-tuned rates. "validation":
seen by neither, but by the people who choose between rules. "held-out": seen by nobody. "own": a user's task."""
Kind: TypeAlias = Literal["learned", "harness", "baseline"]
"""What an optimiser is. "harness": the hand-designed rule around which the shipped learned rules are built."""
LossSplit: TypeAlias = Literal["train", "test"]
"""Samples on which a loss was measured."""

_FORMAT = 1
"""Version of the JSON format."""


class TaskInfo(NamedTuple):
    """A task of a benchmark.

    Attributes:
        name: Unique name.
        family: Name of the family, whose tasks share data or architecture.
        split: Purpose of the task.
        steps: Budget of steps, the last step of every run.
        parameters: Number of coordinates of the optimisee.
        description: One line for readers.
        problem: Digest of what tells its problem from others; empty where it is not known.
    """

    name: str
    family: str
    split: TaskSplit
    steps: int
    parameters: int
    description: str = ""
    problem: str = ""


@dataclass(frozen=True)
class TaskRun:
    """The runs of one optimiser on one task in one league, over all seeds.

    Attributes:
        task: Name of the task.
        optimiser: Name of the optimiser, the same in all leagues and tasks.
        kind: Kind of the optimiser.
        league: League of the runs.
        rates: Reported split → rate of the runs whose loss is reported; the two are equal where nothing was tuned.
        trials: Number of settings from which the rate was chosen; 1 where nothing was tuned.
        losses: Split → step → loss of each seed, [S]; NaN where a run has diverged. The last step is the budget.
        first: Loss of each seed at step 0 in training mode, [S].
        seconds: Time of one step of one seed, as the runs were made.
        warnings: Remarks for readers, such as a best rate at the end of its grid.
    """

    task: str
    optimiser: str
    kind: Kind
    league: League
    rates: Mapping[LossSplit, float]
    trials: int
    losses: Mapping[LossSplit, Mapping[int, Tensor]]
    first: Tensor
    seconds: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchmarkResult:
    """All that a benchmark has found: the report is a function of it alone.

    Attributes:
        suite: Name of the suite.
        seeds: Number of seeds of every run.
        tasks: Tasks, in the order of the report.
        runs: Runs, at most one for each task, optimiser and league.
        target_optimiser: Name of the baseline whose tuned final loss is the target of a task.
        step_seconds: Task → optimiser → time of one step, measured apart from the runs on a quiet machine; may be
            empty.
        environment: Facts for readers, such as the processor, the versions and the command, none of them a date.
        proper: Optimiser → name in figures, of those that have one beside the name in the tables.

    Raises:
        UserError: For a name that stands twice, a run of an unknown task, or losses of other seeds or steps.

    Example:
        >>> import torch
        >>> task = TaskInfo("digits-mlp", "digits", "held-out", steps=10, parameters=2410)
        >>> losses = {split: {10: torch.tensor([0.5, 0.7])} for split in ("train", "test")}
        >>> run = TaskRun(task.name, "adamw", "baseline", "tuned", {"train": 1e-3, "test": 1e-3}, 9, losses,
        ...               first=torch.tensor([2.3, 2.3]), seconds=1e-3)
        >>> result = BenchmarkResult("mine", 2, (task,), (run,))
        >>> BenchmarkResult.from_json(result.to_json()).runs[0].losses["test"][10].tolist()
        [0.5, 0.699999988079071]
    """

    suite: str
    seeds: int
    tasks: tuple[TaskInfo, ...]
    runs: tuple[TaskRun, ...]
    target_optimiser: str = "adamw"
    step_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    proper: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        budgets = {task.name: task.steps for task in self.tasks}
        keys = [(run.task, run.optimiser, run.league) for run in self.runs]
        for what, found in (("task", Counter(names)), ("run", Counter(keys))):
            if twice := next((key for key, count in found.items() if count > 1), None):
                raise _mistake(f"one {what} of each name", f"{twice} twice")
        for run in self.runs:
            if run.task not in names:
                raise _mistake(f"runs of the tasks {', '.join(names)}", f"one of {run.task}")
            where = f"{run.optimiser} on {run.task}"
            if run.league not in LEAGUES or run.kind not in get_args(Kind):
                unknown = f"{run.kind} in {run.league}: {where}"
                raise _mistake(f"one of {', '.join(get_args(Kind))} in {', '.join(LEAGUES)}", unknown)
            if run.rates.keys() != {"train", "test"} or not all(isinstance(one, Real) for one in run.rates.values()):
                raise _mistake("a rate for train and one for test", f"others in {where}")
            if {split: max(steps, default=None) for split, steps in run.losses.items()} != dict.fromkeys(
                ("train", "test"), budgets[run.task]
            ):
                raise _mistake(f"train and test losses up to step {budgets[run.task]}", f"others in {where}")
            shapes = {tuple(row.shape) for steps in run.losses.values() for row in steps.values()}
            if {*shapes, tuple(run.first.shape)} != {(self.seeds,)}:
                raise _mistake(f"losses of {self.seeds} seeds", f"others in {where}")

    def to_json(self) -> dict[str, Any]:
        """The result in what JSON can say; a number that is not finite is None."""
        return {
            "format": _FORMAT,
            "suite": self.suite,
            "seeds": self.seeds,
            "target_optimiser": self.target_optimiser,
            "environment": dict(self.environment),
            "proper": dict(self.proper),
            "step_seconds": {
                task: {name: _or_none(seconds) for name, seconds in found.items()}
                for task, found in self.step_seconds.items()
            },
            "tasks": [task._asdict() for task in self.tasks],
            "runs": [_run_facts(run) for run in self.runs],
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "BenchmarkResult":
        """The result that `to_json` has given; losses are float64, which holds every float32 exactly.

        Args:
            facts: Result in what JSON can say; None in a list of losses is NaN.

        Raises:
            UserError: For facts that are no result of a benchmark.
        """
        try:
            if facts["format"] != _FORMAT:
                raise _mistake(f"format {_FORMAT}", f"{facts['format']}")
            tasks = tuple(TaskInfo(**task) for task in facts["tasks"])
            timed = {
                task: {name: _or_nan(seconds) for name, seconds in found.items()}
                for task, found in facts["step_seconds"].items()
            }
            rest = {name: facts[name] for name in ("suite", "seeds", "target_optimiser", "environment")}
            rest["proper"] = dict(facts.get("proper", {}))  # older files do not have it
            return cls(tasks=tasks, runs=tuple(map(_run_of, facts["runs"])), step_seconds=timed, **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise _mistake("the result of a benchmark", f"{type(error).__name__}: {error}") from None


def joined(result: BenchmarkResult, earlier: BenchmarkResult) -> BenchmarkResult:
    """A result with the runs of an earlier one on the same tasks, wherever it has none of its own.

    A learned rule of the result takes the place of an earlier rule of its name in all leagues. Times of another machine
    compare with nothing here: they are left out, unless processor and versions are the same.

    Args:
        result: Result.
        earlier: Result of the same seeds; its other tasks are left out.

    Raises:
        UserError: For other seeds, budgets or problems, or another loss at step 0 of the same task.
    """
    check_beside(earlier, result.seeds, {task.name: task.steps for task in result.tasks})
    tasks, begun = {task.name: task for task in result.tasks}, {run.task: run.first for run in result.runs}
    for task in earlier.tasks:
        known = {task.problem, tasks[task.name].problem if task.name in tasks else ""} - {""}
        if len(known) > 1:
            raise _unlike(f"the problem {task.name} of this benchmark", "another of that name")
    own = {(run.task, run.optimiser, run.league) for run in result.runs}
    learned = {run.optimiser for run in result.runs if run.kind == "learned"}
    own_place, *others = _places(result.environment) + _places(earlier.environment)
    same = own_place == _places(earlier.environment)[0]
    runs, timed = list(result.runs), {task: dict(found) for task, found in result.step_seconds.items()}
    for run in earlier.runs:
        if run.task not in tasks or run.optimiser in learned or (run.task, run.optimiser, run.league) in own:
            continue
        if run.task in begun and not torch.allclose(run.first.double(), begun[run.task].double(), rtol=1e-3):
            raise _unlike(f"the same losses at step 0 of {run.task}", "others")
        runs.append(run if same else replace(run, seconds=math.nan))
        if same and run.optimiser in earlier.step_seconds.get(run.task, {}):
            timed.setdefault(run.task, {}).setdefault(run.optimiser, earlier.step_seconds[run.task][run.optimiser])
    beside = "; ".join(dict.fromkeys(place for place in others if place != own_place))
    environment = {**result.environment, **({_BESIDE: beside} if beside else {})}
    proper = {**earlier.proper, **result.proper}
    return replace(result, runs=tuple(runs), step_seconds=timed, environment=environment, proper=proper)


def check_beside(earlier: BenchmarkResult, seeds: int, steps: Mapping[str, int]) -> None:
    """Refuses an earlier result that cannot stand beside a benchmark, before any of its runs.

    Args:
        earlier: Result of the earlier benchmark.
        seeds: Number of seeds of every run.
        steps: Task → budget.

    Raises:
        UserError: For other seeds, or another budget of a task that both have.
    """
    if earlier.seeds != seeds:
        raise _unlike(f"{seeds} seeds", f"{earlier.seeds}")
    for task in earlier.tasks:
        if task.steps != steps.get(task.name, task.steps):
            raise _unlike(f"{steps[task.name]} steps of {task.name}", f"{task.steps}")


def _places(environment: Mapping[str, str]) -> list[str]:
    """Where a result was made, then where the runs beside it were."""
    own = ", ".join(f"{key} {value}" for key, value in environment.items() if key != _BESIDE)
    return [own, *filter(None, environment.get(_BESIDE, "").split("; "))]


_BESIDE = "beside runs of"
"""Key of `environment`: each other machine, with its versions, on which some of the runs were made."""


def _unlike(expected: str, found: str) -> UserError:
    return UserError("beside", expected=expected, found=found, remedy="take a result of this suite, or run it here")


def write_result(path: Path, result: BenchmarkResult) -> None:
    """Writes a result as JSON, by rename.

    Args:
        path: File to write.
        result: Result.
    """
    # On one line: a line for each number, as `write_json` gives it, would treble the size of a large file.
    write_text(path, json.dumps(result.to_json(), allow_nan=False) + "\n")


def read_result(path: Path) -> BenchmarkResult:
    """The result that `write_result` has written.

    Args:
        path: File to read.

    Raises:
        UserError: For a missing file, or one with anything else in it.
    """
    written = read_bytes(path, "the result of a benchmark", "run l2lopt benchmark first")
    try:
        return BenchmarkResult.from_json(json.loads(written))
    except (ValueError, ArithmeticError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        found, remedy = f"{error}", "run l2lopt benchmark again"
        raise UserError(str(path), expected="the result of a benchmark", found=found, remedy=remedy) from None


def _run_facts(run: TaskRun) -> dict[str, Any]:
    losses = {split: {str(step): _row(row) for step, row in steps.items()} for split, steps in run.losses.items()}
    return {
        "task": run.task,
        "optimiser": run.optimiser,
        "kind": run.kind,
        "league": run.league,
        "rates": dict(run.rates),
        "trials": run.trials,
        "seconds": _or_none(run.seconds),
        "warnings": list(run.warnings),
        "first": _row(run.first),
        "losses": losses,
    }


def _run_of(facts: Mapping[str, Any]) -> TaskRun:
    losses: dict[Any, dict[int, Tensor]] = {
        split: {int(step): _tensor(row) for step, row in steps.items()} for split, steps in facts["losses"].items()
    }
    rest = {name: facts[name] for name in ("task", "optimiser", "kind", "league", "rates", "trials")}
    seconds, warnings = _or_nan(facts["seconds"]), tuple(facts["warnings"])
    return TaskRun(losses=losses, first=_tensor(facts["first"]), seconds=seconds, warnings=warnings, **rest)


def _row(losses: Tensor) -> list[float | None]:
    return [_or_none(loss) for loss in losses.tolist()]


def _tensor(row: Sequence[float | None]) -> Tensor:
    return torch.tensor([_or_nan(loss) for loss in row], dtype=torch.float64)


def _or_none(value: float) -> float | None:
    """The value where JSON has a number for it."""
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _mistake(expected: str, found: str) -> UserError:
    return UserError("benchmark result", expected=expected, found=found, remedy="run l2lopt benchmark again")
