"""The pieces of a study in processes of their own."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from l2lopt.core.errors import UserError
from l2lopt.core.types import silent
from l2lopt.parallel import jobs
from l2lopt.parallel.jobs import format_range, run_jobs


def work(piece, report):
    """A piece that would take a minute, or one that fails or is killed while that one is under way."""
    kind, folder = piece
    if kind == "long":
        (folder / "begun").write_text("")
        time.sleep(60)
        (folder / "done").write_text("")
    while not (folder / "begun").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    if kind == "fails":
        raise UserError("piece", expected="this", found="that", remedy="mend it")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fails", "piece: expected this, found that"),
        pytest.param("killed", "jobs: expected every process to live, .*lower --jobs", marks=pytest.mark.slow),
    ],
)
def test_where_a_piece_fails_the_others_are_ended(tmp_path, kind, message):
    with pytest.raises(UserError, match=message):
        run_jobs(work, [("long", tmp_path), (kind, tmp_path)], 2, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]


@pytest.mark.parametrize(("platform", "expected"), [("win32", 61), ("linux", 99)])
def test_windows_has_pools_of_61_processes_at_most(monkeypatch, platform, expected):
    """More are refused there by a `ValueError`."""

    def pool(count, **_):
        raise RuntimeError(f"{count} processes")

    monkeypatch.setattr(jobs, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", pool)
    with pytest.raises(RuntimeError, match=f"^{expected} processes"):
        run_jobs(work, [1, 2], 99, silent)


def test_the_count_is_of_what_is_to_be_made():
    """Pieces that were there, which report nothing, would make the rest seem as quick."""
    seen = []
    run_jobs(odd, [1, 2, 3, 5], 2, lambda *event: seen.append(event))
    counts = [event[1:3] for event in seen if event[0] == "study"]
    assert (counts[0], counts[-1]) == ((0, 4), (3, 3))
    told = [event for event in seen if event[0] != "study"]
    assert sorted(event[1] for event in told) == [1, 3, 5]
    assert all(name in ("1: train", "2: train") and figures == {"loss": 0.5} for name, *_, figures in told)


def odd(piece, report):
    """An even piece is there already."""
    if piece % 2:
        report("train", piece, piece, {"loss": 0.5})


@pytest.mark.slow
def test_no_process_outlives_the_one_that_began_it(tmp_path):
    """Or it would go on beside whoever takes the study up again."""
    code = "import pathlib, test_jobs as t; t.run_jobs(t.endless, [pathlib.Path('made')], 2, t.silent)"
    search = {"PYTHONPATH": str(Path(__file__).parent)}
    began = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **search})
    made = tmp_path / "made"
    while not made.exists():
        assert began.poll() is None
        time.sleep(0.05)
    began.kill()
    began.wait()
    for _ in range(100):
        if time.time() - made.stat().st_mtime > 2:
            return
        time.sleep(0.2)
    pytest.fail("the process goes on")


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_of_it(tmp_path):
    """Each process imports the script, and would run it again."""
    script = tmp_path / "unguarded.py"
    script.write_text("import test_jobs as t\nt.run_jobs(t.odd, [1, 2], 2, t.silent)\n")
    search = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, script], env={**os.environ, **search}, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "jobs: expected processes that begin, found one that ended with code 1; put the script's work under" in last


class EndingProcess:
    """A process whose exit code is known when it has been asked for some times, as beside a thread that waits too."""

    def __init__(self, code, asked):
        self.code, self.asked = code, asked

    @property
    def exitcode(self):
        self.asked -= 1
        return self.code if self.asked < 0 else None


def test_exit_codes_are_waited_for():
    """A script without a main guard was told of memory where its processes were still ending."""
    ending = [EndingProcess(1, 3), EndingProcess(-15, 0)]
    assert jobs._exit_codes(ending) == [1, -15]
    assert jobs._exit_codes([EndingProcess(1, 99), EndingProcess(2, 0)], patience=0.05) == [2]


def endless(path, report):
    """A piece without an end, which can be seen to go on."""
    for step in range(10**6):
        report("train", step, 10**6, {})
        path.touch()
        time.sleep(0.05)


def test_a_spread_has_brackets_for_several_values_alone():
    assert format_range([1.0], 1) == "1.0"
    assert format_range([1.0, 2.0, 4.0], 2) == "2.33 (1.00–4.00)"
    for values in ([math.nan, 1.0, 2.0], [1.0, 2.0, math.nan]):
        assert format_range(values, 1) == "nan (1.0–2.0)"
    assert format_range([math.nan] * 2, 1) == "nan (nan–nan)"


class TwoPartsError(Exception):
    """An exception that does not come back from a pickle, as many libraries have."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def unsendable(piece, report):
    raise TwoPartsError("this", piece)


def test_an_error_that_cannot_be_sent_is_told_nevertheless():
    """Not as a process that was killed."""
    with pytest.raises(RuntimeError, match=r"in unsendable\n(.*\n)*.*TwoPartsError: this and that"):
        run_jobs(unsendable, ["that"], 2, silent)
