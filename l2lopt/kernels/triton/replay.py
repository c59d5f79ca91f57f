"""Backpropagation through a window of the coordinatewise learned optimiser on a GPU, the time loop in one kernel."""

from collections.abc import Mapping
from functools import partial
from math import ceil, prod

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.estimators.window import BlockAdjoints, MeanAdjoint, Window
from l2lopt.kernels import recorded
from l2lopt.kernels.folding import Folded, gradient_through
from l2lopt.kernels.triton import device_replay, packing
from l2lopt.kernels.triton.packing import KernelShape
from l2lopt.kernels.triton.step import LAUNCH, PRECISION, WIDTH, gates_of, programs, rule_of
from l2lopt.optimisers import Coordinatewise
from l2lopt.optimisers.rules import DirectionAndMagnitude, Gated

AT_ONCE = 2**28
"""Coordinates times steps of a window's part: 4 bytes each for the gradients and as much for the sources."""
KEPT = 2**31
"""Bytes for the recorded steps of all programs."""


def replay(
    optimiser: Coordinatewise, phi: Params, window: Window, adjoints: Mapping[str, MeanAdjoint] | None = None
) -> BlockAdjoints:
    """The window's meta-gradient; the equations are those of `kernels.cpu.replay.replay`.

    A step records F + 2M + 1 numbers a coordinate (F + 2M + 3 for the gated rule), of the coordinates that are under
    way; twelve products a step for an LSTM, with the four of the step forward.

    Args:
        optimiser: An optimiser that neither `refusal` nor `kernels.cpu.replay.refusal_to_replay` refuses.
        phi: Parameters of the optimiser.
        window: The block's steps; gradients may be float32 or bfloat16.
        adjoints: The adjoint of the rule's statistic, under the name of its mean; none where it is a constant.
    """
    if not window.grads.numel():
        return BlockAdjoints({name: torch.zeros_like(value) for name, value in phi.items()}, {})
    return BlockAdjoints(gradient_through(optimiser, phi, partial(_replay, optimiser, phi, window, adjoints or {})), {})


def _replay(
    optimiser: Coordinatewise, phi: Params, window: Window, adjoints: Mapping[str, MeanAdjoint], folded: Folded
) -> tuple[Folded, Params]:
    """The gradient with respect to `folded` and to the rule's parameters."""
    shape = KernelShape.of(optimiser, PRECISION, WIDTH)
    # Programs are summed afterwards, in one order: atomic additions would add in that of time.
    found, of_rule = shape.unpack(_run(optimiser, shape, phi, folded, window, adjoints).sum(0), folded)
    if isinstance(optimiser.rule, Gated):
        # A gate's bias is added to the head's: their gradients are one.
        of_params, of_gates, of_scale = of_rule.split(2)
        numbers = {"bias": found.head_bias, "weight_params": of_params, "weight_gates": of_gates}
        return found, numbers if optimiser.rule.scale is None else numbers | {"log_scale": of_scale[0]}
    return found, {"log_scale": of_rule[0]} if isinstance(optimiser.rule, DirectionAndMagnitude) else {}


def _run(
    optimiser: Coordinatewise,
    shape: KernelShape,
    phi: Params,
    folded: Folded,
    window: Window,
    adjoints: Mapping[str, MeanAdjoint],
) -> Tensor:
    """Each program's gradients [programs, numbers] in float64."""
    batch, n, T = window.params.shape[:-1], window.params.shape[-1], len(window.grads)
    rows, blocks, layout, like, S = prod(batch), ceil(n / WIDTH), window.state.layout, window.params, shape.constants
    coordinates = {name: value.contiguous() for name, value in window.state.coordinates.items()}
    numbers, tensors = recorded.numbers(window), len(layout.sizes)
    # Long windows leave room for fewer programs, each of which then takes more blocks.
    at_once = min(programs(rows * blocks, like), max(KEPT // (4 * WIDTH * S.R * (T + 1)), 1))
    kept = torch.empty(at_once, T + 1, S.R, WIDTH, device=like.device)
    running = tuple(torch.empty(at_once, WIDTH, device=like.device) for _ in shape.memory)
    sums = torch.zeros(at_once, S.SIZE, dtype=torch.float64, device=like.device)
    statistics, pulled = _statistics(optimiser, window, adjoints)
    member = torch.arange(tensors, dtype=torch.int32).repeat_interleave(torch.tensor(layout.sizes)).to(like.device)
    table = packing.table(optimiser, numbers, like)
    with torch.cuda.device_of(like):  # Triton launches on the current GPU, wherever the tensors are
        device_replay.replay[(at_once,)](
            window.grads.contiguous(),
            window.sources.contiguous(),
            window.params.contiguous(),
            (coordinates["cell.h"], coordinates["cell.c"], *gates_of(coordinates, like)),
            tuple(coordinates[name] for name in shape.memory),
            running,
            shape.pack(folded),
            rule_of(phi, like),
            table,
            packing.losses(optimiser, window.losses, like),
            packing.scales(optimiser, phi, numbers, like),
            statistics,
            member,
            kept,
            sums,
            n,
            rows * n,
            blocks,
            rows * blocks,
            T,
            table.shape[1],
            tensors,
            S=S,
            PULLED=pulled,
            **LAUNCH,
        )
    return sums


def _statistics(
    optimiser: Coordinatewise, window: Window, adjoints: Mapping[str, MeanAdjoint]
) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """R, c² R·adjoint and c² weight of each step and tensor, for κ = c² R (adjoint − weight·p), and if κ is not 0."""
    if not isinstance(optimiser.rule, DirectionAndMagnitude):
        nothing = window.params.new_zeros(1)
        return (nothing, nothing, nothing), False
    value, adjoint, weight = recorded.statistic(optimiser.rule, window, adjoints)
    value = value.float().contiguous()
    if adjoint is None or weight is None:
        return (value, value, value), False
    return (value, (adjoint.float() * value).contiguous(), weight.float().contiguous()), True
