"""Studies of sequence metrics: encoders × seeds as a table and Figure 1, beside untrained ones and raw signals."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.settings import Settings
from l2lopt.core.types import Report, seed_of
from l2lopt.experiments import config as configs
from l2lopt.experiments import runs
from l2lopt.experiments.config import TrainConfig
from l2lopt.parallel.jobs import apart, kept, make_all, slug, spread, work_of
from l2lopt.parallel.threads import cpu_threads
from l2lopt.report import figures
from l2lopt.storage.run_log import write_json, write_text
from optimisees.metric.retrieval import Retrieval, neighbour_curve, retrieval
from optimisees.metric.sequence_metric import SequenceMetric
from optimisees.metric.time_warping import all_warped


class Encoder(Settings):
    """A sequence metric, trained with every seed, and left untrained with every seed."""

    label: str
    """Its name in the table and the figure, and its folders'."""
    config: str
    """The path of its config, beside the study's file."""
    changes: list[str] = Field(default_factory=list)
    """Made to it, such as "optimisee.hidden_size=50"."""


class MetricStudy(Settings):
    """Encoders compared by how well they retrieve the test windows' activities among other subjects' windows."""

    encoders: list[Encoder] = Field(min_length=1)
    """See `Encoder`; all must have the same test windows."""
    changes: list[str] = Field(default_factory=list)
    """Made to every config first."""
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    """Of every encoder."""
    neighbours: list[PositiveInt] = Field(default=[1, 5, 10], min_length=1)
    """The k of recall@k and of the nearest neighbours' vote."""
    band: NonNegativeInt = 12
    """Of the time warping of raw signals, in steps."""

    _apart = field_validator("encoders")(apart)


Kind = Literal["trained", "untrained", "Euclidean", "time warping"]
_OF_ENCODERS: Sequence[Kind] = ("trained", "untrained")
_OF_SIGNALS: Sequence[Kind] = ("Euclidean", "time warping")


class _Piece(NamedTuple):
    """A matrix of distances to be made: of an encoder and seed, or of raw signals."""

    kind: Kind
    config: TrainConfig
    folder: Path


class _Found(NamedTuple):
    """What became of a piece: the retrieval of its distances, and A(k)."""

    retrieval: Retrieval
    curve: list[float]


def reproduce(
    study: MetricStudy, source: str | Path, folder: str | Path, *, changes: Sequence[str], jobs: int, report: Report
) -> list[Path]:
    """Trains and measures what is not there yet, and writes the table and Figure 1; see `studies.reproduce`.

    Raises:
        UserError: for a mistake in the study or one of its configs, before any work, and for a changed recipe.
    """
    rows: dict[str, list[_Piece]] = {}
    for encoder in study.encoders:
        path, own = Path(source).parent / encoder.config, [*study.changes, *encoder.changes, *changes]
        for seed in study.seeds:
            for kind in _OF_ENCODERS:
                label = encoder.label if kind == "trained" else f"{encoder.label}, untrained"
                config = configs.load(path, [*own, f"seed={seed}", f"label={label!r}"], kind=TrainConfig)
                rows.setdefault(label, []).append(_Piece(kind, config, Path(folder) / f"{slug(label)}-{seed}"))
    models = {label: _model(pieces[0].config) for label, pieces in rows.items()}
    _check(models, study.neighbours)
    first = next(iter(rows.values()))[0].config
    for kind in _OF_SIGNALS:
        rows[f"raw signals, {kind}"] = [_Piece(kind, first, Path(folder) / slug(f"raw {kind}"))]
    make = partial(_make, tuple(study.neighbours), study.band)
    make_all(make, [piece for own in rows.values() for piece in own], jobs, report)
    found = {label: [make(piece, report) for piece in own] for label, own in rows.items()}
    paths = [Path(folder) / "table.md", Path(folder) / "table.json"]
    trained = [encoder.label for encoder in study.encoders]
    write_text(paths[0], _table(found, trained, study.neighbours))
    write_json(paths[1], {label: [_facts(one) for one in own] for label, own in found.items()})
    curves = {label: np.array([one.curve for one in found[label]]) for label in trained}
    return [*paths, *figures.neighbour_curves(curves, Path(folder) / "figures", title="test windows")]


def _model(config: TrainConfig) -> SequenceMetric:
    return configs.optimisee_of(config, SequenceMetric, "sequence-metric")


def _check(models: Mapping[str, SequenceMetric], neighbours: Sequence[int]) -> None:
    """That all retrieve the same windows, and that each query has so many to find."""
    for (_, one), (label, other) in pairwise(models.items()):
        if not torch.equal(one.inputs("test"), other.inputs("test")):
            remedy = "give the encoders the same subjects and data"
            raise UserError(f"study: {label}", expected="the test windows of the others", found="others", remedy=remedy)
    windows = next(iter(models.values())).windows("test")
    fewest = len(windows.subjects) - int(windows.subjects.bincount().max())
    if fewest < max(neighbours):
        expected, remedy = f"at least {max(neighbours)} windows of other test subjects", "leave out more subjects"
        raise UserError("study: test_subjects", expected=expected, found=str(fewest), remedy=remedy)


def _make(neighbours: tuple[int, ...], band: int, piece: _Piece, report: Report) -> _Found:
    """What became of a piece: read if it was made from the same work before, else made."""
    model, path = _model(piece.config), piece.folder / "found.json"
    work = work_of(
        kind=piece.kind,
        recipe=piece.config.model_dump(mode="json", exclude={"label"}),
        neighbours=neighbours,
        band=band,
        **model.fingerprint(),
    )
    own = _read(kept(path, work))
    if own is not None:
        return own
    distances = _distances(piece, model, band, report)
    if not distances.isfinite().all():
        remedy = "lower the rate, or clip the gradient"
        raise UserError(str(piece.folder), expected="finite distances", found="others", remedy=remedy)
    windows = model.windows("test")
    own = _Found(
        retrieval(distances, windows.labels, windows.subjects, neighbours), neighbour_curve(distances).tolist()
    )
    write_json(path, {"work": work, **_facts(own)})
    return own


def _distances(piece: _Piece, model: SequenceMetric, band: int, report: Report) -> Tensor:
    """Between the test windows, [n, n]."""
    inputs = model.inputs("test")
    with cpu_threads(piece.config.threads):
        if piece.kind == "Euclidean":
            return torch.cdist(inputs.flatten(1), inputs.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
        if piece.kind == "time warping":
            return all_warped(inputs, band, report)
        if piece.kind == "trained":
            params = runs.train(piece.config, piece.folder, resume=True, report=report).params
        else:
            params, _ = model.init(seed_of("train", piece.config.seed))
        return model.all_distances(params, inputs, report)


def _facts(found: _Found) -> dict[str, Any]:
    return {"retrieval": found.retrieval._asdict(), "curve": found.curve}


def _read(facts: Mapping[str, Any] | None) -> _Found | None:
    try:
        if facts is None:
            return None
        own = facts["retrieval"]
        recall, accuracy = ({int(k): float(x) for k, x in own[name].items()} for name in ("recall", "accuracy"))
        precision = own["mean_average_precision"]
        measured = Retrieval(recall, math.nan if precision is None else float(precision), accuracy)
        return _Found(measured, list(map(float, facts["curve"])))
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged: made anew
        return None


def _table(found: Mapping[str, Sequence[_Found]], trained: Sequence[str], neighbours: Sequence[int]) -> str:
    """The comparison in Markdown; of several seeds the mean, in brackets the lowest and the highest."""
    columns: dict[str, Callable[[_Found], float]] = {
        **{f"recall@{k}": partial(_recall, k) for k in neighbours},
        "mAP": lambda one: one.retrieval.mean_average_precision,
        **{f"accuracy, {k}-NN": partial(_accuracy, k) for k in neighbours},
    }
    values = {
        label: {name: [read(one) for one in own] for name, read in columns.items()} for label, own in found.items()
    }
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, own in values.items():
        cells = []
        for name, numbers in own.items():
            best = max(fmean(values[other][name]) for other in values if other not in trained)
            mean, bracket, others = spread(numbers, 3).partition(" (")
            if label in trained:
                mean = f"**{mean}**" if fmean(numbers) > best else f"{mean} ↓"
            cells.append(mean + bracket + others)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    told = "**Bold**: above the mean of every untrained encoder and of the raw signals; ↓: not above all of them."
    return "\n".join([*lines, "", told]) + "\n"


def _recall(k: int, found: _Found) -> float:
    return found.retrieval.recall[k]


def _accuracy(k: int, found: _Found) -> float:
    return found.retrieval.accuracy[k]
