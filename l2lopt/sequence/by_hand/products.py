"""Matrix products in the precision of the weights; under autocast the sums have that of the states.

Every weight w [K, N] has the layout of the cells, and x [..., N] has its features last.
"""

from functools import cache

import torch
from torch import Tensor


def write(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Out = x wᵀ (+ bias), for x [B, N] and out [B, K]."""
    if w.dtype != out.dtype:
        # Under autocast: `torch.mm` refuses an `out` of another precision than its arguments.
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
    """A product x wᵀ that every step repeats for a few rows x; w [K, N] is packed once, if that is possible.

    On the CPU in float32 oneDNN's packed product takes 0.5 to 0.8 of the time of MKL's, which packs w again at every
    step. Its operators are private to PyTorch's compiler and may change: `packs` tries them out first.
    """

    def __init__(self, w: Tensor) -> None:
        self.w = w
        # The plain class alone: those of its subclasses that have no numbers, `FakeTensor`, cannot be packed.
        able = type(w) is Tensor and w.dtype == torch.float32 and w.device.type == "cpu"
        self.packed = _pack(w.contiguous()) if able and min(w.shape) >= 64 and packs() else None

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
    """Whether this PyTorch has oneDNN's packed product with the signature used here, and it computes x wᵀ."""
    # Neither drawn, which would move the caller's random numbers on, nor of the default dtype, which is the caller's.
    numbers = torch.arange(67 * 64, dtype=torch.float32, device="cpu").sin().view(67, 64)
    x, w = numbers[:3], numbers[3:]
    try:
        # By numbers: an operator whose meaning has changed need not raise.
        return torch.allclose(_packed_product(x, _pack(w)), x @ w.t(), atol=1e-3)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


def _pack(w: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(w)
    return packed


def _packed_product(x: Tensor, packed: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return product


def outer(adjoints: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of w, Σ adjoint ⊗ x over time and batch as one product: [T, B, K] and [T, B, N] → [K, N]."""
    adjoints, x = adjoints.flatten(0, 1), x.flatten(0, 1)
    out = room(x.to(dtype), adjoints.shape[1], x.shape[1])
    return torch.mm(adjoints.to(dtype).t(), x.to(dtype), out=out).to(adjoints.dtype)


def back(adjoints: Tensor, w: Tensor) -> Tensor:
    """The gradient of x for all steps as one product: adjoints [T, B, K] times w → [T, B, N]."""
    out = room(w, adjoints.shape[0] * adjoints.shape[1], w.shape[1])
    torch.mm(adjoints.flatten(0, 1).to(w.dtype), w, out=out)
    product: Tensor = out.to(adjoints.dtype).unflatten(0, adjoints.shape[:2])
    return product


def room(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory whose rows begin at multiples of 64 bytes.

    MKL's products take up to 1.5 times as long if they write into rows of another length, such as 650 numbers.
    """
    unit = 64 // like.element_size()
    # Not zeroed: whoever asks for this memory writes all of it before reading.
    return like.new_empty(*shape[:-1], -(-shape[-1] // unit) * unit)[..., : shape[-1]]
