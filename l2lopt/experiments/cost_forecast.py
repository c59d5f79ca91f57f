"""How long meta-training and evaluations will take, from one measured step of each kind."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from l2lopt import kernels
from l2lopt.core.layout import Layout, Params
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Aux, Batch, Carry, detach
from l2lopt.evaluation import contestants
from l2lopt.evaluation.comparison import tunes
from l2lopt.evaluation.contestants import Contestant
from l2lopt.evaluation.free_runs import record_steps, run_free
from l2lopt.evaluation.settings import SPLITS, Baseline
from l2lopt.evaluation.step_backend import StepBackend, step_backend
from l2lopt.evaluation.tuned_runs import CHOSEN_ON
from l2lopt.experiments import build
from l2lopt.experiments.build import Experiment
from l2lopt.experiments.config import Config
from l2lopt.optimisee import Optimisee, Split, flat_loss
from l2lopt.parallel.threads import cpu_threads
from l2lopt.training import cma_es
from l2lopt.training.inner_runs import inner_steps


class PlannedRun(NamedTuple):
    """A free run that is to be made.

    Attributes:
        config: Config of the run.
        baseline: Baseline that runs; None for the learned optimiser.
        meta_training: Share of the meta-training before it that is still to be made, in [0, 1].
        tuned: Whether the learned optimiser has a second row, with its multiplier tuned.
        given: Learned optimiser that takes part as it is; None for the config's.
    """

    config: Config
    baseline: Baseline | None
    meta_training: float = 0.0
    tuned: bool = False
    given: Choice | None = None


class Costs(NamedTuple):
    """Seconds.

    Attributes:
        learned: A free step of one problem with the learned optimiser, in the form that the comparison will have.
        validated: A free step of one problem of the validation, the mean of all; it is eager.
        checked: An evaluation of one network of the validation, the mean of all its problems.
        knows_end: Whether that optimiser has a run of its own for each horizon.
        unrolled: A step of an unroll, its part of the meta-gradient included, the mean of the problems of
            meta-training; 0 where nothing is meta-trained.
        evaluations: Split → an evaluation of one network on it.
        baselines: Name of a baseline → a free step of one problem with it.
    """

    learned: float
    validated: float
    checked: float
    knows_end: bool
    unrolled: float
    evaluations: dict[Split, float]
    baselines: dict[str, float]

    def meta_training(self, config: Config) -> float:
        """All meta-updates, and the validations."""
        meta, unroll, validation = config.meta, config.unroll, config.validation
        low, high = (unroll.length, unroll.length) if isinstance(unroll.length, int) else unroll.length
        # (high − low) / log(high / low) is the mean of lengths that are drawn log-uniformly.
        steps = min(unroll.truncation or math.inf, (high - low) / math.log(high / low) if high > low else low)
        validations = 2 + (meta.updates - 1) // meta.validate_every
        problems = validation.seeds * (len(validation.on or config.problems))
        horizons = set(validation.horizons)
        each = max(horizons) * self.validated + len(horizons) * self.checked
        return meta.updates * meta.batch * steps * self.unrolled + validations * problems * each

    def learned_run(self, config: Config, tuned: bool = False) -> float:
        """The free runs of an evaluation, with `tuned` those of the second row as well."""
        multipliers = len(config.evaluation.multipliers) if tuned else 0
        rows = [1, multipliers] if multipliers else [1]
        return sum(self._run(config, self.learned, count, self.knows_end) for count in rows)

    def baseline_run(self, config: Config, baseline: Baseline) -> float:
        """Tuning and free runs."""
        step, knows_end = self.baselines[baseline.name], baseline.contestant().knows_end
        return self._run(config, step, len(baseline.rates), knows_end)

    def _run(self, config: Config, step: float, rates: int, knows_end: bool) -> float:
        """Tuning and free runs; a rate is taken to be the best everywhere, so that a run serves all it can."""
        settings, horizons = config.evaluation, config.evaluation.checked_horizons()
        lengths = horizons if knows_end else horizons[-1:]
        tuning = 0.0
        if rates > 1:
            each = sum(self.evaluations[split] for split in CHOSEN_ON.values())
            tuned = sum(length * step + sum(horizon <= length for horizon in horizons) * each for length in lengths)
            tuning = settings.tuning_seeds * rates * tuned
        each = sum(self.evaluations[split] for split in SPLITS)
        # Each of them once, whatever run is shown there.
        read = len(record_steps(settings.steps, horizons, settings.readings))
        return tuning + settings.seeds * (sum(lengths) * step + read * each)


def forecast(planned: Sequence[PlannedRun]) -> dict[str, float]:
    """The seconds that "meta-training", "free runs" and "baselines" will take.

    Every learned optimiser and every baseline among the planned runs is measured on its own problem: their steps may
    differ by any factor.

    Args:
        planned: Runs that are to be made.
    """
    by_recipe: dict[str, list[PlannedRun]] = {}
    for run in planned:  # meta-seeds cost the same
        recipe = run.config.model_dump_json(exclude={"seed", "label"})
        by_recipe.setdefault(f"{recipe} {run.given!r}", []).append(run)
    stages = dict.fromkeys(("meta-training", "free runs", "baselines"), 0.0)
    for runs in by_recipe.values():
        config = runs[0].config
        with cpu_threads(config.threads):
            unrolls, given = any(run.meta_training for run in runs), runs[0].given
            experiment = build.build(config, meta_training=unrolls)
            if given is not None:
                rule = build.match_dtype(build.ready_optimiser(given), experiment.optimisees)
                experiment = experiment._replace(optimiser=rule.to(build.device(config.device)))
            baselines = [run.baseline for run in runs if run.baseline is not None]
            costs = measure_costs(experiment, baselines, unrolls=unrolls)
        for run in runs:
            if run.baseline is not None:
                stages["baselines"] += costs.baseline_run(config, run.baseline)
            else:
                stages["meta-training"] += costs.meta_training(config) * run.meta_training
                stages["free runs"] += costs.learned_run(config, run.tuned)
    return stages


def measure_costs(experiment: Experiment, baselines: Sequence[Baseline] = (), unrolls: bool = True) -> Costs:
    """Runs some steps of each kind: on the problem of the comparison, and on every one of meta-training and validation.

    Free steps have the form that the comparison will have: one that will be compiled is compiled here, which the
    comparison then finds made, in this process or on disk.

    Args:
        experiment: Experiment whose steps are timed.
        baselines: Baselines that are timed as well.
        unrolls: Whether a step of an unroll is timed.
    """
    config, optimisee = experiment.config, experiment.optimisee
    settings = config.evaluation
    first = seed_of("forecast", 0)

    def step(contestant: Contestant, form: StepBackend | None = None, optimisee: Optimisee = optimisee) -> float:
        """Of one problem, in a group as large as those to come; by default in the comparison's form."""
        form = form or step_backend(contestant, optimisee, settings)
        compiled, at = form.backend == "compile", contestant.at(contestant.rates[0], settings.steps)
        count = (form.rows if compiled else min(form.rows or settings.seeds, settings.seeds)) or 1
        seeds, group = [seed_of("forecast", index) for index in range(count)], slice(0, count)
        optimiser = at.build_rows(group, count) if compiled else at.build(group)
        run_free(optimiser, optimisee, seeds, [1], splits=(), backend=form.backend)  # whatever is made once
        return run_free(optimiser, optimisee, seeds, [2], splits=(), backend=form.backend).seconds

    def evaluation(optimisee: Optimisee, split: Split) -> float:
        params, aux = optimisee.init(first)
        parts = list(optimisee.evaluation_batches(split, first))
        batch, count = parts[0]
        seconds = _seconds(partial(_evaluate, optimisee, params, aux, batch), enough=5.0)
        return seconds * sum(other for _, other in parts) / count

    tuning = CHOSEN_ON.values() if tunes(settings) else ()
    own = contestants.learned("learned", kernels.fuse(experiment.optimiser, config.backend))
    form = step_backend(own, optimisee, settings)
    learned = step(own, form)

    def validated(problem: Optimisee) -> float:
        same = problem is optimisee and form.backend != "compile"
        return learned if same else step(own, StepBackend("eager", settings.rows), problem)

    validation, split = experiment.validated_on if unrolls else [], config.validation.split
    return Costs(
        learned=learned,
        validated=_mean(validated, validation),
        checked=_mean(partial(evaluation, split=split), validation),
        knows_end=experiment.optimiser.knows_end,
        unrolled=_mean(lambda each: _unrolled(experiment, first, each), experiment.optimisees if unrolls else []),
        evaluations={split: evaluation(optimisee, split) for split in sorted({*SPLITS, *tuning})},
        baselines={one.name: step(one.contestant()) for one in baselines},
    )


def _mean(measure: Callable[[Optimisee], float], problems: Sequence[Optimisee]) -> float:
    """The mean over problems, each measured once however often it stands there; 0 without any."""
    return sum(measure(problem) * count for problem, count in Counter(problems).items()) / max(len(problems), 1)


def _evaluate(optimisee: Optimisee, params: Params, aux: Aux, batch: Batch) -> float:
    with torch.no_grad():
        return float(optimisee.evaluate(params, aux, batch))


def _unrolled(experiment: Experiment, seed: int, optimisee: Optimisee) -> float:
    """A step of an unroll."""
    optimiser, unroll = experiment.optimiser, experiment.config.unroll
    shortest = unroll.length if isinstance(unroll.length, int) else unroll.length[0]
    steps = min(unroll.truncation or shortest, shortest, 4)
    params, aux = optimisee.init(seed)
    layout = Layout.of(params, optimisee.roles())
    flat = layout.ravel(params)
    carry = Carry(flat, aux, optimiser.init(layout, like=flat))
    update, loss = kernels.block_update(optimiser, experiment.config.backend), flat_loss(optimisee, layout)
    phi, estimator = optimiser.phi(), experiment.estimator

    def call() -> object:
        stream = inner_steps(optimisee, unroll.targets, seed, 0, steps)
        if (cma := experiment.config.meta.cma) is not None:
            count = cma.members(sum(value.numel() for value in phi.values())) + 1
            rules = {name: value.repeat(count, *[1] * value.dim()) for name, value in detach(phi).items()}
            members = cma_es.checked(estimator, unroll)
            return members.run_members(update, loss, rules, [carry] * count, list(stream))
        return estimator(update, loss, phi, carry, stream, estimator.init(carry, phi, seed))

    return _seconds(call) / steps


def _seconds(work: Callable[[], object], enough: float = math.inf) -> float:
    """The second time, which finds everything ready, or the first, where it takes `enough` for that not to matter."""
    start = time.perf_counter()
    work()
    first, start = time.perf_counter() - start, time.perf_counter()
    if first >= enough:
        return first
    work()
    return time.perf_counter() - start


def format_duration(seconds: float) -> str:
    """A duration in the unit that suits it, two digits or a whole number."""
    units = ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s"))
    unit, name = next((one for one in units if seconds >= 2 * one[0]), units[-1])
    return f"{seconds / unit:.{0 if seconds >= 10 * unit else 1}f} {name}"
