"""Matrix products in the weights' precision; where that is not the state's (autocast), sums are kept in the state's.

Every weight w [K, N] is a matrix as the cells hold it, and x [..., N] has its features last.
"""

import torch
from torch import Tensor


def write(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Out = x wᵀ (+ bias), for x [B, N] and out [B, K]."""
    if w.dtype != out.dtype:
        product = x.to(w.dtype) @ w.t()
        torch.add(product, bias, out=out) if bias is not None else out.copy_(product)
    elif bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


def add(out: Tensor, x: Tensor, w: Tensor) -> None:
    """Out += x wᵀ."""
    if w.dtype == out.dtype:
        out.addmm_(x, w.t())
    else:
        out.add_(x.to(w.dtype) @ w.t())


def outer(slopes: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The slope of w: Σ slopes ⊗ x over time and batch, one product; slopes [T, B, K], x [T, B, N] → [K, N]."""
    slopes, x = slopes.flatten(0, 1), x.flatten(0, 1)
    out = room(x.to(dtype), slopes.shape[1], x.shape[1])
    return torch.mm(slopes.to(dtype).t(), x.to(dtype), out=out).to(slopes.dtype)


def back(slopes: Tensor, w: Tensor) -> Tensor:
    """The slope of x over all of time, one product: slopes [T, B, K] w → [T, B, N]."""
    out = room(w, slopes.shape[0] * slopes.shape[1], w.shape[1])
    torch.mm(slopes.flatten(0, 1).to(w.dtype), w, out=out)
    product: Tensor = out.to(slopes.dtype).unflatten(0, slopes.shape[:2])
    return product


def room(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised numbers whose rows begin at multiples of 64 bytes.

    Into rows of another length, as 650, MKL's products take up to half as long again.
    """
    unit = 64 // like.element_size()
    return like.new_empty(*shape[:-1], -(-shape[-1] // unit) * unit)[..., : shape[-1]]
