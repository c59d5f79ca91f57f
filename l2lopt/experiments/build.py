"""The objects that configs describe."""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

import optimisees
from l2lopt import estimators, kernels, optimisers
from l2lopt.core import registry
from l2lopt.core.errors import UserError, within
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Report, silent
from l2lopt.estimators import MetaGradientEstimator
from l2lopt.estimators.higher import Higher
from l2lopt.evaluation.free_runs import run_groups
from l2lopt.evaluation.scores import log_losses
from l2lopt.evaluation.torch_classes import TorchClass, is_torch_class, torch_class
from l2lopt.evaluation.tuned_runs import check_step
from l2lopt.experiments import from_python
from l2lopt.experiments.config import Config, TrainConfig, problem_name
from l2lopt.experiments.size_check import check_sizes
from l2lopt.optimisee import Optimisee, Split, common_dtype
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim.learned_optimizer import LearnedOptimizer
from l2lopt.torch_optim.registry import TORCH, OptimizerFactory
from l2lopt.training import cma_es, imitation
from l2lopt.weights import files


class Experiment(NamedTuple):
    """The objects a config describes.

    Attributes:
        config: Config.
        optimisee: Problem on which optimisers are compared.
        optimisees: Problems of meta-training.
        validated_on: Problems of validation.
        optimiser: Learned optimiser.
        estimator: Estimator of the meta-gradient.
    """

    config: Config
    optimisee: Optimisee
    optimisees: list[Optimisee]
    validated_on: list[Optimisee]
    optimiser: Optimiser
    estimator: MetaGradientEstimator

    def score(self, optimiser: Optimiser, report: Report = silent) -> dict[str, float]:
        """The validation scores: problem → log of the mean loss over seeds, mean over horizons; lower is better.

        A loss that is not finite makes that of its problem infinite; one below 0 has no logarithm, see
        `scores.log_losses`.
        """
        settings, optimiser = self.config.validation, kernels.fuse(optimiser, self.config.backend)
        seeds = [seed_of("validation", self.config.seed, index) for index in range(settings.seeds)]
        names = [problem_name(choice) for choice in settings.on or self.config.problems]
        scores = {}
        for name, optimisee in zip(numbered(names), self.validated_on, strict=True):
            horizons = sorted(settings.horizons)
            run = run_groups(
                optimiser,
                optimisee,
                seeds,
                horizons,
                (settings.split,),
                report,
                "validate",
                rows=settings.rows,
                fit="inner" if settings.split == "heldout" else "train",
            )
            scores[name] = float(log_losses(run.losses[settings.split].double().mean(1)).mean())
        return scores


def numbered(names: Sequence[str]) -> list[str]:
    """The names, each that comes again with its place behind it."""
    return [name if names.index(name) == place else f"{name}-{place + 1}" for place, name in enumerate(names)]


class Training(NamedTuple):
    """The objects a config of training describes; `factory` makes the optimiser of parameters."""

    config: TrainConfig
    optimisee: Optimisee
    factory: OptimizerFactory


def build(config: Config, given: Sequence[Optimisee] = (), *, meta_training: bool = True) -> Experiment:
    """The objects a config describes.

    Args:
        config: Config.
        given: Optimisees that its tables with name = "python" stand for.
        meta_training: Whether its optimiser will be meta-trained, for which there must be memory.

    Raises:
        UserError: For an unknown name or option, a device that is not there, optimisees that are not the config's, or
            sizes without memory for them; for a problem without the samples that a meta-training will ask it for.
    """
    place = device(config.device)
    choices = [config.optimisee, *config.mixed_with]
    problem = _builder(place)
    problems = [
        made or problem(choice)
        for made, choice in zip(from_python.matched(given, choices, place), choices, strict=True)
    ]
    trained_on = [problem(choice) for choice in config.trained_on or ()] or problems
    validated_on = [problem(choice) for choice in config.validation.on or ()] or trained_on
    optimiser = _learned(config.optimiser, seed_of("optimiser", config.seed))
    made = registry.build(estimators.ESTIMATORS, "estimator", config.unroll.estimator)
    estimator = registry.checked_kind("estimator", config.unroll.estimator, made, MetaGradientEstimator)
    if config.meta.cma is not None:
        cma_es.checked(estimator, config.unroll)
    if meta_training and config.meta.imitation is not None:
        imitation.checked(optimiser, estimator)
    if meta_training and isinstance(estimator, Higher):
        _check_higher(config, trained_on)
    config.evaluation.checked_horizons()
    for baseline in config.evaluation.baselines:
        baseline.build(baseline.rates[0], config.evaluation.steps)
    every = list(dict.fromkeys([problems[0], *trained_on, *validated_on]))
    optimiser = match_dtype(optimiser, every).to(place)
    check_sizes(config, every, optimiser, estimator if meta_training else None)
    if meta_training:
        _check_splits(config, trained_on, validated_on)
    return Experiment(config, problems[0], trained_on, validated_on, optimiser, estimator)


def _check_higher(config: Config, trained_on: Sequence[Optimisee]) -> None:
    """Refuses losses that the library `higher` cannot patch, which would show after the first validation only."""
    remedy = "set unroll.estimator = {name = 'backprop', order = 2}"
    if config.unroll.scaling:
        expected = "0 with the estimator 'higher', which patches modules"
        raise UserError("unroll.scaling", expected=expected, found=f"{config.unroll.scaling:g}", remedy=remedy)
    for choice, problem in zip(config.problems, trained_on, strict=True):
        if problem.module_parts() is None:
            expected = "an optimisee that gives its module's parts"
            raise UserError("estimator 'higher'", expected=expected, found=repr(problem_name(choice)), remedy=remedy)


def _check_splits(config: Config, trained_on: Sequence[Optimisee], validated_on: Sequence[Optimisee]) -> None:
    """Refuses a problem without samples in a split, which a run would draw or a validation meet after hours of work."""
    seed = seed_of("validation", config.seed, 0)
    fits: tuple[Split, ...] = ("inner", "heldout") if config.unroll.targets.holds_out else ("train",)
    names = [problem_name(choice) for choice in config.problems]
    for name, problem in zip(numbered(names), trained_on, strict=True):
        with within(f"meta-training on {name}"):
            for split in fits:
                problem.batch(split, seed, 0)
    split = config.validation.split
    names = [problem_name(choice) for choice in config.validation.on or config.problems]
    for name, problem in zip(numbered(names), validated_on, strict=True):
        with within(f"validation on {name}"):
            problem.batch("inner" if split == "heldout" else "train", seed, 0)
            next(iter(problem.evaluation_batches(split, seed)))


def _builder(place: torch.device) -> Callable[[Choice], Optimisee]:
    """What builds each choice once: a problem named twice, which is drawn more often, reads its data once."""

    @cache
    def built(choice: str) -> Optimisee:
        return optimisees.build(json.loads(choice), device=str(place))

    return lambda choice: built(json.dumps(choice, sort_keys=True))


def match_dtype(optimiser: Optimiser, problems: Sequence[Optimisee]) -> Optimiser:
    """An optimiser in the dtype of these problems' parameters.

    Raises:
        UserError: For problems of several dtypes, of one that rules do not compute in, or without parameters.
    """
    fit: Optimiser = optimiser.to(common_dtype(problems))
    return fit


def build_training(
    config: TrainConfig, given: Sequence[Optimisee] = (), optimiser: Optimiser | None = None
) -> Training:
    """The objects a config of training describes; a table with name = "python" stands for the one given.

    Raises:
        UserError: For an unknown name or option, one that the parameters do not allow, or a device that is not there.
    """
    place = device(config.device)
    (made,) = from_python.matched(given, [config.optimisee], place)
    optimisee = made or optimisees.build(config.optimisee, device=str(place))
    learned = from_python.matched_optimiser(optimiser, config.optimiser)
    factory = _of(learned) if learned else _factory(config.optimiser, seed_of("optimiser", config.seed))
    seed = seed_of("train", config.seed)
    for split in config.train.splits:
        next(iter(optimisee.evaluation_batches(split, seed)))  # refused if it has no samples
    optimisee.batch(config.train.splits[0], seed, 0)  # or too few
    if config.train.epochs:
        steps = optimisee.epoch_start(config.train.splits[0], seed, config.train.epochs)
        if config.train.warm_up > steps:
            expected, found = f"at most {steps}, the steps of {config.train.epochs} epochs", str(config.train.warm_up)
            raise UserError("train.warm_up", expected=expected, found=found, remedy="change the value")
    params, _ = optimisee.init(seed)
    try:
        optimizer = factory(list(params.items()))
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # torch.optim's own checks
        where, remedy = f"optimiser {config.name!r}", "change the options, or choose another"
        raise UserError(where, expected="one for these parameters", found=str(error), remedy=remedy) from None
    if not all("lr" in group for group in optimizer.param_groups):
        found, remedy = "none", 'call its rate "lr", as torch.optim does: the schedule sets it'
        raise UserError(f"optimiser {config.name!r}", expected="groups with a rate, 'lr'", found=found, remedy=remedy)
    if not isinstance(optimizer, LearnedOptimizer):  # another class may find a mistake in its first step alone
        check_step(factory, optimisee, f"optimiser {config.name!r}", config.train.splits[0])
    return Training(config, optimisee, factory)


def ready_optimiser(choice: Choice) -> Optimiser:
    """The optimiser of a choice as it is, with nothing to be meta-trained.

    Args:
        choice: One of ours with all its options, or a table of `weights`, a name or a file, and `trusted`.

    Raises:
        UserError: For an unknown name or option, or weights that cannot be loaded.
    """
    return optimisers.build(choice) if (made := _trained_rule(choice)) is None else made


def _learned(choice: Choice, seed: int) -> Optimiser:
    """The learned optimiser that meta-training begins with: a new one, or a trained one from a table of `weights`.

    Raises:
        UserError: For an unknown name or option, weights that cannot be loaded, or an optimiser without any.
    """
    if (made := _trained_rule(choice)) is None:
        made, remedy = optimisers.build(choice, optimisers.LEARNED, seed=seed), "make them of nn.Parameter"
    else:
        remedy = "give the file of a learned optimiser"
    if not made.phi():
        found = "an optimiser without any"
        raise UserError("optimiser", expected="meta-parameters", found=found, remedy=remedy)
    return made


def _trained_rule(choice: Choice) -> Optimiser | None:
    """The optimiser of a table of `weights`, beside which may be `trusted`; None for any other choice."""
    _check_not_weights(choice)
    if not (isinstance(choice, dict) and "weights" in choice):
        return None
    return files.from_choice(choice)


def _check_not_weights(choice: Choice) -> None:
    """Refuses the name of weights in the place of an optimiser's, with what to write."""
    name = choice if isinstance(choice, str) else choice.get("name")
    if name in files.list_weights():
        found, remedy = f"the weights {name!r}", f"write {{weights={name!r}}}"
        raise UserError("optimiser", expected="the name of an optimiser", found=found, remedy=remedy)


@cache
def device(name: str) -> torch.device:
    """The device called `name`; where `torchrun` starts several processes on a machine, "cuda" is each one's own.

    Raises:
        UserError: Where it is not there.
    """
    try:
        found = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # the last where a device is another package's
        reason = f"{name!r} ({str(error).splitlines()[0]})"
        raise UserError("device", expected="a device of this machine", found=reason, remedy='use "cpu"') from None
    return found


def _factory(choice: Choice, seed: int) -> OptimizerFactory:
    """A function that makes the optimiser of a choice; `seed` is for a learned optimiser without trained weights."""
    if isinstance(choice, dict) and "weights" in choice:
        made: OptimizerFactory = registry.make({"weights": _trained}, "optimiser", "weights", **choice)
        return made
    _check_not_weights(choice)
    name = choice if isinstance(choice, str) else choice.get("name")
    if isinstance(name, str) and ":" in name and is_torch_class(choice):
        return _of_class(torch_class(choice))
    extra = {"seed": seed} if name in optimisers.LEARNED else {}
    built = registry.build({**optimisers.OPTIMISERS, **TORCH}, "optimiser", choice, **extra)
    return _of(built) if isinstance(built, Optimiser) else built


def _of_class(chosen: TorchClass) -> OptimizerFactory:
    """The function that makes the optimiser of a class of a module's.

    Raises:
        UserError: For a second class beside it.
    """
    if chosen.rest is not None:
        remedy = "leave it out, or compare the two in a benchmark"
        raise UserError(f"optimiser {chosen.name!r}", expected="one for all parameters", found="rest", remedy=remedy)
    return lambda params: chosen(list(params))[0]  # type: ignore[arg-type]  # the loop gives names with them


def _of(optimiser: Optimiser) -> OptimizerFactory:
    """The function that makes the `torch.optim.Optimizer` of one of ours."""
    return partial(LearnedOptimizer, weights=optimiser)


def _trained(
    weights: str,
    lr: float = 1.0,
    weight_decay: float = 0.0,
    max_update: float | None = None,
    fallback: Choice | None = None,
    trusted: bool = False,
) -> OptimizerFactory:
    """A learned optimiser from its file or by its name."""
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "max_update": max_update, "fallback": fallback}
    return partial(LearnedOptimizer, weights=files.load(weights, trusted=trusted), **options)
