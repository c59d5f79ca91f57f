"""Studies of language models: cells × seeds as one table, beside n-gram models of the same text."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.settings import Settings
from l2lopt.core.types import Report
from l2lopt.experiments import config as configs
from l2lopt.experiments import runs as experiments
from l2lopt.experiments.config import TrainConfig
from l2lopt.parallel.jobs import apart, kept, make_all, slug, spread, work_of
from l2lopt.storage.run_log import write_json, write_text
from optimisees.data.text import EOS
from optimisees.language.language_model import Counts, LanguageModel
from optimisees.language.n_grams import KneserNey


class Run(Settings):
    """A language model, trained with every seed."""

    label: str
    """Its name in the table, and its folders'."""
    changes: list[str] = Field(default_factory=list)
    """Made to the study's config, such as "optimisee.cell=irc-gru"."""
    seeds: list[NonNegativeInt] | None = Field(default=None, min_length=1)
    """Its own; by default the study's."""
    versus: str | None = None
    """The label of the run that the table sets it against, by the seeds that both have."""


class LanguageStudy(Settings):
    """Language models trained by one recipe on one text."""

    config: str
    """The path of the recipe's config, beside the study's file."""
    changes: list[str] = Field(default_factory=list)
    """Made to it first."""
    seeds: list[NonNegativeInt] = Field(default=[0], min_length=1)
    """Of every run without its own."""
    n_grams: list[PositiveInt] = Field(default=[1, 5])
    """Orders of the Kneser-Ney models beside them; 1 is a unigram model."""
    runs: list[Run] = Field(min_length=1)
    """See `Run`."""

    _apart = field_validator("runs")(apart)


class _Piece(NamedTuple):
    """A run of one seed: its config and its folder."""

    config: TrainConfig
    folder: Path


class _Found(NamedTuple):
    """What became of a piece: perplexities, parameters, and tokens a second of its training."""

    valid: float
    test: float
    counts: Counts
    speed: float


def reproduce(
    study: LanguageStudy, source: str | Path, folder: str | Path, *, changes: Sequence[str], jobs: int, report: Report
) -> list[Path]:
    """Trains what is not there yet, and writes the table; see `studies.reproduce`.

    Raises:
        UserError: for a mistake in the study or one of its configs, before any work, and for a changed recipe.
    """
    labels = [run.label for run in study.runs]
    runs: dict[str, dict[int, _Piece]] = {}
    models: list[LanguageModel] = []
    for run in study.runs:
        if run.versus is not None and run.versus not in labels:
            remedy = did_you_mean(run.versus, labels)
            raise UserError(f"{source}: {run.label}", expected="a run's label", found=run.versus, remedy=remedy)
        runs[run.label] = {
            seed: _Piece(
                configs.load(
                    Path(source).parent / study.config,
                    [*study.changes, *run.changes, *changes, f"seed={seed}", f"label={run.label!r}"],
                    kind=TrainConfig,
                ),
                Path(folder) / f"{slug(run.label)}-{seed}",
            )
            for seed in (study.seeds if run.seeds is None else run.seeds)
        }
        model = _model(next(iter(runs[run.label].values())).config)
        models.append(model)
        if model.fingerprint() != models[0].fingerprint() or model.evaluation_tokens != models[0].evaluation_tokens:
            remedy = "make studies of their own"
            raise UserError(
                f"{source}: {run.label}", expected="the texts of the first run", found="others", remedy=remedy
            )
    rounds = zip_longest(*(own.values() for own in runs.values()))
    make_all(_make, [piece for one in rounds for piece in one if piece is not None], jobs, report)
    found = {label: {seed: _make(piece, report) for seed, piece in own.items()} for label, own in runs.items()}
    n_grams = {order: _n_gram(models[0], order) for order in study.n_grams}
    paths = [Path(folder) / "table.md", Path(folder) / "table.json"]
    write_text(paths[0], _table(study, found, n_grams))
    facts = {label: {str(seed): piece._asdict() for seed, piece in own.items()} for label, own in found.items()}
    write_json(paths[1], {"runs": facts, "n_grams": {str(order): own for order, own in n_grams.items()}})
    return paths


def _model(config: TrainConfig) -> LanguageModel:
    return configs.optimisee_of(config, LanguageModel, "language-model")


def _make(piece: _Piece, report: Report) -> _Found:
    """What became of a piece: read if it was made from the same work before, else made."""
    model, path = _model(piece.config), piece.folder / "found.json"
    work = work_of(recipe=piece.config.model_dump(mode="json", exclude={"label"}), **model.fingerprint())
    own = _read(kept(path, work))
    if own is not None:
        return own
    result = experiments.train(piece.config, piece.folder, resume=True, report=report)
    own = _Found(result.watched["perplexity"], result.metrics["perplexity"], model.counts(), result.speed)
    write_json(path, {"work": work, **own._asdict()})
    return own


def _read(facts: Mapping[str, Any] | None) -> _Found | None:
    try:
        if facts is None:
            return None
        numbers = {name: math.nan if facts[name] is None else float(facts[name]) for name in ("valid", "test", "speed")}
        return _Found(counts=Counts(*facts["counts"]), **numbers)
    except (ValueError, KeyError, TypeError):  # damaged: made anew
        return None


def _n_gram(beside: LanguageModel, order: int) -> dict[str, float]:
    """Its perplexities, on as much of the texts as the language models read."""
    texts, tokens = beside.texts, beside.texts.vocabulary.tokens
    model = KneserNey(texts.train.numpy(), len(tokens), tokens.index(EOS), order)
    read = {"valid": texts.valid[: beside.evaluation_tokens], "test": texts.test[: beside.evaluation_tokens]}
    return {name: model.perplexity(text.numpy()) for name, text in read.items()}


def _table(
    study: LanguageStudy, found: Mapping[str, Mapping[int, _Found]], n_grams: Mapping[int, Mapping[str, float]]
) -> str:
    """The comparison in Markdown: means, in brackets the lowest and the highest of several seeds; the median speed."""
    lines = [
        "| | seeds | recurrent parameters | in all | validation perplexity | test perplexity | tokens/s | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in study.runs:
        own = found[run.label]
        counts = next(iter(own.values())).counts
        recurrent = f"{counts.recurrent:,}" + (f" + {counts.gate_biases:,}" if counts.gate_biases else "")
        cells = [run.label, str(len(own)), recurrent, f"{counts.total:,}"]
        cells += [spread([getattr(piece, name) for piece in own.values()], 1) for name in ("valid", "test")]
        speeds = [piece.speed for piece in own.values() if piece.speed]
        cells.append(f"{median(speeds):,.0f}" if speeds else "")
        cells.append("" if run.versus is None else _against(run.versus, own, found[run.versus]))
        lines.append(f"| {' | '.join(cells)} |")
    for order, own_n in n_grams.items():
        label = "unigram" if order == 1 else f"Kneser-Ney {order}-gram"
        lines.append(f"| {label} | | | | {own_n['valid']:.1f} | {own_n['test']:.1f} | | |")
    return "\n".join(lines) + "\n"


def _against(label: str, own: Mapping[int, _Found], other: Mapping[int, _Found]) -> str:
    """The test perplexities' differences, seed by seed."""
    differences = [own[seed].test - other[seed].test for seed in own if seed in other]
    if not differences:
        return ""
    if not all(map(math.isfinite, differences)):
        return f"diverged, it or {label}"
    worse = fmean(differences) > 0
    sizes = differences if worse else [-difference for difference in differences]
    return f"{'**worse**' if worse else 'better'} than {label} by {spread(sizes, 1)}"
