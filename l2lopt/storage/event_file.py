"""TensorBoard events, written at once and by the thread that calls.

`torch.utils.tensorboard.SummaryWriter` hands events to a thread of its own: an interruption within its queue leaves a
lock held that closing waits for, up to `flush_secs`, and a full disk shows in that thread as a traceback.
"""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, image, scalar, text

if TYPE_CHECKING:
    from torch import Tensor

_numbers = itertools.count()
"""Parts of the files' names, so that two of one process and second differ."""


class EventFile:
    """A new file of events in a run's folder.

    Args:
        folder: Folder of the run.
        purge: First step whose events of earlier files TensorBoard is to forget: they are made again.
    """

    def __init__(self, folder: Path, purge: int) -> None:
        began = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.path = folder / f"events.out.tfevents.{began}"
        self._file = self.path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(step=purge, file_version="brain.Event:2")
        self._write(step=purge, session_log=SessionLog(status=SessionLog.START))

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Writes figures, name → value, as one event."""
        values = [value for name, figure in figures.items() for value in scalar(name, figure).value]
        self._write(step=step, summary=Summary(value=values))

    def show(self, name: str, images: "Tensor", step: int) -> None:
        """Writes images [n, channels, height, width] in [0, 1], side by side."""
        self._write(step=step, summary=image(name, images, dataformats="NCHW"))

    def tell(self, name: str, markdown: str, step: int = 0) -> None:
        """Writes a text, such as a table, as Markdown."""
        self._write(step=step, summary=text(name, markdown))

    def settings(self, settings: Mapping[str, str | float], results: Mapping[str, float]) -> None:
        """Writes what TensorBoard calls hparams: settings of a run, by name → value, and its results.

        The results must be scalars of this folder as well, so they are written too.
        """
        for summary in hparams(dict(settings), dict(results)):
            self._write(summary=summary)
        if results:
            self.write(results, 0)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()
