"""A random sample of coordinates, stratified by tensor."""

from math import ceil

import torch
from torch import Tensor

from l2lopt.core.groupings import WholeGrouping
from l2lopt.core.layout import Layout
from l2lopt.estimators.window import MeanAdjoint


def stratified(layout: Layout, share: float, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random share of every tensor's coordinates, at least two where there are two, without replacement.

    Args:
        layout: Layout of all coordinates.
        share: Share of the coordinates, in (0, 1].
        source: Source of the random numbers.

    Returns:
        The places of the chosen coordinates [m], rising, and the inverse of the chance each had [m], float64.
    """
    places, weights, first = [], [], 0
    for size in layout.sizes:
        count = sample_size(share, size)
        # In rising order: `Layout.select` searches the places for the tensors' ends.
        places.append(first + torch.randperm(size, generator=source)[:count].sort().values)
        weights.append(torch.full((count,), size / max(count, 1), dtype=torch.float64))
        first += size
    return torch.cat([torch.empty(0).long(), *places]), torch.cat([torch.empty(0).double(), *weights])


def sample_size(share: float, size: int) -> int:
    """How many of a tensor's coordinates a share of them are."""
    # At least two: c in `mean_adjoint` makes up for pairs, and one coordinate alone meets no other.
    return max(ceil(share * size), min(size, 2))


def mean_adjoint(whole: Layout, sample: Layout, key: str, sums: Tensor) -> MeanAdjoint:
    """The adjoint of a mean, from the sum of what the sampled coordinates' updates do to the meta-loss.

    Of a tensor's n coordinates m are sampled, each with the weight n/m in what it does. Two of them meet with another
    chance than one meets itself: with c = (n − 1)/(m − 1), c·Σp − (c − 1)·p_i has the mean Σp over samples even where
    it multiplies what coordinate i has. One factor is not enough where a mean goes into another one with an adjoint:
    three coordinates then meet, and the mean over samples is a little off.

    Args:
        whole: Layout of all coordinates.
        sample: Layout of the coordinates replayed.
        key: Name of the mean, "grouping.name".
        sums: Sums over the sample, [T, ..., *batch, count].
    """
    grouping = whole.grouping(key.partition(".")[0])
    assert isinstance(grouping, WholeGrouping)
    sizes = torch.tensor(whole.sizes, dtype=torch.float64).clamp(min=1)
    pairs = (sizes - 1) / (torch.tensor(sample.sizes) - 1).clamp(min=1)
    # The sample is drawn tensor by tensor, so rows and columns have the factor of their tensor.
    factors = grouping.each(torch.where(sizes > 1, pairs, 1.0).tolist(), sums)
    members = grouping.members(sums)
    return MeanAdjoint(grouping.total(sums) * (factors / members), (factors - 1) / members)
