"""Backpropagation through a window of the coordinatewise learned optimiser on a GPU, the time loop in one kernel."""

from collections.abc import Mapping
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.estimators.window import BlockAdjoints, MeanAdjoint, Window
from l2lopt.kernels import recorded
from l2lopt.kernels.folding import Folded, fold
from l2lopt.kernels.triton import device, packing
from l2lopt.kernels.triton.packing import Shape
from l2lopt.kernels.triton.step import LAUNCH, PRECISION, WIDTH, gates_of, programs, rule_of
from l2lopt.optimisers import Coordinatewise
from l2lopt.optimisers.rules import DirectionAndMagnitude, Gated

AT_ONCE = 2**28
"""Coordinates times steps of a window's part: 4 bytes each for the gradients and as much for the sources."""
KEPT = 2**31
"""Bytes that all programs may keep of their steps."""


def replay(
    optimiser: Coordinatewise, phi: Params, window: Window, adjoints: Mapping[str, MeanAdjoint] | None = None
) -> BlockAdjoints:
    """The window's meta-gradient; the equations are those of `kernels.replay.replay`.

    A step keeps F + 2M + 1 numbers a coordinate (three for the gated rule's θ and gates), of the coordinates that are
    under way; twelve products a step for an LSTM, with the four of the step forward.

    Args:
        optimiser: one that neither `refusal` nor `kernels.replay.refusal_to_replay` refuses.
        phi: its parameters.
        window: its gradients may be float32 or bfloat16.
        adjoints: The adjoint of the rule's statistic, under the name of its mean; none where it is a constant.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
    gradient = {name: torch.zeros_like(value) for name, value in phi.items()}
    if not window.grads.numel():
        return BlockAdjoints(gradient, {})
    with torch.enable_grad():
        folded = fold(optimiser, leaves)
    of = Shape.of(optimiser, PRECISION)
    with torch.no_grad():
        sums = _run(optimiser, of, phi, folded, window, adjoints or {}, None).sum(0)
        pieces, of_rule = of.unpack(sums, folded)
        if isinstance(optimiser.rule, Gated):
            # The bias of a gate is in the same sum as the head's.
            numbers = torch.cat([pieces.head_bias, of_rule]).to(window.params.dtype)
            parts = zip(("bias", "weight_params", "weight_gates"), numbers.split([2, 2, 2, 2])[:3], strict=True)
            gradient |= {f"rule.{name}": part for name, part in parts}
        elif isinstance(optimiser.rule, DirectionAndMagnitude):
            gradient["rule.log_scale"] = of_rule[0].to(phi["rule.log_scale"].dtype)
    outputs = [
        (output, piece.to(output.dtype))
        for output, piece in zip(folded, pieces, strict=True)
        if output is not None and piece is not None
    ]
    through = torch.autograd.grad(
        [output for output, _ in outputs], list(leaves.values()), [piece for _, piece in outputs], allow_unused=True
    )
    gradient |= {name: value for name, value in zip(leaves, through, strict=True) if value is not None}
    return BlockAdjoints(gradient, {})


def statistic_adjoint(optimiser: Coordinatewise, phi: Params, window: Window) -> Tensor:
    """See `kernels.cpu.replay.statistic_adjoint`: the kernel's forward half, and a few operations a step.

    Args:
        optimiser: as for `replay`, of a rule with a statistic and without θ among its inputs.
        phi: its parameters.
        window: the block's.
    """
    rule, layout = optimiser.rule, window.state.layout
    assert isinstance(rule, DirectionAndMagnitude)
    pulls = torch.zeros_like(window.grads)
    with torch.no_grad():
        if window.grads.numel():
            _run(optimiser, Shape.of(optimiser, PRECISION), phi, fold(optimiser, phi), window, {}, pulls)
        steps = packing.scales(optimiser, phi, recorded.numbers(window), window.params).tolist()
        a = torch.zeros_like(window.params)
        for t in reversed(range(len(steps))):
            a = a + window.sources[t]
            scaled = steps[t] * a.where(window.grads[t].square().isfinite(), 0.0)
            pulls[t].mul_(-scaled)
            a = a - rule.weight_decay * scaled
        measured = recorded.statistic(rule, window, {}).value.double()
        return torch.stack([part.sum(-1, dtype=torch.float64) for part in layout.split(pulls)], -1) / measured


def _run(
    optimiser: Coordinatewise,
    of: Shape,
    phi: Params,
    folded: Folded,
    window: Window,
    adjoints: Mapping[str, MeanAdjoint],
    directions: Tensor | None,
) -> Tensor:
    """Each program's derivatives [programs, numbers] in float64; or, where there is room for them, the directions."""
    batch, n, T = window.params.shape[:-1], window.params.shape[-1], len(window.grads)
    rows, blocks, layout, like = prod(batch), ceil(n / WIDTH), window.state.layout, window.params
    coordinates = {name: value.contiguous() for name, value in window.state.coordinates.items()}
    numbers, tensors = recorded.numbers(window), len(layout.sizes)
    features, gated = of.features, isinstance(optimiser.rule, Gated)
    numbers_kept, slots = features + 2 * of.hidden + (3 if gated else 1), T + 1 if directions is None else 2
    at_once = min(programs(rows * blocks, like), max(KEPT // (4 * WIDTH * numbers_kept * slots), 1))
    kept = torch.empty(at_once, slots, numbers_kept, WIDTH, device=like.device)
    running = tuple(torch.empty(at_once, WIDTH, device=like.device) for _ in of.memory)
    sums = torch.zeros(at_once, sum(of.sizes), dtype=torch.float64, device=like.device)
    statistic, pulls, own = _statistics(optimiser, window, adjoints)
    member = torch.arange(tensors, dtype=torch.int32).repeat_interleave(torch.tensor(layout.sizes)).to(like.device)
    table = packing.table(optimiser, numbers, like)
    losses = packing.losses(optimiser, window.losses, like)
    fixed: dict[str, Any] = of.constants | {
        "B": WIDTH,
        "MEMORY": len(of.memory),
        "DECAY": float(getattr(optimiser.rule, "weight_decay", 0.0)),
        "PULLED": pulls is not None,
        "BACK": directions is None,
        "R": numbers_kept,
        "SIZE": sum(of.sizes),
    }
    device.replay[(at_once,)](
        window.grads.contiguous(),
        window.sources.contiguous(),
        window.params.contiguous(),
        coordinates["cell.h"],
        coordinates["cell.c"],
        tuple(coordinates[name] for name in of.memory),
        *gates_of(coordinates, like),
        running,
        of.pack(Folded(*(None if part is None else part.detach() for part in folded))),  # type: ignore[arg-type]
        rule_of(phi, like),
        table,
        losses,
        packing.scales(optimiser, phi, numbers, like),
        statistic,
        statistic if pulls is None else pulls,
        statistic if own is None else own,
        member,
        kept,
        sums,
        kept if directions is None else directions,
        n,
        rows * n,
        blocks,
        rows * blocks,
        T,
        slots,
        table.shape[1],
        tensors,
        **fixed,
        **LAUNCH,
    )
    return sums


def _statistics(
    optimiser: Coordinatewise, window: Window, adjoints: Mapping[str, MeanAdjoint]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """R, c² R·pull and c² own / 1 of every step and tensor, [T, *batch, tensors], for κ = c² R (pull − own·p)."""
    rule = optimiser.rule
    if not isinstance(rule, DirectionAndMagnitude):
        return window.params.new_zeros(1), None, None
    value, adjoint, weight = recorded.statistic(rule, window, adjoints)
    if adjoint is None or weight is None:
        return value.contiguous(), None, None
    return value.contiguous(), (adjoint * value).contiguous(), weight.contiguous()
