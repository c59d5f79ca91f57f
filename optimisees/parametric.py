"""Parametric families: problems whose architecture, data and initial values are drawn by a number (Metz et al. 2022).

A family and a number name a problem. All of its runs have the same shapes, so that they go side by side; other numbers
give other problems. `options` says what was drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.seeding import generator
from optimisees.classifiers.convnet import convnet
from optimisees.classifiers.layers import ACTIVATIONS
from optimisees.classifiers.mlp import mlp
from optimisees.data.text import artificial
from optimisees.language.transformer import Transformer
from optimisees.module import ModuleOptimisee

T = TypeVar("T")
DATASETS: Mapping[str, tuple[int | None, ...]] = {"digits": (None,), "mnist": (14, 28), "cifar10": (8, 16)}
"""Data sets of images, and the heights and widths that are drawn."""


class _Draws:
    """Draws of one problem, in the order in which they are asked for."""

    def __init__(self, family: str, draw: int) -> None:
        self.source = generator(family, draw)

    def of(self, choices: Sequence[T]) -> T:
        """One of the choices, all with the same chance."""
        return choices[int(torch.randint(len(choices), (), generator=self.source))]

    def ratio(self, low: float, high: float) -> float:
        """A log-uniform number."""
        share = float(torch.rand((), generator=self.source, dtype=torch.float64))
        return float(low * (high / low) ** share)

    def count(self, low: int, high: int) -> int:
        """A log-uniform whole number, both ends among them."""
        return min(high, int(self.ratio(low, high + 1)))


def _of_images(draws: _Draws, datasets: Sequence[str]) -> dict[str, Any]:
    """What networks on images have in common."""
    for name in datasets:
        if name not in DATASETS:
            remedy = did_you_mean(name, DATASETS)
            raise UserError("parametric: datasets", expected="known names", found=repr(name), remedy=remedy)
    dataset = draws.of(datasets)
    return {
        "dataset": dataset,
        "size": draws.of(DATASETS[dataset]),
        "batch_size": draws.count(16, 256),
        "norm": draws.of(("none", "none", "batch", "layer")),
        "initialisation": draws.of(("default", "default", "he", "orthogonal")),
        "gain": round(draws.ratio(0.5, 2.0), 3),
    }


def _mlp(draws: _Draws, datasets: Sequence[str]) -> dict[str, Any]:
    common = _of_images(draws, datasets)
    hidden = [draws.count(8, 64) for _ in range(draws.of((1, 1, 2, 3)))]
    return {"hidden": hidden, "activation": draws.of(tuple(ACTIVATIONS)), **common}


def _convnet(draws: _Draws, datasets: Sequence[str]) -> dict[str, Any]:
    common = _of_images(draws, datasets)
    channels = [draws.count(4, 16) for _ in range(draws.of((1, 2, 3)))]
    return {"channels": channels, "hidden": draws.count(8, 64), **common}


def _language(draws: _Draws, draw: int) -> dict[str, Any]:
    heads = draws.of((1, 2, 4))
    words = draws.count(50, 500)
    text = {
        "language": draw,
        "words": words,
        "classes": draws.of((3, 4, 6, 8)),
        "unit": draws.of(("character", "word")),
    }
    return {
        "data": {"name": "artificial", **text},
        "width": heads * draws.of((8, 16)),
        "layers": draws.of((1, 2, 3)),
        "heads": heads,
        "window": draws.count(16, 48),
        "expansion": draws.of((2, 4)),
        "norm": draws.of(("layer", "rms")),
        "tied": draws.of((False, True)),
        "batch_size": draws.count(4, 32),
    }


_FAMILIES: Mapping[str, Callable[..., dict[str, Any]]] = {"parametric-mlp": _mlp, "parametric-convnet": _convnet}


def options(family: str, draw: int, datasets: Sequence[str] = tuple(DATASETS)) -> dict[str, Any]:
    """The options of a problem, as its optimisee takes them.

    Args:
        family: "parametric-mlp", "parametric-convnet" or "parametric-language".
        draw: Number of the problem.
        datasets: Data sets of images to draw from.

    Raises:
        UserError: For an unknown data set, or none.

    Example:
        >>> from optimisees.parametric import options
        >>> options("parametric-mlp", 3, ["digits"]) == options("parametric-mlp", 3, ["digits"])
        True
    """
    if not datasets:
        found, remedy = "none", f"name some of {', '.join(DATASETS)}"
        raise UserError("parametric: datasets", expected="at least one", found=found, remedy=remedy)
    draws = _Draws(family, draw)
    return _language(draws, draw) if family == "parametric-language" else _FAMILIES[family](draws, datasets)


@checks_words
def parametric_mlp(
    draw: int = 0,
    datasets: Sequence[str] = tuple(DATASETS),
    data: str | None = None,
    download: bool = False,
    evaluation_samples: int | None = 1000,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """An `mlp` by number: data set uniform over `datasets`, MNIST at 14 or 28 pixels, CIFAR-10 at 8 or 16.

    One hidden layer with probability ½, two or three with ¼ each, of 8 to 64 units (log-uniform, each by itself);
    activation uniform over the five; normalisation none with ½, batch and layer with ¼ each; initial values PyTorch's
    with ½, He's and orthogonal with ¼ each, times a log-uniform factor in [½, 2]; batches of 16 to 256, log-uniform.

    Args:
        draw: Number of the problem.
        datasets: Data sets to draw from, of "digits", "mnist" and "cifar10".
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
    """
    drawn = options("parametric-mlp", draw, datasets)
    where: dict[str, Any] = {"data": data, "download": download, "dtype": dtype, "device": device}
    return mlp(**drawn, evaluation_samples=evaluation_samples, heldout=heldout, **where)


@checks_words
def parametric_convnet(
    draw: int = 0,
    datasets: Sequence[str] = tuple(DATASETS),
    data: str | None = None,
    download: bool = False,
    evaluation_samples: int | None = 1000,
    heldout: float = 0.23,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """A `convnet` by number: one to three stages of 4 to 16 channels, 8 to 64 hidden units, log-uniform.

    Data set, its pixels, normalisation, initial values and batches as for `parametric_mlp`.

    Args:
        draw: Number of the problem.
        datasets: Data sets to draw from, of "digits", "mnist" and "cifar10".
        data: The folder that data sets lie in; by default what L2LOPT_DATA says.
        download: Fetch what is missing.
        evaluation_samples: Evaluate each split on that many of its samples, drawn once and for all; none: on all.
        heldout: The share of training samples held out of the inner steps of meta-training.
        dtype: Data type of data and parameters.
        device: Device of data and parameters.
    """
    drawn = options("parametric-convnet", draw, datasets)
    where: dict[str, Any] = {"data": data, "download": download, "dtype": dtype, "device": device}
    return convnet(**drawn, evaluation_samples=evaluation_samples, heldout=heldout, **where)


@checks_words
def parametric_language(
    draw: int = 0,
    evaluation_samples: int | None = 200,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> Transformer:
    """A `Transformer` by number, on an artificial language of its own (`text.artificial`), which needs no files.

    A lexicon of 50 to 500 words (log-uniform) in 3, 4, 6 or 8 classes, by character or by word; 1, 2 or 4 heads of 8
    or 16 numbers, 1 to 3 layers, perceptrons of 2 or 4 widths, layer or RMS norm, tied or not; windows of 16 to 48
    tokens, batches of 4 to 32, log-uniform. All choices without a weight said have equal chances.

    Args:
        draw: Number of the problem, and of the language.
        evaluation_samples: Number of a split's windows in an evaluation, always the same; none: all.
        dtype: Data type of the parameters.
        device: Device of data and parameters.
    """
    drawn = options("parametric-language", draw)
    text = {key: value for key, value in drawn.pop("data").items() if key != "name"}
    where: dict[str, Any] = {"evaluation_samples": evaluation_samples, "dtype": dtype, "device": device}
    return Transformer(artificial(**text), **drawn, **where)
