"""The C library's allocator: it may keep the memory that is freed, which large models on a CPU gain from.

Without PyTorch, so that the command line can do it before anything is imported.
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
        *((f"other{number}", ctypes.c_size_t) for number in range(8)),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def keep_freed_memory() -> bool:
    """Lets the allocator of this process keep the memory that is freed, for the next tensors.

    By itself glibc gives blocks above 32 MB back to the system at once, so that every operation on the flat vector of a
    large model gets new pages, and each page costs a fault: a third of an inner step with Adam at 21 million parameters
    (`tests/benchmarks/bench_allocator.py`). Results are the same. The process then holds the most memory that it ever
    needed until it ends. This is for processes of our own alone: the command line calls it, and the worker processes
    of `parallel.jobs`.

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


def kept_bytes() -> int:
    """Bytes that were freed and that this process keeps for its next tensors; 0 where nobody tells."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2 if _kept else None
    except AttributeError:  # a glibc before 2.33
        mallinfo = None
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)
