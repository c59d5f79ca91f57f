"""In which form the inner steps of a contestant's runs are made, and how many of the runs side by side."""

import logging
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from l2lopt.evaluation.contestants import Contestant
from l2lopt.evaluation.free_runs import Backend
from l2lopt.evaluation.settings import EvaluationSettings
from l2lopt.optimisee import Optimisee
from l2lopt.parallel import processes

_log = logging.getLogger("l2lopt")
WORTH = 5000
"""Steps of a group of runs from which "auto" compiles them: about the time of the compilation on a CPU."""
MOST = 32
"""Runs side by side in a compiled step, at most: a row costs no less in larger groups."""


class StepBackend(NamedTuple):
    """How a contestant's inner steps are made.

    Attributes:
        backend: Form of the steps.
        rows: Number of runs side by side; None for all.
    """

    backend: Backend
    rows: int | None


def step_backend(contestant: Contestant, optimisee: Optimisee, settings: EvaluationSettings) -> StepBackend:
    """The form that the settings ask for; "auto" decides by the number of steps alone, never by a clock.

    So the same comparison is made in the same way everywhere there is a compiler, to the bit on one machine.

    Args:
        contestant: Contestant whose runs are to be made.
        optimisee: Problem.
        settings: Seeds, horizons, `rows` and `backend`.
    """
    eager = StepBackend("eager", settings.rows)
    if settings.backend == "eager" or contestant.one_by_one:
        return eager
    horizons = settings.checked_horizons()
    lengths = horizons if contestant.knows_end else horizons[-1:]
    tuned = len(contestant.rates) > 1
    tuning = len(contestant.rates) * settings.tuning_seeds if tuned else 0
    rows = settings.rows or group_size([tuning, settings.seeds])
    # A tuned contestant may have a run for every horizon and each of the two splits.
    steps = ceil(tuning / rows) * sum(lengths)
    steps += ceil(settings.seeds / rows) * (2 * sum(horizons) if tuned else sum(lengths))
    steps = ceil(steps / processes.ranks())
    if settings.backend == "auto":
        params, _ = optimisee.init(0)
        if steps < WORTH or any(value.device.type != "cpu" for value in params.values()):
            return eager
    _log.info("backend compile: %s makes up to %d inner steps of %d runs each", contestant.name, steps, rows)
    return StepBackend("compile", rows)


def group_size(counts: Sequence[int]) -> int:
    """The number of rows of one compiled step that makes several sets of runs with the least work.

    A group that is not full is filled up, and every step of a group costs about two rows' time by itself.

    Args:
        counts: Number of runs of each set.
    """

    def work(size: int) -> int:
        return sum(ceil(count / size) for count in counts) * (size + 2)

    return min(range(1, min(MOST, max(counts)) + 1), key=work)
