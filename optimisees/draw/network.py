"""DRAW's network: reads, encodes, decodes and writes, a step after the other (Gregor et al. 2015), over any cells."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from l2lopt import cells, sequence
from l2lopt.cells import Cell, CellState
from l2lopt.core.registry import Choice
from optimisees.draw.attention import Window, window

ImageShape = tuple[int, int, int]
"""Channels C, height B and width A."""


class Trail(NamedTuple):
    """The record of a pass of T steps over n images.

    Attributes:
        canvases: c_1 … c_T, each [n, C, B, A], in logits.
        windows: Writing window of each step; none without attention.
        kl: Σ_t KL(q(z_t | x, z_<t) ‖ N(0, I)) [n], nats; 0 of a pass from the prior.
        log_ratio: Σ_t log N(z_t; 0, I) − log q(z_t | x, z_<t) [n] at the z drawn, nats; likewise.
    """

    canvases: Sequence[Tensor]
    windows: Sequence[Window]
    kl: Tensor
    log_ratio: Tensor


class Read(nn.Module):
    """The encoder's input: an image and its error image, both through a window that h_dec chooses, or whole.

    Args:
        shape: Channels, height and width of an image.
        hidden_size: Size of h_dec.
        size: Size N of the window; None: no window.
    """

    def __init__(self, shape: ImageShape, hidden_size: int, size: int | None) -> None:
        super().__init__()
        self.size, (channels, height, width) = size, shape
        self.width = 2 * channels * (height * width if size is None else size**2)
        self.window = None if size is None else nn.Linear(hidden_size, 5)

    def forward(self, images: Tensor, error: Tensor, h: Tensor) -> Tensor:
        """The images x and x̂ [n, C, B, A] and h_dec [n, M] to r [n, width]."""
        if self.window is None or self.size is None:
            return torch.cat([images.flatten(1), error.flatten(1)], 1)
        view = window(self.window(h), self.size, *images.shape[-2:])
        return view.read(torch.cat([images, error], 1)).flatten(1)


class Write(nn.Module):
    """The addition of a step to the canvas: a patch, painted through a window that h_dec chooses, or a whole image.

    Args:
        shape: Channels, height and width of an image.
        hidden_size: Size of h_dec.
        size: Size N of the window; None: no window.
    """

    def __init__(self, shape: ImageShape, hidden_size: int, size: int | None) -> None:
        super().__init__()
        channels, *pixels = shape
        self.size, self.pixels = size, pixels
        self.patch_shape = (channels, *(pixels if size is None else (size, size)))
        self.patch = nn.Linear(hidden_size, math.prod(self.patch_shape))
        self.window = None if size is None else nn.Linear(hidden_size, 5)

    def forward(self, h: Tensor) -> tuple[Tensor, Window | None]:
        """h_dec [..., M] to what is added, [..., C, B, A], and the window."""
        patch = self.patch(h).unflatten(-1, self.patch_shape)
        if self.window is None or self.size is None:
            return patch, None
        view = window(self.window(h), self.size, *self.pixels)
        return view.write(patch), view


class DrawNetwork(nn.Module):
    """DRAW's steps t = 1 … T; c_0 and the cells' states before the first, h_dec among them, are parameters.

    x̂ = x − σ(c_{t−1}); r = read(x, x̂, h_dec); h_enc = RNN_enc([r, h_dec]); μ, log σ = W h_enc + b; z_t = μ + σ∘ε_t;
    h_dec = RNN_dec(z_t), or RNN_dec([z_t, 1]); c_t = c_{t−1} + write(h_dec).

    Args:
        shape: Channels, height and width of an image.
        encoder: Cell of the encoder.
        decoder: Cell of the decoder.
        hidden_size: Size of h in both cells.
        latent_size: Size of z.
        read: Size N of the reading window; None: no attention.
        write: Size of the writing window; None: no window.
        constant: Whether the decoder sees a 1 beside z.
    """

    def __init__(
        self,
        shape: ImageShape,
        encoder: Choice,
        decoder: Choice,
        hidden_size: int,
        latent_size: int,
        read: int | None,
        write: int | None,
        constant: bool,
    ) -> None:
        super().__init__()
        self.constant = constant
        self.canvas = nn.Parameter(torch.zeros(shape))
        self.read = Read(shape, hidden_size, read)
        self.encoder = cells.build(encoder, self.read.width + hidden_size, hidden_size)
        self.posterior = nn.Linear(hidden_size, 2 * latent_size)
        self.decoder = cells.build(decoder, latent_size + constant, hidden_size)
        self.write = Write(shape, hidden_size, write)
        self.encoding, self.decoding = _first_state(self.encoder), _first_state(self.decoder)

    def forward(self, noise: Tensor, images: Tensor | None = None) -> Trail:
        """ε [T, n, Z], and x [n, C, B, A] in [0, 1] to be inferred; without x the noise itself is z, from the prior."""
        return self._painted(noise) if images is None else self._inferred(noise, images)

    def _inferred(self, noise: Tensor, images: Tensor) -> Trail:
        count = len(images)
        canvas, zero = self.canvas.expand_as(images), images.new_zeros(self.decoder.hidden_size, count)
        encoding, decoding = (
            _repeated(self.encoder, self.encoding, count),
            _repeated(self.decoder, self.decoding, count),
        )
        h = decoding.get("h", zero).T
        kl = log_ratio = images.new_zeros(count)
        canvases, windows = [], []
        for epsilon in noise.unbind(0):
            seen = self.read(images, images - canvas.sigmoid(), h)
            code, encoding = self.encoder(torch.cat([seen, h], 1).T, encoding)
            mu, log_sigma = self.posterior(code.T).chunk(2, -1)
            # The noise comes from outside: the loss stays pure, and z has a derivative in μ and σ.
            z = mu + log_sigma.exp() * epsilon
            kl = kl + (0.5 * (mu.square() + (2 * log_sigma).exp() - 1) - log_sigma).sum(1)
            # (z − μ)/σ is ε itself, and the constants of the two densities cancel.
            log_ratio = log_ratio + (0.5 * (epsilon.square() - z.square()) + log_sigma).sum(1)
            output, decoding = self.decoder(self._decoded(z).T, decoding)
            h = output.T
            addition, view = self.write(h)
            canvas = canvas + addition
            canvases.append(canvas)
            windows += [] if view is None else [view]
        return Trail(canvases, windows, kl, log_ratio)

    def _painted(self, z: Tensor) -> Trail:
        """All steps at once: nothing but the decoder's own state goes from one to the next."""
        h, _ = sequence.run(self.decoder, self._decoded(z).mT, _repeated(self.decoder, self.decoding, z.shape[1]))
        additions, view = self.write(h.mT)
        canvases = (self.canvas + additions.cumsum(0)).unbind(0)
        windows = [] if view is None else [Window(*parts) for parts in zip(*(t.unbind(0) for t in view), strict=True)]
        nothing = z.new_zeros(z.shape[1])
        return Trail(canvases, windows, nothing, nothing)

    def _decoded(self, z: Tensor) -> Tensor:
        """What the decoder sees of z [..., Z]."""
        return nn.functional.pad(z, (0, 1), value=1.0) if self.constant else z


def _first_state(cell: Cell) -> nn.ParameterDict:
    """A cell's state before the first step, as parameters. A cell without biases tells the time by it alone."""
    return nn.ParameterDict({name.replace(".", "_"): torch.zeros(size) for name, size in cell.state_sizes.items()})


def _repeated(cell: Cell, state: nn.ParameterDict, count: int) -> CellState:
    """The same for `count` images, name → [size, count]."""
    return {name: state[name.replace(".", "_")][:, None].expand(-1, count) for name in cell.state_sizes}


class Painting(NamedTuple):
    """Images as they come to be, in T steps.

    Attributes:
        images: σ(c_t) [T, n, C, B, A], in [0, 1].
        rectangles: Outlines of the writing windows [T, n, 4], see `Window.rectangle`; None without attention.
    """

    images: Tensor
    rectangles: Tensor | None

    @classmethod
    def of(cls, trail: Trail) -> "Painting":
        """The one that a pass has left."""
        rectangles = torch.stack([view.rectangle() for view in trail.windows]) if trail.windows else None
        return cls(torch.stack(list(trail.canvases)).sigmoid(), rectangles)
