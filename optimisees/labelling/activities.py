"""The activity at every time step of UCI HAR: the subjects' signals, joined from their windows, in pieces."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from l2lopt.core.errors import above_0
from optimisees.data import har
from optimisees.data.datasets import data_root
from optimisees.labelling.labelled import Labelled, Sequences, by_position

RATE = 50.0
"""Time steps a second."""


def activities(
    valid: Sequence[int] = (13,), test: Sequence[int] = (18, 20, 24), length: int = 512, root: str | None = None
) -> Labelled:
    """Nine standardised inertial channels, six activities, a class for every time step.

    The windows overlap by half: their second halves, and a recording's first half, are its signal (`har.recordings`). A
    time step has the label of the window whose second half it is. The recordings of a subject follow one another
    in the order of the files: the distributor has cut out the time between two activities, so that the signal jumps
    there. Channels are standardised by the windows of the training subjects alone.

    Args:
        valid: Subjects of the split `heldout`.
        test: Subjects that are never trained on; all others are trained on.
        length: Time steps of the sequences that a subject's signal is cut into; the last one is shorter.
        root: Folder of the data sets; by default the value of the environment variable `L2LOPT_DATA`.

    Raises:
        UserError: For missing or damaged files, subjects without a window, and if no others are left.
    """
    above_0("har", length=length)
    rest, tested = har.load(data_root(root)).split(test)
    train, held_out = rest.split(valid)
    first, second, third = (_pieces(part.standardised(train), length) for part in (train, held_out, tested))
    return Labelled(train.activities, first, second, third, partial(by_position, train.activities), rate=RATE)


def signals(windows: har.Windows) -> dict[int, tuple[Tensor, Tensor]]:
    """Subject → signal [T, 9] and its label at every step [T]."""
    half = har.STEPS // 2
    found = {}
    by_subject = sorted(har.recordings(windows), key=lambda recording: recording.subject)
    for subject, own in groupby(by_subject, key=lambda recording: recording.subject):
        recordings = list(own)
        labels = [torch.cat([one.labels[:1], one.labels]).repeat_interleave(half) for one in recordings]
        found[subject] = torch.cat([one.signals.T for one in recordings]), torch.cat(labels)
    return found


def _pieces(windows: har.Windows, length: int) -> Sequences:
    joined = signals(windows)
    inputs = [piece for signal, _ in joined.values() for piece in signal.split(length)]
    classes = [piece for _, labels in joined.values() for piece in labels.split(length)]
    begins = [(subject, k * length) for subject, (_, own) in joined.items() for k in range(-(-len(own) // length))]

    def place(sequence: int, position: int) -> str:
        subject, begin = begins[sequence]
        return f"subject {subject}, {(begin + position) / RATE:.2f} s"

    return Sequences.of(inputs, classes, place)
