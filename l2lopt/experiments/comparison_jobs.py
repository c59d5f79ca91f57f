"""The parts of a study of optimisers: what each depends on, where its files are, how it is made."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, NonNegativeInt, field_validator

import optimisees
from l2lopt import kernels
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.core.types import Report, silent
from l2lopt.evaluation import comparison
from l2lopt.evaluation.settings import EvaluationSettings
from l2lopt.evaluation.tuned_runs import OptimiserRun, Problems, check_baseline, check_heldout, optimiser_run
from l2lopt.experiments import build, runs, study_labels
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import Config
from l2lopt.experiments.run_cache import FileCache, MissingRunError, file_digest, read_run, write_run
from l2lopt.experiments.run_facts import FORMAT, code_of, problem_facts, recipe_of, run_defaults, run_facts, weights_of
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes
from l2lopt.parallel.jobs import fingerprint, slug, unique_labels
from l2lopt.parallel.threads import cpu_threads
from l2lopt.storage import checkpoint, toml_file
from l2lopt.weights import files


class Problem(Settings):
    """A problem that the optimisers are meta-trained and compared on."""

    label: str
    """Name in the table, and of the problem's folder; "{optimisee.width}" in it stands for that key's value."""
    changes: list[str] = Field(default_factory=list)
    """Changes to every config, such as "optimisee.name=convnet"."""


class Contender(Settings):
    """A learned optimiser."""

    label: str
    """Name in the table, and of the optimiser's folders."""
    config: str
    """Path of the config, beside the study's file."""
    changes: list[str] = Field(default_factory=list)
    """Changes to the config, made before those of the problem."""
    optimiser: Choice | None = None
    """An optimiser that takes part as it is, in place of the config's, which would be meta-trained: a table of
    `weights` (a name or a file), or one of ours with its rate."""
    tuned: bool = True
    """Whether it has a second row, with the best of `evaluation.multipliers`."""


class Study(Settings):
    """Every optimiser meta-trained on every problem with every meta-seed, and compared with the same baselines."""

    meta_seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    """Seeds of the meta-trainings."""
    seed: NonNegativeInt = 0
    """Seed of the comparison's fresh problems."""
    problems: list[Problem] = Field(min_length=1)
    """Problems, each a table of its own."""
    optimisers: list[Contender] = Field(min_length=1)
    """Learned optimisers."""

    _apart = field_validator("problems", "optimisers")(unique_labels)

    @field_validator("meta_seeds")
    @classmethod
    def _each_once(cls, seeds: list[int]) -> list[int]:
        if len({*seeds}) < len(seeds):
            raise ValueError("each seed once")
        return seeds


class StudyLocation(NamedTuple):
    """All that another process needs to make a job.

    Attributes:
        study: Study.
        source: Path of its file, which the paths of configs are relative to.
        folder: Folder of the results.
        changes: Changes to every config.
        cache: Folder of the cached groups of runs; None puts each run's beside its file.
    """

    study: Study
    source: str
    folder: str
    changes: tuple[str, ...]
    cache: str | None = None


class Job(NamedTuple):
    """A part of a study that is made by itself: the free runs of an optimiser, and the meta-training before them.

    Attributes:
        problem: Number of the problem.
        optimiser: Number of the learned optimiser, or of the baseline.
        meta_seed: Meta-seed; None for a baseline.
    """

    problem: int
    optimiser: int
    meta_seed: int | None


class ResolvedJob(NamedTuple):
    """A job with its config and its files.

    Attributes:
        config: Config of the job.
        paths: Files of its rows of the table.
        work: All that each of these runs depends on, as the file says it.
        beside: Defaults that all of them depend on as well, see `run_facts.run_defaults`.
    """

    config: Config
    paths: list[Path]
    work: list[dict[str, Any]]
    beside: dict[str, str]


def located(study: Study, source: str, folder: str, changes: Sequence[str], cache: str | None = None) -> StudyLocation:
    """The location of a study whose problems have labels that say the sizes they are run with.

    Args:
        study: Study as its file has it.
        source: Path of that file.
        folder: Folder of the results.
        changes: Changes to every config.
        cache: Folder of the cached groups of runs, if it is not the study's own.

    Raises:
        UserError: For a mistake in a config or a label, and for labels that the changes have made alike.
    """
    location, labels = StudyLocation(study, source, folder, tuple(changes), cache), []
    for number, problem in enumerate(study.problems):
        config = config_of(location, Job(number, 0, None))
        labels.append(study_labels.of_problem(problem.label, config, changes, source))
    study_labels.check_folders(labels, f"{source}: problems")
    pairs = zip(study.problems, labels, strict=True)
    problems = [problem.model_copy(update={"label": label}) for problem, label in pairs]
    return location._replace(study=study.model_copy(update={"problems": problems}))


def all_jobs(location: StudyLocation) -> Iterator[Job]:
    """Every job; the configs are checked first, so that a mistake shows before hours of work."""
    study = location.study
    for number, problem in enumerate(study.problems):
        first = config_of(location, Job(number, 0, None))
        for index in range(len(study.optimisers)):
            config = config_of(location, Job(number, index, study.meta_seeds[0]))
            given = _fixed_optimiser(study.optimisers[index])
            experiment = build.build(config, meta_training=given is None)
            for baseline in config.evaluation.baselines if index == 0 else ():
                check_baseline(baseline, experiment.optimisee)
            if index == 0 and comparison.tunes(config.evaluation, any(one.tuned for one in study.optimisers)):
                check_heldout(experiment.optimisee, f"{location.source}: {problem.label}")
            if (config.evaluation, config.optimisee) != (first.evaluation, first.optimisee):
                where = f"{location.source}: {study.optimisers[index].label} on {problem.label}"
                expected, remedy = (
                    f"the evaluation of {study.optimisers[0].label}",
                    "make optimisee and evaluation equal",
                )
                raise UserError(where, expected=expected, found="another", remedy=remedy)
    for seed in study.meta_seeds:
        for number in range(len(study.problems)):
            for index in range(len(study.optimisers)):
                if seed in meta_seeds_of(study, index):
                    yield Job(number, index, seed)
    for number in range(len(study.problems)):
        for index in range(len(config_of(location, Job(number, 0, None)).evaluation.baselines)):
            yield Job(number, index, None)


def make_job(location: StudyLocation, job: Job, report: Report = silent, only_cached: bool = False) -> None:
    """Writes the job's free runs, and before them the learned optimiser that runs, unless they are there already.

    Args:
        location: Study.
        job: Job to make, with `only_cached` one without meta-training.
        report: Progress.
        only_cached: Whether no run is made: those of the cache are put together.

    Raises:
        MissingRunError: With `only_cached`, where one is not in the cache.
    """
    # Rank 0 looks for all: ranks that saw different files would wait for one another in the work below.
    missing = processes.on_first(lambda: [run is None for run in cached_runs(location, job)])
    if not any(missing):
        return
    study, config = location.study, config_of(location, job)
    folder = resolve(location, job).paths[0].parent
    given = None if job.meta_seed is None else _fixed_optimiser(study.optimisers[job.optimiser])
    if job.meta_seed is not None and given is None:
        runs.meta_train(config, folder, resume=True, report=report)
    # Only now is there a file of weights, whose digest the work says.
    resolved = resolve(location, job)
    with cpu_threads(config.threads):
        optimisee = build.build(config, meta_training=False).optimisee
        problem = problem_facts(config.optimisee, optimisee)
        if job.meta_seed is None:
            baseline = config.evaluation.baselines[job.optimiser]
            facts, rows = run_facts(problem, baseline), [baseline.contestant()]
            defaults = run_defaults(config.optimisee, baseline)
        else:
            rule = given or files.load(folder / "optimiser.safetensors", trusted=True)
            rule = build.match_dtype(rule, [optimisee])
            facts, defaults = run_facts(problem, rule), run_defaults(config.optimisee, rule)
            fused = kernels.fuse(rule.to(build.device(config.device)), config.backend)
            rows = comparison.rows_of(folder.name, fused, _settings_of(location, job))
        for row, path, work, wanted in zip(rows, resolved.paths, resolved.work, missing, strict=True):
            if wanted:
                cache = FileCache(location.cache or path.with_suffix(""), facts, defaults)
                kept = cache.read if only_cached else cache
                run = optimiser_run(row, Problems(optimisee, config.evaluation, study.seed, report, kept))
                processes.on_first(partial(write_run, path, work, run, resolved.beside))


def collect_cached(location: StudyLocation, planned: Sequence[Job]) -> None:
    """Makes the jobs whose runs are all in the cache that the study shares with others.

    Args:
        location: Study.
        planned: Jobs; those with a meta-training are left out.
    """
    if location.cache is None:
        return
    for job in planned:
        if job.meta_seed is None or location.study.optimisers[job.optimiser].optimiser is not None:
            with suppress(MissingRunError):
                make_job(location, job, only_cached=True)


def resolve(location: StudyLocation, job: Job) -> ResolvedJob:
    """The config, the files and the work of a job."""
    study = location.study
    config = config_of(location, job)
    home = Path(location.folder) / slug(study.problems[job.problem].label)
    choice, place = json.dumps(config.optimisee, sort_keys=True), str(build.device(config.device))
    depends = fingerprint(**_problem(choice, place, os.environ.get("L2LOPT_DATA")))
    asked = config.evaluation.model_dump(mode="json", exclude={"baselines", "multipliers"}, exclude_none=True)
    work: dict[str, Any] = {"format": FORMAT, "seed": study.seed, "evaluation": asked}
    if job.meta_seed is None:
        baseline = config.evaluation.baselines[job.optimiser]
        said = {"baseline": baseline.model_dump(mode="json"), **code_of(baseline.optimiser)}
        path, defaults = home / f"{slug(baseline.name)}.json", run_defaults(config.optimisee, baseline)
        return ResolvedJob(config, [path], [depends | work | said], defaults)
    contender = study.optimisers[job.optimiser]
    folder, given = home / f"{slug(contender.label)}-{job.meta_seed}", _fixed_optimiser(contender)
    if given is None:
        work["recipe"] = recipe_of(config, "evaluation") | weights_of(config.optimiser) | code_of(config.optimiser)
        depends["weights"] = file_digest(folder / "optimiser.safetensors")
    else:
        depends |= {"rule": files.digest(given), **code_of(given.description)}
    paths, alike = [folder / "free-run.json"], depends | work
    defaults = run_defaults(config.optimisee, given or config.optimiser)
    if len(multipliers := _settings_of(location, job).multipliers) > 1:
        paths.append(folder / "free-run-tuned.json")
        return ResolvedJob(config, paths, [alike, alike | {"multipliers": multipliers}], defaults)
    return ResolvedJob(config, paths, [alike], defaults)


def config_of(location: StudyLocation, job: Job) -> Config:
    """The config of a job; a baseline's is that of the first optimiser."""
    study = location.study
    contender = study.optimisers[0 if job.meta_seed is None else job.optimiser]
    seed = study.meta_seeds[0] if job.meta_seed is None else job.meta_seed
    source = Path(location.source).parent / contender.config
    changes = [*contender.changes, *study.problems[job.problem].changes, *location.changes]
    return configs.load(source, [*changes, f"seed={seed}", toml_file.assignment("label", contender.label)])


def _settings_of(location: StudyLocation, job: Job) -> EvaluationSettings:
    """The evaluation of a learned optimiser, without multipliers where it has no second row."""
    settings, tuned = config_of(location, job).evaluation, location.study.optimisers[job.optimiser].tuned
    return settings if tuned else settings.model_copy(update={"multipliers": []})


def cached_runs(location: StudyLocation, job: Job) -> list[OptimiserRun | None]:
    """The job's free runs, each if it was made from the same work before."""
    resolved = resolve(location, job)
    pairs = zip(resolved.paths, resolved.work, strict=True)
    return [read_run(path, work, resolved.beside) for path, work in pairs]


def required_runs(location: StudyLocation, job: Job) -> list[OptimiserRun]:
    """The job's free runs, which must be there.

    Raises:
        UserError: Where one is not.
    """
    found = []
    for path, run in zip(resolve(location, job).paths, cached_runs(location, job), strict=True):
        if run is None:
            raise UserError(str(path), expected="a free run just made", found="none", remedy="run the study again")
        found.append(run)
    return found


def meta_seeds_of(study: Study, index: int) -> list[int]:
    """The meta-seeds of an optimiser; one that takes part as it is has the first alone."""
    return study.meta_seeds[:1] if study.optimisers[index].optimiser is not None else study.meta_seeds


def _fixed_optimiser(contender: Contender) -> Optimiser | None:
    """The optimiser that takes part as it is; None for one that is meta-trained."""
    return None if contender.optimiser is None else build.ready_optimiser(contender.optimiser)


def remaining_share(job: ResolvedJob) -> float:
    """The share of a meta-training that is still to be made."""
    folder = job.paths[0].parent
    if (folder / "optimiser.safetensors").exists():
        return 0.0
    try:
        kept, _ = checkpoint.read(folder / "checkpoint.safetensors")
        return 1 - int(kept["facts"]["update"]) / job.config.meta.updates
    except (UserError, KeyError, TypeError, ValueError):  # none yet, or one that will be refused
        return 1.0


def forget_problems() -> None:
    """Has what tells problems apart worked out anew: the data or the code behind a name may have changed since."""
    _problem.cache_clear()


@cache
def _problem(optimisee: str, device: str, _: str | None) -> dict[str, Any]:
    """What tells a problem from others, by its choice as JSON, its device and the root of the data sets."""
    choice: Choice = json.loads(optimisee)
    return problem_facts(choice, optimisees.build(choice, device=device))
