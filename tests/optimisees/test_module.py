"""Modules as optimisees: batch norm and dropout equal ordinary training; hidden randomness is refused."""

import math
from functools import partial

import laws
import pytest
import torch
from implementations import IMAGES, SAMPLED, linear, module_optimisee, normal
from torch import nn

from l2lopt import LearnedOptimizer, estimators, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.evaluation.free_runs import run_free
from l2lopt.experiments import build
from l2lopt.optimisee import flat_loss
from l2lopt.training.train import TrainSettings, train
from optimisees import ModuleOptimisee
from optimisees.data import sampling
from optimisees.data.datasets import InMemory


def ordinary(task, params, aux):
    """The factory's module with these values, as an ordinary module."""
    module = task.factory()
    module.load_state_dict(params | aux)
    return module


def test_batch_norm_equals_ordinary_training():
    task = SAMPLED["module with batch norm"]()
    start = task.init(3)
    module = ordinary(task, *start).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        batch = task.batch("inner", 3, step)
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(batch["inputs"]), batch["targets"]).backward()
        optimiser.step()
    params, aux = laws.descend(task, 3, start, range(6), rate=0.1)[-1]
    laws.assert_close(params | aux, {name: module.state_dict()[name] for name in params | aux})
    assert aux["2.num_batches_tracked"] == 6
    with torch.no_grad():
        wanted = nn.functional.cross_entropy(module.eval()(IMAGES.test_inputs), IMAGES.test_targets)
    whole = [task.evaluate(params, aux, batch) * count for batch, count in task.evaluation_batches("test", 3)]
    laws.assert_close(sum(whole) / len(IMAGES.test_inputs), wanted)


@pytest.mark.parametrize("name", SAMPLED)
def test_evaluation_is_the_module_in_test_mode(name):
    task = SAMPLED[name]()
    params, aux = task.init(1)
    batch = task.batch("test", 1, 0)
    outputs = ordinary(task, params, aux).eval()(batch["inputs"])
    laws.assert_close(
        task.evaluate(params, aux, batch), nn.functional.cross_entropy(outputs, batch["targets"]).detach()
    )


def with_masks(task, batch, mask):
    """The loss of the ordinary module, the dropout layer's output multiplied by a mask as it comes by."""
    module = ordinary(task, *task.init(2)).eval()
    layer = next(layer for layer in module if isinstance(layer, nn.Dropout | nn.Dropout2d))
    layer.register_forward_hook(lambda layer, args, output: args[0] * mask)
    return nn.functional.cross_entropy(module(batch["inputs"]), batch["targets"]).detach()


@pytest.mark.parametrize(("kind", "shape"), [("dropout", (5, 6)), ("dropout2d", (5, 6, 1, 1))])
def test_dropout_is_the_mask_applied_by_hand(kind, shape):
    task = SAMPLED[f"module with {kind}"]()
    params, aux = task.init(2)
    losses = []
    for step in (0, 1):
        batch = task.batch("train", 2, step)
        ((_, mask),) = batch["masks"].items()
        assert mask.shape == shape
        losses.append(task.loss(params, aux, batch)[0])
        laws.assert_close(losses[-1], with_masks(task, batch, mask))
    other = batch | {"masks": task.batch("train", 2, 0)["masks"]}
    assert task.loss(params, aux, other)[0] != losses[1]
    assert task.evaluate(params, aux, batch) == task.evaluate(params, aux, other)


@pytest.mark.parametrize(("kind", "p"), [("dropout", 0.4), ("dropout2d", 0.3)])
def test_masks_drop_their_share_and_differ_between_steps_and_seeds(kind, p):
    task = SAMPLED[f"module with {kind}"]()
    keys = [("train", seed, step) for seed in range(10) for step in range(20)]
    masks = [next(iter(task.batch(*key)["masks"].values())) for key in keys]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 195
    values = torch.stack(masks)
    assert values.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)], rel=1e-7)
    assert values.mean().item() == pytest.approx(1, abs=4 * (p / (1 - p) / values.numel()) ** 0.5)


class Functional(nn.Module):
    """Dropout that no layer shows."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Silent(nn.Dropout):
    """Somebody's subclass."""


@pytest.mark.parametrize("layer", [nn.RReLU, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_layers_with_other_random_numbers_are_refused(layer):
    with pytest.raises(UserError, match=f"layer '2': expected a loss that is pure, found {layer.__name__}"):
        module_optimisee(nn.Flatten, linear(18, 3), layer)


def test_functional_dropout_is_refused():
    with pytest.raises(UserError, match="found random numbers in it"):
        module_optimisee(nn.Flatten, linear(18, 3), Functional)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([lambda: nn.ReLU(inplace=True)], id="at once"),
        pytest.param([nn.Flatten, lambda: nn.ReLU(inplace=True)], id="a view of them"),
        pytest.param([nn.Dropout, lambda: nn.ReLU(inplace=True)], id="in test mode alone"),
    ],
)
def test_a_module_that_changes_its_inputs_is_refused(layers):
    """The samples are the caller's, and the next step's."""
    before = IMAGES.train_inputs.clone()
    with pytest.raises(UserError, match="found inputs changed in place; give its first layer inplace=False"):
        module_optimisee(*layers, nn.Flatten, linear(18, 3))
    assert torch.equal(IMAGES.train_inputs, before)


class Twice(nn.Module):
    """Sends its input through one dropout layer two times."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.dropout(x))


def test_two_passes_through_one_dropout_layer_are_refused():
    with pytest.raises(UserError, match=r"dropout '2\.dropout\.mask': expected one pass"):
        module_optimisee(nn.Flatten, linear(18, 3), Twice)


def test_a_dropout_layer_used_twice_is_pure():
    shared = nn.Dropout(0.5)
    laws.assert_pure(partial(module_optimisee, nn.Flatten, linear(18, 4), lambda: shared, linear(4, 3), lambda: shared))


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(partial(nn.Dropout, 0.0), id="p = 0"),
        pytest.param(partial(nn.Dropout, 1.0), id="p = 1"),
        pytest.param(partial(Silent, 0.5), id="subclass"),
    ],
)
def test_edges_of_dropout(layer):
    task = module_optimisee(nn.Flatten, linear(18, 3), layer)
    assert task.loss(*task.init(0), task.batch("train", 0, 0))[0].isfinite()


class Counting(nn.Module):
    """Overwrites its buffer rather than moving it in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return x


def test_an_overwritten_buffer_is_refused():
    with pytest.raises(UserError, match=r"buffer '1\.seen': expected a buffer that stays"):
        module_optimisee(nn.Flatten, Counting, linear(18, 3))


def half_frozen():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    return module


def test_no_optimiser_fits_a_module_whose_parameters_are_all_frozen():
    frozen = module_optimisee(nn.Flatten, lambda: nn.Linear(IMAGES.train_inputs[0].numel(), 3).requires_grad_(False))
    with pytest.raises(UserError, match="expected one dtype, found no parameters; let some require a gradient"):
        build.match_dtype(optimisers.make("coordinatewise", hidden_size=3), [frozen])


@pytest.mark.parametrize("unroll", ["backprop", "higher"])
def test_frozen_parameters_stay(unroll):
    samples = InMemory(normal(12, 4).float(), torch.arange(12) % 2, normal(6, 4).float(), torch.arange(6) % 2)
    task = ModuleOptimisee(half_frozen, nn.functional.cross_entropy, samples, batch_size=4)
    params, aux = task.init(0)
    assert set(params) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    result = train(task, partial(torch.optim.SGD, lr=0.1), TrainSettings(steps=5))
    start = task.init(seed_of("train", 0))[1]
    assert all(result.aux[name].equal(start[name]) for name in ("0.weight", "0.bias"))
    assert result.params["2.weight"].ne(task.init(seed_of("train", 0))[0]["2.weight"]).all()
    layout = Layout.of(params)
    rule = optimisers.make("coordinatewise", hidden_size=3, inputs=["log-and-sign"], rule="additive")
    carry = Carry(layout.ravel(params), aux, rule.init(layout))
    steps = [InnerStep(task.batch("train", 0, k), (Target(task.batch("train", 0, k + 1), 1.0),)) for k in range(3)]
    found = estimators.make(unroll)(rule.update_with, flat_loss(task, layout), rule.phi(), carry, steps)
    expected = estimators.make("backprop", order=2 if unroll == "higher" else 1)(
        rule.update_with, flat_loss(task, layout), rule.phi(), carry, steps
    )
    laws.assert_close(found.gradient, expected.gradient, 1e-4)


class Watching(optimisers.SGD):
    """Notes the roles and the length that it is told of."""

    def __init__(self):
        super().__init__(0.1)
        self.told = []

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        self.told.append(([role.kind for role in layout.roles], total_steps))
        return super().init(layout, batch, like=like, total_steps=total_steps)


def test_every_run_tells_the_optimiser_what_the_modules_parameters_are_and_how_long_it_is():
    """By names and shapes alone they would be four matrices and vectors."""

    def model():
        return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 9), nn.Flatten(0, 1))

    tokens = torch.arange(36).view(12, 3) % 9
    samples = InMemory(tokens[:9], tokens[:9].flatten().view(9, 3), tokens[9:], tokens[9:])
    task = ModuleOptimisee(model, lambda y, t: nn.functional.cross_entropy(y, t.flatten()), samples, batch_size=3)
    kinds, watching, made = ["embedding", "matrix", "vector", "head", "vector"], Watching(), []
    run_free(watching, task, [0], [2])
    assert watching.told == [(kinds, 2)]

    def factory(params):
        made.append(LearnedOptimizer(params, "normalised-muon"))
        return made[0]

    train(task, factory, TrainSettings(steps=3))
    (group,) = made[0].param_groups
    assert (group["kind"], group["steps"]) == (kinds, 3)


@pytest.mark.parametrize(
    ("layer", "shape", "mask"),
    [
        (nn.Dropout(0.5), (4, 5, 6), (4, 5, 6)),
        (nn.Dropout1d(0.5), (4, 5, 6), (4, 5, 1)),
        (nn.Dropout2d(0.5), (4, 5, 6, 3), (4, 5, 1, 1)),
        (nn.Dropout2d(0.5), (4, 5, 6), (4, 5, 1)),
        (nn.Dropout3d(0.5), (4, 5, 6, 3, 2), (4, 5, 1, 1, 1)),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")
def test_masks_have_the_shape_of_what_pytorch_drops(layer, shape, mask):
    task = ModuleOptimisee(
        lambda: nn.Sequential(layer, nn.Flatten(), nn.Linear(math.prod(shape[1:]), 2)),
        nn.functional.cross_entropy,
        InMemory(*(torch.ones(4, *shape[1:]), torch.zeros(4).long()) * 2),
        batch_size=4,
    )
    ((_, found),) = task.batch("train", 0, 0)["masks"].items()
    assert found.shape == mask
    dropped = layer(torch.ones(shape)).broadcast_to(shape)
    for axis, size in enumerate(mask):
        if size == 1:  # nothing varies there
            assert torch.equal(dropped, dropped.narrow(axis, 0, 1).expand(shape))


def test_batch_norm_needs_two_samples():
    data = InMemory(*(torch.randn(4, 3), torch.zeros(4).long()) * 2)
    with pytest.raises(UserError, match="batch_size: expected 2 or more, for batch norm, found 1"):
        ModuleOptimisee(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), nn.functional.cross_entropy, data, 1)


def test_a_problem_has_a_test_sample():
    data = InMemory(torch.randn(4, 3), torch.zeros(4).long(), torch.randn(0, 3), torch.zeros(0).long())
    with pytest.raises(UserError, match="test: expected at least one test sample, found none"):
        ModuleOptimisee(lambda: nn.Linear(3, 2), nn.functional.cross_entropy, data, 2)


class Recurrent(nn.Module):
    """A layer that `torch.func.vmap` does not know."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(1, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x[..., None])[0][:, -1]


def test_what_vmap_does_not_know_runs_by_itself():
    data = InMemory(*(torch.randn(8, 3), torch.arange(8) % 2) * 2)
    task = ModuleOptimisee(Recurrent, nn.functional.cross_entropy, data, 4)
    with pytest.raises(UserError, match=r"model: expected a model that torch.func.vmap runs.*rows to 1"):
        run_free(optimisers.SGD(0.1), task, [0, 1], [2])
    assert run_free(optimisers.SGD(0.1), task, [0], [2]).losses["test"].isfinite().all()


def test_few_orders_of_large_sets_are_kept():
    """Each takes eight bytes a sample."""
    for limit, kept in sampling._KEPT.items():
        if limit < math.inf:
            assert 8 * limit * kept.cache_info().maxsize <= 600e6
        assert kept.cache_info().maxsize >= 40
        count = min(limit, 1_200_000)
        before = kept.cache_info().misses
        order = sampling._permutation(count, 1)
        assert kept.cache_info().misses == before + 1
        assert sampling._permutation(count, 1) is order
        kept.cache_clear()
