"""Problems with a formula: quadratics, Rosenbrock's function, matrix factorisation."""

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2lopt.core.errors import UserError
from optimisees import Quadratic, Rosenbrock, matrix_factorisation


@settings(max_examples=25)
@given(size=st.integers(2, 12), condition=st.floats(1, 1e4), seed=st.integers(0, 99))
def test_a_quadratic_has_its_condition_number(size, condition, seed):
    matrix, _ = Quadratic(size, "float64", condition=condition).batch("train", seed, 0)
    eigenvalues = torch.linalg.eigvalsh(matrix.T @ matrix)
    assert float(eigenvalues.max()) == pytest.approx(1)
    assert float(eigenvalues.max() / eigenvalues.min()) == pytest.approx(condition, rel=1e-6)


def test_noise_is_in_training_batches_alone_and_has_mean_0():
    clean, noisy = Quadratic(3, "float64"), Quadratic(3, "float64", noise=0.5)
    for split in ("heldout", "test"):
        laws.assert_same(noisy.batch(split, 4, 7), clean.batch(split, 4, 7))
    for split in ("train", "inner", "heldout", "test"):
        laws.assert_same(list(noisy.evaluation_batches(split, 4)), list(clean.evaluation_batches(split, 4)))
    for split in ("train", "inner"):
        target = clean.batch(split, 4, 0)[1]
        noise = torch.stack([noisy.batch(split, 4, step)[1] - target for step in range(2000)])
        assert noise.mean(0).abs().max() < 0.05
        torch.testing.assert_close(noise.std(0), torch.full((3,), 0.5, dtype=torch.float64), rtol=0.1, atol=0)


def test_rosenbrock_is_its_formula_and_least_at_ones():
    task = Rosenbrock(4, dtype="float64")
    theta = task.init(3)[0]["theta"]
    x = theta.tolist()
    wanted = sum(100 * (x[i + 1] - x[i] ** 2) ** 2 + (1 - x[i]) ** 2 for i in range(3)) / 3
    assert float(task.evaluate({"theta": theta}, {}, {})) == pytest.approx(wanted)
    assert float(task.evaluate({"theta": torch.ones(4)}, {}, {})) == 0
    assert not torch.equal(theta, task.init(4)[0]["theta"])


def test_the_factors_of_the_matrix_have_the_loss_of_its_noise():
    """With the true rank and no noise, the factors of a singular value decomposition fit every entry."""
    task = matrix_factorisation(9, 7, 2, 2, noise=0.0, batch_size=4, dtype="float64")
    data = task.data
    matrix = torch.full((9, 7), torch.nan, dtype=torch.float64)
    for places, values in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)):
        matrix[places[:, 0], places[:, 1]] = values
    assert matrix.isfinite().all()
    assert len(data.train_inputs) == 32
    left, scales, right = torch.linalg.svd(matrix, full_matrices=False)
    assert scales[2:].max() < 1e-12
    exact = {"left": left[:, :2] * scales[:2], "right": right[:2].T}
    for split in ("train", "test"):
        assert all(float(task.evaluate(exact, {}, batch)) < 1e-24 for batch, _ in task.evaluation_batches(split, 0))
    noisy = matrix_factorisation(9, 7, 2, 2, noise=0.3, batch_size=4, dtype="float64").data
    errors = torch.cat([noisy.train_targets - data.train_targets, noisy.test_targets - data.test_targets])
    assert float(errors.std()) == pytest.approx(0.3, rel=0.25)


def test_the_entries_of_a_matrix_are_divided_like_samples():
    task = matrix_factorisation(8, 6, 2, 3, batch_size=7, dtype="float64")

    def entries(split, seed):
        ((batch, _),) = task.evaluation_batches(split, seed)
        pairs = zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True)
        return {(*place, value) for place, value in pairs}

    assert (len(entries("train", 0)), len(entries("test", 0))) == (24, 24)
    assert not {place[:2] for place in entries("train", 0)} & {place[:2] for place in entries("test", 0)}
    for seed in (0, 1):
        assert entries("inner", seed) | entries("heldout", seed) == entries("train", 0)
        assert not entries("inner", seed) & entries("heldout", seed)
    assert entries("heldout", 0) != entries("heldout", 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Quadratic(condition=0.5),
        lambda: Quadratic(condition=float("inf")),
        lambda: Quadratic(noise=-1.0),
        lambda: Rosenbrock(1),
        lambda: Rosenbrock(spread=-0.1),
        lambda: matrix_factorisation(rank=0),
        lambda: matrix_factorisation(observed=1.0),
        lambda: matrix_factorisation(observed=0.0),
        lambda: matrix_factorisation(noise=-0.1),
    ],
)
def test_values_out_of_range_are_refused(build):
    with pytest.raises(UserError):
        build()


@pytest.mark.parametrize("problem", [Quadratic, Rosenbrock])
@pytest.mark.parametrize("size", [10**15, 10**30], ids=["no memory", "beyond int64"])
def test_a_size_that_no_machine_has_is_refused(problem, size):
    with pytest.raises(UserError, match=rf"size = {size}: expected at most .* of memory"):
        problem(size)
