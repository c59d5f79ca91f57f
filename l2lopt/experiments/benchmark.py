"""Benchmarks: many optimisers on many tasks, every run cached, one report."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.types import Report, silent
from l2lopt.evaluation import suites
from l2lopt.evaluation.benchmark_board import write_board
from l2lopt.evaluation.benchmark_report import write_report
from l2lopt.evaluation.benchmark_result import BenchmarkResult, check_beside, joined, read_result
from l2lopt.evaluation.suites import Catalogue, Competitor, Suite
from l2lopt.evaluation.tuned_runs import check_heldout
from l2lopt.experiments import benchmark_jobs, run_facts, run_folder
from l2lopt.experiments import config as configs
from l2lopt.experiments.benchmark_jobs import Plan, PlannedTask
from l2lopt.optimisee import Optimisee
from l2lopt.parallel import processes
from l2lopt.storage import toml_file
from l2lopt.storage.run_lock import locked
from l2lopt.storage.run_log import clear_unfinished

_log = logging.getLogger("l2lopt")
SMALLEST = "smoke"
"""Suite of those who name none."""
OWN = "small"
"""Suite whose competitors meet on a user's own tasks."""
STEPS = 200
"""Budget of a user's own task."""


def benchmark(
    suite: str | Path | None = None,
    folder: str | Path | None = None,
    *,
    tasks: Mapping[str, Optimisee | Choice] | None = None,
    optimisers: Mapping[str, Competitor | Mapping[str, Any]] | None = None,
    steps: int | None = None,
    changes: Sequence[str] = (),
    cache: str | Path | None = None,
    beside: str | Path | None = None,
    jobs: int = 1,
    report: Report = silent,
) -> BenchmarkResult:
    """Optimisers on a suite of tasks, or on your own, as one page to read.

    Three leagues: untuned, one setting for all tasks; self-tuned, the one rate that is best on the suite's
    meta-training tasks, used on all; tuned, the best of a grid on each task. All optimisers meet the same initial
    values and batches; rates are chosen on held-out samples and on other seeds than those that are reported. See
    `evaluation.benchmark` for the protocol, and `evaluation.scores` for the figures of merit.

    Every run is cached by all that it depends on, so a benchmark that was stopped goes on, and others share its runs,
    as do studies that are given the same `cache`.

    Args:
        suite: Name of a shipped suite ("smoke": minutes, "small": an hour, "full": a night, on two cores), or the path
            of a TOML file; None: "smoke", and for tasks of your own "small", whose competitors are more.
        folder: Folder that gets the report; by default runs/benchmark-<name of the suite>.
        tasks: Name → problem of your own, in place of the suite's tasks: an `Optimisee`, such as `make_optimisee`
            gives, or the choice of one.
        optimisers: Name → competitor, or its settings as a table, in place of the suite's.
        steps: Budget of every task; by default the suite's, and 200 for tasks of your own.
        changes: Changes to the suite, such as "seeds=3".
        cache: Folder of the cached runs; by default `cache` beside the report's folder.
        beside: File of an earlier result, `benchmark.json`, whose runs stand in the report wherever this benchmark has
            none, so that a new rule meets baselines that were tuned elsewhere; see `benchmark_result.joined`.
        jobs: Number of processes that make runs at the same time; 1 for problems that were made in Python.
            With more, a script's own work must be under `if __name__ == "__main__":`.
        report: Progress.

    Returns:
        All losses and times, from which the report in `folder` is made, see `evaluation.benchmark_report`.

    Raises:
        UserError: For a mistake in the suite, where none of its tasks or competitors can take part, and for an earlier
            result of other problems.

    Example:
        >>> import l2lopt
        >>> result = l2lopt.benchmark("smoke", "runs/smoke", jobs=2)  # five minutes  # doctest: +SKIP
    """
    _check_call(tasks, optimisers, steps, jobs)
    benchmark_jobs.forget_problems()
    earlier = None if beside is None else read_result(Path(beside))
    name, asked = load_suite(suite or (SMALLEST if tasks is None else OWN), changes)
    if optimisers is not None:
        asked = asked.model_copy(update={"competitors": [_competitor(*item) for item in optimisers.items()]})
    asked = asked.model_copy(update={"competitors": _installed(asked.competitors)})
    if tasks is None:
        planned = _available(asked, suites.load_catalogue(configs.shipped("suites/tasks.toml")), steps)
    else:
        name, planned = "own", [PlannedTask(key, key, "own", steps or STEPS, task) for key, task in tasks.items()]
    asked = asked.model_copy(update={"competitors": _with_a_league(asked.competitors, planned)})
    _check_plan(asked, planned, earlier)
    if jobs > 1 and any(isinstance(task.optimisee, Optimisee) for task in planned):
        remedy = "drop jobs, or name a function that makes the problem, such as 'module:function'"
        raise UserError("jobs", expected="1 for problems made in Python", found=str(jobs), remedy=remedy)
    home = Path(folder or Path("runs") / f"benchmark-{name}")
    plan = Plan(asked, tuple(planned), Path(cache or home.parent / "cache"))
    with ExitStack() as held, processes.together():
        if jobs > 1 and processes.ranks() > 1:
            raise UserError("jobs", expected="1 under torchrun", found=str(jobs), remedy="drop --jobs, or torchrun")
        processes.on_first(lambda: held.enter_context(locked(home)))
        processes.on_first(partial(_prepare, home, plan.cache))
        infos, runs, seconds = benchmark_jobs.make_runs(plan, jobs, report)
        proper = {one.name: one.proper_name for one in asked.competitors}
        facts: dict[str, Any] = {"step_seconds": seconds, "environment": benchmark_jobs.environment(), "proper": proper}
        result = BenchmarkResult(name, asked.seeds, tuple(infos), tuple(runs), **facts)
        result = result if earlier is None else joined(result, earlier)
        processes.on_first(lambda: _write(result, home))
    return result


def load_suite(source: str | Path, changes: Sequence[str] = ()) -> tuple[str, Suite]:
    """A suite and its name, from a TOML file or the name of a shipped one, with changes made to it.

    Args:
        source: Path, or the name of a shipped suite.
        changes: Changes, such as "seeds=3".

    Raises:
        UserError: For a missing file, one that is not TOML, the file of another command, or a mistake in it.
    """
    path = configs.find(source, "suites", "a suite's file")
    return path.stem, configs.load(path, changes, kind=Suite)


def _prepare(home: Path, cache: Path) -> None:
    """Refuses a cache that cannot be written in, and clears both folders of what killed processes have left."""
    run_folder.writable(cache, "choose another --cache")
    for folder in (home, cache):
        clear_unfinished(folder)


def _write(result: BenchmarkResult, folder: Path) -> None:
    """Writes the report, and the events of TensorBoard in place of an earlier report's."""
    paths = write_report(result, folder)
    run_folder.remove_events(folder / "tensorboard")
    write_board(result, folder / "tensorboard", paths)


def _check_call(tasks: Any, optimisers: Any, steps: Any, jobs: Any) -> None:
    """Refuses arguments that no benchmark can be made of."""
    for name, value in (("steps", steps), ("jobs", jobs)):
        if value is not None and (not isinstance(value, int) or value < 1):
            found = str(value) if isinstance(value, int) else f"a {type(value).__name__}"
            raise UserError(name, expected="at least 1", found=found, remedy="change the value")
    for name, given in (("tasks", tasks), ("optimisers", optimisers)):
        if given is not None and not isinstance(given, Mapping):
            found, remedy = f"a {type(given).__name__}", 'give {"mine": …}'
            raise UserError(name, expected="a name for each", found=found, remedy=remedy)
    if tasks is not None and not tasks:
        raise UserError("tasks", expected="at least one", found="none", remedy="leave it out for the suite's own")
    for name, task in (tasks or {}).items():
        if not isinstance(task, Optimisee | str | Mapping):
            expected, found = "an Optimisee, or the choice of one", f"a {type(task).__name__}"
            remedy = "make one with l2lopt.make_optimisee"
            raise UserError(f"task {name!r}", expected=expected, found=found, remedy=remedy)
        if not isinstance(task, Optimisee):
            toml_file.check(f"task {name!r}", task)


def _check_plan(suite: Suite, planned: Sequence[PlannedTask], earlier: BenchmarkResult | None) -> None:
    """Refuses an earlier result that cannot stand beside, and tasks on which no rate can be chosen, before any run."""
    if earlier is not None:
        check_beside(earlier, suite.seeds, {task.name: task.steps for task in planned})
    if any(len(one.rates) > 1 and "tuned" in one.leagues for one in suite.competitors):
        for number, task in enumerate(planned):
            if task.split == "own":
                check_heldout(benchmark_jobs.optimisee_of(planned, number), f"task {task.name!r}")


def _competitor(name: str, given: Any) -> Competitor:
    if not isinstance(given, Competitor | Mapping):
        found = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
        expected, remedy = "a table", "give for instance {'optimiser': 'adam', 'rates': [0.001, 0.01]}"
        raise UserError(f"optimiser {name!r}", expected=expected, found=found, remedy=remedy)
    made = given if isinstance(given, Competitor) else configs.load(given, kind=Competitor)
    return made.model_copy(update={"label": name})


def _installed(competitors: Sequence[Competitor]) -> list[Competitor]:
    """The competitors whose packages are there; the others are named in the log."""
    absent = {one.name: package for one in competitors if (package := _absent(one)) is not None}
    if absent:
        said = ", ".join(f"{name} (pip install {package})" for name, package in absent.items())
        _log.warning("left out, as its package is not installed: %s", said)
    left = [one for one in competitors if one.name not in absent]
    if not competitors:
        raise UserError("optimisers", expected="at least one", found="none", remedy="leave it out for the suite's own")
    if not left:
        raise UserError("competitors", expected="at least one", found="none that is installed", remedy="install one")
    return left


def _with_a_league(competitors: Sequence[Competitor], planned: Sequence[PlannedTask]) -> list[Competitor]:
    """The competitors that run in some league on these tasks; the others are named in the log."""
    chosen = any(task.split == "meta-training" for task in planned)

    def runs_in(one: Competitor) -> bool:
        return any(
            {"untuned": one.untuned is not None, "self-tuned": chosen, "tuned": True}[league] for league in one.leagues
        )

    left = [one for one in competitors if runs_in(one)]
    absent = ", ".join(one.name for one in competitors if one not in left)
    if absent:
        reason = "as no task of the meta-training chooses their self-tuned rate, or without a rate"
        _log.warning("left out, %s: %s", reason, absent)
    if not left:
        remedy = "add the league tuned, or untuned with a rate"
        raise UserError("competitors", expected="at least one", found="none with a league here", remedy=remedy)
    return left


def _absent(competitor: Competitor) -> str | None:
    """The package of a competitor that is not installed."""
    package = run_facts.package_of(competitor)
    return None if package in (None, run_facts.MAIN) or find_spec(package) is not None else package


def _available(suite: Suite, catalogue: Catalogue, steps: int | None) -> list[PlannedTask]:
    """The tasks of a suite whose data are there; the others are named in the log."""
    planned = []
    absent: dict[str, list[str]] = {}
    for name, task in suites.selected(suite.tasks, catalogue).items():
        if task.needs and not suites.has_data(task):
            absent.setdefault(task.needs, []).append(name)
            continue
        budget = steps or getattr(task, suite.budget)
        split = catalogue.families[task.family]
        planned.append(PlannedTask(name, task.family, split, budget, task.optimisee, task.description))
    for data, names in absent.items():
        _log.warning("left out, as the data %r are not under L2LOPT_DATA: %s", data, ", ".join(names))
    if not planned:
        raise UserError("tasks", expected="at least one whose data are there", found="none", remedy="set L2LOPT_DATA")
    return planned
