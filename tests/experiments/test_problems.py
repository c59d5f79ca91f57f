"""On which problems an optimiser is meta-trained, validated and compared, and how configs name them."""

import json
import math

import laws
import pytest
import torch

import l2lopt
import optimisees
from l2lopt.core.seeding import seed_of
from l2lopt.experiments import build
from l2lopt.experiments import config as configs

CONFIG = {
    "optimisee": {"name": "quadratic", "size": 3},
    "optimiser": {"name": "hierarchical", "cell": "none", "hidden_size": 2},
    "unroll": {"length": 4},
    "meta": {"updates": 2, "validate_every": 1},
    "validation": {"on": ["digits-logistic-regression", "quadratic"], "seeds": 2, "horizons": [5]},
}


def test_problems_of_its_own_are_told_one_by_one(tmp_path):
    run = l2lopt.meta_train(CONFIG, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if line["stage"] == "validation"]
    assert [line["step"] for line in validations] == [0, 1, 2]
    for line in validations:
        names = {"score/digits-logistic-regression", "score/quadratic"}
        assert names == {key for key in line if key.startswith("score/")}
        assert line["score"] == pytest.approx(sum(line[name] for name in names) / 2)


def test_held_out_samples_are_kept_from_the_steps():
    """The score by a plain loop, whose batches are those of the split `inner`."""
    validation = {"on": ["digits-logistic-regression"], "seeds": 1, "horizons": [6], "split": "heldout"}
    experiment = build.build(configs.load(CONFIG | {"validation": validation}))
    problem, seed = optimisees.make("logistic-regression"), seed_of("validation", 0, 0)
    params, aux = problem.init(seed)
    rule = experiment.optimiser
    layout = laws.Layout.of(params, problem.roles())
    theta = layout.ravel(params)
    state = rule.init(layout, like=theta, total_steps=6)
    for step in range(6):
        theta.requires_grad_()
        loss, _ = problem.loss(layout.unravel(theta), aux, problem.batch("inner", seed, step))
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            update, state = rule.update(gradient, state, theta, loss=loss)
            theta = theta.detach() + update
    evaluated = [
        (float(problem.evaluate(layout.unravel(theta), aux, batch).mean()), count)
        for batch, count in problem.evaluation_batches("heldout", seed)
    ]
    wanted = sum(loss * count for loss, count in evaluated) / sum(count for _, count in evaluated)
    (name, score), *others = experiment.score(rule).items()
    assert (name, others) == ("digits-logistic-regression", [])
    assert score == pytest.approx(math.log(wanted), abs=1e-5)


def test_no_task_has_the_name_of_an_optimisee():
    assert not set(optimisees.OPTIMISEES) & set(configs.catalogue().tasks)


def test_a_task_stands_for_its_optimisee():
    named, written = (
        configs.load({"optimisee": choice, "mixed_with": [choice], "validation": {"on": [choice]}})
        for choice in ("digits-mlp-64-tanh", {"name": "mlp", "hidden": [64], "activation": "tanh"})
    )
    assert named == written
    assert configs.problem_name(named.optimisee) == "digits-mlp-64-tanh"
    assert configs.problem_name({"name": "mlp", "hidden": [63]}) == "mlp"
    with pytest.raises(l2lopt.UserError, match="digits-mlp-64-tank"):
        build.build(configs.load({"optimisee": "digits-mlp-64-tank"}))


def test_a_problem_named_twice_is_built_once():
    small, large = {"name": "quadratic", "size": 2}, {"name": "quadratic", "size": 4}
    built = build.build(configs.load(CONFIG | {"trained_on": [small, small, large], "validation": {"on": [large]}}))
    first, second, third = built.optimisees
    assert first is second is not third
    assert built.validated_on == [third]


def test_an_optimiser_meets_a_problem_that_it_was_not_trained_on(tmp_path):
    trained_on = [{"name": "quadratic", "size": 2}, {"name": "quadratic", "size": 4}]
    config = CONFIG | {"trained_on": trained_on, "validation": {"seeds": 1, "horizons": [3]}}
    run = l2lopt.meta_train(config, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"score/quadratic", "score/quadratic-2"} < set(lines[0])
    experiment = build.build(configs.load(config))
    sizes = [problem.init(0)[0]["theta"].numel() for problem in (experiment.optimisee, *experiment.optimisees)]
    assert sizes == [3, 2, 4]
    changes = ["evaluation.steps=3", "evaluation.horizons=[3]", "evaluation.seeds=2", "evaluation.multipliers=[]"]
    changes += ["evaluation.baselines=[{optimiser='sgd', rates=[0.1]}]"]
    result = l2lopt.evaluate(run, changes=changes)
    assert {row.optimiser for row in result.table} == {
        "learned-hierarchical",
        "learned-hierarchical, before meta-training",
        "sgd",
    }
    with pytest.raises(l2lopt.UserError, match="trained_on or mixed_with, not both"):
        configs.load(config | {"mixed_with": ["quadratic"]})
