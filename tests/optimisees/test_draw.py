"""DRAW: the loss by a transcription with loops, its counts, and what can be done with a trained one."""

import importlib
import math
from functools import partial
from pathlib import Path

import laws
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import SPOTS, normal
from PIL import Image
from test_attention import by_definition
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.func import functional_call

from l2lopt import cells
from l2lopt.core.errors import UserError
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from l2lopt.sequence import loop
from optimisees import Draw, InMemory
from optimisees.draw import network as draw_network
from optimisees.draw.model import half

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = partial(Draw, SPOTS, hidden_size=4, latent_size=3, steps=3, read=2, write=3, batch_size=3, dtype="float64")
GREY = SPOTS._replace(train_inputs=SPOTS.train_inputs[:, :1], test_inputs=SPOTS.test_inputs[:, :1])
CASES = {
    "colour": {},
    "grey": {"dataset": GREY},
    "without attention": {"attention": False},
    "IHC-LSTM decoder": {"decoder": "ihc-lstm"},
    "GRU encoder, IRC-GRU decoder": {"encoder": "gru", "decoder": "irc-gru"},
    "IHC-LSTM decoder that sees a 1": {"decoder": "ihc-lstm", "constant": True},
    "SRU decoder": {"decoder": "sru", "latent_size": 4},
}


def small(**options):
    return SMALL(**options) if "dataset" not in options else Draw(**{**SMALL.keywords, **options})


def random_params(model):
    return {name: 0.4 * normal(*p.shape, seed=k) for k, (name, p) in enumerate(model.init(0)[0].items())}


def linear(phi, name, x):
    return oracles.affine(phi[f"{name}.bias"], (phi[f"{name}.weight"], x))


def through(image, rows, columns):
    """F_Y x F_Xᵀ of one channel, as a list."""
    pairs = [(row, column) for row in rows for column in columns]
    return [
        sum(row[y] * image[y][x] * column[x] for y in range(len(row)) for x in range(len(column)))
        for row, column in pairs
    ]


def onto(patch, rows, columns):
    """F_Yᵀ w F_X of one channel."""
    places = [(i, j) for i in range(len(rows)) for j in range(len(columns))]

    def at(y, x):
        return sum(rows[i][y] * patch[i * len(columns) + j] * columns[j][x] for i, j in places)

    return [[at(y, x) for x in range(len(columns[0]))] for y in range(len(rows[0]))]


FIRST = ("encoding", "decoding")
"""Where the cells' states before the first step lie."""


def by_loops(model, params, image, noise, encoder, decoder, sizes, constant):
    """(−log p(x | z), KL, canvases) of one image [C][B][A] under ε [T][Z], a number at a time.

    `constant` is what the decoder sees beside z: [1.0] or nothing.
    """
    phi = {name: value.tolist() for name, value in params.items()}
    own = {
        part: {n.removeprefix(f"{part}."): v for n, v in phi.items() if n.startswith(f"{part}.")}
        for part in ("encoder", "decoder")
    }
    channels, height, width = len(image), len(image[0]), len(image[0][0])
    states = [{name: phi[f"{of}.{name}"] for name in part} for of, part in zip(FIRST, sizes, strict=True)]
    canvas, h, kl, canvases = phi["canvas"], phi.get("decoding.h", [0.0] * 4), 0.0, []
    attention = "read.window.weight" in phi
    for epsilon in noise:
        error = [
            [[image[c][y][x] - oracles.sigmoid(canvas[c][y][x]) for x in range(width)] for y in range(height)]
            for c in range(channels)
        ]
        if attention:
            rows, columns, gamma = by_definition(linear(phi, "read.window", h), 2, height, width)
            seen = [gamma * v for part in (image, error) for channel in part for v in through(channel, rows, columns)]
        else:
            seen = [v for part in (image, error) for channel in part for row in channel for v in row]
        code, states[0] = encoder(own["encoder"], [*seen, *h], states[0])
        statistics = linear(phi, "posterior", code)
        mu, log_sigma = statistics[: len(epsilon)], statistics[len(epsilon) :]
        z = [m + math.exp(s) * e for m, s, e in zip(mu, log_sigma, epsilon, strict=True)]
        kl += 0.5 * sum(m**2 + math.exp(s) ** 2 - 2 * s - 1 for m, s in zip(mu, log_sigma, strict=True))
        h, states[1] = decoder(own["decoder"], [*z, *constant], states[1])
        patch = linear(phi, "write.patch", h)
        piece = len(patch) // channels
        patches = [patch[c * piece : (c + 1) * piece] for c in range(channels)]
        if attention:
            rows, columns, gamma = by_definition(linear(phi, "write.window", h), 3, height, width)
            added = [[[v / gamma for v in row] for row in onto(patch, rows, columns)] for patch in patches]
        else:
            added = [[patch[y * width : (y + 1) * width] for y in range(height)] for patch in patches]
        canvas = [
            [[canvas[c][y][x] + added[c][y][x] for x in range(width)] for y in range(height)] for c in range(channels)
        ]
        canvases.append(canvas)
    places = [(c, y, x) for c in range(channels) for y in range(height) for x in range(width)]
    chances = [(image[c][y][x], oracles.sigmoid(canvas[c][y][x])) for c, y, x in places]
    return -sum(x * math.log(p) + (1 - x) * math.log(1 - p) for x, p in chances), kl, canvases


@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in CASES.items()])
def test_the_loss_is_its_transcription(options):
    model = small(**options)
    params, batch = random_params(model), model.batch("train", 0, 1)
    encoder, decoder = (oracles.CELLS[options.get(part, "lstm")] for part in ("encoder", "decoder"))
    sizes = model.network.encoder.state_sizes, model.network.decoder.state_sizes
    constant = [1.0] * options.get("constant", False)
    x = batch["inputs"].double() / 255
    found = [
        by_loops(model, params, x[k].tolist(), batch["noise"][:, k].tolist(), encoder, decoder, sizes, constant)
        for k in range(len(x))
    ]
    reconstruction, kl = (sum(one[term] for one in found) / len(x) for term in (0, 1))
    loss, aux = model.loss(params, {}, batch)
    assert aux["reconstruction"].item() == pytest.approx(reconstruction, rel=1e-12)
    assert aux["kl"].item() == pytest.approx(kl, rel=1e-12)
    assert loss.item() == pytest.approx(reconstruction + kl, rel=1e-12)
    trail = functional_call(model.network, params, (batch["noise"], x))
    laws.assert_close(torch.stack(trail.canvases)[:, 1], torch.tensor(found[1][2], dtype=torch.float64))
    facts = model.step_info(batch, aux)
    assert (facts.samples, facts.unit, facts.rate) == (3, "images", 1.0)
    assert facts.figures["bound"] == pytest.approx(loss.item())
    assert model.derived_metrics(loss.item()) == {"bound": loss.item()}
    laws.assert_close(model.evaluate(params, {}, batch), loss)
    laws.assert_close(model.metrics(params, {}, batch), aux)


@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in CASES.items()])
def test_painting_from_the_prior_is_the_decoder_alone(options):
    """All steps at once equal the decoder's cell step by step, with the canvas and the rectangle of each."""
    model = small(**options)
    params, z = random_params(model), normal(3, 2, options.get("latent_size", 3), seed=7)
    trail = model.painted_with(params, z)
    network = model.network
    own = {name.removeprefix("decoder."): p for name, p in params.items() if name.startswith("decoder.")}
    written = {name.removeprefix("write."): p for name, p in params.items() if name.startswith("write.")}
    names, canvas = network.decoder.state_sizes, params["canvas"]
    state = {name: params[f"decoding.{name}"][:, None].expand(-1, 2) for name in names}
    seen = torch.cat([z, torch.ones(3, 2, options.get("constant", False), dtype=z.dtype)], 2)
    for t in range(3):
        h, state = functional_call(network.decoder, own, (seen[t].T, state))
        addition, view = functional_call(network.write, written, (h.T,))
        canvas = canvas + addition
        laws.assert_close(trail.canvases[t], canvas, 1e-11)
        if view is not None:
            laws.assert_close(trail.windows[t].rectangle(), view.rectangle(), 1e-11)
    assert len(trail.windows) == (0 if view is None else 3)
    painting = model.sample_images(params, 2, seed=4)
    assert painting.images.shape == (3, 2, *model.data.train_inputs.shape[1:])
    assert (painting.rectangles is None) == (view is None)
    laws.assert_same(model.sample_images(params, 2, seed=4), painting)
    assert not torch.equal(model.sample_images(params, 2, seed=5).images, painting.images)


def test_kl_and_weights_are_those_of_distributions():
    """The KL divergence and the importance weights, by `torch.distributions` from the pass's own q."""
    model = small()
    params, inputs = random_params(model), SPOTS.train_inputs[:4]
    found = []
    model.network.posterior.register_forward_hook(lambda layer, args, output: found.append(output))
    noise = [model._noise(4, "importance", 9, k) for k in range(5)]
    x, weights = inputs.double() / 255, []
    for epsilon in noise:
        found.clear()
        trail = functional_call(model.network, params, (epsilon, x))
        posteriors = [Normal(mu, s.exp()) for mu, s in (output.chunk(2, -1) for output in found)]
        prior = Normal(torch.zeros(4, 3, dtype=torch.float64), 1.0)
        laws.assert_close(trail.kl, sum(kl_divergence(q, prior).sum(1) for q in posteriors))
        z = [q.mean + q.stddev * e for q, e in zip(posteriors, epsilon, strict=True)]
        ratio = sum((prior.log_prob(v) - q.log_prob(v)).sum(1) for q, v in zip(posteriors, z, strict=True))
        logits = trail.canvases[-1].detach()
        likelihood = Bernoulli(logits=logits, validate_args=False).log_prob(x).flatten(1).sum(1)
        weights.append((likelihood + ratio).detach())
    expected = -torch.stack([w.exp() for w in weights]).mean(0).log()
    laws.assert_close(model.importance_weighted(params, inputs, 5, seed=9), expected, 1e-10)


def test_more_draws_give_a_closer_bound_and_one_draw_the_loss():
    model = small()
    params, inputs = random_params(model), SPOTS.train_inputs[:8]
    ones = torch.stack([model.importance_weighted(params, inputs, 1, seed) for seed in range(150)])
    losses = []
    for seed in range(150):
        noise = model._noise(8, "a loss", seed)
        losses.append(model.loss(params, {}, {"inputs": inputs, "noise": noise})[0])
    losses = torch.stack(losses)
    spread = (ones.mean(1).var() / 150 + losses.var() / 150).sqrt()
    assert abs(ones.mean() - losses.mean()) < 4 * spread
    tens = torch.stack([model.importance_weighted(params, inputs, 10, seed) for seed in range(15)])
    assert tens.mean() < ones.mean() - 2 * spread


@pytest.mark.parametrize(
    ("decoder", "count"),
    [("lstm", 2_883_200), ("ihc-lstm", 490_100), ({"name": "ihc-lstm", "gamma_on": "uvh"}, 420_100)],
    ids=str,
)
def test_decoders_of_the_paper(decoder, count):
    """100 → 800 on SVHN's 32×32 in colour, from the shipped config."""
    assert sum(value.numel() for value in cells.build(decoder, 100, 800).parameters()) == count
    choice = dict(configs.load(CONFIGS / "draw-svhn-lstm.toml", kind=TrainConfig).optimisee)
    house_numbers = InMemory(*(torch.zeros(100, *s, dtype=torch.uint8) for s in ((3, 32, 32), ()) * 2))
    assert (choice.pop("name"), choice.pop("dataset")) == ("draw", "svhn")
    model = Draw(house_numbers, **{**choice, "decoder": decoder})
    assert model.counts().decoder == count
    assert (model.steps, model.network.read.size, model.network.write.size) == (32, 12, 12)


def test_configs_have_the_papers_sizes():
    wanted = {"svhn": (32, 800, 100, 12, 12), "mnist": (64, 256, 100, 2, 5)}
    for name, sizes in wanted.items():
        for decoder in ("lstm", "ihc-lstm"):
            config = configs.load(CONFIGS / f"draw-{name}-{decoder}.toml", kind=TrainConfig)
            choice = config.optimisee
            assert [choice[key] for key in ("steps", "hidden_size", "latent_size", "read", "write")] == list(sizes)
            assert (choice["dataset"], choice["decoder"], choice["encoder"]) == (name, decoder, "lstm")
            assert choice["batch_size"] == 100
            assert config.train.clip == 5
            assert config.optimiser == {"name": "torch.optim.Adam", "lr": 1e-3, "betas": [0.5, 0.999]}
    names = {f"draw-{name}-{decoder}" for name in wanted for decoder in ("lstm", "ihc-lstm")}
    assert {path.stem for path in CONFIGS.glob("draw-*")} == names | {"draw-small", "draw-cifar10"}


def test_noise_is_fresh_in_training_and_fixed_in_evaluation():
    model = small(batch_size=20)
    first, second = (model.batch("train", 0, step)["noise"] for step in (0, 1))
    assert first.shape == (3, 20, 3)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(model.batch("train", 1, 0)["noise"], first)
    for seed in (0, 1):
        laws.assert_same(list(small().evaluation_batches("test", seed)), list(model.evaluation_batches("test", 5)))


def test_splits_share_out_the_images():
    model = small(heldout=0.3, evaluation_size=4)

    def images(split, seed):
        return sorted(
            row for batch, _ in model.evaluation_batches(split, seed) for row in batch["inputs"].flatten(1).tolist()
        )

    assert images("train", 0) == sorted(SPOTS.train_inputs.flatten(1).tolist())
    assert images("test", 0) == sorted(SPOTS.test_inputs.flatten(1).tolist())
    assert sorted(images("inner", 0) + images("heldout", 0)) == images("train", 0)
    assert images("heldout", 0) != images("heldout", 1)
    assert [count for _, count in model.evaluation_batches("test", 0)] == [4, 4, 1]
    assert model.epoch_start("train", 0, 2) == 12  # 20 images in batches of 3
    few = small(evaluation_samples=5)
    assert sum(count for _, count in few.evaluation_batches("train", 3)) == 5


@pytest.mark.parametrize("level", [0, 1, 100, 128, 255])
def test_binarised_images(level):
    grey = InMemory(*(torch.full((2000, 1, 4, 4), level).byte(), torch.zeros(2000).long()) * 2)
    options = {"hidden_size": 2, "latent_size": 1, "steps": 1, "write": 2, "batch_size": 2000}
    sampled, threshold = (Draw(grey, binarise=way, **options) for way in ("sampled", "threshold"))
    first, second = (sampled.batch("train", 0, step)["inputs"] for step in (0, 1))
    assert set(first.unique().tolist()) <= {0, 255}
    assert first.double().mean().item() == pytest.approx(level, abs=4)
    assert torch.equal(first, second) == (level in (0, 255))
    assert threshold.batch("train", 0, 0)["inputs"].unique().tolist() == [255 if level > 127 else 0]
    laws.assert_same(list(sampled.evaluation_batches("test", 0)), list(sampled.evaluation_batches("test", 1)))
    shown = sampled.images(sampled.init(0)[0])["reconstructions"][::2]  # what the model is trained on
    assert set(shown.unique().tolist()) <= {0.0, 1.0}


@given(height=st.integers(1, 7), width=st.integers(1, 7))
def test_halves_are_halves(height, width):
    sides = {side: half((2, height, width), side) for side in ("left", "right", "top", "bottom")}
    assert torch.equal(sides["left"], ~sides["right"])
    assert torch.equal(sides["top"], ~sides["bottom"])
    assert sides["left"].sum() == 2 * height * ((width + 1) // 2)
    assert sides["top"].sum() == 2 * width * ((height + 1) // 2)
    assert sides["left"][..., 0].all()
    assert sides["top"][:, 0].all()


def test_inpainting_keeps_what_is_known_and_does_not_look_at_the_rest():
    model = small()
    params, images, known = random_params(model), SPOTS.test_inputs[:3], half((2, 5, 4), "left")
    found = model.inpaint(params, images, known, rounds=4, seed=1)
    assert found.shape == (4, 3, 2, 5, 4)
    assert (found[:, :, known] == images.double()[:, known] / 255).all()
    other = torch.where(known, images, 255 - images)
    laws.assert_same(model.inpaint(params, other, known, rounds=4, seed=1), found)
    assert not torch.equal(found[0], found[1])
    x = torch.where(known, images.double() / 255, 0.5)
    once = functional_call(model.network, params, (model._noise(3, "inpaint", 1, 0), x)).canvases[-1].sigmoid()
    laws.assert_close(found[0], torch.where(known, x, once.detach()))


def test_reconstructions_are_the_pass_over_the_images():
    model = small()
    params, images = random_params(model), SPOTS.test_inputs[:2]
    painting = model.reconstruct(params, images, seed=3)
    noise = model._noise(2, "reconstruct", 3)
    trail = functional_call(model.network, params, (noise, images.double() / 255))
    laws.assert_close(painting.images, torch.stack(trail.canvases).sigmoid().detach())
    shown = model.images(params)
    assert {name: tuple(value.shape) for name, value in shown.items()} == {
        "samples": (16, 2, 5, 4),
        "reconstructions": (16, 2, 5, 4),
    }
    laws.assert_close(shown["reconstructions"][0], images[0].double() / 255)


def test_learning_beats_pixels_that_know_nothing_of_each_other():
    """White images and black ones: a constant canvas cannot do better than 16 log 2, one bit of z can do log 2."""
    plain = (torch.arange(40) % 2 * 255).byte().view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    data = InMemory(plain, torch.zeros(40).long(), plain, torch.zeros(40).long())
    model = Draw(data, hidden_size=8, latent_size=2, steps=2, read=2, write=2, batch_size=40)
    params, aux = model.init(0)
    params = {name: value.requires_grad_() for name, value in params.items()}
    optimizer = torch.optim.Adam(params.values(), lr=0.03)
    for step in range(80):
        loss, aux = model.loss(params, aux, model.batch("train", 0, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert math.log(2) < loss.item() < 4 * math.log(2)
    assert aux["kl"] > 0.5 * math.log(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read": 1}, "attention: size: expected at least 2, found 1"),
        ({"write": 1}, "attention: size: expected at least 2, found 1"),
        ({"steps": 0}, "draw: steps: expected from 1 to 10000"),
        ({"latent_size": 0}, "draw: latent_size: expected above 0"),
        ({"evaluation_size": 0}, "draw: evaluation_size: expected above 0"),
        ({"decoder": "sru"}, "cell 'sru': expected input_size = hidden_size"),
        ({"batch_size": 21}, "batch_size: expected from 1 to the 20 training samples"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        small(**options)


def test_images_of_another_kind_are_refused():
    """Numbers in [0, 1] would be divided by 255 in silence."""
    floats = SPOTS.train_inputs / 255
    for images, found in (
        (floats, r"a Tensor \[20, 2, 5, 4\] of float32"),
        (SPOTS.train_inputs[:, 0], r"a Tensor \[20, 5, 4\] of uint8"),
    ):
        message = rf"draw: images: expected uint8 \[n, channels, height, width\], found {found}; give uint8"
        for data in (SPOTS._replace(train_inputs=images), SPOTS._replace(test_inputs=images)):
            with pytest.raises(UserError, match=message):
                small(dataset=data)
    model = small()
    with pytest.raises(UserError, match=r"such as \(255 \* x\)\.byte\(\)"):
        model.reconstruct(model.init(0)[0], floats)


def test_grey_images_of_a_folder_have_one_channel(tmp_path):
    for index in range(5):
        Image.new("L", (4, 5), 40 * index).save(tmp_path / f"{index}.png")
    model = Draw(str(tmp_path), **{**SMALL.keywords, "batch_size": 2})
    assert model.data.train_inputs.shape == (4, 1, 5, 4)
    assert model.init(0)[0]["canvas"].shape == (1, 5, 4)
    Image.new("RGB", (4, 5), (1, 2, 3)).save(tmp_path / "5.png")
    assert Draw(str(tmp_path), **{**SMALL.keywords, "batch_size": 2}).data.train_inputs.shape == (5, 3, 5, 4)


def test_draws_per_weight_and_rounds_are_at_least_one():
    model = small()
    params = model.init(0)[0]
    with pytest.raises(UserError, match="importance_weighted: draws"):
        model.importance_weighted(params, SPOTS.test_inputs, 0)
    with pytest.raises(UserError, match="inpaint: rounds"):
        model.inpaint(params, SPOTS.test_inputs, half((2, 5, 4), "top"), 0)


def test_generation_takes_the_fast_path(monkeypatch):
    """The loop over the cell's steps is not asked for."""
    model, found = small(decoder="ihc-lstm"), []
    kept = draw_network.sequence.run
    monkeypatch.setattr(
        draw_network.sequence, "run", lambda cell, x, state: found.append(x.shape) or kept(cell, x, state)
    )
    monkeypatch.setattr(type(model.network.decoder), "forward", None)
    model.sample_images(model.init(0)[0], 5)
    assert found == [(3, 3, 5)]


def test_the_benchmark_times_what_it_says(monkeypatch):
    """Its two ways of generation, the loop and the hand-derived pass, give one image; only one of them loops."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    benchmark = importlib.import_module("bench_draw")
    monkeypatch.setattr(benchmark, "IMAGES", 25)
    model = benchmark.model_of("small", "lstm")
    benchmark.checked(model)
    called = []
    monkeypatch.setattr(loop, "run", lambda *given, whole=loop.run: called.append(given) or whole(*given))
    for choice, times in (("fast", 0), ("loop", 1)):
        called.clear()
        benchmark.generating(model, choice)()
        assert len(called) == times
