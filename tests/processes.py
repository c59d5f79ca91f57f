"""Functions run by several gloo processes at once, which find one another through a file."""

import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import distributed

PRELOADED = ["l2lopt", "optimisees", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
"""Imported once, by the server from which all processes are forked."""


def run(function, count, *arguments, timeout=180.0):
    """Calls `function(rank, *arguments)` in `count` processes; the first error is raised here, with its traceback."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        given = (function, count, f"{folder}/meeting", arguments)
        context = mp.start_processes(_worker, given, count, join=False, start_method="forkserver")
        deadline = time.monotonic() + timeout
        try:
            while not context.join(max(deadline - time.monotonic(), 0.0)):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{function.__name__} in {count} processes took more than {timeout} s")
        finally:
            for process in context.processes:
                process.kill()


def _worker(rank, function, count, meeting, arguments):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=Path(meeting).as_uri(), rank=rank, world_size=count)
    try:
        function(rank, *arguments)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
