"""How long meta-training and evaluations will take, from one measured step of each kind."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from l2lopt import kernels
from l2lopt.core.types import Carry, Layout, seed_of
from l2lopt.evaluation.comparison import SPLITS, Baseline, record_steps, run_free
from l2lopt.experiments.config import Config, Experiment
from l2lopt.optimisee import Split, flat_loss
from l2lopt.optimisers import Optimiser
from l2lopt.training.inner_runs import inner_steps


class Costs(NamedTuple):
    """Seconds.

    Attributes:
        learned: a free step of one problem with the learned optimiser.
        handmade: the same with a hand-made one.
        unrolled: a step of an unroll, its part of the meta-gradient included.
        evaluations: a network's evaluation on each split.
    """

    learned: float
    handmade: float
    unrolled: float
    evaluations: dict[Split, float]

    def meta_training(self, config: Config) -> float:
        """All meta-updates, and the validations."""
        meta, unroll, validation = config.meta, config.unroll, config.validation
        low, high = (unroll.length, unroll.length) if isinstance(unroll.length, int) else unroll.length
        steps = min(unroll.truncation or math.inf, (high - low) / math.log(high / low) if high > low else low)
        validations = 2 + (meta.updates - 1) // meta.validate_every
        problems = validation.seeds * (1 + len(config.mixed_with))
        horizons = set(validation.horizons)
        each = max(horizons) * self.learned + len(horizons) * self.evaluations[validation.split]
        return meta.updates * meta.batch * steps * self.unrolled + validations * problems * each

    def learned_run(self, config: Config) -> float:
        """The free runs of an evaluation."""
        return self._reported(config, self.learned)

    def baseline_run(self, config: Config, baseline: Baseline) -> float:
        """Tuning and free runs; a rate is taken to be the best at every horizon, so that one run serves all."""
        settings, horizons = config.evaluation, config.evaluation.checked_horizons()
        lengths = horizons if baseline.schedule == "cosine" else horizons[-1:]
        tuned = sum(
            length * self.handmade + sum(horizon <= length for horizon in horizons) * self.evaluations["train"]
            for length in lengths
        )
        return settings.tuning_seeds * len(baseline.rates) * tuned + self._reported(config, self.handmade)

    def _reported(self, config: Config, step: float) -> float:
        settings = config.evaluation
        marks = record_steps(settings.steps, settings.checked_horizons())
        each = settings.steps * step + len(marks) * sum(self.evaluations[split] for split in SPLITS)
        return settings.seeds * each


def measured(experiment: Experiment) -> Costs:
    """Runs some steps of each kind on the first problem."""
    config, optimisee = experiment.config, experiment.optimisee
    settings = config.evaluation
    seeds = [seed_of("forecast", index) for index in range(min(settings.rows or settings.seeds, settings.seeds))]

    def step(optimiser: Optimiser) -> float:
        run_free(optimiser, optimisee, seeds, [1], splits=())  # whatever is made once
        return run_free(optimiser, optimisee, seeds, [2], splits=()).seconds

    params, aux = optimisee.init(seeds[0])
    evaluations = {}
    for split in {*SPLITS, config.validation.split}:
        parts = list(optimisee.whole(split, seeds[0]))
        batch, count = parts[0]
        with torch.no_grad():
            seconds = _seconds(lambda batch=batch: float(optimisee.evaluate(params, aux, batch)))  # type: ignore[misc]
        evaluations[split] = seconds * sum(other for _, other in parts) / count
    baseline = settings.baselines[0].build(1e-3, settings.steps) if settings.baselines else None
    return Costs(
        learned=step(kernels.fast(experiment.optimiser, config.backend)),
        handmade=step(baseline) if baseline else 0.0,
        unrolled=_unrolled(experiment, seeds[0]),
        evaluations=evaluations,
    )


def _unrolled(experiment: Experiment, seed: int) -> float:
    """A step of an unroll."""
    optimiser, optimisee, unroll = experiment.optimiser, experiment.optimisee, experiment.config.unroll
    shortest = unroll.length if isinstance(unroll.length, int) else unroll.length[0]
    steps = min(unroll.truncation or shortest, shortest, 4)
    params, aux = optimisee.init(seed)
    layout = Layout.of(params)
    flat = layout.ravel(params)
    carry = Carry(flat, aux, optimiser.init(layout, like=flat))
    update, loss = kernels.block_update(optimiser, experiment.config.backend), flat_loss(optimisee, layout)

    def call() -> object:
        stream = inner_steps(optimisee, unroll.targets, seed, 0, steps)
        state = experiment.unroll.init(carry, optimiser.phi(), seed)
        return experiment.unroll(update, loss, optimiser.phi(), carry, stream, state)

    return _seconds(call) / steps


def _seconds(work: Callable[[], object]) -> float:
    """The second time, which finds everything ready."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def said(seconds: float) -> str:
    """A duration in the unit that suits it, two digits or a whole number."""
    units = ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s"))
    unit, name = next((one for one in units if seconds >= 2 * one[0]), units[-1])
    return f"{seconds / unit:.{0 if seconds >= 10 * unit else 1}f} {name}"
