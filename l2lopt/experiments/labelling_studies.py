"""Studies of sequence labelling: networks × seeds as one table of accuracy and F1 on test sequences."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, NonNegativeInt, field_validator

from l2lopt.core.settings import Settings
from l2lopt.core.types import Report
from l2lopt.experiments import config as configs
from l2lopt.experiments import runs
from l2lopt.experiments.config import TrainConfig
from l2lopt.parallel.jobs import apart, kept, make_all, slug, spread, work_of
from l2lopt.storage.run_log import write_json, write_text
from optimisees.labelling.sequence_labelling import SequenceLabelling


class Labeller(Settings):
    """A network, trained with every seed."""

    label: str
    """Its name in the table, and its folders'."""
    changes: list[str] = Field(default_factory=list)
    """Made to the study's config, such as "optimisee.layers=1"."""


class LabellingStudy(Settings):
    """Networks trained by one recipe on one task of sequence labelling."""

    config: str
    """The path of the recipe's config, beside the study's file."""
    changes: list[str] = Field(default_factory=list)
    """Made to it first."""
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    """Of every network."""
    labellers: list[Labeller] = Field(min_length=1)
    """See `Labeller`."""

    _apart = field_validator("labellers")(apart)


class _Piece(NamedTuple):
    """A network of one seed: its config and its folder."""

    config: TrainConfig
    folder: Path


def reproduce(
    study: LabellingStudy, source: str | Path, folder: str | Path, *, changes: Sequence[str], jobs: int, report: Report
) -> list[Path]:
    """Trains what is not there yet, and writes the table; see `studies.reproduce`.

    Raises:
        UserError: for a mistake in the study or one of its configs, before any work, and for a changed recipe.
    """
    pieces = {}
    for seed, one in product(study.seeds, study.labellers):
        own = [*study.changes, *one.changes, *changes, f"seed={seed}", f"label={one.label!r}"]
        config = configs.load(Path(source).parent / study.config, own, kind=TrainConfig)
        if seed == study.seeds[0]:
            _network(config)
        pieces[one.label, seed] = _Piece(config, Path(folder) / f"{slug(one.label)}-{seed}")
    make_all(_make, list(pieces.values()), jobs, report)
    found = {
        one.label: {seed: _make(pieces[one.label, seed], report) for seed in study.seeds} for one in study.labellers
    }
    paths = [Path(folder) / "table.md", Path(folder) / "table.json"]
    write_text(paths[0], _table(found))
    write_json(paths[1], {label: {str(seed): own for seed, own in by_seed.items()} for label, by_seed in found.items()})
    return paths


def _network(config: TrainConfig) -> SequenceLabelling:
    return configs.optimisee_of(config, SequenceLabelling, "sequence-labelling")


def _make(piece: _Piece, report: Report) -> dict[str, Any]:
    """What became of a piece, "parameters" and the test metrics: read if it was made from the same work, else made."""
    network, path = _network(piece.config), piece.folder / "found.json"
    work = work_of(recipe=piece.config.model_dump(mode="json", exclude={"label"}), **network.fingerprint())
    facts = kept(path, work)
    if facts is None:
        result = runs.train(piece.config, piece.folder, resume=True, report=report)
        parameters = sum(value.numel() for value in network.init(0)[0].values())
        facts = {"parameters": parameters, "step": result.step, **result.metrics}
        write_json(path, {"work": work, **facts})
    return facts


def _table(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """The comparison in Markdown: means, in brackets the lowest and the highest of several seeds."""
    lines = ["| | seeds | parameters | test accuracy | test F1 |", "|---|---|---|---|---|"]
    for label, by_seed in found.items():
        parameters = f"{next(iter(by_seed.values()))['parameters']:,}"
        spreads = (spread([own[name] for own in by_seed.values()], 3) for name in ("accuracy", "f1"))
        lines.append(f"| {' | '.join([label, str(len(by_seed)), parameters, *spreads])} |")
    return "\n".join(lines) + "\n"
