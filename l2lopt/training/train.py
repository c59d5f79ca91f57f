"""Training: one optimisee, any `torch.optim.Optimizer`, to the end."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.settings import Settings
from l2lopt.core.types import Aux, Params, Report, detach, seed_of, silent
from l2lopt.optimisee import Optimisee, Split, StepInfo, measure
from l2lopt.optimisers.schedules import warm_up_cosine
from l2lopt.storage.checkpoint import Checkpoint, NoCheckpoint, pack, unpack
from l2lopt.storage.run_log import NoRecords, Recorder
from l2lopt.torch_optim.registry import OptimizerFactory
from l2lopt.torch_optim.state_dict import restore


class TrainSettings(Settings):
    """How an optimisee is trained."""

    steps: PositiveInt = 1000
    """Updates in all."""
    epochs: PositiveInt | None = None
    """Passes over the training samples in all, whatever `steps` and `evaluate_every` say: there is an evaluation and a
    checkpoint after each; none: as many steps as `steps`."""
    evaluate_every: PositiveInt = 100
    """Steps between two test-mode evaluations on the whole of the watched split; there is one before the first step
    and one after the last."""
    checkpoint_every: PositiveInt = 100
    """Steps between two checkpoints."""
    clip: PositiveFloat | None = None
    """The largest norm of the gradient over all parameters; none: as it is."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the optimiser's rate (of a learned one's whole update); `cosine` falls to 0 at the last step."""
    warm_up: NonNegativeInt = 0
    """Steps over which the rate rises first."""
    patience: PositiveInt | None = None
    """Early stopping: evaluations without a lower loss after which training ends. It then trains on the split `inner`,
    watches `heldout`, and ends with the parameters of the lowest loss; none: it trains on `train`, watches `test`
    without choosing anything by it, and ends with the last parameters."""
    average: PositiveInt | Literal["non-monotonic"] | None = None
    """Averaged SGD (Polyak and Juditsky 1992): after so many evaluations, the one before the first step not counted,
    the mean of the parameters after every later step takes their place wherever they are watched, tested and left.
    `non-monotonic` begins it once a watched loss is worse than the best of all but the last `patience_to_average`
    before it (Merity et al. 2018). Splits and end are as with `patience`, which may be none."""
    patience_to_average: PositiveInt = 5
    """See `average`."""

    @model_validator(mode="after")
    def _in_time(self) -> "TrainSettings":
        if self.epochs is None and self.warm_up > self.steps:
            raise ValueError("a warm_up of at most `steps`")
        return self

    @property
    def chooses(self) -> bool:
        """Whether training ends with the parameters of the lowest watched loss."""
        return self.patience is not None or self.average is not None

    @property
    def splits(self) -> tuple[Split, Split]:
        """The split trained on and the one watched."""
        return ("inner", "heldout") if self.chooses else ("train", "test")

    def multiplier(self, step: int, steps: int) -> float:
        """Of the rate, at step 1, 2, … of `steps`."""
        total = steps if self.schedule == "cosine" else None
        return float(warm_up_cosine(torch.tensor(step - 1), self.warm_up, total))

    def averages(self, losses: Sequence[float]) -> bool:
        """Whether averaging begins after these evaluations, the first of them before the first step."""
        if self.average == "non-monotonic":
            best = min(losses[1 : -1 - self.patience_to_average], default=math.inf)
            return losses[-1] > best
        return self.average is not None and len(losses) > self.average


class Trained(NamedTuple):
    """What training ended with.

    Attributes:
        params: the parameters.
        aux: the loss's own state.
        step: after which they stood.
        steps: that were made.
        diverged: the step at which the loss was not finite any more, or None.
        metrics: the test-mode loss on the whole of the split `test`, and the optimisee's metrics and readings there.
        watched: likewise on the watched split.
        speed: samples a second, or what the optimisee counts, in this call's steps alone; 0 without any.
    """

    params: Params
    aux: Aux
    step: int
    steps: int
    diverged: int | None
    metrics: dict[str, float]
    watched: dict[str, float]
    speed: float


@dataclass
class _Run:
    """A run under way.

    Attributes:
        params: leaves that the optimiser moves.
        aux: before the next step.
        optimizer: of the parameters.
        rates: of its groups, before any schedule.
        step: the last one made.
        diverged: see `Trained`.
        watched: what every evaluation found.
        best: where early stopping would go back to: "evaluation" (its number), "loss", "step", "params" and "aux".
        mean: of the parameters after the last `averaged` steps; empty before averaging has begun.
        averaged: see `mean`.
    """

    params: Params
    aux: Aux
    optimizer: torch.optim.Optimizer
    rates: list[float]
    step: int = 0
    diverged: int | None = None
    watched: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    mean: Params = field(default_factory=dict)
    averaged: int = 0

    def place(self) -> dict[str, Any]:
        """All that the steps after this one depend on."""
        names = ("params", "aux", "step", "diverged", "watched", "best", "mean", "averaged")
        return {**{name: getattr(self, name) for name in names}, "optimizer": self.optimizer.state_dict()}

    def take_up(self, place: dict[str, Any]) -> None:
        """Puts everything back as `place` found it."""
        with torch.no_grad():
            for name, value in self.params.items():
                value.copy_(place["params"][name])
        device = next(iter(self.params.values())).device
        tensors = (place["aux"], place["best"], place["mean"])
        self.aux, self.best, self.mean = pytree.tree_map_only(Tensor, lambda t: t.to(device), tensors)
        self.step, self.diverged = place["step"], place["diverged"]
        self.watched, self.averaged = place["watched"], place["averaged"]
        restore(self.optimizer, place["optimizer"])

    def ended(self, settings: TrainSettings, steps: int) -> bool:
        """Whether there is nothing more to do."""
        waited = settings.patience and len(self.watched) >= self.best["evaluation"] + settings.patience
        return self.step >= steps or self.diverged is not None or bool(waited)

    @property
    def standing(self) -> Params:
        """The parameters that count: the means, once there are some."""
        return self.mean if self.averaged else self.params

    def add_to_mean(self) -> None:
        """Takes the parameters after a step into the mean, once averaging has begun."""
        if self.mean:
            self.averaged += 1
            with torch.no_grad():
                for name, value in self.mean.items():
                    value.lerp_(self.params[name], 1 / self.averaged)


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

    A loss that is not finite ends the run where it stands, before the update that it would have led to: it is a result
    (`diverged`), not an exception. An optimiser that evaluates the loss several times a step (L-BFGS) does so on one
    batch; the loss recorded and the aux carried on are those of the first.

    Args:
        optimisee: the problem.
        factory: makes the optimiser of (name, tensor) pairs.
        settings: steps, splits, schedule.
        seed: of initial values and batches.
        records: where the figures go: the training loss of each step as stage "train", the watched split's as its name,
            and the optimisee's pictures at every evaluation.
        report: progress.
        checkpoint: where the place is kept, and taken up again where one is there: the end is the same to the bit.
    """
    records, checkpoint = records or NoRecords(), checkpoint or NoCheckpoint()
    seed = seed_of("train", seed)
    params, aux = optimisee.init(seed)
    params = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimizer = factory(list(params.items()))
    run = _Run(params, aux, optimizer, [float(group["lr"]) for group in optimizer.param_groups])
    ends = _evaluations(optimisee, settings, seed)
    marks, steps = set(ends), ends[-1]

    def watch() -> None:
        split = settings.splits[1]
        figures = measure(optimisee, split, seed, run.standing, run.aux)
        records.write(split, run.step, figures)
        run.watched.append(figures)
        for name, images in optimisee.images(run.standing).items():
            records.show(name, run.step, images)
        if not math.isfinite(figures["loss"]):
            run.diverged = run.step
        elif settings.chooses and figures["loss"] < run.best["loss"]:
            run.best = _best(run, figures["loss"])
        if not run.mean and settings.averages([figures["loss"] for figures in run.watched]):
            run.mean = _copy(run.params)

    kept = checkpoint.load()
    if kept:
        run.take_up(unpack(kept[0]["place"], kept[1]))
    else:
        run.best = _best(run, math.inf) if settings.chooses else {}
        watch()
    clock = _Clock()
    while not run.ended(settings, steps):
        run.step += 1
        with clock:
            figures, facts = _advance(run, optimisee, settings, seed, steps)
        clock.samples += facts.samples
        records.write("train", run.step, figures | dict(facts.figures))
        report("train", run.step, steps, _shown(run, settings, figures, facts, clock))
        if not math.isfinite(figures["loss"]):
            run.diverged = run.step
        elif run.step in marks:
            watch()
        due = run.step % settings.checkpoint_every == 0 or (settings.epochs is not None and run.step in marks)
        if due or run.ended(settings, steps):
            place, tensors = pack(run.place())
            checkpoint.save({"step": run.step, "place": place}, tensors)
    end = run.best or {"params": run.standing, "aux": run.aux, "step": run.step, "evaluation": len(run.watched)}
    metrics = measure(optimisee, "test", seed, end["params"], end["aux"])
    watched = run.watched[max(end["evaluation"], 1) - 1]
    params = detach(end["params"])
    return Trained(params, end["aux"], end["step"], run.step, run.diverged, metrics, watched, clock.speed)


def _evaluations(optimisee: Optimisee, settings: TrainSettings, seed: int) -> list[int]:
    """The steps after which there is an evaluation, the last of them the end."""
    if settings.epochs:
        return [optimisee.epoch_start(settings.splits[0], seed, number) for number in range(1, settings.epochs + 1)]
    return sorted({*range(settings.evaluate_every, settings.steps, settings.evaluate_every), settings.steps})


def _shown(
    run: _Run, settings: TrainSettings, figures: Mapping[str, float], facts: StepInfo, clock: "_Clock"
) -> Mapping[str, float]:
    """What a user wants to see of a step: its reading, that of the watched split if it has one, and the speed."""
    if not facts.figures:
        return figures
    name, value = next(iter(facts.figures.items()))
    watched = {f"{settings.splits[1]} {name}": run.watched[-1][name]} if name in run.watched[-1] else {}
    return {name: value, **watched, f"{facts.unit}/s": clock.speed}


class _Clock:
    """Adds up the time spent inside `with`.

    Attributes:
        samples: done in it.
        seconds: so far.
    """

    def __init__(self) -> None:
        self.samples, self.seconds = 0, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start

    @property
    def speed(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds else 0.0


def _advance(
    run: _Run, optimisee: Optimisee, settings: TrainSettings, seed: int, steps: int
) -> tuple[dict[str, float], StepInfo]:
    """One step, unless its loss is not finite, its figures, and what the optimisee says of it."""
    batch = optimisee.batch(settings.splits[0], seed, run.step - 1)
    before, figures = run.aux, dict[str, float]()

    def evaluate() -> tuple[Tensor, Aux]:
        run.optimizer.zero_grad()
        loss, aux = optimisee.loss(run.params, before, batch)
        loss.backward()
        if settings.clip:
            norm = torch.nn.utils.clip_grad_norm_(run.params.values(), settings.clip)
            figures.setdefault("gradient_norm", float(norm))
        return loss.detach(), detach(aux)

    loss, aux = evaluate()
    facts = optimisee.step_info(batch, aux)
    multiplier = settings.multiplier(run.step, steps) * facts.rate
    for group, rate in zip(run.optimizer.param_groups, run.rates, strict=True):
        group["lr"] = rate * multiplier
    first = [loss]  # the gradients are there already

    def closure() -> Tensor:
        return first.pop() if first else evaluate()[0]

    if loss.isfinite():
        run.optimizer.step(closure)  # type: ignore[arg-type]  # torch.optim calls a loss a float
        run.aux = aux
        run.add_to_mean()
    return {"loss": float(loss), "rate": run.rates[0] * multiplier, **figures}, facts


def _best(run: _Run, loss: float) -> dict[str, Any]:
    """A copy of where the run stands."""
    aux = {name: value.clone() for name, value in run.aux.items()}
    place = {"evaluation": len(run.watched), "loss": loss, "step": run.step}
    return {**place, "params": _copy(run.standing), "aux": aux}


def _copy(params: Params) -> Params:
    return {name: value.detach().clone() for name, value in params.items()}
