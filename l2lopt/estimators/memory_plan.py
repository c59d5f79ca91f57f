"""What a blockwise meta-gradient will take, known before it is begun."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from l2lopt.core.errors import UserError
from l2lopt.core.memory import available_memory as available_memory  # for those who plan
from l2lopt.core.memory import format_bytes

Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """Memory in bytes, time in seconds.

    Attributes:
        window: K, the steps whose gradients are kept at once.
        vector: Bytes of one vector of the record.
        per_step: Vectors of the record for each step; one more closes a window.
        fixed: θ and the optimiser's state, with the copies that are made.
        kept: K → the larger of what the replay of a block and what one gradient keeps.
        available: Bytes that are free now.
        spilt: The vectors lie in files, and count for nothing.
        seconds: The whole call, estimated from one gradient, one step and one replay of a block; with the disk apart.
    """

    window: int
    vector: int
    per_step: int
    fixed: int
    kept: Callable[[int], int]
    available: int
    spilt: bool
    seconds: float

    @property
    def vectors(self) -> int:
        """How many vectors are kept at once."""
        return self.window * self.per_step + 1

    @property
    def record(self) -> int:
        """What the vectors take together."""
        return self.vector * self.vectors

    @property
    def state(self) -> int:
        """What all but the record takes."""
        return self.fixed + self.kept(self.window)

    @property
    def memory(self) -> int:
        """What all takes."""
        return self.state + (0 if self.spilt else self.record)

    @property
    def longest(self) -> int:
        """The longest window up to this one that fits; 0 where none does."""
        windows = range(1, self.window + 1)
        return bisect_right(windows, self.available, key=lambda window: replace(self, window=window).memory)

    def check(self) -> None:
        """Refuses what does not fit.

        Raises:
            UserError: The memory is not there; the message names the longest window that fits.
        """
        if self.memory <= self.available:
            return
        remedy = "even one step is too much: take a smaller model or another machine"
        if self.longest:
            remedy = (
                f"set truncation to at most {self.longest}, record to bfloat16, a lower share, or spill to a folder"
            )
        raise UserError(
            f"a window of {self.window} steps",
            expected=f"at most {format_bytes(self.available)} of memory",
            found=f"a need of {format_bytes(self.memory)} ({format_bytes(self.record)} for the record)",
            remedy=remedy,
        )

    def __str__(self) -> str:
        where = "in files" if self.spilt else f"of {format_bytes(self.available)} free"
        time = f"{self.seconds:.2g} s" if self.seconds < 100 else f"{self.seconds / 60:.0f} min"
        record, state = format_bytes(self.record), format_bytes(self.state)
        return f"record {record} ({self.vectors} vectors) {where}, state {state}, about {time}"


@contextmanager
def activations() -> Iterator[list[int]]:
    """Sizes in bytes of what autograd keeps of the calls within the block, each piece of memory once."""
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:  # a sparse one is a constant of the model's
            storage = tensor.untyped_storage()
            # By address: many views of one storage may be kept, and they take its memory once.
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    found: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
    found.extend(sizes.values())


def seconds_of(function: Callable[[], Result]) -> tuple[float, Result]:
    """How long a function takes the second time, and its result."""
    # The first call also pays for compilation, caches and fresh memory.
    function()
    return timed(function)


def timed(function: Callable[[], Result]) -> tuple[float, Result]:
    """How long a function takes, a GPU's work included, and its result."""
    _wait()
    start = time.perf_counter()
    result = function()
    _wait()
    return time.perf_counter() - start, result


def _wait() -> None:
    # A GPU is given its work in advance: without waiting, the clock would measure the giving alone.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
