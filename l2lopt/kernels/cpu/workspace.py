"""Memory that is used again: freshly mapped pages cost as much as the arithmetic on them."""

import threading
from math import prod

import torch
from torch import Tensor


class Memory:
    """Tensors by name; each grows to the largest size asked for."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, like: Tensor) -> Tensor:
        """A contiguous tensor [*shape] of the dtype and device of `like`, its contents undefined.

        It is valid until the same name is taken again.
        """
        # Kept flat, so that one memory serves shapes that change from call to call.
        size, flat = prod(shape), self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != like.dtype or flat.device != like.device:
            flat = self._flat[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return flat[:size].view(shape)


class Workspace(threading.local, Memory):
    """Memory that threads may share: each thread sees tensors of its own, which are freed with the thread."""
