"""The catalogue of tasks and the suites: mistakes in one line, tasks that can be built, splits that share nothing."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.evaluation import suites
from l2lopt.evaluation.free_runs import run_free
from l2lopt.evaluation.suites import Competitor, Suite, Task
from l2lopt.experiments import config as configs
from l2lopt.optimisee import Optimisee
from optimisees import parametric

FOLDER = Path(__file__).parents[2] / "configs" / "suites"
CATALOGUE = suites.load_catalogue(FOLDER / "tasks.toml")
QUADRATIC = {"name": "quadratic", "size": 2}
SMALL = {
    "families": {"bowls": "meta-training", "valleys": "held-out"},
    "tasks": {
        "bowl-2": {"family": "bowls", "optimisee": QUADRATIC, "short": 1, "medium": 2, "long": 3},
        "valley-2": {"family": "valleys", "optimisee": "rosenbrock", "short": 1, "medium": 2, "long": 3},
    },
}


def written(folder: Path, data: dict) -> Path:
    path = folder / "tasks.toml"
    path.write_text(tomli_w.dumps(data), encoding="utf-8")
    return path


@cache
def built(name: str) -> Optimisee:
    return optimisees.build(CATALOGUE.tasks[name].optimisee)


# What the held-out families must not share. A new optimisee needs its line here.

ARCHITECTURE = {
    "logistic-regression": "linear",
    "mlp": "perceptron",
    "autoencoder": "perceptron",
    "parametric-mlp": "perceptron",
    "convnet": "convolutional",
    "resnet": "convolutional",
    "parametric-convnet": "convolutional",
    "transformer": "transformer",
    "vit": "transformer",
    "parametric-language": "transformer",
    "language-model": "recurrent",
    "sequence-labelling": "recurrent",
    "sequence-metric": "recurrent",
    "draw": "recurrent",
    "matrix-factorisation": "bilinear",
    "quadratic": "quadratic",
    "rosenbrock": "rosenbrock",
}
DATA_BY_DEFAULT = {
    "logistic-regression": "digits",
    "mlp": "digits",
    "autoencoder": "mnist",
    "convnet": "digits",
    "resnet": "cifar10",
    "vit": "cifar10",
    "draw": "mnist",
    "transformer": "ptb",
    "language-model": "ptb",
    "sequence-labelling": "har",
    "sequence-metric": "har",
    "parametric-language": "artificial",
}


def shares(choice) -> tuple[str, set[str]]:
    """The architecture family of an optimisee, and the data sets that its samples come from."""
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = options["name"]
    if name == "augmented":
        return shares(options["optimisee"])
    if name in ("parametric-mlp", "parametric-convnet"):  # all that any draw could be of
        return ARCHITECTURE[name], set(options.get("datasets", parametric.DATASETS))
    data = options.get("dataset", options.get("data")) if name != "sequence-metric" else None
    data = data["name"] if isinstance(data, dict) else data
    found = data or DATA_BY_DEFAULT.get(name)
    return ARCHITECTURE[name], {found} if found else set()


def test_held_out_families_share_neither_data_nor_architecture_with_the_others():
    architectures, data = {True: set(), False: set()}, {True: set(), False: set()}
    for task in CATALOGUE.tasks.values():
        held_out = CATALOGUE.families[task.family] == "held-out"
        architecture, samples = shares(task.optimisee)
        architectures[held_out].add(architecture)
        data[held_out] |= samples
    assert not architectures[True] & architectures[False]
    assert not data[True] & data[False]
    assert data[True] >= {"har", "ptb"}
    assert set(ARCHITECTURE) == set(optimisees.OPTIMISEES) - {"augmented"}


def test_the_rule_sees_what_is_shared():
    assert shares({"name": "augmented", "optimisee": {"name": "mlp", "dataset": "mnist"}}) == ("perceptron", {"mnist"})
    assert shares({"name": "transformer", "data": {"name": "ptb", "unit": "character"}}) == ("transformer", {"ptb"})
    assert shares("draw") == ("recurrent", {"mnist"})
    assert shares({"name": "parametric-mlp", "draw": 3})[1] == {"digits", "mnist", "cifar10"}


def test_the_catalogue_is_large_and_each_family_has_tasks():
    assert len(CATALOGUE.tasks) >= 40
    assert {task.family for task in CATALOGUE.tasks.values()} == set(CATALOGUE.families)
    assert {*CATALOGUE.families.values()} == {"meta-training", "validation", "held-out"}


def test_no_task_comes_twice():
    said = [repr(task.optimisee) for task in CATALOGUE.tasks.values()]
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("name", [name for name, task in CATALOGUE.tasks.items() if task.needs is None])
def test_tasks_that_need_no_files_are_built_without_any(name, monkeypatch):
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    assert next(iter(built(name).evaluation_batches("heldout", 0)))[1] >= 1


@pytest.mark.parametrize("name", [name for name, task in CATALOGUE.tasks.items() if task.needs is not None])
def test_tasks_that_need_files_say_so(name, monkeypatch):
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    with pytest.raises(UserError, match="L2LOPT_DATA"):
        optimisees.build(CATALOGUE.tasks[name].optimisee)
    assert shares(CATALOGUE.tasks[name].optimisee)[1] >= {CATALOGUE.tasks[name].needs}


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE.tasks)
def test_every_task_runs_with_several_seeds_side_by_side(name):
    """Two steps of two runs: the losses of each row are those of its run by itself, where rates are chosen as well."""
    task = CATALOGUE.tasks[name]
    if not suites.has_data(task):
        pytest.skip(f"{task.needs} is not under L2LOPT_DATA")
    made = built(name)
    splits = ("heldout", "test")
    rows = run_free(optimisers.make("adamw", lr=1e-3), made, [3, 4], [0, 2], splits, fit="inner")
    assert all(losses.isfinite().all() for losses in rows.losses.values())
    single = run_free(optimisers.make("adamw", lr=1e-3), made, [4], [0, 2], splits, fit="inner")
    for split in splits:
        torch.testing.assert_close(rows.losses[split][:, 1:], single.losses[split], rtol=1e-3, atol=1e-4)
    built.cache_clear()


# The files' mistakes.

MISTAKES = [
    (("tasks", "bowl-2", "family"), "bowl", r"tasks\.bowl-2\.family: expected one of the families, found 'bowl'; did"),
    (("tasks", "bowl-2", "short"), 0, r"tasks\.bowl-2\.short: expected greater than 0, found 0"),
    (("tasks", "bowl-2", "short"), 9, r"tasks\.bowl-2: expected budgets that rise"),
    (("tasks", "bowl-2", "medum"), 9, r"tasks\.bowl-2\.medum: expected a known key.*did you mean 'medium'"),
    (("tasks", "bowl-2", "needs"), "mnits", r"tasks\.bowl-2\.needs: expected 'cifar10', .*'mnist'"),
    (("tasks", "Bowl 2"), SMALL["tasks"]["bowl-2"], r"tasks\.Bowl 2.*: expected string should match"),
    (("families", "bowls"), "test", r"families\.bowls: expected 'meta-training', 'validation' or 'held-out'"),
    (("family",), {}, r"family: expected a known key.*did you mean 'families'"),
    (("tasks",), {}, r"tasks: expected dictionary should have at least 1 item"),
]


@pytest.mark.parametrize(("keys", "value", "said"), MISTAKES)
def test_mistakes_in_a_catalogue_name_their_key(keys, value, said, tmp_path):
    data = tomllib.loads(tomli_w.dumps(SMALL))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    with pytest.raises(UserError, match=said):
        suites.load_catalogue(written(tmp_path, data))


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml: expected a catalogue of tasks, found nothing"):
        suites.load_catalogue(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("tasks = ")
    with pytest.raises(UserError, match=r"broken\.toml: expected a TOML file"):
        suites.load_catalogue(tmp_path / "broken.toml")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    field=st.sampled_from([*Task.model_fields, "other"]),
    value=VALUES,
    name=st.sampled_from(["bowl-2", "valley-2"]) | st.text(max_size=4),
)
def test_any_value_of_a_task_is_read_or_refused_in_one_line(field, value, name, tmp_path_factory):
    tasks = {**SMALL["tasks"], name: {**SMALL["tasks"].get(name, SMALL["tasks"]["bowl-2"]), field: value}}
    try:
        path = written(tmp_path_factory.getbasetemp(), {**SMALL, "tasks": tasks})
    except (TypeError, AttributeError, UnicodeEncodeError):  # what TOML cannot say, such as nothing
        return
    try:
        found, error = suites.load_catalogue(path), None
    except UserError as refusal:
        found, error = None, str(refusal)
    if found is None:
        assert "\n" not in error
        assert str(path) in error
    else:
        assert getattr(found.tasks[name], field) == value


# What a suite chooses.


def test_a_suite_names_tasks_families_and_splits():
    few = suites.Catalogue.model_validate(SMALL)
    assert list(suites.selected(["valley-2", "bowl-2", "valley-2"], few)) == ["valley-2", "bowl-2"]
    assert list(suites.selected(["family:bowls"], few)) == ["bowl-2"]
    assert list(suites.selected(["split:held-out", "split:meta-training"], few)) == ["valley-2", "bowl-2"]
    assert list(suites.selected(["split:validation"], few)) == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("bowl-3", "tasks: expected a task of the catalogue.*did you mean 'bowl-2'"),
        ("family:bowl", "family: expected a family of the catalogue.*did you mean 'bowls'"),
        ("split:heldout", "split: expected a split of families.*did you mean 'held-out'"),
        ("splits:held-out", "tasks: expected a task"),
    ],
)
def test_an_unknown_name_is_refused(entry, said):
    with pytest.raises(UserError, match=said):
        suites.selected([entry], suites.Catalogue.model_validate(SMALL))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("budget='medum'", "budget: expected 'short', 'medium' or 'long', found 'medum'"),
        ("seeds=0", "seeds: expected greater than 0, found 0"),
        ("seed=3", "seed: expected a known key, found 'seed'; did you mean 'seeds'"),
        ("tasks=[]", "tasks: expected list should have at least 1 item"),
        (
            "competitors=[{optimiser='adam', rates=[0.1], league=['tuned']}]",
            "competitors.0.league: expected a known key.*did you mean 'leagues'",
        ),
        (
            "competitors=[{optimiser='adam', rates=[0.1], leagues=['tune']}]",
            "competitors.0.leagues.0: expected 'untuned', 'self-tuned' or 'tuned', found 'tune'",
        ),
        (
            "competitors=[{optimiser='adam', rates=[]}]",
            "competitors.0.rates: expected list should have at least 1 item",
        ),
        (
            "competitors=[{optimiser='adam', rates=[0.1], untuned=0.0}]",
            "competitors.0.untuned: expected greater than 0",
        ),
    ],
)
def test_mistakes_in_a_suite_name_their_key(change, said):
    with pytest.raises(UserError, match=said):
        configs.load(FOLDER / "smoke.toml", [change], kind=Suite)


def test_data_are_looked_for_by_their_folders(tmp_path, monkeypatch):
    free, needy = (Task(family="x", optimisee="mlp", short=1, medium=1, long=1, needs=data) for data in (None, "har"))
    monkeypatch.setenv("L2LOPT_DATA", str(tmp_path))
    assert suites.has_data(free)
    assert not suites.has_data(needy)
    (tmp_path / "UCI HAR Dataset").mkdir()
    assert suites.has_data(needy)
    monkeypatch.delenv("L2LOPT_DATA")
    assert not suites.has_data(needy)
    assert suites.has_data(free)


SHIPPED = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "tasks")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_suites_choose_tasks_of_the_catalogue(name):
    suite = configs.load(FOLDER / f"{name}.toml", kind=Suite)
    tasks = suites.selected(suite.tasks, CATALOGUE)
    assert len(tasks) >= 4
    named = [one.name for one in suite.competitors]
    assert len(set(named)) == len(named)
    for one in suite.competitors:
        assert "tuned" not in one.leagues or len(one.rates) >= 5, "a grid that is worth the name"
        assert "untuned" not in one.leagues or one.untuned is not None
        choice = {"name": one.optimiser} if isinstance(one.optimiser, str) else one.optimiser
        third_party = re.fullmatch(r"(?!torch)\w+:\w+", str(choice.get("name")))
        if "weights" not in choice and not third_party:
            one.check(optimisees.make("quadratic"))


def test_the_full_suite_has_every_task():
    suite = configs.load(FOLDER / "full.toml", kind=Suite)
    assert set(suites.selected(suite.tasks, CATALOGUE)) == set(CATALOGUE.tasks)


def test_the_smoke_suite_needs_no_files_and_no_package():
    suite = configs.load(FOLDER / "smoke.toml", kind=Suite)
    assert all(task.needs is None for task in suites.selected(suite.tasks, CATALOGUE).values())
    assert not any(":" in one.name for one in suite.competitors)


def test_competitors_are_named_by_label_optimiser_or_weights():
    names = ["adam", {"name": "adam", "weight_decay": 0.0}, {"weights": "lstm"}]
    assert [Competitor(optimiser=one, rates=[1.0]).name for one in names] == ["adam", "adam", "lstm"]
    assert Competitor(optimiser="adam", rates=[1.0], label="other").name == "other"
    with pytest.raises(UserError, match="competitors: expected names that differ, not two times 'adam'"):
        configs.load(
            {"tasks": ["x"], "competitors": [{"optimiser": "adam", "rates": [1.0]}] * 2},
            kind=Suite,
        )


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"optimiser": "adam", "rates": [0.1], "leagues": ["untuned"]}, "the key `untuned`"),
        ({"optimiser": {"weights": "lstm"}, "rates": [1.0], "schedule": "cosine"}, "no schedule for a learned rule"),
        ({"optimiser": "hierarchical", "rates": [1.0], "schedule": "cosine"}, "no schedule for a learned rule"),
    ],
)
def test_competitors_that_could_not_run_as_they_say_are_refused(choice, message):
    with pytest.raises(ValidationError, match=message):
        Competitor(**choice)
