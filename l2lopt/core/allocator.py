"""The C library's allocator: it may keep the memory that is freed, which large models on a CPU gain from.

Without PyTorch, so that the command line can do it before PyTorch is loaded.
"""

import ctypes
import sys
from typing import ClassVar

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Numbers of two parameters of glibc's `mallopt`."""
_kept = False
"""Whether this process keeps what it frees; set once, by `keep_freed_memory`."""


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [
        *((f"other{number}", ctypes.c_size_t) for number in range(7)),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def keep_freed_memory() -> bool:
    """Lets the allocator of this process keep the memory that is freed, for the next tensors.

    By itself glibc gives blocks above 32 MB back to the system at once, so that every operation on the flat vector of a
    large model gets new pages, and each page costs a fault: a fifth of an inner step with Adam at 21 million
    parameters, on a busy machine a third (`tests/benchmarks/bench_allocator.py`). Results are the same. The process may
    then hold more than it ever needed at once, as free places between tensors stay too, until it ends or calls
    `return_freed_memory`. Large tensors of other threads than the main one are given back all the same.

    This is for processes of our own alone: the command line calls it, and the worker processes of `parallel.jobs`.

    Returns:
        Whether memory is kept from now on: true with glibc alone.
    """
    global _kept
    try:
        mallopt = ctypes.CDLL(None).mallopt if sys.platform == "linux" else None
    except AttributeError:  # another C library, such as musl
        mallopt = None
    _kept = _kept or (mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, -1) and mallopt(_MMAP_MAX, 0)))
    return _kept


def return_freed_memory() -> None:
    """Gives the system what this process has kept so far, before others need it."""
    if _kept:
        ctypes.CDLL(None).malloc_trim(0)


def kept_bytes() -> int:
    """About the bytes that were freed and that this process keeps for its next tensors; 0 where nobody tells.

    All together: a single tensor may find no place in them. Pages that hold nothing are the system's, and not counted.
    Python's own memory, some tens of MB, may be in it.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2 if _kept else None
    except AttributeError:  # a glibc before 2.33
        mallinfo = None
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return max(0, min(int(found.fordblks), _in_memory() - int(found.uordblks)))


def _in_memory() -> int:
    """Bytes of this process's own pages that are in memory; 0 where nobody tells."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
    except OSError:
        return 0
