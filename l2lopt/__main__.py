"""`python -m l2lopt` is the command line."""

import atexit
import os
import sys

from l2lopt.cli import main
from l2lopt.core.allocator import keep_freed_memory


def run() -> None:
    """Runs the command line as a program of its own.

    After an interruption the process ends without Python's own end, which looks for cycles among all objects of
    PyTorch: a second of processor time, and six seconds on a busy machine.
    """
    stopped = False

    def leave() -> None:
        if stopped:
            sys.stdout.flush()
            os._exit(130)

    atexit.register(leave)  # before all imports of PyTorch's: the first to be registered is the last to be called
    keep_freed_memory()
    try:
        main()
    except SystemExit as end:
        stopped = end.code == 130
        raise


if __name__ == "__main__":
    run()
