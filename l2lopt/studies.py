"""Studies: optimisers × problems × meta-seeds as one table that anyone can make again."""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, ValidationError
from torch import Tensor

from l2lopt import config as configs
from l2lopt import evaluation, experiments, kernels, language_studies, optimisers, plotting, tables, weights
from l2lopt.config import Config
from l2lopt.errors import UserError
from l2lopt.evaluation import SPLITS, Evaluation, FreeRun, Tuned
from l2lopt.language_studies import LanguageStudy
from l2lopt.optimisers import Optimiser
from l2lopt.pieces import make_all, slug
from l2lopt.records import existing, write_json, write_text
from l2lopt.settings import Settings
from l2lopt.tables import Choice
from l2lopt.threads import cpu_threads
from l2lopt.types import Report, silent


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


def load(source: str | Path) -> Study | LanguageStudy:
    """A study from a TOML file.

    Raises:
        UserError: for a missing file, one that is not TOML, or a mistake in it.
    """
    path = existing(
        Path(source), "a study's file", "give the path of a TOML file, such as configs/studies/digits-mlp.toml"
    )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), expected="a TOML file", found=str(error), remedy="mend that place") from None
    kind = LanguageStudy if "runs" in data else Study
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise tables.explain(str(path), error, kind.model_fields, data) from None


def reproduce(
    source: str | Path,
    folder: str | Path,
    *,
    changes: Sequence[str] = (),
    jobs: int = 1,
    report: Report = silent,
) -> list[Path]:
    """Makes a study's table and figures, from data to picture.

    Each piece leaves its files as soon as it is done, and a meta-training its checkpoints: a study that was stopped
    goes on where it stood. A run whose evaluation has changed since is made anew; a changed recipe is refused.

    Args:
        source: the study's TOML file; with `runs` in it, it is one of language models, see `language_studies`.
        folder: where everything goes.
        changes: to every config, such as "evaluation.seeds=50".
        jobs: pieces made at the same time, each in a process of its own.
        report: progress; with several jobs, of whole pieces.

    Returns:
        `table.md`, `table.json`, and a figure for each problem (of language models none).

    Raises:
        UserError: for a mistake in the study or one of its configs.
    """
    study, place = load(source), _Place(str(source), str(folder), tuple(changes))
    if isinstance(study, LanguageStudy):
        return language_studies.reproduce(study, source, folder, changes=changes, jobs=jobs, report=report)
    make_all(partial(_make, place), list(_pieces(study, place)), jobs, report)
    compared = {problem.label: _compared(study, place, number) for number, problem in enumerate(study.problems)}
    paths = [Path(folder) / "table.md", Path(folder) / "table.json"]
    write_text(paths[0], "\n\n".join(_table(label, found) for label, found in compared.items()) + "\n")
    write_json(paths[1], {label: _facts(found) for label, found in compared.items()})
    for label, (result, _) in compared.items():
        home = Path(folder) / slug(label)
        experiments.write_evaluation(home, result)
        paths += plotting.loss_curves(
            plotting.read(home / "evaluation.csv"),
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


def _seeds(study: Study, index: int) -> list[int]:
    """The meta-seeds of an optimiser; one that is taken as it is counts as the first."""
    return study.meta_seeds[:1] if study.optimisers[index].optimiser is not None else study.meta_seeds


def _given(contender: Contender) -> Optimiser | None:
    """The optimiser that is taken as it is."""
    choice = contender.optimiser
    if isinstance(choice, dict) and "weights" in choice:
        return weights.load(choice["weights"])
    return None if choice is None else optimisers.build(choice)


def _make(place: _Place, piece: _Work, report: Report = silent) -> FreeRun:
    """The piece's free run: read if it was made from the same work before, else made."""
    study = load(place.source)
    assert isinstance(study, Study)
    config = _config(study, place, piece)
    home = Path(place.folder) / slug(study.problems[piece.problem].label)
    work: dict[str, Any] = {
        "l2lopt": version("l2lopt"),
        "torch": torch.__version__,
        "seed": study.seed,
        "optimisee": config.optimisee,
        "evaluation": config.evaluation.model_dump(mode="json", exclude={"baselines"}),
    }
    if piece.meta_seed is None:
        baseline = config.evaluation.baselines[piece.optimiser]
        path, work["baseline"] = home / f"{slug(baseline.name)}.json", baseline.model_dump(mode="json")
        given = None
    else:
        contender = study.optimisers[piece.optimiser]
        folder, given = home / f"{slug(contender.label)}-{piece.meta_seed}", _given(contender)
        path, file = folder / "free-run.json", folder / "optimiser.safetensors"
    if given is not None:
        work["rule"] = weights.digest(given)
    elif piece.meta_seed is not None:
        work["recipe"] = config.model_dump(mode="json", exclude={"evaluation", "label"})
        work["weights"] = _digest(file)
    kept = _kept(path, work)
    if kept is not None:
        return kept
    if piece.meta_seed is not None and given is None:
        experiments.meta_train(config, folder, resume=True, report=report)
        work["weights"] = _digest(file)
    with cpu_threads(config.threads):
        optimisee, settings = configs.build(config).optimisee, config.evaluation
        if piece.meta_seed is None:
            run = evaluation.baseline_run(baseline, optimisee, settings, seed=study.seed, report=report)
        else:
            optimiser = kernels.fast((given or weights.load(file)).to(config.device), config.backend)
            stage = f"run {folder.name}"
            run = evaluation.learned_run(optimiser, optimisee, settings, seed=study.seed, report=report, stage=stage)
    losses = {split: {str(step): row.tolist() for step, row in steps.items()} for split, steps in run.losses.items()}
    chosen = {str(horizon): tuned._asdict() for horizon, tuned in run.chosen.items()}
    facts = {"kind": run.kind, "seconds": run.seconds, "warnings": run.warnings, "chosen": chosen, "losses": losses}
    write_json(path, {"work": work, **facts})
    return run


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _kept(path: Path, work: Mapping[str, Any]) -> FreeRun | None:
    """A free run written before, if it came from the same work."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["work"] != json.loads(json.dumps(work)):
            return None
        losses: dict[Any, dict[int, Tensor]] = {
            split: {int(step): torch.tensor(row) for step, row in steps.items()}
            for split, steps in facts["losses"].items()
        }
        chosen = {int(horizon): Tuned(**tuned) for horizon, tuned in facts["chosen"].items()}
        return FreeRun(facts["kind"], losses, facts["seconds"], chosen, facts["warnings"])
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
        own = [_make(place, _Work(problem, index, seed)) for seed in _seeds(study, index)]
        losses: dict[Any, dict[int, Tensor]] = {
            split: {
                step: torch.stack([run.losses[split][step] for run in own]).mean(0) for step in own[0].losses[split]
            }
            for split in SPLITS
        }
        runs[contender.label] = FreeRun("learned", losses, fmean(run.seconds for run in own))
        spread[contender.label] = own
    config = _config(study, place, _Work(problem, 0, None))
    for index, baseline in enumerate(config.evaluation.baselines):
        runs[baseline.name] = _make(place, _Work(problem, index, None))
    return _Compared(evaluation.compared(runs, config.evaluation.checked_horizons()), spread)


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
    return "\n".join(text)


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
