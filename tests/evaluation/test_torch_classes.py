"""Classes of `torch.optim.Optimizer` in a comparison: our own curves, closures, modes, two classes, divergence."""

import math
from functools import partial

import laws
import pytest
import torch
from implementations import SAMPLED

import optimisees
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import seed_of
from l2lopt.evaluation import comparison, tuned_runs
from l2lopt.evaluation.free_runs import run_free
from l2lopt.evaluation.settings import Baseline, EvaluationSettings
from l2lopt.evaluation.torch_classes import torch_class
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import SGD, Scheduled, closures
from l2lopt.optimisers.rates import Rate

HERE = __name__
RATES = [0.003, 0.03, 0.3]


@pytest.fixture(scope="module")
def quadratic():
    return optimisees.make("quadratic", size=4, dtype="float64")


@pytest.fixture(scope="module")
def mlp():
    return SAMPLED["mlp"]()


def settings(*baselines, **changes):
    options = {"seeds": 2, "steps": 12, "horizons": [5, 12], "tuning_seeds": 2, "baselines": list(baselines)}
    return EvaluationSettings(**options | changes)


def make(choice, rate):
    return torch_class(choice).at(rate)


SAME = {
    "sgd": ("sgd", "torch.optim:SGD", "constant"),
    "momentum": ("momentum", {"name": "torch.optim:SGD", "momentum": 0.9}, "constant"),
    "adam": ("adam", "torch.optim:Adam", "constant"),
    "adam by its dotted name": ("adam", {"name": "torch.optim.Adam", "betas": [0.9, 0.999]}, "constant"),
    "adamw": ({"name": "adamw", "weight_decay": 0.1}, {"name": "torch.optim:AdamW", "weight_decay": 0.1}, "cosine"),
    "sgd with cosine": ("sgd", "torch.optim:SGD", "cosine"),
    "adam with cosine": ("adam", "torch.optim:Adam", "cosine"),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("rows", [None, 2])
def test_a_torch_class_gives_our_curves(mlp, name, rows):
    """The same problems, initial values, batches, tuning and schedules, to the rounding of float64."""
    ours, theirs, schedule = SAME[name]
    found = comparison.evaluate(
        {},
        mlp,
        settings(
            Baseline(optimiser=ours, rates=RATES, schedule=schedule, label="ours"),
            Baseline(optimiser=theirs, rates=RATES, schedule=schedule, label="theirs"),
            horizons=[5, 40],
            steps=40,
            rows=rows,
        ),
    )
    assert found.chosen["ours"] == found.chosen["theirs"]
    curves = {
        label: {row[2:5]: row.loss for row in found.rows if row.optimiser == label} for label in ("ours", "theirs")
    }
    assert len(curves["ours"]) > 40
    assert curves["theirs"] == pytest.approx(curves["ours"], rel=1e-11)
    assert curves["ours"][0, 40, "train"] < 0.98 * curves["ours"][0, 0, "train"]


def test_a_factory_can_be_compared_by_itself(quadratic):
    """Any function of named parameters that makes an optimiser."""
    plain = run_free(lambda params: torch.optim.SGD([p for _, p in params], lr=0.01), quadratic, [3, 4], [0, 1, 6])
    named = run_free(partial(torch.optim.SGD, lr=0.01), quadratic, [3, 4], [0, 1, 6])
    ours = run_free(SGD(0.01), quadratic, [3, 4], [0, 1, 6])
    assert named.steps == plain.steps == ours.steps
    laws.assert_close([plain.losses, plain.first], [ours.losses, ours.first])
    laws.assert_close([named.losses, named.first], [ours.losses, ours.first])
    result = comparison.evaluate({"mine": partial(torch.optim.SGD, lr=0.01)}, quadratic, settings())
    assert {row.optimiser for row in result.rows} == {"mine"}


def test_a_class_that_needs_a_closure_gets_one(quadratic):
    """L-BFGS evaluates the loss several times a step, all on the batch of that step."""
    asked, plain = [], quadratic.loss

    class Counted:
        def __getattr__(self, name):
            return getattr(quadratic, name)

        def batch(self, split, seed, step):
            return tuple(part.clone() for part in quadratic.batch(split, seed, step))  # told apart by identity

        def loss(self, params, aux, batch):
            asked.append(batch)
            return plain(params, aux, batch)

    choice = {"name": "torch.optim:LBFGS", "line_search_fn": "strong_wolfe", "max_iter": 8}
    run = run_free(make(choice, 1.0), Counted(), [3], [0, 3])
    assert run.losses["train"][1, 0] < 1e-3 * run.losses["train"][0, 0]
    batches = [{id(tensor) for tensor in batch} for batch in asked]
    assert len(batches) > 3 * 2
    starts = [k for k, batch in enumerate(batches) if k == 0 or batch != batches[k - 1]]
    assert len(starts) == 3
    alone = torch.nn.Parameter(quadratic.init(3)[0]["theta"].clone())
    optimizer = torch.optim.LBFGS([alone], lr=1.0, line_search_fn="strong_wolfe", max_iter=8)
    for step in range(3):
        batch = quadratic.batch("train", 3, step)

        def closure(batch=batch):
            optimizer.zero_grad()
            loss, _ = plain({"theta": alone}, {}, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    expected = quadratic.evaluate(
        {"theta": alone.detach()}, {}, next(iter(quadratic.evaluation_batches("train", 3)))[0]
    )
    assert float(run.losses["train"][1, 0]) == pytest.approx(float(expected), rel=1e-10)


class Averaged(torch.optim.Optimizer):
    """Schedule-free gradient descent without its interpolation: z ← z − η g(y), x the mean of all z, y = z.

    As in Defazio et al. 2024 with β = 0: gradients are taken at y in train mode, and x is what counts in eval mode.
    """

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.training, self.count = False, 0

    def _put(self, key):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if self.state[p]:
                        p.copy_(self.state[p][key])

    def train(self):
        self._put("z")
        self.training = True

    def eval(self):
        self._put("x")
        self.training = False

    @torch.no_grad()
    def step(self):
        assert self.training
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"], state["x"] = p.clone(), p.clone()
                state["z"] -= group["lr"] * p.grad
                state["x"] += (state["z"] - state["x"]) / self.count
                p.copy_(state["z"])


def test_losses_are_read_in_eval_mode_and_gradients_taken_in_train_mode(quadratic):
    run = run_free(make(f"{HERE}:Averaged", 0.05), quadratic, [3], [0, 2, 5])
    theta, _ = quadratic.init(3)
    z, trail, read = theta["theta"].clone(), [], {}
    for step in range(6):
        matrix, target = quadratic.batch("train", 3, step)
        mean = torch.stack(trail).mean(0) if trail else z
        read[step] = float((matrix @ mean - target).square().sum())
        z = z - 0.05 * 2 * matrix.T @ (matrix @ z - target)
        trail.append(z)
    assert run.losses["train"][:, 0].tolist() == pytest.approx([read[0], read[2], read[5]], rel=1e-10)


class Picky(torch.optim.Optimizer):
    """Gradient descent that draws noise, takes matrices alone, and refuses to go on from what is no number."""

    def __init__(self, params, lr, tensors=1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            if any(p.dim() != 2 for p in group["params"]):
                raise ValueError("only matrices")

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if not p.grad.isfinite().all():
                    raise RuntimeError("not a number")
                p -= group["lr"] * p.grad + 1e-3 * torch.randn(p.shape, dtype=p.dtype)


def test_a_class_for_matrices_leaves_the_rest_to_another(mlp):
    params, _ = mlp.init(0)
    named = [(name, value.clone().requires_grad_()) for name, value in params.items()]
    choice = {"name": "torch.optim:Muon", "rest": "adamw", "rest_names": ["2."]}
    muon, rest = torch_class(choice).at(0.02, warm_up=2, total=10)(named)
    by_id = {id(value): name for name, value in named}
    shares = [{by_id[id(p)] for group in one.param_groups for p in group["params"]} for one in (muon, rest)]
    assert shares[0] == {name for name, value in named if value.dim() == 2 and "2." not in name}
    assert shares[0]
    assert shares[0] | shares[1] == set(params)
    assert isinstance(rest, torch.optim.AdamW)
    assert (muon.param_groups[0]["lr"], rest.param_groups[0]["lr"]) == (0.02, 0.02)
    fixed = torch_class({"name": "torch.optim:Muon", "rest": {"name": "SGD", "lr": 0.5, "momentum": 0.9}})
    assert [one.param_groups[0]["lr"] for one in fixed.at(0.02)(named)] == [0.02, 0.5]
    run = run_free(make({"name": "torch.optim:Muon", "rest": "adamw"}, 0.02), mlp, [0], [0, 20])
    assert run.losses["train"][1, 0] < 0.98 * run.losses["train"][0, 0]


def test_both_classes_follow_the_schedule(mlp):
    params, _ = mlp.init(0)
    named = [(name, value.clone().requires_grad_()) for name, value in params.items()]
    pair = torch_class({"name": "torch.optim:Muon", "rest": "sgd"}).at(0.1, warm_up=2, total=6)(named)
    rates = []
    for _ in range(7):
        for _, value in named:
            value.grad = torch.ones_like(value)
        for one in pair:
            one.step()
        rates.append([one.param_groups[0]["lr"] for one in pair])
    expected = [0.05, 0.1, 0.1, 0.05 * (1 + math.sqrt(0.5)), 0.05, 0.05 * (1 - math.sqrt(0.5)), 0.0]
    assert rates == [[pytest.approx(rate, abs=1e-15)] * 2 for rate in expected]


def test_divergence_is_data(quadratic):
    """Also where a class raises once its gradients are no numbers; errors of sound gradients are not hidden."""
    result = comparison.evaluate(
        {},
        quadratic,
        settings(
            Baseline(optimiser="torch.optim:SGD", rates=[1e100], label="sgd"),
            steps=40,
            horizons=[40],
        ),
    )
    assert all(row.diverged == 2 and row.mean == math.inf for row in result.table)
    task = SAMPLED["mlp"]()
    choice = {"name": f"{HERE}:Picky", "rest": "sgd"}
    plain = task.loss
    task.loss = lambda params, aux, batch: tuple(
        x * 1e300 if k == 0 else x for k, x in enumerate(plain(params, aux, batch))
    )
    run = run_free(make(choice, 1e30), task, [0], [0, 3, 9], splits=("train",))
    assert run.losses["train"][:, 0].isnan().tolist() == [False, True, True]


class Broken(torch.optim.Optimizer):
    """A class that cannot make a step."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        raise RuntimeError("broken")


class Decomposed(torch.optim.SGD):
    """A class that no gradient gets through that is no number, as those of linear algebra."""

    def step(self):
        for group in self.param_groups:
            for value in group["params"]:
                torch.linalg.eigh(torch.outer(value.grad, value.grad))
        super().step()


def test_a_gradient_that_is_no_number_is_divergence_also_where_the_loss_is_one():
    """√|θ| at 0 has the loss 0 and no finite derivative."""

    class Rooted(Optimisee):
        def init(self, seed):
            return {"weight": torch.zeros(2)}, {}

        def batch(self, split, seed, step):
            return torch.ones(1)

        def loss(self, params, aux, batch):
            return self.evaluate(params, aux, batch), aux

        def evaluate(self, params, aux, batch):
            return params["weight"].abs().sqrt().sum() * batch.sum()

    run = run_free(make(f"{HERE}:Decomposed", 0.1), Rooted(), [0], [0, 3], splits=("train",))
    assert run.losses["train"][:, 0].tolist()[0] == 0
    assert run.losses["train"][1, 0].isnan()


def test_the_time_of_a_step_is_without_that_of_its_batch(monkeypatch):
    """As for the optimisers of ours. The clock stands still but for the batches."""
    now, task = [0.0], SAMPLED["mlp"]()
    batch = task.batch

    def slow(*where):
        now[0] += 1.0
        return batch(*where)

    task.batch = slow
    monkeypatch.setattr("l2lopt.evaluation.free_runs.time.perf_counter", lambda: now[0])
    for optimiser in (make("torch.optim:SGD", 0.1), SGD(0.1)):
        curves = run_free(optimiser, task, [0], [0, 3], splits=())
        assert curves.seconds == 0, optimiser
    assert now[0] >= 3


def test_a_mistake_of_a_class_is_not_taken_for_divergence(quadratic):
    with pytest.raises(RuntimeError, match="broken"):
        run_free(make(f"{HERE}:Broken", 0.1), quadratic, [0], [0, 3])


def test_random_numbers_of_a_class_are_those_of_its_problem(mlp):
    choice = {"name": f"{HERE}:Picky", "rest": "sgd"}
    both = run_free(make(choice, 0.01), mlp, [0, 1], [4])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        state = torch.get_rng_state()
        alone = run_free(make(choice, 0.01), mlp, [1], [4])
        assert torch.equal(torch.get_rng_state(), state)
    laws.assert_same(alone.losses, {split: losses[:, 1:] for split, losses in both.losses.items()})


def test_progress_is_that_of_all_problems(quadratic):
    seen = []
    run_free(make("torch.optim:SGD", 0.01), quadratic, [0, 1], [0, 4], report=lambda *event: seen.append(event[:3]))
    assert seen == [("run", 0, 8), ("run", 4, 8), ("run", 4, 8), ("run", 8, 8)]


class Rateless(torch.optim.Optimizer):
    """A class without a rate."""

    def __init__(self, params, momentum=0.9):
        super().__init__(params, {})


def halved(lr: Rate) -> SGD:
    """An optimiser of ours from another module."""
    return SGD(lr / 2)


def test_a_function_of_another_module_may_make_one_of_ours(quadratic):
    """Side by side as all of ours, a rate for each row."""
    baselines = [
        Baseline(optimiser=f"{HERE}:halved", rates=[0.002, 0.02], label="halved", schedule=schedule)
        for schedule in ("constant", "cosine")
    ]
    plain = Baseline(optimiser="sgd", rates=[0.001, 0.01], label="plain")
    result = comparison.evaluate({}, quadratic, settings(baselines[0], plain))
    losses = {name: [row.loss for row in result.rows if row.optimiser == name] for name in ("halved", "plain")}
    assert losses["halved"] == pytest.approx(losses["plain"], rel=1e-12)
    assert isinstance(baselines[1].build(torch.tensor([0.1, 0.2]), 40), Scheduled)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("torch.optim:Adan", "expected 'Adan' in torch.optim, found none; did you mean 'Adam'"),
        ("torch.optim.Adan", "did you mean 'Adam'"),
        ("nowhere_to_be_found:Adam", "found no module 'nowhere_to_be_found'; install it"),
        ("math:sqrt", "expected an option 'lr', found none"),
        ({"name": "torch.optim:Muon", "rest": "optimizer"}, "expected a class of torch.optim.Optimizer, found <class"),
        ({"name": "torch.optim:Adam", "beta": 1}, "beta: expected a known key, found 'beta'; did you mean 'betas'"),
        ({"name": "torch.optim:Adam", "betas": [2.0, 0.9]}, "one for these parameters, found Invalid beta"),
        ({"name": "torch.optim:Muon"}, 'found Muon only supports 2D .*rest = "adamw"'),
        ({"name": "torch.optim:Muon", "rest": "adamv"}, "did you mean 'AdamW'|did you mean 'Adam'"),
        ({"name": "torch.optim:Muon", "rest": "adamw", "rest_names": "head"}, "rest_names: expected a list of names"),
        (f"{HERE}:Rateless", "expected a class with an option lr"),
        ({"name": "torch.optim:Adam", "lr": 0.1}, r"rates: expected the only rates, found lr = 0\.1; leave it out"),
    ],
)
def test_a_mistake_is_found_before_any_run(mlp, monkeypatch, choice, message):
    monkeypatch.setattr(tuned_runs, "run_groups", None)
    with pytest.raises(UserError, match=message):
        comparison.evaluate({}, mlp, settings(Baseline(optimiser=choice, rates=RATES)))


def test_reported_problems_are_those_of_every_other_optimiser(mlp):
    result = comparison.evaluate(
        {"mine": SGD(0.1)}, mlp, settings(Baseline(optimiser="torch.optim:Rprop", rates=[0.01]))
    )
    starts = {(row.optimiser, row.seed): row.loss for row in result.rows if row[3:5] == (0, "test")}
    for index in range(2):
        seed = seed_of("evaluation", 0, index)
        params, aux = mlp.init(seed)
        parts = [
            (float(mlp.evaluate(params, aux, batch)), count) for batch, count in mlp.evaluation_batches("test", seed)
        ]
        expected = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
        assert starts["mine", index] == pytest.approx(expected, rel=1e-12)
        assert starts["torch.optim:Rprop", index] == pytest.approx(expected, rel=1e-12)


class Sharp(torch.optim.SGD):
    """Sharpness-aware minimisation (Foret et al. 2021), as it is usually written: the closure comes after a move."""

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"]]
        moves = [0.05 * p.grad / p.grad.norm() for p in params]
        torch._foreach_add_(params, moves)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, moves)
        super().step()


@pytest.mark.parametrize("clears", [True, False])
def test_a_class_that_moves_first_gets_the_loss_where_it_asks_for_it(quadratic, clears, monkeypatch):
    if not clears:  # the old gradients would do for a step, and are the wrong ones
        monkeypatch.setattr(Sharp, "zero_grad", lambda self: None)
    run = run_free(lambda named: Sharp([value for _, value in named], lr=0.01), quadratic, [3], [0, 5])
    alone = torch.nn.Parameter(quadratic.init(3)[0]["theta"].clone())
    for step in range(5):
        batch = quadratic.batch("train", 3, step)

        def gradient(at, batch=batch):
            at = at.detach().clone().requires_grad_()
            return torch.autograd.grad(quadratic.loss({"theta": at}, {}, batch)[0], at)[0]

        first = gradient(alone)
        alone.data -= 0.01 * gradient(alone + 0.05 * first / first.norm())
    batch, _ = next(iter(quadratic.evaluation_batches("train", 3)))
    expected = quadratic.evaluate({"theta": alone.detach()}, {}, batch)
    assert float(run.losses["train"][1, 0]) == pytest.approx(float(expected), rel=1e-10)


def test_a_class_that_cannot_step_is_refused_before_any_run(quadratic, monkeypatch):
    monkeypatch.setattr(comparison, "optimiser_run", None)
    refused = Baseline(optimiser="torch.optim:SparseAdam", rates=[0.1])
    message = "optimiser 'torch.optim:SparseAdam': expected one that can step, found SparseAdam does not support dense"
    with pytest.raises(UserError, match=message):
        comparison.evaluate({}, quadratic, settings(refused))


def _before(closure):
    """The copies that a closure compares with."""
    cells = (cell.cell_contents for cell in closure.__closure__)
    return dict(zip(closure.__code__.co_freevars, cells, strict=True))["before"]


def test_a_class_that_asks_first_is_trusted_after_three_steps():
    """Copies of parameters and gradients would count as its time."""
    weight = torch.ones(3, requires_grad=True)
    mine = type("Mine", (torch.optim.SGD,), {"__module__": "another.package"})
    for kind, expected in ((mine, [True] * 3 + [False] * 2), (torch.optim.SGD, [False] * 5), (Sharp, [True] * 5)):
        optimizer, copied = kind([weight], lr=0.1), []

        def again():
            weight.grad = torch.ones(3)
            return torch.zeros(())

        for _ in range(5):
            again()
            closure = closures.closure_of(optimizer, [weight], torch.ones(()), again)
            copied.append(bool(_before(closure)))
            optimizer.step(closure)
        assert copied == expected
