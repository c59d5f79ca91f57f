"""What a hierarchical rule does: the controls that its network gives the tensors, step by step of a run."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.groupings import key_of
from l2lopt.core.kinds import KINDS
from l2lopt.core.types import Carry, Report, silent
from l2lopt.estimators.exchange import Recorder
from l2lopt.kernels.inner_step import eager_steps
from l2lopt.optimisee import BatchesOfRows, Optimisee, Split, flat_loss, init_rows
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.controls import Bounds
from l2lopt.optimisers.hierarchical import Hierarchical
from l2lopt.report.control_curves import ControlCurve


def controls_over_time(
    optimiser: Optimiser,
    optimisee: Optimisee,
    steps: int,
    seeds: Sequence[int],
    *,
    fit: Split = "train",
    report: Report = silent,
) -> list[ControlCurve]:
    """Runs a hierarchical rule, and gives the controls of each kind of tensor at every step.

    Step and decay are factors of the harness's; a turn of the direction is an angle in degrees, or, with
    `mix="logit"`, Adam's share; the momentum's control is the slow momentum's share, and below 0 the gradient's.
    The turn to Adam's direction is given for all kinds, but it acts on matrices alone; see `Hierarchical`.

    Args:
        optimiser: Hierarchical rule in its reference form.
        optimisee: Problem.
        steps: T, the number of steps, which the rule is told.
        seeds: Seeds of the runs, which are made side by side; means and bands are over the tensors of all.
        fit: Split on whose batches the steps are made.
        report: Progress.

    Returns:
        A curve for each control of each kind of tensor that the optimisee has.

    Raises:
        UserError: For an optimiser without controls.

    Example:
        >>> import optimisees
        >>> from l2lopt import optimisers
        >>> rule, problem = optimisers.make("hierarchical"), optimisees.make("quadratic", size=3)
        >>> curve = controls_over_time(rule, problem, 4, [0])[0]  # untrained it is the harness
        >>> curve.kind, curve.control, curve.unit, curve.mean.tolist()
        ('vector', 'step', 'factor', [1.0, 1.0, 1.0, 1.0])
    """
    rule = steering(optimiser)
    layout, params, aux = init_rows(optimisee, seeds)
    # The state's layout says how coordinates meet: the recorder sees each step's controls on their way to them.
    recorder, key = Recorder(layout.exchange), key_of(layout.tensors, "controls")
    state = rule.init(layout.meeting(recorder), (len(seeds),), like=params, total_steps=steps)
    carry, batches = Carry(params, aux, state), BatchesOfRows(optimisee, fit, seeds)
    advance, found = eager_steps(flat_loss(optimisee, layout), rule), []
    for step in range(steps):
        meeting = recorder.begin()
        samples, places = batches.at(step)
        _, carry = advance(carry, samples, places)
        found.append(meeting.controls[key].cpu().double())
        report("controls", step + 1, steps, {})
    values, kinds = torch.stack(found), [role.kind for role in layout.roles]
    curves = []
    for index, control in enumerate(rule.controls):
        for kind in (kind for kind in KINDS if kind in kinds):
            places = torch.tensor([place for place, other in enumerate(kinds) if other == kind])
            curves.append(_curve(kind, control, values[:, index][..., places].flatten(1), rule.bounds))
    return curves


def steering(optimiser: Optimiser) -> Hierarchical:
    """The optimiser, if it is hierarchical.

    Raises:
        UserError: For any other.
    """
    if not isinstance(optimiser, Hierarchical):
        found = str((optimiser.description or {}).get("name", type(optimiser).__name__))
        expected, remedy = "a hierarchical rule, whose network steers tensors", "choose other weights"
        raise UserError("controls", expected=expected, found=f"one called {found!r}", remedy=remedy)
    return optimiser


def _curve(kind: str, control: str, values: Tensor, bounds: Bounds) -> ControlCurve:
    """The curve of one control over the tensors of one kind, [T, tensors]."""
    mean, low, high = (part.numpy() for part in (values.mean(1), values.amin(1), values.amax(1)))
    unit = "degrees"
    if control in ("step", "decay"):
        unit = "factor"
        # After the mean, which is so that of the logarithms: half and double are the harness.
        with np.errstate(over="ignore"):
            mean, low, high = np.exp(mean), np.exp(low), np.exp(high)
    elif control == "momentum":
        unit = "share"
    elif control == "mix" and bounds.mix == "logit":
        unit, mean, low, high = "share", 1 - mean, 1 - high, 1 - low
    else:
        mean, low, high = np.rad2deg(mean), np.rad2deg(low), np.rad2deg(high)
    return ControlCurve(kind, control, unit, np.arange(1, len(values) + 1), mean, low, high)
