"""Studies of trained optimisees: runs × seeds as one table, beside the yardsticks that the optimisee names."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from pydantic import AliasChoices, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator

from l2lopt.core import registry
from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.references import Column, References, Result, StudyRun
from l2lopt.core.settings import Settings
from l2lopt.core.types import Report
from l2lopt.experiments import build, runs, study_labels
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from l2lopt.experiments.run_facts import code_of, own_facts, recipe_of, weights_of
from l2lopt.experiments.run_folder import writable
from l2lopt.optimisee import Optimisee
from l2lopt.parallel.jobs import fingerprint, format_range, load_result, run_jobs, slug, unique_labels
from l2lopt.parallel.threads import cpu_threads
from l2lopt.report.tables import Cell, Table
from l2lopt.storage import toml_file
from l2lopt.storage.run_lock import locked
from l2lopt.storage.run_log import clear_unfinished, write_json, write_text

ROWS = ("runs", "encoders", "labellers")
"""Spellings of the list of runs; a study with one of these keys is a `TrainingStudy`."""


class Run(Settings):
    """An optimisee trained with every seed."""

    label: str
    """Its name in the table, and its folders'; "{optimisee.layers}" in it stands for that key's value."""
    config: str | None = None
    """Path of its config, relative to the study's file; by default the study's."""
    changes: list[str] = Field(default_factory=list)
    """Changes to the config, such as "optimisee.cell=irc-gru"."""
    seeds: list[NonNegativeInt] | None = Field(default=None, min_length=1)
    """Seeds of this run; by default the study's."""
    versus: str | None = None
    """Label of another run, from which the table shows the difference, over the seeds that both have."""


class TrainingStudy(Settings):
    """Optimisees trained by one recipe or several, compared in one table.

    Further keys are options of the optimisee's `references`, such as `n_grams` of a language model.
    """

    model_config = ConfigDict(extra="allow")

    config: str | None = None
    """Path of the recipe's config, relative to the study's file, for runs that name none."""
    changes: list[str] = Field(default_factory=list)
    """Changes to every config, made first."""
    seeds: list[NonNegativeInt] | None = Field(default=None, min_length=1)
    """Seeds of every run that names none; by default those of the optimisee's `references`."""
    runs: list[Run] = Field(min_length=1, validation_alias=AliasChoices(*ROWS))
    """Rows of the table; see `Run`. The keys `encoders` and `labellers` mean the same."""

    _apart = field_validator("runs")(unique_labels)


class _Job(NamedTuple):
    """A run of one seed, or a reference: its kind, its config and its folder."""

    kind: str
    config: TrainConfig
    folder: Path


_Rows = dict[str, dict[int, _Job]]
_Found = dict[str, dict[str, Result]]


def describes(data: Mapping[str, Any]) -> bool:
    """Whether the contents of a study's file describe a `TrainingStudy`."""
    return any(key in data for key in ROWS)


def parse(data: Mapping[str, Any], where: str) -> TrainingStudy:
    """The study that the contents of a TOML file describe.

    Args:
        data: Contents of the file.
        where: Name of the file, for errors.

    Raises:
        UserError: For a missing key or a value of the wrong type.
    """
    try:
        return TrainingStudy.model_validate(data)
    except ValidationError as error:
        raise registry.explain(where, error, _fields(References), data) from None


def reproduce(
    study: TrainingStudy, source: str | Path, folder: str | Path, *, changes: Sequence[str], jobs: int, report: Report
) -> list[Path]:
    """Trains and measures what is not there yet, and writes `table.md`, `table.json` and the figures.

    Every run's first seed comes first. A run that was stopped goes on; a changed recipe is refused.

    Args:
        study: Runs, seeds and options.
        source: File of the study, from which the paths of configs start.
        folder: Folder for everything.
        changes: Changes to every config, made last.
        jobs: Number of runs made at the same time, each in a process.
        report: Progress.

    Raises:
        UserError: For a mistake in the study or one of its configs, before any work, for a changed recipe, and for a
            folder in which another process works.
    """
    study = _labelled(study, Path(source), changes)
    references, rows, beside = _prepared(study, Path(source), Path(folder), changes)
    writable(Path(folder))
    with locked(Path(folder)):
        clear_unfinished(Path(folder))
        make = partial(_make, references)
        rounds = zip_longest(*(own.values() for own in rows.values()))
        run_jobs(make, [job for one in rounds for job in one if job is not None], jobs, report)
        found = {label: {str(seed): make(job, report) for seed, job in own.items()} for label, own in rows.items()}
        paths = [Path(folder) / "table.md", Path(folder) / "table.json"]
        title = f"With {', '.join(changes)}" if changes else ""
        shown = replace(table(study, references, found, beside), title=title)
        write_text(paths[0], shown.markdown() + "\n")
        write_json(paths[1], references.facts(found, beside))
        return [*paths, *references.figures(found, beside, Path(folder) / "figures")]


def _prepared(
    study: TrainingStudy, source: Path, folder: Path, changes: Sequence[str]
) -> tuple[References, _Rows, list[str]]:
    """The optimisees' references, the jobs of every row by their seeds, and the labels of rows that are references."""
    labels = [run.label for run in study.runs]
    for run in study.runs:
        if run.versus is not None and run.versus not in labels:
            remedy = did_you_mean(run.versus, labels)
            raise UserError(f"{source}: {run.label}", expected="a run's label", found=run.versus, remedy=remedy)

    config = partial(_config, study, source, changes)
    optimisees = {}
    for run in study.runs:
        first_seed = (run.seeds or study.seeds or [0])[0]
        optimisees[run.label] = build.build_training(config(run, run.label, first_seed)).optimisee
    references = _references(study, source, optimisees)
    rows: _Rows = {}
    beside: list[str] = []
    for run in study.runs:
        added = [(one.kind, one.label, one.folder) for one in references.beside_each(run.label)]
        for kind, label, home in [("trained", run.label, run.label), *added]:
            if label in rows or (kind != "trained" and label in labels):
                remedy = "give the run another label"
                raise UserError(f"{source}: {run.label}", expected="labels that differ", found=label, remedy=remedy)
            seeds = run.seeds or study.seeds or references.default_seeds
            rows[label] = {
                seed: _Job(kind, config(run, label, seed), folder / f"{slug(home)}-{seed}") for seed in seeds
            }
        beside += [label for _, label, _ in added]
    seed, first = next(iter(next(iter(rows.values())).items()))
    for one in references.beside_all():
        if one.label in rows:
            remedy = "give the run another label"
            raise UserError(f"{source}: {one.label}", expected="labels that differ", found="a run's", remedy=remedy)
        rows[one.label] = {seed: _Job(one.kind, first.config, folder / slug(one.folder))}
        beside.append(one.label)
    return references, rows, beside


def _labelled(study: TrainingStudy, source: Path, changes: Sequence[str]) -> TrainingStudy:
    """The study with labels that say the sizes its runs have."""
    labels = {
        run.label: study_labels.filled(run.label, _config(study, source, changes, run, run.label, 0), str(source))
        for run in study.runs
    }
    study_labels.check_folders([*labels.values()], f"{source}: runs")
    new = [{"label": labels[run.label], "versus": labels.get(run.versus or "", run.versus)} for run in study.runs]
    own = [run.model_copy(update=update) for run, update in zip(study.runs, new, strict=True)]
    return study.model_copy(update={"runs": own})


def _config(study: TrainingStudy, source: Path, changes: Sequence[str], run: Run, label: str, seed: int) -> TrainConfig:
    """The config of a run, or of a reference beside it, all changes made."""
    path = run.config or study.config
    if path is None:
        raise UserError(f"{source}: config", expected="a value", found="none", remedy="add the key")
    own = [*study.changes, *run.changes, *changes, f"seed={seed}", toml_file.assignment("label", label)]
    return configs.load(source.parent / path, own, kind=TrainConfig)


def _references(study: TrainingStudy, source: Path, optimisees: Mapping[str, Optimisee]) -> References:
    """The view of the optimisees' class, with the study's further keys as its options."""
    kinds = {label: optimisee.references for label, optimisee in optimisees.items()}
    kind, options = next(iter(kinds.values())), study.model_extra or {}
    for label, other in kinds.items():
        if other is not kind:
            expected, found = f"an optimisee with {kind.__name__}", f"one with {other.__name__}"
            raise UserError(f"{source}: {label}", expected=expected, found=found, remedy="make studies of their own")
    try:
        references = kind.model_validate(options)
    except ValidationError as error:
        raise registry.explain(str(source), error, _fields(kind), options) from None
    references.check(optimisees)
    return references


def _fields(kind: type[References]) -> dict[str, Any]:
    """The keys that a study may have: its fields, the other spellings of `runs`, and the options of its references."""
    rows = dict.fromkeys(ROWS, TrainingStudy.model_fields["runs"])
    return {**TrainingStudy.model_fields, **rows, **kind.model_fields}


def _make(references: References, job: _Job, report: Report) -> Result:
    """Loads the cached result of a job, or computes and stores it."""
    optimisee, path = build.build_training(job.config).optimisee, job.folder / "found.json"
    chosen = job.config.optimiser
    own = own_facts(job.config.optimisee, optimisee) | code_of(chosen) | weights_of(chosen)
    problem = {**optimisee.fingerprint(), **own}
    work = fingerprint(recipe=recipe_of(job.config), **references.depends_on(job.kind), **problem)
    known = load_result(path, work)
    if known is None or not _readable(references, job.kind, known):
        trained = runs.train(job.config, job.folder, resume=True, report=report) if job.kind == "trained" else None
        with cpu_threads(job.config.threads):
            run = StudyRun(job.kind, job.config.seed, job.folder, trained)
            result = references.result(optimisee, run, report)
        write_json(path, {"work": work, **result}, seal=True)
        known = load_result(path, work)
        assert known is not None
    return known


def _readable(references: References, kind: str, result: Result) -> bool:
    """Whether a cached result of a training has all that the table shows of it: files may be damaged."""
    try:
        for column in references.columns(result) if kind == "trained" else ():
            column.read(result)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False
    return True


def table(study: TrainingStudy, references: References, found: _Found, beside: Collection[str]) -> Table:
    """The results as a table: means, and in brackets the lowest and the highest of several seeds.

    Args:
        study: Runs, some of them with another that they are set against.
        references: Columns, and the legend.
        found: Label → seed → result, a row for each label.
        beside: Labels of the rows that are references.
    """
    firsts = [next(iter(found[run.label].values())) for run in study.runs]
    # Optimisees of unlike metrics have the columns of all.
    columns = list(references.columns({name: value for first in firsts for name, value in first.items()}))
    versus = {run.label: run.versus for run in study.runs}
    if any(versus.values()) and not any(column.show == "versus" for column in columns):
        shown = next((column for column in columns if column.show == "range"), None)
        columns += [] if shown is None else [shown._replace(head="", show="versus")]
    rows = []
    for label, own in found.items():
        cells: list[Cell] = [label]
        for column in columns:
            other = versus.get(label)
            try:
                if label in beside:
                    cells.append(_reference_cell(column, own))
                elif column.show == "versus":
                    cells.append("" if other is None else against(column, other, own, found[other]))
                else:
                    cells.append(_cell(column, own, [found[one] for one in beside]))
            except KeyError:  # a metric that other rows alone have
                cells.append(None)
        rows.append(tuple(cells))
    return Table(("", *(column.head for column in columns)), tuple(rows), legend=references.legend)


def _cell(column: Column, own: Mapping[str, Result], references: Sequence[Mapping[str, Result]]) -> str:
    """The cell of a trained row."""
    if column.show == "count":
        return str(len(own))
    if column.show == "first":
        value = column.read(next(iter(own.values())))
        return f"{value:,}" if isinstance(value, int) else str(value)
    numbers = _numbers(column, own)
    if column.show == "median":
        numbers = [number for number in numbers if number]
        return f"{median(numbers):,.0f}" if numbers else ""
    text = format_range(numbers, column.digits)
    if not column.marked or not references:
        return text
    means = [fmean(_numbers(column, one)) for one in references]
    higher = column.better == "higher"
    beats = fmean(numbers) > max(means) if higher else fmean(numbers) < min(means)
    mean, bracket, others = text.partition(" (")
    return (f"**{mean}**" if beats else f"{mean} {'↓' if higher else '↑'}") + bracket + others


def _reference_cell(column: Column, own: Mapping[str, Result]) -> Cell:
    """The cell of a reference; None where the column has no meaning for it."""
    return format_range(_numbers(column, own), column.digits) if column.show == "range" else None


def _numbers(column: Column, own: Mapping[str, Result]) -> list[float]:
    """A column's value for each seed."""
    values = [column.read(result) for result in own.values()]
    return [math.nan if value is None else float(value) for value in values]


def against(column: Column, label: str, own: Mapping[str, Result], other: Mapping[str, Result]) -> str:
    """The difference of one row from another, seed by seed, in words.

    Args:
        column: Value to compare.
        label: Name of the other row.
        own: Seed → result of the row.
        other: Seed → result of the other row.
    """
    shared = [seed for seed in own if seed in other]
    pairs = zip(*(_numbers(column, {seed: row[seed] for seed in shared}) for row in (own, other)), strict=True)
    differences = [one - two for one, two in pairs]
    if not differences:
        return ""
    if not all(map(math.isfinite, differences)):
        return f"diverged, it or {label}"
    mean = fmean(differences)
    if mean == 0:
        return f"equal to {label} on average"
    worse = mean > 0 if column.better == "lower" else mean < 0
    sizes = differences if worse == (column.better == "lower") else [-difference for difference in differences]
    return f"{'**worse**' if worse else 'better'} than {label} by {format_range(sizes, column.digits)}"
