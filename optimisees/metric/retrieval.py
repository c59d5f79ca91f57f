"""How well distances find sequences of the same class among other people's, and how they spread over neighbours.

The neighbours, the vote and the average precision are scikit-learn's. (pytorch-metric-learning's calculators take
embeddings, which the coupled form has not, and cannot leave out a query's own subject.)
"""

import math
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from l2lopt.core.errors import UserError


class Retrieval(NamedTuple):
    """Means over queries, each against the windows of other subjects.

    Attributes:
        recall: k → the share of queries with one of their class among the k nearest.
        mean_average_precision: Mean over queries of the average precision of the ranking by distance. Queries whose
            class no other subject has are left out; NaN if none is left.
        accuracy: k → the share of queries whose class most of the k nearest have.
    """

    recall: dict[int, float]
    mean_average_precision: float
    accuracy: dict[int, float]


def retrieval(distances: Tensor, labels: Tensor, subjects: Tensor, ks: tuple[int, ...] = (1, 5, 10)) -> Retrieval:
    """Retrieval with every window as a query.

    Args:
        distances: [n, n], from rows to columns.
        labels: [n].
        subjects: [n]; a query's own subject is left out.
        ks: Numbers of neighbours.

    Raises:
        UserError: For one subject alone, or more neighbours than other subjects have windows.
    """
    from sklearn.metrics import average_precision_score  # seconds to import, and only these functions need it
    from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

    # A cosine of nearly 1 may round above it.
    d, y = distances.cpu().double().clamp(min=0).numpy(), labels.cpu().numpy()
    hits, right = {k: 0 for k in ks}, {k: 0 for k in ks}
    precisions = []
    for subject in subjects.unique().tolist():
        own = (subjects == subject).cpu().numpy()
        queries, gallery = d[np.ix_(own, ~own)], d[np.ix_(~own, ~own)]
        if max(ks) > len(gallery):
            remedy = "leave out more subjects, or lower k"
            expected, found = f"{max(ks)} windows of subjects other than {subject}", str(len(gallery))
            raise UserError("retrieval", expected=expected, found=found, remedy=remedy)
        relevant = y[own][:, None] == y[~own]
        nearest = NearestNeighbors(n_neighbors=max(ks), metric="precomputed").fit(gallery).kneighbors(queries)[1]
        for k in ks:
            hits[k] += int(np.take_along_axis(relevant, nearest[:, :k], 1).any(1).sum())
            vote = KNeighborsClassifier(n_neighbors=k, metric="precomputed").fit(gallery, y[~own])
            right[k] += int((vote.predict(queries) == y[own]).sum())
        some = relevant.any(1)
        precisions += [average_precision_score(a, -b) for a, b in zip(relevant[some], queries[some], strict=True)]
    shares = [{k: count / len(y) for k, count in counts.items()} for counts in (hits, right)]
    return Retrieval(shares[0], float(np.mean(precisions)) if precisions else math.nan, shares[1])


Scaling = Literal["together", "each"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
"""Readings of "each distance has been scaled between 0 and 1 prior to the average" (Compagnon et al. 2021)."""


def neighbour_curve(distances: Tensor, scaling: Scaling = "together") -> Tensor:
    """A(k) [n − 1]: the mean over samples and their k = 1, 2, … nearest neighbours of the distance scaled to [0, 1].

    Args:
        distances: [n, n], the diagonal not looked at.
        scaling: Range that becomes [0, 1]: "together", from the lowest to the highest distance of all; "each", that of
            each sample to its own neighbours, so that a sample far from all others counts no more than any other.
    """
    from sklearn.neighbors import NearestNeighbors

    n = len(distances)
    d = distances.cpu().double()
    off = d[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
    low, high = (off.min(), off.max()) if scaling == "together" else (off.amin(1, True), off.amax(1, True))
    span = (high - low).clamp(min=torch.finfo(torch.float64).tiny)
    scaled = ((d - low) / span).clamp(min=0).fill_diagonal_(0).numpy()
    nearest, _ = NearestNeighbors(n_neighbors=n - 1, metric="precomputed").fit(scaled).kneighbors()
    means = torch.from_numpy(nearest).mean(0)
    return means.cumsum(0) / torch.arange(1, n)
