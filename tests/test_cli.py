"""The command line: what it says and how it ends."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from l2lopt import cli, optimisers, terminal
from l2lopt.evaluation import comparison
from l2lopt.evaluation.tuned_runs import OptimiserRun
from l2lopt.experiments import config as configs
from l2lopt.weights import files

from test_experiments import SMALL  # isort: skip

RECIPE = str(configs.shipped("digits-coordinatewise.toml"))


def called(monkeypatch, capsys, *arguments):
    """(exit code, standard output, standard error) of one call."""
    monkeypatch.setattr(sys, "argv", ["l2lopt", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def sets(changes):
    return [part for change in changes for part in ("--set", change)]


def test_off_a_terminal_a_line_for_every_tenth_says_what_is_left(capsys):
    with terminal.progress() as report:
        for done in (0, 1, 50, 51, 100):
            time.sleep(0.001)
            report("train", done, 100, {"loss": 0.25})
    lines = [line for line in capsys.readouterr().out.splitlines() if line]  # rich 14 ends with an empty one
    assert [line.split()[1] for line in lines] == ["0/100", "50/100", "100/100"]
    assert re.fullmatch(r"train: 50/100  loss 0\.25  left \d+:\d\d:\d\d", lines[1])
    assert "left" not in lines[2]


def test_a_width_of_0_is_none():
    """As programs say that start others on a terminal without a size; Rich would show nothing at all."""
    command = [sys.executable, "-m", "l2lopt", "weights", "lstm"]
    told = {
        columns: subprocess.run(
            command, env={**os.environ, "COLUMNS": columns}, capture_output=True, text=True, check=True
        )
        for columns in ("0", "80")
    }
    assert told["0"].stdout == told["80"].stdout
    assert "lstm" in told["0"].stdout


def test_steps_made_before_do_not_count_for_the_time_left(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(terminal.console, "get_time", lambda: now)
    with terminal.progress() as report:
        for done in (70, 80, 90, 40, 50, 60):  # a run that went on, and the same stage once more
            report("train", done, 100, {})
            now += 5.0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.partition("left ")[2] for line in lines] == ["", "", "0:00:05", "", "", "0:00:20"]


def test_meta_train_evaluate_plot(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    code, out, err = called(monkeypatch, capsys, "meta-train", RECIPE, "--run", run, "--seed", 3, *sets(SMALL))
    assert (code, err) == (0, "")
    assert "meta-train: 4/4" in out
    assert "seed = 3" in (run / "config.toml").read_text()
    code, out, err = called(monkeypatch, capsys, "evaluate", run)
    assert (code, err) == (0, "")
    assert "train loss, mean per sample" in out
    assert "learned-lstm" in out
    code, out, err = called(monkeypatch, capsys, "plot", run)
    assert (code, err) == (0, "")
    assert (run / "figures" / "loss-curves.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["meta-train", "none.toml"], "none.toml: expected a config file, found nothing"),
        (["meta-train", RECIPE, "--set", "unroll.lenght=3"], "did you mean 'length'?"),
        (["meta-train", RECIPE, "--device", "gpu"], "expected a device of this machine"),
        (["meta-train", RECIPE, "--seed", "-1"], "seed: expected greater than or equal to 0"),
        (
            ["evaluate", "nowhere"],
            "nowhere: expected a run's folder, found nothing; give one that an earlier",
        ),
        (["evaluate", "."], "expected a run's config, found nothing"),
        (["plot", "nowhere"], "nowhere: expected a run's folder, found nothing"),
        (["plot", "."], "expected an evaluation, found nothing"),
        (["sample", "nowhere"], "nowhere: expected a run's folder, found nothing"),
        (["train", "digits-trian"], "give its path, or one of digits-train"),
        (["reproduce", "fig4"], "expected a study's file, found nothing; give its path, or one of fig3"),
        (["benchmark", "smok"], "expected a suite's file, found nothing; give its path, or one of smoke"),
        (["meta-train"], "Missing argument"),
        (["meta-train", RECIPE, "--sett", "a=1"], "No such option"),
        (["demoo"], "No such command"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = called(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.startswith("l2lopt: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_a_command_the_help_is_shown(monkeypatch, capsys):
    code, out, err = called(monkeypatch, capsys)
    assert "meta-train" in out + err
    assert "l2lopt: " not in err
    assert code == 2


def test_damaged_weights_end_in_one_line(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    called(monkeypatch, capsys, "meta-train", RECIPE, "--run", run, *sets(SMALL))
    weights = run / "optimiser.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, _, err = called(monkeypatch, capsys, "evaluate", run)
    assert (code, err.count("\n")) == (2, 1)
    assert "expected a whole safetensors file" in err


@pytest.mark.parametrize(("name", "shown"), [("coordinatewise", "coordinatewise lstm"), ("sgd", "sgd")])
def test_weights_are_shown_with_their_rule_and_its_cell(tmp_path, monkeypatch, capsys, name, shown):
    files.save(optimisers.make(name, **({} if name == "coordinatewise" else {"lr": 0.1})), tmp_path / "rule")
    code, out, _ = called(monkeypatch, capsys, "weights", tmp_path / "rule")
    assert code == 0
    assert f"rule: {shown};" in " ".join(out.split())


def test_the_folder_of_the_data_sets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("L2LOPT_DATA", "elsewhere")
    config = tmp_path / "c.toml"
    config.write_text('optimisee = { name = "resnet", dataset = "mnist" }\noptimiser = "adam"\n')
    code, _, err = called(monkeypatch, capsys, "train", config, "--run", tmp_path / "run", "--data", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "train-images-idx3-ubyte" in err
    assert f"in {tmp_path}/MNIST/raw" in err


def test_the_program_starts_by_itself(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "l2lopt", "plot", "nowhere"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("l2lopt: nowhere")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interruption_ends_in_a_line_and_code_130(tmp_path):
    changes = ["optimisee=quadratic", "optimiser=torch.optim.SGD", "train.steps=1000000"]
    config = tmp_path / "c.toml"
    config.write_text('optimisee = "quadratic"\noptimiser = "torch.optim.SGD"\n')
    command = [sys.executable, "-m", "l2lopt", "train", config, "--run", tmp_path / "run", *sets(changes)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        try:
            while not (tmp_path / "run" / "metrics.jsonl").exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "l2lopt: stopped\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluation.csv", b"optimiser,kind,seed,step,split,loss\n", "evaluation.csv: expected losses, found none"),
        ("evaluation.csv", b"optimiser,kind,seed,step,split,loss\na,learned,0,1,dev,1.0\n", "line 2: expected a loss"),
        ("evaluation.csv", b"\xff\xfe", "evaluation.csv: expected columns"),
        ("metrics.jsonl", b"\xff\xfe", "metrics.jsonl, line 1: expected a loss"),
    ],
)
def test_damaged_records_end_in_one_line(tmp_path, monkeypatch, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    if name == "metrics.jsonl":
        (tmp_path / "config.toml").write_text('optimisee = "quadratic"\noptimiser = "torch.optim.SGD"\n')
    code, _, err = called(monkeypatch, capsys, "plot", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("threads=99999999999", "threads: expected less than or equal to 1024"),
        ("device=meta", "expected a device of this machine"),
        ("evaluation.baselines=[{optimiser='adam', rates=[]}]", "evaluation.baselines.0.rates: expected"),
    ],
)
def test_more_mistakes_end_in_one_line(tmp_path, monkeypatch, capsys, change, message):
    code, _, err = called(monkeypatch, capsys, "meta-train", RECIPE, "--run", tmp_path / "run", "--set", change)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "run").exists()


def test_a_folders_name_is_no_markup(tmp_path, monkeypatch, capsys):
    config = tmp_path / "c.toml"
    config.write_text('optimisee = "quadratic"\noptimiser = "torch.optim.SGD"\ntrain.steps = 3\n')
    code, out, err = called(monkeypatch, capsys, "train", config, "--run", tmp_path / "x[b" / "]")
    assert (code, err) == (0, "")
    assert "x[b/]" in out


def test_the_most_runs_that_have_diverged_are_told(capsys):
    """Not those at the last horizon, where fewer may be above their first loss."""
    steps = {0: torch.full((3,), 2.3), 5: torch.full((3,), 9.0), 10: torch.tensor([9.0, 1.0, 1.0])}
    run = OptimiserRun("baseline", {"train": steps, "test": steps}, steps[0], 0.0)
    cli._show(comparison.compare({"adam": run}, [5, 10]))
    assert "diverged runs: adam 3" in "".join(capsys.readouterr())
