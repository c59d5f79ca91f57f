"""Dynamic time warping of many pairs at once (Sakoe and Chiba 1978), the classical distance of raw signals."""

import torch
from torch import Tensor

from l2lopt.core.errors import at_least_0
from l2lopt.core.types import Report, silent


def warped(left: Tensor, right: Tensor, band: int) -> Tensor:
    """√ of the least Σ|x_i − y_j|² along a path from (0, 0) to (T−1, T−1) with |i − j| ≤ band.

    D(i, j) = |x_i − y_j|² + min(D(i−1, j), D(i, j−1), D(i−1, j−1)), all pairs and a whole antidiagonal at a time. On
    diagonal o = i − j the cell of antidiagonal s = i + j takes the place of that of s − 2, its neighbours are those
    of s − 1, so that one row of 2·band + 3 numbers a pair is all the memory.

    Args:
        left: x [P, channels, T].
        right: y [P, channels, T].
        band: Largest |i − j|, at least 0; at 0 the result is the Euclidean distance.

    Returns:
        [P].
    """
    at_least_0("time warping", band=band)
    steps, x, y = left.shape[2], left.permute(2, 1, 0), right.permute(2, 1, 0)
    band = min(band, steps - 1)
    row = x.new_full((2 * band + 3, left.shape[0]), torch.inf)  # a place outside the band on either side
    for s in range(2 * steps - 1):
        low = max(-band, -s, s - 2 * (steps - 1))
        low += (low + s) % 2
        high = -low
        first, last = (s + low) // 2, (s + high) // 2  # of i; j runs from `last` down
        cost = (x[first : last + 1] - y[s - last : s - first + 1].flip(0)).square().sum(1)
        here = slice(low + band + 1, high + band + 2, 2)
        before, after = row[low + band : high + band + 1 : 2], row[low + band + 2 : high + band + 3 : 2]
        best = torch.minimum(torch.minimum(before, after), row[here])
        # The first cell has no cell before it: all its neighbours are infinite.
        row[here] = cost + (best if s else 0.0)
    return row[band + 1].sqrt()


def all_warped(inputs: Tensor, band: int, report: Report = silent, size: int = 2000) -> Tensor:
    """`warped` of every two windows [n, channels, T], `size` pairs at a time: [n, n], symmetric, 0 on the diagonal."""
    n, done = len(inputs), 0
    found, (i, j) = torch.zeros(n, n, dtype=inputs.dtype), torch.triu_indices(n, n, 1)
    for rows, columns in zip(i.split(size), j.split(size), strict=True):
        found[rows, columns] = found[columns, rows] = warped(inputs[rows], inputs[columns], band).to(found.device)
        done += len(rows)
        report("time warping", done, len(i), {})
    return found
