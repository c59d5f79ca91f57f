"""The demo: a rule is meta-trained while its baselines run, then all of them meet on a network that it has not seen."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

from l2lopt.core.errors import UserError
from l2lopt.core.types import Report, silent
from l2lopt.evaluation.comparison import Evaluation
from l2lopt.evaluation.tuned_runs import Problems, optimiser_run
from l2lopt.experiments import build, run_folder, runs
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import Config
from l2lopt.experiments.run_cache import contestant_caches
from l2lopt.experiments.run_facts import weights_file
from l2lopt.parallel import processes
from l2lopt.parallel.jobs import run_jobs
from l2lopt.parallel.threads import cpu_threads

Part: TypeAlias = Literal["rule", "baselines"]
PARTS: tuple[Part, ...] = ("rule", "baselines")


def demo(
    run: str | Path = "runs/demo", *, changes: Sequence[str] = (), report: Report = silent
) -> tuple[Evaluation, list[Path]]:
    """Meta-trains the demo's rule, compares it with tuned baselines, draws the curves.

    An earlier demo as it is shipped, or with the same changes, is replaced.

    The baselines run in a process of their own, beside the meta-training.

    Args:
        run: Folder of the run.
        changes: Changes to the demo's config, such as "seed=1".
        report: Progress.

    Raises:
        UserError: For a mistake in the changes, a folder that holds anything but such a demo, or several processes of
            `torchrun`.

    Example:
        >>> import l2lopt
        >>> result, paths = l2lopt.demo("runs/demo")  # doctest: +SKIP
        >>> [path.name for path in paths]  # after three to four minutes on two cores  # doctest: +SKIP
        ['loss-curves.png', 'loss-curves.svg', 'controls.png', 'controls.svg', 'validation.png', 'validation.svg']
    """
    processes.alone("demo")
    config = configs.load(configs.demo(), changes)
    build.build(config)  # a mistake is said before anything is replaced
    source = weights_file(config.optimiser)
    is_demo, written = _is_demo(Path(run), config), configs.dump(config)
    with run_folder.claimed(run, overwrite=is_demo, resume=False, source=source, config=written):
        pass  # a folder that cannot be had is said before two processes have started, which takes seconds
    with TemporaryDirectory(prefix="l2lopt-demo-") as cache:
        run_jobs(partial(_make, config, Path(run), cache), PARTS, len(PARTS), report)
        result = runs.evaluate(run, cache=cache, report=report)
    return result, runs.plot(run)


def _is_demo(folder: Path, config: Config) -> bool:
    """Whether a folder holds a meta-training, which must be the demo's as it is shipped, or with the same changes.

    `l2lopt meta-train demo` has the same default folder, and may have worked in it for hours.

    Raises:
        UserError: For another meta-training.
    """
    shipped = configs.load(configs.demo())
    try:
        earlier = configs.meta_training_config(folder, ())
    except UserError:
        return False
    said = [one.model_dump(exclude={"label", "device", "evaluation"}) for one in (earlier, config, shipped)]
    if said[0] not in said[1:]:
        remedy = "choose another --run, or remove the folder"
        raise UserError(str(folder), expected="a demo with the same changes", found="another run", remedy=remedy)
    return True


def _make(config: Config, folder: Path, cache: str, part: Part, report: Report) -> None:
    """A part of the demo, which leaves files."""
    if part == "rule":
        runs.meta_train(config, folder, overwrite=True, report=report)
        return
    optimisee, settings = build.build(config, meta_training=False).optimisee, config.evaluation
    caches = contestant_caches(cache, config.optimisee, optimisee, settings.baselines)
    with cpu_threads(config.threads):
        for baseline in settings.baselines:
            problems = Problems(optimisee, settings, config.seed, report, caches[baseline.name])
            optimiser_run(baseline.contestant(), problems)
