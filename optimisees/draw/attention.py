"""The grid of Gaussian filters by which DRAW looks at an image and paints on it (Gregor et al. 2015, section 3.2)."""

from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError

NARROWEST = -40.0
"""The least log σ²: below it a filter is one pixel alone, and in float32 its weights would soon be 0/0."""


class Window(NamedTuple):
    """A grid of N×N Gaussian filters on an image of B rows and A columns; every tensor begins with the batch's axes.

    Attributes:
        rows: F_Y [..., N, B]; each filter's weights add up to 1.
        columns: F_X [..., N, A], likewise.
        centre: (g_Y, g_X) [..., 2], the row and the column of the grid's centre, pixels numbered from 0.
        stride: δ [...], pixels from one filter to the next.
        variance: σ² [...], of every filter, in pixels².
        intensity: γ [...].
    """

    rows: Tensor
    columns: Tensor
    centre: Tensor
    stride: Tensor
    variance: Tensor
    intensity: Tensor

    def read(self, images: Tensor) -> Tensor:
        """The image through the filters, γ F_Y x F_Xᵀ for every channel: [..., C, B, A] to [..., C, N, N]."""
        seen = self.rows.unsqueeze(-3) @ images @ self.columns.unsqueeze(-3).mT
        return self.intensity[..., None, None, None] * seen

    def write(self, patch: Tensor) -> Tensor:
        """The patch painted through the filters, F_Yᵀ w F_X / γ of every channel: [..., C, N, N] to [..., C, B, A]."""
        painted = self.rows.unsqueeze(-3).mT @ patch @ self.columns.unsqueeze(-3)
        return painted / self.intensity[..., None, None, None]

    def rectangle(self) -> Tensor:
        """The outermost filters' centres [..., 4]: top, left, bottom, right, in pixels."""
        reach = (self.rows.shape[-2] - 1) / 2 * self.stride[..., None]
        return torch.cat([self.centre - reach, self.centre + reach], -1)


def window(numbers: Tensor, size: int, height: int, width: int) -> Window:
    """The window that five unbounded numbers (g̃_X, g̃_Y, log σ², log δ̃, log γ) stand for.

    With A = width, B = height and pixels numbered from 0: g_X = (A − 1)/2 + (A + 1)/2 g̃_X, g_Y likewise with B,
    δ = (max(A, B) − 1)/(N − 1) δ̃, μ_i = g + (i − (N − 1)/2) δ for i = 0 … N − 1, F[i, a] ∝ exp(−(a − μ_i)² / 2σ²).
    Five zeros are the grid over the whole of a square image; log σ² is `NARROWEST` at the least. The paper numbers
    pixels from 1.

    Args:
        numbers: [..., 5].
        size: N, filters along each axis, at least 2.
        height: B.
        width: A.

    Raises:
        UserError: For an N below 2, of which no stride can be told.
    """
    if size < 2:
        raise UserError("attention: size", expected="at least 2", found=str(size), remedy="change the value")
    across, down, log_variance, log_stride, log_intensity = numbers.unbind(-1)
    x, y = (width - 1) / 2 + (width + 1) / 2 * across, (height - 1) / 2 + (height + 1) / 2 * down
    stride = (max(width, height) - 1) / (size - 1) * log_stride.exp()
    variance = log_variance.clamp(min=NARROWEST).exp()
    offsets = (torch.arange(size, dtype=numbers.dtype, device=numbers.device) - (size - 1) / 2) * stride[..., None]
    rows, columns = (
        _filters(centre[..., None] + offsets, variance, pixels) for centre, pixels in ((y, height), (x, width))
    )
    return Window(rows, columns, torch.stack([y, x], -1), stride, variance, log_intensity.exp())


def _filters(centres: Tensor, variance: Tensor, pixels: int) -> Tensor:
    """Gaussians about `centres` [..., N] over pixels 0, 1, …, as weights that add up to 1: [..., N, pixels].

    By softmax, which divides by no small sum where a filter lies far outside the image.
    """
    distances = torch.arange(pixels, dtype=centres.dtype, device=centres.device) - centres[..., None]
    return (-distances.square() / (2 * variance[..., None, None])).softmax(-1)
