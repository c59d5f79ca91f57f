"""Gradients clipped to a norm, whatever their size in float32."""

from collections.abc import Iterable

import torch
from torch import Tensor

from l2lopt.core.precision import double


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` also where the squares of finite gradients overflow; gives their norm.

    There its norm is infinite, and the gradients that it leaves are 0. Here so where squares overflow in float64 alone.

    Args:
        parameters: Parameters, whose gradients are changed in place.
        largest: Norm from which on they are scaled down to it.
    """
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if norm.isinf() and all(bool(grad.isfinite().all()) for grad in grads):
        norm = torch.stack([double(grad).square().sum() for grad in grads]).sum().sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm
