"""Numbers in double precision, also where the device has none."""

from torch import Tensor

WITHOUT_DOUBLE = ("mps",)
"""Devices that know no float64."""


def double(value: Tensor) -> Tensor:
    """A small tensor in float64, on its device; on the CPU where the device knows no float64, as Apple's does not."""
    return (value.cpu() if value.device.type in WITHOUT_DOUBLE else value).double()
