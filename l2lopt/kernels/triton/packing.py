"""A coordinatewise rule as the kernels take it: what is compiled in, the packed weights, the numbers of a step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from l2lopt.cells.lstm import LSTM
from l2lopt.core.layout import Layout
from l2lopt.core.types import Params
from l2lopt.kernels.folding import Folded
from l2lopt.optimisers import Coordinatewise, inputs, rules
from l2lopt.optimisers.inputs import Input

PLACES: dict[type[Input], str] = {
    inputs.LogAndSign: "LOG_AT",
    inputs.RNNprop: "RNN_AT",
    inputs.Momenta: "MOM_AT",
    inputs.LogStep: "STEP_AT",
    inputs.Parameter: "THETA_AT",
    inputs.Loss: "LOSS_AT",
}
"""Input → the constant that says where its features begin."""
CODES = {rules.Additive: 0, rules.Bounded: 1, rules.Gated: 2, rules.DirectionAndMagnitude: 3}
"""Rule → its number in `device`."""
EXTRA = 8
"""Numbers behind the head: two biases, then the rule's own."""


class Shape(NamedTuple):
    """What is fixed for an optimiser.

    Attributes:
        constants: the kernels' compile-time arguments by name.
        memory: the names of the inputs' running values in the order in which the kernels take them.
        hidden: M.
        inner: N, the cell's input size.
        features: F.
    """

    constants: dict[str, Any]
    memory: list[str]
    hidden: int
    inner: int
    features: int

    @classmethod
    def of(cls, optimiser: Coordinatewise, precision: str) -> "Shape":
        """The shape of an optimiser that `refusal` lets pass."""
        cell, features = optimiser.cell, optimiser.embedding.in_features
        hidden, inner = cell.hidden_size, cell.input_size
        constants: dict[str, Any] = dict.fromkeys(PLACES.values(), -1) | {"RNN": 0, "MOM": 0, "MOMENTA": 0}
        memory: list[str] = []
        at = 0
        for name, item in items(optimiser):
            constants[PLACES[type(item)]] = at
            if isinstance(item, inputs.Momenta):
                constants |= {"MOM": len(memory), "MOMENTA": item.size}
            elif isinstance(item, inputs.RNNprop):
                constants |= {"RNN": len(memory)}
            memory += [f"{name}.{key}" for key in item.memory]
            at += item.size
        constants |= {
            "F": features,
            "M": hidden,
            "P": padded(max(hidden, inner)),
            "K": padded(features + hidden + 1),
            "IHC": not isinstance(cell, LSTM),
            "RULE": CODES[type(optimiser.rule)],
            "NOMINAL": bool(optimiser.rule.needs),
            "PRECISION": precision,
        }
        return cls(constants, memory, hidden, inner, features)

    @property
    def sizes(self) -> list[int]:
        """Numbers in each part of the packed weights: first, second, its bias, head, extra."""
        P, K = self.constants["P"], self.constants["K"]
        return [4 * P * K, 3 * P * P, 3 * P, 2 * P, EXTRA]

    def pack(self, folded: Folded) -> Tensor:
        """The multiplied-out layers, zero-padded, in one vector."""
        first, second, bias, head, extra = self._parts(folded.head.new_zeros(sum(self.sizes)))
        for k, rows in enumerate(folded.first.split(self._rows)):
            first[k, : rows.shape[0], : rows.shape[1]] = rows
        if folded.second is not None:
            second[:, : self.hidden, : self.inner] = folded.second.view(3, self.hidden, self.inner)
        if folded.second_bias is not None:
            bias[:, : self.hidden] = folded.second_bias.view(3, self.hidden)
        head[: len(folded.head), : self.hidden] = folded.head
        extra[: len(folded.head_bias)] = folded.head_bias
        return first._base  # type: ignore[return-value]  # the vector that all parts are views of

    def unpack(self, packed: Tensor, like: Folded) -> tuple[Folded, Tensor]:
        """Derivatives laid out as the packed weights → those of the layers, and the rule's own numbers."""
        first, second, bias, head, extra = self._parts(packed)
        columns, outputs = self.features + self.hidden + 1, len(like.head)
        pieces = [first[k, :rows, :columns] for k, rows in enumerate(self._rows)]
        of_second = second[:, : self.hidden, : self.inner].reshape(-1, self.inner)
        return Folded(
            torch.cat(pieces),
            None if like.second is None else of_second,
            None if like.second_bias is None else bias[:, : self.hidden].reshape(-1),
            head[:outputs, : self.hidden],
            extra[:outputs],
        ), extra[2:]

    def _parts(self, packed: Tensor) -> tuple[Tensor, ...]:
        P, K = self.constants["P"], self.constants["K"]
        first, second, bias, head, extra = packed.split(self.sizes)
        return first.view(4, P, K), second.view(3, P, P), bias.view(3, P), head.view(2, P), extra

    @property
    def _rows(self) -> list[int]:
        """Rows of each of the four pieces of `Folded.first`."""
        return [self.inner] * 3 + [self.hidden] if self.constants["IHC"] else [self.hidden] * 4


def items(optimiser: Coordinatewise) -> list[tuple[str, Input]]:
    """The inputs by name."""
    return list(optimiser.inputs.items())  # type: ignore[arg-type]  # a ModuleDict forgets what its modules are


def padded(size: int) -> int:
    """The least power of two that a product takes and that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def table(optimiser: Coordinatewise, steps: Sequence[int], like: Tensor) -> Tensor:
    """What the inputs' features take of each step's number t, [steps, numbers]; `device.look` reads it by place."""
    kinds = {type(item): item for _, item in items(optimiser)}
    rows = []
    for t in steps:
        row = [0.0] * 12
        if isinstance(item := kinds.get(inputs.LogStep), inputs.LogStep):
            row[0] = math.log(t) / item.scale
        if isinstance(item := kinds.get(inputs.LogAndSign), inputs.LogAndSign):
            row[1:3] = [math.exp(-item.p), 1 / item.p]
        if isinstance(item := kinds.get(inputs.RNNprop), inputs.RNNprop):
            unbias = math.sqrt(1 - item.beta2**t)
            row[3:6] = [1 - item.beta1, item.beta2, 1 - item.beta2]
            row[6:9] = [item.eps * unbias, unbias / (1 - item.beta1**t), unbias]
        if isinstance(item := kinds.get(inputs.Momenta), inputs.Momenta):
            unbias = math.sqrt(1 - item.square_beta**t)
            row[9:12] = [item.square_beta, 1 - item.square_beta, item.eps * unbias]
            for beta in item.betas:
                row += [1 - beta, unbias / (1 - beta**t)]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float32).to(like.device)


def losses(optimiser: Coordinatewise, loss: Tensor | None, like: Tensor) -> Tensor:
    """The two features of each loss, [..., 2]; zeros where no input looks at it."""
    for _, item in items(optimiser):
        if isinstance(item, inputs.Loss):
            blank = like.new_zeros(*(() if loss is None else loss.shape), 1)
            features, _ = item(inputs.Sight(blank, blank, torch.zeros(()), loss, Layout((), ()), blank), {})
            return features[..., 0].movedim(0, -1).float().contiguous()  # type: ignore[no-any-return]
    return like.new_zeros(2 * like[..., :1].numel() or 2, dtype=torch.float32)


def scales(optimiser: Coordinatewise, phi: Params, steps: Sequence[int], like: Tensor) -> Tensor:
    """What multiplies the rule's outputs at each step, [steps]: s, or S_t."""
    rule = optimiser.rule
    if isinstance(rule, rules.DirectionAndMagnitude):
        fading = torch.tensor([1 / (1 + (t - 1) / rule.horizon) for t in steps], dtype=torch.float64).to(like.device)
        return (rule.step_size * torch.exp(10 * phi["rule.log_scale"].double()) * fading).float()
    size = rule.step_size if isinstance(rule, rules.Additive | rules.Bounded) else 1.0
    return torch.full((len(steps),), size, dtype=torch.float32, device=like.device)
