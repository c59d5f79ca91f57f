"""Studies: optimisers × problems × meta-seeds as one table that anyone can make again."""

import hashlib
import json
import logging
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, ValidationError, field_validator
from torch import Tensor

from l2lopt import kernels, optimisers
from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.core.types import Report, silent
from l2lopt.evaluation import comparison
from l2lopt.evaluation.comparison import SPLITS, Curves, Evaluation, FreeRun, Tuned
from l2lopt.experiments import config as configs
from l2lopt.experiments import cost_forecast, run_folder, training_study
from l2lopt.experiments import runs as experiments
from l2lopt.experiments.config import Config
from l2lopt.experiments.training_study import TrainingStudy
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes
from l2lopt.parallel.jobs import apart, make_all, slug, work_of
from l2lopt.parallel.threads import cpu_threads
from l2lopt.report import figures
from l2lopt.storage import tensor_file
from l2lopt.storage.run_log import existing, write_json, write_text
from l2lopt.weights import files
from optimisees import OPTIMISEES


class Problem(Settings):
    """What the optimisers are meta-trained and compared on."""

    label: str
    """Its name in the table, and its folder's."""
    changes: list[str] = Field(default_factory=list)
    """Made to every config, such as "optimisee.name=convnet"."""


class Contender(Settings):
    """A learned optimiser."""

    label: str
    """Its name in the table, and its folders'."""
    config: str
    """The path of its config, beside the study's file."""
    changes: list[str] = Field(default_factory=list)
    """Made to it, before those of the problem."""
    optimiser: Choice | None = None
    """Taken as it is in the place of the config's, which is meta-trained: a table of `weights`, a name or a file, or
    one of ours with its rate."""


class Study(Settings):
    """Every optimiser meta-trained on every problem with every meta-seed, and compared with the same baselines."""

    meta_seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    """Of the meta-trainings."""
    seed: NonNegativeInt = 0
    """Of the comparison's fresh problems."""
    problems: list[Problem] = Field(min_length=1)
    """See `Problem`."""
    optimisers: list[Contender] = Field(min_length=1)
    """See `Contender`."""

    _apart = field_validator("problems", "optimisers")(apart)


class _Work(NamedTuple):
    """One piece of a study, by its numbers: a learned optimiser with its meta-seed, or a baseline."""

    problem: int
    optimiser: int
    meta_seed: int | None


class _Place(NamedTuple):
    """Where a study is made, and from what; small enough to be handed to another process."""

    source: str
    folder: str
    changes: tuple[str, ...]


def shipped() -> list[str]:
    """The names of the studies that come with the library."""
    return sorted(path.stem for path in configs.shipped("studies").glob("*.toml"))


def found(source: str | Path) -> Path:
    """The file of a study: `source` itself, or the shipped one of that name."""
    return configs.shipped("studies") / f"{source}.toml" if str(source) in shipped() else Path(source)


def load(source: str | Path) -> Study | TrainingStudy:
    """A study from a TOML file, or from the name of a shipped one.

    Raises:
        UserError: for a missing file, one that is not TOML, or a mistake in it.
    """
    path = existing(found(source), "a study's file", f"give its path, or one of {', '.join(shipped())}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), expected="a TOML file", found=str(error), remedy="mend that place") from None
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
    jobs: int = 1,
    report: Report = silent,
) -> list[Path]:
    """Makes a study's table and figures, from data to picture.

    Each piece leaves its files as soon as it is done, a meta-training its checkpoints, an evaluation every group of
    `evaluation.rows` runs: a study that was stopped goes on where it stood. A run whose evaluation has changed since is
    made anew; a changed recipe is refused. Where optimisers are compared it is logged first how long all will take, and
    processes that `torchrun` has started share out meta-batches and evaluations; other studies refuse them.

    Args:
        source: TOML file of the study, or the name of a shipped study. With `runs` in it (or `encoders` or `labellers`)
            it is a study of trained optimisees, see `training_study`.
        folder: where everything goes.
        changes: to every config, such as "evaluation.seeds=50".
        jobs: pieces made at the same time, each in a process of its own.
        report: progress; with several jobs, see `pieces.make_all`.

    Returns:
        `table.md`, `table.json`, and a figure for each problem.

    Raises:
        UserError: for a mistake in the study or one of its configs.
    """
    study = load(source)
    if isinstance(study, TrainingStudy):
        processes.alone("reproduce")
        return training_study.reproduce(study, found(source), folder, changes=changes, jobs=jobs, report=report)
    with processes.together():
        place = _Place(str(found(source)), str(folder), tuple(changes))
        pieces = list(_pieces(study, place))
        _check_names(study, place)
        _forecast(study, place, pieces, jobs)
        if jobs > 1 and processes.ranks() > 1:
            raise UserError("jobs", expected="1 under torchrun", found=str(jobs), remedy="drop --jobs, or torchrun")
        make_all(partial(_make, place), pieces, jobs, report)
        return processes.on_first(lambda: _summary(study, place))


def _check_names(study: Study, place: _Place) -> None:
    """That no learned optimiser is called as a baseline is."""
    for problem in range(len(study.problems)):
        baselines = {one.name for one in _config(study, place, _Work(problem, 0, None)).evaluation.baselines}
        for contender in study.optimisers:
            if contender.label in baselines:
                expected, remedy = "a label that no baseline has", "choose another"
                raise UserError("study: optimisers", expected=expected, found=repr(contender.label), remedy=remedy)


def _summary(study: Study, place: _Place) -> list[Path]:
    """Table and figures from the pieces' files."""
    folder = place.folder
    compared = {problem.label: _compared(study, place, number) for number, problem in enumerate(study.problems)}
    paths = [Path(folder) / "table.md", Path(folder) / "table.json"]
    write_text(paths[0], "\n\n".join(_table(label, found) for label, found in compared.items()) + "\n")
    write_json(paths[1], {label: _facts(found) for label, found in compared.items()})
    for label, (result, _) in compared.items():
        home = Path(folder) / slug(label)
        run_folder.write_evaluation(home, result)
        paths += figures.loss_curves(
            figures.read(home / "evaluation.csv"),
            home / "figures",
            title=label,
            breaks=sorted({row.horizon for row in result.table}),
        )
    return paths


def _pieces(study: Study, place: _Place) -> Iterator[_Work]:
    """Every piece; the configs are looked at first, so that a mistake shows before hours of work."""
    for number, problem in enumerate(study.problems):
        first = _config(study, place, _Work(number, 0, None))
        for index in range(len(study.optimisers)):
            config = _config(study, place, _Work(number, index, study.meta_seeds[0]))
            configs.build(config)
            _given(study.optimisers[index])
            if (config.evaluation, config.optimisee) != (first.evaluation, first.optimisee):
                where = f"{place.source}: {study.optimisers[index].label} on {problem.label}"
                expected, remedy = (
                    f"the evaluation of {study.optimisers[0].label}",
                    "make optimisee and evaluation equal",
                )
                raise UserError(where, expected=expected, found="another", remedy=remedy)
    for seed in study.meta_seeds:
        for number in range(len(study.problems)):
            for index in range(len(study.optimisers)):
                if seed in _seeds(study, index):
                    yield _Work(number, index, seed)
    for number in range(len(study.problems)):
        for index in range(len(_config(study, place, _Work(number, 0, None)).evaluation.baselines)):
            yield _Work(number, index, None)


def _forecast(study: Study, place: _Place, pieces: Sequence[_Work], jobs: int) -> None:
    """Logs how long the pieces that are not there yet will take."""
    missing = processes.on_first(lambda: [piece for piece in pieces if _read(place, piece) is None])
    measured: dict[tuple[int, int], cost_forecast.Costs] = {}
    stages = dict.fromkeys(("meta-training", "free runs", "baselines"), 0.0)
    for piece in missing:
        config = _config(study, place, piece)
        kind = piece.problem, 0 if piece.meta_seed is None else piece.optimiser
        with cpu_threads(config.threads):
            costs = measured[kind] = measured.get(kind) or cost_forecast.measured(configs.build(config))
        if piece.meta_seed is None:
            stages["baselines"] += costs.baseline_run(config, config.evaluation.baselines[piece.optimiser])
        else:
            if study.optimisers[piece.optimiser].optimiser is None:
                stages["meta-training"] += costs.meta_training(config) * _left(_task(place, piece))
            stages["free runs"] += costs.learned_run(config)
    if missing:
        parts = ", ".join(f"{name} {cost_forecast.said(seconds)}" for name, seconds in stages.items() if seconds)
        shared = f", shared by {jobs * processes.ranks()} processes" if jobs * processes.ranks() > 1 else ""
        total = cost_forecast.said(sum(stages.values()))
        logger = logging.getLogger("l2lopt")
        logger.info("%d of %d pieces to make, about %s in all%s: %s", len(missing), len(pieces), total, shared, parts)


def _left(task: "_Task") -> float:
    """The share of a meta-training that is still to be made."""
    folder = task.path.parent
    if (folder / "optimiser.safetensors").exists():
        return 0.0
    try:
        kept, _ = tensor_file.read(folder / "checkpoint.safetensors", "l2lopt.checkpoint", "a checkpoint", "")
        return 1 - int(kept["facts"]["update"]) / task.config.meta.updates
    except UserError:  # none yet, or one that will be refused
        return 1.0


def _seeds(study: Study, index: int) -> list[int]:
    """The meta-seeds of an optimiser; one that is taken as it is counts as the first."""
    return study.meta_seeds[:1] if study.optimisers[index].optimiser is not None else study.meta_seeds


def _given(contender: Contender) -> Optimiser | None:
    """The optimiser that is taken as it is."""
    choice = contender.optimiser
    if isinstance(choice, dict) and "weights" in choice:
        return files.load(choice["weights"])
    return None if choice is None else optimisers.build(choice)


class _Task(NamedTuple):
    """A piece as it is made.

    Attributes:
        config: of the piece.
        path: the file of its free run.
        work: what that file says it came from.
        runs: all that a group of its runs depends on, beside seeds, rates and steps.
    """

    config: Config
    path: Path
    work: dict[str, Any]
    runs: dict[str, Any]


def _task(place: _Place, piece: _Work) -> _Task:
    study = load(place.source)
    assert isinstance(study, Study)
    config = _config(study, place, piece)
    home = Path(place.folder) / slug(study.problems[piece.problem].label)
    data = _fingerprint(json.dumps(config.optimisee, sort_keys=True), os.environ.get("L2LOPT_DATA"))
    runs = work_of(optimisee=config.optimisee, **data)
    asked = config.evaluation.model_dump(mode="json", exclude={"baselines"}, exclude_none=True)
    work: dict[str, Any] = {"seed": study.seed, "evaluation": asked}
    if piece.meta_seed is None:
        baseline = config.evaluation.baselines[piece.optimiser].model_dump(mode="json")
        path = home / f"{slug(config.evaluation.baselines[piece.optimiser].name)}.json"
        kind = {key: baseline[key] for key in ("optimiser", "schedule")}
        return _Task(config, path, runs | work | {"baseline": baseline}, runs | kind)
    contender = study.optimisers[piece.optimiser]
    folder, given = home / f"{slug(contender.label)}-{piece.meta_seed}", _given(contender)
    if given is None:
        work["recipe"] = config.model_dump(mode="json", exclude={"evaluation", "label"})
        runs["weights"] = _digest(folder / "optimiser.safetensors")
    else:
        runs["rule"] = files.digest(given)
    return _Task(config, folder / "free-run.json", runs | work, runs)


@cache
def _fingerprint(optimisee: str, _: str | None) -> dict[str, str]:
    """Of an optimisee's data, by its choice as JSON and the root of the data sets."""
    choice: Choice = json.loads(optimisee)
    found: dict[str, str] = registry.build(OPTIMISEES, "optimisee", choice).fingerprint()
    return found


def _read(place: _Place, piece: _Work) -> FreeRun | None:
    """The piece's free run if it was made from the same work before."""
    task = _task(place, piece)
    return _kept(task.path, task.work)


def _there(place: _Place, piece: _Work) -> FreeRun:
    run = _read(place, piece)
    if run is None:
        path = _task(place, piece).path
        raise UserError(str(path), expected="a free run just made", found="none", remedy="run the study again")
    return run


def _make(place: _Place, piece: _Work, report: Report = silent) -> None:
    """Leaves the piece's free run, if it is not there, and before it a learned optimiser."""
    if processes.on_first(lambda: _read(place, piece) is not None):
        return
    study, (config, path, work, runs) = load(place.source), _task(place, piece)
    assert isinstance(study, Study)
    given = None if piece.meta_seed is None else _given(study.optimisers[piece.optimiser])
    if piece.meta_seed is not None and given is None:
        experiments.meta_train(config, path.parent, resume=True, report=report)
        runs["weights"] = work["weights"] = _digest(path.parent / "optimiser.safetensors")
    keep, settings = _Groups(path, runs), config.evaluation
    with cpu_threads(config.threads):
        optimisee = configs.build(config).optimisee
        if piece.meta_seed is None:
            baseline = settings.baselines[piece.optimiser]
            run = comparison.baseline_run(baseline, optimisee, settings, seed=study.seed, report=report, keep=keep)
        else:
            rule = given or files.load(path.parent / "optimiser.safetensors")
            run = comparison.learned_run(
                kernels.fast(configs.fitting(rule, [optimisee]).to(configs.device(config.device)), config.backend),
                optimisee,
                settings,
                seed=study.seed,
                report=report,
                stage=f"run {path.parent.name}",
                keep=keep,
            )
    processes.on_first(lambda: _leave(path, work, run))


def _leave(path: Path, work: Mapping[str, Any], run: FreeRun) -> None:
    """Writes a free run down; its groups stay, for more networks or another grid to be made of."""
    losses = {split: {str(step): row.tolist() for step, row in steps.items()} for split, steps in run.losses.items()}
    chosen = {str(horizon): tuned._asdict() for horizon, tuned in run.chosen.items()}
    facts = {"kind": run.kind, "seconds": run.seconds, "warnings": run.warnings, "chosen": chosen}
    write_json(path, {"work": work, **facts, "first": run.first.tolist(), "losses": losses})


class _Groups:
    """Keeps the groups of a piece, in a folder beside its file; see `evaluation.Keep`."""

    def __init__(self, path: Path, work: Mapping[str, Any]) -> None:
        self.folder, self.work = path.with_suffix(""), work

    def __call__(self, work: Mapping[str, Any], make: Callable[[], Curves]) -> Curves:
        text = json.dumps({**self.work, **work}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["work"] == text:
                losses = {split: _tensor(rows) for split, rows in kept["losses"].items()}
                return Curves(kept["steps"], losses, _tensor(kept["first"]), kept["seconds"])
        except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: made anew
            pass
        curves = make()
        rows = {split: losses.tolist() for split, losses in curves.losses.items()}
        facts = {"steps": curves.steps, "losses": rows, "first": curves.first.tolist(), "seconds": curves.seconds}
        write_json(path, {"work": text, **facts})
        return curves


def _tensor(rows: Any) -> Tensor:
    """Numbers as they were before JSON, which says null for what is not finite."""
    return torch.tensor(json.loads(json.dumps(rows).replace("null", "NaN")))


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _kept(path: Path, work: Mapping[str, Any]) -> FreeRun | None:
    """A free run written before, if it came from the same work."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["work"] != json.loads(json.dumps(work)):
            return None
        losses: dict[Any, dict[int, Tensor]] = {
            split: {int(step): _tensor(row) for step, row in steps.items()} for split, steps in facts["losses"].items()
        }
        chosen = {int(horizon): Tuned(**tuned) for horizon, tuned in facts["chosen"].items()}
        return FreeRun(facts["kind"], losses, _tensor(facts["first"]), facts["seconds"], chosen, facts["warnings"])
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: made anew
        return None


def _config(study: Study, place: _Place, piece: _Work) -> Config:
    """The config of a piece; a baseline's is that of the first optimiser."""
    contender = study.optimisers[0 if piece.meta_seed is None else piece.optimiser]
    seed = study.meta_seeds[0] if piece.meta_seed is None else piece.meta_seed
    source = Path(place.source).parent / contender.config
    changes = [*contender.changes, *study.problems[piece.problem].changes, *place.changes]
    return configs.load(source, [*changes, f"seed={seed}", f"label={contender.label!r}"])


def _compared(study: Study, place: _Place, problem: int) -> "_Compared":
    """All pieces of a problem side by side, a learned optimiser's losses meaned over its meta-seeds."""
    spread, runs = {}, {}
    for index, contender in enumerate(study.optimisers):
        own = [_there(place, _Work(problem, index, seed)) for seed in _seeds(study, index)]
        losses: dict[Any, dict[int, Tensor]] = {
            split: {
                step: torch.stack([run.losses[split][step] for run in own]).mean(0) for step in own[0].losses[split]
            }
            for split in SPLITS
        }
        first = torch.stack([run.first for run in own]).mean(0)
        runs[contender.label] = FreeRun("learned", losses, first, fmean(run.seconds for run in own))
        spread[contender.label] = own
    config = _config(study, place, _Work(problem, 0, None))
    for index, baseline in enumerate(config.evaluation.baselines):
        runs[baseline.name] = _there(place, _Work(problem, index, None))
    return _Compared(comparison.compared(runs, config.evaluation.checked_horizons()), spread)


class _Compared(NamedTuple):
    """A problem's comparison, and the free runs of each learned optimiser, one for every meta-seed."""

    result: Evaluation
    runs: dict[str, list[FreeRun]]

    def means(self, optimiser: str, split: Any, horizon: int) -> list[float]:
        """The mean loss under each meta-seed."""
        return [float(run.losses[split][horizon].double().mean()) for run in self.runs.get(optimiser, [])]


def _table(label: str, compared: _Compared) -> str:
    """The comparison in Markdown."""
    lines = {(row.optimiser, row.split, row.horizon): row for row in compared.result.table}
    horizons = sorted({row.horizon for row in compared.result.table})
    columns = [(split, horizon) for split in SPLITS for horizon in horizons]
    heads = " | ".join(f"{split}, step {horizon:,}" for split, horizon in columns)
    text = [f"| {label} | {heads} |", f"|---|{'---|' * len(columns)}"]
    for optimiser in dict.fromkeys(row.optimiser for row in compared.result.table):
        cells = []
        for split, horizon in columns:
            row = lines[optimiser, split, horizon]
            cell = f"{row.mean:.3g}"
            if row.versus:
                seeds = compared.means(optimiser, split, horizon)
                cell = f"**{cell}**" if row.difference_high < 0 else cell
                cell += " ↑" if row.difference_low > 0 else ""
                cell += f" ({min(seeds):.3g}–{max(seeds):.3g})" if len(seeds) > 1 else ""
            cells.append(cell)
        text.append(f"| {optimiser} | {' | '.join(cells)} |")
    told = [*compared.result.warnings]
    for row in compared.result.table:
        if row.diverged:
            place = f"at step {row.horizon:,} on the {row.split} set"
            told.append(f"{row.optimiser}: {row.diverged} runs above their first loss {place}")
    return "\n".join([*text, *([""] if told else []), *(f"- {line}" for line in told)])


def _facts(compared: _Compared) -> dict[str, Any]:
    """The comparison for machines."""
    return {
        "table": [
            row._asdict() | {"meta_seeds": compared.means(row.optimiser, row.split, row.horizon)}
            for row in compared.result.table
        ],
        "chosen": {
            name: {str(horizon): tuned._asdict() for horizon, tuned in chosen.items()}
            for name, chosen in compared.result.chosen.items()
        },
        "seconds_per_step_and_seed": compared.result.seconds,
        "warnings": compared.result.warnings,
    }
