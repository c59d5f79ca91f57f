"""Matrix products in the weights' precision; where that is not the state's (autocast), sums are kept in the state's.

Every weight w [K, N] is a matrix as the cells hold it, and x [..., N] has its features last.
"""

from functools import cache

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


class Repeated:
    """A product that many steps do, with a few rows x each: w [K, N] is packed once, where that can be.

    On the CPU in float32 oneDNN's packed product takes 0.5 to 0.8 of the time of MKL's, which packs w at every step. It
    is reached by operators that PyTorch keeps for its compiler: `packs` tries them out first.
    """

    def __init__(self, w: Tensor) -> None:
        self.w = w
        worthwhile = w.dtype == torch.float32 and w.device.type == "cpu" and min(w.shape) >= 64
        self.packed = _pack(w.contiguous()) if worthwhile and packs() else None

    def add(self, out: Tensor, x: Tensor) -> None:
        """Out += x wᵀ."""
        if self.packed is None:
            add(out, x, self.w)
        else:
            out.add_(_packed_product(x, self.packed))

    def write(self, out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        """Out = x wᵀ (+ bias), the bias [K] or [B, K]."""
        if self.packed is None:
            write(out, x, self.w, bias)
        elif bias is None:
            out.copy_(_packed_product(x, self.packed))
        else:
            torch.add(_packed_product(x, self.packed), bias, out=out)


@cache
def packs() -> bool:
    """Whether PyTorch has oneDNN's packed product in the form in which it is called here."""
    x, w = torch.randn(3, 64), torch.randn(64, 64)
    try:
        return torch.allclose(_packed_product(x, _pack(w)), x @ w.t(), atol=1e-3)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


def _pack(w: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(w)
    return packed


def _packed_product(x: Tensor, packed: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return product


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
