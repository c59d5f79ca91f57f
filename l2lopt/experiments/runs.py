"""Whole experiments in a run's folder: what the command line does, for scripts."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from l2lopt import kernels
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.types import Report, silent
from l2lopt.evaluation import comparison
from l2lopt.evaluation.comparison import Evaluation
from l2lopt.evaluation.contestants import untrained_name
from l2lopt.experiments import build, from_python
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import Config, TrainConfig, meta_training_config, training_config
from l2lopt.experiments.controls import leave_controls
from l2lopt.experiments.run_cache import FileCache, contestant_caches
from l2lopt.experiments.run_facts import code_of, own_facts, recipe_of, weights_file, weights_of
from l2lopt.experiments.run_folder import (
    CHECKPOINT,
    INITIAL,
    claimed,
    draw_evaluation,
    draw_meta_training,
    leave_evaluation,
    row_names,
    writable,
)
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes
from l2lopt.parallel.threads import cpu_threads
from l2lopt.report import figures
from l2lopt.storage import tensor_file
from l2lopt.storage.checkpoint import CheckpointFile, restoring
from l2lopt.storage.run_lock import locked
from l2lopt.storage.run_log import NoRecords, Records, existing_folder, write_json, write_text
from l2lopt.training import meta_train as meta_training
from l2lopt.training import train as training
from l2lopt.training.train import Trained
from l2lopt.weights import files as weights

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

    Leaves `config.toml`, `metrics.jsonl`, TensorBoard events, `optimiser.safetensors` and, of what it began from,
    `initial.safetensors` in the run's folder; of a hierarchical rule also what `controls` leaves. Processes of
    `torchrun` share out the runs of the meta-batch.

    Args:
        config: A TOML file, the name of a shipped one such as "demo", a mapping, or a `Config`; or an optimisee, such
            as `make_optimisee` gives, and several to meta-train on all of them. All other settings are then those of an
            empty config.
        run: The folder; it must be new or empty unless `overwrite`.
        optimiser: The learned optimiser for an optimisee: a name, or a mapping of the name and its options. A config
            names its own.
        changes: Changes to the config, such as "unroll.length=200".
        overwrite: Whether an earlier run's files are removed first.
        resume: Whether an interrupted run of the same config (and the same optimisee) goes on from its last checkpoint,
            or begins if there is none; the end is the same to the byte.
        report: The function that is told the progress.

    Raises:
        UserError: For a mistake in the config, another optimisee than that of the run to go on with, or a folder that
            holds a run already, or in which another process works; for a full disk, after which `resume` goes on.

    Examples:
        >>> import l2lopt, torch
        >>> inputs = torch.randn(200, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, samples)
        >>> changes = ["meta.updates=2", "unroll.length=5", "validation.seeds=1", "validation.horizons=[5]"]
        >>> run = l2lopt.meta_train(problem, "runs/mine", optimiser={"name": "coordinatewise"}, changes=changes)
        >>> sorted(path.name for path in run.glob("o*"))
        ['optimiser.safetensors']
    """
    with processes.together(), ExitStack() as held:
        source = from_python.source(config, optimiser, is_trained=True)
        experiment = build.build(configs.load(source.config, changes), source.optimisees)
        settings = experiment.config
        files, written = (experiment.optimisee.artefact_files, weights_file(settings.optimiser)), configs.dump(settings)
        folder = processes.on_first(lambda: held.enter_context(claimed(run, overwrite, resume, *files, config=written)))
        checkpoint = CheckpointFile(folder / CHECKPOINT, _work(experiment))
        position = _log_position(checkpoint)  # refused before anything is written
        processes.on_first(lambda: write_text(folder / "config.toml", written))
        processes.on_first(lambda: weights.save(experiment.optimiser, folder / INITIAL))
        recording = nullcontext(NoRecords()) if processes.rank() else closing(Records(folder, *position))
        with recording as records, cpu_threads(settings.threads):
            result = meta_training.meta_train(
                experiment.optimiser,
                experiment.optimisees,
                experiment.estimator,
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
        processes.on_first(lambda: weights.save(experiment.optimiser, folder / "optimiser.safetensors", facts))
        processes.on_first(lambda: leave_controls(experiment, folder, report))
    return folder


def evaluate(
    *runs: str | Path,
    optimisee: Optimisee | Sequence[Optimisee] | None = None,
    changes: Sequence[str] = (),
    cache: str | Path | None = None,
    report: Report = silent,
) -> Evaluation:
    """Compares the learned optimisers of one or more runs, also as they began, with tuned baselines on fresh problems.

    Leaves `evaluation.csv`, `evaluation.json` (table, chosen rates, warnings) and `figures/loss-curves` in every run's
    folder, and the same for TensorBoard in `tensorboard/`. Started by `torchrun`, its processes share out the problems.

    Args:
        runs: Folders that `meta_train` left; several must agree on optimisee, seed, evaluation and device.
        optimisee: The optimisee that the runs were given, if it was made in Python; of several the first.
        changes: Changes to their configs, such as "evaluation.seeds=50".
        cache: Folder where the free runs are kept for other evaluations, benchmarks and studies; None: nowhere.
        report: The function that is told the progress.

    Raises:
        UserError: For a folder without a run, damaged weights, an optimisee that is not that of the runs, or runs that
            cannot be compared.

    Examples:
        >>> import l2lopt, torch
        >>> inputs = torch.randn(200, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, samples)
        >>> changes = ["meta.updates=2", "unroll.length=5", "validation.seeds=1", "validation.horizons=[5]"]
        >>> run = l2lopt.meta_train(problem, "runs/compared", changes=changes)
        >>> changes = ["evaluation.steps=5", "evaluation.horizons=[5]", "evaluation.seeds=3"]
        >>> changes += ["evaluation.baselines=[{optimiser='adam', rates=[0.01, 0.1]}]", "evaluation.multipliers=[]"]
        >>> result = l2lopt.evaluate(run, optimisee=problem, changes=changes)
        >>> sorted({row.optimiser for row in result.table})
        ['adam', 'learned-lstm', 'learned-lstm, before meta-training']
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise UserError("evaluate", expected="at least one run", found="none", remedy="name a run's folder")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("evaluate", expected="each run once", found="one that comes again", remedy="leave it out")
    settings = [meta_training_config(folder, changes) for folder in folders]
    for folder, other in zip(folders[1:], settings[1:], strict=True):
        for key in ("optimisee", "seed", "evaluation", "device"):
            if getattr(other, key) != getattr(settings[0], key):
                expected, found = f"the {key} of {folders[0]}", "another"
                raise UserError(str(folder), expected=expected, found=found, remedy="evaluate it by itself")
    with processes.together(), ExitStack() as held:
        first = build.build(_alone(settings[0], folders[0]), from_python.listed(optimisee)[:1], meta_training=False)
        rules, controls = _entered(folders, settings)
        place = build.device(settings[0].device)
        every = {n: build.match_dtype(rule, [first.optimisee]).to(place) for n, rule in (rules | controls).items()}
        own = {name: one.backend for name, one in zip(rules, settings, strict=True)}
        ready = {name: kernels.fuse(rule, own.get(name, settings[0].backend)) for name, rule in every.items()}
        locks = [locked(folder) for folder in folders]
        processes.on_first(lambda: list(map(held.enter_context, locks)))
        asked = settings[0].evaluation
        caches: Mapping[str, FileCache] = {}
        if cache is not None:
            processes.on_first(lambda: writable(Path(cache), "choose another cache"))
            problem = settings[0].optimisee if optimisee is None else first.optimisee
            caches = contestant_caches(cache, problem, first.optimisee, asked.baselines, every)
        with cpu_threads(settings[0].threads):
            result = comparison.evaluate(
                {name: ready[name] for name in rules},
                first.optimisee,
                asked,
                controls={name: ready[name] for name in controls},
                seed=settings[0].seed,
                report=report,
                caches=caches,
            )
        for folder, name in zip(folders, rules, strict=True) if processes.rank() == 0 else ():
            leave_evaluation(folder, result, name)
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
    run's folder, and the optimisee's artefacts, such as a vocabulary; see `Optimisee.artefacts`.

    Args:
        config: A TOML file, the name of a shipped one such as "digits-train", a mapping, or a `TrainConfig`; or an
            optimisee, such as `make_optimisee` gives. All other settings are then those of an empty config.
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
        UserError: For a mistake in the config, damaged weights, another optimisee or optimiser than that of the run to
            go on with, a folder that holds a run already or in which another process works, a full disk (after which
            `resume` goes on), or several processes of `torchrun`.

    Examples:
        >>> import l2lopt, torch
        >>> inputs = torch.randn(200, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, samples)
        >>> l2lopt.train(problem, "runs/adam", optimiser="torch.optim.Adam", changes=["train.steps=30"]).steps
        30
        >>> result = l2lopt.train(problem, "runs/learned", optimiser=l2lopt.load("lstm"), changes=["train.steps=30"])
        >>> bool(result.metrics["loss"] < 0.7)
        True
    """
    processes.alone("train")
    source = from_python.source(config, optimiser)
    built = build.build_training(configs.load(source.config, changes, kind=TrainConfig), *source[1:])
    weights_from = weights_file(built.config.optimiser)
    begun = built.optimisee.artefact_files, weights_from
    with claimed(run, overwrite, resume, *begun, config=configs.dump(built.config)) as folder:
        return _train(built, folder, report)


def _train(built: build.Training, folder: Path, report: Report) -> Trained:
    """Trains in a folder that is claimed."""
    settings = built.config
    work = recipe_of(settings) | {"weights": None} | weights_of(settings.optimiser)
    own = own_facts(settings.optimisee, built.optimisee) | code_of(settings.optimiser)
    checkpoint = CheckpointFile(folder / CHECKPOINT, work | built.optimisee.fingerprint() | own)
    kept = checkpoint.load()
    write_text(folder / "config.toml", configs.dump(settings))
    if summary := built.optimisee.summary():
        _log.info(summary)
    with restoring(checkpoint):
        recording = closing(Records(folder, kept[0]["step"] if kept else -1))
    with recording as records, cpu_threads(settings.threads):
        leaves: dict[str, Any] = {"records": records, "report": report, "checkpoint": checkpoint}
        result = training.train(built.optimisee, built.factory, settings.train, seed=settings.seed, **leaves)
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
    built.optimisee.artefacts(result.params, result.aux, folder)
    plot(folder)
    return result


def training_files(run: str | Path) -> list[Path]:
    """The files that a finished training has left for its user: parameters, result, artefacts and figures (as PNG)."""
    folder, config = Path(run), training_config(Path(run))
    artefacts = () if config is None else from_python.class_of(config.optimisee).artefact_files
    names = ["model.safetensors", "result.json", *(name for name in artefacts if "/" not in name)]
    names += ["figures/training-curve.*", *(name for name in artefacts if "/" in name)]
    return [path for name in names for path in sorted(folder.glob(name)) if path.suffix != ".svg"]


def plot(*runs: str | Path) -> list[Path]:
    """Draws into `figures/` of every run's folder, as PNG and SVG, what its records hold.

    That is `loss-curves` from `evaluation.csv`, `controls` from `controls.csv` and `validation` from the validations
    in `metrics.jsonl`; or, where `train` has begun the run, `training-curve` from `metrics.jsonl` and the optimisee's
    figures, see `Optimisee.figures`.

    Raises:
        UserError: For a run with none of these records, or a damaged one.

    Example:
        >>> import l2lopt, torch
        >>> inputs = torch.randn(100, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, samples)
        >>> _ = l2lopt.train(problem, "runs/drawn", optimiser="torch.optim.Adam", changes=["train.steps=20"])
        >>> [path.name for path in l2lopt.plot("runs/drawn")]
        ['training-curve.png', 'training-curve.svg']
    """
    folders = [existing_folder(Path(run)) for run in runs]
    paths = []
    for folder in folders:
        config = training_config(folder)
        if config is not None or os.path.isfile(folder / "result.json"):
            curves = figures.read_training(folder / "metrics.jsonl")
            paths += figures.training_curve(curves, folder / "figures", title=folder.name)
            paths += [] if config is None else from_python.class_of(config.optimisee).figures(folder)
            continue
        found = draw_meta_training(folder, folder.name)
        if not found or os.path.isfile(folder / "evaluation.csv"):
            paths += draw_evaluation(folder, folder.name)
        paths += found
    return paths


def _entered(folders: Sequence[Path], settings: Sequence[Config]) -> tuple[dict[str, Optimiser], dict[str, Optimiser]]:
    """The learned optimisers of runs by their names in an evaluation, and what their meta-trainings began from."""
    rules: dict[str, Optimiser] = {}
    controls: dict[str, Optimiser] = {}
    begun = set()
    for folder, own in zip(folders, settings, strict=True):
        name = next(name for name in row_names(own.name, folder) if name not in rules)
        rules[name] = weights.load(folder / "optimiser.safetensors", trusted=True)
        # A run of an earlier release has no such file.
        if own.evaluation.before_meta_training and (folder / INITIAL).is_file():
            initial = weights.load(folder / INITIAL, trusted=True)
            if (digest := weights.digest(initial)) not in begun:  # those that began alike have one between them
                begun.add(digest)
                controls[untrained_name(name)] = initial
    return rules, controls


def _log_position(checkpoint: CheckpointFile) -> tuple[int, str | None]:
    """The last meta-update whose lines stay in the log, and the stage that the checkpoint was written before."""
    with restoring(checkpoint):
        if (kept := checkpoint.load()) is None:
            return -1, None
        # An imitation comes after the first validation's checkpoint, and is made again until there is a later one.
        return int(kept[0]["update"]), "imitation" if kept[0]["validated"] else "validation"


def _work(experiment: build.Experiment) -> dict[str, Any]:
    """What meta-training depends on: the config but for the comparison, the data of its problems, and the weights."""
    config = experiment.config
    work = recipe_of(config, "evaluation")
    choices = config.trained_on or [config.optimisee, *config.mixed_with]
    for number, (choice, optimisee) in enumerate(zip(choices, experiment.optimisees, strict=True)):
        facts = optimisee.fingerprint() | own_facts(choice, optimisee)
        work |= {f"{number}.{name}": value for name, value in facts.items()}
    validated = zip(config.validation.on or (), experiment.validated_on, strict=False)
    for number, (choice, optimisee) in enumerate(validated):
        facts = optimisee.fingerprint() | own_facts(choice, optimisee)
        work |= {f"validation.{number}.{name}": value for name, value in facts.items()}
    estimator = {f"estimator.{name}": value for name, value in code_of(config.unroll.estimator).items()}
    return work | weights_of(config.optimiser) | code_of(config.optimiser) | estimator


def _alone(config: Config, folder: Path) -> Config:
    """A config with the problem that optimisers are compared on and no other, and with the run's own rule.

    What that was meta-trained from may have gone.
    """
    validation = config.validation.model_copy(update={"on": None})
    own = {"weights": str(folder / "optimiser.safetensors"), "trusted": True}
    changes: dict[str, Any] = {"mixed_with": [], "trained_on": None, "validation": validation, "optimiser": own}
    return config.model_copy(update=changes)
