"""A full disk, or a folder that cannot be written in, as a mistake that the user can mend."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from l2lopt.core.errors import UserError

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""The errors of a full disk, of a file above the process's limit (`ulimit -f`), and of a used-up quota."""
_FULL_IN_RUST = {39, 112} if sys.platform == "win32" else _FULL
"""The same as the operating system numbers them, which on Windows are not those of `errno`."""


@contextmanager
def needs_space(path: Path) -> Iterator[None]:
    """Turns the error of a full disk into one line for the user.

    Args:
        path: File that is written in the block.

    Raises:
        UserError: If the disk has no space left, or the user's quota or limit is used up.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # safetensors raises an error of its own, which is no `OSError`
        if (full := disk_full(error, path)) is None:
            raise
        raise full from error


def make_folder(folder: Path) -> None:
    """Makes a folder with those above it, where it is not there yet.

    Raises:
        UserError: Where there can be none, as below a file or in a folder of another user's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(folder, error) from None


def not_writable(folder: Path, error: OSError, remedy: str = "choose another place") -> UserError:
    """The user's mistake behind an error of writing in a folder."""
    found = error.strerror or str(error)
    refused = UserError(str(folder), expected="a folder to write in", found=found, remedy=remedy)
    return disk_full(error, folder) or refused


def disk_full(error: Exception, path: Path | str | None = None) -> UserError | None:
    """The user's mistake where the cause of an error is a full disk; None for other errors.

    Args:
        error: Error of writing.
        path: File that was written; by default the one that the error names.
    """
    in_text = re.search(r"\(os error (\d+)\)", str(error))  # as Rust writes it
    if isinstance(error, OSError):
        full = error.errno in _FULL
    else:
        full = in_text is not None and int(in_text[1]) in _FULL_IN_RUST
    if not full:
        return None
    where = path or getattr(error, "filename", None) or "the disk"
    found = getattr(error, "strerror", None) or str(error)
    remedy = "make space and go on, a run with --resume"
    return UserError(str(where), expected="space for it on the disk", found=found, remedy=remedy)
