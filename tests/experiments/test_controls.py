"""What is left of a hierarchical rule's controls: beside its meta-training, and by a command of its own."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import l2lopt
import optimisees
from l2lopt import cli, optimisers
from l2lopt.core.errors import UserError
from l2lopt.report.control_curves import read_controls

CONFIG = {
    "optimisee": {"name": "mlp", "hidden": [3]},
    "optimiser": {"name": "hierarchical", "cell": "none", "hidden_size": 2},
    "unroll": {"length": 4},
    "meta": {"updates": 2, "validate_every": 1, "batch": 2},
    "validation": {"on": ["rosenbrock", "quadratic"], "seeds": 1, "horizons": [7, 5]},
}
FIGURES = ["controls.png", "controls.svg", "validation.png", "validation.svg"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return l2lopt.meta_train(CONFIG, tmp_path_factory.mktemp("runs") / "mine")


def test_a_meta_training_leaves_controls_and_validations(run):
    assert sorted(path.name for path in (run / "figures").iterdir()) == FIGURES
    curves = read_controls(run / "controls.csv")
    assert {(one.kind, one.control) for one in curves} == {
        (kind, control) for kind in ("matrix", "vector") for control in ("step", "decay", "mix")
    }
    events, controls = (EventAccumulator(str(place)).Reload() for place in (run, run / "controls"))
    for one in curves:
        assert one.steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
        told = controls.Scalars(f"controls/{one.kind}/{one.control}")
        assert [event.step for event in told] == one.steps.tolist()
        assert [event.value for event in told] == pytest.approx(one.mean.tolist(), rel=1e-5)
    assert [event.step for event in events.Scalars("meta-train/agreement")] == [1, 2]
    assert [event.step for event in events.Scalars("validation/score")] == [0, 1, 2]


def test_a_run_that_is_resumed_after_its_end_or_drawn_again_stays(run):
    before = {path: path.read_bytes() for path in [run / "controls.csv", *sorted((run / "figures").iterdir())]}
    l2lopt.meta_train(CONFIG, run, resume=True)
    assert [path.name for path in l2lopt.plot(run)] == FIGURES
    assert before == {path: path.read_bytes() for path in before}
    assert len(EventAccumulator(str(run / "controls")).Reload().Scalars("controls/matrix/step")) == 7


def test_its_files_are_removed_where_it_is_overwritten(run, tmp_path):
    folder = l2lopt.meta_train(CONFIG, tmp_path / "run", changes=["meta.updates=1"])
    rule = {"name": "coordinatewise", "hidden_size": 2}
    l2lopt.meta_train(CONFIG | {"optimiser": rule}, folder, overwrite=True)
    assert not (folder / "controls.csv").exists()
    assert list((folder / "controls").iterdir()) == []
    assert list((folder / "figures").iterdir()) == []


def test_controls_of_own_weights_on_a_task_of_the_catalogue(run, tmp_path, monkeypatch, capsys):
    """By the command line and in Python the same."""
    arguments = ["--task", "digits-logistic-regression", "--steps", "5", "--output", str(tmp_path / "seen")]
    monkeypatch.setattr(sys, "argv", ["l2lopt", "controls", str(run), *arguments])
    cli.main()
    out = capsys.readouterr().out
    assert "controls: 5/5" in out
    assert str(tmp_path / "seen" / "figures" / "controls.png") in out
    rule = l2lopt.load(run / "optimiser.safetensors")
    problem = optimisees.make("logistic-regression")
    paths = l2lopt.controls(rule, problem, tmp_path / "again", steps=5)
    assert paths[0].read_bytes() == (tmp_path / "seen" / "controls.csv").read_bytes()
    assert [path.name for path in l2lopt.plot(tmp_path / "again")] == FIGURES[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["coordinatewise-lstm", "--task", "rosenbrock"],
            "expected a hierarchical rule, whose network steers tensors, found one call",
        ),
        (["none.safetensors", "--task", "rosenbrock"], "expected a learned optimiser, found nothing"),
        (["RULE", "--task", "digits-mlp-64-tank"], "did you mean 'digits-mlp-64-tanh'?"),
        (["RULE", "--task", "rosenbrock", "--output", "RUN"], "expected no run's folder, found a run"),
        (["RULE", "--task", "rosenbrock", "--steps", "0"], "'--steps': "),
        (["RULE"], "Missing option"),
    ],
)
def test_a_mistake_ends_in_one_line(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    named = {"RULE": str(run / "optimiser.safetensors"), "RUN": str(run)}
    monkeypatch.setattr(sys, "argv", ["l2lopt", "controls", *(named.get(part, part) for part in arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    err = capsys.readouterr().err
    assert (end.value.code, err.count("\n")) == (2, 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_rule_stays_as_it_is(tmp_path):
    rule = optimisers.make("hierarchical", cell="none", hidden_size=2)
    l2lopt.controls(rule, {"name": "quadratic", "size": 3, "dtype": "float64"}, tmp_path / "own", steps=2)
    assert {str(value.dtype) for value in rule.parameters()} == {"torch.float32"}
    with pytest.raises(UserError, match="steps: expected at least 1"):
        l2lopt.controls(rule, "rosenbrock", tmp_path / "own", steps=0)
