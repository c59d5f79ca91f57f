"""DRAW, a recurrent autoencoder that paints in steps (Gregor et al. 2015), with any cells, as an optimisee."""

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0, few, shown
from l2lopt.core.layout import Params
from l2lopt.core.references import References
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import generator, seed_of, seeded
from l2lopt.core.types import Aux, Batch
from l2lopt.optimisee import Optimisee, SampleRequest, SavedRun, Split, StepInfo
from optimisees.data import images as sources
from optimisees.data.datasets import InMemory, digest
from optimisees.data.sampling import Sampling
from optimisees.draw.artefacts import paint
from optimisees.draw.network import DrawNetwork, ImageShape, Painting, Trail
from optimisees.draw.references import PaintedSamples

_SHOWN = 16
"""Pictures of each kind to look at while training goes on."""


class Counts(NamedTuple):
    """Parameters of a DRAW.

    Attributes:
        total: Number of all parameters.
        encoder: Number in the encoder's cell.
        decoder: Number in the decoder's cell.
    """

    total: int
    encoder: int
    decoder: int

    def summary(self) -> str:
        """In a line."""
        return f"{self.total:,} parameters, {self.encoder:,} of them the encoder's cell, {self.decoder:,} the decoder's"


class Draw(Optimisee):
    """Images by DRAW. The loss is the bound on −log p(x), mean nats per image.

    −log p(x | z) is the Bernoulli cross-entropy of x under σ(c_T) summed over pixels and channels; to it comes
    Σ_t ½Σ(μ² + σ² − 2 log σ − 1), the exact KL divergence of each step. The noise is the batch's, fresh in every step
    of every batch, the same in every evaluation. Test mode is training mode. Aux holds both terms of the last loss.

    Args:
        dataset: "mnist", "svhn", "cifar10", "photographs", or a folder of images; see `images.load`, as for the next
            three; grey images have one channel. Or the images themselves, uint8 [n, channels, height, width].
        size: Side length to which the images are scaled; those of a named set can only be made smaller.
        data: Folder of the data sets; by default the value of L2LOPT_DATA.
        download: Whether missing files are fetched.
        binarise: Values of x: "no", the grey values as they are; "threshold", 1 above one half; "sampled", 1 with the
            grey value's probability, drawn anew in every batch, for evaluation once and for all.
        encoder: Cell of the encoder, a name or a table of name and options.
        decoder: Cell of the decoder, given in the same form.
        hidden_size: Size of h in both cells.
        latent_size: Size of z in each step.
        steps: Number T of steps.
        constant: Whether the decoder sees a 1 beside z. Without it a cell that has no biases, such as "ihc-lstm", gets
            a constant from the encoder, as a mean of z that is not 0; z of the prior has none, and many samples are
            then never begun.
        attention: Whether there are windows; without them every step reads and writes whole images.
        read: Size N of the reading window's N×N filters.
        write: Size N of the writing window's filters.
        batch_size: Number of images per step.
        heldout: Share of training images held out of the split `inner`.
        evaluation_samples: Number of images of each split to evaluate on, drawn once and for all; by default all.
        evaluation_size: Number of images evaluated at once.
        dtype: Data type of the parameters.
        device: Device of all tensors.

    Raises:
        UserError: For values out of range, images in another form, and cells that cannot have these sizes.
    """

    sample_kind: ClassVar[Literal["text", "images"] | None] = "images"
    artefact_files: ClassVar[tuple[str, ...]] = ("figures/samples.*",)
    references: ClassVar[type[References]] = PaintedSamples

    @checks_words
    def __init__(
        self,
        dataset: str | InMemory = "mnist",
        size: int | None = None,
        data: str | None = None,
        download: bool = False,
        binarise: Literal["no", "threshold", "sampled"] = "no",
        encoder: Choice = "lstm",
        decoder: Choice = "lstm",
        hidden_size: int = 256,
        latent_size: int = 100,
        steps: int = 64,
        constant: bool = False,
        attention: bool = True,
        read: int = 2,
        write: int = 5,
        batch_size: int = 100,
        heldout: float = 0.1,
        evaluation_samples: int | None = None,
        evaluation_size: int = 500,
        dtype: Literal["float32", "float64"] = "float32",
        device: str = "cpu",
    ) -> None:
        few("draw", steps=steps)
        above_0("draw", hidden_size=hidden_size, latent_size=latent_size, evaluation_size=evaluation_size)
        loaded = dataset if isinstance(dataset, InMemory) else _grey(sources.load(dataset, size, data, download))
        for images in (loaded.train_inputs, loaded.test_inputs):
            _check_bytes(images)
        self.data, self.binarise = loaded, binarise
        counts = len(loaded.train_inputs), len(loaded.test_inputs)
        self.sampling = Sampling(*counts, batch_size, heldout, evaluation_samples)
        self.dtype, self.device = getattr(torch, dtype), torch.device(device)
        self.steps, self.latent_size, self.evaluation_size = steps, latent_size, evaluation_size
        channels, height, width = loaded.train_inputs.shape[1:]
        windows = (read, write) if attention else (None, None)
        self._options = ((channels, height, width), encoder, decoder, hidden_size, latent_size, *windows, constant)
        with seeded(0):
            self.network = DrawNetwork(*self._options).to(self.device, self.dtype)
        self._piece = lru_cache(maxsize=2)(self._cut)
        self.reconstruct(self.init(0)[0], loaded.train_inputs[:1])  # refuses windows that cannot be

    def init(self, seed: int) -> tuple[Params, Aux]:
        """The cells' and layers' own initial values, c_0 = 0."""
        with seeded(seed_of("init", seed)):
            drawn = DrawNetwork(*self._options).to(self.dtype)
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        params = {name: value.detach().to(self.device) for name, value in drawn.named_parameters()}
        return params, {"reconstruction": nothing, "kl": nothing.clone()}

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """{"inputs" uint8 [n, C, B, A], "noise" [T, n, Z]}."""
        index = self.sampling.drawn(split, seed, step, 1)[0]
        return self._of(split, index, "batch", split, seed, step)

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The bound, and its two terms apart as aux."""
        reconstruction, kl = (term.mean() for term in self._terms(params, batch)[:2])
        return reconstruction + kl, {"reconstruction": reconstruction.detach(), "kl": kl.detach()}

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The bound."""
        return self.loss(params, aux, batch)[0]

    def metrics(self, params: Params, aux: Aux, batch: Batch) -> dict[str, Tensor]:
        """The bound's terms, "reconstruction" and "kl", nats."""
        return self.loss(params, aux, batch)[1]

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """The loss under its name."""
        return {"bound": loss}

    def step_info(self, batch: Batch, aux: Aux) -> StepInfo:
        """The bound and its terms, nats per image."""
        terms = {name: float(value) for name, value in aux.items()}
        return StepInfo(1.0, len(batch["inputs"]), "images", {"bound": sum(terms.values()), **terms})

    def epoch_start(self, split: Split, seed: int, number: int) -> int:
        """Passes of full batches."""
        return self.sampling.epoch_start(split, seed, number)

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The images of the split, or `evaluation_samples` of them, `evaluation_size` at a time."""
        # `train` and `test` have the same images for every seed, and so are found in the cache.
        own = seed if split in ("inner", "heldout") else 0
        for first in range(0, len(self.sampling.evaluated(split, own)), self.evaluation_size):
            yield self._piece(split, own, first)

    def images(self, params: Params) -> dict[str, Tensor]:
        """Samples, and test images with their reconstructions after them."""
        count = min(_SHOWN // 2, len(self.data.test_inputs))
        images = self._of("test", torch.arange(count), "shown")["inputs"]
        again = self.reconstruct(params, images).images[-1]
        pairs = torch.stack([self._unit(images), again], 1).flatten(0, 1)
        return {"samples": self.sample_images(params, _SHOWN).images[-1], "reconstructions": pairs}

    def sample_images(self, params: Params, count: int, seed: int = 0) -> Painting:
        """Images from the prior, z_t ~ N(0, I) in every step."""
        return Painting.of(self.painted_with(params, self._noise(count, "sample", seed)))

    def reconstruct(self, params: Params, images: Tensor, seed: int = 0) -> Painting:
        """Images [n, C, B, A] in uint8, painted again from what the encoder says of them."""
        with torch.no_grad():
            noise = self._noise(len(images), "reconstruct", seed)
            return Painting.of(functional_call(self.network, params, (noise, self._unit(images))))

    @classmethod
    def sample(cls, run: SavedRun, request: SampleRequest) -> list[Path]:
        """Images from the prior, as they come to be; see `artefacts.paint`."""
        return paint(cls, run, request)

    def inpaint(self, params: Params, images: Tensor, known: Tensor, rounds: int = 30, seed: int = 0) -> Tensor:
        """Fills in pixels that nobody has seen: [rounds, n, C, B, A] in [0, 1], an image after every round.

        The Markov chain of Rezende et al. (2014, appendix F): from one half everywhere, what is unknown is replaced by
        its reconstruction, with fresh noise in each round, while what is known stays. Grey values take the place of
        draws of pixels.

        Args:
            params: Trained parameters.
            images: Images [n, C, B, A] in uint8; unknown pixels are not read.
            known: Mask, True where a pixel is known, of a shape that broadcasts with the images'; `half` makes one.
            rounds: Number of rounds, at least 1.
            seed: Seed of the noise.

        Raises:
            UserError: For no rounds.
        """
        above_0("inpaint", rounds=rounds)
        given, known = self._unit(images), known.to(self.device)
        x, trail = torch.where(known, given, 0.5), []
        with torch.no_grad():
            for number in range(rounds):
                noise = self._noise(len(images), "inpaint", seed, number)
                last = functional_call(self.network, params, (noise, x)).canvases[-1]
                x = torch.where(known, given, last.sigmoid())
                trail.append(x)
        return torch.stack(trail)

    def importance_weighted(self, params: Params, inputs: Tensor, draws: int = 50, seed: int = 0) -> Tensor:
        """A closer bound on −log p(x) than the loss, nats per image [n]: −log (1/K) Σ_k p(x, z_k) / q(z_k | x).

        Burda et al. 2016. It falls towards −log p(x) as K grows, on average; with K = 1 its mean is that of the loss.

        Args:
            params: Trained parameters.
            inputs: Images [n, C, B, A] in uint8, as in a batch.
            draws: Number K of draws, one pass each.
            seed: Seed of the noise.

        Raises:
            UserError: For no draws.
        """
        above_0("importance_weighted", draws=draws)
        weights = []
        with torch.no_grad():
            for number in range(draws):
                noise = self._noise(len(inputs), "importance", seed, number)
                reconstruction, _, log_ratio = self._terms(params, {"inputs": inputs.to(self.device), "noise": noise})
                weights.append(log_ratio - reconstruction)
        # By logsumexp: the weights themselves, of hundreds of nats, would underflow.
        return math.log(draws) - torch.stack(weights).logsumexp(0)

    def painted_with(self, params: Params, z: Tensor) -> Trail:
        """The pass from z [T, n, Z] alone, without a tape."""
        with torch.no_grad():
            trail: Trail = functional_call(self.network, params, (z,))
        return trail

    def fingerprint(self) -> dict[str, str]:
        """The digest of the images."""
        return {"samples": digest(self.data)}

    def summary(self) -> str:
        """The parameters' number."""
        return self.counts().summary()

    def counts(self) -> Counts:
        """How many parameters there are."""
        parts = (self.network, self.network.encoder, self.network.decoder)
        return Counts(*(sum(value.numel() for value in part.parameters()) for part in parts))

    def _terms(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """−log p(x | z), the KL divergence and log p(z) − log q(z | x) of each image, [n] each."""
        x = self._unit(batch["inputs"])
        trail: Trail = functional_call(self.network, params, (batch["noise"], x))
        last = trail.canvases[-1]
        # From the logits: the logarithm of a sigmoid that is rounded to 0 would be infinite.
        reconstruction = (nn.functional.softplus(last) - x * last).flatten(1).sum(1)
        return reconstruction, trail.kl, trail.log_ratio

    def _unit(self, images: Tensor) -> Tensor:
        """Bytes as numbers in [0, 1]."""
        _check_bytes(images)  # numbers in [0, 1] would all come out near 0, in silence
        return images.to(self.device, self.dtype) / 255

    def _noise(self, count: int, *key: str | int) -> Tensor:
        """[T, count, Z], drawn on the CPU: the same on every device."""
        shape = self.steps, count, self.latent_size
        return torch.randn(shape, generator=generator("noise", *key), dtype=self.dtype).to(self.device)

    def _of(self, split: Split, index: Tensor, *key: str | int) -> Batch:
        """The batch of these images; `key` is that of its random numbers."""
        images = (self.data.test_inputs if split == "test" else self.data.train_inputs)[index]
        if self.binarise == "threshold":
            images = (images > 127).to(torch.uint8) * 255
        elif self.binarise == "sampled":
            levels = torch.randint(255, images.shape, generator=generator("binarise", *key), dtype=torch.uint8)
            images = (images > levels).to(torch.uint8) * 255  # P(1) = grey value / 255
        return {"inputs": images.to(self.device), "noise": self._noise(len(index), *key)}

    def _cut(self, split: Split, seed: int, first: int) -> tuple[Batch, int]:
        """One batch of an evaluation, and its number of images."""
        index = self.sampling.evaluated(split, seed)[first : first + self.evaluation_size]
        # The key has no seed: noise and drawn pixels are the same in every evaluation.
        return self._of(split, index, "whole", split, first), len(index)


def _check_bytes(images: Tensor) -> None:
    """Refuses images that are not uint8 [n, C, B, A]."""
    if images.dtype != torch.uint8 or images.dim() != 4:
        found, remedy = shown(images), "give uint8 with an axis for channels, such as (255 * x).byte()"
        raise UserError("draw: images", expected="uint8 [n, channels, height, width]", found=found, remedy=remedy)


def _grey(samples: InMemory) -> InMemory:
    """Images whose channels are all alike, as those of a folder of grey ones, with one channel; others as they are."""
    parts = samples.train_inputs, samples.test_inputs
    if not all(torch.equal(part[:, :1].expand_as(part), part) for part in parts):
        return samples
    train, test = (part[:, :1].contiguous() for part in parts)
    return samples._replace(train_inputs=train, test_inputs=test)


def half(shape: ImageShape, side: Literal["left", "right", "top", "bottom"]) -> Tensor:
    """A mask [C, B, A] that is True in one half of an image; a middle row belongs to the top, a column to the left."""
    known = torch.zeros(shape, dtype=torch.bool)
    _, height, width = shape
    down, across = (height + 1) // 2, (width + 1) // 2
    if side in ("left", "right"):
        known[:, :, :across] = True
    else:
        known[:, :down] = True
    return known if side in ("left", "top") else ~known
