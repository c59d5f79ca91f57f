"""The demo: its parts side by side are the same work one after the other."""

import pytest

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.evaluation.comparison import Evaluation
from l2lopt.experiments import config as configs

SMALL = [
    "optimisee.hidden=[3]",
    "trained_on=[{name='mlp', hidden=[3]}]",
    "unroll.length=[3, 6]",
    "unroll.estimator={name='es', pairs=2, objective='log-loss', floor=1e-3}",
    "meta.updates=2",
    "meta.validate_every=1",
    "meta.imitation={runs=1, updates=2, steps=[1.0, 2.0], decays=[1.0, 2.0]}",
    "validation.on=[{name='mlp', hidden=[3]}]",
    "validation.seeds=2",
    "validation.horizons=[4]",
    "evaluation.seeds=3",
    "evaluation.steps=8",
    "evaluation.horizons=[4, 8]",
    "evaluation.tuning_seeds=2",
]
LEARNED = ("evaluation.csv", "optimiser.safetensors", "config.toml", "controls.csv")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "demo"
    seen: list[str] = []
    result, paths = l2lopt.demo(folder, changes=SMALL, report=lambda stage, *_: seen.append(stage))
    assert isinstance(result, Evaluation)
    assert all(path.is_file() for path in paths)
    # Two processes told their progress, and this one that of the learned rule's runs: the baselines' were there.
    assert {"1", "2"} <= {stage.partition(":")[0] for stage in seen}
    assert {stage for stage in seen[-3:]} <= {"learned LSTM per tensor", "study"}
    return folder


def test_the_demo_leaves_everything(run):
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    events = {name for name in names if "events.out.tfevents." in name}
    assert {name.rpartition("/")[0].partition("/")[0] for name in events} == {"", "controls", "tensorboard"}
    assert names - events == {
        "config.toml",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "initial.safetensors",
        "optimiser.safetensors",
        "controls.csv",
        "evaluation.csv",
        "evaluation.json",
        *(f"figures/{name}.{kind}" for name in ("controls", "loss-curves", "validation") for kind in ("png", "svg")),
    }


def test_its_parts_one_after_the_other_leave_the_same(run, tmp_path):
    apart = l2lopt.meta_train("demo", tmp_path / "apart", changes=SMALL)
    l2lopt.evaluate(apart)
    for name in LEARNED:
        assert (apart / name).read_bytes() == (run / name).read_bytes(), name


def test_kept_runs_are_not_made_again(run, tmp_path, monkeypatch):
    first = l2lopt.evaluate(run, cache=tmp_path / "cache")
    kept = sorted((tmp_path / "cache").iterdir())
    assert kept

    def refused(*_, **__):
        raise AssertionError("a run was made again")

    monkeypatch.setattr("l2lopt.evaluation.free_runs.run_free", refused)
    again = l2lopt.evaluate(run, cache=tmp_path / "cache")
    assert again.rows == first.rows
    assert sorted((tmp_path / "cache").iterdir()) == kept


def test_files_of_others_stay(tmp_path, monkeypatch):
    """It is said before the processes start, which takes seconds."""
    monkeypatch.setattr("l2lopt.experiments.demo.run_jobs", lambda *_: pytest.fail("processes were started"))
    own = tmp_path / "project"
    own.mkdir()
    (own / "config.toml").write_text("mine")
    with pytest.raises(UserError, match="expected a new or empty folder, found files that no run has left"):
        l2lopt.demo(own, changes=SMALL)
    assert [path.name for path in own.iterdir()] == ["config.toml"]
    assert (own / "config.toml").read_text() == "mine"


def test_a_mistake_is_found_before_any_work(tmp_path):
    with pytest.raises(UserError, match=r"unroll\.length"):
        l2lopt.demo(tmp_path / "run", changes=["unroll.length=-3"])
    assert not (tmp_path / "run").exists()


def test_another_run_is_not_replaced(tmp_path, monkeypatch):
    """Nor is a demo by a mistake."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('optimisee = "quadratic"\noptimiser = "coordinatewise"\n')
    (run / "events.out.tfevents.1").write_text("")
    (run / "optimiser.safetensors").write_text("mine")
    with pytest.raises(UserError, match="expected a new or empty folder, found an earlier run"):
        l2lopt.demo(run)
    message = "expected a demo with the same changes, found another run; choose another --run, or remove the folder"
    # l2lopt meta-train demo --set … has the same folder
    for change in ("meta.updates=90", "optimiser.hidden_size=9", "seed=5", "validation.seeds=99"):
        (run / "config.toml").write_text(configs.dump(configs.load(configs.demo(), [change])))
        with pytest.raises(UserError, match=message):
            l2lopt.demo(run)
    (run / "config.toml").write_text(configs.dump(configs.load(configs.demo())))
    with pytest.raises(UserError, match="device: expected a device of this machine"):
        l2lopt.demo(run, changes=["device=nowhere"])
    assert (run / "optimiser.safetensors").read_text() == "mine"


def test_a_demo_that_was_killed_at_once_is_begun_anew(tmp_path, monkeypatch):
    """It has no --resume, and neither records nor events tell whose folder it is."""
    started = []
    monkeypatch.setattr("l2lopt.experiments.demo.run_jobs", lambda *given: started.append(given) or 1 / 0)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(configs.dump(configs.load(configs.demo())))
    with pytest.raises(ZeroDivisionError):
        l2lopt.demo(run)
    assert len(started) == 1
    assert not (run / "config.toml").exists()


def test_the_weights_that_a_demo_begins_from_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("l2lopt.experiments.demo.run_jobs", lambda *_: pytest.fail("processes were started"))
    run = tmp_path / "run"
    l2lopt.meta_train("demo", run, changes=["meta.updates=1", *SMALL])
    (run / "config.toml").write_text(configs.dump(configs.load(configs.demo())))
    before = (run / "optimiser.safetensors").read_bytes()
    with pytest.raises(UserError, match="expected weights from elsewhere, found the run's own"):
        l2lopt.demo(run, changes=[f"optimiser={{weights='{run.as_posix()}'}}"])
    assert (run / "optimiser.safetensors").read_bytes() == before
