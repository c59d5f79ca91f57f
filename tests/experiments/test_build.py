"""What a config describes is refused before any work where it would stop the work later."""

import pytest
import torch
from torch.nn import functional

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.experiments import build
from l2lopt.experiments import config as configs

CHANGES = ["unroll.length=2", "meta.updates=1", "validation.seeds=1", "validation.horizons=[2]"]


def problem(heldout):
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    samples = inputs, (inputs.sum(1) > 0).long()
    made = {"batch_size": 4, "heldout": heldout}
    return l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2), functional.cross_entropy, samples, **made)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ("unroll.targets.heldout=1.0", "meta-training on python-2"),
        ("unroll.targets.end_heldout=1.0", "meta-training on python-2"),
        ("validation.split=heldout", "validation on python-2"),
    ],
)
def test_a_problem_without_samples_that_a_run_may_draw_is_refused_at_once(tmp_path, change, where):
    """In the middle it could not be mended: the checkpoint is of these problems."""
    problems, changes = [problem(0.25), problem(0.0)], [*CHANGES, change]
    with pytest.raises(UserError, match=f"{where}: .*expected samples held out, found none"):
        l2lopt.meta_train(problems, tmp_path / "run", changes=changes)
    assert not (tmp_path / "run").exists()
    l2lopt.meta_train(problems, tmp_path / "run", changes=CHANGES)


@pytest.mark.parametrize(
    ("problem", "changes", "expected"),
    [
        ("mlp", ["meta.imitation={runs=1}"], "meta.imitation: expected a hierarchical optimiser"),
        (
            "mlp",
            ["optimiser=hierarchical", "unroll.estimator=backprop", "meta.imitation={runs=1}"],
            "meta.imitation: expected evolution strategies, found Backprop",
        ),
        ("mlp", ["unroll.estimator=higher", "unroll.scaling=0.5"], r"unroll.scaling: expected 0 .*, found 0\.5"),
        ("quadratic", ["unroll.estimator=higher"], "estimator 'higher': .* found 'quadratic'; set unroll.estimator"),
    ],
)
def test_a_meta_training_that_cannot_be_made_is_refused_before_its_first_validation(
    tmp_path, monkeypatch, problem, changes, expected
):
    monkeypatch.setattr("l2lopt.experiments.build.Experiment.score", None)
    with pytest.raises(UserError, match=expected):
        l2lopt.meta_train({"optimisee": problem}, tmp_path / "run", changes=[*CHANGES, *changes])
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_meta_trained_can_be_evaluated_still():
    config = configs.load({"optimisee": "quadratic"}, ["unroll.estimator=higher", "unroll.scaling=0.5"])
    assert build.build(config, meta_training=False).estimator
