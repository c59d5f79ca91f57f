"""The folder of a run: whose files it holds, and which of them stay."""

import pytest

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.experiments.run_folder import remove_events

META = {
    "threads": 1,
    "optimisee": {"name": "quadratic", "size": 3},
    "optimiser": {"name": "hierarchical", "hidden_size": 2},
    "unroll": {"length": 2, "targets": {"next": 0.0, "end": 1.0}, "estimator": {"name": "es", "pairs": 1}},
    "meta": {"updates": 1, "rate": 0.5, "warm_up": 0},
    "validation": {"seeds": 1, "horizons": [2]},
    "evaluation": {"seeds": 2, "steps": 2, "horizons": [2], "baselines": [], "multipliers": []},
}
TRAIN = {"threads": 1, "optimisee": "quadratic", "optimiser": "torch.optim.SGD", "train": {"steps": 2}}


def test_a_run_begun_anew_has_nothing_of_the_one_before(tmp_path):
    """Publishing would take the other rule's evaluation for its own."""
    run = l2lopt.meta_train(META, tmp_path / "run")
    l2lopt.evaluate(run)
    (run / "notes.txt").write_text("mine")
    controls = (run / "controls.csv").read_text()
    for name in ("checkpoint.safetensors", "optimiser.safetensors"):
        (run / name).unlink()
    other = {**META, "seed": 7}
    l2lopt.meta_train(other, run, resume=True)
    l2lopt.meta_train(other, tmp_path / "whole")
    assert (run / "controls.csv").read_text() == (tmp_path / "whole" / "controls.csv").read_text() != controls
    left = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert "notes.txt" in left
    assert not [name for name in left if name.startswith(("evaluation.", "tensorboard/", "figures/loss-curves"))]
    published = l2lopt.publish(run, tmp_path / "published.safetensors")
    assert "comparisons" not in l2lopt.weights.files.header(published)["training"]


@pytest.mark.parametrize("text", ["[server]\nport = 80\n", 'optimisee = "mlp"\n', "mine"])
@pytest.mark.parametrize("again", ["resume", "overwrite", None])
@pytest.mark.parametrize(("make", "config"), [(l2lopt.train, TRAIN), (l2lopt.meta_train, META)])
def test_a_config_of_something_else_stays(tmp_path, text, again, make, config):
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "events.out.tfevents.1").write_text("mine")
    refused = "expected a run's folder, found a config.toml of something else; choose another --run$"
    unasked = "expected a new or empty folder, found files that no run has left; choose another --run$"
    with pytest.raises(UserError, match=refused if again == "resume" else unasked):
        make(config, tmp_path, **({again: True} if again else {}))
    assert (tmp_path / "config.toml").read_text() == text
    assert (tmp_path / "events.out.tfevents.1").exists()


def test_a_run_that_was_killed_at_once_is_begun_by_resuming(tmp_path):
    run = tmp_path / "run"
    l2lopt.train(TRAIN, run)
    for path in run.rglob("*"):
        if path.is_file() and path.name != "config.toml":
            path.unlink()
    with pytest.raises(UserError, match="choose another --run, or pass --resume if a run was killed here"):
        l2lopt.train(TRAIN, run, overwrite=True)
    assert l2lopt.train(TRAIN, run, resume=True).steps == 2


@pytest.mark.parametrize("make", [l2lopt.train, l2lopt.meta_train])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_killed_at_once_is_begun_anew(tmp_path, make, overwrite):
    """Whose config is the same, so that nothing is lost that this one does not make again."""
    settings, run = TRAIN if make is l2lopt.train else META, tmp_path / "run"
    make(settings, run)
    kept = {"config.toml", "initial.safetensors"}
    for path in sorted(run.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        elif path.name not in kept:
            path.unlink()
    (run / ".config-0123456789ab.toml").write_text("half")
    begun = (run / "config.toml").read_text()
    for other in (begun + "\n# a remark of mine\n", begun.replace("seed = 0", "seed = 1")):
        (run / "config.toml").write_text(other)
        with pytest.raises(UserError, match="expected a new or empty folder, found files that no run has left"):
            make(settings, run, overwrite=overwrite)
        assert (run / "config.toml").read_text() == other
    (run / "config.toml").write_text(begun)
    (run / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="found files that no run has left"):
        make(settings, run, overwrite=overwrite)
    (run / "notes.txt").unlink()
    make(settings, run, overwrite=overwrite)
    assert (run / "config.toml").read_text() == begun
    assert any(run.glob("events.*"))


def test_a_folder_of_others_with_a_runs_names_is_not_gone_on_in(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    (tmp_path / "result.json").write_text("{}")
    for call in (l2lopt.train, l2lopt.meta_train):
        with pytest.raises(UserError, match=r"expected a run.s folder, found files that no run has left"):
            call(TRAIN if call is l2lopt.train else META, tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"loss": 1}\n'
    assert (tmp_path / "result.json").read_text() == "{}"


def test_a_published_rule_has_the_row_of_its_own_run(tmp_path):
    """Also where another run's folder has the same name."""
    runs = [l2lopt.meta_train(META | {"seed": 3}, tmp_path / place / "run") for place in "ab"]
    l2lopt.evaluate(*runs)
    rows = [
        l2lopt.weights.files.header(l2lopt.publish(run, tmp_path / "published.safetensors"))["training"]["row"]
        for run in runs
    ]
    assert rows == ["learned-hierarchical", "learned-hierarchical (run)"]


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    l2lopt.meta_train(META, tmp_path / "run")
    path = l2lopt.publish("~/run", "~/published.safetensors")
    assert path == tmp_path / "published.safetensors"
    assert path.is_file()


@pytest.mark.parametrize("again", ["overwrite", "resume"])
@pytest.mark.parametrize(("make", "config"), [(l2lopt.train, TRAIN), (l2lopt.meta_train, META)])
def test_a_run_is_not_replaced_by_one_that_begins_from_its_weights(tmp_path, again, make, config):
    """They would be gone before they are read again."""
    run = l2lopt.meta_train(META, tmp_path / "run")
    if again == "resume":  # killed before its first checkpoint
        for name in ("checkpoint.safetensors", "optimiser.safetensors"):
            (run / name).unlink()
    own = {"weights": str(run / ("initial.safetensors" if again == "resume" else ""))}
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match="expected weights from elsewhere, found the run's own; choose another --run, or"
    ):
        make({**config, "optimiser": own, "seed": 5}, run, **{again: True})
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_events_alone_are_removed(tmp_path):
    """A user may have a folder of the same name."""
    for name in ("a/b/events.out.tfevents.1", "events.out.tfevents.2", "c/events.out.tfevents.3", "c/notes.txt"):
        path = tmp_path / "tensorboard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    remove_events(tmp_path / "tensorboard")
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"tensorboard", "tensorboard/c", "tensorboard/c/notes.txt"}
    (tmp_path / "tensorboard/c/notes.txt").unlink()
    (tmp_path / "tensorboard/c/events.out.tfevents.4").write_text("")
    for _ in range(2):
        remove_events(tmp_path / "tensorboard")
        assert not any(tmp_path.iterdir())


def test_events_that_cannot_be_removed_stay(tmp_path):
    """Nor does a folder that leads elsewhere end a report."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/events.out.tfevents.1").write_text("")
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere/events.out.tfevents.2").mkdir()
    remove_events(tmp_path / "tensorboard")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["events.out.tfevents.2"]
