"""Training: one optimisee to the end, by any `torch.optim.Optimizer`."""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.seeding import seed_of, seeded
from l2lopt.core.types import Aux, Batch, Report, detach, silent
from l2lopt.optimisee import Optimisee, StepInfo, evaluate_split
from l2lopt.optimisers.closures import all_finite, closure_of
from l2lopt.optimisers.schedules import set_mode, set_rates
from l2lopt.storage.checkpoint import Checkpoint, NoCheckpoint, fitting, pack, restoring, unpack
from l2lopt.storage.run_log import NoRecords, Recorder
from l2lopt.torch_optim.learned_optimizer import LearnedOptimizer
from l2lopt.torch_optim.parameter_groups import inform
from l2lopt.torch_optim.registry import OptimizerFactory
from l2lopt.torch_optim.state_dict import restore
from l2lopt.training.clipping import clip_gradients
from l2lopt.training.settings import TrainSettings as TrainSettings

_log = logging.getLogger("l2lopt")


class Trained(NamedTuple):
    """The result of training.

    Attributes:
        params: The parameters.
        aux: The loss's own state.
        step: The step after which the parameters had these values.
        steps: The number of steps made.
        diverged: The first step at which the loss was not finite, or None.
        metrics: The test-mode loss on the split `test`, or on the part that an evaluation takes, the optimisee's
            metrics there, its readings, and what it measures of the split as a whole.
        watched: The same figures on the watched split; those of the last evaluation where training diverged after it.
        speed: Samples per second, or what else the optimisee counts, in the steps of this call; 0 if it counts nothing.
    """

    params: Params
    aux: Aux
    step: int
    steps: int
    diverged: int | None
    metrics: dict[str, float]
    watched: dict[str, float]
    speed: float


def train(
    optimisee: Optimisee,
    factory: OptimizerFactory,
    settings: TrainSettings,
    *,
    seed: int = 0,
    records: Recorder | None = None,
    report: Report = silent,
    checkpoint: Checkpoint | None = None,
) -> Trained:
    """Trains fresh parameters of `optimisee`.

    A loss that is not finite ends the run before the update that it would have led to. It is a result (`diverged`), not
    an exception. An optimiser that evaluates the loss several times in a step (L-BFGS) does so on one batch; the loss
    that is recorded and the aux that the next step begins with are those of the first evaluation.

    Args:
        optimisee: The problem.
        factory: The function that makes the optimiser of (name, tensor) pairs.
        settings: Steps, splits and schedule.
        seed: The seed of initial values and batches.
        records: The recorder of the figures: the training loss of each step as stage "train", the watched split's
            figures under the split's name, and the optimisee's images at every evaluation.
        report: The function that is told the progress.
        checkpoint: The checkpoint that training goes on from, if there is one, and that it writes; the result is the
            same to the bit.

    Examples:
        >>> from functools import partial
        >>> import optimisees, torch
        >>> from l2lopt.training.train import TrainSettings, train
        >>> quadratic = optimisees.make("quadratic", size=3)
        >>> result = train(quadratic, partial(torch.optim.SGD, lr=0.02), TrainSettings(steps=20))
        >>> result.steps, result.diverged
        (20, None)
    """
    records, checkpoint = records or NoRecords(), checkpoint or NoCheckpoint()
    loop = _Training(optimisee, factory, settings, seed_of("train", seed), records)
    with restoring(checkpoint):
        if saved := checkpoint.load():
            loop.load_state_dict(unpack(saved[0]["place"], saved[1]))

    def save() -> None:
        packed, tensors = pack(loop.state_dict())
        checkpoint.save({"step": loop.steps_made, "place": packed}, tensors)

    if not saved:
        loop.evaluate()
        if loop.ended:  # it diverged before its first step
            save()
    while not loop.ended:
        figures = loop.step()
        report("train", loop.steps_made, loop.steps, figures)
        if loop.evaluation_due:
            loop.evaluate()
        if loop.checkpoint_due:
            save()
    return loop.result(report)


def _check_average(aux: Aux) -> None:
    """Refuses averages of a model with batch norm, whose running statistics are those of the last parameters."""
    if any(name.endswith("running_mean") for name in aux):
        expected, remedy = "a model without running statistics", "leave it out, or take another norm"
        raise UserError("train.average", expected=expected, found="batch norm, or its like", remedy=remedy)


def _warn_of_two_schedules(optimizer: torch.optim.Optimizer, settings: TrainSettings) -> None:
    """Logs a warning where the run's schedule multiplies that of a rule which has its own."""
    rules = optimizer.rules.values() if isinstance(optimizer, LearnedOptimizer) else ()
    if (settings.schedule != "constant" or settings.warm_up) and any(rule.knows_end for rule in rules):
        advice = 'set train.schedule = "constant" and train.warm_up = 0'
        _log.warning("the rule has a warm-up and a fall to 0 of its own, which the run's multiply: %s", advice)


class _Training:
    """The state of training between two steps, and what is done with it.

    Attributes:
        steps: The number of steps after which training ends at the latest.
        params: The leaves that the optimiser moves.
        aux: The loss's own state before the next step.
        steps_made: The number of steps made.
        diverged: The first step at which a loss was not finite, or None.
        watched: The figures of every evaluation on the watched split.
        best: A copy of the evaluation that early stopping would end with: "evaluation" (how many there had been),
            "loss", "step", "params" and "aux". Empty without early stopping.
        mean: The mean of the parameters after the last `averaged` steps; empty before averaging begins.
    """

    def __init__(
        self, optimisee: Optimisee, factory: OptimizerFactory, settings: TrainSettings, seed: int, records: Recorder
    ) -> None:
        self.optimisee, self.settings, self.seed, self.records = optimisee, settings, seed, records
        params, self.aux = optimisee.init(seed)
        if settings.average is not None:
            _check_average(self.aux)
        self.params = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
        self.optimizer = factory(list(self.params.items()))
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]  # before any schedule
        if isinstance(self.optimizer, LearnedOptimizer):  # which takes a decayed rate for a mistake otherwise
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["initial_lr"] = rate  # as a scheduler of `torch.optim` does
        self.steps = self._end_of_epoch(settings.epochs) if settings.epochs else settings.steps
        self._epoch = 1
        inform(self.optimizer, steps=self.steps, known=optimisee.roles())
        _warn_of_two_schedules(self.optimizer, settings)
        self.steps_made, self.averaged = 0, 0
        self.diverged: int | None = None
        self.watched: list[dict[str, float]] = []
        self.mean: Params = {}
        self.best = self._snapshot(math.inf) if settings.chooses else {}
        self.clock = _Clock()

    @property
    def ended(self) -> bool:
        """Whether this was the last step."""
        patience = self.settings.patience
        stopped_early = patience is not None and len(self.watched) >= self.best["evaluation"] + patience
        return self.steps_made >= self.steps or self.diverged is not None or stopped_early

    @property
    def evaluation_due(self) -> bool:
        """Whether there is an evaluation after this step."""
        return self.diverged is None and self._at_evaluation

    @property
    def checkpoint_due(self) -> bool:
        """Whether there is a checkpoint after this step."""
        after_epoch = self.settings.epochs is not None and self._at_evaluation
        return self.steps_made % self.settings.checkpoint_every == 0 or after_epoch or self.ended

    def step(self) -> Mapping[str, float]:
        """The next step, which changes nothing if its loss is not finite; gives the figures that a user wants to see.

        Their order: the optimisee's own figure of the step, the same of the watched split, and the speed; or else what
        is recorded.
        """
        self.steps_made += 1
        set_mode(self.optimizer, "train")
        with self.clock:
            # By number and not from an iterator: a run that goes on needs no batches from before.
            batch = self.optimisee.batch(self.settings.splits[0], self.seed, self.steps_made - 1)
            figures, facts = self._update(batch)
        self.clock.samples += facts.samples
        self.records.write("train", self.steps_made, figures | dict(facts.figures))
        if not math.isfinite(figures["loss"]):
            self.diverged = self.steps_made
        if not facts.figures:
            return figures
        name, value = next(iter(facts.figures.items()))
        latest = self.watched[-1]
        watched = {f"{self.settings.splits[1]} {name}": latest[name]} if name in latest else {}
        return {name: value, **watched, f"{facts.unit}/s": self.clock.speed}

    def evaluate(self) -> None:
        """Measures the watched split; takes a copy of the best parameters, and begins averaging, where settings say so.

        A loss that is not finite ends training.
        """
        split = self.settings.splits[1]
        set_mode(self.optimizer, "eval")
        figures = evaluate_split(self.optimisee, split, self.seed, self._averaged_params, self.aux)
        self.records.write(split, self.steps_made, figures)
        self.watched.append(figures)
        for name, images in self.optimisee.images(self._averaged_params).items():
            self.records.show(name, self.steps_made, images)
        if not math.isfinite(figures["loss"]):
            self.diverged = self.steps_made
        elif self.settings.chooses and figures["loss"] < self.best["loss"]:
            self.best = self._snapshot(figures["loss"])
        if not self.mean and self.settings.averages([figures["loss"] for figures in self.watched]):
            # Only room for the mean: the first step enters with weight 1 and replaces these values.
            self.mean = _copy(self.params)

    def result(self, report: Report) -> Trained:
        """The best parameters under early stopping, else the last, and their figures on the split `test`."""
        set_mode(self.optimizer, "eval")
        last = {"params": self._averaged_params, "aux": self.aux, "step": self.steps_made}
        end = self.best or {**last, "evaluation": len(self.watched)}
        metrics = evaluate_split(self.optimisee, "test", self.seed, end["params"], end["aux"])
        params = detach(end["params"])
        return Trained(
            params=params,
            aux=end["aux"],
            step=end["step"],
            steps=self.steps_made,
            diverged=self.diverged,
            metrics=metrics | self.optimisee.whole_metrics(params, end["aux"], "test", report),
            watched=self.watched[max(end["evaluation"], 1) - 1],
            speed=self.clock.speed,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on. The keys are those of checkpoints."""
        return {
            "params": self.params,
            "aux": self.aux,
            "step": self.steps_made,
            "diverged": self.diverged,
            "watched": self.watched,
            "best": self.best,
            "mean": self.mean,
            "averaged": self.averaged,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` gave."""
        with torch.no_grad():
            for name, value in self.params.items():
                value.copy_(fitting(state["params"][name], value))
        device = next(iter(self.params.values())).device
        tensors = (state["aux"], state["best"], state["mean"])
        self.aux, self.best, self.mean = pytree.tree_map_only(Tensor, lambda t: t.to(device), tensors)
        self.steps_made, self.diverged = state["step"], state["diverged"]
        self.watched, self.averaged = state["watched"], state["averaged"]
        restore(self.optimizer, state["optimizer"])

    @property
    def _averaged_params(self) -> Params:
        """The mean of the parameters once there is one; until then the parameters."""
        return self.mean if self.averaged else self.params

    @property
    def _at_evaluation(self) -> bool:
        """Whether this is a step after which the watched split is measured: every so often, or an epoch's last."""
        if self.steps_made == self.steps:
            return True
        if self.settings.epochs is None:
            return self.steps_made % self.settings.evaluate_every == 0
        while self._end_of_epoch(self._epoch) < self.steps_made:
            self._epoch += 1
        return self.steps_made == self._end_of_epoch(self._epoch)

    def _end_of_epoch(self, number: int) -> int:
        """The steps that so many passes over the training samples take."""
        return self.optimisee.epoch_start(self.settings.splits[0], self.seed, number)

    def _update(self, batch: Batch) -> tuple[dict[str, float], StepInfo]:
        """One step of the optimiser on a batch: what is recorded of it, and what the optimisee says of it."""
        # Every evaluation of a step starts from the aux before it, or a line search would move statistics many times.
        before, figures = self.aux, dict[str, float]()

        def evaluate() -> tuple[Tensor, Aux]:
            self.optimizer.zero_grad()
            loss, aux = self.optimisee.loss(self.params, before, batch)
            loss.backward()
            if self.settings.clip:
                norm = clip_gradients(self.params.values(), self.settings.clip)
                figures.setdefault("gradient_norm", float(norm))
            return loss.detach(), detach(aux)

        loss, aux = evaluate()
        facts = self.optimisee.step_info(batch, aux)
        factor = self.settings.multiplier(self.steps_made, self.steps) * facts.rate
        rates = [rate * factor for rate in self.rates]
        set_rates(self.optimizer, rates)
        if loss.isfinite():
            closure = closure_of(self.optimizer, self.params.values(), loss, lambda: evaluate()[0])
            with seeded(seed_of("torch-optim", self.seed, self.steps_made)):  # for optimisers that draw from it
                try:
                    self.optimizer.step(closure)  # type: ignore[arg-type]  # torch.optim calls a loss a float
                except (RuntimeError, ValueError, ArithmeticError):
                    if all_finite(loss, self.params.values()):
                        raise
                    loss = loss.new_tensor(math.nan)  # it refuses to go on from numbers that are none
            if loss.isfinite():
                self.aux = aux
                self._add_to_mean()
        return {"loss": float(loss), "rate": rates[0], **figures}, facts

    def _add_to_mean(self) -> None:
        """Adds the parameters after a step to the mean, if averaging has begun."""
        if self.mean:
            self.averaged += 1
            with torch.no_grad():
                for name, value in self.mean.items():
                    # A running mean: a sum would grow with the steps and lose digits.
                    value.lerp_(self.params[name], 1 / self.averaged)

    def _snapshot(self, loss: float) -> dict[str, Any]:
        """A copy of the parameters and aux of this evaluation, with its watched loss."""
        facts = {"evaluation": len(self.watched), "loss": loss, "step": self.steps_made}
        return {**facts, "params": _copy(self._averaged_params), "aux": _copy(self.aux)}


class _Clock:
    """Adds up the time spent inside `with`.

    Attributes:
        samples: The number of samples processed in that time, counted by the caller.
        seconds: The time so far.
    """

    def __init__(self) -> None:
        self.samples, self.seconds = 0, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0


def _copy(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}
