"""A warm start by imitation: a rule per tensor learns to steer the harness as the best constants do on each problem.

What constants are best says much of what there is to learn, and a table of them is cheap: they are the rows of one
vectorised run. Imitating them is a regression, which needs no runs at all. What pays in the course of a run, and what a
constant cannot say, is for meta-training to find.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Carry, InnerStep, Loss, Report, Update, silent
from l2lopt.estimators import EvolutionStrategies, MetaGradientEstimator
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.hierarchical import Hierarchical
from l2lopt.optimisers.schedules import multiplier, set_rates
from l2lopt.parallel import processes
from l2lopt.training.inner_runs import InnerRuns
from l2lopt.training.meta_optimiser import assign
from l2lopt.training.settings import ImitationSettings, UnrollSettings

IMITATED = ("step", "decay")
"""Controls whose best constants are imitated; all others are to stay 0."""


class Lesson(NamedTuple):
    """What a rule is to say in a run.

    Attributes:
        told: The facts of each step, [T, facts, tensors].
        outputs: The network's outputs that give the best constants, [controls].
        value: The meta-loss of the harness less that of the best constants, divided by the number of steps.
    """

    told: Tensor
    outputs: Tensor
    value: Tensor


def imitate(
    optimiser: Optimiser,
    optimisees: Sequence[Optimisee],
    estimator: MetaGradientEstimator,
    unrolls: UnrollSettings,
    settings: ImitationSettings,
    seed: int = 0,
    report: Report = silent,
    backend: str = "auto",
) -> dict[str, float]:
    """Changes φ so that the controls are near the best constants of the runs they are told of; gives the figures.

    For `runs` runs of each problem every pair of a factor of the step and one of the decay is tried, as rows of one
    run. The constants of a run are the mean of all pairs in the space of the controls with the weights
    softmax(−L / temperature), L the meta-loss divided by the steps: the best pair where it stands out, and near the
    mean of all where nothing is told apart. The harness counts twice in it where the grid has its pair. A run with
    these constants then tells the facts of every step, and φ is fitted by Adam to the mean square of outputs less those
    of the constants.

    Everything is a function of φ, the seed and the settings, whatever the number of ranks.

    Args:
        optimiser: The learned optimiser, a `Hierarchical` with the controls "step" and "decay".
        optimisees: The problems.
        estimator: The estimator, `es` or `pes`, whose objective, rows and backend measure the runs.
        unrolls: The length of runs and the weights of their losses.
        settings: The grid and the regression.
        seed: The seed of the runs.
        report: The function that is told the progress.
        backend: The backend of the optimiser's steps; see `kernels.fuse`.

    Raises:
        UserError: For another rule, or an estimator that does not run many rules side by side.
    """
    rule, estimator = checked(optimiser, estimator)
    unrolls, lessons = unrolls.model_copy(update={"curriculum": 0}), list[Lesson]()  # lessons are whole runs
    for number, problem in enumerate(optimisees):
        own = seed_of("imitation", seed, number)
        runs = InnerRuns(optimiser, [problem], estimator, unrolls, settings.runs, own, backend)
        lessons += runs.whole(1, partial(_lesson, rule, estimator, settings))
        report("imitate", number + 1, len(optimisees), {})
    usable = [lesson for lesson in lessons if lesson.told.isfinite().all() and lesson.outputs.isfinite().all()]
    device = next(iter(rule.phi().values())).device  # lessons of several ranks come by way of the CPU
    placed = [Lesson(*(value.to(device) for value in lesson)) for lesson in usable]
    phi, error = processes.on_first(lambda: _fitted(rule, placed, settings))
    assign(optimiser, phi)
    gain = torch.stack([lesson.value for lesson in usable]).mean() if usable else torch.tensor(math.nan)
    return {"lessons": float(len(usable)), "gain": float(gain), "error": error}


def constant(rule: Hierarchical, controls: dict[str, float]) -> Params:
    """The φ with which a rule's controls are these constants, and all others 0."""
    phi = {name: value.detach().clone() for name, value in rule.phi().items()}
    phi["head.weight"].zero_()
    phi["head.bias"] = torch.tensor(
        [rule.bounds.output(name, controls.get(name, 0.0)) for name in rule.controls], dtype=phi["head.bias"].dtype
    ).to(phi["head.bias"])
    return phi


def checked(optimiser: Optimiser, estimator: MetaGradientEstimator) -> tuple[Hierarchical, EvolutionStrategies]:
    """The rule and the estimator, if a warm start can be made with them.

    Raises:
        UserError: For another rule, or an estimator that does not run many rules side by side.
    """
    if not isinstance(optimiser, Hierarchical) or not {*IMITATED} <= {*optimiser.controls}:
        expected, remedy = 'a hierarchical optimiser with the controls "step" and "decay"', "leave out meta.imitation"
        raise UserError("meta.imitation", expected=expected, found=type(optimiser).__name__, remedy=remedy)
    if optimiser.embedding is not None:
        remedy = "choose a cell that needs none"
        raise UserError("meta.imitation", expected="a rule without an embedding", found="one", remedy=remedy)
    if not isinstance(estimator, EvolutionStrategies):
        found, remedy = type(estimator).__name__, "choose es or pes"
        raise UserError("meta.imitation", expected="evolution strategies", found=found, remedy=remedy)
    return optimiser, estimator


def _lesson(
    rule: Hierarchical,
    estimator: EvolutionStrategies,
    settings: ImitationSettings,
    update: Update,
    loss: Loss,
    carry: Carry,
    steps: Sequence[InnerStep],
) -> Lesson:
    """What the rule is to say in one run."""
    grid = [(0.0, 0.0)] + [(math.log(a), math.log(b)) for a in settings.steps for b in settings.decays]
    constants = [constant(rule, dict(zip(IMITATED, pair, strict=True))) for pair in grid]
    # In groups as large as those of the estimator, so that both share what is compiled.
    rows, values = 2 * estimator.pairs + 1, []
    for low in range(0, len(grid), rows):
        some = constants[low : low + rows]
        some += [constants[0]] * (rows - len(some))
        rules = {name: torch.stack([phi[name] for phi in some]) for name in constants[0]}
        values.append(estimator.run_members(update, loss, rules, [carry] * rows, steps).values)
    found = torch.cat(values)[: len(grid)] / len(steps)
    weights = torch.softmax(-torch.nan_to_num(found, math.inf, math.inf) / settings.temperature, 0)
    best = weights.cpu().double() @ torch.tensor(grid, dtype=torch.float64)
    phi = constant(rule, dict(zip(IMITATED, best.tolist(), strict=True)))
    return Lesson(_told(rule, phi, loss, carry, steps), phi["head.bias"], found[0] - found[weights.argmax()])


def _told(rule: Hierarchical, phi: Params, loss: Loss, carry: Carry, steps: Sequence[InnerStep]) -> Tensor:
    """The facts of each step of a run with this φ, [T, facts, tensors]."""
    teacher, told = deepcopy(rule), list[Tensor]()
    assign(teacher, phi)
    teacher.cell.register_forward_pre_hook(lambda _, given: told.append(given[0].detach()))
    for step in steps:
        theta = carry.params.detach().requires_grad_()
        value, aux = loss(theta, carry.aux, step.batch)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        with torch.no_grad():
            change, state = teacher.update(gradient, carry.state, carry.params, loss=value.detach())
        carry = Carry(carry.params + change, {name: entry.detach() for name, entry in aux.items()}, state)
    return torch.stack(told)


def _fitted(rule: Hierarchical, lessons: Sequence[Lesson], settings: ImitationSettings) -> tuple[Params, float]:
    """φ after the regression on all lessons, and the mean square error."""
    pupil, error = deepcopy(rule), math.nan
    adam = torch.optim.Adam(pupil.parameters(), lr=settings.rate)
    for number in range(settings.updates if lessons else 0):
        set_rates(adam, [settings.rate * multiplier("cosine", number, 0, settings.updates)])
        adam.zero_grad()
        found = _error(pupil, lessons)
        found.backward()
        adam.step()
        error = float(found.detach())
    return {name: value.detach().cpu() for name, value in pupil.phi().items()}, error


def _error(rule: Hierarchical, lessons: Sequence[Lesson]) -> Tensor:
    """The mean over lessons of the mean square of the outputs less those that are to be said."""
    # All lessons side by side, as if their tensors were those of one run: a step of the cell costs the same for one
    # tensor and for hundreds. Shorter ones go on with their last facts, which count for nothing.
    longest = max(len(lesson.told) for lesson in lessons)
    told = torch.cat(
        [torch.cat([each.told, each.told[-1:].expand(longest - len(each.told), -1, -1)]) for each in lessons], -1
    )
    aims = torch.cat([each.outputs[:, None].expand(-1, each.told.shape[-1]) for each in lessons], -1)
    state, total = rule.cell.initial_state(told[0]), told.new_zeros(())
    counts = torch.tensor([each.told.shape[-1] for each in lessons])
    lengths = torch.tensor([len(each.told) for each in lessons])
    shares = (1 / (lengths * counts)).repeat_interleave(counts).to(told)
    ends = lengths.repeat_interleave(counts).to(told.device)
    for step, x in enumerate(told):
        found, state = rule.respond(x, state)
        total = total + (shares * (step < ends) * (found - aims).square().mean(0)).sum()
    return total / len(lessons)
