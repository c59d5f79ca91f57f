"""Meta-training: the loop around an estimator of the meta-gradient."""

import json
import math
from dataclasses import replace
from functools import partial

import oracles
import pytest
import torch
from pydantic import ValidationError

import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import generator, seed_of
from l2lopt.estimators import Backprop, Blockwise, MetaGradient, MetaGradientEstimator
from l2lopt.evaluation.free_runs import run_free
from l2lopt.experiments.make_optimisee import make_optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.training.adam import Adam, agreement
from l2lopt.training.clipping import clip_gradients
from l2lopt.training.inner_runs import inner_steps
from l2lopt.training.meta_train import meta_train
from l2lopt.training.settings import MetaTrainSettings, Targets, UnrollSettings


class LearnedRate(Optimiser):
    """Gradient descent whose rate is the one meta-parameter."""

    def __init__(self, rate):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor(rate, dtype=torch.float64))

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        return optimisers.SGD(1.0).init(layout, batch, like=like)

    def update(self, grads, state, params, *, loss=None):
        return -self.rate * grads, state


class Recorded:
    def __init__(self):
        self.lines = []

    def write(self, stage, step, figures):
        self.lines.append((stage, step, dict(figures)))


@pytest.fixture(scope="module")
def quadratic():
    return optimisees.make("quadratic", size=3, dtype="float64")


def named(score):
    """The score of a single problem by its name."""
    return lambda rule: {"any": score(rule)}


def train(optimiser, optimisee, unroll=None, *, score=lambda _: 0.0, records=None, unrolls=None, **changes):
    settings = MetaTrainSettings(**{"updates": 6, "warm_up": 0, "validate_every": 2} | changes)
    unrolls = unrolls or UnrollSettings(length=4)
    problems = optimisee if isinstance(optimisee, list) else [optimisee]
    return meta_train(optimiser, problems, unroll or Backprop(), settings, unrolls, score=named(score), records=records)


def test_the_rate_of_gradient_descent_is_learned(quadratic):
    optimiser = LearnedRate(1e-4)
    seeds = [1, 2, 3]

    def score(rule):
        return float(run_free(rule, quadratic, seeds, [8]).losses["train"].mean())

    before = score(optimiser)
    result = train(optimiser, quadratic, score=score, updates=60, rate=2e-3, unrolls=UnrollSettings(length=8))
    assert result.score < 0.5 * before
    assert optimiser.rate > 1e-3
    assert score(optimiser) == result.score


def test_one_meta_update_is_adam_on_the_mean_clipped_gradient(quadratic):
    recorded = []

    class Spy(Backprop):
        def __call__(self, *args, **kwargs):
            recorded.append(super().__call__(*args, **kwargs))
            return recorded[-1]

    optimiser = LearnedRate(1e-3)
    train(optimiser, quadratic, Spy(), updates=1, batch=3, rate=0.01, score=lambda rule: -float(rule.rate.detach()))
    reference = torch.nn.Parameter(torch.tensor(1e-3, dtype=torch.float64))
    reference.grad = sum(piece.gradient["rate"] / 4 for piece in recorded) / 3
    torch.nn.utils.clip_grad_norm_([reference], 1.0)
    torch.optim.Adam([reference], lr=0.01).step()
    assert len(recorded) == 3
    assert float(optimiser.rate.detach()) == pytest.approx(float(reference.detach()), rel=1e-12)


def test_the_best_and_not_the_last_optimiser_is_kept(quadratic):
    scores = iter([3.0, 1.0, 2.0, 5.0])
    seen = []

    def score(rule):
        seen.append(float(rule.rate.detach()))
        return next(scores)

    optimiser = LearnedRate(1e-3)
    result = train(optimiser, quadratic, score=score)
    assert (result.score, result.update) == (1.0, 2)
    assert result.scores == {0: 3.0, 2: 1.0, 4: 2.0, 6: 5.0}
    assert float(optimiser.rate.detach()) == seen[1] != seen[-1]


@pytest.mark.parametrize(("scores", "update"), [((3.0, 1.0, 2.0, 5.0), 6), ((3.0, 1.0, 2.0, math.nan), 4)])
def test_the_last_optimiser_whose_score_is_finite_is_kept_if_asked(quadratic, scores, update):
    each, seen = iter(scores), []

    def score(rule):
        seen.append(float(rule.rate.detach()))
        return next(each)

    optimiser = LearnedRate(1e-3)
    result = train(optimiser, quadratic, score=score, keep="last")
    assert (result.score, result.update) == (scores[update // 2], update)
    assert float(optimiser.rate.detach()) == seen[update // 2]


def test_a_problem_that_becomes_worse_is_named(quadratic, caplog):
    settings, unrolls = MetaTrainSettings(updates=1, validate_every=1), UnrollSettings(length=2)
    scores = iter([{"easy": 0.0, "lost": 0.0, "found": 1.0}, {"easy": 0.04, "lost": 0.1, "found": -3.0}])
    result = meta_train(LearnedRate(0.1), [quadratic], Backprop(), settings, unrolls, score=lambda _: next(scores))
    assert (result.update, result.best["lost"]) == (1, 0.1)
    assert "validation losses above those before meta-training: lost (1.11 times)" in caplog.text


def test_a_loss_below_0_that_becomes_worse_is_named_without_a_ratio(quadratic, caplog):
    settings, unrolls = MetaTrainSettings(updates=1, validate_every=1), UnrollSettings(length=2)
    scores = iter([{"below": math.log(1e-12) - 0.5, "found": 0.0}, {"below": -1.0, "found": -90.0}])
    meta_train(LearnedRate(0.1), [quadratic], Backprop(), settings, unrolls, score=lambda _: next(scores))
    assert caplog.text.splitlines()[-1].endswith("validation losses above those before meta-training: below")


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (
            [0.5, 0.7, 0.75],
            "no gain: of 3 validations the one before meta-training was the best (score 0.5, ",
        ),
        ([math.nan, math.nan, math.inf], "no validation was finite: the optimiser is the one that meta-training began"),
        ([0.5, 0.4, 0.75], None),
    ],
)
def test_a_meta_training_that_gained_nothing_says_so(quadratic, caplog, scores, said):
    optimiser, each = LearnedRate(1e-3), iter(scores)
    result = train(optimiser, quadratic, score=lambda _: next(each), updates=4)
    assert (result.update == 0) == (said is not None)
    assert (said or "no gain") in caplog.text or said is None
    assert ("no gain" in caplog.text) == (said is not None and "no gain" in said)


def test_many_unrolls_that_are_left_out_are_told(quadratic, caplog):
    train(LearnedRate(1e200), quadratic, unrolls=UnrollSettings(length=9))
    assert "6 of 6 unrolls were not finite and were left out" in caplog.text


@pytest.mark.parametrize("largest", [1.0, math.inf])
def test_gradients_whose_squares_overflow_are_clipped_to_their_norm(largest):
    """PyTorch's function leaves 0 of them, or NaN; below it is PyTorch's to the bit."""
    rows = torch.tensor([[3.0, -4.0], [1e25, 1e24]])
    for row, factor in zip(rows, (1.0, 1e25), strict=True):
        ours, theirs = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        ours.grad, theirs.grad = row.clone(), row.clone()
        norm = clip_gradients([ours], largest)
        torch.nn.utils.clip_grad_norm_([theirs], largest)
        wanted = row.double() * min(1.0, largest / float(row.double().norm()))
        torch.testing.assert_close(ours.grad.double(), wanted, rtol=1e-5, atol=0)
        assert float(norm) == pytest.approx(float(row.double().norm()))
        assert ours.grad.equal(theirs.grad) == (factor == 1)


def gradients(*rows):
    return [{"w": torch.tensor(row[:2]), "b": torch.tensor(row[2:])} for row in rows]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (gradients([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), 1),
        (gradients([1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]), 0),
        (gradients([1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]), 1 / 3),
        (gradients([3.0, 0.0, 0.0], [0.0, 0.0, 0.0]), 1 / 2),
        (gradients([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]), math.nan),
        (gradients([1.0, 2.0, 3.0]), math.nan),
        ([], math.nan),
    ],
)
def test_agreement_is_1_for_one_direction_and_a_share_for_noise(given, expected):
    assert agreement(given) == pytest.approx(expected, nan_ok=True)


def test_a_decay_pulls_phi_towards_0(quadratic):
    class Silent(Backprop):
        """Whose meta-gradient is 0."""

        def __call__(self, *given):
            found = super().__call__(*given)
            return replace(found, gradient={name: 0 * value for name, value in found.gradient.items()})

    options = {"updates": 2, "rate": 0.1, "schedule": "constant", "validate_every": 1}
    for decay, left in ((None, 0.5), (2.0, 0.5 * 0.8**2)):
        optimiser = LearnedRate(0.5)
        # The best score is the last one, so that φ is that of the last update.
        scores = iter([2.0, 1.0, 0.0])
        train(optimiser, quadratic, Silent(), decay=decay, score=lambda _, scores=scores: next(scores), **options)
        assert float(optimiser.rate.detach()) == pytest.approx(left)


def test_the_agreement_of_a_batch_is_recorded_before_it_is_clipped(quadratic):
    class Known(Backprop):
        values = iter([1.0, -1 / 3] * 4)

        def __call__(self, *args, **kwargs):
            value = next(self.values)
            found = super().__call__(*args, **kwargs)
            known = {"rate": torch.full_like(found.gradient["rate"], value)}
            return MetaGradient(found.value, known, found.carry, found.losses, True)

    records = Recorded()
    train(LearnedRate(1e-3), quadratic, Known(), records=records, updates=2, batch=2, clip=0.01)
    found = [figures["agreement"] for stage, _, figures in records.lines if stage == "meta-train"]
    assert found == pytest.approx([(1 / 3) ** 2 / ((1 + 1 / 9) / 2)] * 2)
    train(LearnedRate(1e-3), quadratic, records=(alone := Recorded()), updates=1)
    assert "agreement" not in alone.lines[1][2]


def test_an_unroll_that_is_not_finite_is_counted_and_left_out(quadratic):
    class Flaky(MetaGradientEstimator):
        def __init__(self):
            self.calls = 0

        def init(self, carry, phi, seed):
            return ()

        def __call__(self, update, loss, phi, carry, steps, state=()):
            self.calls += 1
            piece = Backprop()(update, loss, phi, carry, steps, state)
            if self.calls % 2:
                poison = {name: torch.full_like(value, torch.nan) for name, value in piece.gradient.items()}
                return MetaGradient(piece.value, poison, piece.carry, piece.losses, False)
            return piece

    records = Recorded()
    optimiser = LearnedRate(1e-3)
    result = train(optimiser, quadratic, Flaky(), records=records, score=lambda rule: -float(rule.rate.detach()))
    assert result.skipped == 3
    assert math.isfinite(float(optimiser.rate.detach()))
    last = [figures for stage, _, figures in records.lines if stage == "meta-train"][-1]
    assert last["skipped"] == 3.0


def test_phi_stays_when_no_unroll_is_finite(quadratic):
    optimiser = LearnedRate(1e200)
    result = train(optimiser, quadratic, unrolls=UnrollSettings(length=9))
    assert result.skipped == 6
    assert float(optimiser.rate.detach()) == 1e200


def test_truncation_carries_the_run_on(quadratic):
    """Windows of a run follow one another; the next run begins where the last has ended, from another seed."""
    begun = []

    class Spy(Backprop):
        def __call__(self, update, loss, phi, carry, steps, state=()):
            piece = super().__call__(update, loss, phi, carry, steps, state)
            begun.append((carry.params, piece.carry.params, len(piece.losses)))
            return piece

    train(LearnedRate(1e-3), quadratic, Spy(), unrolls=UnrollSettings(length=5, truncation=2))
    assert [count for *_, count in begun] == [2, 2, 1, 2, 2, 1]
    for first, second in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert torch.equal(begun[first][1], begun[second][0])
    assert not torch.equal(begun[2][1], begun[3][0])
    assert not torch.equal(begun[0][0], begun[3][0])


def test_equal_seeds_give_equal_meta_parameters():
    mlp = optimisees.make("mlp", hidden=[3])
    results = []
    for _ in range(2):
        optimiser = optimisers.make("coordinatewise", hidden_size=4)
        unrolls = UnrollSettings(length=[3, 9], truncation=3, targets=Targets(next=0.5, heldout=0.5))
        train(optimiser, mlp, unrolls=unrolls)
        results.append(optimiser.phi())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_scaled_runs_are_the_same_problem_in_other_units(quadratic):
    """c∘(θ/c) is θ at the start, the gradient is c times the plain one, and each run draws its own c within bounds."""
    starts = []

    class Spy(Backprop):
        def __call__(self, update, loss, phi, carry, steps, state=()):
            steps = list(steps)
            theta = carry.params.clone().requires_grad_()
            value, _ = loss(theta, carry.aux, steps[0].batch)
            starts.append((carry.params, value.detach(), torch.autograd.grad(value, theta)[0]))
            return super().__call__(update, loss, phi, carry, steps, state)

    for scaling in (0.0, 0.7):
        train(LearnedRate(1e-4), quadratic, Spy(), updates=2, unrolls=UnrollSettings(length=1, scaling=scaling))
    plain, scaled = starts[:2], starts[2:]
    scales = [p[0] / s[0] for p, s in zip(plain, scaled, strict=True)]
    for (_, value, gradient), (_, other, other_gradient), scale in zip(plain, scaled, scales, strict=True):
        assert torch.allclose(value, other, rtol=1e-12)
        assert torch.allclose(other_gradient, scale * gradient, rtol=1e-12)
        assert scale.log().abs().max() <= 0.7
    assert not torch.equal(*scales)


def test_the_size_of_the_updates_is_recorded(quadratic):
    records = Recorded()
    train(LearnedRate(1e-3), quadratic, records=records, updates=1, unrolls=UnrollSettings(length=1))
    figures = next(figures for stage, _, figures in records.lines if stage == "meta-train")
    params, _ = quadratic.init(seed_of("meta-train", 0, 0))
    matrix, target = quadratic.batch("train", seed_of("meta-train", 0, 0), 0)
    gradient = 2 * matrix.T @ (matrix @ params["theta"] - target)
    assert figures["update_size"] == pytest.approx(1e-3 * float(gradient.square().mean().sqrt()), rel=1e-9)


@pytest.mark.parametrize(
    "targets",
    [
        {"next": 1.0},
        {"next": 0.0, "same": 1.0},
        {"next": 0.5, "heldout": 0.5},
        {"next": 0.2, "same": 0.3, "heldout": 0.5},
    ],
    ids=lambda targets: " ".join(targets),
)
def test_steps_hold_what_the_targets_name(targets):
    mlp = optimisees.make("mlp")
    steps = list(inner_steps(mlp, Targets(**targets), 7, 4, 3))
    inner = "inner" if targets.get("heldout") else "train"
    for index, step in enumerate(steps):
        expected = {
            "next": mlp.batch(inner, 7, 5 + index),
            "same": mlp.batch(inner, 7, 4 + index),
            "heldout": mlp.batch("heldout", 7, 4 + index) if inner == "inner" else None,
        }
        named = [name for name, weight in targets.items() if weight]
        assert torch.equal(step.batch["inputs"], expected["same"]["inputs"])
        assert [target.weight for target in step.targets] == [targets[name] for name in named]
        for name, target in zip(named, step.targets, strict=True):
            assert torch.equal(target.batch["inputs"], expected[name]["inputs"]), name
        if targets["next"] and index + 1 < len(steps):
            assert steps[index + 1].batch is step.targets[0].batch  # so that its gradient is not taken twice


def test_drawn_lengths_are_log_uniform():
    settings = UnrollSettings(length=[100, 500])
    drawn = torch.tensor([float(settings.draw_length(generator("t", i), 1)) for i in range(4000)]).log()
    low, high = math.log(100), math.log(500)
    assert drawn.min() >= low - 1e-6
    assert drawn.max() <= high + 1e-6
    assert float(drawn.mean()) == pytest.approx((low + high) / 2, abs=4 * (high - low) / math.sqrt(12 * 4000))
    assert float(drawn.std()) == pytest.approx((high - low) / math.sqrt(12), rel=0.05)


@pytest.mark.parametrize(
    ("update", "length"), [(1, 2), (2, 2), (3, 4), (5, 6), (7, 9), (8, 10), (100, 10)], ids=lambda value: str(value)
)
def test_a_curriculum_begins_with_short_runs(update, length):
    settings = UnrollSettings(length=10, truncation=2, curriculum=8)
    assert settings.draw_length(generator("t"), update) == length


def test_runs_lengthen_along_the_curriculum(quadratic):
    lengths = []

    class Spy(Backprop):
        def __call__(self, update, loss, phi, carry, steps, state=()):
            piece = super().__call__(update, loss, phi, carry, steps, state)
            lengths.append(len(piece.losses))
            return piece

    train(LearnedRate(1e-3), quadratic, Spy(), unrolls=UnrollSettings(length=6, curriculum=4))
    assert lengths == [2, 3, 4, 6, 6, 6]


def test_every_run_draws_one_of_the_optimisees():
    sizes = []

    class Spy(Backprop):
        def init(self, carry, phi, seed):
            sizes.append(len(carry.params))
            return super().init(carry, phi, seed)

    problems = [optimisees.make("quadratic", size=size, dtype="float64") for size in (2, 3, 5)]
    train(LearnedRate(1e-3), problems, Spy(), unrolls=UnrollSettings(length=1), updates=90, validate_every=90)
    assert len(sizes) == 90
    assert all(15 <= sizes.count(size) <= 45 for size in (2, 3, 5))  # 30 ± 15 is 3.4 standard deviations


class Shapes(optimisees.Quadratic):
    """Its parameters are shaped by the seed, as of a task that is drawn."""

    def init(self, seed):
        params, aux = super().init(seed)
        return {"theta": params["theta"].view(2, 6) if seed % 2 else params["theta"].view(3, 4)}, aux

    def loss(self, params, aux, batch):
        self.shapes.append(tuple(params["theta"].shape))
        return super().loss({"theta": params["theta"].flatten()}, aux, batch)


def test_runs_of_one_problem_may_have_other_shapes():
    problem = Shapes(12, "float64")
    problem.shapes = []
    train(LearnedRate(1e-3), [problem], Backprop(), unrolls=UnrollSettings(length=1), updates=9, validate_every=9)
    assert {*problem.shapes} == {(2, 6), (3, 4)}


def test_a_part_of_phi_that_is_frozen_is_refused(quadratic):
    rule = optimisers.make("coordinatewise", hidden_size=2)
    rule.cell.requires_grad_(False)
    with pytest.raises(UserError, match=r"expected none frozen beside trained ones, found cell\.weight_x, "):
        train(rule, [quadratic], Backprop(), unrolls=UnrollSettings(length=1), updates=1, validate_every=1)


@pytest.mark.parametrize("shape", ["constant", "linear", "exponential"])
def test_the_meta_rate_follows_its_schedule(quadratic, shape):
    records = Recorded()
    train(LearnedRate(1e-3), quadratic, records=records, updates=8, warm_up=2, rate=0.01, schedule=shape, final=0.1)
    rates = [figures["rate"] for stage, _, figures in records.lines if stage == "meta-train"]
    assert rates == pytest.approx([0.01 * oracles.warm_up_then(shape, step, 2, 8, 0.1) for step in range(8)])


@pytest.mark.parametrize(("changes", "count"), [({"warm_up": 8}, 1), ({"warm_up": 6}, 0), ({"updates": 8}, 0)])
def test_a_warm_up_that_never_ends_is_told_once(quadratic, caplog, changes, count):
    caplog.set_level("INFO", "l2lopt")
    train(LearnedRate(1e-3), quadratic, rate=0.01, **{"warm_up": 8, "updates": 6} | changes)
    assert caplog.text.count("warm-up of 8 meta-updates is longer than all 6") == count
    assert caplog.text.count("the rate only rises, to 0.0075 and not 0.01") == count


def test_an_exponential_schedule_needs_an_end_above_0():
    with pytest.raises(ValidationError, match="final above 0"):
        MetaTrainSettings(schedule="exponential")


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "ihc-lstm"])
@pytest.mark.parametrize("rule", optimisers.RULES)
@pytest.mark.parametrize("chosen", [*optimisers.INPUTS, "all"])
def test_every_rule_cell_and_input_meta_trains_on_digits(rule, cell, chosen):
    """20 meta-updates with finite losses, none left out, and φ has moved."""
    inputs = list(optimisers.INPUTS) if chosen == "all" else [chosen]
    if rule == "direction-and-magnitude" and "rnnprop" not in inputs:
        inputs.append("rnnprop")
    optimiser = optimisers.make("coordinatewise", cell=cell, inputs=inputs, rule=rule)
    before = {name: value.clone() for name, value in optimiser.phi().items()}
    records, problem = Recorded(), optimisees.make("mlp")
    unrolls = UnrollSettings(length=[5, 10], truncation=5, targets=Targets(next=0.5, heldout=0.5))
    score = partial(log_loss, problem)
    result = train(optimiser, problem, Blockwise(), records=records, unrolls=unrolls, score=score, updates=20)
    figures = [line for stage, _, line in records.lines if stage == "meta-train"]
    assert len(figures) == 20
    assert all(math.isfinite(line[name]) for line in figures for name in ("meta_loss", "loss", "gradient_norm"))
    assert result.skipped == 0
    assert all(math.isfinite(value) for value in result.scores.values())
    assert result.update == 0 or any((before[name] != value).any() for name, value in optimiser.phi().items())


def log_loss(problem, optimiser):
    return float(run_free(optimiser, problem, [1], [10], ("train",)).losses["train"].log().mean())


@pytest.mark.parametrize(
    ("rule", "inputs", "noted"),
    [("additive", [], False), ("direction-and-magnitude", [], False), ("direction-and-magnitude", ["parameter"], True)],
)
def test_what_a_meta_gradient_takes_and_leaves_out_is_logged_once(quadratic, caplog, rule, inputs, noted):
    optimiser = optimisers.make("coordinatewise", hidden_size=3, rule=rule, inputs=["rnnprop", *inputs]).double()
    with caplog.at_level("INFO", logger="l2lopt"):
        train(optimiser, quadratic, Blockwise(), unrolls=UnrollSettings(length=6, truncation=3))
    lines = [record.getMessage() for record in caplog.records]
    assert sum("a meta-gradient of 3 steps: record" in line for line in lines) == 1
    assert sum("taken as constants" in line for line in lines) == noted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_adam_cannot_move_finely_are_told_of(dtype, caplog):
    inputs = torch.ones(8, 2, dtype=dtype)
    problem = make_optimisee(
        lambda: torch.nn.Linear(2, 2).to(dtype), torch.nn.functional.cross_entropy, (inputs, torch.arange(8) % 2)
    )
    train(optimisers.make("coordinatewise", hidden_size=3).to(dtype), problem, updates=1)
    assert ("φ is in bfloat16" in caplog.text) == (dtype == torch.bfloat16)


class Planned(Backprop):
    """An estimator of somebody's own that knows what it takes."""

    def __init__(self, refuses):
        super().__init__()
        self.lengths, self.refuses = [], refuses

    def plan(self, update, loss, phi, carry, steps, length):
        if self.refuses:
            raise UserError("memory", expected="enough", found="too little", remedy="take a shorter run")
        assert loss(carry.params, carry.aux, next(iter(steps)).batch)[0].isfinite()
        self.lengths.append(length)


@pytest.mark.parametrize("refuses", [False, True])
def test_any_estimator_may_plan_its_largest_meta_gradient_once(quadratic, refuses):
    """Whatever its class is: the loop knows the contract alone, and what a plan refuses is not begun."""
    estimator = Planned(refuses)
    unrolls = UnrollSettings(length=[2, 6], curriculum=4)
    if refuses:
        with pytest.raises(UserError, match="memory: expected enough"):
            train(LearnedRate(1e-3), quadratic, estimator, unrolls=unrolls)
    else:
        train(LearnedRate(1e-3), quadratic, estimator, unrolls=unrolls)
    assert estimator.lengths == ([] if refuses else [6])


class InMemory:
    """A checkpoint in memory."""

    def __init__(self):
        self.saved = None

    def save(self, facts, tensors):
        self.saved = json.loads(json.dumps(facts)), {name: value.detach().clone() for name, value in tensors.items()}

    def load(self):
        return self.saved


def test_a_checkpoints_keys_are_those_of_earlier_versions(quadratic):
    """Whoever renames one of them locks users out of the runs that they have interrupted."""
    optimiser, checkpoint = LearnedRate(1e-3), InMemory()
    settings = MetaTrainSettings(updates=3, validate_every=2, checkpoint_every=1)
    unrolls = UnrollSettings(length=9, truncation=2)
    score = named(lambda _: 0.0)
    meta_train(optimiser, [quadratic], Backprop(), settings, unrolls, score=score, checkpoint=checkpoint)
    facts, tensors = checkpoint.saved
    assert facts == {
        "update": 3,
        "begun": 1,
        "runs": [{"number": 0, "update": 1, "done": 6}],
        "score": 0.0,
        "best_update": 0,
        "inner_steps": 6,
        "skipped": 0,
        "scores": [[0, 0.0], [2, 0.0], [3, 0.0]],
        "before": {"any": 0.0},
        "best": {"any": 0.0},
        "validated": True,
    }
    adam = {f"adam/rate/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {"best/rate", "phi/rate", *adam} | {name for name in tensors if name.startswith("run/0/")} == set(tensors)


def test_adams_moments_lie_beside_their_parameters():
    """Those of a parameter without dimensions as well, such as the gated rule's scale; the step count stays."""
    kept = Adam(optimisers.make("coordinatewise", hidden_size=3), None, MetaTrainSettings())
    for parameter in kept.optimiser.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept.adam.step()
    other = Adam(optimisers.make("coordinatewise", hidden_size=3).double(), None, MetaTrainSettings())
    other.load_state_dict(*kept.state_dict())
    assert any(parameter.dim() == 0 for parameter in other.optimiser.parameters())
    for parameter in other.optimiser.parameters():
        state = other.adam.state[parameter]
        assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq", "step")] == [torch.float64] * 2 + [torch.float32]
