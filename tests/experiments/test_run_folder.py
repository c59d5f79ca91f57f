"""The folder of a run: whose files it holds, and which of them stay."""

import pytest

import l2lopt
from l2lopt.core.errors import UserError

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
