"""The runs of a benchmark: what each depends on, where it is cached, in which order they are made."""

import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

import optimisees
from l2lopt.core.layout import Layout
from l2lopt.core.registry import Choice
from l2lopt.core.types import Report, silent
from l2lopt.evaluation import benchmark as protocol
from l2lopt.evaluation.benchmark_result import TaskInfo, TaskRun, TaskSplit
from l2lopt.evaluation.free_runs import RunCache
from l2lopt.evaluation.suites import Suite
from l2lopt.evaluation.tuned_runs import Problems, check_baseline
from l2lopt.experiments import run_facts
from l2lopt.experiments.cost_forecast import format_duration
from l2lopt.experiments.run_cache import FileCache, MissingRunError
from l2lopt.optimisee import Optimisee
from l2lopt.parallel import processes
from l2lopt.parallel.jobs import load_result, run_jobs
from l2lopt.parallel.threads import cpu_threads
from l2lopt.storage.run_log import write_json
from l2lopt.weights import files

_log = logging.getLogger("l2lopt")
SEED = 0
"""Seed of every task's problems: all benchmarks share them, and so their runs."""


class PlannedTask(NamedTuple):
    """A task of a benchmark before anything of it is built.

    Attributes:
        name: Name of the task.
        family: Name of its family.
        split: Purpose of the task.
        steps: Budget of steps.
        optimisee: Choice of the problem, or the problem itself.
        description: One line for readers.
    """

    name: str
    family: str
    split: TaskSplit
    steps: int
    optimisee: Choice | Optimisee
    description: str = ""


class Plan(NamedTuple):
    """All that another process needs to make runs of a benchmark.

    Attributes:
        suite: Seeds and competitors.
        tasks: Tasks.
        cache: Folder of all cached runs.
    """

    suite: Suite
    tasks: tuple[PlannedTask, ...]
    cache: Path


class Job(NamedTuple):
    """A part of a benchmark that is made by itself.

    Attributes:
        task: Number of the task.
        competitor: Number of the competitor.
        part: "tuning": the rates that a self-tuned rate is chosen from; "runs": all runs that are reported.
        self_tuned: Rate of the self-tuned league; None where there is none.
    """

    task: int
    competitor: int
    part: Literal["tuning", "runs"] = "runs"
    self_tuned: float | None = None


class StepTime(NamedTuple):
    """Seconds of a step of one run.

    Attributes:
        alone: Time where the run is made by itself.
        side_by_side: Time where it is one of as many as the suite has seeds, or rows.
    """

    alone: float
    side_by_side: float


def make_runs(
    plan: Plan, jobs: int, report: Report
) -> tuple[list[TaskInfo], list[TaskRun], dict[str, dict[str, float]]]:
    """Makes the runs that are not cached, and gives all.

    Steps are timed first, in quiet, which also forecasts the whole. Then the rates of the meta-training tasks are
    tried, from which the self-tuned rates follow; then all else.

    Args:
        plan: Tasks, competitors and the cache.
        jobs: Number of processes.
        report: Progress.

    Returns:
        Tasks, runs, and task → optimiser → seconds of a step of one run by itself.
    """
    competitors = plan.suite.competitors
    pairs = [(task, competitor) for task in range(len(plan.tasks)) for competitor in range(len(competitors))]
    times = processes.on_first(lambda: step_times(plan, pairs, report))
    tuning = [
        Job(task, competitor, "tuning")
        for task, competitor in pairs
        if plan.tasks[task].split == "meta-training" and "self-tuned" in competitors[competitor].leagues
    ]
    processes.on_first(lambda: _log_forecast(plan, times, tuning, jobs))
    run_jobs(partial(make_job, plan), tuning, jobs, report)
    rates = _self_tuned_rates(plan, tuning)
    reported = [Job(task, competitor, "runs", rates.get(competitor)) for task, competitor in pairs]
    run_jobs(partial(make_job, plan), reported, jobs, report)
    seconds: dict[str, dict[str, float]] = {}
    for (task, competitor), time in times.items():
        seconds.setdefault(plan.tasks[task].name, {})[competitors[competitor].name] = time.alone
    infos = [_info(plan, number) for number in range(len(plan.tasks))]
    return infos, [run for job in reported for run in _task_runs(plan, job, silent)], seconds


def make_job(plan: Plan, job: Job, report: Report = silent) -> None:
    """Makes the runs of a job; each group of them is in the cache as soon as it is made.

    Args:
        plan: Tasks, competitors and the cache.
        job: Job to make.
        report: Progress.
    """

    def told(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        report(f"{plan.tasks[job.task].name}: {stage}", done, total, figures)

    if job.part == "tuning":
        _rates_tried(plan, job, told)
    else:
        _task_runs(plan, job, told)


def _task_runs(plan: Plan, job: Job, report: Report, only_cached: bool = False) -> list[TaskRun]:
    """The runs of a competitor on a task, read from the cache where they are there."""
    with cpu_threads(1):  # small tensors are fastest on one, and the numbers are then those of any number of jobs
        made = protocol.entry(plan.suite.competitors[job.competitor], optimisee_of(plan.tasks, job.task))
        problems = _problems(plan, job, made, report, only_cached)
        return protocol.task_runs(made, _info(plan, job.task), problems, job.self_tuned)


def _rates_tried(plan: Plan, job: Job, report: Report, only_cached: bool = False) -> dict[float, float]:
    """The losses of a competitor's rates on a task, read from the cache where they are there."""
    with cpu_threads(1):
        made = protocol.entry(plan.suite.competitors[job.competitor], optimisee_of(plan.tasks, job.task))
        return protocol.rates_tried(made, _problems(plan, job, made, report, only_cached))


def _self_tuned_rates(plan: Plan, tuning: Sequence[Job], only_cached: bool = False) -> dict[int, float]:
    """Number of a competitor → the rate of its self-tuned league."""
    losses: dict[int, dict[str, dict[float, float]]] = {}
    for job in tuning:
        losses.setdefault(job.competitor, {})[plan.tasks[job.task].name] = _rates_tried(plan, job, silent, only_cached)
    return {competitor: protocol.self_tuned_rate(by_task) for competitor, by_task in losses.items()}


def _problems(plan: Plan, job: Job, made: protocol.Entry, report: Report, only_cached: bool = False) -> Problems:
    """The problems of a task, its runs cached by all that they depend on."""
    entrant = made.competitor if made.rule is None else made.rule
    defaults = run_facts.run_defaults(plan.tasks[job.task].optimisee, entrant)
    stored = FileCache(plan.cache, run_facts.run_facts(_facts(plan, job.task), entrant), defaults)
    run_cache: RunCache = stored.read if only_cached else stored
    settings = protocol.settings_of(plan.suite, plan.tasks[job.task].steps)
    return protocol.with_one_form(made, Problems(made.optimisee, settings, SEED, report, run_cache))


def _facts(plan: Plan, number: int) -> dict[str, Any]:
    """What tells the problem of a task from others."""
    return run_facts.problem_facts(plan.tasks[number].optimisee, optimisee_of(plan.tasks, number))


def optimisee_of(tasks: Sequence[PlannedTask], number: int) -> Optimisee:
    """The problem of a task."""
    choice = tasks[number].optimisee
    return choice if isinstance(choice, Optimisee) else _built(json.dumps(choice, sort_keys=True))


@cache
def _built(choice: str) -> Optimisee:
    """The problem of a choice as JSON, built once in a benchmark; see `forget_problems`."""
    return optimisees.build(json.loads(choice))


def forget_problems() -> None:
    """Has the problems of choices built anew: the data or the code behind a name may have changed since."""
    _built.cache_clear()


def _info(plan: Plan, number: int) -> TaskInfo:
    task = plan.tasks[number]
    params, _ = optimisee_of(plan.tasks, number).init(0)
    said = task.name, task.family, task.split, task.steps, Layout.of(params).size, task.description
    return TaskInfo(*said, hashlib.sha256(json.dumps(_facts(plan, number), sort_keys=True).encode()).hexdigest()[:16])


def step_times(
    plan: Plan, pairs: Sequence[tuple[int, int]], report: Report = silent
) -> dict[tuple[int, int], StepTime]:
    """The time of a step of every competitor on every task, measured once on a machine and then cached.

    Args:
        plan: Tasks, competitors and the cache.
        pairs: Numbers of a task and of a competitor.
        report: Progress.
    """
    path, work = plan.cache / "step-seconds.json", {"machine": environment()}

    def cached() -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = (load_result(path, work) or {}).get("seconds", {})
        return seconds

    known, found = cached(), dict[tuple[int, int], StepTime]()
    together = min(plan.suite.seeds, plan.suite.rows or plan.suite.seeds)
    for count, (task, number) in enumerate(pairs):
        competitor, planned = plan.suite.competitors[number], plan.tasks[task]
        with cpu_threads(1):
            made = protocol.entry(competitor, optimisee_of(plan.tasks, task))
            rule = competitor.optimiser if made.rule is None else files.digest(made.rule)
            versions = run_facts.code_of(competitor.optimiser if made.rule is None else made.rule.description)
            facts = [_facts(plan, task), rule, competitor.schedule, planned.steps, together]
            facts += [versions] if versions else []
            key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
            if key not in known:
                report("time steps", count, len(pairs), {})
                if made.rule is None:
                    check_baseline(competitor, made.optimisee)
                seconds = [protocol.step_seconds(made, planned.steps, runs) for runs in (1, together)]
                known = cached() | {key: seconds}  # another benchmark may have written meanwhile
                write_json(path, {"work": work, "seconds": known}, seal=True)
        found[task, number] = StepTime(*known[key])
    report("time steps", len(pairs), len(pairs), {})
    return found


def _log_forecast(plan: Plan, times: Mapping[tuple[int, int], StepTime], tuning: Sequence[Job], jobs: int) -> None:
    """Logs how long all runs that are not cached will take; with several ranks, how long all take."""
    seconds, missing = 0.0, 0
    looks = processes.ranks() == 1  # several share out what is read, too, and this one is alone here
    rates: dict[int, float] = {}
    self_tuned = {job.competitor for job in tuning}
    for number in self_tuned if looks else ():
        with suppress(MissingRunError):
            rates |= _self_tuned_rates(plan, [job for job in tuning if job.competitor == number], only_cached=True)
    for (task, number), time in times.items():
        if looks and (number in rates or number not in self_tuned):
            try:
                _task_runs(plan, Job(task, number, self_tuned=rates.get(number)), silent, only_cached=True)
                continue
            except MissingRunError:
                pass
        rows = protocol.rows_of(plan.suite.competitors[number], plan.suite)
        seconds += rows * plan.tasks[task].steps * time.side_by_side
        missing += 1
    if missing:
        together = jobs * processes.ranks()
        shared = f", shared by {together} processes" if together > 1 else ""
        said = "%d of %d pairs of task and optimiser to run, at most about %s in all%s"
        _log.info(said, missing, len(times), format_duration(seconds), shared)


@cache
def environment() -> dict[str, str]:
    """Facts about the machine and the libraries, for readers of a result."""
    cpuinfo, processor = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    versions = {"l2lopt": version("l2lopt"), "torch": torch.__version__, "python": platform.python_version()}
    return {"processor": processor, "threads": "1", **versions}
