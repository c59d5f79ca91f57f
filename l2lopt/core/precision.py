"""Numbers in double precision, also where the device has none, and no autocast where it is not wanted."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

WITHOUT_DOUBLE = ("mps",)
"""Devices that know no float64."""


def double(value: Tensor) -> Tensor:
    """A small tensor in float64, on its device; on the CPU where the device knows no float64, as Apple's does not."""
    return (value.cpu() if value.device.type in WITHOUT_DOUBLE else value).double()


def widest(device: torch.device) -> torch.dtype:
    """The dtype for long sums that stay on a device: float64, or float32 where the device knows no float64."""
    return torch.float32 if device.type in WITHOUT_DOUBLE else torch.float64


def for_sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums: at least float32, as a sum in bfloat16 stops growing at 256 times a term.

    Example:
        >>> import torch
        >>> from l2lopt.core.precision import for_sums
        >>> for_sums(torch.bfloat16), for_sums(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def without_autocast(devices: Iterable[str]) -> Iterator[None]:
    """No autocast inside the block on devices of these types: what is computed there keeps its dtype."""
    with ExitStack() as stack:
        for kind in devices:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
