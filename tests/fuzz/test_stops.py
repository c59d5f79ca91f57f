"""Runs that are stopped at random moments, by Ctrl-C, a full disk or a killed parent, go on to the same bytes.

The whole dose takes half an hour; L2LOPT_DOSE=5 takes five of each instead.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interrupting import default_handler

pytestmark = [pytest.mark.huge, pytest.mark.skipif(sys.platform != "linux", reason="signals, tmpfs and /proc of Linux")]

TRAIN = """
optimisee = {name = "mlp", dataset = "digits", hidden = [16], batch_size = 32}
optimiser = {weights = "lstm"}
threads = 1
train = {steps = 1500, evaluate_every = 100, checkpoint_every = 20}
"""
META = """
optimisee = {name = "quadratic", size = 4}
optimiser = {name = "coordinatewise", hidden_size = 4}
threads = 1
meta = {updates = 600, batch = 2, validate_every = 50, checkpoint_every = 5}
unroll = {length = 20, truncation = 10}
validation = {seeds = 2, horizons = [10]}
[evaluation]
seeds = 60
steps = 2000
rows = 20
horizons = [2000]
multipliers = []
baselines = [{optimiser = "adam", rates = [0.1]}]
"""
STUDY = """
meta_seeds = [0, 1]
problems = [{label = "a"}, {label = "b", changes = ["optimisee.size=3"]}]
optimisers = [{label = "small", config = "meta.toml", changes = ["meta.updates=150", "evaluation.steps=100", "evaluation.horizons=[100]"], tuned = false}]
"""  # noqa: E501  # TOML has no line breaks inside an inline table


def dose(whole):
    return min(whole, int(os.environ.get("L2LOPT_DOSE", whole)))


@pytest.fixture
def configs(tmp_path):
    for name, text in (("train", TRAIN), ("meta", META), ("study", STUDY)):
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


@pytest.fixture
def busy():
    """More programs than cores, as the issue's machine had, unless the machine has them anyway."""
    cores = os.cpu_count() or 1
    count = 2 * cores if os.getloadavg()[0] < cores else 0
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


def begun(*arguments, **options):
    command = [sys.executable, "-m", "l2lopt", *map(str, arguments)]
    with default_handler():
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
        )


def ours(err):
    """The lines of standard error, without those that PyTorch logs where it compiles: "W1123 00:24:57…"."""
    return [line for line in err.splitlines() if not re.match(r"W\d{4} ", line)]


def ended(*arguments):
    process = begun(*arguments)
    _, err = process.communicate()
    assert (process.returncode, ours(err)) == (0, [])


def stop(process, ready, moment):
    """Interrupts a process and its children, as a terminal does, `moment` seconds after it is `ready`.

    Gives the seconds that it took to end, and its exit code.
    """
    while process.poll() is None and not ready():
        time.sleep(0.02)
    time.sleep(moment)
    began = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    took = time.monotonic() - began
    assert (process.returncode, ours(err)) in [(130, ["l2lopt: stopped"]), (0, [])], err
    return took, process.returncode


VERBS = {
    # verb → the arguments, how many of the 50, the files to compare
    "train": (["train", "train.toml", "--resume"], 20, ["model.safetensors", "metrics.jsonl", "result.json"]),
    "meta-train": (["meta-train", "meta.toml", "--resume"], 15, ["optimiser.safetensors", "metrics.jsonl"]),
    "evaluate": (["evaluate"], 5, ["evaluation.csv"]),
    "reproduce": (["reproduce", "study.toml"], 5, ["table.json"]),
    "reproduce-jobs": (["reproduce", "study.toml", "--jobs", "2"], 5, ["table.json"]),
}


def contents(folder, names):
    """The files' bytes; of a table what does not depend on the clock."""

    def content(path):
        if path.name != "table.json":
            return path.read_bytes()
        return {
            label: {**facts, "seconds_per_step_and_seed": 0} for label, facts in json.loads(path.read_text()).items()
        }

    return {name: content(folder / name) for name in names}


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c(configs, busy, monkeypatch, verb):
    monkeypatch.chdir(configs)
    arguments, count, files = VERBS[verb]
    run, whole = configs / "run", configs / "whole"
    where = (lambda folder: [folder]) if verb == "evaluate" else (lambda folder: ["--run", folder])
    if verb == "evaluate":
        for folder in (run, whole):
            ended("meta-train", "meta.toml", "--set", "meta.updates=2", "--run", folder)
    ended(*arguments, *where(whole))
    moments, took = random.Random(verb), []
    while len(took) < dose(count):
        process, lock = begun(*arguments, *where(run)), run / ".lock"
        seconds, code = stop(
            process, lambda lock=lock, process=process: holds(lock, process.pid), 3 * moments.random() ** 2
        )
        if code == 130:
            took.append(seconds)
        elif verb != "evaluate":  # it had ended before it was stopped: begin another
            assert contents(run, files) == contents(whole, files)
            shutil.rmtree(run)
    print(verb, len(took), "stops, the longest", f"{max(took):.2f} s")  # noqa: T201  # the count is the result
    ended(*arguments, *where(run))
    assert contents(run, files) == contents(whole, files)
    assert max(took) < 3


def holds(lock, pid):
    try:
        return f"process {pid} " in lock.read_text()
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path):
    """Gives the size of a file system, and its folder, anew."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", folder], capture_output=True)
    if made.returncode:
        pytest.skip("only root may mount a file system")

    def resize(size):
        subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)
        return folder

    yield resize
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("verb", ["train", "meta-train"])
def test_full_disk(configs, small_disk, monkeypatch, verb):
    monkeypatch.chdir(configs)
    arguments, _, files = VERBS[verb]
    arguments = [*arguments, "--set", "train.steps=200" if verb == "train" else "meta.updates=60"]
    whole, sizes = configs / "whole", random.Random(verb)
    ended(*arguments, "--run", whole)
    largest = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    stops = 0
    for number in range(dose(10)):
        size = int(4096 + sizes.random() * 0.9 * largest) // 4096 * 4096
        run = small_disk(size) / f"run-{number}"
        process = begun(*arguments, "--run", run)
        _, err = process.communicate()
        assert (process.returncode, len(ours(err))) == (2, 1), (size, err)
        stops += 1
        small_disk("1g")
        ended(*arguments, "--run", run)
        assert contents(run, files) == contents(whole, files)
        assert not [path for path in run.iterdir() if path.name.startswith(".")]
        subprocess.run(["rm", "-r", run], check=True)
    print(verb, stops, "full disks")  # noqa: T201  # the count is the result


def session(leader):
    """Processes of the session that a process has begun, without those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(") ")[2].split()[:4]
            if int(its_session) == leader and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def test_killed_parents(configs, monkeypatch):
    monkeypatch.chdir(configs)
    arguments, _, files = VERBS["reproduce-jobs"]
    run, whole, moments = configs / "run", configs / "whole", random.Random(0)
    ended(*arguments, "--run", whole)
    lasted = []
    for _ in range(dose(10)):
        process = begun(*arguments, "--run", run)
        while len(session(process.pid)) < 3 and process.poll() is None:
            time.sleep(0.02)
        time.sleep(8 * moments.random())
        assert process.poll() is None, "the study has ended before"
        process.kill()
        process.communicate()
        began = time.monotonic()
        while session(process.pid) and time.monotonic() < began + 60:
            time.sleep(0.02)
        lasted.append(time.monotonic() - began)
    print(len(lasted), "killed parents, the last process", f"{max(lasted):.2f} s later")  # noqa: T201  # the count is the result
    ended(*arguments, "--run", run)
    assert contents(run, files) == contents(whole, files)
    assert max(lasted) < 5
