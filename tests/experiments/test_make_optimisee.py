"""Optimisees from a model, a loss and samples: the samples are the caller's, mistakes end in one line."""

import random
from collections import namedtuple
from contextlib import nullcontext
from functools import partial, wraps

import laws
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisee import evaluate_rows, evaluate_split

INPUTS = torch.arange(600 * 3, dtype=torch.float32).view(600, 3) / 1800
TARGETS = torch.arange(600) % 2
SET = TensorDataset(INPUTS, TARGETS)
NESTED = torch.nested.nested_tensor([INPUTS, INPUTS], layout=torch.jagged)
Pair = namedtuple("Pair", "inputs targets")


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def made(train=SET, test=SET, model=model, loss=nn.functional.cross_entropy, **options):
    return l2lopt.make_optimisee(model, loss, train, test, **options)


class Numbers(Dataset):
    """Python numbers and arrays, as data sets often give them."""

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return INPUTS[index].numpy(), int(TARGETS[index])


@pytest.mark.parametrize(
    "source",
    [
        pytest.param((INPUTS, TARGETS), id="tensors"),
        pytest.param([INPUTS.numpy(), TARGETS.numpy()], id="arrays"),
        pytest.param([INPUTS.flip(0).numpy()[::-1], TARGETS.flip(0).numpy()[::-1]], id="reversed arrays"),
        pytest.param([INPUTS.numpy().astype(">f4"), TARGETS.numpy().astype(">i8")[::-1][::-1]], id="big-endian arrays"),
        pytest.param(SET, id="data set"),
        pytest.param(Numbers(), id="a data set of numbers"),
        pytest.param(DataLoader(SET, 7), id="loader"),
        pytest.param(DataLoader(SET, 7, shuffle=True, drop_last=True), id="a loader that shuffles"),
        pytest.param(DataLoader(SET, 7, sampler=SequentialSampler(SET)), id="a loader with a sampler"),
        pytest.param(
            DataLoader(SET, 7, collate_fn=lambda rows: Pair(*map(torch.stack, zip(*rows, strict=True)))),
            id="a collate_fn",
        ),
    ],
)
def test_samples_are_read_in_the_order_of_their_indices(source):
    data = made(source).data
    assert torch.equal(data.train_inputs, INPUTS)
    assert torch.equal(data.train_targets, TARGETS)


def test_a_part_of_a_data_set_is_that_part():
    assert torch.equal(made(Subset(SET, [5, 2, 300])).data.train_inputs, INPUTS[[5, 2, 300]])


def test_a_share_put_aside_for_testing_is_always_the_same_and_no_training_sample():
    task = l2lopt.make_optimisee(model, nn.functional.cross_entropy, (INPUTS, TARGETS), 0.25)
    again = l2lopt.make_optimisee(model, nn.functional.cross_entropy, SET, 0.25)
    assert (len(task.data.train_inputs), len(task.data.test_inputs)) == (450, 150)
    both = torch.cat([task.data.train_inputs, task.data.test_inputs])
    assert torch.equal(both.sort(0).values, INPUTS)
    laws.assert_same(tuple(task.data), tuple(again.data))
    pairs = zip(task.data.test_inputs, task.data.test_targets, strict=True)
    assert all(int((row[0] * 600).round()) % 2 == target for row, target in pairs)


@pytest.mark.parametrize(
    ("source", "batch_size", "found"),
    [(DataLoader(SET, 7), None, 7), (DataLoader(SET, 7), 9, 9), (SET, None, 128), (Subset(SET, range(50)), None, 50)],
)
def test_the_batch_size_is_the_loaders_unless_it_is_given(source, batch_size, found):
    assert len(made(source, batch_size=batch_size).batch("train", 0, 0)["inputs"]) == found


def test_is_pure():
    laws.assert_pure(partial(made, batch_size=20))


def test_the_callers_random_numbers_are_left_alone():
    state = torch.get_rng_state()
    made(DataLoader(SET, 7, shuffle=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_augmentation_is_the_runs_own():
    task = made(augment=lambda inputs, source: inputs + torch.rand((), generator=source), batch_size=20)
    once, again, other = (task.batch("train", 0, step)["inputs"] for step in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.isin(once, INPUTS).any()
    assert not torch.equal(once, other)
    assert torch.isin(task.batch("test", 0, 0)["inputs"], INPUTS).all()


def test_augmentation_by_other_generators_is_refused():
    expected = "augment: expected equal samples of equal generators, found other random numbers; draw from the"
    with pytest.raises(UserError, match=expected):
        made(augment=lambda inputs, generator: inputs + torch.randn_like(inputs))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_that_change_nothing_this_time_are_refused(draw):
    """A draw of one in a million would show in one run of a million, and not in a trial."""

    class Drops(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (draw() > 1e-6 if self.training else 1)

    with pytest.raises(UserError, match="expected a loss that is pure, found random numbers in it"):
        made(model=lambda: Drops(3, 2))
    with pytest.raises(UserError, match=r"augment: .* found other random numbers"):
        made(augment=lambda inputs, generator: inputs if draw() > 1e-6 else inputs.flip(0))


class Reads(nn.Module):
    """Reaches a layer by what a copy of the module shares with it."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.head, self.way = nn.Linear(3, 4), nn.Linear(4, 2), way
        self.read = lambda x: self.head(x)
        self.kept = [self.head.weight]
        if way == "hook":
            self.layer.register_forward_hook(lambda layer, args, output: output + self.head.bias.sum())

    def forward(self, x):
        x = self.layer(x)
        if self.way == "lambda":
            return self.read(x)
        return x @ self.kept[0].T if self.way == "list" else self.head(x)


@pytest.mark.parametrize("way", ["lambda", "hook", "loss"])
def test_parameters_that_no_optimiser_would_move_are_refused(way):
    scale = nn.Linear(1, 1)
    loss = nn.functional.cross_entropy
    given = {"loss": lambda outputs, targets: loss(outputs * scale.weight, targets)} if way == "loss" else {}
    with pytest.raises(UserError, match=r"found others, which no optimiser would move; in forward reach layers by"):
        made(model=lambda: Reads(way), **given)
    made(model=lambda: Reads("attribute"))


def test_evaluations_leave_a_runs_buffers_alone():
    """A range that a model goes on observing in test mode is that of training samples."""

    class Observes(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("top", torch.ones(()))

        def forward(self, x):
            self.top.copy_(torch.maximum(self.top, x.detach().abs().max()))
            return super().forward(x / self.top)

    task = made((INPUTS, TARGETS), (100 * INPUTS + 100, TARGETS), model=Observes)
    params, aux = task.init(0)
    for split in ("train", "test"):
        evaluate_split(task, split, 0, params, aux)
    batch = task.batch("train", 0, 0)
    task.metrics(params, aux, batch)
    assert float(aux["top"]) == 1.0
    assert float(task.loss(params, aux, batch)[1]["top"]) == 1.0


def test_a_sparse_gradient_is_refused():
    words = torch.arange(40).remainder(9).view(20, 2)

    def model():
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))

    with pytest.raises(UserError, match=r"parameter '0.weight': expected a dense gradient, found a sparse one"):
        made((words, torch.arange(20) % 2), (words, torch.arange(20) % 2), model=model)


def test_errors_of_the_callers_functions_end_in_one_line():
    for model in (lambda: Asserts(4), lambda: Tabled("logits")):
        with pytest.raises(UserError, match="expected a batch that goes through"):
            made(model=model, loss=lambda out, y: nn.functional.cross_entropy(out["scores"], y))


class Asserts(nn.Linear):
    def __init__(self, size):
        super().__init__(3, 2)
        self.size = size

    def forward(self, x):
        assert x.shape[1] == self.size, "another width"
        return {"scores": super().forward(x)}


class Tabled(nn.Linear):
    def __init__(self, name):
        super().__init__(3, 2)
        self.name = name

    def forward(self, x):
        return {self.name: super().forward(x)}


def test_a_buffer_that_the_seed_does_not_give_is_refused():
    def model():
        layer = nn.Linear(3, 2)
        layer.register_buffer("shift", torch.tensor(NUMPY.normal(size=2)))
        return layer

    with pytest.raises(UserError, match="expected initial values that follow from the seed"):
        made(model=model)


def test_a_loss_that_is_broadcast_is_refused():
    """MSE of outputs [n, 1] and targets [n] is a mean over all pairs."""
    inputs, targets = torch.randn(12, 3), torch.randn(12)
    model, loss = lambda: torch.nn.Linear(3, 1), torch.nn.functional.mse_loss
    with pytest.raises(UserError, match=r"expected equal shapes, found Using a target size .*; give both one shape"):
        l2lopt.make_optimisee(model, loss, (inputs, targets), batch_size=4)
    l2lopt.make_optimisee(model, loss, (inputs, targets[:, None]), batch_size=4)


@pytest.mark.parametrize(
    ("augment", "found"),
    [
        (lambda inputs, generator: (inputs, generator), "a tensor of 4 inputs, found a tuple; return the inputs alone"),
        (lambda inputs, generator: inputs[:1], r"a tensor of 4 inputs, found a tensor of shape \(1, .*\)"),
        (lambda inputs: inputs, r"inputs that it can change, found .*takes 1 positional argument.*; check augment\("),
    ],
)
def test_augmentation_that_gives_no_inputs_is_refused(augment, found):
    with pytest.raises(UserError, match=f"augment: expected {found}"):
        made(augment=augment, batch_size=4)


def test_what_becomes_of_the_callers_samples_does_not_matter():
    inputs, targets = INPUTS.clone().numpy(), TARGETS.clone()
    task = made((inputs, targets), (inputs, targets))
    before = task.fingerprint()
    inputs += 1
    targets += 1
    assert task.fingerprint() == before
    assert torch.isin(task.batch("train", 0, 0)["inputs"], INPUTS).all()


def test_statistics_that_each_pass_moves_are_no_random_numbers():
    """Spectral norm goes on with its power iteration, and batch norm counts."""
    spectral = nn.utils.parametrizations.spectral_norm
    task = made(model=lambda: nn.Sequential(spectral(nn.Linear(3, 4)), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert len(task.init(0)[0]) == 6


def test_a_decorator_may_give_the_factory_its_arguments():
    @wraps(nn.Linear)
    def configured(*args):
        return nn.Linear(*(args or (3, 2)))

    assert len(made(model=configured).init(0)[0]) == 2


def test_a_buffer_that_is_expanded_stays():
    class Weighted(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("factor", torch.ones(1).expand(2))

        def forward(self, x):
            return super().forward(x) * self.factor

    assert made(model=Weighted).init(0)[1]["factor"].shape == (2,)


class Augmented(Numbers):
    def __getitem__(self, index):
        return INPUTS[index] + torch.rand(3), TARGETS[index]


class Cropped(Numbers):
    def __getitem__(self, index):
        return INPUTS[index, : 3 if index < 300 else 2], TARGETS[index]


class Lengthening(Numbers):
    """Of one shape in each chunk that is read, but not in all."""

    def __getitem__(self, index):
        return INPUTS[index, : 3 if index < 512 else 2], TARGETS[index]


class Stream(IterableDataset):
    def __iter__(self):
        yield from SET


class Tables(Numbers):
    def __getitem__(self, index):
        return {"inputs": INPUTS[index], "targets": TARGETS[index]}


class Ragged(Numbers):
    """Of one shape each, but for the targets of the last chunks."""

    def __getitem__(self, index):
        return INPUTS[index], TARGETS[index].repeat(1 if index < 512 else 2)


class Endless(Dataset):
    def __getitem__(self, index):
        return SET[index]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (INPUTS, r"train: expected a pair \(inputs, targets\) of tensors, found a Tensor; pass a pair"),
        ((INPUTS, TARGETS, TARGETS), "found 3 parts"),
        ((INPUTS.to_sparse(), TARGETS), "expected dense tensors, found a sparse_coo one; pad it, or call its to_dense"),
        ((NESTED, TARGETS), "expected dense tensors, found a nested one"),
        ((INPUTS, "ab"), "found a str in it; make tensors of both"),
        ((INPUTS, TARGETS[:9]), r"expected as many inputs as targets, found shapes \[600, 3\] and \[9\]"),
        ((INPUTS, torch.tensor(1)), r"found shapes \[600, 3\] and \[\]"),
        (Tables(), "of tensors, found a dict; pass a pair, or a data set whose samples are pairs"),
        (Stream(), "expected a data set with indices and a length, found an IterableDataset; read it into tensors"),
        (DataLoader(Stream(), 7), "found an IterableDataset"),
        (Augmented(), "expected the same samples each time, found others the second time; .* pass augment="),
        (DataLoader(Augmented(), 7), "found others the second time"),
        (Cropped(), r"train: expected samples of one shape, found .*equal size"),
        (Lengthening(), r"train: expected samples of one shape, found \[2\] and \[3\]; pad or resize them"),
        (Ragged(), r"train: expected samples of one shape, found \[1\] and \[2\]; pad or resize them"),
        (Endless(), "a data set with indices and a length, found Endless without a length; give it a __len__"),
        (DataLoader(Endless(), 7), "found Endless without a length"),
        ((INPUTS, np.array(["a"] * 600)), "train: expected numbers, found .*str.*; number the classes"),
        (Subset(SET, []), "expected samples, found none"),
        (DataLoader(SET, 7, sampler=WeightedRandomSampler([1.0] * 600, 600)), "found WeightedRandomSampler; pass the"),
        (DataLoader(SET, 7, sampler=RandomSampler(SET, num_samples=30)), "found RandomSampler"),
        (DataLoader(SET, 7, sampler=RandomSampler(SET, replacement=True)), "found RandomSampler"),
        (DataLoader(SET, batch_size=None), "expected a DataLoader with a batch_size, found a batch_sampler"),
        (DataLoader(SET, batch_sampler=type("Mine", (BatchSampler,), {})(range(600), 3, False)), "a batch_sampler"),
    ],
)
def test_samples_that_are_no_samples_are_refused(source, message):
    with pytest.raises(UserError, match=message) as error:
        made(source)
    assert "\n" not in str(error.value)


SHARED = model()
NUMPY = np.random.default_rng(0)


def drawn_by_numpy():
    layer = nn.Linear(3, 2)
    layer.bias.data = torch.tensor(NUMPY.normal(size=2), dtype=torch.float32)
    return layer


class Noisy(nn.Module):
    """Draws from a generator of its own, or from NumPy's."""

    def __init__(self, by_numpy):
        super().__init__()
        self.layer, self.by_numpy, self.generator = nn.Linear(3, 2), by_numpy, torch.Generator().manual_seed(0)

    def forward(self, x):
        drawn = torch.randn(x.shape, generator=self.generator)
        return self.layer(x + (torch.from_numpy(NUMPY.normal(size=x.shape)).to(x) if self.by_numpy else drawn))


class Turned(nn.Dropout):
    def forward(self, x):
        return super().forward(x.mT).mT


class Sparse(nn.Linear):
    """As of a graph; no checkpoint holds such a buffer."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())

    def forward(self, inputs):
        return torch.sparse.mm(self.adjacency, super().forward(inputs).T).T


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Noisy(False), "expected a loss that is pure, found random numbers in it"),
        (lambda: Noisy(True), "expected a loss that is pure, found random numbers in it"),
        (lambda: nn.Sequential(nn.Linear(3, 2), Turned()), "expected a loss that is pure, found random numbers"),
        (SHARED, "model: expected a function that makes a fresh nn.Module, found a Sequential; write lambda: in front"),
        (lambda: SHARED, "found the same parameters twice; make the layers inside the function"),
        (lambda: None, "found one that makes a NoneType; return the module"),
        ("mlp", "found 'mlp'; pass the model's class, or a lambda"),
        (drawn_by_numpy, "expected initial values that follow from the seed, found others under the same seed"),
        (
            lambda: nn.Linear(4, 2),
            "expected a batch that goes through, found .*mat1 and mat2 shapes",
        ),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.RReLU()), "expected a loss that is pure, found RReLU"),
        (nn.Linear, "model: expected a function without arguments, found missing a required .*'in_features'; write"),
        (lambda: Sparse(), r"model: expected dense parameters and buffers, found a sparse one; call to_dense\(\), or"),
        (lambda: nn.LazyLinear(2), "fresh nn.Module, found lazy parameters; give the layers their sizes, or call"),
    ],
)
def test_models_that_are_no_models_are_refused(model, message):
    with pytest.raises(UserError, match=message) as error:
        made(model=model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r'one number, found shape \[128\]; give a loss with reduction="mean"'),
        (
            lambda outputs, targets: nn.functional.cross_entropy(outputs, targets.int()),
            r"loss\(model\(inputs\), targets\): expected a batch that goes through, found",
        ),
        (nn.CrossEntropyLoss, r"found the class CrossEntropyLoss; write CrossEntropyLoss\(\)"),
        (lambda outputs, targets: targets.float().mean(), "found one that does not depend on the parameters"),
    ],
)
def test_losses_that_are_no_losses_are_refused(loss, message):
    with pytest.raises(UserError, match=message) as error:
        made(loss=loss)
    assert "\n" not in str(error.value)


def reader(size):
    return nn.Sequential(nn.Embedding(size, 5), nn.Flatten(), nn.Linear(20, 2))


@pytest.mark.parametrize("train", [True, False])
def test_a_label_or_an_index_that_no_batch_was_seen_to_have_is_refused(train):
    """One sample among many: in the middle of a run PyTorch would end it."""
    inputs, labels = torch.zeros(3000, 3), torch.zeros(3000, dtype=torch.long)
    tokens = torch.zeros(3000, 4, dtype=torch.long)
    for values in (labels, tokens):
        values[2777] = 2

    def made(inputs, targets, model):
        few = inputs[:20], targets[:20]
        given = ((inputs, targets), few) if train else (few, (inputs, targets))
        return l2lopt.make_optimisee(model, nn.functional.cross_entropy, given[0], test=given[1], batch_size=8)

    message = "the largest labels and indices: expected a batch that goes through, found .*; count from 0"
    with pytest.raises(UserError, match=message):
        made(inputs, labels, lambda: nn.Linear(3, 2))
    assert made(inputs, labels, lambda: nn.Linear(3, 3))
    labels[2777] = -100  # is ignored, as PyTorch has it
    assert made(inputs, labels, lambda: nn.Linear(3, 2))
    labels[2777] = 0
    for size in (2, 3):
        model = partial(reader, size)
        with nullcontext() if size > 2 else pytest.raises(UserError, match=message):
            made(tokens, labels, model)


@pytest.mark.parametrize("share", [0, 1, 0.0, 1.0, 0.0001, -0.5, float("nan"), float("inf")])
def test_a_share_must_leave_samples_to_both(share):
    with pytest.raises(UserError, match="test: expected a share that leaves samples to both"):
        made(test=share)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"metrics": {"loss": lambda outputs, targets: outputs.mean()}},
            "metrics: expected names beside the log's own",
        ),
        ({"metrics": {"step": lambda outputs, targets: outputs.mean()}}, "beside the log's own, found 'step'"),
        ({"metrics": {"wrong": lambda outputs, targets: outputs @ targets}}, "metrics, and the loss on test samples"),
        (
            {"metrics": {"hits": lambda outputs, targets: outputs.argmax(1) == targets}},
            "'hits': expected one number",
        ),
        ({"test": (torch.zeros(5, 9), torch.zeros(5).long())}, "metrics, and the loss on test samples"),
        ({"test": (torch.zeros(0, 3), torch.zeros(0).long())}, "test: expected at least one test sample"),
        ({"loss": lambda outputs, targets: outputs.mean().item()}, "expected a batch that goes through"),
    ],
    ids=["called loss", "called step", "metric", "a metric of many numbers", "test shape", "no test", "a float"],
)
def test_what_would_end_a_run_at_its_first_evaluation_is_refused(given, message):
    samples = torch.ones(20, 3), torch.zeros(20).long()
    settings = {"loss": nn.functional.cross_entropy, "train": samples, **given}
    with pytest.raises(UserError, match=message):
        l2lopt.make_optimisee(lambda: nn.Linear(3, 2), **settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_mean_over_many_samples_is_right_in_half_precision(dtype):
    """A sum in half precision would overflow, or lose its digits."""
    inputs = torch.randn(120_000, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    test = inputs, torch.zeros(len(inputs), dtype=torch.long)
    train = tuple(part[:20] for part in test)
    task = l2lopt.make_optimisee(lambda: nn.Linear(3, 2).to(dtype), nn.functional.cross_entropy, train, test=test)
    params, aux = task.init(0)
    layout = Layout.of(params)
    found = evaluate_rows(task, layout, "test", [0, 0], layout.ravel(params).expand(2, -1), {})
    expected = evaluate_split(task, "test", 0, params, aux)["loss"]
    assert found.tolist() == pytest.approx([expected] * 2, rel=1e-3)
