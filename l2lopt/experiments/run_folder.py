"""The folder of a run: claimed before work, read afterwards."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, takewhile
from pathlib import Path
from tempfile import TemporaryFile
from types import NoneType
from typing import Any

from torch import Tensor

import optimisees
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.registry import Choice
from l2lopt.core.types import Aux
from l2lopt.evaluation.comparison import Evaluation
from l2lopt.evaluation.evaluation_board import write_evaluation_board
from l2lopt.evaluation.tuned_runs import choice_facts
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from l2lopt.optimisee import MODEL, SavedRun
from l2lopt.report import figures
from l2lopt.report.control_curves import NAME as CONTROLS
from l2lopt.report.control_curves import control_curves, read_controls
from l2lopt.report.validation_curves import read_validations, validation_curves
from l2lopt.storage import run_lock, run_log, tensor_file, toml_file
from l2lopt.storage.disk_space import not_writable
from l2lopt.storage.run_log import UNFINISHED, existing, write_json, written_whole
from l2lopt.weights.files import header

CONFIG = "config.toml"
"""File of a run's config, the first that it leaves."""
CHECKPOINT = "checkpoint.safetensors"
"""File from which a run goes on."""
INITIAL = "initial.safetensors"
"""File of the optimiser that a meta-training began from."""
_RESULTS = ("optimiser.safetensors", MODEL)
"""Files that a run leaves when it has ended."""
_FILES = (
    CONFIG,
    "metrics.jsonl",
    CHECKPOINT,
    INITIAL,
    "optimiser.safetensors",
    "evaluation.csv",
    "evaluation.json",
    MODEL,
    "result.json",
    "events.out.tfevents.*",
    "tensorboard/**/events.out.tfevents.*",
    "figures/loss-curves.*",
    "figures/training-curve.*",
    CONTROLS,
    "controls/events.out.tfevents.*",
    "figures/controls.*",
    "figures/validation.*",
)
"""Patterns of the files that every run may leave; `Optimisee.artefact_files` has those of its application."""


_FACTS = {
    "label": str,
    "optimisee": (str, dict),
    "optimiser": (str, dict),
    "seed": int,
    "step": int,
    "steps": int,
    "diverged": (int, NoneType),
    "metrics": dict,
    "watched": dict,
}
"""Fields of the header of `model.safetensors`, and the types of their values."""


@contextmanager
def claimed(
    run: str | Path,
    overwrite: bool,
    resume: bool,
    artefacts: Sequence[str] = (),
    source: Path | None = None,
    *,
    config: str = "",
) -> Iterator[Path]:
    """The folder for a run, made if need be, which other processes are kept out of within the block.

    Args:
        run: Folder of the run.
        overwrite: Whether an earlier run's files are removed.
        resume: Whether an earlier run goes on, so that its files stay; a run that has no checkpoint yet begins, without
            what there is of an earlier one.
        artefacts: Patterns of further files that such a run leaves, beside those of registered optimisees.
        source: File of weights from which the run begins.
        config: Text of the `config.toml` that the run is going to write: a folder that holds the same one, and not yet
            a record, is of a run that was killed at once, and begins anew.

    Raises:
        UserError: For a folder in which another process works, a file, a folder that cannot be written in, files that
            no run has left, a config of something else included, an earlier run where neither `overwrite` nor `resume`
            is given, one that has the source among its files, and a finished run without its checkpoint, which `resume`
            would begin anew.
    """
    if overwrite and resume:
        raise UserError("overwrite", expected="no resume beside it", found="both", remedy="choose one of them")
    folder = Path(run)
    # Not `Path.exists`, which raises for a name that no file can have; the lock says what is wrong with that.
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(str(folder), expected="a folder", found="a file", remedy="choose another --run")
    with run_lock.locked(folder):
        yield _cleared(folder, overwrite, resume, artefacts, source, config)


def _is_begun(folder: Path, config: str) -> bool:
    """Whether a folder holds this config, and nothing that the run would not make again."""
    try:
        left = {path.name for path in folder.iterdir()} - {run_lock.NAME, INITIAL}
        left -= {path.name for pattern in UNFINISHED for path in folder.glob(pattern)}
        return left == {CONFIG} and (folder / CONFIG).read_text(encoding="utf-8") == config
    except (OSError, ValueError):
        return False


def _cleared(
    folder: Path, overwrite: bool, resume: bool, artefacts: Sequence[str], source: Path | None, config: str
) -> Path:
    """A folder that is locked, without the files of an earlier run; see `claimed`."""
    another = "choose another --run"
    try:
        if not resume and _is_begun(folder, config):
            _remove(folder, artefacts, source)
        unfinished = {path for pattern in UNFINISHED for path in folder.glob(pattern)}
        if not resume and {path for path in folder.iterdir() if path.name != run_lock.NAME} - unfinished:
            expected, events = "a new or empty folder", any(folder.glob("events.out.tfevents.*"))
            if not (is_runs := _is_runs(folder / CONFIG)) or not events:
                # A run that was killed at once has left the first alone.
                remedy = f"{another}, or pass --resume if a run was killed here" if is_runs else another
                raise UserError(str(folder), expected=expected, found="files that no run has left", remedy=remedy)
            if not overwrite:
                remedy = f"{another}, or pass --resume to go on or --overwrite to replace it"
                raise UserError(str(folder), expected=expected, found="an earlier run", remedy=remedy)
            _remove(folder, artefacts, source)
        if resume and not (folder / CHECKPOINT).is_file():
            _check_begins(folder, another)
            # Another run may begin here now, and what was found of the earlier one would pass for its own. The config
            # stays until it is replaced: it tells that these are no files of someone else's.
            if (folder / CONFIG).is_file():
                _remove(folder, artefacts, source, keep=CONFIG)
            elif any(_left(folder, artefacts)):
                found = "files that no run has left"
                raise UserError(str(folder), expected="a run's folder", found=found, remedy=another)
        # At once, as no other process works here.
        for path in unfinished.union(*(folder.glob(f"figures/{pattern}") for pattern in UNFINISHED)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise not_writable(folder, error, another) from None
    return writable(folder)


def _check_begins(folder: Path, another: str) -> None:
    """Refuses a folder without a checkpoint in which a run with `resume` would begin on top of something else."""
    if os.path.lexists(folder / CONFIG) and not _is_runs(folder / CONFIG):
        found = f"a {CONFIG} of something else"
        raise UserError(str(folder), expected="a run's folder", found=found, remedy=another)
    finished = next((name for name in _RESULTS if (folder / name).is_file()), None)
    if finished is not None:
        remedy = f"put it back, or remove {finished} as well to begin anew"
        raise UserError(str(folder), expected=CHECKPOINT, found="a finished run without it", remedy=remedy)


def _is_runs(config: Path) -> bool:
    """Whether a file is a config as every run leaves one, and not one that someone else's program reads."""
    try:
        return {"optimisee", "optimiser"} <= toml_file.read_toml(config, "a run's config", "").keys()
    except UserError:
        return False


def _left(folder: Path, artefacts: Sequence[str]) -> Iterator[Path]:
    """The files in a folder that have the names of a run's."""
    patterns = sorted({*_FILES, *optimisees.artefact_files(), *artefacts})
    return chain.from_iterable(map(folder.glob, patterns))


def _remove(folder: Path, artefacts: Sequence[str], source: Path | None, keep: str = "") -> None:
    """Removes the files of a run, but for one by name; none where the next run begins from one of them."""
    found = [path for path in _left(folder, artefacts) if path.relative_to(folder).as_posix() != keep]
    if source is not None and source.resolve() in [path.resolve() for path in found]:
        remedy = f"choose another --run, or copy {source.name} to another folder"
        raise UserError(str(folder), expected="weights from elsewhere", found="the run's own", remedy=remedy)
    # What tells that a run was here goes last, for whoever is stopped in between.
    for path in sorted(found, key=lambda path: (path.name == CONFIG, path.name.startswith("events."))):
        path.unlink(missing_ok=True)


def writable(folder: Path, remedy: str = "choose another --run") -> Path:
    """A folder that can be written in, made if need be.

    Args:
        folder: Folder.
        remedy: Advice for the error.

    Raises:
        UserError: For one that cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise not_writable(folder, error, remedy) from None


def saved(folder: Path, what: str) -> tuple[Choice, SavedRun]:
    """The choice of the optimisee that a finished run has trained, and the run.

    Args:
        folder: Folder of the run.
        what: Noun phrase for what should be there, for the error.

    Raises:
        UserError: For a folder without such a run, or a damaged file.
    """
    params, _ = saved_tensors(folder, what)
    choice = configs.load(folder / CONFIG, kind=TrainConfig).optimisee
    options = {} if isinstance(choice, str) else {key: value for key, value in choice.items() if key != "name"}
    return choice, SavedRun(folder, options, params)


def saved_tensors(folder: Path, what: str) -> tuple[Params, Aux]:
    """The parameters that a finished run has trained, and the loss's own state.

    Args:
        folder: Folder of the run.
        what: Noun phrase for what should be there, for the error.

    Raises:
        UserError: For a folder without such a run, or a damaged file.
    """
    remedy = "give a folder in which l2lopt train has trained one to the end"
    for name in (CONFIG, MODEL):
        existing(folder / name, what, remedy)
    _, tensors = tensor_file.read(folder / MODEL, "l2lopt.model", "a model", remedy, _FACTS)
    # Not the loss's own state: a mask that a module keeps may be infinite.
    trained = {name: value for name, value in tensors.items() if name.startswith("params/")}
    tensor_file.check_finite(folder / MODEL, trained, "train again, with a lower rate")
    found: dict[str, dict[str, Tensor]] = {"params": {}, "aux": {}}
    for name, value in tensors.items():
        part, _, own = name.partition("/")
        found.setdefault(part, {})[own] = value
    return found["params"], found["aux"]


def row_names(name: str, folder: Path) -> tuple[str, str, str]:
    """The names that a run's row in an evaluation may have; it gets the first that no run before it has.

    Args:
        name: Label of the run's optimiser.
        folder: Folder of the run.
    """
    return name, f"{name} ({folder.name})", f"{name} ({folder})"


def evaluation_summary(path: Path) -> Mapping[str, Any]:
    """The "table", the "horizons", the "cut" curves, the "proper" names and the "own" row of an `evaluation.json`.

    Raises:
        UserError: For a missing or damaged file.
    """
    remedy = "run l2lopt evaluate again"
    written = run_log.read_bytes(path, "an evaluation's summary", remedy)
    try:
        read = json.loads(written)
        cut = None if "cut" not in read else list(map(str, read["cut"]))  # older files do not say it
        proper = {name: str(value) for name, value in read.get("proper", {}).items()}
        table, horizons = [dict(row) for row in read["table"]], list(map(int, read["horizons"]))
        own = None if read.get("own") is None else str(read["own"])
        return {"table": table, "horizons": horizons, "cut": cut, "proper": proper, "own": own}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(str(path), expected="an evaluation's summary", found="damage", remedy=remedy) from None


def draw_evaluation(folder: Path, title: str) -> list[Path]:
    """Draws `figures/loss-curves` from the files of `write_evaluation`, and gives the paths.

    Args:
        folder: Folder of the evaluation.
        title: Line above the panels.

    Raises:
        UserError: For a missing or damaged file.
    """
    bands = figures.read(folder / "evaluation.csv")
    summary = evaluation_summary(folder / "evaluation.json")
    said = {"breaks": summary["horizons"], "cut": summary["cut"], "proper": summary["proper"]}
    return figures.loss_curves(bands, folder / "figures", title=title, **said)


def draw_meta_training(folder: Path, title: str) -> list[Path]:
    """Draws what the records of a meta-training hold, and gives the paths.

    That is `figures/controls` from `controls.csv`, and `figures/validation` from the validations in `metrics.jsonl`.

    Args:
        folder: Folder of the run.
        title: Line above the panels.

    Raises:
        UserError: For a damaged file.
    """
    paths = []
    if os.path.isfile(folder / CONTROLS):
        paths += control_curves(read_controls(folder / CONTROLS), folder / "figures", title)
    if os.path.isfile(folder / "metrics.jsonl"):
        validations = read_validations(folder / "metrics.jsonl")
        # One alone is the comparison of something with itself.
        if len(validations.updates) > 1:
            file = folder / "optimiser.safetensors"
            kept = header(file)["training"].get("best_update") if file.is_file() else None
            paths += validation_curves(validations, folder / "figures", title, kept)
    return paths


def remove_events(folder: Path) -> None:
    """Removes TensorBoard's events below a folder, and the folders that are then empty; all else there stays.

    What cannot be removed, such as a folder with the name of events, stays as well.
    """
    for path in [*folder.glob("**/events.out.tfevents.*")]:
        with suppress(OSError):
            path.unlink()
            for parent in takewhile(lambda one: one.is_relative_to(folder), path.parents):
                parent.rmdir()  # which a folder with anything in it refuses


def leave_evaluation(folder: Path, result: Evaluation, own: str) -> None:
    """Leaves an evaluation in a run's folder: its files, its figure, and both for TensorBoard.

    Args:
        folder: Folder of the run.
        result: Evaluation.
        own: Name of the run's own row.
    """
    write_evaluation(folder, result, own)
    paths = draw_evaluation(folder, folder.name)
    remove_events(folder / "tensorboard")
    write_evaluation_board(result, folder / "tensorboard", paths)


def write_evaluation(folder: Path, result: Evaluation, own: str | None = None) -> None:
    """Writes `evaluation.csv` and `evaluation.json` (table, chosen rates, warnings, the name of the run's own row)."""
    with (
        written_whole(folder / "evaluation.csv") as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(figures.COLUMNS)
        lines.writerows(result.rows)
    summary = {
        "table": [row._asdict() for row in result.table],
        "horizons": sorted({row.horizon for row in result.table}),
        "chosen": {name: choice_facts(chosen) for name, chosen in result.chosen.items()},
        "seconds_per_step_and_seed": result.seconds,
        "warnings": result.warnings,
        "cut": result.cut,
        "proper": result.proper,
        "own": own,
    }
    write_json(folder / "evaluation.json", summary)
