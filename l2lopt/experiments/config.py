"""Typed configs from TOML, and the objects they describe."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar, overload

import tomli_w
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

import optimisees
from l2lopt import estimators, kernels, optimisers
from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.core.types import Report, seed_of, silent
from l2lopt.estimators import Unroll
from l2lopt.evaluation.comparison import EvaluationSettings, run_groups
from l2lopt.optimisee import Optimisee, Split
from l2lopt.optimisers import Optimiser
from l2lopt.storage.run_log import existing
from l2lopt.torch_optim.learned_optimizer import LearnedOptimizer
from l2lopt.torch_optim.registry import TORCH, OptimizerFactory
from l2lopt.training.settings import MetaTrainSettings, UnrollSettings
from l2lopt.training.train import TrainSettings
from l2lopt.weights import files

C = TypeVar("C", bound=Settings)
O = TypeVar("O", bound=Optimisee)


class ValidationSettings(Settings):
    """How the best optimiser is picked during meta-training: lower mean log loss at the horizons."""

    seeds: PositiveInt = 5
    """Fresh problems, the same at every validation, never those of the evaluation."""
    horizons: list[PositiveInt] = Field(default=[100, 200, 1000], min_length=1)
    """The steps at which the losses are taken; the last ends the run."""
    split: Split = "train"
    """Whose whole loss counts."""
    rows: PositiveInt | None = None
    """Runs made side by side; none: all. 1 suits large models."""


class _Common(Settings):
    """What every kind of experiment has."""

    label: str | None = None
    """The optimiser's name in results; by default made of what it is."""
    seed: NonNegativeInt = 0
    """Of everything: equal configs and seeds give equal runs on the same machine."""
    device: str = "cpu"
    """Where tensors live: "cpu", "cuda", "cuda:1", …"""
    threads: PositiveInt | None = Field(default=None, le=1024)
    """CPU threads; none: PyTorch's own choice. Small tensors are fastest on one."""
    optimisee: Choice
    """What is optimised: a name, or a table of the name and its options."""


class Config(_Common):
    """An experiment: an optimiser meta-trained on an optimisee, then compared with baselines."""

    mixed_with: list[Choice] = Field(default_factory=list)
    """Further problems of meta-training and validation: every run draws one of all, with equal chances."""
    optimiser: Choice = "coordinatewise"
    """The learned optimiser: a name, or a table of the name and its options."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Of the learned optimiser's steps where no tape is needed; "auto" takes the fastest there is."""
    unroll: UnrollSettings = UnrollSettings()
    """How long the unrolls are and how they are differentiated."""
    meta: MetaTrainSettings = MetaTrainSettings()
    """How the meta-gradient is followed."""
    validation: ValidationSettings = ValidationSettings()
    """How the best optimiser is picked."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """How it is compared with baselines."""

    @property
    def name(self) -> str:
        """The learned optimiser's name in results."""
        choice = {"name": self.optimiser} if isinstance(self.optimiser, str) else self.optimiser
        kind = choice.get("name")
        if kind == "coordinatewise":
            cell = choice.get("cell", "lstm")
            kind = cell if isinstance(cell, str) else cell.get("name")
        return self.label or f"learned-{kind}"


class TrainConfig(_Common):
    """An optimisee trained to the end by any optimiser."""

    optimiser: Choice
    """One of ours, learned or hand-made, or `torch.optim.RMSprop` and its like: a name, or a table of the name and its
    options; or a table of `weights`, the name of one that comes with the package or a file that meta-training has left,
    and any of `LearnedOptimizer`'s `lr`, `weight_decay`, `max_update` and `fallback`."""
    train: TrainSettings = TrainSettings()
    """How long, and what is watched."""

    @property
    def name(self) -> str:
        """The optimiser's name in results."""
        choice = {"name": self.optimiser} if isinstance(self.optimiser, str) else self.optimiser
        return self.label or str(choice.get("name") or choice.get("weights"))


class Experiment(NamedTuple):
    """The objects a config describes."""

    config: Config
    optimisees: list[Optimisee]
    optimiser: Optimiser
    unroll: Unroll

    @property
    def optimisee(self) -> Optimisee:
        """The problem on which optimisers are compared, the first of those of meta-training."""
        return self.optimisees[0]

    def score(self, optimiser: Optimiser, report: Report = silent) -> float:
        """The validation score: the log of the mean loss over seeds, mean over problems and horizons; lower is better.

        A problem in which a loss is not finite makes it infinite.
        """
        settings, optimiser = self.config.validation, kernels.fast(optimiser, self.config.backend)
        seeds = [seed_of("validation", self.config.seed, index) for index in range(settings.seeds)]
        scores = []
        for optimisee in self.optimisees:
            horizons = sorted(settings.horizons)
            run = run_groups(
                lambda _: optimiser,
                optimisee,
                seeds,
                horizons,
                (settings.split,),
                report,
                "validate",
                rows=settings.rows,
            )
            means = run.losses[settings.split].double().mean(1).clamp(min=1e-12)
            scores.append(float(means.log().nan_to_num(nan=torch.inf).mean()))
        return fmean(scores)


class Training(NamedTuple):
    """The objects a config of training describes; `factory` makes the optimiser of parameters."""

    config: TrainConfig
    optimisee: Optimisee
    factory: OptimizerFactory


@overload
def load(source: str | Path | Mapping[str, Any] | Settings, changes: Sequence[str] = ()) -> Config: ...
@overload
def load(source: str | Path | Mapping[str, Any] | Settings, changes: Sequence[str] = (), *, kind: type[C]) -> C: ...
def load(
    source: str | Path | Mapping[str, Any] | Settings, changes: Sequence[str] = (), *, kind: type[Any] = Config
) -> Any:
    """A config from a TOML file, a mapping or a config, with changes such as "unroll.length=200" made to it.

    Args:
        source: of the config.
        changes: in order.
        kind: what it is: a `Config` or a `TrainConfig`.

    Raises:
        UserError: for a missing file, one that is not TOML, an unknown key or a value of the wrong type.
    """
    where, data = _read(source)
    for change in changes:
        _change(data, change, kind)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise registry.explain(where, error, kind.model_fields, data) from None


def dump(config: Settings) -> str:
    """The config as TOML, every field written out; of a choice, the options that were given."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def build(config: Config) -> Experiment:
    """The objects a config describes.

    Raises:
        UserError: for an unknown name or option, or a device that is not there.
    """
    place = device(config.device)
    problems = [
        registry.build(optimisees.OPTIMISEES, "optimisee", choice, device=str(place))
        for choice in (config.optimisee, *config.mixed_with)
    ]
    optimiser = optimisers.build(config.optimiser, optimisers.LEARNED, seed=seed_of("optimiser", config.seed))
    unroll = registry.build(estimators.UNROLLS, "unroll", config.unroll.estimator)
    config.evaluation.checked_horizons()
    for baseline in config.evaluation.baselines:
        baseline.build(baseline.rates[0], config.evaluation.steps)
    return Experiment(config, problems, fitting(optimiser, problems).to(place), unroll)


def fitting(optimiser: Optimiser, problems: Sequence[Optimisee]) -> Optimiser:
    """An optimiser in the dtype of these problems' parameters.

    Raises:
        UserError: for problems of several dtypes, or without parameters.
    """
    dtypes = {value.dtype for problem in problems for value in problem.init(0)[0].values()}
    if len(dtypes) != 1:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no parameters"
        remedy = "set dtype alike in all" if dtypes else "let some require a gradient"
        raise UserError("optimisees", expected="one dtype", found=found, remedy=remedy)
    fit: Optimiser = optimiser.to(dtypes.pop())
    return fit


def build_training(config: TrainConfig) -> Training:
    """The objects a config of training describes.

    Raises:
        UserError: for an unknown name or option, one that the parameters do not allow, or a device that is not there.
    """
    place = device(config.device)
    optimisee = registry.build(optimisees.OPTIMISEES, "optimisee", config.optimisee, device=str(place))
    factory = _factory(config.optimiser, seed_of("optimiser", config.seed))
    seed = seed_of("train", config.seed)
    for split in config.train.splits:
        next(iter(optimisee.whole(split, seed)))  # refused if it has no samples
    optimisee.batch(config.train.splits[0], seed, 0)  # or too few
    if config.train.epochs:
        steps = optimisee.epoch(config.train.splits[0], seed, config.train.epochs)
        if config.train.warm_up > steps:
            expected, found = f"at most {steps}, the steps of {config.train.epochs} epochs", str(config.train.warm_up)
            raise UserError("train.warm_up", expected=expected, found=found, remedy="change the value")
    params, _ = optimisee.init(seed)
    try:
        factory(list(params.items()))
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # torch.optim's own checks
        where, remedy = f"optimiser {config.name!r}", "change the options, or choose another"
        raise UserError(where, expected="one for these parameters", found=str(error), remedy=remedy) from None
    return Training(config, optimisee, factory)


@cache
def device(name: str) -> torch.device:
    """The device called `name`; where `torchrun` starts several processes on a machine, "cuda" is each one's own.

    Raises:
        UserError: where it is not there.
    """
    try:
        found = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError) as error:
        reason = f"{name!r} ({str(error).splitlines()[0]})"
        raise UserError("device", expected="a device of this machine", found=reason, remedy='use "cpu"') from None
    return found


def optimisee_of(config: TrainConfig, kind: type[O], name: str) -> O:
    """The optimisee of a config, which must be of `kind`.

    Raises:
        UserError: for a mistake in the config, and for an optimisee of another kind than the one called `name`.
    """
    optimisee = build_training(config).optimisee
    if not isinstance(optimisee, kind):
        remedy = f'set optimisee.name = "{name}"'
        raise UserError("study: optimisee", expected=f"a {name}", found=str(config.optimisee), remedy=remedy)
    return optimisee


def shipped(name: str) -> Path:
    """A file or folder of configs/: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parents[1] / "configs"
    return (inside if inside.is_dir() else Path(__file__).parents[2] / "configs") / name


def demo() -> Path:
    """The demo's config."""
    return shipped("demo.toml")


def _factory(choice: Choice, seed: int) -> OptimizerFactory:
    """What makes the optimiser of a choice; `seed` is that of a learned one that is not trained."""
    if isinstance(choice, dict) and "weights" in choice:
        made: OptimizerFactory = registry.make({"weights": _trained}, "optimiser", "weights", **choice)
        return made
    name = choice if isinstance(choice, str) else choice.get("name")
    extra = {"seed": seed} if name in optimisers.LEARNED else {}
    built = registry.build({**optimisers.OPTIMISERS, **TORCH}, "optimiser", choice, **extra)
    return partial(LearnedOptimizer, weights=built) if isinstance(built, Optimiser) else built


def _trained(
    weights: str,
    lr: float = 1.0,
    weight_decay: float = 0.0,
    max_update: float | None = None,
    fallback: Choice | None = None,
) -> OptimizerFactory:
    """A learned optimiser from its file or by its name."""
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "max_update": max_update, "fallback": fallback}
    return partial(LearnedOptimizer, weights=files.load(weights), **options)


def _read(source: str | Path | Mapping[str, Any] | Settings) -> tuple[str, dict[str, Any]]:
    if isinstance(source, Settings):
        return "config", source.model_dump()
    if isinstance(source, Mapping):
        return "config", {key: value for key, value in source.items()}
    path = existing(Path(source), "a config file", "give the path of a TOML file, such as configs/demo.toml")
    try:
        return str(path), tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), expected="a TOML file", found=str(error), remedy="mend that place") from None


def _change(data: dict[str, Any], change: str, kind: type[Settings]) -> None:
    """Carries out "a.b=value" on nested tables; a choice that is only a name becomes a table first."""
    path, equals, text = change.partition("=")
    *above, last = path.strip().split(".")
    if not equals or not all((*above, last)):
        remedy = "write for instance --set unroll.length=200"
        raise UserError("--set", expected="KEY=VALUE", found=repr(change), remedy=remedy)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    default = kind.model_fields[above[0]].default if above and above[0] in kind.model_fields else None
    for key in above:
        inner = data.get(key, default if isinstance(default, str) else {})
        default = None
        inner = {"name": inner} if isinstance(inner, str) else inner
        if not isinstance(inner, dict):
            raise UserError("--set", expected=f"a table at {key!r}", found=repr(inner), remedy="change the key")
        data[key] = data = dict(inner)
    data[last] = value
