"""The allocator keeps what is freed: in processes of our own, with the same results."""

import ctypes
import subprocess
import sys

import pytest

KEEPS = """
import resource, sys
from l2lopt.core.allocator import keep_freed_memory, kept_bytes
import torch
torch.set_num_threads(1)
assert kept_bytes() == 0
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
large = torch.ones(2**24)
for step in range(30):
    if step == 20:  # the places that a tensor fits into have been found
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    change = large * 2
    del change
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, kept_bytes())
"""


RETURNS = """
import torch
from l2lopt.core import allocator, memory
allocator.keep_freed_memory()
large = torch.ones(2**27)
del large
told = allocator.kept_bytes()
memory._allowed, memory.kept_bytes = (lambda: 0.0), (lambda: 123)
assert memory.available_memory(torch.device("cpu")) == 123
allocator.return_freed_memory()
returned = allocator.kept_bytes()
large = torch.empty(2**29)
del large
print(told, returned, allocator.kept_bytes())
"""


def numbers(*command: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", *command], capture_output=True, text=True, check=True, timeout=300)
    return [int(word) for word in done.stdout.split()]


GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc 2.33 or newer")
def test_a_tensor_takes_the_pages_that_another_has_left():
    returned, kept = numbers(KEEPS, "return"), numbers(KEEPS, "keep")
    assert kept[0] < returned[0] / 2  # faults, huge pages or not
    assert returned[1] == 0
    assert kept[1] >= 2**24 * 4  # what is free for the next one is known


@pytest.mark.skipif(sys.platform == "win32", reason="no C library under that name")
def test_another_c_library_is_left_as_it_is(monkeypatch):
    from l2lopt.core import allocator

    monkeypatch.setattr(allocator, "_kept", False)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()
    allocator.return_freed_memory()
    monkeypatch.setattr(allocator, "_kept", True)
    assert allocator.kept_bytes() == 0  # a glibc that does not tell


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc 2.33 or newer")
def test_what_is_kept_counts_as_free_and_pages_that_hold_nothing_do_not():
    told, returned, untouched = numbers(RETURNS)
    assert told >= 2**29
    assert max(returned, untouched) < 2**28  # Python's own memory is in it, which is far less


def test_the_command_line_keeps_what_is_freed(monkeypatch):
    from l2lopt import __main__ as program

    called = []
    monkeypatch.setattr(program, "keep_freed_memory", lambda: called.append("keep"))
    monkeypatch.setattr(program, "main", lambda: called.append("main"))
    monkeypatch.setattr(program.atexit, "register", lambda leave: None)
    program.run()
    assert called == ["keep", "main"]
