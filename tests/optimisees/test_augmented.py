"""Parametric families are functions of their number; changed problems are changed as they say, and no further."""

from math import log

import laws
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

from l2lopt.core.errors import UserError
from optimisees import ModuleOptimisee, augmented, mlp, parametric
from optimisees.data.artificial_text import artificial_texts
from optimisees.data.text import artificial

DIGITS = {"name": "mlp", "hidden": [4], "dtype": "float64"}


@given(draw=st.integers(0, 10_000), family=st.sampled_from(["mlp", "convnet", "language"]))
def test_a_draw_lies_in_its_ranges_and_is_a_function_of_its_number(draw, family):
    found = parametric.options(f"parametric-{family}", draw)
    assert found == parametric.options(f"parametric-{family}", draw)
    if family == "language":
        assert 50 <= found["data"]["words"] <= 500
        assert 16 <= found["window"] <= 48
        assert 4 <= found["batch_size"] <= 32
        assert found["width"] % found["heads"] == 0
        return
    assert found["size"] in parametric.DATASETS[found["dataset"]]
    assert 16 <= found["batch_size"] <= 256
    assert 0.5 <= found["gain"] <= 2
    sizes, (low, high) = (found["hidden"], (8, 64)) if family == "mlp" else (found["channels"], (4, 16))
    assert 1 <= len(sizes) <= 3
    assert all(low <= size <= high for size in sizes)


def test_draws_spread_over_their_ranges():
    found = [parametric.options("parametric-mlp", draw) for draw in range(400)]
    shares = {name: sum(one["dataset"] == name for one in found) / 400 for name in parametric.DATASETS}
    assert all(share == pytest.approx(1 / 3, abs=0.08) for share in shares.values())
    assert sum(len(one["hidden"]) == 1 for one in found) / 400 == pytest.approx(0.5, abs=0.08)
    assert sum(one["gain"] < 1 for one in found) / 400 == pytest.approx(0.5, abs=0.08)
    assert {one["batch_size"] for one in found} >= {17, 18, 19}
    assert max(one["batch_size"] for one in found) > 240


def test_an_unknown_data_set_is_refused():
    with pytest.raises(UserError, match="did you mean 'mnist'"):
        parametric.options("parametric-mlp", 0, ["mnits"])
    with pytest.raises(UserError, match="at least one"):
        parametric.options("parametric-mlp", 0, [])


def test_a_language_is_a_function_of_its_number_and_its_words_follow_zipf():
    one, again, other = (artificial_texts(number, 50, 5, 1000) for number in (1, 1, 2))
    assert one == again
    assert one != other
    assert [text.count("\n") for text in one] == [800, 100, 100]
    words = one[0].split()
    lengths = [len(line.split()) for line in one[0].splitlines()]
    assert min(lengths) >= 1
    assert sum(lengths) / len(lengths) == pytest.approx(1 / 0.15, rel=0.1)
    assert len(set(words)) <= 50
    assert all(1 <= len(word) <= 8 for word in words)
    counts = sorted((words.count(word) for word in set(words)), reverse=True)
    assert counts[0] > 5 * counts[len(counts) // 2]


@pytest.mark.parametrize("options", [{"words": 3}, {"classes": 0}, {"sentences": 9}])
def test_languages_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        artificial(**options)


def test_other_scales_give_the_same_losses_and_gradients_times_the_factors():
    plain, other = mlp((4,), dtype="float64"), augmented(DIGITS, reparametrised=4.0)
    (params, aux), (scaled, moved) = plain.init(3), other.init(3)
    factors = {name: moved[f"factor.{name}"] for name in params}
    assert all(0.25 <= float(factor) <= 4 for factor in factors.values())
    assert len(set(map(float, factors.values()))) == 4
    batch = plain.batch("train", 3, 0)
    laws.assert_same(other.batch("train", 3, 0), batch)
    laws.assert_close(other.loss(scaled, moved, batch)[0], plain.loss(params, aux, batch)[0])
    laws.assert_close(other.metrics(scaled, moved, batch), plain.metrics(params, aux, batch))
    wanted = grad(lambda p: plain.loss(p, aux, batch)[0])(params)
    found = grad(lambda p: other.loss(p, moved, batch)[0])(scaled)
    laws.assert_close(found, {name: factors[name] * wanted[name] for name in params})
    laws.assert_same(other.loss(scaled, moved, batch)[1], moved)
    assert other.init(4)[1] != moved


def test_pixels_are_permuted_alike_in_all_images():
    plain, other = mlp(dtype="float64").data, augmented(DIGITS, permuted_pixels=True, seed=5).data
    probe, there = (part.train_inputs.std(0) + part.train_inputs.mean(0) for part in (plain, other))
    order = torch.tensor([int((probe == value).nonzero()[0]) for value in there])
    varied = [pixel for pixel in range(64) if (probe == probe[order[pixel]]).sum() == 1]
    assert len(varied) > 50
    assert not torch.equal(order[varied], torch.tensor(varied))
    for name in ("train_inputs", "test_inputs"):
        assert torch.equal(getattr(other, name)[:, varied], getattr(plain, name)[:, order[varied]])
    laws.assert_same((other.train_targets, other.test_targets), (plain.train_targets, plain.test_targets))


def test_a_share_of_the_training_labels_is_wrong():
    plain, other = mlp(dtype="float64").data, augmented(DIGITS, label_noise=0.3).data
    assert int((plain.train_targets != other.train_targets).sum()) == 390
    assert set(other.train_targets.tolist()) == set(range(10))
    laws.assert_same(other._replace(train_targets=plain.train_targets), plain)


def test_a_share_of_the_training_samples_is_left():
    plain, other = mlp(dtype="float64").data, augmented(DIGITS, train_share=0.25).data
    assert len(other.train_inputs) == len(other.train_targets) == 325
    there = {tuple(row) for row in plain.train_inputs.tolist()}
    assert all(tuple(row) in there for row in other.train_inputs.tolist())
    laws.assert_same(other[2:], plain[2:])


def test_an_autoencoder_aims_at_the_permuted_pixels():
    made = augmented({"name": "autoencoder", "dataset": "digits"}, permuted_pixels=True)
    assert torch.equal(made.data.train_targets, made.data.train_inputs)


@pytest.mark.parametrize(
    ("choice", "options", "found"),
    [
        ("quadratic", {"permuted_pixels": True}, "expected samples in memory, as of classifiers, found Quadratic"),
        ("parametric-language", {"train_share": 0.5}, "expected samples in memory"),
        ("matrix-factorisation", {"permuted_pixels": True}, "permuted_pixels: expected images"),
        ("matrix-factorisation", {"label_noise": 0.1}, "label_noise: expected samples with a class each"),
        ({"name": "autoencoder", "dataset": "digits"}, {"label_noise": 0.1}, "label_noise: expected samples with"),
        ("mlp", {"label_noise": 1.1}, "label_noise: expected a share"),
        ("mlp", {"train_share": 0.0}, "train_share: expected a share"),
        ("mlp", {"train_share": 0.01}, "batch_size: expected from 1 to the 13 training samples"),
        ("mlp", {"reparametrised": 0.5}, "reparametrised: expected at least 1"),
        ("mpl", {}, "did you mean 'mlp'"),
    ],
)
def test_what_makes_no_sense_is_refused(choice, options, found):
    with pytest.raises(UserError, match=found):
        augmented(choice, **options)


def with_validation(device="cpu"):
    plain = mlp(dtype="float64", device=device)
    return ModuleOptimisee(plain.factory, plain.criterion, plain.data, validation=plain.data[2:])


def test_a_validation_set_is_permuted_as_the_others_are():
    made = augmented("test_augmented:with_validation", permuted_pixels=True)
    laws.assert_same(made.validation, tuple(made.data[2:]))
    assert not torch.equal(made.validation[0], with_validation().validation[0])


def test_scales_go_inside_one_another():
    """Each has factors of its own."""
    inner = {"name": "augmented", "optimisee": DIGITS, "reparametrised": 3.0}
    plain, twice = mlp(hidden=[4], dtype="float64"), augmented(inner, 2.0)
    (params, aux), (changed, factors) = plain.init(1), twice.init(1)
    batch = plain.batch("train", 1, 0)
    loss, after = twice.loss(changed, factors, batch)
    laws.assert_close(loss, plain.loss(params, aux, batch)[0])
    assert after.keys() == factors.keys()
    assert len(factors) == len(aux) + 2 * len(params)
    for name, value in changed.items():
        both = torch.stack([factor for key, factor in factors.items() if key.endswith(name)])
        first, second = both.log()
        assert abs(first / log(3) - second / log(2)) > 1e-3
        laws.assert_close(both.prod() * value, params[name])
