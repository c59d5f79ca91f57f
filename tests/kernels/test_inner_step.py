"""The compiled inner step against the eager one, and runs that are made with it."""

import pytest
import torch
from implementations import OPTIMISEES, hierarchical

import optimisees
from l2lopt import kernels, optimisers
from l2lopt.core.types import Carry
from l2lopt.evaluation import comparison
from l2lopt.evaluation.free_runs import run_free
from l2lopt.evaluation.settings import Baseline, EvaluationSettings
from l2lopt.kernels.inner_step import compiled_steps, eager_steps
from l2lopt.optimisee import BatchesOfRows, Optimisee, flat_loss, init_rows
from l2lopt.optimisers import Scheduled
from l2lopt.optimisers.phi_rows import PhiRows

ROWS = 3
RATES = torch.tensor([0.01, 0.02, 0.03], dtype=torch.float64)

FEW = {"cell": "none", "facts": ["growth", "loss-trend"], "controls": ["step", "mix"]}
"""Options of a hierarchical rule that is soon recorded."""


def rows_of_phi(rule):
    """A rule of its own for each row."""
    draw = torch.Generator().manual_seed(3)
    return PhiRows(
        rule,
        {
            name: value.detach() + 0.1 * torch.randn(ROWS, *value.shape, generator=draw, dtype=value.dtype)
            for name, value in rule.phi().items()
        },
    )


RULES = {
    "sgd": lambda: optimisers.make("sgd", lr=RATES),
    "nesterov": lambda: optimisers.make("momentum", lr=RATES, nesterov=True),
    "adam": lambda: optimisers.make("adam", lr=RATES),
    "adamw to its end": lambda: optimisers.make("adamw", lr=RATES, warm_up=3, total=20),
    "nadamw": lambda: optimisers.make("nadamw", lr=RATES),
    "lion": lambda: optimisers.make("lion", lr=RATES),
    "dowg": lambda: optimisers.make("dowg", lr=100 * RATES),
    "muon under a schedule": lambda: Scheduled(optimisers.make("muon", lr=RATES), "cosine", 3, 20),
    "normalised-muon": lambda: optimisers.make("normalised-muon"),
    "normalised-muon, fused": lambda: kernels.fuse(optimisers.make("normalised-muon")),
    "lstm": lambda: optimisers.make("coordinatewise", cell="lstm", rule="direction-and-magnitude").double(),
    "rows of lstm": lambda: rows_of_phi(optimisers.make("coordinatewise").double()),
    "rows of lstm, fused": lambda: kernels.fuse(rows_of_phi(optimisers.make("coordinatewise").double())),
    "hierarchical, fused": lambda: kernels.fuse(hierarchical(**FEW).requires_grad_(False)),
    "rows of hierarchical": lambda: rows_of_phi(hierarchical(**FEW)),
    "lstm, fused": lambda: Scheduled(kernels.fuse(optimisers.make("coordinatewise").double()), "constant", lr=RATES),
}
"""Name → an optimiser of three rows in float64."""
TASKS = ["convnet", "module with batch norm", "module with dropout", "transformer"]
MORE_TASKS = [
    *("convnet with layer norm", "vit", "autoencoder", "parametric-language", "matrix-factorisation", "rosenbrock"),
    *("quadratic, ill-conditioned, under noise", "augmented scales of a convnet"),
]


def assert_agree(rule, task, steps):
    """Compiled and eager steps of one run agree to rounding, all that they hand on included."""
    seeds = list(range(ROWS))
    layout, params, aux = init_rows(task, seeds)
    loss, batches = flat_loss(task, layout), BatchesOfRows(task, "train", seeds)

    def carry():
        return Carry(params.clone(), aux, rule.init(layout, (ROWS,), like=params, total_steps=20))

    compiled, eager = compiled_steps(loss, rule, carry(), *batches.at(0)), eager_steps(loss, rule)
    here, there, step = carry(), carry(), 0
    while step < steps:
        samples, places = batches.at(step, 2 if step else 1)
        found, here = compiled(here, samples, places)
        wanted, there = eager(there, samples, places)
        step += 1 if places is None else len(places)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        leaves = zip(*(torch.utils._pytree.tree_leaves(one) for one in (here, there)), strict=True)
        for one, other in leaves:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "task"),
    [
        *((rule, "mlp") for rule in RULES),
        *(("normalised-muon", task) for task in TASKS),
        *(pytest.param("normalised-muon", task, marks=pytest.mark.slow) for task in MORE_TASKS),
    ],
)
def test_a_recorded_step_is_the_eager_one(as_recorded, rule, task):
    assert_agree(RULES[rule](), OPTIMISEES[task](), 3)
    assert len(as_recorded) == 1


def test_rules_whose_numbers_change_in_place_are_followed(as_recorded):
    """So that one compiled step serves all meta-updates."""
    rule, task = RULES["rows of lstm"](), OPTIMISEES["mlp"]()
    layout, params, aux = init_rows(task, range(ROWS))
    carry = Carry(params, aux, rule.init(layout, (ROWS,), like=params))
    loss, given = flat_loss(task, layout), BatchesOfRows(task, "train", range(ROWS)).at(0)
    compiled, eager = compiled_steps(loss, rule, carry, *given), eager_steps(loss, rule)
    before = compiled(carry, *given)[1].params
    for value in rule.rows.values():
        value.mul_(2)
    after, wanted = compiled(carry, *given)[1].params, eager(carry, *given)[1].params
    torch.testing.assert_close(after, wanted, rtol=1e-10, atol=1e-12)
    assert not torch.equal(after, before)


class Windows(Optimisee):
    """A mean of numbers of which every batch has another count, as windows of a text may have."""

    def init(self, seed):
        return {"x": torch.tensor(float(seed), dtype=torch.float64)}, {}

    def batch(self, split, seed, step):
        return torch.linspace(-1, seed, 2 + step % 3, dtype=torch.float64)

    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch), aux

    def evaluate(self, params, aux, batch):
        return (params["x"] - batch).square().mean()


@pytest.mark.parametrize("rule", ["adam", "lstm, fused"])
def test_batches_of_other_shapes_make_eager_steps(as_recorded, rule):
    assert_agree(RULES[rule](), Windows(), 7)


def test_a_compiled_step_is_the_eager_one():
    assert_agree(RULES["normalised-muon"](), OPTIMISEES["mlp"](), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "task"), [("adamw to its end", "module with batch norm"), ("lstm, fused", "mlp"), ("lstm", "mlp")]
)
def test_other_compiled_steps_are_the_eager_ones(rule, task):
    assert_agree(RULES[rule](), OPTIMISEES[task](), 20)


@pytest.mark.slow
def test_a_contestant_is_compiled_once_for_all_its_runs(as_recorded):
    """Whatever its rates, horizons and numbers of problems; and the comparison is the eager one."""
    mlp = optimisees.make("mlp", hidden=[3], activation="tanh", dtype="float64")
    baselines = [
        Baseline(optimiser="adamw", rates=[1e-3, 1e-2, 1e-1], schedule="cosine"),
        Baseline(optimiser="muon", rates=[1e-2, 1e-1], schedule="cosine"),
        Baseline(optimiser="normalised-muon", rates=[0.03], label="harness"),
    ]
    learned = {"harness again": kernels.fuse(optimisers.make("normalised-muon"))}
    changes = {"seeds": 4, "steps": 12, "horizons": [5, 12], "tuning_seeds": 3, "multipliers": [0.3, 1.0]}
    results = {
        backend: comparison.evaluate(
            learned, mlp, EvaluationSettings(baselines=baselines, backend=backend, **changes), seed=2
        )
        for backend in ("eager", "compile")
    }
    # AdamW, Muon, the harness at a rate of its own, as it is (for the baseline and the learned one) and under a factor.
    assert len(as_recorded) == 4
    assert results["compile"].chosen == results["eager"].chosen
    for found, wanted in zip(results["compile"].rows, results["eager"].rows, strict=True):
        assert found._replace(loss=0.0) == wanted._replace(loss=0.0)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-9)


class Looking(optimisers.SGD):
    """Descent that looks at a number."""

    def update(self, grads, state, params, *, loss=None):
        return super().update(grads / max(float(grads.norm()), 1.0), state, params)


def test_where_there_is_no_compiled_form_runs_are_eager_and_it_is_said_once(caplog):
    mlp = optimisees.make("mlp", hidden=[3], dtype="float64")
    for _ in range(2):
        run = run_free(Looking(0.1), mlp, [0, 1], [0, 4], backend="compile")
    assert torch.equal(run.losses["train"], run_free(Looking(0.1), mlp, [0, 1], [0, 4]).losses["train"])
    said = [record.getMessage() for record in caplog.records if "stay eager" in record.getMessage()]
    assert len(said) == 1
    assert "\n" not in said[0]
