"""What must stay as it is to the byte while files and names move: texts, and the numbers of small runs.

`python tests/test_golden.py` writes `tests/golden` anew, for a change that is meant. The numbers of a run depend on the
processor and on PyTorch: they are kept with a key of both, and skipped where it differs; texts are compared everywhere.
Nothing here but the package's public names, the command line and the keys of configs.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import platform
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import l2lopt
from l2lopt import cli, terminal

GOLDEN = Path(__file__).with_name("golden")
CONFIGS = Path(__file__).parent.parent / "configs"
CELLS, RULES, ESTIMATORS = ("lstm", "ihc-lstm"), ("direction-and-magnitude", "gated"), ("blockwise", "taped", "es")
KINDS = [f"{estimator} {cell} {rule}" for estimator in ESTIMATORS for cell in CELLS for rule in RULES]
TINY = {
    "threads": 1,
    "optimisee": {"name": "mlp", "hidden": [4], "batch_size": 16},
    "optimiser": {"name": "coordinatewise", "hidden_size": 6},
    "unroll": {"length": 10, "truncation": 5, "targets": {"next": 0.5, "heldout": 0.5}},
    "meta": {"updates": 3, "warm_up": 1, "validate_every": 3},
    "validation": {"seeds": 1, "horizons": [5]},
    "evaluation": {
        "seeds": 2,
        "tuning_seeds": 2,
        "steps": 12,
        "horizons": [6, 12],
        "before_meta_training": False,
        "baselines": [{"optimiser": name, "rates": [0.01, 0.1]} for name in ("sgd", "adam")],
    },
}
RECIPE = ["meta.updates=3", "validation.horizons=[20]"]
"""The coordinatewise recipe's own network, rule and unrolls, with fewer updates and shorter validations."""

TYPER = (0, 29)
"""The release of typer whose help and answers were kept; older ones have other words."""

COMMANDS = ["demo", "meta-train", "evaluate", "train", "sample", "plot", "controls", "weights", "reproduce"]
CALLS = [
    ["weights"],
    ["weights", "coordinatewise-lstm"],
    ["weights", "ltsm"],
    ["meta-train", "none.toml"],
    ["meta-train", "tiny.toml", "--set", "unroll.lenght=3"],
    ["meta-train", "tiny.toml", "--set", "unroll.length=-3"],
    ["meta-train", "tiny.toml", "--set", "unroll.length"],
    ["meta-train", "tiny.toml", "--set", "optimiser.cell=ltsm"],
    ["meta-train", "tiny.toml", "--set", "optimiser.size=3"],
    ["meta-train", "tiny.toml", "--set", "optimisee.name=mpl"],
    ["meta-train", "tiny.toml", "--set", "unroll.estimator=tapd"],
    ["meta-train", "tiny.toml", "--set", "evaluation.horizons=[100]"],
    ["meta-train", "tiny.toml", "--seed", "-1"],
    ["train", "tiny.toml"],
    ["train", "training.toml", "--set", "optimiser.weights=ltsm"],
    ["evaluate", "nowhere"],
    ["plot", "nowhere"],
    ["sample", "nowhere"],
    ["reproduce", "fig4"],
    ["reproduce", "tiny.toml"],
    ["meta-train"],
    ["meta-train", "tiny.toml", "--sett", "a=1"],
    ["demoo"],
]
"""Texts and mistakes that cost next to nothing; all but the first two end in exit code 2."""
RUN = [
    ["meta-train", "tiny.toml", "--run", "run"],
    ["evaluate", "run"],
    ["plot", "run"],
    ["meta-train", "tiny.toml", "--run", "run"],
    ["train", "training.toml", "--run", "trained"],
]


# What is compared: each of these functions makes it anew.


def called(command):
    """What a command line prints on 120 columns, without colour or what differs from one machine to the next."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setenv("COLUMNS", "120")
        patch.setattr(terminal.console, "width", 120)
        patch.setattr(sys, "argv", ["l2lopt", *command])
        patch.setattr(sys.modules["__main__"], "__package__", None)  # or the help is that of `python -m pytest`
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    told = re.sub(r"  left \S+$", "", out.getvalue(), flags=re.MULTILINE)  # the time a stage still takes
    told = re.sub(r"\S+ \S+ free, (.*), about \S+ \S+$", r"…, \1", told, flags=re.MULTILINE)  # of a meta-gradient
    mistake = f"[error] {err.getvalue()}" if err.getvalue() else ""
    lines = "\n".join([f"$ {' '.join(['l2lopt', *command])}", told, mistake, f"[exit {code}]"]).splitlines()
    plain = (re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines)
    once = "backend auto: "  # said by the first command of a process alone
    return "".join(f"{line}\n" for line in plain if line and not line.startswith(once)) + "\n"


def said(folder):
    """What the command line says: file in `tests/golden` → text."""
    place(folder)
    parts = {
        "help.txt": [["--help"], *([command, "--help"] for command in COMMANDS)],
        "answers.txt": CALLS,
        "run.txt": RUN,
    }
    with contextlib.chdir(folder):
        return {name: "".join(map(called, commands)) for name, commands in parts.items()}


def place(folder):
    """Configs for command lines that name no folder of this machine."""
    (folder / "tiny.toml").write_text(toml(TINY), encoding="utf-8")
    training = {
        "optimisee": TINY["optimisee"],
        "optimiser": {"weights": "coordinatewise-lstm"},
        "train": {"steps": 5, "evaluate_every": 5},
    }
    (folder / "training.toml").write_text(toml({"threads": 1, **training}), encoding="utf-8")


def toml(table):
    """Tables of plain values as TOML: one key a line, tables inside a line."""
    return "".join(f"{key} = {inline(value)}\n" for key, value in table.items())


def inline(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + " }"
    return f"[{', '.join(map(inline, value))}]" if isinstance(value, list) else json.dumps(value)


class ResolvedError(Exception):
    """Raised by the first report: the resolved config is written by then."""


def resolved(path, folder):
    """A shipped config with every key written out, to be compared on a problem that needs no data set."""

    def stop(*_):
        raise ResolvedError

    run = l2lopt.train if "train" in tomllib.loads(path.read_text(encoding="utf-8")) else l2lopt.meta_train
    changes = ['optimisee={name="mlp",hidden=[1]}', 'device="cpu"']
    changes += ["mixed_with=[]"] if run is l2lopt.meta_train else []
    with pytest.raises(ResolvedError):
        run(path, folder, changes=changes, report=stop)
    return (folder / "config.toml").read_text(encoding="utf-8")


def shipped(folder):
    """Of every config, the digest of its resolved form."""
    return {path.stem: sha(resolved(path, folder / path.stem)) for path in sorted(CONFIGS.glob("*.toml"))}


def trained(kind, folder, **options):
    """What a meta-training of three updates leaves: φ after the last, the weights file's φ, and the figures."""
    estimator, cell, rule = kind.split()
    changes = [f"unroll.estimator={estimator}", f"optimiser.cell={cell}", f"optimiser.rule={rule}"]
    run = l2lopt.meta_train({**TINY, **options}, folder, changes=changes)
    return left(run)


def recipe(folder, changes=()):
    return left(l2lopt.meta_train(CONFIGS / "digits-coordinatewise.toml", folder, changes=changes))


def left(run):
    kept = load_file(run / "checkpoint.safetensors")
    last = {name.removeprefix("phi/"): value for name, value in kept.items() if name.startswith("phi/")}
    best = load_file(run / "optimiser.safetensors")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures = {
        name: [float(record[name]).hex() for record in records if name in record]
        for name in ("meta_loss", "gradient_norm", "score")
    }
    return {"last": hashed(last), "best": hashed(best), "shapes": shapes(best), **figures}


def evaluated(folder):
    """The CSV of that optimiser's free runs and of two baselines'."""
    result = l2lopt.evaluate(l2lopt.meta_train(TINY, folder))
    assert all(math.isfinite(row.loss) for row in result.rows)
    return (folder / "evaluation.csv").read_text(encoding="utf-8")


OPTIONS = {
    "plain": {},
    "all": {"fallback": "adam", "weight_decay": 0.01, "max_update": 0.02, "lr": 0.5},
    "bfloat16": {"state_dtype": "bfloat16"},
}


def stepped(cell, options):
    """A small model after ten steps of a coordinatewise rule in `LearnedOptimizer`, and the optimiser's state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = l2lopt.LearnedOptimizer(model.named_parameters(), f"coordinatewise-{cell}", **OPTIONS[options])
    inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step(loss=loss)
    state = {
        f"{number}/{key}": torch.as_tensor(value)
        for number, own in optimizer.state_dict()["state"].items()
        for key, value in own.items()
    }
    return {"params": hashed(dict(model.named_parameters())), "state": hashed(state), "shapes": shapes(state)}


# How it is kept.


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def hashed(tensors):
    """SHA-256 of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def shapes(tensors):
    """To be read where a hash differs."""
    return {name: str(list(value.shape)) for name, value in sorted(tensors.items())}


def machine():
    """What the last bits of a number depend on; the last entry is what this processor makes of PyTorch alone."""
    source = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 33, generator=source), torch.randn(33, 20, generator=source)
    values = {"product": a @ b, "exp": a.exp(), "tanh": a.tanh(), "log": a.abs().log(), "mean": a.square().mean()}
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "arithmetic": hashed(values)[:16],
    }


def layout():
    """What the layout of the help depends on."""
    return {name: version(name) for name in ("typer", "rich")}


def kept(name):
    text = (GOLDEN / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else text


def write(name, value):
    text = value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True) + "\n"
    (GOLDEN / name).write_text(text, encoding="utf-8")


def words(text):
    """A help's words, without boxes and the breaks of its lines."""
    return " ".join(re.sub("[─-╿]", " ", text).split())


@pytest.fixture
def numbers():
    """The numbers that were kept, where they can be compared, on one thread."""
    found, own = kept("numbers.json"), machine()
    other = [f"{key} {found['machine'][key]}, here {own[key]}" for key in own if found["machine"][key] != own[key]]
    if other:
        pytest.skip(f"the numbers were kept on another machine: {'; '.join(other)}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield found
    torch.set_num_threads(before)


# The tests.


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return said(tmp_path_factory.mktemp("printed"))


def check_text(name, text):
    if (own := tuple(map(int, version("typer").split(".")[:2]))) < TYPER:
        pytest.skip(f"the texts are those of typer {TYPER[0]}.{TYPER[1]}, here {own[0]}.{own[1]}")
    if kept("layout.json") == layout():
        assert text == kept(name)
    else:
        assert words(text) == words(kept(name))


def test_the_help(printed):
    check_text("help.txt", printed["help.txt"])


def test_answers_and_mistakes(printed):
    check_text("answers.txt", printed["answers.txt"])


def test_a_shipped_config(tmp_path):
    assert resolved(CONFIGS / "digits-coordinatewise.toml", tmp_path) == kept("recipe.toml")


@pytest.mark.slow
@pytest.mark.skipif("L2LOPT_DATA" not in os.environ, reason="needs L2LOPT_DATA: what a config is trained_on is read")
def test_the_shipped_configs(tmp_path):
    assert shipped(tmp_path) == kept("configs.json")


@pytest.mark.parametrize("kind", KINDS)
def test_a_meta_training_of_three_updates(tmp_path, numbers, kind):
    assert trained(kind, tmp_path / "run") == numbers["meta-training"][kind]


@pytest.mark.slow
def test_on_two_threads_it_is_the_same(tmp_path, numbers):
    """In blocks, which are shared out whole; elsewhere PyTorch's own sums depend on the number of threads."""
    kind = "blockwise lstm direction-and-magnitude"
    assert trained(kind, tmp_path / "run", threads=2) == numbers["meta-training"][kind]


def test_the_recipes_first_updates(tmp_path, numbers):
    assert recipe(tmp_path / "run", RECIPE) == numbers["recipe"]


@pytest.mark.slow
def test_the_recipes_weights(tmp_path, numbers):
    assert recipe(tmp_path / "run") == numbers["whole recipe"]


def test_an_evaluation(tmp_path, numbers):
    assert evaluated(tmp_path / "run") == kept("evaluation.csv")


def test_a_run_by_the_command_line(numbers, printed):
    check_text("run.txt", printed["run.txt"])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_ten_steps(numbers, cell, options):
    assert stepped(cell, options) == numbers["steps"][f"{cell} {options}"]


def write_all(folder, whole):
    """Writes `tests/golden` anew; the whole recipe, which takes minutes, only where it is asked for."""
    torch.set_num_threads(1)
    GOLDEN.mkdir(exist_ok=True)
    before = kept("numbers.json").get("whole recipe") if (GOLDEN / "numbers.json").exists() else None
    write("layout.json", layout())
    for name, text in said(folder).items():
        write(name, text)
    write("recipe.toml", resolved(CONFIGS / "digits-coordinatewise.toml", folder / "resolved"))
    write("configs.json", shipped(folder / "configs"))
    write("evaluation.csv", evaluated(folder / "evaluated"))
    steps = {f"{cell} {options}": stepped(cell, options) for cell in CELLS for options in OPTIONS}
    numbers = {
        "machine": machine(),
        "meta-training": {kind: trained(kind, folder / kind) for kind in KINDS},
        "steps": steps,
        "recipe": recipe(folder / "recipe", RECIPE),
        "whole recipe": recipe(folder / "whole recipe") if whole else before,
    }
    write("numbers.json", numbers)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as temporary:
        write_all(Path(temporary), "--whole" in sys.argv)
