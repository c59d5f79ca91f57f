"""Whole experiments in a run's folder: what the command line does, for scripts."""

import csv
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from l2lopt import kernels
from l2lopt.core import registry
from l2lopt.core.errors import UserError, above_0
from l2lopt.core.registry import Choice
from l2lopt.core.types import Params, Report, silent
from l2lopt.evaluation import comparison
from l2lopt.evaluation.comparison import Evaluation
from l2lopt.experiments import config as configs
from l2lopt.experiments import from_python
from l2lopt.experiments.config import Config, TrainConfig
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes
from l2lopt.parallel.threads import cpu_threads
from l2lopt.report import figures
from l2lopt.storage import tensor_file
from l2lopt.storage.checkpoint import CheckpointFile
from l2lopt.storage.run_log import NoRecords, Records, existing, write_json, write_projector, write_text, written_whole
from l2lopt.training import meta_train as meta_training
from l2lopt.training import train as training
from l2lopt.training.train import Trained
from l2lopt.weights import files as weights
from optimisees.data.datasets import blank
from optimisees.data.text import Corpus, Vocabulary
from optimisees.draw import pictures
from optimisees.draw.model import Draw
from optimisees.labelling.sequence_labelling import SequenceLabelling
from optimisees.language.language_model import LanguageModel
from optimisees.metric.sequence_metric import SequenceMetric

_MADE = (
    "config.toml",
    "metrics.jsonl",
    "checkpoint.safetensors",
    "optimiser.safetensors",
    "evaluation.csv",
    "evaluation.json",
    "model.safetensors",
    "result.json",
    "vocabulary.json",
    "projector_config.pbtxt",
    "embedding.tsv",
    "embedding-labels.tsv",
    "labels.json",
    "mistakes.txt",
)
_DRAWN = ("loss-curves", "training-curve", "labelled-sequence", "samples")
_log = logging.getLogger(__name__)


def meta_train(
    config: str | Path | Mapping[str, Any] | Config | Optimisee | Sequence[Optimisee],
    run: str | Path,
    *,
    optimiser: Choice | None = None,
    changes: Sequence[str] = (),
    overwrite: bool = False,
    resume: bool = False,
    report: Report = silent,
) -> Path:
    """Meta-trains the optimiser that a config describes, or one for an optimisee made in Python.

    Leaves `config.toml`, `metrics.jsonl`, TensorBoard events and `optimiser.safetensors` in the run's folder. Where
    `torchrun` has started several processes, each makes its own runs of the meta-batch: `meta_training.meta_train`.

    Args:
        config: A TOML file, a mapping, or a `Config`; or an optimisee, such as `make_optimisee` gives, and several to
            meta-train on all of them. All other settings are then those of an empty config.
        run: The folder; it must be new or empty unless `overwrite`.
        optimiser: The learned optimiser for an optimisee: a name, or a mapping of the name and its options. A config
            names its own.
        changes: Changes to the config, such as "unroll.length=200".
        overwrite: Whether an earlier run's files are removed first.
        resume: Whether an interrupted run of the same config (and the same optimisee) goes on from its last checkpoint,
            or begins if there is none; the end is the same to the byte.
        report: The function that is told the progress.

    Raises:
        UserError: for a mistake in the config, another optimisee than that of the run to go on with, or a folder that
            holds a run already.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import l2lopt
        >>> inputs = torch.randn(200, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: nn.Linear(4, 2), nn.functional.cross_entropy, samples)
        >>> changes = ["meta.updates=2", "unroll.length=5", "validation.seeds=1", "validation.horizons=[5]"]
        >>> optimiser = {"name": "coordinatewise", "hidden_size": 4}
        >>> run = l2lopt.meta_train(problem, "runs/mine", optimiser=optimiser, changes=changes)
        >>> sorted(path.name for path in run.glob("o*"))
        ['optimiser.safetensors']
        >>> run = l2lopt.meta_train(problem, run, optimiser=optimiser, changes=changes, resume=True)  # goes on

        The same from a config: `l2lopt.meta_train("configs/demo.toml", "runs/demo")`.
    """
    with processes.together():
        source = from_python.source(config, optimiser, is_trained=True)
        experiment = configs.build(configs.load(source.config, changes), source.optimisees)
        settings = experiment.config
        folder = processes.on_first(lambda: _claim(Path(run), overwrite, resume))
        work = settings.model_dump(mode="json", exclude={"evaluation", "label"})
        for number, optimisee in enumerate(experiment.optimisees):
            work |= {f"{number}.{name}": value for name, value in optimisee.fingerprint().items()}
        checkpoint = CheckpointFile(folder / "checkpoint.safetensors", work)
        kept = checkpoint.load()
        processes.on_first(lambda: write_text(folder / "config.toml", configs.dump(settings)))
        after, pending = (kept[0]["update"], None if kept[0]["validated"] else "validation") if kept else (-1, None)
        recording = nullcontext(NoRecords()) if processes.rank() else closing(Records(folder, after, pending))
        with recording as records, cpu_threads(settings.threads):
            result = meta_training.meta_train(
                experiment.optimiser,
                experiment.optimisees,
                experiment.unroll,
                settings.meta,
                settings.unroll,
                score=partial(experiment.score, report=report),
                seed=settings.seed,
                backend=settings.backend,
                records=records,
                report=report,
                checkpoint=checkpoint,
            )
        facts = {
            "label": settings.name,
            "optimisee": settings.optimisee,
            "best_update": result.update,
            "score": result.score,
            "meta_updates": settings.meta.updates,
            "inner_steps": result.inner_steps,
            "skipped_unrolls": result.skipped,
        }
        path = folder / "optimiser.safetensors"
        processes.on_first(lambda: weights.save(experiment.optimiser, path, facts))
    return folder


def evaluate(
    *runs: str | Path,
    optimisee: Optimisee | Sequence[Optimisee] | None = None,
    changes: Sequence[str] = (),
    report: Report = silent,
) -> Evaluation:
    """Compares the learned optimisers of one or more runs with tuned baselines, all on the same fresh problems.

    Leaves `evaluation.csv` and `evaluation.json` (table, chosen baselines, warnings) in every run's folder. Started by
    `torchrun`, its processes share out the problems.

    Args:
        runs: Folders that `meta_train` left; several must agree on optimisee, seed and evaluation.
        optimisee: The optimisee that the runs were given, if it was made in Python; of several the first.
        changes: Changes to their configs, such as "evaluation.seeds=50".
        report: The function that is told the progress.

    Raises:
        UserError: for a folder without a run, damaged weights, an optimisee that is not that of the runs, or runs that
            cannot be compared.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import l2lopt
        >>> inputs = torch.randn(200, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: nn.Linear(4, 2), nn.functional.cross_entropy, samples)
        >>> changes = ["meta.updates=2", "unroll.length=5", "validation.seeds=1", "validation.horizons=[5]"]
        >>> run = l2lopt.meta_train(problem, "runs/compared", changes=changes)
        >>> changes = ["evaluation.steps=5", "evaluation.horizons=[5]", "evaluation.seeds=3"]
        >>> changes += ["evaluation.baselines=[{optimiser='adam', rates=[0.01, 0.1]}]"]
        >>> result = l2lopt.evaluate(run, optimisee=problem, changes=changes)
        >>> sorted({row.optimiser for row in result.table})
        ['adam', 'learned-lstm']
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise UserError("evaluate", expected="at least one run", found="none", remedy="name a run's folder")
    settings = [_config_of(folder, changes) for folder in folders]
    for folder, other in zip(folders[1:], settings[1:], strict=True):
        for key in ("optimisee", "seed", "evaluation"):
            if getattr(other, key) != getattr(settings[0], key):
                expected, found = f"the {key} of {folders[0]}", "another"
                raise UserError(str(folder), expected=expected, found=found, remedy="evaluate it by itself")
    with processes.together():
        compared_on = settings[0].model_copy(update={"mixed_with": []})
        first = configs.build(compared_on, from_python.listed(optimisee)[:1])
        learned = {}
        for folder, own in zip(folders, settings, strict=True):
            names = (own.name, f"{own.name} ({folder.name})", f"{own.name} ({folder})")
            name = next((name for name in names if name not in learned), None)
            if name is None:
                raise UserError("evaluate", expected="each run once", found=f"{folder} again", remedy="leave it out")
            optimiser = configs.fitting(weights.load(folder / "optimiser.safetensors"), [first.optimisee])
            learned[name] = kernels.fast(optimiser.to(configs.device(own.device)), own.backend)
        with cpu_threads(settings[0].threads):
            result = comparison.evaluate(
                learned, first.optimisee, settings[0].evaluation, seed=settings[0].seed, report=report
            )
        for folder in folders if processes.rank() == 0 else ():
            write_evaluation(folder, result)
    return result


def train(
    config: str | Path | Mapping[str, Any] | TrainConfig | Optimisee,
    run: str | Path,
    *,
    optimiser: Choice | Path | Optimiser | None = None,
    changes: Sequence[str] = (),
    overwrite: bool = False,
    resume: bool = False,
    report: Report = silent,
) -> Trained:
    """Trains the optimisee that a config describes, or one made in Python, with any optimiser, to the end.

    Leaves `config.toml`, `metrics.jsonl`, TensorBoard events, `model.safetensors` (parameters as "params/…", the loss's
    own state as "aux/…", and in the header what they are), `result.json` and the training curve in `figures/` in the
    run's folder. A language model leaves `vocabulary.json` too; sequence labelling that, `labels.json` (precision,
    recall and F1 of each label on the test sequences, and the one of them with most changes of label, which is drawn in
    `figures/`) and `mistakes.txt` (a line for each of theirs, by file and line where they are tokens); a siamese
    sequence metric the test windows for TensorBoard's projector.

    Args:
        config: A TOML file, a mapping, or a `TrainConfig`; or an optimisee, such as `make_optimisee` gives. All other
            settings are then those of an empty config.
        run: The folder; it must be new or empty unless `overwrite`.
        optimiser: The optimiser for an optimisee: a name such as "torch.optim.NAdam"; a mapping of the name and its
            options, such as {"name": "adam", "lr": 0.01}; weights, by their name, their file or the folder of their
            meta-training; or an optimiser, such as `load` gives. A config names its own.
        changes: Changes to the config, such as "train.steps=200".
        overwrite: Whether an earlier run's files are removed first.
        resume: Whether an interrupted run of the same config (and the same optimisee and optimiser) goes on from its
            last checkpoint, or begins if there is none; the end is the same to the byte.
        report: The function that is told the progress.

    Raises:
        UserError: for a mistake in the config, damaged weights, another optimisee or optimiser than that of the run to
            go on with, a folder that holds a run already, or several processes of `torchrun`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import l2lopt
        >>> inputs = torch.randn(200, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: nn.Linear(4, 2), nn.functional.cross_entropy, samples)
        >>> result = l2lopt.train(problem, "runs/adam", optimiser="torch.optim.Adam", changes=["train.steps=30"])
        >>> result.steps
        30
        >>> result = l2lopt.train(problem, "runs/learned", optimiser=l2lopt.load("lstm"), changes=["train.steps=30"])
        >>> bool(result.metrics["loss"] < 0.7)
        True
    """
    processes.alone("train")
    source = from_python.source(config, optimiser)
    loaded = configs.load(source.config, changes, kind=TrainConfig)
    built = configs.build_training(loaded, source.optimisees, source.optimiser)
    settings = built.config
    folder = _claim(Path(run), overwrite, resume)
    work = settings.model_dump(mode="json", exclude={"label"}) | {"weights": _digest(settings.optimiser)}
    checkpoint = CheckpointFile(folder / "checkpoint.safetensors", work | built.optimisee.fingerprint())
    kept = checkpoint.load()
    write_text(folder / "config.toml", configs.dump(settings))
    for name, facts in built.optimisee.files().items():
        write_json(folder / name, facts)
    if told := built.optimisee.told():
        _log.info(told)
    with closing(Records(folder, kept[0]["step"] if kept else -1)) as records, cpu_threads(settings.threads):
        result = training.train(
            built.optimisee,
            built.factory,
            settings.train,
            seed=settings.seed,
            records=records,
            report=report,
            checkpoint=checkpoint,
        )
    facts = {
        "label": settings.name,
        "optimisee": settings.optimisee,
        "optimiser": settings.optimiser,
        "seed": settings.seed,
        "step": result.step,
        "steps": result.steps,
        "diverged": result.diverged,
        "metrics": result.metrics,
        "watched": result.watched,
    }
    parts = {"params": result.params, "aux": result.aux}
    tensors = {f"{part}/{name}": value for part, named in parts.items() for name, value in named.items()}
    tensor_file.write(folder / "model.safetensors", "l2lopt.model", facts, tensors)
    write_json(folder / "result.json", facts)
    if isinstance(built.optimisee, SequenceLabelling):
        _write_labels(folder, built.optimisee, result.params)
    plot(folder)
    if isinstance(built.optimisee, SequenceMetric) and built.optimisee.encoder == "siamese":
        _project(folder, built.optimisee, result)
    return result


def _project(folder: Path, model: SequenceMetric, result: Trained) -> None:
    """The test windows' embeddings, for TensorBoard's projector."""
    windows = model.windows("test")
    with torch.no_grad():
        points = model.embed(result.params, model.inputs("test"))
    columns = {
        "activity": [windows.activities[label] for label in windows.labels.tolist()],
        "subject": list(map(str, windows.subjects.tolist())),
    }
    write_projector(folder, points.tolist(), columns)


def sample(run: str | Path, prompt: str = "", *, tokens: int = 100, temperature: float = 1.0, seed: int = 0) -> str:
    """A text that goes on where the prompt stops, by the language model that `train` has left.

    Args:
        run: its folder.
        prompt: read after a line's end; of words of the vocabulary, or of its characters.
        tokens: how many follow.
        temperature: above 1 bolder, below 1 safer, at 0 always the likeliest token.
        seed: of the draws.

    Raises:
        UserError: for a folder without a language model's run, and a prompt with what is not in the vocabulary.
    """
    what, remedy = "a trained language model", "give a folder in which l2lopt train has trained one to the end"
    options, params = _trained(Path(run), what, remedy)
    path = existing(Path(run) / "vocabulary.json", what, remedy)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = Vocabulary(tuple(facts["tokens"]), facts["unit"])
    except (ValueError, KeyError, TypeError):
        raise UserError(str(path), expected="a vocabulary", found="damage", remedy=remedy) from None
    options |= {"data": Corpus.without_texts(vocabulary)}
    model: LanguageModel = registry.build({"language-model": LanguageModel}, "optimisee", options)
    given = vocabulary.prompt(prompt)
    drawn = model.speak(params, given, tokens, temperature, seed)
    return vocabulary.decode([*given.tolist(), *drawn])


def paint(run: str | Path, count: int = 8, seed: int = 0) -> list[Path]:
    """Images from the prior by the DRAW that `train` has left, as they come to be.

    Leaves `samples.png` (a row an image, columns of time steps, the rectangle that is written in drawn in) and
    `samples.gif` (every step) in the run's `figures/`, and gives their paths.

    Args:
        run: its folder.
        count: how many images.
        seed: of the draws.

    Raises:
        UserError: for a folder without a DRAW's run.
    """
    above_0("sample", count=count)
    options, params = _trained(Path(run), "a trained DRAW", "give a folder in which l2lopt train has trained one")
    for key in ("size", "data", "download"):
        options.pop(key, None)
    options |= {"dataset": blank(tuple(params["canvas"].shape)), "batch_size": 1}
    model: Draw = registry.build({"draw": Draw}, "optimisee", options)
    images, rectangles = model.sample(params, count, seed)
    paths = [Path(run) / "figures" / f"samples.{ending}" for ending in ("png", "gif")]
    pictures.growth(paths[0], images, rectangles)
    pictures.animation(paths[1], images, rectangles)
    return paths


def paints(run: str | Path) -> bool:
    """Whether a folder is that of a DRAW's run."""
    config = _training(Path(run))
    return config is not None and _choice(config).get("name") == "draw"


def _training(folder: Path) -> TrainConfig | None:
    """The config of a run of training, None for another folder."""
    try:
        return configs.load(folder / "config.toml", kind=TrainConfig)
    except UserError:
        return None


def plot(*runs: str | Path) -> list[Path]:
    """Draws into `figures/` of every run's folder, as PNG and SVG, what its records hold.

    That is `loss-curves` from `evaluation.csv`, or, where `train` has begun the run, `training-curve` from
    `metrics.jsonl` and `labelled-sequence` from `labels.json`, if it is there.

    Raises:
        UserError: for a run without an evaluation, or a damaged one.
    """
    folders = [Path(run) for run in runs]
    paths = []
    for folder in folders:
        if (folder / "result.json").exists() or _training(folder):
            curves = figures.read_training(folder / "metrics.jsonl")
            paths += figures.training_curve(curves, folder / "figures", title=folder.name)
            if (folder / "labels.json").exists():
                paths += figures.labelled_sequence(figures.read_labelled(folder / "labels.json"), folder / "figures")
            continue
        bands = figures.read(folder / "evaluation.csv")
        breaks = _horizons(folder / "evaluation.json")
        paths += figures.loss_curves(bands, folder / "figures", title=folder.name, breaks=breaks)
    return paths


def publish(run: str | Path, path: str | Path, **facts: Any) -> Path:
    """Writes the learned optimiser of a run to a file for others, and gives its path.

    The header's "training" has the run's config, what it cost, the table of its evaluation where there is one, and
    `facts`. `weights.header` reads it, `l2lopt weights FILE` shows it.

    Args:
        run: a folder that `meta_train` has left.
        path: of the file.
        facts: anything JSON can say; "seconds" are those of the meta-training, "comparisons" are tables of problems by
            their label, lines as in `evaluation.json`.

    Raises:
        UserError: for a folder without a run, or damaged files.
    """
    folder, file = Path(run), Path(run) / "optimiser.safetensors"
    training = weights.header(file)["training"]
    training["config"] = _config_of(folder, ()).model_dump(mode="json", exclude_none=True)
    if (folder / "evaluation.json").exists():
        training["comparisons"] = {"its own problem": _summary(folder / "evaluation.json")["table"]}
    weights.save(weights.load(file), path, training | facts)
    return Path(path)


def demo(
    run: str | Path = "runs/demo", *, changes: Sequence[str] = (), report: Report = silent
) -> tuple[Evaluation, list[Path]]:
    """Meta-trains the demo's optimiser, evaluates it, draws the curves; an earlier demo in the folder is replaced."""
    folder = meta_train(configs.demo(), run, changes=changes, overwrite=True, report=report)
    return evaluate(folder, report=report), plot(folder)


def _claim(folder: Path, overwrite: bool, resume: bool) -> Path:
    """The folder, made if need be, without an earlier run's files; of others it says so."""
    another = "choose another --run"
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(str(folder), expected="a folder", found="a file", remedy=another)
        if folder.exists() and any(folder.iterdir()) and not resume:
            expected, events = "a new or empty folder", list(folder.glob("events.out.tfevents.*"))
            if not events or not (folder / "config.toml").is_file():
                raise UserError(str(folder), expected=expected, found="files that no run has left", remedy=another)
            if not overwrite:
                remedy = f"{another}, or pass --resume to go on or --overwrite to replace it"
                raise UserError(str(folder), expected=expected, found="an earlier run", remedy=remedy)
            pictures = [path for figure in _DRAWN for path in (folder / "figures").glob(f"{figure}.*")]
            for path in [*(folder / name for name in _MADE), *events, *pictures]:
                path.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # it can be written in
            pass
    except OSError as error:
        found = error.strerror or str(error)
        raise UserError(str(folder), expected="a folder to write in", found=found, remedy=another) from None
    return folder


def _trained(folder: Path, what: str, remedy: str) -> tuple[dict[str, Any], Params]:
    """The choice of the optimisee that `train` has trained in a folder, and its parameters."""
    for name in ("config.toml", "model.safetensors"):
        existing(folder / name, what, remedy)
    _, tensors = tensor_file.read(folder / "model.safetensors", "l2lopt.model", "a model", remedy)
    params = {name.removeprefix("params/"): value for name, value in tensors.items() if name.startswith("params/")}
    return _choice(configs.load(folder / "config.toml", kind=TrainConfig)), params


def _choice(config: TrainConfig) -> dict[str, Any]:
    """Its optimisee as a table of name and options."""
    return {"name": config.optimisee} if isinstance(config.optimisee, str) else dict(config.optimisee)


def _digest(optimiser: Choice) -> str | None:
    """What tells the weights that an optimiser is loaded from, if it is, from all others."""
    if isinstance(optimiser, str) or "weights" not in optimiser:
        return None
    return hashlib.sha256(weights.find(optimiser["weights"]).read_bytes()).hexdigest()


def _write_labels(folder: Path, optimisee: SequenceLabelling, params: Params) -> None:
    """`labels.json` and `mistakes.txt`, of the test sequences."""
    data, (true, found, scores) = optimisee.data, optimisee.label(params)
    classes, wrong = data.classes, []
    for sequence, pair in enumerate(zip(true, found, strict=True)):
        for position, (one, other) in enumerate(zip(*pair, strict=True)):
            if one != other:
                wrong.append(f"{data.test.places(sequence, position)}: {classes[one]} taken for {classes[other]}\n")
    write_text(folder / "mistakes.txt", "".join(wrong))
    shown = max(range(len(true)), key=lambda k: sum(a != b for a, b in pairwise(true[k])))
    example = data.test.inputs[: len(true[shown]), shown].tolist()
    facts = {
        "f1": scores.f1,
        "labels": scores.labels,
        "mistakes": len(wrong),
        "positions": sum(map(len, true)),
        "example": {
            "place": data.test.places(shown, 0),
            "classes": classes,
            "true": true[shown],
            "found": found[shown],
            "tokens": None if data.tokens is None else [data.tokens[k] for k in example],
            "signals": example if data.tokens is None else None,
            "rate": data.rate,
        },
    }
    write_json(folder / "labels.json", facts)
    _log.info(f"{len(wrong):,} of {facts['positions']:,} test labels are wrong: {folder / 'mistakes.txt'}")


def _config_of(folder: Path, changes: Sequence[str]) -> Config:
    path = existing(folder / "config.toml", "a run's config", "give a folder that l2lopt meta-train has left")
    return configs.load(path, changes)


def _horizons(path: Path) -> list[int]:
    """Where a baseline's curve goes over to its next run."""
    horizons: list[int] = _summary(path)["horizons"]
    return horizons


def _summary(path: Path) -> dict[str, Any]:
    """What `write_evaluation` has left."""
    remedy = "run l2lopt evaluate again"
    existing(path, "an evaluation's summary", remedy)
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return {"table": [dict(row) for row in read["table"]], "horizons": list(map(int, read["horizons"]))}
    except (ValueError, KeyError, TypeError):
        raise UserError(str(path), expected="an evaluation's summary", found="damage", remedy=remedy) from None


def write_evaluation(folder: Path, result: Evaluation) -> None:
    """`evaluation.csv` and `evaluation.json` (table, chosen baselines, warnings)."""
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
        "chosen": {
            name: {str(horizon): run._asdict() for horizon, run in by_horizon.items()}
            for name, by_horizon in result.chosen.items()
        },
        "seconds_per_step_and_seed": result.seconds,
        "warnings": result.warnings,
    }
    write_json(folder / "evaluation.json", summary)
