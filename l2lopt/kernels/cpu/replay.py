"""Backpropagation through a window of the coordinatewise learned optimiser for a block, written by hand."""

import torch
from torch import Tensor

from l2lopt.cells.lstm import LSTM
from l2lopt.core.errors import UserError
from l2lopt.core.types import Params, Window
from l2lopt.kernels.cpu.cell_steps import CellSteps, IHCLSTMSteps, LSTMSteps
from l2lopt.kernels.cpu.rule_steps import RULE_STEPS, DirectionAndMagnitudeSteps, RuleSteps
from l2lopt.kernels.cpu.trace import Trace
from l2lopt.kernels.cpu.workspace import Workspace
from l2lopt.kernels.folding import Folded, fold, refusal
from l2lopt.optimisers.base import Optimiser
from l2lopt.optimisers.coordinatewise import Coordinatewise
from l2lopt.optimisers.inputs import INPUTS, Input, Parameter, Sight


def refusal_to_replay(optimiser: Optimiser) -> str | None:
    """Why an optimiser cannot be replayed by hand, or None where it can: exact types only, whose slopes are known."""
    reason = refusal(optimiser)
    if reason is not None:
        return reason
    assert isinstance(optimiser, Coordinatewise)
    for name, item in _inputs(optimiser).items():
        if type(item) not in INPUTS.values():
            return f"the input {name!r} is none of {', '.join(INPUTS)}: {type(item).__name__}"
    if type(optimiser.rule) not in RULE_STEPS:
        known = ", ".join(rule.__name__ for rule in RULE_STEPS)
        return f"the rule is none of {known}: {type(optimiser.rule).__name__}"
    if any(isinstance(optimiser.inputs[name], Parameter) for name in optimiser.rule.needs):
        return "what the rule takes from its inputs is θ itself"
    return None


def replay(optimiser: Coordinatewise, phi: Params, window: Window, space: Workspace | None = None) -> Params:
    """The block's part of the meta-gradient; gradients, losses and what is shared are constants (see `types.Replay`).

    With a_t the adjoint of θ_t, s̄_t that of the state and q_t the source at θ_{t+1}, from a_T = s̄_T = 0:

        a ← a_{t+1} + q_t;  a_t = a (1 + ∂u_t/∂θ_t) + s̄_{t+1} ∂s_{t+1}/∂θ_t
        s̄_t = s̄_{t+1} ∂s_{t+1}/∂s_t + a ∂u_t/∂s_t;  dφ += a ∂u_t/∂φ + s̄_{t+1} ∂s_{t+1}/∂φ

    The features do not depend on φ but for θ itself, so they are computed before the steps, by the reference's own
    inputs. dφ is added up on the multiplied-out products and taken through them once. A coordinate whose gradient is
    not finite at a step is skipped by it: u = 0, and its adjoints pass unchanged.

    Cost: three products a step for an LSTM, each of about 4M (F + M + 1) multiplications a coordinate, six for an
    IHC-LSTM; a third to a half of autograd's time on the same block. Small operations take a tenth of it at blocks of
    4,096 and a quarter at 1,024. `CellSteps` says what is kept.

    Args:
        optimiser: one that `refusal_to_replay` does not refuse.
        phi: its parameters.
        window: the block's.
        space: memory to use again; it may be shared by threads.

    Raises:
        UserError: `optimiser` is refused.
    """
    reason = refusal_to_replay(optimiser)
    if reason is not None:
        remedy = "replay it by autograd"
        raise UserError("replay", expected="an optimiser that can be replayed by hand", found=reason, remedy=remedy)
    leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
    gradient = {name: torch.zeros_like(value) for name, value in phi.items()}
    if not len(window.grads):
        return gradient
    with torch.enable_grad():
        folded = fold(optimiser, leaves)
    with torch.no_grad():
        pieces, of_rule = _replay(optimiser, folded, phi, window, space or Workspace())
    gradient |= {f"rule.{name}": value for name, value in of_rule.items()}
    outputs = [(output, piece) for output, piece in zip(folded, pieces, strict=True) if output is not None]
    through = torch.autograd.grad(
        [output for output, _ in outputs], list(leaves.values()), [piece for _, piece in outputs], allow_unused=True
    )
    for name, value in zip(leaves, through, strict=True):
        if value is not None:
            gradient[name] = value
    return gradient


def pull(optimiser: Coordinatewise, phi: Params, window: Window, space: Workspace | None = None) -> Tensor:
    """What the block's updates do to the meta-loss by way of the rule's statistic, see `types.Pull`.

    The adjoint of θ needs no network here, a_t = q_t + a_{t+1} (1 + ∂u_t/∂θ_t): θ is none of its inputs. So this is
    the forward half of `replay` and a few operations a step. [T, *batch, tensors], summed in float64.

    Args:
        optimiser: one that `can_pull` lets pass; the others are as for `replay`.
        phi: its parameters.
        window: the block's.
        space: see `replay`.
    """
    space = space or Workspace()
    with torch.no_grad():
        trace, _, rule, _ = _forward(optimiser, fold(optimiser, phi), phi, window, space)
        assert isinstance(rule, DirectionAndMagnitudeSteps)
        sources = window.sources.reshape(len(trace.grads), -1).unbind()
        pulls, a = torch.zeros_like(window.grads), torch.zeros_like(trace.params[0])
        for t in reversed(range(len(sources))):
            a = a + sources[t]
            pulls[t].view(-1)[:], by_rule = rule.pull(t, trace.part(t, a)[0])
            a = a if by_rule is None else a + by_rule
        return torch.stack([part.sum(-1, dtype=torch.float64) for part in window.state.layout.split(pulls)], -1)


def can_pull(optimiser: Optimiser) -> bool:
    """Whether the slope of the rule's statistic can be had: it has one, and its network does not see θ."""
    if not isinstance(optimiser, Coordinatewise) or not optimiser.rule.statistic:
        return False
    return not any(isinstance(item, Parameter) for item in _inputs(optimiser).values())


def _forward(
    optimiser: Coordinatewise, folded: Folded, phi: Params, window: Window, space: Workspace
) -> tuple[Trace, CellSteps, RuleSteps, list[int]]:
    """All steps forward: what they leave, and the columns of the first product that take θ."""
    trace, of_theta = _trace(optimiser, window, space)
    steps = LSTMSteps if isinstance(optimiser.cell, LSTM) else IHCLSTMSteps
    F, M = optimiser.embedding.in_features, trace.hidden[0].shape[0]
    below = torch.tensor([*of_theta, *range(F, F + M)])
    cell = steps(folded, trace, window.state.coordinates["cell.c"], below, space)
    of_rule = {name.removeprefix("rule."): value.detach() for name, value in phi.items() if name.startswith("rule.")}
    rule = RULE_STEPS[type(optimiser.rule)](optimiser.rule, of_rule, trace, window)
    head_bias = folded.head_bias[:, None]
    for t in range(len(trace.grads)):
        for column in of_theta:
            trace.rows[t][column] = trace.params[t]
        cell.forward(t)
        torch.addmm(head_bias, folded.head, trace.hidden[t + 1], out=trace.outputs[t])
        torch.add(trace.params[t], rule.forward(t), out=trace.params[t + 1])
        trace.keep(t, trace.params[t], trace.params[t + 1])
    return trace, cell, rule, of_theta


def _replay(
    optimiser: Coordinatewise, folded: Folded, phi: Params, window: Window, space: Workspace
) -> tuple[Folded, Params]:
    """The gradient with respect to `folded` and to the rule's own parameters."""
    folded = Folded(*(None if value is None else value.detach() for value in folded))  # type: ignore[arg-type]
    trace, cell, rule, of_theta = _forward(optimiser, folded, phi, window, space)
    M, P = trace.hidden[0].shape
    T, sources = len(trace.grads), window.sources.reshape(len(window.grads), P).unbind()
    head = folded.head.T.contiguous()
    a = torch.zeros_like(trace.grads[0])
    rows = space.take("rows' adjoint", len(of_theta) + M, P, like=window.params).zero_()
    dh, dc = rows[len(of_theta) :], space.take("c's adjoint", M, P, like=window.params).zero_()
    of_head = torch.zeros_like(head)
    for t in reversed(range(T)):
        a = a + sources[t]
        (acting, _), (h, h_passing), (c, c_passing) = (trace.part(t, adjoint) for adjoint in (a, dh, dc))
        by_rule = rule.backward(t, acting)
        of_head.addmm_(trace.hidden[t + 1], trace.slopes[t].T)
        cell.backward(t, torch.addmm(h, head, trace.slopes[t], out=dh), dc.copy_(c), rows)
        for to, more in ((dh, h_passing), (dc, c_passing), (a, by_rule), *((a, row) for row in rows[: len(of_theta)])):
            if more is not None:
                to += more

    first, second, second_bias = cell.gradient()
    return Folded(first, second, second_bias, of_head.T, torch.stack(trace.slopes).sum((0, 2))), rule.gradient()


def _trace(optimiser: Coordinatewise, window: Window, space: Workspace) -> tuple[Trace, list[int]]:
    """The trace with what is known before the first step, and the columns of the first product that take θ."""
    inputs, like = _inputs(optimiser), window.params
    T, P, M, F = len(window.grads), like.numel(), optimiser.cell.hidden_size, optimiser.embedding.in_features
    rows = space.take("rows", T + 1, F + M + 1, P, like=like)
    rows[:, F + M] = 1
    hidden = rows[:, F : F + M].unbind()
    params = space.take("params", T + 1, P, like=like).unbind()
    outputs, slopes = (
        space.take(name, T, optimiser.rule.outputs, P, like=like).unbind() for name in ("outputs", "outputs' adjoint")
    )
    h = window.state.coordinates["cell.h"]
    hidden[0].view(h.shape).copy_(h)
    params[0].view(like.shape).copy_(like)

    finite = window.grads.square().isfinite()
    clean = finite.reshape(T, P).all(1).tolist()
    masks = [None if whole else mask for whole, mask in zip(clean, finite.reshape(T, P), strict=True)]
    grads = window.grads if all(clean) else window.grads.where(finite, 0.0)
    features, of_theta, at = {}, [], 0
    for name, item in inputs.items():
        features[name] = rows[:T, at : at + item.size]
        if isinstance(item, Parameter):
            of_theta.append(at)
        else:
            _look(name, item, grads, finite, window, features[name])
        at += item.size
    steps = grads.reshape(T, P).unbind()
    return Trace(rows.unbind(), hidden, features, params, steps, masks, outputs, slopes), of_theta


def _look(name: str, item: Input, grads: Tensor, finite: Tensor, window: Window, out: Tensor) -> None:
    """The features of an input that does not look at θ, to `out` [T, size, P]: at once where it has no memory."""
    steps = torch.stack([shared["step"] for shared in (window.state.shared, *window.shared[:-1])]) + 1
    if not item.memory:
        sight = Sight(grads, window.params, steps.view(-1, *(1,) * window.params.dim()), window.losses)
        features, _ = item(sight, {})
        out.copy_(features.reshape(item.size, *out[:, 0].shape).transpose(0, 1))
        return
    memory = {key: window.state.coordinates[f"{name}.{key}"] for key in item.memory}
    for t, step in enumerate(steps):
        features, after = item(Sight(grads[t], window.params, step, window.losses[t]), memory)
        out[t].copy_(features.reshape(out[t].shape))
        memory = {key: value.where(finite[t], memory[key]) for key, value in after.items()}


def _inputs(optimiser: Coordinatewise) -> dict[str, Input]:
    return dict(optimiser.inputs.items())  # type: ignore[arg-type]  # a ModuleDict forgets what its modules are
