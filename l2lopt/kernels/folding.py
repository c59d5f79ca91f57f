"""The learned rule's linear maps multiplied out, so that one product a step takes raw features and h."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from l2lopt.cells.highway import Highway, Simplified
from l2lopt.cells.lstm import LSTM, LSTMCore
from l2lopt.core.layout import Params
from l2lopt.optimisers import Coordinatewise, Optimiser
from l2lopt.optimisers.rules import DirectionAndMagnitude

Number = TypeVar("Number", float, Tensor)


class Folded(NamedTuple):
    """The layers that a step multiplies with; N is the cell's input size, M its hidden size, F features per coordinate.

    Attributes:
        first: [4M, F + M + 1] for an LSTM, with the rows of i, f, o, a; [3N + M, F + M + 1] for an IHC-LSTM, with the
            rows of g (before its σ), F(h), x and a. The columns belong to the features, to h and to 1.
        second: [3M, N] for an IHC-LSTM, with the rows f, i, o on v; None for an LSTM.
        second_bias: [3M], or None.
        head: [outputs, M].
        head_bias: [outputs].
    """

    first: Tensor
    second: Tensor | None
    second_bias: Tensor | None
    head: Tensor
    head_bias: Tensor


def refusal(optimiser: Optimiser) -> str | None:
    """Why an optimiser cannot be folded, or None where it can."""
    if type(optimiser) is not Coordinatewise:
        return f"{type(optimiser).__name__} is not the coordinatewise learned optimiser"
    cell = optimiser.cell
    if type(cell) is LSTM:
        return None
    if type(cell) is Simplified and type(cell.highway) is Highway and type(cell.core) is LSTMCore:
        return None
    return f"the cell is neither LSTM nor IHC-LSTM: {type(cell).__name__}"


def fold(optimiser: Coordinatewise, phi: Params) -> Folded:
    """The layers under φ multiplied out, differentiable in φ.

    W_e takes the features into the cell, so that W (W_e x + b_e) + U h + b = [W W_e, U, W b_e + b] [x; h; 1].
    """
    embed = torch.cat([phi["embedding.weight"], phi["embedding.bias"][:, None]], dim=1)  # [N, F + 1]
    head, head_bias = phi["head.weight"], phi["head.bias"]
    if isinstance(optimiser.cell, LSTM):
        rows = _joined(embed, phi["cell.weight_x"], phi["cell.weight_h"], phi["cell.bias"])
        if "cell.bias_h" in phi:
            rows = torch.cat([rows[:, :-1], rows[:, -1:] + phi["cell.bias_h"][:, None]], dim=1)
        i, f, a, o = rows.chunk(4)
        # The three σ gates become neighbours, so that one operation takes them all.
        return Folded(torch.cat([i, f, o, a]), None, None, head, head_bias)
    back = phi["cell.highway.feedback.weight_h"]
    gamma = phi["cell.highway.gamma"]
    if optimiser.cell.highway.gamma_on == "uvh":  # type: ignore[union-attr]  # `refusal` has looked at it
        gamma = gamma @ back
    weight_x, weight_v = phi["cell.core.weight_x"], phi["cell.core.weight_v"]
    none, unit = torch.zeros_like(back), torch.eye(*embed.shape[:1], dtype=embed.dtype, device=embed.device)
    gate = phi.get("cell.highway.weight_g", torch.zeros_like(unit))
    first = torch.cat(
        [
            _joined(embed, gate, gamma, phi.get("cell.highway.bias_g")),
            _joined(embed, torch.zeros_like(unit), back, None),
            _joined(embed, unit, none, None),
            _joined(embed, weight_x, weight_x.new_zeros(weight_x.shape[0], back.shape[1]), None),
        ]
    )
    bias = phi.get("cell.core.gate_bias")
    if bias is not None:
        bias = torch.cat([bias, bias.new_zeros(2 * bias.shape[0])])
    return Folded(first, weight_v, bias, head, head_bias)


def gradient_through(
    optimiser: Coordinatewise, phi: Params, function: Callable[[Folded], tuple[Folded, Params]]
) -> Params:
    """The gradient with respect to φ, taken once through the products of `fold`.

    Args:
        optimiser: An optimiser that `refusal` lets pass.
        phi: Parameters of the optimiser.
        function: Map from the multiplied-out layers, detached, to the gradients with respect to them and to those with
            respect to the rule's parameters, by their names in the rule.
    """
    # Detached: φ may have a history of its own, and only the products of `fold` belong on this tape.
    leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
    with torch.enable_grad():
        folded = fold(optimiser, leaves)
    with torch.no_grad():
        detached = Folded(*(None if value is None else value.detach() for value in folded))  # type: ignore[arg-type]  # None where the tuple has None
        adjoints, of_rule = function(detached)
    pairs = [
        # The GPU's kernels sum in float64; the products go back in φ's own dtype.
        (output, adjoint.to(output.dtype))
        for output, adjoint in zip(folded, adjoints, strict=True)
        if output is not None and adjoint is not None
    ]
    outputs, above = zip(*pairs, strict=True)
    # The rule's parameters are not in the products: they are unused here and come from `of_rule`.
    found = torch.autograd.grad(outputs, list(leaves.values()), above, allow_unused=True)
    gradient = {name: torch.zeros_like(value) for name, value in phi.items()}
    gradient |= {f"rule.{name}": value.to(phi[f"rule.{name}"].dtype) for name, value in of_rule.items()}
    return gradient | {name: value for name, value in zip(leaves, found, strict=True) if value is not None}


def growth_of(log_scale: Tensor) -> float:
    """The factor exp(10 · log scale); +∞ from a thousandth of its dtype's largest number on.

    A run with such steps has diverged; torch refuses a Python number beyond that dtype, which a step size may make it.
    """
    exponent = 10 * float(log_scale)
    return math.exp(exponent) if exponent < math.log(torch.finfo(log_scale.dtype).max) - math.log(1e3) else math.inf


def step_size(rule: DirectionAndMagnitude, growth: Number, step: Number) -> Number:
    """S_t = s · growth / (1 + (t − 1) / horizon).

    Args:
        rule: s and horizon.
        growth: exp(10 · log scale).
        step: The number t of the step, from 1.
    """
    return rule.step_size * growth / (1 + (step - 1) / rule.horizon)


def _joined(embed: Tensor, weight_x: Tensor, weight_h: Tensor, bias: Tensor | None) -> Tensor:
    """[W W_e, U, W b_e + b]."""
    x = weight_x @ embed
    last = x[:, -1:] if bias is None else x[:, -1:] + bias[:, None]
    return torch.cat([x[:, :-1], weight_h, last], dim=1)
