"""Training: one optimisee, any `torch.optim.Optimizer`, to the end."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.checkpoint import Checkpoint, NoCheckpoint, pack, unpack
from l2lopt.optimisee import Optimisee, Split, measure
from l2lopt.optimisers.schedule import warm_up_cosine
from l2lopt.records import NoRecords, Recorder
from l2lopt.settings import Settings
from l2lopt.torch_state import restore
from l2lopt.torch_table import OptimizerFactory
from l2lopt.types import Aux, Params, Report, detach, seed_of, silent


class TrainSettings(Settings):
    """How an optimisee is trained."""

    steps: PositiveInt = 1000
    """Updates in all."""
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

    @model_validator(mode="after")
    def _in_time(self) -> "TrainSettings":
        if self.warm_up > self.steps:
            raise ValueError("a warm_up of at most `steps`")
        return self

    @property
    def splits(self) -> tuple[Split, Split]:
        """The split trained on and the one watched."""
        return ("inner", "heldout") if self.patience else ("train", "test")

    def multiplier(self, step: int) -> float:
        """Of the rate, at step 1, 2, …."""
        total = self.steps if self.schedule == "cosine" else None
        return float(warm_up_cosine(torch.tensor(step - 1), self.warm_up, total))


class Trained(NamedTuple):
    """What training ended with.

    Attributes:
        params: the parameters.
        aux: the loss's own state.
        step: after which they stood.
        steps: that were made.
        diverged: the step at which the loss was not finite any more, or None.
        metrics: the test-mode loss on the whole of the split `test`, and the optimisee's own metrics there.
    """

    params: Params
    aux: Aux
    step: int
    steps: int
    diverged: int | None
    metrics: dict[str, float]


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
        best: where early stopping would go back to: "loss", "step", "params" and "aux".
    """

    params: Params
    aux: Aux
    optimizer: torch.optim.Optimizer
    rates: list[float]
    step: int = 0
    diverged: int | None = None
    best: dict[str, Any] = field(default_factory=dict)

    def place(self) -> dict[str, Any]:
        """All that the steps after this one depend on."""
        own = {name: getattr(self, name) for name in ("params", "aux", "step", "diverged", "best")}
        return {**own, "optimizer": self.optimizer.state_dict()}

    def take_up(self, place: dict[str, Any]) -> None:
        """Puts everything back as `place` found it."""
        with torch.no_grad():
            for name, value in self.params.items():
                value.copy_(place["params"][name])
        device = next(iter(self.params.values())).device
        self.aux, self.best = pytree.tree_map_only(Tensor, lambda t: t.to(device), (place["aux"], place["best"]))
        self.step, self.diverged = place["step"], place["diverged"]
        restore(self.optimizer, place["optimizer"])

    def ended(self, settings: TrainSettings) -> bool:
        """Whether there is nothing more to do."""
        waited = settings.patience and self.step - self.best["step"] >= settings.patience * settings.evaluate_every
        return self.step >= settings.steps or self.diverged is not None or bool(waited)


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
        records: where the figures go: the training loss of each step as stage "train", the watched split's as its name.
        report: progress.
        checkpoint: where the place is kept, and taken up again where one is there: the end is the same to the bit.
    """
    records, checkpoint = records or NoRecords(), checkpoint or NoCheckpoint()
    seed = seed_of("train", seed)
    params, aux = optimisee.init(seed)
    params = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimizer = factory(list(params.items()))
    run = _Run(params, aux, optimizer, [float(group["lr"]) for group in optimizer.param_groups])

    def watch() -> None:
        split = settings.splits[1]
        figures = measure(optimisee, split, seed, run.params, run.aux)
        records.write(split, run.step, figures)
        if not math.isfinite(figures["loss"]):
            run.diverged = run.step
        elif settings.patience and figures["loss"] < run.best["loss"]:
            run.best = _best(run, figures["loss"])

    kept = checkpoint.load()
    if kept:
        run.take_up(unpack(kept[0]["place"], kept[1]))
    else:
        run.best = _best(run, math.inf) if settings.patience else {}
        watch()
    while not run.ended(settings):
        run.step += 1
        figures = _advance(run, optimisee, settings, seed)
        records.write("train", run.step, figures)
        report("train", run.step, settings.steps, figures)
        if not math.isfinite(figures["loss"]):
            run.diverged = run.step
        elif run.step % settings.evaluate_every == 0 or run.step == settings.steps:
            watch()
        if run.step % settings.checkpoint_every == 0 or run.ended(settings):
            place, tensors = pack(run.place())
            checkpoint.save({"step": run.step, "place": place}, tensors)
    end = run.best or {"params": run.params, "aux": run.aux, "step": run.step}
    metrics = measure(optimisee, "test", seed, end["params"], end["aux"])
    return Trained(detach(end["params"]), end["aux"], end["step"], run.step, run.diverged, metrics)


def _advance(run: _Run, optimisee: Optimisee, settings: TrainSettings, seed: int) -> dict[str, float]:
    """One step, unless its loss is not finite, and its figures."""
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
    multiplier = settings.multiplier(run.step)
    for group, rate in zip(run.optimizer.param_groups, run.rates, strict=True):
        group["lr"] = rate * multiplier
    first = [loss]  # the gradients are there already

    def closure() -> Tensor:
        return first.pop() if first else evaluate()[0]

    if loss.isfinite():
        run.optimizer.step(closure)  # type: ignore[arg-type]  # torch.optim calls a loss a float
        run.aux = aux
    return {"loss": float(loss), "rate": run.rates[0] * multiplier, **figures}


def _best(run: _Run, loss: float) -> dict[str, Any]:
    """A copy of where the run stands."""
    params = {name: value.detach().clone() for name, value in run.params.items()}
    aux = {name: value.clone() for name, value in run.aux.items()}
    return {"loss": loss, "step": run.step, "params": params, "aux": aux}
