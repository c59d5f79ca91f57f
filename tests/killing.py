"""Killing work in the middle: in this process at a chosen report, and for good with SIGKILL."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the library catches it."""


def killed(work, moment):
    """Calls `work(report=…)` until the `moment`-th report, and no further."""
    seen = []

    def report(*event):
        seen.append(event)
        if len(seen) == moment:
            raise Killed

    with pytest.raises(Killed):
        work(report=report)


def interrupted(monkeypatch, module, name, call):
    """Puts a function in the place of `module.name` that is interrupted at its `call`-th call; the calls' arguments."""
    calls, plain = [], getattr(module, name)

    def stopping(*args, **options):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return plain(*args, **options)

    monkeypatch.setattr(module, name, stopping)
    return calls


KILLS = 4
"""How often `kill_and_resume` kills a run: every start imports PyTorch anew, which takes ten seconds on a slow disk."""


def kill_and_resume(arguments, run, pause):
    """Runs `l2lopt … --resume` in `run` to its end, killed `KILLS` times up to `pause` seconds after a new checkpoint.

    Beside it, in the folder `whole`, the same is left by a run that nobody killed.
    """
    command = [sys.executable, "-m", "l2lopt", *map(str, arguments), "--resume", "--run"]
    subprocess.run([*command, str(run.with_name("whole"))], check=True, capture_output=True)
    moments = random.Random(0)
    checkpoint = run / "checkpoint.safetensors"
    for _ in range(KILLS):
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = subprocess.Popen([*command, str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
            time.sleep(0.01)
        time.sleep(moments.random() * pause)
        assert process.poll() is None, "the run ended before its last kill"
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    subprocess.run([*command, str(run)], check=True, capture_output=True)
