"""The structural loss on a matrix of distances, after Yang et al. 2018, with running means."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from l2lopt.core.errors import UserError, above_0, at_least_0
from l2lopt.core.types import Aux

_FAR = 1e30
"""In the place of an entry that takes no part: its exponential is 0, and its gradient is 0 and not NaN."""


@dataclass(frozen=True)
class StructuralLoss:
    """Pulls samples of a class together and away from the others, the harder positive pairs more.

    L = (1/B) Σ_{(i,j)∈P} β_ij log(1 + Σ_n exp((d_ij − d_in + m)/η)) + (λ/2)([σ_p² − m₊]₊ + [σ_n² − m₋]₊), B = Σβ_ij.

    P are the ordered pairs of two samples of one class, n runs over the samples of other classes than i's.
    β_ij = exp(d_ij − τ_c) with τ_c = (2/|P_c|) Σ_{P_c} d − min_{P_c} d for the class c of i: with τ equal for all
    classes it is a softmax of the distances. σ_p² is the mean over P of (d − μ_p)², σ_n² likewise over the pairs of
    two classes; μ ← γμ + (1−γ)·(the batch's mean), the first batch's mean at first, is the loss's own state, and its
    gradient is that of the batch's share. A term whose pairs a batch lacks is 0, and leaves its mean alone.

    O(n²) memory and time for n samples.

    Args:
        margin: m.
        scale: η.
        weight: λ.
        spread_positive: m₊, the variance that distances in a class may have.
        spread_negative: m₋, that of distances between classes.
        momentum: γ in [0, 1].
        beta: "corrected" as above, or "printed", exp(d_ij) − τ_c, which can be negative (and so can the loss).
        through_beta: Whether gradients pass through d_ij in β.
        through_threshold: Whether they pass through τ.

    Raises:
        UserError: For values out of range.
    """

    margin: float = 1.0
    scale: float = 1.0
    weight: float = 1.0
    spread_positive: float = 0.0
    spread_negative: float = 0.0
    momentum: float = 0.9
    beta: Literal["corrected", "printed"] = "corrected"
    through_beta: bool = False
    through_threshold: bool = False

    def __post_init__(self) -> None:
        where = "structural loss"
        above_0(where, scale=self.scale)
        at_least_0(where, weight=self.weight, spread_positive=self.spread_positive)
        at_least_0(where, spread_negative=self.spread_negative, momentum=self.momentum)
        if self.momentum > 1:
            found = str(self.momentum)
            raise UserError(f"{where}: momentum", expected="at most 1", found=found, remedy="change the value")

    def init(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Aux:
        """Before the first batch: μ_p, μ_n and whether there is one."""
        blank = torch.zeros((), dtype=dtype, device=device)
        none = torch.zeros((), dtype=torch.bool, device=device)
        return {name: value for kind in _KINDS for name, value in ((f"{kind}.mean", blank), (f"{kind}.begun", none))}

    def __call__(self, distances: Tensor, labels: Tensor, aux: Aux, *, moving: bool = True) -> tuple[Tensor, Aux]:
        """The loss and its state after the batch.

        Args:
            distances: d [n, n]; the diagonal is not looked at.
            labels: [n].
            aux: The state before.
            moving: Whether the batch's mean goes into μ, as in training; else μ is the one before, where there is one.
        """
        same = labels[:, None] == labels
        positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        weights = self._weights(distances, positive, same)
        loss = (weights * self._terms(distances, same)).sum()
        for kind, pairs in zip(_KINDS, (positive, ~same), strict=True):
            mean, any_pair = _mean(distances, pairs), pairs.any()
            begun = aux[f"{kind}.begun"]
            moved = self.momentum * aux[f"{kind}.mean"] + (1 - self.momentum) * mean if moving else aux[f"{kind}.mean"]
            mean = torch.where(begun, torch.where(any_pair, moved, aux[f"{kind}.mean"]), mean)
            spread = self.spread_positive if kind == "positive" else self.spread_negative
            excess = functional.relu(_mean((distances - mean).square(), pairs) - spread)
            loss = loss + self.weight / 2 * excess
            aux = aux | {f"{kind}.mean": mean.detach(), f"{kind}.begun": begun | any_pair}
        return loss, aux

    def _terms(self, distances: Tensor, same: Tensor) -> Tensor:
        """log(1 + Σ_n exp((d_ij − d_in + m)/η)) [n, n], 0 for a sample without negatives."""
        # As a logarithm of sums: the exponentials themselves would overflow at a small scale.
        nearness = torch.where(same, -_FAR, -distances / self.scale).logsumexp(1, keepdim=True)
        exponent = (distances + self.margin) / self.scale + nearness
        return -functional.logsigmoid(-exponent)  # log(1 + eˣ), without softplus's cut

    def _weights(self, distances: Tensor, positive: Tensor, same: Tensor) -> Tensor:
        """β_ij / B [n, n], 0 off P."""
        d = distances if self.through_beta else distances.detach()
        threshold = _threshold(distances if self.through_threshold else distances.detach(), positive, same)
        if self.beta == "corrected":
            # Times `positive`: without any pair the softmax would give every entry the same share.
            return torch.where(positive, d - threshold, -_FAR).flatten().softmax(0).view_as(d) * positive
        beta = torch.where(positive, d.exp() - threshold, 0.0)
        total = beta.sum()
        # Without any pair all of β is 0, and so is the sum it would be divided by.
        return beta / torch.where(total == 0, 1.0, total)


_KINDS = ("positive", "negative")


def _threshold(distances: Tensor, positive: Tensor, same: Tensor) -> Tensor:
    """τ_c of each sample's class [n, 1], 0 for a class without pairs."""
    sums = torch.where(positive, distances, 0.0).sum(1)
    nearest = torch.where(positive, distances, _FAR).amin(1)
    pairs, members = positive.sum(1).to(distances.dtype), same.to(distances.dtype)
    mean = (members @ sums) / (members @ pairs).clamp(min=1)
    threshold = 2 * mean - torch.where(same, nearest, _FAR).amin(1)
    return torch.where(pairs > 0, threshold, 0.0)[:, None]


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Over the entries chosen, 0 where there are none."""
    return torch.where(chosen, values, 0.0).sum() / chosen.sum().clamp(min=1)


Distance = Literal["euclidean", "cosine"]


def distance(left: Tensor, right: Tensor, kind: Distance = "euclidean") -> Tensor:
    """Between the last axes of two broadcastable tensors, with gradient 0 where two outputs coincide.

    Args:
        left: [..., M].
        right: [..., M].
        kind: |left − right|, or 1 − cos ∠(left, right), which is 1 for a zero vector.
    """
    if kind == "euclidean":
        return _norm(left - right)
    lengths = _norm(left) * _norm(right)
    return 1 - (left * right).sum(-1) / torch.where(lengths > 0, lengths, 1.0)


def _norm(x: Tensor) -> Tensor:
    square = x.square().sum(-1)
    zero = square == 0  # not NaN: what diverged is no distance of 0
    # Two `where`: the inner one keeps √ away from 0, where an infinite derivative times 0 would be NaN.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())
