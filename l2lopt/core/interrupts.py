"""Interruptions (Ctrl-C) that wait: until a record is written, or until a step has ended."""

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_after() -> Iterator[None]:
    """Holds an interruption that comes within the block back until the block has ended.

    Only the main thread is ever interrupted; in others this does nothing.
    """
    if not _is_interruptible():
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted_between_steps(patience: float = 1.0) -> Iterator[Callable[[], None]]:
    """Holds an interruption that comes within the block back until the current step has ended.

    The block gets a function that it calls after every step; an interruption is raised there, as `KeyboardInterrupt`,
    and one that comes after the last call at the end of the block. Anywhere else it could be lost (Python drops what is
    raised in a `__del__`) or leave a lock held (a `Condition`, as in every queue, between taking its lock and saying
    so). One that has waited for `patience`, and a second one, are raised where the program is.

    Only the main thread is ever interrupted; in others this does nothing.

    Args:
        patience: Longest wait for the end of a step, in seconds.

    Example:
        >>> from l2lopt.core.interrupts import interrupted_between_steps
        >>> with interrupted_between_steps() as step_ended:
        ...     for step in range(3):
        ...         step_ended()
    """
    if not _is_interruptible():
        yield lambda: None
        return
    waiting: list[threading.Timer] = []

    def note(*_: object) -> None:
        if waiting:
            stop()
        # A second signal, to this same handler: a timer's thread can raise nothing in the main one.
        timer = threading.Timer(patience, _thread.interrupt_main)
        timer.daemon = True
        waiting.append(timer)
        timer.start()

    def stop() -> None:
        waiting[0].cancel()
        raise KeyboardInterrupt

    def step_ended() -> None:
        if waiting:
            stop()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield step_ended
        step_ended()
    finally:
        for timer in waiting:
            timer.cancel()
        signal.signal(signal.SIGINT, before)


def _is_interruptible() -> bool:
    """Whether a handler can be put in the place of the current one.

    None is one that is not Python's; a shell's job in the background is to pass interruptions over.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGINT) not in (None, signal.SIG_IGN)
