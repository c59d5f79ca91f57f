"""Meta-training: meta-update after meta-update, with validations and checkpoints between them."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.core.types import Report, silent
from l2lopt.estimators import MetaGradientEstimator
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.parallel import processes
from l2lopt.storage.checkpoint import Checkpoint, NoCheckpoint, fitting, restoring
from l2lopt.storage.run_log import NoRecords, Recorder
from l2lopt.training.adam import Adam
from l2lopt.training.cma_es import CMAES
from l2lopt.training.imitation import imitate
from l2lopt.training.inner_runs import InnerRuns
from l2lopt.training.meta_optimiser import MetaOptimiser, assign
from l2lopt.training.settings import MetaTrainSettings, UnrollSettings

_log = logging.getLogger("l2lopt")
WORSE = 1.05
"""Validation loss over that before meta-training, from which on a problem is named in a warning."""
_LOWEST = math.log(1e-12)
"""Where `evaluation.scores.log_losses` has no logarithm any more."""
FEW = 0.05
"""Share of the unrolls that may be left out without a warning."""


@dataclass
class MetaTrained:
    """The result of meta-training.

    Attributes:
        phi: The meta-parameters of the best score, or with `keep = "last"` the last ones with a finite score; those
            that meta-training began with where no score is finite.
        score: The score of `phi`; lower is better.
        update: The number of meta-updates that led to `phi`.
        inner_steps: The number of inner steps of all unrolls.
        skipped: The number of unrolls that were not finite and were left out; CMA-ES: of runs in which no member's
            meta-loss was finite.
        scores: Every validation, update → score.
        before: Problem → score before the first meta-update.
        best: Problem → score of `phi`.
    """

    phi: Params
    score: float = math.inf
    update: int = 0
    inner_steps: int = 0
    skipped: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


def meta_train(
    optimiser: Optimiser,
    optimisees: Sequence[Optimisee],
    estimator: MetaGradientEstimator,
    settings: MetaTrainSettings,
    unroll_settings: UnrollSettings,
    *,
    score: Callable[[Optimiser], Mapping[str, float]],
    seed: int = 0,
    backend: str = "auto",
    records: Recorder | None = None,
    report: Report = silent,
    checkpoint: Checkpoint | None = None,
) -> MetaTrained:
    """Meta-trains `optimiser` in place; it ends with the `phi` of the result, see `MetaTrained`.

    Every meta-update makes the next `truncation` steps of `batch` runs and follows their meta-gradients, see
    `adam.Adam`; with `settings.cma` it makes whole runs with each member of a population, see `cma_es.CMAES`.
    Within `processes.together` the ranks share the batch's runs, to the bits of one process. Rank 0 alone writes.

    Args:
        optimiser: The learned optimiser.
        optimisees: The problems; every run draws one and begins with fresh parameters.
        estimator: The estimator of the meta-gradient.
        settings: The settings of the meta-updates.
        unroll_settings: The settings of the inner runs.
        score: The validation scores of an optimiser, problem → score, of which the mean counts; lower is better. Asked
            for before the first meta-update, after every `validate_every`, and after the last.
        seed: The seed of the inner runs.
        backend: The backend of the optimiser's steps that need no tape; see `kernels.fuse`.
        records: The recorder of the figures.
        report: The function that is told the progress.
        checkpoint: The checkpoint that meta-training goes on from, if there is one, and that it writes; the result is
            the same to the bit.

    Raises:
        UserError: If a part of φ is frozen, memory is missing, CMA-ES cannot use the runs, or another rank has ended.

    Examples:
        >>> import optimisees
        >>> from l2lopt import estimators, optimisers
        >>> from l2lopt.training.meta_train import meta_train
        >>> from l2lopt.training.settings import MetaTrainSettings, UnrollSettings
        >>> optimiser = optimisers.make("coordinatewise", hidden_size=4)
        >>> problems, estimator = [optimisees.make("quadratic", size=3)], estimators.make("blockwise")
        >>> updates, runs = MetaTrainSettings(updates=2), UnrollSettings(length=5)
        >>> result = meta_train(optimiser, problems, estimator, updates, runs, score=lambda _: {"any": 0.0})
        >>> result.inner_steps
        10
    """
    records, checkpoint = records or NoRecords(), checkpoint or NoCheckpoint()
    records, report = (NoRecords(), silent) if processes.rank() else (records, report)
    runs = InnerRuns(optimiser, optimisees, estimator, unroll_settings, settings.batch, seed, backend)
    loop = _MetaTraining(optimiser, runs, settings, score, records)

    def save() -> None:
        """Writes a checkpoint on rank 0. Collective: every rank must call it."""
        facts, tensors = loop.state_dict()
        if processes.rank() == 0:
            checkpoint.save(facts, tensors)

    with restoring(checkpoint):
        if saved := checkpoint.load():
            loop.load_state_dict(*saved)
    if loop.validation_due:  # before the first meta-update, or after a validation that was interrupted
        loop.validate()
        save()
    loop.imitate(report)
    while loop.update < settings.updates:
        figures = loop.step()
        report("meta-train", loop.update, settings.updates, figures)
        if checkpoint_due := loop.update % settings.checkpoint_every == 0 or loop.update == settings.updates:
            save()
        if loop.validation_due:
            loop.validate()
            if checkpoint_due:
                save()
    assign(optimiser, loop.result.phi)
    _warn(loop.result, settings)
    return loop.result


class _MetaTraining:
    """The state of meta-training between two meta-updates, and what is done with it.

    Attributes:
        update: The number of meta-updates made.
        result: The result so far.
    """

    def __init__(
        self,
        optimiser: Optimiser,
        runs: InnerRuns,
        settings: MetaTrainSettings,
        score: Callable[[Optimiser], Mapping[str, float]],
        records: Recorder,
    ) -> None:
        self.optimiser, self.runs, self.settings, self.score, self.records = optimiser, runs, settings, score, records
        self.meta_optimiser = self._new_meta_optimiser()
        self.update, self.result = 0, MetaTrained(_copy(optimiser.phi()))

    @property
    def validation_due(self) -> bool:
        """Whether the optimiser is to be validated after this update and has not been."""
        due = self.update % self.settings.validate_every == 0 or self.update == self.settings.updates
        return due and self.update not in self.result.scores

    def imitate(self, report: Report) -> None:
        """The warm start, if one is asked for, on the problems and with the estimator of the runs."""
        runs, settings = self.runs, self.settings.imitation
        if settings is None or self.update:
            return
        given = runs.optimisees, runs.estimator, runs.settings, settings, runs.seed, report, runs.backend
        figures = imitate(self.optimiser, *given)
        # CMA-ES keeps a mean of its own, which begins at the φ that it was made with.
        self.meta_optimiser = self._new_meta_optimiser()
        self.records.write("imitation", 0, figures)

    def _new_meta_optimiser(self) -> MetaOptimiser:
        """The optimiser of φ that the settings name, before its first step."""
        if self.settings.cma is not None:
            return CMAES(self.optimiser, self.runs, self.settings.cma)
        return Adam(self.optimiser, self.runs, self.settings)

    def step(self) -> dict[str, float]:
        """The next meta-update; gives its figures."""
        if self.update == 0:
            _tell_warm_up(self.settings)
        self.update += 1
        made = self.meta_optimiser.step(self.update)
        self.result.inner_steps += made.inner_steps
        self.result.skipped += made.skipped
        figures = made.figures | {"skipped": float(self.result.skipped), "score": self.result.score}
        self.records.write("meta-train", self.update, figures)
        return figures

    def validate(self) -> None:
        """Scores the optimiser, and copies φ if the score is the best so far, or if the last φ is kept."""
        by_problem = dict(self.score(self.optimiser))
        score = fmean(by_problem.values())
        self.result.scores[self.update] = score
        self.result.before = self.result.before or by_problem
        each = {f"score/{name}": value for name, value in by_problem.items()} if len(by_problem) > 1 else {}
        self.records.write("validation", self.update, {"score": score, **each})
        if score < self.result.score or (self.settings.keep == "last" and math.isfinite(score)):
            self.result.score, self.result.update, self.result.best = score, self.update, by_problem
            self.result.phi = _copy(self.optimiser.phi())

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that the next meta-updates depend on, as facts that JSON can say and tensors.

        Collective: every rank must call it, and rank 0 alone gets the runs of all ranks.
        """
        result = self.result
        tensors = {f"best/{name}": value for name, value in result.phi.items()}
        for name, parameter in self.optimiser.phi().items():
            tensors[f"phi/{name}"] = parameter
        own_facts, own_tensors = self.meta_optimiser.state_dict()
        run_facts, run_tensors = self.runs.state_dict()
        facts = {
            "update": self.update,
            **own_facts,
            **run_facts,
            "score": result.score,
            "best_update": result.update,
            "inner_steps": result.inner_steps,
            "skipped": result.skipped,
            # As pairs: the keys of an object in JSON are strings.
            "scores": list(result.scores.items()),
            "before": result.before,
            "best": result.best,
            "validated": not self.validation_due,
        }
        return facts, tensors | own_tensors | run_tensors

    def load_state_dict(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Puts back what `state_dict` gave."""
        phi = self.optimiser.phi()
        assign(self.optimiser, {name: fitting(tensors[f"phi/{name}"], value) for name, value in phi.items()})
        self.meta_optimiser.load_state_dict(facts, tensors)
        self.update = facts["update"]
        self.result = MetaTrained(
            phi={name: fitting(tensors[f"best/{name}"], value).to(value) for name, value in phi.items()},
            score=facts["score"],
            update=facts["best_update"],
            inner_steps=facts["inner_steps"],
            skipped=facts["skipped"],
            scores=dict(map(tuple, facts["scores"])),
            before=facts["before"],
            best=facts["best"],
        )
        self.runs.load_state_dict(facts, tensors)


def _tell_warm_up(settings: MetaTrainSettings) -> None:
    """Tells where meta-training ends before the rate is at its highest, as the default of short trials has it."""
    # No mistake: trials of few updates are made to see that all works.
    if settings.cma is None and settings.warm_up > settings.updates and processes.rank() == 0:
        said = "the warm-up of %d meta-updates is longer than all %d: the rate only rises, to %.3g and not %.3g"
        _log.info(said, settings.warm_up, settings.updates, settings.rate_at(settings.updates), settings.rate)


def _warn(result: MetaTrained, settings: MetaTrainSettings) -> None:
    """Tells where φ is the one that meta-training began with, where many unrolls gave none, and what became worse."""
    last = result.scores.get(settings.updates, math.nan)
    if not math.isfinite(result.score):
        _log.warning("no validation was finite: the optimiser is the one that meta-training began with")
    elif result.update == 0:
        said = "no gain: of %d validations the one before meta-training was the best (score %.4g, at the end %.4g), so "
        said += "the optimiser is the one that it began with"
        _log.warning(said, len(result.scores), result.score, last)
    if result.skipped > (made := settings.updates * settings.batch) * FEW:
        _log.warning("%d of %d unrolls were not finite and were left out", result.skipped, made)
    worse = {name: score - result.before[name] for name, score in result.best.items()}
    # Beyond e^709 there is no float64. Losses of 0 and below have no ratio.
    times = {name: math.exp(much) if much < 709 else math.inf for name, much in worse.items() if much > math.log(WORSE)}
    lowest = {name: min(result.before[name], result.best[name]) for name in times}
    said = ", ".join(f"{name} ({much:.3g} times)" if lowest[name] > _LOWEST else name for name, much in times.items())
    if said:
        _log.warning("validation losses above those before meta-training: %s", said)


def _copy(phi: Mapping[str, Tensor]) -> Params:
    return {name: value.detach().clone() for name, value in phi.items()}
