"""Memory that is used again: freshly mapped pages cost as much as the arithmetic on them."""

import threading
from math import prod

import torch
from torch import Tensor


class Workspace(threading.local):
    """Tensors by name, a set for each thread; it grows to the largest asked for and goes with the thread.

    What `take` returns holds whatever was left there, and lives until the same thread takes the same name again.
    """

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, like: Tensor) -> Tensor:
        """A contiguous tensor [*shape] of the dtype and device of `like`, its contents undefined."""
        size, flat = prod(shape), self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != like.dtype or flat.device != like.device:
            flat = self._flat[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return flat[:size].view(shape)
