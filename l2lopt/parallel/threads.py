"""Work shared out to threads of one intra-op thread each."""

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
    """PyTorch on one intra-op thread, how many there were before to be shared out to; afterwards it is as it was.

    An operation of two threads waits until both processors have time for it, however small it is: 20 ms instead of
    3 µs beside a busy neighbour.
    """
    threads = torch.get_num_threads()
    with cpu_threads(1):
        yield threads


def share_out(work: Callable[[int], T], count: int, threads: int) -> list[T]:
    """[work(0), …, work(count − 1)], without gradients, by up to `threads` threads; to be called within `one_each`.

    Each takes the next number when it is done with the last, so a busy processor holds up one piece of work and not
    half of it. A thread that would have one piece only is not woken. What comes out does not depend on the number of
    threads if the pieces do not.
    """
    results: list[T | None] = [None] * count
    remaining = iter(range(count))

    def take() -> None:
        torch.set_num_threads(1)  # holds for the thread that calls it, and for those that have not asked yet
        with torch.no_grad():
            for index in remaining:
                results[index] = work(index)

    helpers = max(min(threads, count // 2), 1) - 1
    futures = [_pool(os.getpid(), threads - 1).submit(take) for _ in range(helpers)]
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
