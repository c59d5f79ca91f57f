"""Memory: how much is free, and a refusal of what would not fit, before it is begun."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from l2lopt.core.allocator import kept_bytes
from l2lopt.core.environment import whole_number
from l2lopt.core.errors import UserError

SMALL = 2**26
"""Bytes that are given without a look at what is free."""
_OF_A_SIZE = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
_OF_A_SIZE |= {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full}
"""Functions that make a tensor of a size that they are given."""


def available_memory(device: torch.device) -> int:
    """Free memory in bytes, on the device, or this process's share of the machine's (torchrun's LOCAL_WORLD_SIZE).

    What PyTorch on a device, or this process on the CPU, keeps for its next tensors is free, too.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        free = found["MemAvailable"]
    except (OSError, KeyError, ValueError):  # not Linux
        free = _machine()
    return int(min(free, _allowed())) // whole_number("LOCAL_WORLD_SIZE", 1) + kept_bytes()


def _machine() -> int:
    """The machine's memory in bytes; where nobody tells, as on Windows, so much that nothing is refused."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _allowed(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """What a container or a batch system leaves of its limit (cgroup v2), in bytes; infinity without one."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        held = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The page cache counts as used, but its inactive part is given back when memory is short.
        return math.inf if limit == "max" else int(limit) - int(used) + int(held.get("inactive_file", 0))
    except (OSError, ValueError):
        return math.inf


def format_bytes(count: int) -> str:
    """A number of bytes in GB, or in MB where it is small."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def check_need(where: str, need: int, device: torch.device | None = None, most: int | None = None) -> None:
    """Refuses work that needs more memory than there is.

    Args:
        where: Subject for the error, such as "meta.batch = 1000000000".
        need: Bytes that the work takes at the least.
        device: Device of the memory; None stands for the CPU.
        most: Bytes that the work may take; None stands for all that is free.

    Raises:
        UserError: If they are not there.
    """
    if need <= SMALL:
        return
    free = available_memory(device or torch.device("cpu")) if most is None else most
    if need > free:
        expected, found = f"at most {format_bytes(free)} of memory", f"a need of {format_bytes(need)}"
        raise UserError(where, expected=expected, found=found, remedy="choose a smaller size")


class _Watch(TorchFunctionMode):
    """Looks at the size of every new tensor before it is made."""

    def __init__(self, where: str, most: int | None) -> None:
        super().__init__()
        self.where, self.most = where, most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _OF_A_SIZE:
            self._check(args, options)
        return func(*args, **options)

    def _check(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        first = args[1:] if args and isinstance(args[0], Tensor) else args
        shape = options.get("size", first[0] if first and isinstance(first[0], Sequence) else first)
        sizes = [size for size in shape if isinstance(size, int)]
        if any(size < 0 for size in sizes):
            raise UserError(self.where, expected="sizes of at least 0", found=str(min(sizes)), remedy="change the size")
        device = torch.device(options.get("device") or "cpu")
        if device.type in ("cpu", "cuda"):
            need = math.prod(sizes) * (options.get("dtype") or torch.get_default_dtype()).itemsize
            check_need(self.where, need, device, self.most)


@contextmanager
def watched(where: str, most: int | None = None) -> Iterator[None]:
    """Refuses, within the block, a new tensor that would not fit into the memory that is free.

    PyTorch would raise a `RuntimeError`, or the operating system kill the process once the memory is written to.

    Args:
        where: Subject for the error.
        most: Bytes that one tensor may have; None stands for all that is free.

    Raises:
        UserError: For a tensor that would not fit, or has a size below 0.
    """
    try:
        with _Watch(where, most):
            yield
    except MemoryError as error:
        remedy = "choose smaller sizes"
        raise UserError(where, expected="memory for it", found=str(error) or "none", remedy=remedy) from None
