"""Sizes in a config that no machine has the memory for, refused before work begins."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.layout import Layout
from l2lopt.core.memory import check_need
from l2lopt.estimators import Backprop, EvolutionStrategies, MetaGradientEstimator, Mixed
from l2lopt.experiments.config import Config
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes

OBJECT = 100
"""Bytes that Python takes for an entry of a list, such as a seed, at the least."""


def check_sizes(
    config: Config, problems: Sequence[Optimisee], optimiser: Optimiser, estimator: MetaGradientEstimator | None
) -> None:
    """Refuses numbers of runs, steps or pairs whose parameters and states alone would not fit into the memory.

    What else a run takes, such as the activations of its model, is not counted: less than this cannot be.

    Args:
        config: Config, whose keys the errors name.
        problems: Optimisees of the config.
        optimiser: Optimiser of the config, in the dtype and on the device of the optimisees.
        estimator: Estimator of the config; None where nothing is meta-trained.

    Raises:
        UserError: For the first size that is too large, with the memory that it would need.
    """
    for problem in problems:
        params, _ = problem.init(0)
        flat = Layout.of(params).ravel(params)
        run = flat.nbytes + (_state_bytes(optimiser, params, flat) if estimator is not None else 0)
        if estimator is not None:
            _check_meta_training(config, optimiser, estimator, flat, run)
        for name, seeds, rows in (
            ("evaluation.seeds", config.evaluation.seeds, config.evaluation.rows),
            ("evaluation.tuning_seeds", config.evaluation.tuning_seeds, config.evaluation.rows),
        ):
            _check_runs(name, seeds, rows, flat, run)


def _check_meta_training(
    config: Config, optimiser: Optimiser, estimator: MetaGradientEstimator, flat: Tensor, run: int
) -> None:
    """Refuses a batch, an unroll, pairs or a population without memory; `run` is the bytes of one run of `flat`."""

    def check(key: str, count: int, each: int, place: torch.device = flat.device) -> None:
        check_need(f"{key} = {count}", count * each, place)

    check("meta.batch", config.meta.batch, OBJECT + run // processes.ranks())
    length = config.unroll.longest
    steps = min(config.unroll.truncation or length, length)
    for part in (estimator.exact, estimator.evolution) if isinstance(estimator, Mixed) else (estimator,):
        if isinstance(part, Backprop):
            check("unroll: steps", min(part.window or steps, steps), flat.nbytes)
        if isinstance(part, EvolutionStrategies):
            phi = sum(value.nbytes for value in optimiser.phi().values())
            check("unroll.estimator: pairs", part.pairs, phi + (2 * run if part.persistent else 0))
    if (cma := config.meta.cma) is not None:
        count = sum(value.numel() for value in optimiser.phi().values())
        # In float64; telling a full covariance takes the products of every member with itself, and weighs them.
        each = 8 * count * (1 if cma.separable else 2 * count)
        check("meta.cma: population", cma.members(count), each, torch.device("cpu"))
    _check_runs("validation.seeds", config.validation.seeds, config.validation.rows, flat, run)


def _check_runs(key: str, seeds: int, rows: int | None, flat: Tensor, run: int) -> None:
    """Refuses runs side by side without memory for them, and lists of seeds that no memory holds."""
    check_need(f"{key} = {seeds}", seeds * OBJECT)
    check_need(f"{key} = {seeds}", min(rows or -(-seeds // processes.ranks()), seeds) * run, flat.device)


def _state_bytes(optimiser: Optimiser, params: dict[str, Tensor], flat: Tensor) -> int:
    """The bytes of an optimiser's state for one run."""
    state = optimiser.init(Layout.of(params), like=flat)
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))
