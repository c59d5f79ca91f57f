"""Backpropagation through a window of the coordinatewise learned optimiser for a block, written by hand."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.estimators.window import BlockAdjoints, MeanAdjoint, Window
from l2lopt.kernels import recorded
from l2lopt.kernels.cpu.block import Block
from l2lopt.kernels.cpu.cells import CellKernel, Record, cell_kernel
from l2lopt.kernels.cpu.rules import KERNELS, DirectionAndMagnitude, Normaliser, RuleKernel
from l2lopt.kernels.cpu.trace import Trace
from l2lopt.kernels.cpu.workspace import Workspace
from l2lopt.kernels.folding import Folded, gradient_through, refusal
from l2lopt.optimisers.base import Optimiser
from l2lopt.optimisers.coordinatewise import Coordinatewise
from l2lopt.optimisers.inputs import INPUTS, Input, Parameter, StepInputs
from l2lopt.optimisers.rules import activity


def refusal_to_replay(optimiser: Optimiser) -> str | None:
    """The reason why an optimiser cannot be replayed by hand, or None where it can.

    Only exact types pass: the derivatives of a subclass are not known.
    """
    reason = refusal(optimiser)
    if reason is not None:
        return reason
    assert isinstance(optimiser, Coordinatewise)
    for name, item in _inputs(optimiser).items():
        if type(item) not in INPUTS.values():
            return f"the input {name!r} is none of {', '.join(INPUTS)}: {type(item).__name__}"
    if type(optimiser.rule) not in KERNELS:
        known = ", ".join(rule.__name__ for rule in KERNELS)
        return f"the rule is none of {known}: {type(optimiser.rule).__name__}"
    # Its size is what lets a coordinate without a gradient move, whether the rule asks for it or not.
    if isinstance(_inputs(optimiser).get("rnnprop"), Parameter):
        return "what the rule takes from its inputs is θ itself"
    return None


def replay(
    optimiser: Coordinatewise,
    phi: Params,
    window: Window,
    adjoints: Mapping[str, MeanAdjoint] | None = None,
    space: Workspace | None = None,
) -> BlockAdjoints:
    """The block's part of the meta-gradient; gradients, losses and means without adjoint are constants.

    With a_t the adjoint of θ_t, s̄_t that of the state and q_t the source at θ_{t+1}, from a_T = s̄_T = 0:

        a ← a_{t+1} + q_t;  a_t = a (1 + ∂u_t/∂θ_t) + s̄_{t+1} ∂s_{t+1}/∂θ_t
        s̄_t = s̄_{t+1} ∂s_{t+1}/∂s_t + a ∂u_t/∂s_t;  dφ += a ∂u_t/∂φ + s̄_{t+1} ∂s_{t+1}/∂φ

    The features do not depend on φ except for θ itself, so they are computed before the steps, by the reference's own
    inputs. dφ is summed for the multiplied-out layers and taken through their products once. A coordinate whose
    gradient is not finite at a step is skipped by it: u = 0, and its adjoints pass unchanged.

    Cost: three products a step for an LSTM, each of about 4M (F + M + 1) multiplications a coordinate, six for an
    IHC-LSTM; a third to a half of autograd's time on the same block. Small operations take a tenth of it at blocks of
    4,096 and a quarter at 1,024. `CellKernel` says how much memory a step takes.

    Args:
        optimiser: An optimiser that `refusal_to_replay` lets pass.
        phi: Parameters of the optimiser.
        window: The block's steps.
        adjoints: The adjoint of the rule's statistic, under the name of its mean; none where it is a constant.
        space: Memory to use again; threads may share it.

    Raises:
        UserError: `optimiser` is refused.
    """
    reason = refusal_to_replay(optimiser)
    if reason is not None:
        remedy = "replay it by autograd"
        raise UserError("replay", expected="an optimiser that can be replayed by hand", found=reason, remedy=remedy)
    if not len(window.grads):
        return BlockAdjoints({name: torch.zeros_like(value) for name, value in phi.items()}, {})
    run = partial(_replay, optimiser, phi, window, adjoints or {}, space or Workspace())
    return BlockAdjoints(gradient_through(optimiser, phi, run), {})


class _Run(NamedTuple):
    """All steps forward: the kernels and what they recorded.

    Attributes:
        trace: The steps.
        cell: The cell's kernel.
        records: Each step's derivatives of the cell.
        rule: The rule's kernel.
        normaliser: The statistic of a rule that has one.
        of_theta: The columns of the first product that take θ.
    """

    trace: Trace
    cell: CellKernel
    records: list[Record]
    rule: RuleKernel
    normaliser: Normaliser | None
    of_theta: list[int]


def _forward(
    optimiser: Coordinatewise,
    phi: Params,
    window: Window,
    adjoints: Mapping[str, MeanAdjoint],
    space: Workspace,
    folded: Folded,
) -> _Run:
    trace, of_theta = _trace(optimiser, window, space)
    M, P = trace.hidden[0].shape
    cell = cell_kernel(folded)
    take = partial(_take, space, P, folded.head)
    records, buffers = cell.records(take, len(trace.outputs)), cell.buffers(take, take("scratch", M))
    c, c_next = take("c", 2, M).unbind()
    first = window.state.coordinates["cell.c"]
    c.view(first.shape).copy_(first)
    rule = KERNELS[type(optimiser.rule)](optimiser.rule, folded, phi)
    rule.begin(trace, window.state.coordinates)
    normaliser = _normaliser(rule, trace, window, adjoints) if isinstance(rule, DirectionAndMagnitude) else None
    for t, outputs in enumerate(trace.outputs):
        theta, after = trace.params[t : t + 2]
        # θ comes from the step before; all other features were written ahead of the steps.
        for column in of_theta:
            trace.z[t][column] = theta
        cell.forward(trace.z[t], c, c_next, trace.hidden[t + 1], buffers, records[t])
        trace.restore(t, c, c_next)
        trace.restore(t, trace.hidden[t], trace.hidden[t + 1])
        # Two places are enough for c: the way back finds it in the recorded derivatives.
        c, c_next = c_next, c
        torch.addmm(rule.head_bias, rule.head, trace.hidden[t + 1], out=outputs)
        torch.add(theta, _update(t, trace, rule, normaliser), out=after)
        trace.restore(t, theta, after)
    return _Run(trace, cell, records, rule, normaliser, of_theta)


def _update(t: int, trace: Trace, rule: RuleKernel, normaliser: Normaliser | None) -> Tensor:
    """The update of step t, in the memory of the next θ where it needs any; the rule's memory moves on."""
    theta, after = trace.params[t : t + 2]
    before, memory = rule.memory(t), rule.memory(t + 1)
    # The direction stays in the place of the first output, for the way back.
    direction = trace.output_rows[t][0] if normaliser is not None else after
    block = Block(0, trace.grads[t], theta, before, memory, direction)
    nominal = trace.features["rnnprop"][t, 0] if rule.rule.needs else None
    update = rule.forward(trace.output_rows[t], nominal, block)
    for name, value in memory.items():
        trace.restore(t, before[name], value)
    if normaliser is None:
        return trace.active(t, update)
    assert isinstance(rule, DirectionAndMagnitude)
    return rule.finish(torch.mul(update, normaliser.factors[t], out=after), theta, rule.scale(trace.numbers[t]))


def _replay(
    optimiser: Coordinatewise,
    phi: Params,
    window: Window,
    adjoints: Mapping[str, MeanAdjoint],
    space: Workspace,
    folded: Folded,
) -> tuple[Folded, Params]:
    """The gradient with respect to `folded` and to the rule's parameters."""
    run = _forward(optimiser, phi, window, adjoints, space, folded)
    trace, cell, rule, of_theta = run.trace, run.cell, run.rule, run.of_theta
    M, P = trace.hidden[0].shape
    take = partial(_take, space, P, folded.head)
    adjoint = cell.adjoint(take, torch.tensor([*of_theta, *(optimiser.embedding.in_features + k for k in range(M))]))
    head = rule.head.T.contiguous()
    sources, a = window.sources.reshape(len(trace.grads), P).unbind(), torch.zeros_like(trace.grads[0])
    below = take("adjoints below", len(of_theta) + M).zero_()
    # dh lies in `below`, so one product writes it with θ's adjoint; the cell has read dh by then.
    dh, dc = below[len(of_theta) :], take("c's adjoint", M).zero_()
    of_head = torch.zeros_like(head)
    for t in reversed(range(len(trace.grads))):
        a = a + sources[t]
        (acting, _), (h, h_passing), (c, c_passing) = (trace.part(t, adjoint) for adjoint in (a, dh, dc))
        by_rule = rule.backward(t, acting, run.normaliser)
        of_head.addmm_(trace.hidden[t + 1], trace.adjoints[t].T)
        # Where nothing is skipped h is dh itself, and this adds in place.
        torch.addmm(h, head, trace.adjoints[t], out=dh)
        cell.backward(trace.z[t], run.records[t], dh, dc.copy_(c), adjoint, below)
        # Skipped coordinates' adjoints were kept apart, as no derivative of this step acts on them.
        for to, more in ((dh, h_passing), (dc, c_passing), (a, by_rule), *((a, row) for row in below[: len(of_theta)])):
            if more is not None:
                to += more
    bias = torch.stack(trace.adjoints).sum((0, 2))
    # The head ran with this factor multiplied in, so its gradient has it, too.
    return Folded(*cell.gradient(adjoint), of_head.T * rule.factor, bias * rule.factor), rule.gradient()


def _take(space: Workspace, width: int, like: Tensor, name: str, *sizes: int) -> Tensor:
    """Memory [*sizes, width] of the dtype of `like`; with its first three arguments fixed, a `cells.Take`."""
    return space.take(name, *sizes, width, like=like)


def _normaliser(
    rule: DirectionAndMagnitude, trace: Trace, window: Window, adjoints: Mapping[str, MeanAdjoint]
) -> Normaliser:
    """The recorded statistic as the rule takes it."""
    value, adjoint, weight = recorded.statistic(rule.rule, window, adjoints)
    scales = torch.tensor([rule.scale(step) for step in trace.numbers], dtype=torch.float64)

    def each(numbers: Tensor) -> tuple[Tensor, ...]:
        numbers = recorded.spread(numbers.to(window.params.dtype), window.state.layout)
        return numbers.reshape(len(scales), window.params.numel()).unbind()

    # Divided in float64 and rounded once, as in the step, so that the replay has the step's factors.
    factors = each(scales.view(-1, *(1,) * (value.dim() - 1)) / value.double())
    factors = tuple(trace.active(t, factor) for t, factor in enumerate(factors))
    if adjoint is None or weight is None:
        return Normaliser(factors, None, None)
    return Normaliser(factors, each(adjoint / value), each(weight / value.square()))


def _trace(optimiser: Coordinatewise, window: Window, space: Workspace) -> tuple[Trace, list[int]]:
    """The trace with all that is known before the first step, and the columns of the first product that take θ."""
    like, steps = window.params, recorded.numbers(window)
    T, P, M, F = len(window.grads), like.numel(), optimiser.cell.hidden_size, optimiser.embedding.in_features
    z = space.take("z", T + 1, F + M + 1, P, like=like)
    z[:, F + M] = 1
    # h' is written straight into the next step's argument: no copy, and it is recorded there.
    hidden = z[:, F : F + M].unbind()
    params = space.take("params", T + 1, P, like=like).unbind()
    outputs, adjoints = (
        space.take(name, T, optimiser.rule.outputs, P, like=like).unbind() for name in ("outputs", "outputs' adjoint")
    )
    h = window.state.coordinates["cell.h"]
    hidden[0].view(h.shape).copy_(h)
    params[0].view(like.shape).copy_(like)

    finite = window.grads.square().isfinite()
    clean = finite.reshape(T, P).all(1).tolist()
    # None spares a step that skips nothing every masked operation.
    masks = [None if whole else mask for whole, mask in zip(clean, finite.reshape(T, P), strict=True)]
    # 0 from the start: a NaN that got in would outlive a multiplication with 0.
    grads = window.grads if all(clean) else window.grads.where(finite, 0.0)
    features, of_theta, at = {}, [], 0
    for name, item in _inputs(optimiser).items():
        features[name] = z[:T, at : at + item.size]
        if isinstance(item, Parameter):
            of_theta.append(at)
        else:
            _look(name, item, grads, finite, window, torch.tensor(steps), features[name])
        at += item.size
    flat = grads.reshape(T, P)
    silent = (flat == 0).any(1).tolist() if KERNELS[type(optimiser.rule)].rests else [False] * T
    activities = [
        activity(flat[t], {name: value[t] for name, value in features.items()}) if silent[t] else None for t in range(T)
    ]
    output_rows, adjoint_rows = ([step.unbind() for step in each] for each in (outputs, adjoints))
    trace = Trace(
        z.unbind(),
        hidden,
        features,
        params,
        flat.unbind(),
        masks,
        activities,
        steps,
        outputs,
        output_rows,
        adjoints,
        adjoint_rows,
    )
    return trace, of_theta


def _look(name: str, item: Input, grads: Tensor, finite: Tensor, window: Window, steps: Tensor, out: Tensor) -> None:
    """Writes the features of an input other than θ to `out` [T, size, P]: at once where it has no memory."""
    if not item.memory:
        number = steps.view(-1, *(1,) * window.params.dim())
        step_inputs = StepInputs(grads, window.params, number, window.losses, window.state.layout, finite)
        features, _ = item(step_inputs, {})
        out.copy_(features.reshape(item.size, *out[:, 0].shape).transpose(0, 1))
        return
    memory = {key: window.state.coordinates[f"{name}.{key}"] for key in item.memory}
    for t, step in enumerate(steps):
        features, after = item(
            StepInputs(grads[t], window.params, step, window.losses[t], window.state.layout, finite[t]), memory
        )
        out[t].copy_(features.reshape(out[t].shape))
        memory = {key: value.where(finite[t], memory[key]) for key, value in after.items()}


def _inputs(optimiser: Coordinatewise) -> dict[str, Input]:
    return dict(optimiser.inputs.items())  # type: ignore[arg-type]  # a ModuleDict forgets what its modules are
