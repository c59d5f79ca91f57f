"""The log of a run, `metrics.jsonl` and TensorBoard events, and files written by rename."""

import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from l2lopt.core.digest import finite, sealed
from l2lopt.core.errors import UserError
from l2lopt.core.interrupts import interrupted_after
from l2lopt.storage.disk_space import disk_full, make_folder, needs_space, not_writable

if TYPE_CHECKING:
    from torch import Tensor


UNFINISHED = (f".*-{'[0-9a-f]' * 12}.*", f".tmp{'[0-9A-Za-z]' * 6}")
"""Patterns of the files that a killed process leaves, each as large as the file that was being written: those of
`written_whole`, and those that safetensors itself writes and renames."""
IDLE = 3600.0
"""Seconds after which nobody is writing a file any more that nobody has touched."""


class Recorder(Protocol):
    """Receives the figures of long work while it runs."""

    def write(self, stage: str, step: int, figures: Mapping[str, float]) -> None:
        """Figures of `stage` at `step`."""

    def show(self, name: str, step: int, images: "Tensor") -> None:
        """Images [n, channels, height, width] in [0, 1] at `step`."""


class Records:
    """A `Recorder` into a run's folder: a line of `metrics.jsonl` and TensorBoard scalars for every call.

    Args:
        folder: Folder of the run.
        after: Last step to keep from an earlier log, the step of the checkpoint; an interrupted run may have logged
            later steps, which will be run again.
        pending: A stage whose lines at step `after` are dropped as well: the checkpoint was written before it.
    """

    def __init__(self, folder: Path, after: int = -1, pending: str | None = None) -> None:
        from l2lopt.storage.event_file import EventFile  # imported here: it takes half a second

        self._path = path = folder / "metrics.jsonl"
        standing: list[str] = []
        if path.exists():
            # Rewritten before it is opened to append: new lines would join one that a kill has cut short.
            standing = list(_standing(path, after, pending))
            write_text(path, "".join(standing))
        with interrupted_after(), needs_space(path):
            self._lines = path.open("a", encoding="utf-8", newline="\n")
            self._board = EventFile(folder, purge=after + (pending is None))
            if pending is not None:
                # TensorBoard forgets whole steps: what stays of this one is written again.
                for facts in map(json.loads, standing):
                    if facts["step"] == after:
                        self._board.write(_figures(facts), after)

    def write(self, stage: str, step: int, figures: Mapping[str, float]) -> None:
        """Appends {"stage", "step", figures…}; a figure that is not finite is null."""
        # JSON has no NaN: Python would write one, and most other readers would refuse the line.
        line = {"stage": stage, "step": step} | {
            name: value if math.isfinite(value) else None for name, value in figures.items()
        }
        # An interruption in the middle would leave half a line, which nothing but a resumed run drops.
        with interrupted_after():
            with needs_space(self._path):
                self._lines.write(json.dumps(line) + "\n")
                # At every line, so that a killed run keeps all that it has logged.
                self._lines.flush()
            with needs_space(self._board.path):
                self._board.write({f"{stage}/{name}": value for name, value in figures.items()}, step)

    def show(self, name: str, step: int, images: "Tensor") -> None:
        """Puts the images side by side into TensorBoard."""
        with interrupted_after(), needs_space(self._board.path):
            # `clamp` lets NaN through, which no pixel can show.
            self._board.show(name, images.nan_to_num().clamp(0, 1), step)

    def close(self) -> None:
        """Closes both files; what a full disk did not take is tried once more."""
        with interrupted_after(), needs_space(self._path), closing(self._board), closing(self._lines):
            pass


class NoRecords:
    """The `Recorder` that records nothing."""

    def write(self, stage: str, step: int, figures: Mapping[str, float]) -> None:
        """Does nothing."""

    def show(self, name: str, step: int, images: "Tensor") -> None:
        """Does nothing."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to `path` when the block ends, deleted when the block raises.

    Readers see the old file or the new one, never half of one, since a rename within a folder is atomic.

    Args:
        path: File to write; its folder is made if need be.

    Raises:
        UserError: If the disk is full, or the folder is none to write in.
    """
    with needs_space(path), _renamed(path) as temporary:
        yield temporary


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """As `written_whole`, with the errors of the operating system."""
    make_folder(path.parent)
    # In the same folder: a rename from one file system to another fails. A part of the name: a file's name may be as
    # long as the file system takes.
    temporary = path.with_name(f".{path.stem[:40]}-{secrets.token_hex(6)}{path.suffix}")
    # Not by `tempfile`, whose files only their owner can read: a new file has the permissions that the user's umask
    # leaves. safetensors replaces it by a file that only the owner can read, so they are set again.
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise not_writable(path.parent, error) from None
    permissions = stat.S_IMODE(temporary.stat().st_mode)
    try:
        yield temporary
        temporary.chmod(permissions)
        try:
            temporary.replace(path)
        except OSError as error:
            found, remedy = error.strerror or str(error), "choose another name"
            refused = UserError(str(path), expected="a file that can be written", found=found, remedy=remedy)
            raise disk_full(error, path) or refused from None
    finally:
        temporary.unlink(missing_ok=True)


def clear_unfinished(folder: Path) -> None:
    """Removes what killed processes have left of files in a folder and the folders in it, hidden ones aside.

    Others may be writing there at this moment, so only what nobody has touched for an hour goes.

    Args:
        folder: Folder of a study or a cache.
    """
    before = time.time() - IDLE
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in UNFINISHED):
                # Another process may clear as well, or the folder be one to read only.
                with suppress(OSError):
                    if (path := Path(place, name)).lstat().st_mtime < before:
                        path.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a text file by rename."""
    with written_whole(path) as temporary:
        # The same bytes on every system: Windows would end lines by two characters.
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any, *, seal: bool = False) -> None:
    """Writes a JSON file by rename; a number that is not finite is null.

    Args:
        path: File to write.
        value: Value that JSON can express; a table where it is sealed.
        seal: Whether the file holds a digest of itself, which `core.digest.opened` compares.
    """
    plain = finite(value)
    write_text(path, json.dumps(sealed(plain) if seal else plain, indent=2) + "\n")


def existing(path: Path, what: str, remedy: str) -> Path:
    """`path`, if it is a file.

    Args:
        path: Path to check.
        what: Description of the file for the error, such as "a checkpoint".
        remedy: Advice for the error.

    Raises:
        UserError: If it is missing or a folder.
    """
    try:
        found = "a file" if path.is_file() else "a folder" if path.is_dir() else "nothing"
    except OSError as error:  # such as a name that is longer than the file system takes
        found = error.strerror or str(error)
    if found != "a file":
        raise UserError(str(path), expected=what, found=found, remedy=remedy)
    return path


def read_bytes(path: Path, what: str, remedy: str) -> bytes:
    """The contents of a file that a user has named.

    Args:
        path: File.
        what: Description of the file for the error, such as "a text".
        remedy: Advice for the error.

    Raises:
        UserError: If it is missing, a folder, or cannot be read.
    """
    try:
        return existing(path, what, remedy).read_bytes()
    except OSError as error:
        found = error.strerror or str(error)
        raise UserError(str(path), expected=f"{what} that can be read", found=found, remedy=remedy) from None


def read_text(path: Path, what: str, remedy: str) -> str:
    """The text of a file that a user has named, with a mark in the place of what is no UTF-8; see `read_bytes`."""
    return read_bytes(path, what, remedy).decode("utf-8", errors="replace")


def existing_folder(path: Path) -> Path:
    """`path`, if it is a folder.

    Raises:
        UserError: If it is none.
    """
    if not os.path.isdir(path):
        found, remedy = "a file" if os.path.exists(path) else "nothing", "give one that an earlier command has left"
        raise UserError(str(path), expected="a run's folder", found=found, remedy=remedy)
    return path


def _figures(facts: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line of the log, by their names in TensorBoard."""
    values = {name: math.nan if value is None else value for name, value in facts.items() if name != "step"}
    return {f"{facts['stage']}/{name}": value for name, value in values.items() if isinstance(value, float | int)}


def _standing(path: Path, after: int, pending: str | None) -> Iterator[str]:
    """The lines of a log up to step `after`, without those of the stage `pending` at that step."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            facts = json.loads(line)
            stays = facts["step"] <= after and (facts["stage"], facts["step"]) != (pending, after)
        except (ValueError, KeyError, TypeError, RecursionError):  # cut short by a kill, or changed by hand
            continue
        if stays:
            yield f"{line}\n"
