"""What a hierarchical rule has learned: its controls over the steps of a run, as a table, a figure and events."""

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import optimisees
from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.interrupts import interrupted_after
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Report, silent
from l2lopt.evaluation.controls_over_time import controls_over_time, steering
from l2lopt.experiments import config as configs
from l2lopt.experiments.build import Experiment, match_dtype
from l2lopt.experiments.run_folder import draw_meta_training
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.hierarchical import Hierarchical
from l2lopt.parallel.threads import cpu_threads
from l2lopt.report.control_curves import NAME, ControlCurve, control_curves, write_controls
from l2lopt.storage.disk_space import needs_space
from l2lopt.storage.run_lock import locked
from l2lopt.weights import files

_log = logging.getLogger("l2lopt")


def controls(
    weights: str | Path | Optimiser,
    task: Choice | Optimisee,
    folder: str | Path,
    *,
    steps: int = 200,
    seed: int = 0,
    report: Report = silent,
) -> list[Path]:
    """Runs a hierarchical rule on a task and shows what its network does with each kind of tensor.

    Leaves `controls.csv`, `figures/controls` and in `controls/` TensorBoard events, "controls/<kind>/<control>" for
    the means.

    Args:
        weights: The name of weights that come with the package, a file, the folder of their meta-training, or the
            optimiser.
        task: A task of the catalogue, the choice of an optimisee, or an optimisee.
        folder: The folder; an earlier table and figure in it are replaced.
        steps: The number of steps of the run, which the rule is told.
        seed: The seed of initial values and batches.
        report: The function that is told the progress.

    Returns:
        The paths of the table and of the figures.

    Raises:
        UserError: For a rule that is not hierarchical, unknown weights or tasks, and the folder of a run.

    Example:
        >>> import l2lopt
        >>> from l2lopt import optimisers
        >>> paths = l2lopt.controls(optimisers.make("hierarchical"), "rosenbrock", "runs/untrained", steps=5)
        >>> [path.name for path in paths]
        ['controls.csv', 'controls.png', 'controls.svg']
    """
    optimiser = deepcopy(weights) if isinstance(weights, Optimiser) else files.load(_file(weights))
    steering(optimiser)  # refused before data are read
    if steps < 1:
        raise UserError("steps", expected="at least 1", found=str(steps), remedy="change the value")
    problem = task if isinstance(task, Optimisee) else optimisees.build(_known(task))
    home = Path(folder)
    if (home / "metrics.jsonl").exists():
        # Whose own controls would be replaced.
        raise UserError(str(home), expected="no run's folder", found="a run", remedy="choose another --output")
    rule = match_dtype(optimiser, [problem])
    rule = rule.to(next(iter(problem.init(0)[0].values())).device)
    with locked(home):
        curves = controls_over_time(rule, problem, steps, [seed_of("controls", seed)], report=report)
        _tell_board(curves, home / "controls")
        write_controls(curves, home / NAME)
        return [home / NAME, *control_curves(curves, home / "figures", home.name)]


def leave_controls(experiment: Experiment, folder: Path, report: Report = silent) -> None:
    """Leaves controls and validations of a finished meta-training in its folder, if its rule is hierarchical.

    The run is one of the first problem, as long as the longest validation. A table that is there stays: it is made at
    the end, and that of a run that is resumed after its end would be the same.

    Args:
        experiment: Experiment whose optimiser has its final φ.
        folder: Folder of the run.
        report: Progress.
    """
    if not isinstance(experiment.optimiser, Hierarchical):
        return
    settings = experiment.config
    if not (folder / NAME).exists():
        steps, seed = max(settings.validation.horizons), seed_of("validation", settings.seed, 0)
        with cpu_threads(settings.threads):
            curves = controls_over_time(experiment.optimiser, experiment.optimisee, steps, [seed], report=report)
        _tell_board(curves, folder / "controls")
        write_controls(curves, folder / NAME)
    draw_meta_training(folder, folder.name)
    _log.info("what its network does: %s", folder / "figures" / "controls.png")


def _file(weights: str | Path) -> str | Path:
    """The file of weights; that of a run, where its folder is given."""
    return Path(weights) / "optimiser.safetensors" if os.path.isdir(weights) else weights


def _known(task: Choice) -> Choice:
    """The choice of an optimisee that a user's task stands for."""
    choice: Choice = configs.problem(task)
    if isinstance(choice, str) and choice not in optimisees.OPTIMISEES and ":" not in choice:
        remedy = did_you_mean(choice, [*configs.catalogue().tasks, *optimisees.OPTIMISEES])
        raise UserError("task", expected="a task of the catalogue", found=repr(choice), remedy=remedy)
    return choice


def _tell_board(curves: Sequence[ControlCurve], folder: Path) -> None:
    """Writes the means as TensorBoard events, in place of earlier ones.

    Args:
        curves: Curves of equal steps.
        folder: Folder of the events and nothing else. In that of the run a resumed run would outdate them: their steps
            are steps of a run, and its are meta-updates.
    """
    from l2lopt.storage.event_file import EventFile  # imported here: it takes half a second

    folder.mkdir(exist_ok=True)
    for path in folder.glob("events.out.tfevents.*"):
        path.unlink()
    with interrupted_after(), needs_space(folder), closing(EventFile(folder, purge=0)) as board:
        for index, step in enumerate(curves[0].steps):
            board.write({f"controls/{one.kind}/{one.control}": float(one.mean[index]) for one in curves}, int(step))
