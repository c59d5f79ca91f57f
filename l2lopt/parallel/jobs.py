"""The jobs of a study, run one after the other or in several processes."""

import hashlib
import json
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar

import torch

from l2lopt.core.allocator import keep_freed_memory, return_freed_memory
from l2lopt.core.digest import as_written, opened
from l2lopt.core.errors import UserError
from l2lopt.core.types import Report

J = TypeVar("J")
MOST_ON_WINDOWS = 61
"""Processes that one pool can have there: Windows waits for 63 objects at a time, and two are the pool's."""
LONGEST = 200
"""Bytes of a folder's name: file systems take 255, and a seed or an ending follows."""


class _Labelled(Protocol):
    label: str


L = TypeVar("L", bound=_Labelled)


def run_jobs(run: Callable[[J, Report], object], jobs: Sequence[J], processes: int, report: Report) -> None:
    """Calls `run` for every job. A job's result is the files it writes; what `run` returns is dropped.

    If a job fails, the others are stopped and the error is raised; files that are already written stay, so that the
    study goes on from them when it is started again.

    Args:
        run: (job, report of its progress) → anything. With several processes it is pickled, and so is the job.
        jobs: Jobs, in the order in which they are begun.
        processes: Number of jobs at a time. With 1 they run in this process. With more each process imports the script
            anew, whose own work must be under `if __name__ == "__main__":`.
        report: Progress. With several processes the stage of a job is "<number of its process>: <stage>", and the stage
            "study" counts the jobs done, without those whose result was there already.

    Raises:
        UserError: If a process was killed from outside, for want of memory perhaps, or could not begin, as in a script
            that each process would run again.
    """
    if processes == 1:
        for job in jobs:
            run(job, report)
        return
    done_now = 0
    report("study", done_now, len(jobs), {})
    return_freed_memory()  # the other processes need it
    # "spawn": a forked process would inherit PyTorch's thread pools and CUDA context, which do not survive a fork.
    context = get_context("spawn")
    events = context.SimpleQueue()
    others, numbers = set(active_children()), dict[int, str]()
    if sys.platform == "win32":
        processes = min(processes, MOST_ON_WINDOWS)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(events,)) as pool:
        with _uninterrupted_children():
            waiting: set[Future[bool]] = {pool.submit(_run_job, run, job) for job in jobs}
        # The pool itself gives no access to its processes before Python 3.14.
        workers = set(active_children()) - others
        try:
            while waiting:
                # Half a second at most: progress is shown, and dead processes are found, while no job ends.
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                while not events.empty():
                    process, stage, *event = events.get()
                    report(f"{numbers.setdefault(process, str(len(numbers) + 1))}: {stage}", *event)
                done_now += sum(future.result() for future in done)
                # Without the jobs that were done before: they take no time, and would spoil the forecast. Also while no
                # job ends: an interruption waits for a report.
                report("study", done_now, done_now + len(waiting), {})
                if not done and any(worker.exitcode is not None for worker in workers):
                    raise BrokenProcessPool  # the pool may miss a killed process and wait for ever
        except BaseException as error:
            for worker in workers:
                worker.kill()  # safe at any moment: files are written under another name and renamed
            ended = [code for code in _exit_codes(workers) if code > 0]  # below 0: by a signal
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, BrokenProcessPool) and ended:
                expected, found = "processes that begin", f"one that ended with code {ended[0]}"
                remedy = "put the script's work under if __name__ == '__main__':, since each imports it, or take jobs=1"
                raise UserError("jobs", expected=expected, found=found, remedy=remedy) from None
            if isinstance(error, BrokenProcessPool):
                expected, found = "every process to live", "one that was killed, for want of memory perhaps"
                raise UserError("jobs", expected=expected, found=found, remedy="lower --jobs, and go on") from None
            raise


def _exit_codes(workers: Iterable[BaseProcess], patience: float = 10.0) -> list[int]:
    """Exit codes of processes that end now. Those that are not known after `patience` seconds are left out.

    A process that has broken its pool may still be ending, and while the pool's own thread waits for it as well,
    `exitcode` is None here for a moment after its end.
    """
    until = time.monotonic() + patience
    while any(worker.exitcode is None for worker in workers) and time.monotonic() < until:
        time.sleep(0.01)
    return [worker.exitcode for worker in workers if worker.exitcode is not None]


@contextmanager
def _uninterrupted_children() -> Iterator[None]:
    """Processes that are started in the block do not see Ctrl-C, which a terminal sends to them as well.

    Their parent ends them; each would end in a traceback otherwise. Blocked before they begin: they import PyTorch for
    seconds before any line of ours could ignore it.
    """
    if sys.platform == "win32":  # `_begin` does it there
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_events: Any = None
"""In a worker process, the queue to which it sends its progress; set once, when the process begins.

A global: `submit` cannot pickle a queue, which may only be inherited.
"""


def _begin(events: Any) -> None:
    """Prepares a worker process."""
    global _events
    _events = events
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker process when its parent has died: it would write beside the same study, started again."""
    parent = parent_process()
    assert parent is not None, "a worker process has a parent"
    parent.join()
    # `sys.exit` would end this thread alone. Safe at any moment: files are written under another name and renamed.
    os._exit(1)


def _run_job(run: Callable[[J, Report], object], job: J) -> bool:
    """Runs one job in a worker process and drops what it returns: each tensor sent back would hold a file open.

    Gives whether the job reported any progress; it does not if its result was there already.
    """
    last: dict[str, float] = {}

    def send(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
        # Events are thinned out: `put` would wait if the pipe were full, and the job with it.
        if (now := time.monotonic()) - last.get(stage, -math.inf) < 1 and done not in (0, total):
            return
        last[stage] = now
        _events.put((os.getpid(), stage, done, total, dict(figures)))

    try:
        run(job, send)
    except Exception as error:
        if (told := _sendable(error)) is error:
            raise  # with its cause
        raise told from None
    return_freed_memory()
    return bool(last)


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same if it cannot be sent: the pool would take its process for a killed one."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def load_result(path: Path, work: Mapping[str, Any]) -> dict[str, Any] | None:
    """A job's result from its JSON file, without the key "work".

    Args:
        path: File to read.
        work: Fingerprint that the file's key "work" must equal.

    Returns:
        The result; None if the file is missing, damaged, or the result of other work.
    """
    try:
        facts = opened(json.loads(path.read_text(encoding="utf-8")))
        return facts if facts.pop("work") == as_written(work) else None
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def fingerprint(**what: Any) -> dict[str, Any]:
    """Everything that a job's result depends on: the releases of l2lopt and PyTorch, and the given values.

    Compared by `load_result` to tell whether a result is still valid.
    """
    return {"l2lopt": version("l2lopt"), "torch": torch.__version__, **what}


def format_range(values: Sequence[float], digits: int) -> str:
    """A table's entry: the mean, and for several values the lowest and the highest number in brackets.

    Example:
        >>> from l2lopt.parallel.jobs import format_range
        >>> format_range([1.0, 2.0, 4.0], digits=2)
        '2.33 (1.00–4.00)'
    """
    known = [value for value in values if not math.isnan(value)] or values
    brackets = f" ({min(known):.{digits}f}–{max(known):.{digits}f})" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{brackets}"


def unique_labels(rows: list[L]) -> list[L]:
    """A validator for pydantic: the rows of a study, if the names of their folders differ.

    Raises:
        ValueError: If two labels become the same folder name.
    """
    folders = [slug(row.label) for row in rows]
    for row, folder in zip(rows, folders, strict=True):
        if folders.count(folder) > 1:
            raise ValueError(f"labels that lead to different folders, not two times {row.label!r}")
    return rows


def slug(label: str) -> str:
    """A label as the name of a folder: lower case, words joined by hyphens; a long one is cut, and a digest added."""
    name = "-".join("".join(c if c.isalnum() else " " for c in label.lower()).split()) or "unnamed"
    if len(name.encode()) <= LONGEST:
        return name
    # Names of files are counted in bytes, of which a letter may take four.
    cut = name.encode()[: LONGEST // 2].decode(errors="ignore")
    return f"{cut}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
