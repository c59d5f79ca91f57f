"""Studies: every piece made once, the table a mean over meta-seeds, a stopped study taken up again."""

import json
import math
import pickle
import re
from pathlib import Path

import pytest
import tomli_w
import torch
from killing import interrupted

from l2lopt.core import memory
from l2lopt.core.errors import UserError
from l2lopt.evaluation import comparison, free_runs
from l2lopt.evaluation.tuned_runs import OptimiserRun
from l2lopt.experiments import comparison_jobs, comparison_study, cost_forecast, runs
from l2lopt.report.figures import read
from optimisees import digits

from implementations import pictures  # isort: skip
from test_cli import called, sets  # isort: skip

ROOT = Path(__file__).parents[2]
CONFIG = {
    "threads": 1,
    "optimisee": {"name": "mlp", "hidden": [2], "batch_size": 16},
    "optimiser": {"name": "coordinatewise", "hidden_size": 3, "inputs": ["log-and-sign"], "rule": "additive"},
    "unroll": {"length": 4, "truncation": 2},
    "meta": {"updates": 2, "validate_every": 2},
    "validation": {"seeds": 1, "horizons": [2]},
    "evaluation": {
        "seeds": 3,
        "steps": 5,
        "horizons": [2, 5],
        "tuning_seeds": 1,
        "baselines": [{"optimiser": "sgd", "rates": [0.1, 1.0]}, {"optimiser": "adam", "rates": [0.01, 0.1]}],
        "multipliers": [],
    },
}
STUDY = {
    "meta_seeds": [0, 4],
    "problems": [{"label": "Small, MLP"}],
    "optimisers": [
        {"label": "LSTM", "config": "../recipe.toml"},
        {"label": "IHC-LSTM", "config": "../recipe.toml", "changes": ["optimiser.cell=ihc-lstm"]},
    ],
}


def written(folder, study=STUDY, config=CONFIG):
    (folder / "studies").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(tomli_w.dumps(config))
    (folder / "studies" / "small.toml").write_text(tomli_w.dumps(study))
    return folder / "studies" / "small.toml"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    source = written(folder)
    comparison_study.reproduce(source, folder / "run")
    return source, folder / "run"


def table(folder):
    """`table.json` without the times."""
    facts = json.loads((folder / "table.json").read_text())
    return {label: {**problem, "seconds_per_step_and_seed": None} for label, problem in facts.items()}


def test_leaves_a_table_and_a_figure(made):
    lines = (made[1] / "table.md").read_text().splitlines()
    names = ["Small, MLP", "LSTM", "IHC-LSTM", "sgd", "adam"]
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|") and "---" not in line] == names
    warnings = json.loads((made[1] / "table.json").read_text())["Small, MLP"]["warnings"]
    assert [line for line in lines if line.startswith("- ")][: len(warnings)] == [f"- {line}" for line in warnings]
    assert (made[1] / "small-mlp" / "figures" / "loss-curves.png").stat().st_size > 1000
    assert {name for name, _, _ in read(made[1] / "small-mlp" / "evaluation.csv")} == set(names[1:])


def test_means_are_over_meta_seeds_and_problems(made):
    """Against the pieces' own files, and the spread against each meta-seed's own mean."""
    home = made[1] / "small-mlp"
    for row in table(made[1])["Small, MLP"]["table"]:
        split, horizon = row["split"], str(row["horizon"])
        learned = row["kind"] == "learned"
        paths = [home / f"{row['optimiser']}.json"]
        if learned:
            paths = [home / f"{row['optimiser'].lower()}-{seed}" / "free-run.json" for seed in (0, 4)]
        losses = torch.tensor([json.loads(path.read_text())["losses"][split][horizon] for path in paths])
        assert row["mean"] == pytest.approx(float(losses.double().mean()), rel=1e-6)
        if learned:
            assert row["meta_seeds"] == pytest.approx(losses.double().mean(1).tolist(), rel=1e-6)
            assert losses[0].ne(losses[1]).any()


def test_a_stopped_study_goes_on_where_it_stood(made, tmp_path, monkeypatch):
    source, calls = written(tmp_path), interrupted(monkeypatch, comparison, "rows_of", 3)
    with pytest.raises(KeyboardInterrupt):
        comparison_study.reproduce(source, tmp_path / "run")
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(calls) == 4 + 1  # each piece once, but for the one that was stopped
    assert table(tmp_path / "run") == table(made[1])
    monkeypatch.setattr(runs, "meta_train", None)  # nothing is meta-trained again
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(calls) == 5


def test_a_changed_evaluation_is_made_anew_and_a_changed_recipe_refused(made, tmp_path):
    source = written(tmp_path, {**STUDY, "meta_seeds": [0]})
    paths = comparison_study.reproduce(source, tmp_path / "run")
    first = table(tmp_path / "run")
    comparison_study.reproduce(source, tmp_path / "run", changes=["evaluation.seeds=2"])
    assert table(tmp_path / "run") != first
    comparison_study.reproduce(source, tmp_path / "run")
    assert table(tmp_path / "run") == first
    assert paths[:2] == [tmp_path / "run" / "table.md", tmp_path / "run" / "table.json"]
    (tmp_path / "run" / "small-mlp" / "sgd.json").write_text('{"work": 3')
    comparison_study.reproduce(source, tmp_path / "run")
    assert table(tmp_path / "run") == first
    with pytest.raises(UserError, match=r"unroll\.truncation = 2, found unroll\.truncation = 4"):
        comparison_study.reproduce(source, tmp_path / "run", changes=["unroll.truncation=4"])


def test_an_optimiser_can_be_taken_as_it_is(made, tmp_path):
    """Beside one that is meta-trained: from a file, or by name with its rate."""
    file = made[1] / "small-mlp" / "lstm-4" / "optimiser.safetensors"
    given = [
        {"label": "there already", "config": "../recipe.toml", "optimiser": {"weights": str(file)}},
        {"label": "control", "config": "../recipe.toml", "optimiser": {"name": "normalised-adam", "lr": 0.1}},
    ]
    study = {**STUDY, "optimisers": [STUDY["optimisers"][0], *given]}
    comparison_study.reproduce(written(tmp_path, study), tmp_path / "run")
    home = tmp_path / "run" / "small-mlp"
    assert [path.name for path in sorted(home.glob("*-?"))] == ["control-0", "lstm-0", "lstm-4", "there-already-0"]
    losses = [
        json.loads((home / name / "free-run.json").read_text())["losses"] for name in ("lstm-4", "there-already-0")
    ]
    assert losses[0] == losses[1]
    assert not (home / "control-0" / "optimiser.safetensors").exists()


def test_a_class_of_another_package_is_a_baseline(tmp_path):
    """From the study's file to the table, beside ours, which it equals; nothing is made twice."""
    baselines = [
        {"optimiser": "adam", "rates": [0.01, 0.1]},
        {"optimiser": {"name": "torch.optim:Adam"}, "rates": [0.01, 0.1]},
        {"optimiser": {"name": "torch.optim:Muon", "rest": "adamw"}, "rates": [0.03], "schedule": "cosine"},
    ]
    config = {**CONFIG, "evaluation": {**CONFIG["evaluation"], "baselines": baselines}}
    given = {**STUDY["optimisers"][0], "optimiser": {"name": "normalised-adam", "lr": 0.01}}
    source = written(tmp_path, {**STUDY, "optimisers": [given]}, config)
    comparison_study.reproduce(source, tmp_path / "run")
    first = table(tmp_path / "run")
    means = {(row["optimiser"], row["horizon"], row["split"]): row["mean"] for row in first["Small, MLP"]["table"]}
    for (name, *place), mean in means.items():
        if name == "adam":
            assert means["torch.optim:Adam", *place] == pytest.approx(mean, rel=1e-5)
    assert first["Small, MLP"]["chosen"]["torch.optim:Adam"]["test"].keys() == {"2", "5"}
    assert (tmp_path / "run" / "small-mlp" / "torch-optim-adam.json").exists()
    (tmp_path / "run" / "small-mlp" / "torch-optim-adam.json").unlink()  # its groups stay
    comparison_study.reproduce(source, tmp_path / "run")
    assert table(tmp_path / "run") == first


SECOND = {
    **STUDY,
    "meta_seeds": [0],
    "optimisers": [
        {"label": "harness", "config": "../recipe.toml", "optimiser": "normalised-muon"},
        {"label": "plain", "config": "../recipe.toml", "optimiser": {"name": "sgd", "lr": 0.1}, "tuned": False},
    ],
}


def test_an_optimiser_has_a_second_row_with_its_multiplier_tuned(tmp_path, monkeypatch):
    """Stopped between the two rows of a job, it goes on with the second; one that asks for none has none."""
    config = {**CONFIG, "evaluation": {**CONFIG["evaluation"], "multipliers": [1.0, 3.0]}}
    source = written(tmp_path, SECOND, config)
    whole = comparison_study.reproduce(source, tmp_path / "whole")
    lines = table(tmp_path / "whole")["Small, MLP"]["table"]
    assert [*dict.fromkeys(row["optimiser"] for row in lines)] == [
        *("harness", "harness, multiplier tuned", "plain", "sgd", "adam"),
    ]
    assert {row["kind"] for row in lines if row["optimiser"].startswith(("harness", "plain"))} == {"learned"}
    summary = json.loads((whole[0].parent / "small-mlp" / "evaluation.json").read_text())
    assert summary["cut"] == ["harness", "harness, multiplier tuned", "sgd", "adam"]
    chosen = table(tmp_path / "whole")["Small, MLP"]["chosen"]
    assert {run["rate"] for run in chosen["harness, multiplier tuned"]["test"].values()} <= {1.0, 3.0}
    calls = interrupted(monkeypatch, comparison_jobs, "write_run", 2)
    with pytest.raises(KeyboardInterrupt):
        comparison_study.reproduce(source, tmp_path / "run")
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(calls) == 2 + 4  # a row, one that was stopped and made again, and the three that are left
    assert table(tmp_path / "run") == table(tmp_path / "whole")


def test_a_run_of_another_format_is_made_anew(tmp_path, monkeypatch):
    """What earlier releases took for a run of the same settings."""
    source = written(tmp_path, SECOND)
    comparison_study.reproduce(source, tmp_path / "run")
    calls = interrupted(monkeypatch, comparison_jobs, "write_run", 99)
    comparison_study.reproduce(source, tmp_path / "run")
    assert not calls
    for path in (tmp_path / "run").rglob("*.json"):
        facts = json.loads(path.read_text())
        if "format" in facts.get("work", ()) and isinstance(facts["work"], dict):
            path.write_text(json.dumps({**facts, "work": {k: v for k, v in facts["work"].items() if k != "format"}}))
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(calls) == 4


def test_a_run_of_another_release_of_a_package_is_made_anew(tmp_path, monkeypatch):
    baseline = {"optimiser": "torch.optim:SGD", "rates": [0.1]}
    config = {**CONFIG, "evaluation": {**CONFIG["evaluation"], "baselines": [baseline]}}
    source = written(tmp_path, SECOND, config)
    comparison_study.reproduce(source, tmp_path / "run")
    calls, news = interrupted(monkeypatch, comparison_jobs, "write_run", 99), {"version of torch": "0.0.1"}
    monkeypatch.setattr(comparison_jobs, "code_of", lambda choice: news if choice == baseline["optimiser"] else {})
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(calls) == 1  # the baseline; the rules are of this library


def test_a_run_under_another_default_is_made_anew(tmp_path, monkeypatch):
    """From the rows to the groups that they are made of."""
    source = written(tmp_path, SECOND)
    comparison_study.reproduce(source, tmp_path / "run", cache=tmp_path / "cache")
    calls, plain = interrupted(monkeypatch, comparison_jobs, "write_run", 99), comparison_jobs.run_defaults

    def changed(problem, optimiser):
        found = plain(problem, optimiser)
        return found | {name: "0.1" for name in found if name == "optimiser.eps"}

    monkeypatch.setattr(comparison_jobs, "run_defaults", changed)
    groups = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    comparison_study.reproduce(source, tmp_path / "run", cache=tmp_path / "cache")
    assert len(calls) == 1  # Adam
    written_anew = [path for path, time in groups.items() if path.stat().st_mtime_ns != time]
    assert 0 < len(written_anew) < len(groups)
    assert all('"optimiser.eps": "0.1"' in path.read_text() for path in written_anew)


def test_a_meta_seed_that_diverged_is_in_the_bracket():
    def run(*ends):
        losses = {0: torch.full((2,), 2.3), 5: torch.tensor(ends)}
        return OptimiserRun("learned", {"train": losses, "test": losses}, losses[0], 0.0)

    by_seed = [run(0.3, 0.3), run(0.3, math.nan), run(0.35, 0.35)]
    result = comparison.compare({"rule": comparison_study._mean_run(by_seed)}, [5], {"rule": by_seed})
    found = comparison_study.JobResult(result, {"rule": by_seed})
    assert found.means(result.table[0]) == pytest.approx([0.3, math.inf, 0.35])
    assert {line.diverged for line in result.table} == {1}


def test_without_anything_to_tune_no_held_out_sample_is_needed(tmp_path):
    single = [{"optimiser": "sgd", "rates": [0.1]}]
    config = {**CONFIG, "evaluation": {**CONFIG["evaluation"], "baselines": single}}
    config["optimisee"] = {**CONFIG["optimisee"], "heldout": 0.0}
    assert comparison_study.reproduce(written(tmp_path, SECOND, config), tmp_path / "run")
    config["evaluation"]["multipliers"] = [1.0, 2.0]
    with pytest.raises(UserError, match=r"small\.toml: Small, MLP: expected held-out samples"):
        comparison_study.reproduce(written(tmp_path, SECOND, config), tmp_path / "again")


@pytest.mark.slow
def test_jobs_side_by_side_make_the_same_table(made, tmp_path):
    seen, other = [], {"label": "Larger", "changes": ["optimisee.hidden=[3]"]}
    source = written(tmp_path, {**STUDY, "problems": [*STUDY["problems"], other]})
    comparison_study.reproduce(source, tmp_path / "run", jobs=2, report=lambda *event: seen.append(event))
    both = table(tmp_path / "run")
    assert list(both) == ["Small, MLP", "Larger"]
    assert both["Small, MLP"] == table(made[1])["Small, MLP"]
    told = [event[1] for event in seen if event[0] == "study"]
    assert (told[0], told[-1], told) == (0, 12, sorted(told))
    assert {event[0] for event in seen} & {"1: meta-train", "2: meta-train"}


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({**STUDY, "problem": []}, "'problem'; did you mean 'problems'"),
        ({**STUDY, "meta_seeds": []}, "meta_seeds"),
        ({**STUDY, "optimisers": [{"label": "LSTM"}]}, r"config: expected a value"),
        ({**STUDY, "optimisers": [{"label": "LSTM", "config": "none.toml"}]}, "none.toml"),
        (
            {**STUDY, "optimisers": [{**STUDY["optimisers"][0], "optimiser": {"weights": "none"}}]},
            "none: expected a learned optimiser",
        ),
        (
            {**STUDY, "optimisers": [{**STUDY["optimisers"][0], "changes": ["optimiser.cell=lst"]}]},
            "did you mean 'lstm'",
        ),
        (
            {
                **STUDY,
                "optimisers": [STUDY["optimisers"][0], {**STUDY["optimisers"][1], "changes": ["evaluation.seeds=4"]}],
            },
            "expected the evaluation of LSTM",
        ),
    ],
)
def test_mistakes_end_in_one_line_before_any_work(tmp_path, monkeypatch, capsys, study, message):
    code, _, err = called(monkeypatch, capsys, "reproduce", written(tmp_path, study), "--run", tmp_path / "run")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert re.search(message, err)
    assert not (tmp_path / "run").exists()


def test_missing_and_damaged_files(tmp_path, monkeypatch, capsys):
    for path in (tmp_path / "none.toml", tmp_path / "bad.toml"):
        (tmp_path / "bad.toml").write_text("a = [")
        code, _, err = called(monkeypatch, capsys, "reproduce", path, "--run", tmp_path / "run")
        assert (code, len(err.splitlines())) == (2, 1)


def test_the_command_line_shows_the_table(made, monkeypatch, capsys):
    code, out, err = called(monkeypatch, capsys, "reproduce", made[0], "--run", made[1])
    assert (code, err) == (0, "")
    assert "| Small, MLP |" in out
    assert str(made[1] / "table.json") in out


def test_a_mistake_can_come_from_another_process():
    mistake = UserError("here", expected="this", found="that", remedy="mend it")
    again = pickle.loads(pickle.dumps(mistake))
    assert (str(again), again.where, again.remedy) == (str(mistake), "here", "mend it")


@pytest.mark.slow
def test_a_study_stopped_within_a_piece_loses_one_group(made, tmp_path, monkeypatch):
    """Rows of one: every run is kept by itself until its piece is whole, a diverged one included."""
    rates = [{"optimiser": "sgd", "rates": [0.1, 1e30]}]
    config = {**CONFIG, "evaluation": {**CONFIG["evaluation"], "rows": 1, "baselines": rates}}
    study = {**STUDY, "meta_seeds": [0], "optimisers": STUDY["optimisers"][:1]}
    whole = comparison_study.reproduce(written(tmp_path / "whole", study, config), tmp_path / "whole" / "run")
    plain, calls = free_runs.run_free, []

    def stopping(*args, **options):
        calls.append(args)
        if len(calls) == moment:
            raise KeyboardInterrupt
        return plain(*args, **options)

    source = written(tmp_path, study, config)
    monkeypatch.setattr(comparison_study, "_forecast", lambda *args: None)  # it takes some steps of its own
    monkeypatch.setattr(free_runs, "run_free", stopping)
    for moment in (
        2 + 2,
        2 + 2,
        0,
    ):  # after two validations the second network; after two more the second rate's tuning
        calls.clear()
        if moment:
            with pytest.raises(KeyboardInterrupt):
                comparison_study.reproduce(source, tmp_path / "run")
    comparison_study.reproduce(source, tmp_path / "run")
    assert len(calls) == 1 + 3  # that rate, and the three networks
    assert table(tmp_path / "run") == table(whole[1].parent)
    calls.clear()
    comparison_study.reproduce(source, tmp_path / "run", changes=["evaluation.seeds=4"])
    assert len(calls) == 2  # the new network, for the learned optimiser and the one rate that was chosen
    more = [{"optimiser": "sgd", "rates": [0.01, 0.1, 1e30]}]
    config["evaluation"] |= {"seeds": 4, "baselines": more}
    calls.clear()
    comparison_study.reproduce(written(tmp_path, study, config), tmp_path / "run")
    assert len(calls) in (1, 1 + 4)  # the new rate's tuning, and its networks if it is the best
    monkeypatch.setattr(free_runs, "run_free", plain)
    again = comparison_study.reproduce(written(tmp_path / "again", study, config), tmp_path / "again" / "run")
    assert table(tmp_path / "run") == table(again[1].parent)


@pytest.mark.slow
def test_other_data_under_the_same_name_is_noticed(tmp_path, monkeypatch):
    """The images of the folder change between two calls: nothing is taken for theirs."""
    plain, calls = free_runs.run_free, []

    def counted(*args, **options):
        calls.append(args)
        return plain(*args, **options)

    def written_digits(dtype=torch.float32):
        return digits(dtype)._replace(test_inputs=digits(dtype).test_inputs.flip(0))

    given = {**STUDY["optimisers"][0], "optimiser": {"name": "adam", "lr": 0.01}}
    source = written(tmp_path, {**STUDY, "meta_seeds": [0], "optimisers": [given]})
    comparison_study.reproduce(source, tmp_path / "run")
    first = table(tmp_path / "run")
    monkeypatch.setattr(free_runs, "run_free", counted)
    comparison_study.reproduce(source, tmp_path / "run")
    assert (calls, table(tmp_path / "run")) == ([], first)
    monkeypatch.setattr("optimisees.classifiers.sources.digits", written_digits)
    comparison_study.reproduce(source, tmp_path / "run")
    assert calls
    assert table(tmp_path / "run") != first


def test_what_the_cache_has_is_not_in_the_forecast(tmp_path, caplog, monkeypatch):
    """Another study has made the runs of the rule and of one baseline: the other's alone are timed and made."""
    ready = {**STUDY["optimisers"][0], "optimiser": "normalised-muon"}
    study, settings = {**STUDY, "optimisers": [ready]}, CONFIG["evaluation"]
    first = {**settings, "baselines": settings["baselines"][:1]}
    source = written(tmp_path / "first", study, {**CONFIG, "evaluation": first})
    comparison_study.reproduce(source, tmp_path / "first" / "run", cache=tmp_path / "cache")
    forecast, timed = cost_forecast.forecast, []
    monkeypatch.setattr(cost_forecast, "forecast", lambda planned: timed.extend(planned) or forecast(planned))
    caplog.set_level("INFO", "l2lopt")
    source = written(tmp_path / "second", study)
    comparison_study.reproduce(source, tmp_path / "second" / "run", cache=tmp_path / "cache")
    assert [run.baseline.name for run in timed] == ["adam"]
    assert "1 of 3 pieces to make" in caplog.text
    assert "in all, less what the cache has of them: " in caplog.text


def test_the_time_it_will_take_is_said_first(made, tmp_path, caplog):
    caplog.set_level("INFO", "l2lopt")
    source = written(tmp_path)
    comparison_study.reproduce(source, tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if "pieces to make" in record.getMessage()]
    assert len(said) == 1
    assert re.match(r"6 of 6 pieces to make, about .* in all: meta-training .*, free runs .*, baselines .*", said[0])
    (tmp_path / "run" / "small-mlp" / "adam.json").unlink()
    comparison_study.reproduce(source, tmp_path / "run")
    assert "1 of 6 pieces to make" in caplog.text
    comparison_study.reproduce(source, tmp_path / "run")
    assert caplog.text.count("to make") == 2


TINY = [
    "optimisee.blocks=[1, 1]",
    "optimisee.width=2",
    "optimisee.batch_size=4",
    "optimisee.evaluation_samples=8",
    "threads=1",
    "unroll.length=3",
    "meta.updates=2",
    "validation.horizons=[2]",
    "evaluation.seeds=2",
    "evaluation.steps=3",
    "evaluation.horizons=[3]",
]


TRAINED = ["LSTM, the paper's rule", "IHC-LSTM, the paper's rule"]
UNTRAINED = [f"{label}, untrained" for label in TRAINED]
OTHERS = ["LSTM per tensor", "IHC-LSTM per tensor", "sgd", "adam", "muon", "harness", "adamw"]
FULL = [*TRAINED, *OTHERS, "momentum"]
NARROW = [*TRAINED, *UNTRAINED, *OTHERS, "harness, S = 0.04", "momentum"]


@pytest.mark.parametrize(
    ("name", "rows"), [("fig3-width16", NARROW), pytest.param("fig3", FULL, marks=pytest.mark.slow)]
)
def test_the_papers_figure_by_name(name, rows, tmp_path, monkeypatch, capsys):
    """On other images and a smaller network, from another folder than the library's."""
    monkeypatch.chdir(tmp_path)
    small = f"[{{name='resnet', blocks=[1, 1], width=2, dataset='{pictures()}', batch_size=4, evaluation_samples=8}}]"
    changes = [*TINY, f"optimisee.dataset='{pictures()}'"]
    changes += [f"trained_on={small}", f"validation.on={small}"] if rows is NARROW else []
    code, out, err = called(monkeypatch, capsys, "reproduce", name, *sets(changes))
    assert (code, err) == (0, "")
    assert out.index("pieces to make") < out.index("meta-train")
    lines = (tmp_path / "runs" / name / "table.md").read_text().splitlines()
    names = [line.split("|")[1].strip() for line in lines[2:] if line.startswith("|")]
    assert names == rows
    assert list((tmp_path / "runs" / name).rglob("loss-curves.png"))


def test_optimisers_that_are_as_they_are_need_no_memory_for_meta_training(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**9)
    fixed = {"label": "harness", "config": "../recipe.toml", "optimiser": "normalised-muon"}
    config = {**CONFIG, "validation": {"seeds": 10**9, "horizons": [2]}}
    for optimisers, message in (([fixed], None), ([fixed, STUDY["optimisers"][0]], "validation.seeds = 1000000000: ")):
        source = written(tmp_path, {**STUDY, "meta_seeds": [0], "optimisers": optimisers}, config)
        location = comparison_jobs.StudyLocation(comparison_study.load(source), str(source), str(tmp_path / "run"), ())
        if message is None:
            jobs = list(comparison_jobs.all_jobs(location))
            planned = [comparison_study._planned_run(location, job) for job in jobs]
            assert cost_forecast.forecast(planned)["free runs"] > 0
        else:
            with pytest.raises(UserError, match=message):
                list(comparison_jobs.all_jobs(location))


def test_two_baselines_of_one_name_are_refused(tmp_path):
    pair = [
        {"optimiser": "momentum", "rates": [0.1]},
        {"optimiser": {"name": "momentum", "nesterov": True}, "rates": [0.1]},
    ]
    config = {**CONFIG, "evaluation": {**CONFIG["evaluation"], "baselines": pair}}
    with pytest.raises(UserError, match="expected a name for each row, found 'momentum' and 'momentum'; add a label"):
        comparison_study.reproduce(written(tmp_path, SECOND, config), tmp_path / "run")


@pytest.mark.parametrize("name", ["digits-mlp", "digits-convnet"])
def test_the_studies_of_the_readme_are_sound(name):
    """Its configs load and fit together."""
    path = ROOT / f"configs/studies/{name}.toml"
    location = comparison_jobs.StudyLocation(comparison_study.load(path), str(path), "nowhere", ())
    assert len(list(comparison_jobs.all_jobs(location))) == 4 * 3 + 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimisers": [{"label": "A", "config": "c"}, {"label": "a", "config": "c"}]}, "optimisers: expected labels"),
        ({"problems": [{"label": "A"}, {"label": "a"}]}, "problems: expected labels that lead to different folders"),
        (
            {"optimisers": [{**STUDY["optimisers"][0], "label": "Adam"}]},
            "expected a name for each row, found 'Adam' and",
        ),
        (
            {"optimisers": [STUDY["optimisers"][0], {**STUDY["optimisers"][1], "label": "LSTM: multiplier tuned"}]},
            "expected a name for each row",
        ),
    ],
)
def test_labels_that_would_hide_results_are_refused(tmp_path, changes, message):
    config = {**CONFIG, "evaluation": {**CONFIG["evaluation"], "multipliers": [1.0, 2.0]}}
    with pytest.raises(UserError, match=message):
        comparison_study.reproduce(written(tmp_path, {**STUDY, **changes}, config), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_left_of_a_meta_training_is_forecast(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "l2lopt")
    source = written(tmp_path, {**STUDY, "meta_seeds": [0], "optimisers": STUDY["optimisers"][:1]})
    with monkeypatch.context() as patch:
        interrupted(patch, comparison, "rows_of", 1)
        with pytest.raises(KeyboardInterrupt):
            comparison_study.reproduce(source, tmp_path / "run")
    caplog.clear()
    comparison_study.reproduce(source, tmp_path / "run")
    said = next(record.getMessage() for record in caplog.records if "pieces to make" in record.getMessage())
    assert "3 of 3 pieces to make" in said
    assert "meta-training" not in said
