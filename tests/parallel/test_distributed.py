"""Several processes end as one does; where one dies the others end too, and a checkpoint takes the run up."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from test_experiments import SMALL
from test_resume import files
from test_studies import CONFIG, STUDY, table, written

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.experiments import config as configs
from l2lopt.parallel import processes as distributed

RECIPE = configs.shipped("digits-coordinatewise.toml")
ROOT = Path(__file__).parents[2]
RUNS = [
    *SMALL,
    "threads=1",
    "meta.updates=10",
    "meta.batch=3",
    "meta.checkpoint_every=2",
    "meta.validate_every=5",
    "unroll.length=[4, 11]",
    "mixed_with=[{name='quadratic', size=3}]",
    "validation.rows=1",
    "evaluation.rows=1",
]
CMA = ["unroll.estimator=es", "unroll.truncation=11", "meta.cma={population=5, sigma=0.05}"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def command(run, *options, changes=RUNS):
    sets = [part for change in changes for part in ("--set", change)]
    return [*TORCHRUN, "-m", "--", "l2lopt", "meta-train", str(RECIPE), "--run", str(run), *options, *sets]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def called(arguments, **options):
    return subprocess.run(
        list(map(str, arguments)), capture_output=True, text=True, timeout=120, env=environment(), **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [RUNS, [*RUNS, *CMA]], ids=["adam", "cma-es"])
def test_torchrun_leaves_what_one_process_leaves(tmp_path, changes):
    """To the byte: weights, records and config, with runs of several problems and lengths."""
    if changes is not RUNS:
        pytest.importorskip("cmaes", reason='cmaes is missing: pip install "l2lopt[cma]"')
    done = called(command(tmp_path / "two", changes=changes))
    assert done.returncode == 0, done.stderr
    whole = l2lopt.meta_train(RECIPE, tmp_path / "one", changes=changes)
    assert files(tmp_path / "two") == files(whole)
    assert done.stdout.count("meta-train: 10/10") == 1  # one of them talks


@pytest.mark.slow
def test_two_processes_meta_train_as_one(tmp_path):
    """In float64, after 10 meta-updates: φ to 1e-7, though bit for bit is meant; and what is exchanged arrives."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            import optimisees
            from l2lopt import estimators, optimisers
            from l2lopt.parallel import processes
            from l2lopt.training.meta_train import meta_train
            from l2lopt.training.settings import MetaTrainSettings, UnrollSettings

            def trained():
                optimiser = optimisers.make("coordinatewise", hidden_size=3, rule="additive").double()
                problems = [optimisees.make("mlp", hidden=[3], dtype="float64", batch_size=16)]
                settings = MetaTrainSettings(updates=10, batch=5, validate_every=10)
                runs = UnrollSettings(length=6, truncation=3)
                meta_train(
                    optimiser,
                    problems,
                    estimators.make("blockwise"),
                    settings,
                    runs,
                    score=lambda _: {"any": 0.0},
                    seed=3,
                )
                return torch.cat([value.detach().flatten() for value in optimiser.phi().values()])

            torch.set_num_threads(1)
            alone = trained()
            with processes.together():
                assert processes.ranks() == 2
                together = trained()
                error = (together - alone).abs().max() / alone.abs().max()
                assert alone.dtype == torch.float64 and error <= 1e-7, error
                parts = processes.share_out(lambda index: (processes.rank(), torch.tensor(index)), 5)
                assert [(rank, int(index)) for rank, index in parts] == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4)]
                assert processes.on_first(processes.rank) == 0
                own = processes.collect({processes.rank(): torch.ones(2)})
                assert list(own) == ([0, 1] if processes.rank() == 0 else [])
            """
        )
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": os.fspath(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, script], env={**environment(), **group, "RANK": str(rank)}, stderr=PIPE)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


@pytest.mark.slow
def test_two_processes_make_a_study_as_one(tmp_path):
    tables = []
    for name, start in (("two", TORCHRUN), ("one", [sys.executable])):
        source = written(tmp_path / name, STUDY, {**CONFIG, "evaluation": {**CONFIG["evaluation"], "rows": 1}})
        done = called(
            [*start, "-m", *["--"][: len(start) - 1], "l2lopt", "reproduce", source, "--run", tmp_path / name]
        )
        assert done.returncode == 0, done.stderr
        tables.append(table(tmp_path / name))
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_a_users_mistake_ends_all_ranks(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "earlier").write_text("a run")
    done = called(command(tmp_path / "run"))
    assert done.returncode != 0
    assert "l2lopt, rank 0: " in done.stderr
    assert "expected a new or empty folder, found files that no run has left" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_and_the_checkpoint_resumes_it(tmp_path, victim):
    changes = [*RUNS, "meta.updates=40", "meta.validate_every=40", "meta.checkpoint_every=1"]
    process = subprocess.Popen(
        command(tmp_path / "run", changes=changes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    checkpoint = tmp_path / "run" / "checkpoint.safetensors"
    while not checkpoint.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(worker(process.pid, victim), signal.SIGKILL)
    with process:
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "exitcode  : -9" in err
    assert not (tmp_path / "run" / "optimiser.safetensors").exists()
    done = called(command(tmp_path / "run", "--resume", changes=changes))
    assert done.returncode == 0, done.stderr
    whole = l2lopt.meta_train(RECIPE, tmp_path / "whole", changes=changes)
    assert files(tmp_path / "run") == files(whole)


def worker(parent, rank):
    """The process of a rank among the children of torchrun."""
    children = subprocess.run(
        ["ps", "--ppid", str(parent), "-o", "pid="], capture_output=True, text=True
    ).stdout.split()
    for pid in map(int, children):
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"RANK={rank}".encode() in file.read().split(b"\0"):
                return pid
    raise AssertionError(f"no rank {rank} among {children}")


def test_without_torchrun_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with distributed.together():
        assert (distributed.rank(), distributed.ranks()) == (0, 1)
        assert distributed.share_out(lambda index: index**2, 4) == [0, 1, 4, 9]
        assert distributed.share_out(lambda index: index, 0) == []
        assert distributed.collect({3: "a"}) == {3: "a"}
        with pytest.raises(UserError):
            distributed.on_first(lambda: configs.load("nowhere.toml"))
