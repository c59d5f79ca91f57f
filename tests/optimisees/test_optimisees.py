"""The laws of an optimisee, for every optimisee."""

import laws
import pytest
import torch
from implementations import OPTIMISEES, SAMPLED

from l2lopt.core.errors import UserError
from optimisees import Quadratic, digits, mlp

each_optimisee = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in OPTIMISEES.items()])
each_sampled = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in SAMPLED.items()])


@each_optimisee
def test_pure(make):
    laws.assert_pure(make)


@pytest.mark.parametrize(
    "make",
    # Under dropout some tokens of a width of 4 are 0 whole, and there RMS norm has a kink.
    [pytest.param(make, id=name) for name, make in OPTIMISEES.items() if "rms norm, tied, with dropout" not in name],
)
def test_loss_has_its_gradient(make):
    laws.assert_loss_has_its_gradient(make())


@each_optimisee
def test_batch_is_a_function(make):
    laws.assert_batch_is_a_function(make)


@each_optimisee
def test_rows_are_separate_runs(make):
    laws.assert_rows_are_separate_runs(make())


@each_optimisee
def test_places_lead_to_the_batches(make):
    laws.assert_places_lead_to_the_batches(make())


IN_PLACES = {
    *("mlp", "convnet", "resnet", "mlp on images", "convnet on images", "resnet on changed images"),
    *("module with batch norm", "transformer", "sequence-metric siamese", "sequence-metric coupled"),
    *("mlp with batch norm", "convnet with layer norm", "vit", "logistic-regression", "matrix-factorisation"),
    *("autoencoder", "autoencoder on images", "parametric-mlp", "parametric-convnet", "parametric-language"),
    *("augmented samples", "augmented scales of a convnet"),
}
"""Optimisees whose batches carry nothing but samples; of the changed images only those that are not trained on."""


@pytest.mark.parametrize("name", OPTIMISEES)
def test_batches_without_random_numbers_are_drawn_ahead(name):
    assert (OPTIMISEES[name]().indexed_batches("test") is not None) == (name in IN_PLACES)


@each_optimisee
def test_resumes(make):
    laws.assert_resumes(make)


@each_optimisee
def test_what_its_runs_keep_of_it_is_the_same_every_time(make, tmp_path):
    one, other = make(), make()
    assert one.fingerprint() == other.fingerprint()
    assert all(isinstance(digest, str) for digest in one.fingerprint().values())
    assert isinstance(one.summary(), str)
    for task, folder in ((one, tmp_path / "one"), (other, tmp_path / "other")):
        folder.mkdir()
        task.artefacts(*task.init(0), folder)
    left, again = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in tmp_path.iterdir())
    assert left == again


@each_optimisee
def test_overwriting_a_run_would_clear_all_that_it_leaves(make, tmp_path):
    task = make()
    task.artefacts(*task.init(0), tmp_path)
    task.figures(tmp_path)
    known = {path for pattern in task.artefact_files for path in tmp_path.glob(pattern)}
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == known


@each_sampled
def test_splits_share_out_the_samples(make):
    laws.assert_splits_share_out_the_samples(make())


@each_sampled
@pytest.mark.parametrize("split", ["train", "inner", "heldout", "test"])
def test_epoch_visits_a_sample_at_most_once(make, split):
    laws.assert_epoch_visits_a_sample_at_most_once(make(), split)


def test_quadratic_is_its_formula():
    task = Quadratic(3, "float64")
    matrix, target = task.batch("train", 5, 0)
    theta = task.init(5)[0]["theta"].tolist()
    residuals = [sum(w * t for w, t in zip(row, theta, strict=True)) for row in matrix.tolist()]
    expected = sum((r - y) ** 2 for r, y in zip(residuals, target.tolist(), strict=True))
    assert task.loss({"theta": task.init(5)[0]["theta"]}, {}, (matrix, target))[0].item() == pytest.approx(expected)
    laws.assert_same(task.batch("heldout", 5, 9), (matrix, target))


@pytest.mark.parametrize("seeds", [(0, 1)])
def test_quadratics_differ_between_seeds(seeds):
    (one, _), (other, _) = (Quadratic().batch("train", seed, 0) for seed in seeds)
    assert not torch.equal(one, other)


def test_mlp_is_its_formula():
    task = mlp((4,), "sigmoid", batch_size=6, dtype="float64")
    params, batch = task.init(0)[0], task.batch("train", 0, 0)
    hidden = torch.sigmoid(batch["inputs"] @ params["0.weight"].T + params["0.bias"])
    scores = hidden @ params["2.weight"].T + params["2.bias"]
    expected = -torch.stack([scores[k].log_softmax(0)[batch["targets"][k]] for k in range(6)]).mean()
    laws.assert_close(task.loss(params, {}, batch)[0], expected)
    laws.assert_close(task.evaluate(params, {}, batch), expected)


def test_mlp_of_the_specification_has_1510_parameters():
    assert sum(value.numel() for value in mlp().init(0)[0].values()) == 1_510


def test_digits():
    data = digits()
    assert [tuple(part.shape) for part in data] == [(1300, 64), (1300,), (497, 64), (497,)]
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 1)
    assert set(data.train_targets.tolist()) == set(data.test_targets.tolist()) == set(range(10))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Quadratic(0),
        lambda: mlp((0,)),
        lambda: mlp(batch_size=0),
        lambda: mlp(batch_size=1301),
        lambda: mlp(heldout=1.0),
        lambda: mlp(heldout=0.0).batch("heldout", 0, 0),
    ],
    ids=["quadratic", "hidden", "no batch", "too large a batch", "all held out", "none held out"],
)
def test_values_out_of_range_are_refused(build):
    with pytest.raises(UserError):
        build()
