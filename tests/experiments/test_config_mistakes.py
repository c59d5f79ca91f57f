"""Mistakes in configs and sizes that no machine can hold: one line, before any work."""

import re

import pytest

import l2lopt
from l2lopt import cells, terminal
from l2lopt.core import memory
from l2lopt.core.environment import whole_number
from l2lopt.core.errors import UserError
from l2lopt.experiments import benchmark, build, comparison_study
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import Config, TrainConfig
from l2lopt.parallel import processes
from l2lopt.parallel.jobs import LONGEST, slug
from l2lopt.report import figures, style
from l2lopt.storage import toml_file
from l2lopt.training.train import TrainSettings, train
from optimisees import quadratic

from test_cli import RECIPE, called  # isort: skip

QUADRATIC = {"optimisee": {"name": "quadratic", "size": 3}, "threads": 1}
TRAINED = {**QUADRATIC, "optimiser": "adam"}
LARGE = 10**9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "optimiser={name='coordinatewise', cell='ihc-lstm', hidden_size=0}",
            "cell: input_size: expected at least 1, f",
        ),
        ("optimiser={name='coordinatewise', cell='ihc-lstm', hidden_size=-1}", "cell: input_size: expected at least 1"),
        ("optimiser={name='coordinatewise', cell='builtins:list'}", "cell 'builtins:list': "),
        (
            "optimiser={name='coordinatewise', inputs=['builtins:list']}",
            "input 'builtins:list': expected an Input, found",
        ),
        (
            "unroll.estimator='builtins:list'",
            "estimator 'builtins:list': expected a MetaGradientEstimator, found a list",
        ),
        ("optimiser={name={name='adam'}}", r"optimiser\.name: expected a text, found \{'name': 'adam'\}"),
        ("optimisee.dtype='/'", "dtype: expected 'float32' or 'float64', found '/'"),
        (
            "meta.updates=1" + 400 * "0",
            r"meta\.updates: expected a whole number from -2\^63 to 2\^63 - 1, found one of 1329 bits",
        ),
        ("seed=-9223372036854775809", r"seed: expected a whole number from -2\^63 to 2\^63 - 1, found one of 64 bits"),
        ("unroll.scaling=inf", r"unroll\.scaling: expected a finite number, found inf"),
        (
            "optimiser={name='coordinatewise', head_scale=nan}",
            r"optimiser\.head_scale: expected a finite number, found nan",
        ),
        (f"meta.batch={LARGE}", f"meta.batch = {LARGE}: expected at most .* of memory, found a need of .* GB; choose"),
        (f"validation.seeds={LARGE}", f"validation.seeds = {LARGE}: expected at most .* of memory"),
        (f"evaluation.seeds={LARGE}", f"evaluation.seeds = {LARGE}: expected at most .* of memory"),
        (f"evaluation.tuning_seeds={LARGE}", f"evaluation.tuning_seeds = {LARGE}: expected at most .* of memory"),
        (f"unroll.estimator={{name='es', pairs={LARGE}}}", f"pairs = {LARGE}: expected at most .* of memory"),
        (f"unroll.estimator={{name='mixed', evolution={{name='es', pairs={LARGE}}}}}", "expected at most .* of memory"),
        (f"unroll={{length={LARGE}, estimator='backprop'}}", f"unroll: steps = {LARGE}: expected at most .* of memory"),
        (f"optimiser={{name='coordinatewise', hidden_size={LARGE}}}", "cell 'lstm': expected at most .* of memory"),
        (
            f"optimiser.cell={{name='stacked', layers={LARGE}}}",
            f"stacked: layers: expected from 1 to .*, found {LARGE}",
        ),
        (f"optimisee={{name='mlp', hidden=[{LARGE}]}}", "optimisee 'mlp': expected at most .* of memory"),
        (
            f"optimisee={{name='transformer', layers={LARGE}}}",
            f"transformer: layers: expected from 1 to .*, found {LARGE}",
        ),
        (f"optimisee={{name='language-model', layers={LARGE}}}", f"layers: expected from 1 to .*, found {LARGE}"),
        (f"optimisee={{name='draw', steps={LARGE}}}", f"draw: steps: expected from 1 to .*, found {LARGE}"),
        (f"optimisee={{name='resnet', blocks=[{LARGE}]}}", f"resnet: blocks: expected from 1 to .*, found {LARGE}"),
        ("label=" + "[" * 100 + "]" * 100, "expected at most 32 levels of tables, found more"),
        ("label=\ud800", r"label: expected a text in UTF-8, found '\\ud800'"),
        ("seed=1\nlabel='b'", r"--set: expected one KEY=VALUE, found several values: "),
    ],
)
def test_a_mistake_is_told_before_any_work(monkeypatch, change, message):
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**9)
    with pytest.raises(UserError, match=message) as caught:
        build.build(configs.load(QUADRATIC, [change]))
    assert str(caught.value).isprintable()


READERS = {
    "train": lambda path: configs.load(path, kind=TrainConfig),
    "meta-train": configs.load,
    "reproduce": comparison_study.load,
    "benchmark": benchmark.load_suite,
}
SHIPPED = [path for path in sorted(configs.shipped("").rglob("*.toml")) if path.name != "tasks.toml"]
"""All files of configs/ but the catalogue of tasks, which no command reads."""


def command_of(path):
    if path.parent.name in ("studies", "suites"):
        return {"studies": "reproduce", "suites": "benchmark"}[path.parent.name]
    return "train" if "\n[train]\n" in path.read_text(encoding="utf-8") else "meta-train"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_file_is_read_by_its_own_command_and_named_by_the_others(path):
    own = command_of(path)
    READERS[own](path)
    for other in READERS.keys() - {own}:
        with pytest.raises(UserError, match=f"expected a .*, found a .*; use l2lopt {own}$"):
            READERS[other](path)


def test_the_name_of_weights_in_the_place_of_a_rules_has_a_remedy():
    message = r"optimiser: expected the name of an optimiser, found the weights 'lstm'; write \{weights='lstm'\}"
    for built in (
        lambda: build.build(configs.load(QUADRATIC, ["optimiser=lstm"])),
        lambda: build.build_training(configs.load(TRAINED, ["optimiser.name=lstm"], kind=TrainConfig)),
        lambda: build.ready_optimiser("lstm"),
    ):
        with pytest.raises(UserError, match=message):
            built()


@pytest.mark.parametrize("key", ["meta.batch", "validation.seeds"])
def test_a_comparison_needs_no_memory_for_meta_training(monkeypatch, key):
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**9)
    build.build(configs.load(QUADRATIC, [f"{key}={LARGE}"]), meta_training=False)


def test_a_comparison_needs_memory_for_its_runs(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**9)
    with pytest.raises(UserError, match=rf"evaluation\.seeds = {LARGE}: expected at most .* of memory"):
        build.build(configs.load(QUADRATIC, [f"evaluation.seeds={LARGE}"]), meta_training=False)


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_an_option_that_is_not_finite_is_refused(key, value):
    with pytest.raises(UserError, match=rf"optimiser\.{key}: expected a finite number, found {value}"):
        configs.load(TRAINED, [f"optimiser={{name='adam', {key}={value}}}"], kind=TrainConfig)


def test_no_limit_of_the_meta_gradient_stays_a_value():
    config = configs.load(QUADRATIC, ["meta.clip=inf"])
    assert config.meta.clip == float("inf")
    assert "clip = inf" in configs.dump(config)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfseed = 3\n", b"seed = 3\r\n"])
def test_a_byte_order_mark_and_other_ends_of_lines_are_read(tmp_path, content):
    (tmp_path / "a.toml").write_bytes(content + b"optimisee = 'quadratic'\n")
    assert configs.load(tmp_path / "a.toml").seed == 3


@pytest.mark.parametrize(
    "content", ["a = " + "[" * 100_000, "a = " + "{b=" * 5_000, "seed = " + "9" * 5_000, "a = [" * 40]
)
def test_a_bomb_is_refused_by_the_files_name(tmp_path, content):
    (tmp_path / "bomb.toml").write_text(content)
    for load in (configs.load, comparison_study.load):
        with pytest.raises(UserError, match=r"bomb\.toml: expected a TOML file, found"):
            load(tmp_path / "bomb.toml")


LABELS = ["a\\b", "a\tb", "'\"", "'''\"\"\"", "a\nb", "\x1b[31m", "$a$ $", "é\u202e", "  a ", "=", "#", "[x]", "a\r\nb"]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_arrives_as_it_is(label, tmp_path):
    config = configs.load(QUADRATIC, [toml_file.assignment("label", label)])
    assert config.label == label
    (tmp_path / "a.toml").write_text(configs.dump(config), encoding="utf-8", newline="")
    assert configs.load(tmp_path / "a.toml").label == label


def test_a_studys_label_arrives_in_the_runs_config(tmp_path):
    from l2lopt.experiments.comparison_jobs import Job, StudyLocation, config_of

    (tmp_path / "recipe.toml").write_text("optimisee = 'quadratic'\n")
    problems = [{"label": "p"}]
    table = {"problems": problems, "optimisers": [{"label": LABELS[2] + LABELS[0], "config": "recipe.toml"}]}
    study = comparison_study.Study.model_validate(table)
    location = StudyLocation(study, str(tmp_path / "s.toml"), str(tmp_path), ())
    assert config_of(location, Job(0, 0, 0)).label == LABELS[2] + LABELS[0]


@pytest.mark.parametrize("label", ["$a^$ \\b $", "\x1b[31m\x00"])
def test_a_plot_takes_any_name(label, tmp_path):
    curves = {"train": (figures.np.array([1.0, 2.0]), figures.np.array([2.0, 1.0])), label: (figures.np.ones(1),) * 2}
    for path in figures.training_curve(curves, tmp_path, title=label):
        assert path.stat().st_size > 0
    assert style.shown("a $x^$ b") == r"a \$x^\$ b"


LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--run", LONG],
        ["meta-train", LONG],
        ["meta-train", "small.toml", "--run", LONG],
        ["evaluate", LONG],
        ["train", LONG],
        ["train", "train.toml", "--run", LONG],
        ["train", "train.toml", "--set", f"optimiser={{weights='{LONG}'}}"],
        ["train", "train.toml", "--set", f"optimisee={{name='mlp', dataset='{LONG}'}}"],
        ["train", "train.toml", "--set", f"optimisee={{name='language-model', data={{name='files', train='{LONG}'}}}}"],
        ["train", "train.toml", "--set", "optimisee={name='mlp', dataset='mnist'}", "--data", LONG],
        ["sample", LONG],
        ["plot", LONG],
        ["weights", LONG],
        ["reproduce", LONG],
        ["reproduce", "study.toml", "--run", LONG],
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_a_name_that_is_too_long_ends_in_one_line(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.setenv("L2LOPT_DATA", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text("optimisee = 'quadratic'\n")
    (tmp_path / "train.toml").write_text("optimisee = 'quadratic'\noptimiser = 'torch.optim.Adam'\ntrain.steps = 1\n")
    (tmp_path / "study.toml").write_text("config = 'train.toml'\nruns = [{label = 'a'}]\n")
    code, _, err = called(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("l2lopt: ")


def test_a_long_label_becomes_a_folders_name():
    names = {slug("é" * count) for count in (90, 5000, 5001)}
    assert len(names) == 3
    assert all(len(name.encode()) <= LONGEST for name in names)
    assert slug("é" * 90) == "é" * 90


@pytest.mark.parametrize("value", ["zzz", "", "0", "-1", "1.5", "٣", "9" * 5000])
def test_a_number_of_torchruns_that_is_none_is_named(monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(UserError, match="WORLD_SIZE: expected a whole number above 0"):
        processes.alone("train")
    with pytest.raises(UserError, match="WORLD_SIZE: expected a whole number above 0"), processes.together():
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert whole_number("WORLD_SIZE", 1) == 2


def test_half_of_what_torchrun_sets_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("RANK", raising=False)
    message = r"distributed: expected what torchrun sets, found .*RANK"
    with pytest.raises(UserError, match=message), processes.together():
        pass


def test_ten_thousand_million_steps_begin_at_once():
    """The steps of the evaluations are not listed beforehand."""

    class StoppedError(Exception):
        pass

    def stop(*_):
        raise StoppedError

    settings = TrainSettings(steps=10**10, evaluate_every=1, checkpoint_every=10**9)
    built = build.build_training(configs.load(TRAINED | {"optimiser": "torch.optim.Adam"}, kind=TrainConfig))
    with pytest.raises(StoppedError):
        train(quadratic.Quadratic(3), built.factory, settings, report=stop)


def test_where_the_machine_does_not_tell_its_memory_nothing_is_refused(monkeypatch):
    """On Windows there is no `os.sysconf`, and no /proc."""
    monkeypatch.delattr(memory.os, "sysconf")

    def no_proc(*args, **options):
        raise FileNotFoundError(args[0])

    monkeypatch.setattr("builtins.open", no_proc)
    monkeypatch.setattr(memory, "_allowed", lambda: float("inf"))
    assert memory.available_memory(memory.torch.device("cpu")) == memory.sys.maxsize
    memory.check_need("x", 10**15)


def test_a_tensor_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 2**27)
    torch, new = memory.torch, memory.torch.zeros(1)
    makers = [lambda n: torch.empty(n, n), lambda n: torch.zeros((n, n)), lambda n: torch.randn(size=(n, n))]
    makers += [lambda n: torch.full((n, n), 1.0), lambda n: new.new_zeros(n, n), lambda n: new.new_full((n, n), 1.0)]
    for make in makers:
        with memory.watched("it"):
            assert make(3).shape == (3, 3)
        message = r"it: expected at most 0\.1 GB of memory, found a need of 1\.6 GB"
        with pytest.raises(UserError, match=message), memory.watched("it"):
            make(20_000)
        with pytest.raises(UserError, match="it: expected sizes of at least 0, found -1"), memory.watched("it"):
            make(-1)
    with pytest.raises(UserError, match="cell: hidden_size: expected at least 1, found 0"):
        cells.make("ihc-lstm", input_size=3, hidden_size=0)


FOREIGN = ["a[/b]c", "[red]x[/red]", "\x1b]0;owned\x07", "\u202e", "[/]", "a\x9b31mb"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_header_does_not_act_on_the_terminal(tmp_path, monkeypatch, capsys, text):
    line = {"optimiser": text, "split": "train", "horizon": 3, "mean": 0.5, "kind": text}
    path = tmp_path / f"{text.replace('/', '-')}.safetensors"
    rule = l2lopt.optimisers.make("coordinatewise", hidden_size=2)
    l2lopt.save(rule, path, {"comparisons": {text: [line]}, "meta_updates": 3})
    monkeypatch.setattr(terminal.console, "width", 200)
    code, out, err = called(monkeypatch, capsys, "weights", path)
    assert (code, err) == (0, "")
    assert all(c.isprintable() or c == "\n" for c in re.sub(r"\x1b\[[0-9;]*m", "", out))
    assert "3 meta-updates" in out
    shown = text if text.isprintable() else text[0].encode("unicode_escape").decode()
    assert shown in out


@pytest.mark.parametrize(
    "training", [{"meta_updates": "many"}, {"comparisons": 3}, {"comparisons": {"a": [{}]}}, {"seconds": []}]
)
def test_facts_of_other_types_are_refused_by_name(tmp_path, monkeypatch, capsys, training):
    l2lopt.save(l2lopt.optimisers.make("coordinatewise", hidden_size=2), tmp_path / "odd.safetensors", training)
    code, _, err = called(monkeypatch, capsys, "weights", tmp_path / "odd.safetensors")
    assert (code, err.count("\n")) == (2, 1)
    assert "odd.safetensors: expected facts of a meta-training" in err


def test_the_device_of_the_command_line_arrives_as_it_is(monkeypatch, capsys):
    code, _, err = called(monkeypatch, capsys, "meta-train", RECIPE, "--device", 'cpu"\nseed = 3 #')
    assert code == 2
    assert "expected a device of this machine" in err
    assert Config.model_fields["device"].default == "cpu"


@pytest.mark.parametrize("text", ["at 10:100:30, :key:", "3\u00a0€, 東京\u3000大阪, می\u200cخواهم"])
def test_a_text_is_shown_as_it_is(capsys, text):
    terminal.say(text)
    assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize("name", ["hpu", "lazy", "cuda:77", "nowhere"])
def test_a_device_that_is_not_there_is_one_line(name):
    with pytest.raises(UserError, match="device: expected a device of this machine, found"):
        build.device(name)
