"""Studies: optimisers × problems × meta-seeds as one table that anyone can make again."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.types import Report, silent
from l2lopt.evaluation import comparison
from l2lopt.evaluation.comparison import Comparison, Evaluation
from l2lopt.evaluation.contestants import tuned_name
from l2lopt.evaluation.scores import finite_or_infinite
from l2lopt.evaluation.settings import SPLITS
from l2lopt.evaluation.tables import comparison_table
from l2lopt.evaluation.tuned_runs import OptimiserRun, choice_facts
from l2lopt.experiments import comparison_jobs, cost_forecast, run_folder, training_study
from l2lopt.experiments import config as configs
from l2lopt.experiments.comparison_jobs import Job, Study, StudyLocation
from l2lopt.experiments.training_study import TrainingStudy
from l2lopt.parallel import processes
from l2lopt.parallel.jobs import run_jobs, slug
from l2lopt.storage.run_lock import locked
from l2lopt.storage.run_log import clear_unfinished, write_json, write_text
from l2lopt.storage.toml_file import read_toml


class JobResult(NamedTuple):
    """A problem's comparison.

    Attributes:
        evaluation: Comparison of all optimisers, learned ones by the mean over their meta-seeds.
        runs: Label of a learned optimiser → its free runs, one for each meta-seed.
    """

    evaluation: Evaluation
    runs: dict[str, list[OptimiserRun]]

    def means(self, line: Comparison) -> list[float]:
        """The mean loss under each meta-seed, at the horizon and on the split of a line of the table."""
        split: Any = line.split
        found = [run.losses[split][line.horizon] for run in self.runs.get(line.optimiser, [])]
        return [float(finite_or_infinite(losses).mean()) for losses in found]


def study_path(source: str | Path) -> Path:
    """The file of a study: `source` itself, or the shipped one of that name.

    Raises:
        UserError: For a missing file.
    """
    return configs.find(source, "studies", "a study's file")


def load(source: str | Path) -> Study | TrainingStudy:
    """A study from a TOML file, or from the name of a shipped one.

    Raises:
        UserError: For a missing file, one that is not TOML, the file of another command, or a mistake in it.
    """
    path = study_path(source)
    data = read_toml(path, "a study's file", "give its path")
    configs.check_kind(str(path), data, "reproduce")
    if training_study.describes(data):
        return training_study.parse(data, str(path))
    try:
        return Study.model_validate(data)
    except ValidationError as error:
        raise registry.explain(str(path), error, Study.model_fields, data) from None


def reproduce(
    source: str | Path,
    folder: str | Path,
    *,
    changes: Sequence[str] = (),
    cache: str | Path | None = None,
    jobs: int = 1,
    report: Report = silent,
) -> list[Path]:
    """Makes a study's table and figures, from data to picture.

    Each job leaves its files as soon as it is done, a meta-training its checkpoints, an evaluation every group of
    `evaluation.rows` runs: a study that was stopped goes on where it stood. A run whose evaluation has changed since is
    made anew; a changed recipe is refused. Where optimisers are compared it is logged first how long all will take, and
    processes that `torchrun` has started share out meta-batches and evaluations; other studies refuse them.

    Args:
        source: TOML file of the study, or the name of a shipped study. With the key `runs` (or `encoders` or
            `labellers`) it is a study of trained optimisees, see `training_study`.
        folder: Folder that gets every file.
        changes: Changes to every config, such as "evaluation.seeds=50"; seeds and labels are the study's.
        cache: Folder of the cached groups of runs, which benchmarks and other studies of optimisers may share: a group
            is found where problem, optimiser, seeds, rates and horizons are equal, and its times are those of when it
            was made. By default each group lies in the study's folder.
        jobs: Number of processes that make the study's parts at the same time. With more than one, a script's own work
            must be under `if __name__ == "__main__":`.
        report: Progress; with several processes as `jobs.run_jobs` gives it.

    Returns:
        `table.md`, `table.json`, and a figure for each problem.

    Raises:
        UserError: For a mistake in the study or one of its configs, and for a folder in which another process works.

    Example:
        >>> import l2lopt
        >>> paths = l2lopt.reproduce("digits-mlp", "runs/digits-mlp", jobs=2)  # half an hour  # doctest: +SKIP
    """
    if jobs < 1:
        raise UserError("jobs", expected="at least 1", found=str(jobs), remedy="change the value")
    study, path = load(source), study_path(source)
    _check_changes(study, path, changes)
    comparison_jobs.forget_problems()
    if isinstance(study, TrainingStudy):
        processes.alone("reproduce")
        if cache is not None:
            found, remedy = f"{path}, which trains optimisees", "leave the cache out"
            raise UserError("cache", expected="a study that compares optimisers", found=found, remedy=remedy)
        return training_study.reproduce(study, path, folder, changes=changes, jobs=jobs, report=report)
    with processes.together(), ExitStack() as held:
        location = comparison_jobs.located(
            study, str(path), str(folder), changes, None if cache is None else str(cache)
        )
        planned = list(comparison_jobs.all_jobs(location))
        _check_names(location)
        processes.on_first(lambda: run_folder.writable(Path(folder)))
        if cache is not None:
            processes.on_first(lambda: run_folder.writable(Path(cache), "choose another --cache"))
        lock = locked(Path(folder))
        processes.on_first(lambda: held.enter_context(lock))
        for home in [folder] if cache is None else [folder, cache]:
            processes.on_first(partial(clear_unfinished, Path(home)))
        if processes.ranks() == 1:  # several would share out the reading among them, as they do runs
            comparison_jobs.collect_cached(location, planned)
        _forecast(location, planned, jobs)
        if jobs > 1 and processes.ranks() > 1:
            raise UserError("jobs", expected="1 under torchrun", found=str(jobs), remedy="drop --jobs, or torchrun")
        run_jobs(partial(comparison_jobs.make_job, location), planned, jobs, report)
        return processes.on_first(lambda: _summary(location))


def _check_changes(study: Study | TrainingStudy, path: Path, changes: Sequence[str]) -> None:
    """Refuses changes that would have no effect, as the study gives every config its seed and its label."""
    keys = {"seed": "seeds" if isinstance(study, TrainingStudy) else "meta_seeds", "label": "the labels"}
    for change in changes:
        if (key := change.partition("=")[0].strip()) in keys:
            expected, remedy = f"no {key}, which the study gives", f"change {keys[key]} in {path}"
            raise UserError("--set", expected=expected, found=repr(change), remedy=remedy)


def _check_names(location: StudyLocation) -> None:
    """Refuses two rows of a table with one name, or with names that lead to one file."""
    study = location.study
    for problem in range(len(study.problems)):
        settings = comparison_jobs.config_of(location, Job(problem, 0, None)).evaluation
        names = [contender.label for contender in study.optimisers]
        names += [tuned_name(one.label) for one in study.optimisers if one.tuned and len(settings.multipliers) > 1]
        by_slug: dict[str, str] = {}
        for name in [*names, *(baseline.name for baseline in settings.baselines)]:
            if (other := by_slug.setdefault(slug(name), name)) is not name:
                found, remedy = f"{other!r} and {name!r}", "add a label to one of them"
                raise UserError("study: optimisers", expected="a name for each row", found=found, remedy=remedy)


def _forecast(location: StudyLocation, planned: Sequence[Job], jobs: int) -> None:
    """Logs how long the jobs without a result will take."""
    missing = processes.on_first(lambda: [job for job in planned if None in comparison_jobs.cached_runs(location, job)])
    if not missing:
        return
    costs = cost_forecast.forecast([_planned_run(location, job) for job in missing])
    parts = ", ".join(f"{name} {cost_forecast.format_duration(time)}" for name, time in costs.items() if time)
    shared = f", shared by {jobs * processes.ranks()} processes" if jobs * processes.ranks() > 1 else ""
    total = cost_forecast.format_duration(sum(costs.values()))
    # A row of which the cache has some networks is counted whole: which it has is known when they are looked for.
    shared += "" if location.cache is None else ", less what the cache has of them"
    logger = logging.getLogger("l2lopt")
    logger.info("%d of %d pieces to make, about %s in all%s: %s", len(missing), len(planned), total, shared, parts)


def _planned_run(location: StudyLocation, job: Job) -> cost_forecast.PlannedRun:
    """What a job will cost is worked out from."""
    config = comparison_jobs.config_of(location, job)
    if job.meta_seed is None:
        return cost_forecast.PlannedRun(config, config.evaluation.baselines[job.optimiser])
    contender = location.study.optimisers[job.optimiser]
    resolved = comparison_jobs.resolve(location, job)
    share = 0.0 if contender.optimiser is not None else comparison_jobs.remaining_share(resolved)
    return cost_forecast.PlannedRun(config, None, share, len(resolved.paths) > 1, contender.optimiser)


def _summary(location: StudyLocation) -> list[Path]:
    """Table and figures from the jobs' files."""
    folder = Path(location.folder)
    compared = {problem.label: _compared(location, number) for number, problem in enumerate(location.study.problems)}
    paths = [folder / "table.md", folder / "table.json"]
    tables = [comparison_table(label, found.evaluation, found.means) for label, found in compared.items()]
    write_text(paths[0], "\n\n".join(table.markdown() for table in tables) + "\n")
    write_json(paths[1], {label: _facts(found) for label, found in compared.items()})
    for label, (result, _) in compared.items():
        home = folder / slug(label)
        run_folder.write_evaluation(home, result)
        paths += run_folder.draw_evaluation(home, label)
    return paths


def _compared(location: StudyLocation, problem: int) -> JobResult:
    """All runs of a problem side by side, a learned optimiser's losses averaged over its meta-seeds."""
    by_label, runs = {}, {}
    study = location.study
    for index, contender in enumerate(study.optimisers):
        by_seed = [
            comparison_jobs.required_runs(location, Job(problem, index, seed))
            for seed in comparison_jobs.meta_seeds_of(study, index)
        ]
        names = contender.label, tuned_name(contender.label)
        for name, trained in zip(names, zip(*by_seed, strict=True), strict=False):
            runs[name], by_label[name] = _mean_run(trained), list(trained)
    config = comparison_jobs.config_of(location, Job(problem, 0, None))
    for index, baseline in enumerate(config.evaluation.baselines):
        (runs[baseline.name],) = comparison_jobs.required_runs(location, Job(problem, index, None))
    result = comparison.compare(runs, config.evaluation.checked_horizons(), by_label)
    result.proper.update(comparison.proper_names(config.evaluation))
    return JobResult(result, by_label)


def _mean_run(runs: Sequence[OptimiserRun]) -> OptimiserRun:
    """A learned optimiser's run with the losses averaged over its meta-seeds."""
    losses: dict[Any, dict[int, Tensor]] = {
        split: {step: torch.stack([run.losses[split][step] for run in runs]).mean(0) for step in runs[0].losses[split]}
        for split in SPLITS
    }
    first = torch.stack([run.first for run in runs]).mean(0)
    chosen = runs[0].chosen if len(runs) == 1 else {}  # every meta-seed has choices of its own
    warnings = list(dict.fromkeys(warning for run in runs for warning in run.warnings))
    cut = any(run.cut for run in runs)
    return OptimiserRun("learned", losses, first, fmean(run.seconds for run in runs), chosen, warnings, cut)


def _facts(compared: JobResult) -> dict[str, Any]:
    """The comparison for machines."""
    result = compared.evaluation
    return {
        "table": [row._asdict() | {"meta_seeds": compared.means(row)} for row in result.table],
        "chosen": {name: choice_facts(chosen) for name, chosen in result.chosen.items()},
        "seconds_per_step_and_seed": result.seconds,
        "warnings": result.warnings,
    }
