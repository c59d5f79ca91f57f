"""The learned rule's inputs, written into rows of a buffer: each equals its namesake in `optimisers.inputs`.

What multiplies a whole row (a bias correction, 1/p) is left to the product that the rows go into.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.kernels.cpu.block import Block, Segments
from l2lopt.optimisers import inputs
from l2lopt.optimisers.inputs import Input, StepInputs

Write: TypeAlias = Callable[[Sequence[Tensor], Block], None]


class FeatureRows(NamedTuple):
    """How an input's features come about in one step.

    Attributes:
        scale: Factor of each feature: feature = scale · row.
        write: Function that fills the rows, [B] each, and the input's memory after the step.
    """

    scale: list[float]
    write: Write


def log_and_sign(name: str, item: inputs.LogAndSign, step_inputs: StepInputs, step: int) -> FeatureRows:
    """Rows log max(|g|, e⁻ᵖ) and eᵖ g cut at ±1: sign g from |g| = e⁻ᵖ on. Five operations."""
    least = _least(item.p, step_inputs.grads.dtype)

    def write(rows: Sequence[Tensor], block: Block) -> None:
        size, sign = rows
        torch.abs(block.grads, out=size).clamp_(min=least).log_()
        torch.div(block.grads, least, out=sign).clamp_(-1, 1)

    return FeatureRows([1 / item.p, 1.0], write)


def rnnprop(name: str, item: inputs.RNNprop, step_inputs: StepInputs, step: int) -> FeatureRows:
    """Rows m and g over √v + ε√(1 − β₂ᵗ), the other corrections left as factors. Seven operations."""
    m_key, v_key = f"{name}.m", f"{name}.v"
    beta1, beta2 = item.beta1, item.beta2
    bias_correction = math.sqrt(1 - beta2**step)
    # √v̂ + ε times the correction: one number is corrected here instead of all of v.
    eps = item.eps * bias_correction

    def write(rows: Sequence[Tensor], block: Block) -> None:
        m_hat, g_hat = rows
        m = torch.lerp(block.before[m_key], block.grads, 1 - beta1, out=block.after[m_key])
        v = _mean_square(block, v_key, beta2)
        scale = torch.sqrt(v, out=g_hat).add_(eps)
        torch.div(m, scale, out=m_hat)
        # Last, since `scale` lies in this row.
        torch.div(block.grads, scale, out=g_hat)

    return FeatureRows([bias_correction / (1 - beta1**step), bias_correction], write)


def momenta(name: str, item: inputs.Momenta, step_inputs: StepInputs, step: int) -> FeatureRows:
    """Rows m_β over √v + ε√(1 − β₂ᵗ). Four operations and two a feature."""
    keys, v_key = [f"{name}.m{index}" for index in range(item.size)], f"{name}.v"
    bias_correction = math.sqrt(1 - item.square_beta**step)
    eps = item.eps * bias_correction

    def write(rows: Sequence[Tensor], block: Block) -> None:
        v = _mean_square(block, v_key, item.square_beta)
        scale = torch.sqrt(v, out=rows[-1]).add_(eps)  # the last row is divided by itself last
        for row, key, beta in zip(rows, keys, item.betas, strict=True):
            m = torch.lerp(block.before[key], block.grads, 1 - beta, out=block.after[key])
            torch.div(m, scale, out=row)

    return FeatureRows([bias_correction / (1 - beta**step) for beta in item.betas], write)


def log_step(name: str, item: inputs.LogStep, step_inputs: StepInputs, step: int) -> FeatureRows:
    """1, with the factor log(t) / scale."""
    return FeatureRows([math.log(step) / item.scale], lambda rows, block: _fill(rows[0], 1.0))


def parameter(name: str, item: inputs.Parameter, step_inputs: StepInputs, step: int) -> FeatureRows:
    """θ."""
    return FeatureRows([1.0], lambda rows, block: _copy(rows[0], block.params))


def loss(name: str, item: inputs.Loss, step_inputs: StepInputs, step: int) -> FeatureRows:
    """What the reference makes of each row's loss, as often as the row has coordinates in the block."""
    n = step_inputs.grads.shape[-1]
    # A row's loss is the same for all its coordinates: one of them is enough to ask for.
    first = step_inputs._replace(grads=step_inputs.grads[..., :1], params=step_inputs.params[..., :1])
    values = item(first, {})[0].flatten(1).tolist()
    segments = Segments([n] * (step_inputs.grads.numel() // max(n, 1)))

    def write(rows: Sequence[Tensor], block: Block) -> None:
        at = 0
        for index, size in segments.within(block.start, block.grads.shape[0]):
            for row, value in zip(rows, values, strict=True):
                row[at : at + size].fill_(value[index])
            at += size

    return FeatureRows([1.0, 1.0], write)


FEATURES: Mapping[type[Input], Callable[[str, Any, StepInputs, int], FeatureRows]] = {
    inputs.LogAndSign: log_and_sign,
    inputs.RNNprop: rnnprop,
    inputs.Momenta: momenta,
    inputs.LogStep: log_step,
    inputs.Parameter: parameter,
    inputs.Loss: loss,
}
"""Input → (its name, itself, the step's inputs, its number t) → rows."""


@cache
def _least(p: float, dtype: torch.dtype) -> float:
    """e⁻ᵖ as the reference rounds it."""
    return float(torch.exp(torch.tensor(-p, dtype=dtype)))


def _mean_square(block: Block, key: str, beta: float) -> Tensor:
    """The running mean of g²."""
    v = torch.mul(block.before[key], beta, out=block.after[key])
    return v.addcmul_(block.grads, block.grads, value=1 - beta)


def _fill(row: Tensor, value: float) -> None:
    row.fill_(value)


def _copy(row: Tensor, values: Tensor) -> None:
    row.copy_(values)
