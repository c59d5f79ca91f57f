"""Work shared out to threads of one intra-op thread each."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

from l2lopt.types import cpu_threads

T = TypeVar("T")


def share_out(work: Callable[[int], T], count: int) -> list[T]:
    """[work(0), …, work(count − 1)], by up to `torch.get_num_threads()` threads, without gradients.

    Each thread takes the next number when it is done with the last, so a busy processor holds up one piece of work and
    not half of it. Inside, PyTorch's operations run on one thread each; afterwards the setting is as it was. What
    comes out does not depend on the number of threads if the pieces do not.
    """
    results: list[T | None] = [None] * count
    remaining = iter(range(count))

    def take() -> None:
        torch.set_num_threads(1)  # holds for the calling thread, and for those that have not asked yet
        with torch.no_grad():
            for index in remaining:
                results[index] = work(index)

    helpers = min(torch.get_num_threads(), count) - 1
    with cpu_threads(1):
        futures = [_pool(os.getpid(), helpers).submit(take) for _ in range(helpers)]
        try:
            take()
        finally:
            wait(futures)
    for future in futures:
        future.result()
    return results  # type: ignore[return-value]  # no work is left


@cache
def _pool(process: int, size: int) -> ThreadPoolExecutor:
    """Threads that wait for work; a forked process needs its own."""
    return ThreadPoolExecutor(size, thread_name_prefix="l2lopt")
