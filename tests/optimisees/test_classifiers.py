"""Layers that classifiers choose by name, the vision transformer, and the autoencoder."""

import laws
import pytest
import torch
from implementations import pictures
from torch import nn
from torch.func import functional_call

from l2lopt.core.errors import UserError
from optimisees import autoencoder, convnet, logistic_regression, mlp, vit
from optimisees.classifiers.layers import initialise, normalisation
from optimisees.classifiers.vit import VisionTransformer


def test_logistic_regression_begins_with_equal_chances():
    task = logistic_regression(dtype="float64")
    params, aux = task.init(1)
    assert sum(value.numel() for value in params.values()) == 650
    loss, _ = task.loss(params, aux, task.batch("train", 1, 0))
    assert float(loss) == pytest.approx(torch.tensor(10.0).log().item())


@pytest.mark.parametrize("make", [mlp, convnet])
def test_normalisation_is_what_its_name_says(make):
    def layers(norm):
        return [type(layer) for layer in make(norm=norm).factory() if "Norm" in type(layer).__name__]

    plain, image = make is mlp, make is convnet
    stages = 1 if plain else 3
    assert layers("none") == []
    assert layers("batch") == [nn.BatchNorm1d if plain else nn.BatchNorm2d] * stages
    assert layers("layer") == [nn.GroupNorm if image else nn.LayerNorm] * stages


def test_a_convnets_older_switch_still_counts():
    for switch, norm in ((True, "batch"), (False, "none")):
        older, newer = convnet(batch_norm=switch), convnet(norm=norm)
        laws.assert_same(older.init(0), newer.init(0))
        assert len(convnet(batch_norm=switch, norm="layer").init(0)[0]) == 13


def test_layer_norm_of_images_is_over_a_whole_sample():
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (layer,) = normalisation("layer", 4, images=True)
    y = layer.double()(x).flatten(1)
    torch.testing.assert_close(y.mean(1), torch.zeros(2, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.var(1, correction=0), torch.ones(2, dtype=torch.float64), atol=1e-3, rtol=0)


def test_initial_values_are_what_their_name_says():
    def drawn(initialisation, gain):
        torch.manual_seed(0)
        layers = nn.Linear(300, 200), nn.ReLU(), nn.Conv2d(8, 64, 3)
        return initialise(nn.Sequential(*layers), initialisation, gain).requires_grad_(False)

    default, doubled = drawn("default", 1.0), drawn("default", 2.0)
    torch.manual_seed(0)
    assert torch.equal(default[0].weight, nn.Linear(300, 200).weight)
    assert torch.equal(doubled[2].weight, 2 * default[2].weight)
    assert torch.equal(doubled[2].bias, default[2].bias)
    he = drawn("he", 0.5)
    for layer, fan_in in ((he[0], 300), (he[2], 72)):
        assert float(layer.weight.std()) == pytest.approx(0.5 * (2 / fan_in) ** 0.5, rel=0.03)
        assert not layer.bias.any()
    orthogonal = drawn("orthogonal", 3.0)[0].weight
    torch.testing.assert_close(orthogonal @ orthogonal.T, 9 * torch.eye(200), atol=1e-4, rtol=0)


def test_a_vision_transformer_sees_patches_whose_order_only_positions_tell():
    model = VisionTransformer((2, 4, 6), 3, 2, 4, 2, 2, 2).double()
    images = torch.randn(2, 2, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    params = {name: value.detach() for name, value in model.named_parameters()}
    assert params["positions"].shape == (6, 4)  # 2 by 3 patches
    swapped = images.clone()
    swapped[..., :2, :2], swapped[..., 2:, 2:4] = images[..., 2:, 2:4], images[..., :2, :2]  # patches 0 and 4
    order = torch.tensor([4, 1, 2, 3, 0, 5])
    moved = params | {"positions": params["positions"][order]}

    def scores(params, x):
        return functional_call(model, params, (x.flatten(1),))

    torch.testing.assert_close(scores(moved, swapped), scores(params, images))
    assert not torch.allclose(scores(params, swapped), scores(params, images))


@pytest.mark.parametrize(("loss", "floor"), [("squared", False), ("cross-entropy", True)])
def test_an_autoencoders_loss_is_that_of_its_grey_values(loss, floor):
    task = autoencoder((4,), "tanh", loss, dataset="digits", batch_size=6, dtype="float64")
    params, batch = task.init(0)[0], task.batch("train", 0, 0)
    x = batch["inputs"]
    code = torch.tanh(x @ params["0.weight"].T + params["0.bias"])
    out = code @ params["2.weight"].T + params["2.bias"]
    p = out.sigmoid()
    wanted = -(x * p.log() + (1 - x) * (1 - p).log()) if floor else (out - x) ** 2
    laws.assert_close(task.loss(params, {}, batch)[0], wanted.mean())


def test_an_autoencoder_of_images_aims_at_what_it_sees_between_0_and_1():
    task = autoencoder((2,), dataset=pictures(), batch_size=5, dtype="float64")
    assert task.data.train_targets.data_ptr() == task.data.train_inputs.data_ptr()  # no copy
    params, batch = task.init(0)[0], task.batch("train", 0, 0)
    nothing = {name: torch.zeros_like(value) for name, value in params.items()}
    wanted = (batch["inputs"].double() / 255).square().mean()
    laws.assert_close(task.loss(nothing, {}, batch)[0], wanted)


@pytest.mark.parametrize(
    "build",
    [
        lambda: vit(patch=3, dataset="digits"),
        lambda: vit(width=6, heads=4, dataset="digits"),
        lambda: vit(layers=0, dataset="digits"),
        lambda: autoencoder((), dataset="digits"),
        lambda: autoencoder((3, 0), dataset="digits"),
        lambda: mlp(gain=0.0),
        lambda: convnet(hidden=0),
    ],
)
def test_values_out_of_range_are_refused(build):
    with pytest.raises(UserError):
        build()


def test_the_squared_loss_is_the_mean_square_from_the_classs_own_corner():
    problem = mlp(hidden=[5], loss="squared", dtype="float64")
    params, aux = problem.init(0)
    batch = problem.batch("train", 0, 0)
    w, b, v, c = params.values()
    hidden = torch.sigmoid(batch["inputs"].flatten(1).double() @ w.T + b)
    scores = hidden @ v.T + c
    expected = 0.0
    for row, label in zip(scores, batch["targets"], strict=True):
        expected += sum((float(z) - (k == int(label))) ** 2 for k, z in enumerate(row)) / (10 * len(scores))
    assert float(problem.loss(params, aux, batch)[0]) == pytest.approx(expected)
