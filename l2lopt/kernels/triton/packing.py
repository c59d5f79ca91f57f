"""A coordinatewise rule as the kernels take it: compiled-in constants, packed weights, the numbers of each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.cells.lstm import LSTM
from l2lopt.core.layout import Layout, Params
from l2lopt.kernels.folding import Folded, step_size
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
ADDITIVE, BOUNDED, GATED, DIRECTED = range(4)
CODES = {
    rules.Additive: ADDITIVE,
    rules.Bounded: BOUNDED,
    rules.Gated: GATED,
    rules.DirectionAndMagnitude: DIRECTED,
}
"""Rule → its number in the kernels."""
EXTRA = 8
"""Numbers behind the head in the packed weights: two biases, then the rule's gradients."""
SLOTS = (
    "log-step",
    "log-and-sign: least",
    "log-and-sign: 1/p",
    "rnnprop: 1 − β₁",
    "rnnprop: β₂",
    "rnnprop: 1 − β₂",
    "rnnprop: ε",
    "rnnprop: factor of m",
    "rnnprop: factor of g",
    "momenta: β",
    "momenta: 1 − β",
    "momenta: ε",
)
"""Columns of `table`; two more follow for each of the momenta, 1 − β and a factor."""


@dataclass(frozen=True)
class Constants:
    """The kernels' compile-time argument S: all that is fixed for an optimiser, one version of a kernel for each.

    Attributes:
        F: Features.
        M: Hidden size.
        P: Padded size of a gate.
        K: Padded size of z.
        IHC: An IHC-LSTM, else an LSTM.
        RULE: The rule's number.
        NOMINAL: The rule takes m̂/√v̂ from the features.
        DECAY: λ.
        PRECISION: Precision of products, by Triton's name.
        B: Coordinates in a block.
        MEMORY: Running means of all inputs together.
        LOG_AT: The row of z in which this input's features begin, −1 where the input is not there.
        RNN_AT: The same for `rnnprop`.
        MOM_AT: The same for `momenta`.
        STEP_AT: The same for `log-step`.
        THETA_AT: The same for `parameter`.
        LOSS_AT: The same for `loss`.
        RNN: The index of the first of rnnprop's running means among all inputs'.
        MOM: The index of the first of the momenta's.
        MOMENTA: Number of running means.
    """

    F: int
    M: int
    P: int
    K: int
    IHC: bool
    RULE: int
    NOMINAL: bool
    DECAY: float
    PRECISION: str
    B: int
    MEMORY: int
    LOG_AT: int = -1
    RNN_AT: int = -1
    MOM_AT: int = -1
    STEP_AT: int = -1
    THETA_AT: int = -1
    LOSS_AT: int = -1
    RNN: int = 0
    MOM: int = 0
    MOMENTA: int = 0

    @property
    def DIRECTED(self) -> bool:  # noqa: N802  # a constant of the kernels, as the others
        """A rule with a statistic."""
        return self.RULE == DIRECTED

    @property
    def R(self) -> int:  # noqa: N802  # a constant of the kernels, as the others
        """Numbers that a replay records of a coordinate and step: features, h, c, θ and the gated rule's gates."""
        return self.F + 2 * self.M + (3 if self.RULE == GATED else 1)

    @property
    def SIZE(self) -> int:  # noqa: N802  # a constant of the kernels, as the others
        """Numbers of the packed weights."""
        return 4 * self.P * self.K + 3 * self.P * self.P + 5 * self.P + EXTRA


class KernelShape(NamedTuple):
    """What is fixed for an optimiser.

    Attributes:
        constants: The kernels' compile-time argument.
        memory: The names of the inputs' running means in the order in which the kernels take them.
        inner: N, the cell's input size.
    """

    constants: Constants
    memory: list[str]
    inner: int

    @classmethod
    def of(cls, optimiser: Coordinatewise, precision: str, width: int) -> "KernelShape":
        """The shape of an optimiser that `refusal` lets pass, for blocks of `width` coordinates."""
        cell, features = optimiser.cell, optimiser.embedding.in_features
        hidden, inner = cell.hidden_size, cell.input_size
        places: dict[str, int] = {}
        memory: list[str] = []
        at = 0
        for name, item in items(optimiser):
            places[PLACES[type(item)]] = at
            if isinstance(item, inputs.Momenta):
                places |= {"MOM": len(memory), "MOMENTA": item.size}
            elif isinstance(item, inputs.RNNprop):
                places |= {"RNN": len(memory)}
            memory += [f"{name}.{key}" for key in item.memory]
            at += item.size
        constants = Constants(
            F=features,
            M=hidden,
            P=padded(max(hidden, inner)),
            K=padded(features + hidden + 1),
            IHC=not isinstance(cell, LSTM),
            RULE=CODES[type(optimiser.rule)],
            NOMINAL=bool(optimiser.rule.needs),
            DECAY=float(getattr(optimiser.rule, "weight_decay", 0.0)),
            PRECISION=precision,
            B=width,
            MEMORY=len(memory),
            **places,
        )
        return cls(constants, memory, inner)

    @property
    def sizes(self) -> list[int]:
        """Numbers in each part of the packed weights: first, second, its bias, head, extra."""
        P, K = self.constants.P, self.constants.K
        return [4 * P * K, 3 * P * P, 3 * P, 2 * P, EXTRA]

    def pack(self, folded: Folded) -> Tensor:
        """The multiplied-out layers, zero-padded, in one vector."""
        # Products run over the padding, too: zeros keep the padded rows of a, c and h at 0.
        first, second, bias, head, extra = self._parts(folded.head.new_zeros(sum(self.sizes)))
        for k, rows in enumerate(folded.first.split(self._rows)):
            first[k, : rows.shape[0], : rows.shape[1]] = rows
        if folded.second is not None:
            second[:, : self.constants.M, : self.inner] = folded.second.view(3, self.constants.M, self.inner)
        if folded.second_bias is not None:
            bias[:, : self.constants.M] = folded.second_bias.view(3, self.constants.M)
        head[: len(folded.head), : self.constants.M] = folded.head
        extra[: len(folded.head_bias)] = folded.head_bias
        return first._base  # type: ignore[return-value]  # the vector that all parts are views of

    def unpack(self, packed: Tensor, like: Folded) -> tuple[Folded, Tensor]:
        """Gradients laid out as the packed weights → those of the layers, and the rule's numbers."""
        first, second, bias, head, extra = self._parts(packed)
        columns, outputs = self.constants.F + self.constants.M + 1, len(like.head)
        pieces = [first[k, :rows, :columns] for k, rows in enumerate(self._rows)]
        of_second = second[:, : self.constants.M, : self.inner].reshape(-1, self.inner)
        return Folded(
            torch.cat(pieces),
            None if like.second is None else of_second,
            None if like.second_bias is None else bias[:, : self.constants.M].reshape(-1),
            head[:outputs, : self.constants.M],
            extra[:outputs],
        ), extra[2:]

    def _parts(self, packed: Tensor) -> tuple[Tensor, ...]:
        P, K = self.constants.P, self.constants.K
        first, second, bias, head, extra = packed.split(self.sizes)
        return first.view(4, P, K), second.view(3, P, P), bias.view(3, P), head.view(2, P), extra

    @property
    def _rows(self) -> list[int]:
        """Rows of each of the four pieces of `Folded.first`."""
        return [self.inner] * 3 + [self.constants.M] if self.constants.IHC else [self.constants.M] * 4


def items(optimiser: Coordinatewise) -> list[tuple[str, Input]]:
    """The inputs by name."""
    return list(optimiser.inputs.items())  # type: ignore[arg-type]  # a ModuleDict forgets what its modules are


def padded(size: int) -> int:
    """The least power of two that a product takes and that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def table(optimiser: Coordinatewise, steps: Sequence[int], like: Tensor) -> Tensor:
    """The numbers that the inputs' features take of each step's number t: [steps, columns], see `SLOTS`."""
    return torch.tensor([_row(optimiser, t) for t in steps], dtype=torch.float32).to(like.device)


def _row(optimiser: Coordinatewise, t: int) -> list[float]:
    # On the host, in float64: 1 − β and 1 − βᵗ lose digits in float32, as β is near 1.
    numbers, momenta = dict.fromkeys(SLOTS, 0.0), []
    for _, item in items(optimiser):
        if isinstance(item, inputs.LogStep):
            numbers["log-step"] = math.log(t) / item.scale
        elif isinstance(item, inputs.LogAndSign):
            numbers |= {"log-and-sign: least": math.exp(-item.p), "log-and-sign: 1/p": 1 / item.p}
        elif isinstance(item, inputs.RNNprop):
            bias_correction = math.sqrt(1 - item.beta2**t)
            numbers |= {
                "rnnprop: 1 − β₁": 1 - item.beta1,
                "rnnprop: β₂": item.beta2,
                "rnnprop: 1 − β₂": 1 - item.beta2,
                "rnnprop: ε": item.eps * bias_correction,
                "rnnprop: factor of m": bias_correction / (1 - item.beta1**t),
                "rnnprop: factor of g": bias_correction,
            }
        elif isinstance(item, inputs.Momenta):
            bias_correction = math.sqrt(1 - item.square_beta**t)
            numbers |= {
                "momenta: β": item.square_beta,
                "momenta: 1 − β": 1 - item.square_beta,
                "momenta: ε": item.eps * bias_correction,
            }
            momenta = [number for beta in item.betas for number in (1 - beta, bias_correction / (1 - beta**t))]
    return [*numbers.values(), *momenta]


def losses(optimiser: Coordinatewise, loss: Tensor | None, like: Tensor) -> Tensor:
    """The two features of each loss, [..., 2]; zeros where no input looks at it."""
    for _, item in items(optimiser):
        if isinstance(item, inputs.Loss):
            blank = like.new_zeros(*(() if loss is None else loss.shape), 1)
            features, _ = item(inputs.StepInputs(blank, blank, torch.zeros(()), loss, Layout((), ()), blank), {})
            return features[..., 0].movedim(0, -1).float().contiguous()  # type: ignore[no-any-return]  # indexing forgets the type
    return like.new_zeros(2 * like[..., :1].numel() or 2, dtype=torch.float32)


def scales(optimiser: Coordinatewise, phi: Params, steps: Sequence[int], like: Tensor) -> Tensor:
    """The factor of the rule's outputs, or of g, at each step, [steps]: s, or S_t, without waiting for the GPU."""
    rule = optimiser.rule
    if isinstance(rule, rules.DirectionAndMagnitude):
        # In float64: exp turns the rounding error of its argument into a relative error of S_t.
        growth = torch.exp(10 * phi["rule.log_scale"].double())
        return step_size(rule, growth, torch.tensor(steps, dtype=torch.float64).to(like.device)).float()
    if isinstance(rule, rules.Gated) and rule.scale is not None:
        return (rule.scale * torch.exp(10 * phi["rule.log_scale"].double())).float().expand(len(steps)).contiguous()
    size = rule.step_size if isinstance(rule, rules.Additive | rules.Bounded) else 1.0
    return torch.full((len(steps),), size, dtype=torch.float32, device=like.device)
