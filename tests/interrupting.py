"""Interruptions of this process, and of others."""

import signal
from contextlib import contextmanager


@contextmanager
def default_handler():
    """Python's own handler of SIGINT within the block: a job in the background ignores the signal, and so do others."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
