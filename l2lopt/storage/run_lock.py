"""A lock on a run's folder, so that two processes never write the same run."""

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from l2lopt.core.errors import UserError
from l2lopt.storage.disk_space import needs_space

NAME = ".lock"
"""Name of the lock's file in the folder. The file is there while the lock is held, and after a kill, which frees it."""

_HELD = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}

if sys.platform == "win32":
    import msvcrt

    def _take(handle: int) -> None:
        # A byte far behind the text: no one else could read a locked byte.
        os.lseek(handle, 1 << 20, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Holds the lock of a run's folder within the block; the operating system frees it when its owner dies.

    Where a file system knows no locks, nothing is locked.

    Args:
        folder: Folder of the run, made if need be.

    Raises:
        UserError: If another process holds the lock, named by its number; for a folder that cannot be written in.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _opened(path)
    except OSError as error:
        expected, found, another = "a folder to write in", error.strerror or str(error), "choose another --run"
        raise UserError(str(folder), expected=expected, found=found, remedy=another) from None
    try:
        with needs_space(path):
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)  # from where the lock was taken, on Windows
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield folder
    finally:
        # Removed while it is held: whoever has opened it meanwhile sees that it has no name any more.
        with suppress(OSError):  # Windows removes no open file
            path.unlink()
        os.close(handle)


def _opened(path: Path) -> int:
    """The handle of the lock's file, locked.

    Raises:
        UserError: If another process holds the lock.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _take(handle)
        except OSError as error:
            if error.errno in _HELD:
                os.lseek(handle, 0, os.SEEK_SET)
                owner = os.read(handle, 200).decode(errors="replace")
                os.close(handle)
                found, remedy = owner or "another process", "wait until it has ended, or choose another --run"
                expected = "a folder in which nobody works"
                raise UserError(str(path.parent), expected=expected, found=found, remedy=remedy) from None
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # its last owner removed it between the two calls: nobody else would see this lock
