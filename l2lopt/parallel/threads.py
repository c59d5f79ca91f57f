"""Work divided among threads, each of which runs PyTorch with one intra-op thread."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """PyTorch on `count` CPU threads within the block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_each() -> Iterator[int]:
    """Sets PyTorch to one intra-op thread within the block; gives the number there was before, for `share_out`.

    Threads over independent work replace threads within each operation: an operation of two threads waits until both
    processors have time for it, however small it is, which is 20 ms instead of 3 µs beside a busy neighbour.
    """
    threads = torch.get_num_threads()
    with cpu_threads(1):
        yield threads


def share_out(work: Callable[[int], T], count: int, threads: int) -> list[T]:
    """[work(0), …, work(count − 1)], without gradients, by up to `threads` threads; to be called within `one_each`.

    Each thread takes the next number when it has finished one, so a busy processor delays one unit of work and not half
    of them all. Results are independent of the number of threads.

    Args:
        work: Number → result. It must not depend on which thread calls it, nor on the order of the calls.
        count: Number of results.
        threads: Largest number of threads, the calling one included; fewer if there are less than two units for each.
    """
    results: list[T | None] = [None] * count
    # One iterator for all threads: a number goes to the first thread that asks, and to no other.
    remaining = iter(range(count))

    def take() -> None:
        # Every thread sets this for itself: the setting reaches the calling thread and threads not yet started alone.
        torch.set_num_threads(1)
        # The gradient mode belongs to a thread as well, and is on at first in each.
        with torch.no_grad():
            for index in remaining:
                # Each result has its place, so it does not matter which thread ends first.
                results[index] = work(index)

    helpers = max(min(threads, count // 2), 1) - 1
    futures = [_pool(os.getpid(), threads - 1).submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        # Even if `take` has raised: a helper must not go on with the caller's work after the call has ended.
        wait(futures)
    for future in futures:
        # Raises what a helper has raised; its results would otherwise be missing without a word.
        future.result()
    return results  # type: ignore[return-value]  # no work is left


@cache
def _pool(process: int, size: int) -> ThreadPoolExecutor:
    """Threads that wait for work. The process id is part of the key: a fork inherits the pool but not its threads."""
    return ThreadPoolExecutor(size, thread_name_prefix="l2lopt")
