"""Configs: typed, documented, and every mistake told in one line."""

import datetime
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2lopt import estimators
from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.experiments import build
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import Config, TrainConfig
from l2lopt.training.settings import UnrollSettings
from l2lopt.weights import files

RECIPE = configs.shipped("digits-coordinatewise.toml")


def test_the_recipe_builds():
    experiment = build.build(configs.load(RECIPE))
    assert sum(p.numel() for p in experiment.optimiser.cell.parameters()) == 3280
    assert experiment.config.name == "learned-lstm"


def test_the_demo_builds():
    experiment = build.build(configs.load(configs.demo()))
    assert sum(p.numel() for p in experiment.optimiser.parameters()) == 282
    assert experiment.config.name == "learned LSTM per tensor"


def test_a_config_survives_being_written(tmp_path):
    config = configs.load(RECIPE, ["unroll.length=7", "label='x'"])
    path = tmp_path / "config.toml"
    path.write_text(configs.dump(config))
    assert configs.load(path) == config


def test_every_field_is_documented():
    def check(model, path):
        for name, field in model.model_fields.items():
            assert field.description, f"{path}.{name}"
            if hasattr(field.annotation, "model_fields"):
                check(field.annotation, f"{path}.{name}")

    check(Config, "config")
    check(TrainConfig, "config")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("seed=3", lambda c: c.seed == 3),
        ("unroll.length=[2, 9]", lambda c: c.unroll.length == [2, 9]),
        ("optimiser.hidden_size = 5", lambda c: c.optimiser["hidden_size"] == 5),
        ("optimisee.activation=relu", lambda c: c.optimisee["activation"] == "relu"),
        ("unroll.targets.same=0.25", lambda c: c.unroll.targets.same == 0.25),
        ("meta.rate=1e-3", lambda c: c.meta.rate == 1e-3),
        ("device=cpu", lambda c: c.device == "cpu"),
    ],
)
def test_a_change_reaches_its_field(change, value):
    assert value(configs.load(RECIPE, [change]))


@pytest.mark.parametrize("key", ["train.patience", "train.average", "threads", "label"])
def test_an_optional_key_is_switched_off(key):
    """Which TOML cannot say, and a config that was given as an object has all its keys."""
    data = {"optimisee": "quadratic", "optimiser": "adam", "threads": 2, "label": "a"}
    config = configs.load({**data, "train": {"patience": 3, "average": 2}}, kind=TrainConfig)
    for source in (config, tomllib.loads(configs.dump(config))):
        changed = configs.load(source, [f"{key}=none"], kind=TrainConfig)
        found = {**changed.model_dump(), **changed.train.model_dump()}
        assert [name for name in ("patience", "average", "threads", "label") if found[name] is None] == [
            key.rpartition(".")[2]
        ]


def test_none_is_a_text_where_nothing_is_optional():
    changed = configs.load({"optimisee": "mlp"}, ["label='none'", "optimisee.norm=none"])
    assert (changed.label, changed.optimisee["norm"]) == ("none", "none")
    with pytest.raises(UserError, match="seed: expected a valid integer, found 'none'"):
        configs.load({"optimisee": "mlp"}, ["seed=none"])


def test_weights_take_the_place_of_a_named_rule():
    for optimiser in ("adam", {"name": "adam", "lr": 0.1}, {"weights": "ihc-lstm"}):
        data = {"optimisee": "quadratic", "optimiser": optimiser}
        changed = configs.load(data, ["optimiser.weights=lstm", "optimiser.lr=0.3"], kind=TrainConfig)
        assert changed.optimiser == {"weights": "lstm", "lr": 0.3}
    assert configs.load({"optimisee": "quadratic"}, ["optimiser.weights=lstm"]).optimiser == {"weights": "lstm"}


def test_a_run_of_a_runs_config_has_that_runs_name(tmp_path):
    assert configs.default_folder(Path("configs/demo.toml")) == Path("runs/demo")
    assert configs.default_folder(tmp_path / "mine" / "config.toml") == Path("runs/mine")
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match=r"expected a config file, found a run's folder; give .*config\.toml"):
        configs.find(tmp_path, "", "a config file")


def test_a_name_becomes_a_table_when_its_option_is_changed():
    config = configs.load({"optimisee": "mlp"}, ["optimisee.batch_size=16", "optimiser.cell=lstm"])
    assert config.optimisee == {"name": "mlp", "batch_size": 16}


def test_the_callers_mapping_is_left_alone():
    data = {"optimisee": {"name": "mlp"}, "unroll": {"targets": {"next": 1.0}}}
    configs.load(data, ["optimisee.batch_size=16", "unroll.targets.next=0.5", "seed=4"])
    assert data == {"optimisee": {"name": "mlp"}, "unroll": {"targets": {"next": 1.0}}}


MISTAKES = [
    ("unroll.lenght=3", r"unroll\.lenght: expected a known key, found 'lenght'; did you mean 'length'\?"),
    ("sede=3", r"sede: expected a known key, found 'sede'; did you mean 'seed'\?"),
    ("unroll.length=-3", r"unroll\.length: expected greater than 0 or a valid list, found -3"),
    ("unroll.length='x'", r"unroll\.length: expected a valid integer or a valid list, found 'x'"),
    ("unroll.length=[5, 2]", r"unroll\.length: expected the smaller number first, found \[5, 2\]"),
    ("unroll.length=[5, 2, 3]", r"unroll\.length: expected .* at most 2 items"),
    ("unroll.targets={next=0.0}", r"unroll\.targets: expected at least one weight above 0"),
    ("unroll.targets.next=-1.0", r"unroll\.targets\.next: expected greater than or equal to 0"),
    ("unroll.estimator.order=3", r"estimator 'backprop': order: expected 1 or 2, found 3"),
    ("unroll.estimator=tapped", r"estimator: expected a known name, found 'tapped'; did you mean 'taped'\?"),
    ("meta.updates=1.5", r"meta\.updates: expected a valid integer"),
    ("meta.updates=true", r"meta\.updates: expected a valid integer"),
    ("meta=3", r"meta: expected a .*, found 3"),
    ("optimiser=coordinatewize", r"optimiser: expected a known name, .*did you mean 'coordinatewise'\?"),
    (
        "optimiser={name='adam', lr=0.1}",
        r"optimiser: expected a known name, found 'adam'; choose one of coordinatewise",
    ),
    ("optimiser.cell=lstmm", r"cell: expected a known name, found 'lstmm'; did you mean 'lstm'\?"),
    ("optimiser.rule.step_sizes=1", r"step_sizes: expected a known key, .*did you mean 'step_size'\?"),
    ("optimiser.inputs=['rnnpropp']", r"input: expected a known name, .*did you mean 'rnnprop'\?"),
    ("optimiser.inputs=['log-and-sign']", r"inputs: expected rnnprop for this rule, found log-and-sign"),
    ("optimiser.inputs=['rnnprop', 'rnnprop']", r"inputs: expected each at most once"),
    ("optimiser.seed=3", r"optimiser 'coordinatewise': expected no seed here, found seed"),
    ("optimisee.device=cpu", r"optimisee 'mlp': expected no device here"),
    ("optimiser.hidden_size=0", r"cell: input_size: expected at least 1, found 0"),
    ("optimisee=mlpp", r"optimisee: expected a known name, found 'mlpp'; did you mean 'mlp'\?"),
    ("optimisee.hidden=20", r"optimisee 'mlp': hidden: expected a list, found 20"),
    ("optimisee.batch_size=100000", r"batch_size: expected from 1 to the 1300 training samples, found 100000"),
    ("optimisee={hidden=[3]}", r"optimisee: expected a table with the key 'name'"),
    ("evaluation.horizons=[5000]", r"evaluation\.horizons: expected at most 1000, found 5000"),
    ("evaluation.baselines=[{optimiser='adem', rates=[0.1]}]", r"optimiser: expected a known name, found 'adem'"),
    ("evaluation.baselines=[{optimiser='adam', rate=[0.1]}]", r"did you mean 'rates'\?"),
    ("evaluation.baselines=[{optimiser='adam', rates=[-0.1]}]", r"rates\.0: expected greater than 0, found -0\.1"),
    ("device=gpu", r"device: expected a device of this machine, found 'gpu'"),
    ("unroll.length", r"--set: expected KEY=VALUE, found 'unroll\.length'"),
    ("seed.x=3", r"--set: expected a table at 'seed', found 0"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[change for change, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line(change, message):
    with pytest.raises(UserError, match=message) as caught:
        build.build(configs.load(RECIPE, ["seed=0", change]))
    text = str(caught.value)
    assert "\n" not in text
    assert "expected" in text
    assert "found" in text
    assert "; " in text


def test_a_missing_section_is_told():
    with pytest.raises(UserError, match=r"optimisee: expected a value, found none; add the key"):
        configs.load({})


@pytest.mark.parametrize("content", [b"a = [\n", b"\xb8\xff", b"a = 1\na = 2\n"])
def test_a_file_that_is_not_toml_is_refused(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.toml: expected a TOML file"):
        configs.load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml: expected a config file, found nothing"):
        configs.load(tmp_path / "none.toml")


@given(st.text(max_size=60))
def test_any_text_is_a_config_or_a_user_error(text):
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    with pytest.raises(UserError):
        configs.load(data)


@given(st.text(max_size=40))
def test_any_change_is_made_or_refused(text):
    try:
        changed = configs.load({"optimisee": "mlp"}, [text])
    except UserError as error:
        told = str(error)
    else:
        told = changed.name
    assert "\n" not in told


@pytest.mark.parametrize("path", sorted(configs.shipped("").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_sound(path):
    """As far as it can be told without its data."""
    kind = TrainConfig if "train" in tomllib.loads(path.read_text(encoding="utf-8")) else Config
    config = configs.load(path, kind=kind)
    assert configs.load(tomllib.loads(configs.dump(config)), kind=kind) == config
    if kind is Config:
        assert build.ready_optimiser(config.optimiser).phi()
        registry.build(estimators.ESTIMATORS, "estimator", config.unroll.estimator)
        assert config.evaluation.checked_horizons()


def test_a_file_is_found_by_its_path_or_its_shipped_name(tmp_path):
    (tmp_path / "mine.toml").touch()
    assert configs.find(tmp_path / "mine.toml", "studies", "a study") == tmp_path / "mine.toml"
    assert configs.find("fig3", "studies", "a study") == configs.shipped("studies") / "fig3.toml"
    with pytest.raises(UserError, match=r"fig4: expected a study, found nothing; give its path, or one of .*fig3"):
        configs.find("fig4", "studies", "a study")


def test_an_optimiser_that_is_ready_is_one_of_ours_or_has_weights():
    assert files.digest(build.ready_optimiser({"weights": "lstm"})) == files.digest(files.load("lstm"))
    assert build.ready_optimiser({"name": "sgd", "lr": 0.5}).lr == 0.5
    with pytest.raises(UserError, match="expected a known key, found 'lr'"):
        build.ready_optimiser({"weights": "lstm", "lr": 3.0})
    with pytest.raises(UserError, match="did you mean 'adam'"):
        build.ready_optimiser("adm")


def test_a_change_begins_at_the_default_or_at_the_task_that_is_named():
    changed = configs.load({"optimisee": "digits-mlp-20-sigmoid"}, ["optimisee.batch_size=16"])
    assert changed.optimisee == configs.problem("digits-mlp-20-sigmoid") | {"batch_size": 16}
    nested = configs.load({"optimisee": "quadratic"}, ["unroll.estimator.block=8", "optimiser.hidden_size=3"])
    assert nested.unroll.estimator == {"name": UnrollSettings().estimator, "block": 8}
    assert nested.optimiser == {"name": "coordinatewise", "hidden_size": 3}
    assert configs.load({"optimisee": "quadratic"}, ["meta.imitation.runs=3"]).meta.imitation.runs == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"foreach": None}, "foreach: expected a plain value, found None; leave the key out"),
        ({"lr": torch.tensor(0.1)}, "lr: expected a plain value, found a Tensor; write a text, a number"),
        ({"betas": [0.9, None]}, "betas.1: expected a plain value, found None; leave"),
        ({"names": {"a"}}, "names: expected a plain value, found a set; write"),
        ({"rate": {"from": datetime.date(2020, 1, 1)}}, "rate.from: expected a plain value, found a date; write"),
        (
            {"shape": math.cos},
            "shape: expected a plain value, found a builtin_function_or_method; put it into a module",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_object_among_the_options_is_refused(option, message):
    """A run could not write it into its config, and would have its folder by then."""
    settings = {"optimisee": "quadratic", "optimiser": {"name": "torch.optim.Adam", "lr": 0.1, **option}}
    with pytest.raises(UserError, match=re.escape(f"config: optimiser.{message}")):
        configs.load(settings, kind=TrainConfig)


def test_a_tuple_and_a_field_that_is_none_are_taken():
    settings = {"optimisee": "quadratic", "label": None, "optimiser": {"name": "torch.optim.Adam", "betas": (0.8, 0.9)}}
    assert "betas = [" in configs.dump(configs.load(settings, kind=TrainConfig)).replace("\n", "")


def test_numbers_of_numpy_that_are_pythons_are_taken():
    """As of a sweep over `np.logspace`; whole ones, which no file could say, are refused in one line."""
    rate = np.logspace(-2, -1, 2)[0]
    config = configs.load({"optimisee": "quadratic", "optimiser": {"name": "sgd", "lr": rate}}, kind=TrainConfig)
    assert config.optimiser["lr"] == 0.01
    with pytest.raises(UserError, match=r"optimisee\.size: expected a plain value, found .*3"):
        configs.load({"optimisee": {"name": "quadratic", "size": np.int64(3)}})
