"""A small UCI HAR data set in the distributor's format."""

import math
from pathlib import Path

import torch
from torch import Tensor

from optimisees.data import har

LEFT_OUT = (2, 9)
"""Subjects that the tests keep for testing; neither is all of a part of the files."""
_PARTS = {"train": (1, 2, 4), "test": (7, 9)}
_ACTIVITIES = ("WALKING", "SITTING", "LAYING")


def small_har(root: Path, recordings: int = 1, windows: int = 4) -> Path:
    """`recordings` of so many overlapping windows for each of five subjects and three activities; ROOT comes back."""
    noise = torch.Generator().manual_seed(0)
    folder = root / har.FOLDER
    for part, subjects in _PARTS.items():
        (folder / part / "Inertial Signals").mkdir(parents=True)
        keys = [(s, a) for s in subjects for a in range(len(_ACTIVITIES)) for _ in range(recordings)]
        cut = [_signal(*key, windows, noise).unfold(1, har.STEPS, har.STEPS // 2).movedim(1, 0) for key in keys]
        for index, channel in enumerate(har.CHANNELS):
            lines = ["".join(f"{x:16.7e}" for x in row) for row in torch.cat(cut)[:, index].tolist()]
            path = folder / part / "Inertial Signals" / f"{channel}_{part}.txt"
            path.write_text("\n".join(lines) + "\n")
        for name, column in (("subject", [s for s, _ in keys]), ("y", [a + 1 for _, a in keys])):
            text = "".join(f"{number}\n" for number in column for _ in range(windows))
            (folder / part / f"{name}_{part}.txt").write_text(text)
    (folder / "activity_labels.txt").write_text("".join(f"{k} {name}\n" for k, name in enumerate(_ACTIVITIES, 1)))
    return root


def _signal(subject: int, activity: int, windows: int, noise: torch.Generator) -> Tensor:
    """A tone of the activity, a little off by subject, and noise: [9, steps]."""
    time = torch.arange(har.STEPS // 2 * (windows + 1)) / 50
    phases = 2 * math.pi * torch.rand(9, 1, generator=noise)
    tone = torch.sin(2 * math.pi * (1 + activity + 0.05 * subject) * time + phases)
    return activity + tone + 0.3 * torch.randn(tone.shape, generator=noise)


def some_windows(steps: int = 6, each: int = 2) -> har.Windows:
    """`each` short windows of random signals for each of five subjects and three activities."""
    noise = torch.Generator().manual_seed(1)
    keys = torch.cartesian_prod(torch.tensor([1, 2, 4, 7, 9]), torch.arange(3), torch.arange(each))
    signals = torch.randn(len(keys), 9, steps, generator=noise) + 2 * keys[:, 1, None, None]
    return har.Windows(signals, keys[:, 1], keys[:, 0], ("a", "b", "c"))
