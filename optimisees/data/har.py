"""UCI HAR (Anguita et al. 2013): six activities of people with a phone on the waist, in the distributor's layout.

"A public domain dataset for human activity recognition using smartphones", ESANN 2013.
"""

import hashlib
import os
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from optimisees.data.datasets import check_classes, damaged

FOLDER = "UCI HAR Dataset"
CHANNELS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""Acceleration without and with gravity in g, angular velocity in rad/s."""
STEPS = 128
"""Of a window, at 50 Hz; it begins 64 steps after the one before."""
_UNPACK = "unpack the distributor's archive again"


class Windows(NamedTuple):
    """Labelled pieces of signals, in the files' order, those of `train` before those of `test`.

    Attributes:
        signals: [n, 9, 128], float32, the channels in the order of `CHANNELS`.
        labels: [n], from 0.
        subjects: [n], the people's numbers, from 1.
        activities: The labels' names.
    """

    signals: Tensor
    labels: Tensor
    subjects: Tensor
    activities: tuple[str, ...]

    def chosen(self, rows: Tensor) -> "Windows":
        """The windows at `rows`, indices or a mask."""
        return self._replace(signals=self.signals[rows], labels=self.labels[rows], subjects=self.subjects[rows])

    def split(self, left_out: Iterable[int]) -> tuple["Windows", "Windows"]:
        """Those of all other subjects, and those of the subjects `left_out`.

        Raises:
            UserError: For a subject without a window, and if nothing is left on one side.
        """
        there, wanted = set(self.subjects.tolist()), set(left_out)
        if not wanted or not wanted < there:
            expected = f"some, but not all, of {', '.join(map(str, sorted(there)))}"
            found = ", ".join(map(str, sorted(wanted))) or "none"
            raise UserError("subjects left out", expected=expected, found=found, remedy="change the list")
        out = torch.isin(self.subjects, torch.tensor(sorted(wanted)))
        return self.chosen(~out), self.chosen(out)

    def check(self, where: str) -> None:
        """Refuses windows that do not fit together; `where` is the name of the argument, for the error.

        Raises:
            UserError: For other shapes, fewer than two activities, and labels of none.
        """
        shape = list(self.signals.shape)
        if self.signals.dim() != 3 or any(list(part.shape) != shape[:1] for part in (self.labels, self.subjects)):
            expected = "signals [windows, channels, steps], and a label and a subject for each window"
            found = f"shapes {shape}, {list(self.labels.shape)} and {list(self.subjects.shape)}"
            raise UserError(where, expected=expected, found=found, remedy="change the shapes")
        check_classes(where, self.activities, [self.labels])

    def digest(self) -> str:
        """A digest of all windows."""
        found = hashlib.sha256(repr((self.activities, self.signals.shape)).encode())
        for part in self[:3]:
            found.update(part.numpy().tobytes())
        return found.hexdigest()

    def standardised(self, by: "Windows") -> "Windows":
        """Every channel less the mean of `by`'s, over the standard deviation of `by`'s, or over 1 where that is 0."""
        deviation, mean = torch.std_mean(by.signals.double(), (0, 2), keepdim=True, correction=0)
        # Rounding leaves a constant channel a deviation just above 0.
        varies = deviation > 1e-6 * mean.abs()
        return self._replace(signals=((self.signals.double() - mean) / torch.where(varies, deviation, 1.0)).float())


class Recording(NamedTuple):
    """A stretch of signal without a gap.

    Attributes:
        signals: [9, 64·(windows + 1)].
        labels: Label of each of its windows, [windows].
        subject: Number of its subject.
    """

    signals: Tensor
    labels: Tensor
    subject: int


def load(root: str | Path) -> Windows:
    """All windows of ROOT/UCI HAR Dataset/{train,test}/; read once a process, as long as the files stay as they are.

    There lie `Inertial Signals/<channel>_<part>.txt`, `y_<part>.txt` and `subject_<part>.txt`, a line a window, and
    `activity_labels.txt` beside the parts.

    Raises:
        UserError: For a missing file, and for a malformed one, by its name and what is wrong there.
    """
    folder = Path(os.path.expanduser(root)).absolute() / FOLDER
    files = [(str(path), path.stat()) for path in sorted(folder.rglob("*.txt")) if path.is_file()]
    return _load(folder, tuple((name, facts.st_mtime_ns, facts.st_size) for name, facts in files))


@lru_cache(maxsize=1)
def _load(folder: Path, state: tuple[tuple[str, int, int], ...]) -> Windows:
    """`load`, of files in this state."""
    activities = _activities(folder / "activity_labels.txt")
    parts = [_part(folder, part, activities) for part in ("train", "test")]
    signals, labels, subjects = (torch.cat(own) for own in zip(*(part[:3] for part in parts), strict=True))
    return Windows(signals, labels, subjects, activities)


def recordings(windows: Windows) -> list[Recording]:
    """The signals that the windows were cut from: each goes on where its second half is the next one's first half."""
    half = STEPS // 2
    signals, subjects = windows.signals, windows.subjects
    goes_on = (signals[:-1, :, half:] == signals[1:, :, :half]).all(2).all(1) & (subjects[:-1] == subjects[1:])
    starts = [0, *(torch.nonzero(~goes_on).flatten() + 1).tolist(), len(signals)]
    found = []
    for start, end in pairwise(starts if len(signals) else []):
        own = signals[start:end]
        joined = torch.cat([own[0, :, :half], *own[:, :, half:]], 1)
        found.append(Recording(joined, windows.labels[start:end], int(subjects[start])))
    return found


def _part(folder: Path, part: str, activities: tuple[str, ...]) -> Windows:
    """The windows of `train` or `test`."""
    paths = [folder / part / "Inertial Signals" / f"{channel}_{part}.txt" for channel in CHANNELS]
    channels = [_numbers(path, STEPS) for path in paths]
    others = [folder / part / f"{name}_{part}.txt" for name in ("y", "subject")]
    labels, subjects = [_whole_numbers(path) for path in others]
    lines = [*map(len, channels), len(labels), len(subjects)]
    for path, count in zip([*paths, *others], lines, strict=True):
        if count != lines[0]:
            raise damaged(path, f"{count} lines where {paths[0].name} has {lines[0]}", _UNPACK)
    if labels.max() > len(activities):
        raise damaged(others[0], f"activity {int(labels.max())} of {len(activities)}", _UNPACK)
    return Windows(torch.from_numpy(np.stack(channels, 1)).float(), labels - 1, subjects, activities)


def _activities(path: Path) -> tuple[str, ...]:
    """The names, which are numbered from 1."""
    lines = [line.split() for line in _text(path).splitlines() if line.strip()]
    if not lines or [line[0] for line in lines] != [str(k) for k in range(1, len(lines) + 1)]:
        raise damaged(path, "lines that are not numbered 1, 2, …", _UNPACK)
    return tuple(" ".join(line[1:]) for line in lines)


def _whole_numbers(path: Path) -> Tensor:
    """A column of numbers from 1."""
    numbers = _numbers(path, 1)[:, 0]
    if (numbers != np.floor(numbers)).any() or (numbers < 1).any():
        raise damaged(path, "numbers that are not 1, 2, …", _UNPACK)
    return torch.from_numpy(numbers).long()


def _numbers(path: Path, columns: int) -> np.ndarray:
    """A table of finite numbers [lines, columns]."""
    lines = [line for line in _text(path).splitlines() if line.strip()]
    try:
        table = np.loadtxt(lines, ndmin=2, comments=None) if lines else np.empty((0, columns))
    except ValueError as error:
        raise damaged(path, str(error), _UNPACK) from None
    if not lines or table.shape[1] != columns:
        found = f"{table.shape[1]} numbers a line in place of {columns}" if lines else "nothing in it"
        raise damaged(path, found, _UNPACK)
    if not np.isfinite(table).all():
        raise damaged(path, f"line {int(np.argwhere(~np.isfinite(table))[0, 0]) + 1} with NaN or infinity", _UNPACK)
    return table


def _text(path: Path) -> str:
    if not path.is_file():
        remedy = "unpack the distributor's archive into the folder that L2LOPT_DATA or --data names"
        raise UserError(str(path), expected="a file of the UCI HAR data set", found="none", remedy=remedy)
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error), _UNPACK) from None
