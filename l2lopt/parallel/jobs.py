"""The pieces of long work, made one after the other or in processes of their own."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar

import torch

from l2lopt.core.errors import UserError
from l2lopt.core.types import Report

P = TypeVar("P")


class _Labelled(Protocol):
    label: str


L = TypeVar("L", bound=_Labelled)


def make_all(make: Callable[[P, Report], object], pieces: Sequence[P], jobs: int, report: Report) -> None:
    """Calls `make` for every piece; what it makes is what it leaves in files.

    Args:
        make: (piece, report of its progress); with several jobs it is sent to other processes, with the piece.
        pieces: in this order.
        jobs: made at the same time. Where one fails the others are ended; what they have left stands.
        report: progress of each piece; with several jobs after the number of its process, and the pieces made, of
            those that were not there.

    Raises:
        UserError: where a process was killed.
    """
    if jobs == 1:
        for piece in pieces:
            make(piece, report)
        return
    made = 0
    report("study", made, len(pieces), {})
    context = get_context("spawn")
    events = context.SimpleQueue()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_tell, initargs=(events,)) as pool:
        waiting: set[Future[bool]] = {pool.submit(_leave, make, piece) for piece in pieces}
        # There is no public way to the processes before Python 3.14.
        processes = list(pool._processes.values())
        numbers = {process.pid: str(number) for number, process in enumerate(processes, 1)}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                while not events.empty():
                    process, stage, *event = events.get()
                    report(f"{numbers[process]}: {stage}", *event)
                made += sum(future.result() for future in done)
                if done:  # pieces that were there take no time, so they would make the rest seem as quick
                    report("study", made, made + len(waiting), {})
                elif any(process.exitcode is not None for process in processes):
                    raise BrokenProcessPool  # seen sooner than by the pool, which may miss it
        except BaseException as error:
            for process in processes:
                process.kill()  # what they leave is written by rename
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                expected, found = "every process to live", "one that was killed, for want of memory perhaps"
                raise UserError("jobs", expected=expected, found=found, remedy="lower --jobs, and go on") from None
            raise


_events: Any = None
"""In a process that makes pieces, the queue for its progress, which is handed over where a process begins."""


def _tell(events: Any) -> None:
    global _events
    _events = events


def _leave(make: Callable[[P, Report], object], piece: P) -> bool:
    """`make` for its files alone: tensors that came from another process would each hold a file open.

    Gives whether it reported any progress, which it does not where the piece was there.
    """
    last: dict[str, float] = {}

    def told(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        if (now := time.monotonic()) - last.get(stage, -math.inf) < 1 and done not in (0, total):
            return
        last[stage] = now
        if (parent := parent_process()) is not None and not parent.is_alive():
            os._exit(1)  # or it would go on beside whoever takes the study up again
        _events.put((os.getpid(), stage, done, total, dict(figures)))

    make(piece, told)
    return bool(last)


def kept(path: Path, work: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a JSON file says that a piece has found, if its key "work" is `work`; None if absent, damaged or older."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return facts if facts.pop("work") == json.loads(json.dumps(work)) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def work_of(**what: Any) -> dict[str, Any]:
    """What a piece is made from: the releases of l2lopt and PyTorch, and all else that it depends on."""
    return {"l2lopt": version("l2lopt"), "torch": torch.__version__, **what}


def spread(values: Sequence[float], digits: int) -> str:
    """Their mean, and of several the lowest and the highest in brackets, for a table."""
    brackets = f" ({min(values):.{digits}f}–{max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{brackets}"


def apart(rows: list[L]) -> list[L]:
    """The rows of a study, whose labels must lead to different folders: a validator for pydantic."""
    folders = [slug(row.label) for row in rows]
    for row, folder in zip(rows, folders, strict=True):
        if folders.count(folder) > 1:
            raise ValueError(f"labels that lead to different folders, not two times {row.label!r}")
    return rows


def slug(label: str) -> str:
    """A label as a folder's name."""
    return "-".join("".join(c if c.isalnum() else " " for c in label.lower()).split()) or "unnamed"
