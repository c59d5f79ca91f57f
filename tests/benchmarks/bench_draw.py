"""DRAW: images a second in training and in generation, and the recurrent part's share, all from one run.

python tests/benchmarks/bench_draw.py [--threads 2] [--rounds 5] [--sizes small svhn mnist] [--cells lstm ihc-lstm]

A training step is 100 images: noise, loss, gradient, clip and Adam. Its cells take their steps one by one, since what
the encoder reads depends on the canvas before; their part is the same cells by themselves, forward and backward, on
inputs of the same sizes. In generation z is there from the start, so the decoder goes through all steps at once by its
hand-derived pass; beside it stands the plain loop. That both give the same canvases is checked first.
"""

import argparse
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from bench_language_model import Run, seconds

from l2lopt import sequence
from l2lopt.experiments.config import TrainConfig, load, shipped
from l2lopt.parallel.threads import cpu_threads
from optimisees import Draw, InMemory

SIZES = {
    "small": (shipped("draw-small.toml"), (1, 28, 28)),
    "mnist": (shipped("draw-mnist-lstm.toml"), (1, 28, 28)),
    "svhn": (shipped("draw-svhn-lstm.toml"), (3, 32, 32)),
}
IMAGES = 100


def model_of(name: str, cell: str) -> Draw:
    """On random images of the right shape."""
    path, shape = SIZES[name]
    options = {**load(path, kind=TrainConfig).optimisee, "decoder": cell}
    pixels = torch.randint(256, (4 * IMAGES, *shape), generator=torch.Generator().manual_seed(0)).byte()
    labels = torch.zeros(len(pixels), dtype=torch.long)
    for key in ("name", "dataset", "evaluation_samples"):
        options.pop(key, None)
    return Draw(InMemory(pixels, labels, pixels, labels), **options)


def training(model: Draw) -> Run:
    """A whole step."""
    leaves = {name: value.clone().requires_grad_() for name, value in model.init(0)[0].items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=1e-3, betas=(0.5, 0.999))
    place = {"step": 0}

    def step() -> None:
        loss, _ = model.loss(leaves, {}, model.batch("train", 0, place["step"] % 4))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 5.0)
        optimizer.step()
        place["step"] += 1

    return step


def recurrent(model: Draw) -> Run:
    """The steps of both cells alone, and the way back through them."""
    parts = []
    for cell in (model.network.encoder, model.network.decoder):
        x = torch.randn(model.steps, cell.input_size, IMAGES, requires_grad=True)
        parts.append((cell, x))

    def run() -> None:
        for cell, x in parts:
            output, _ = sequence.run(cell, x, cell.initial_state(x[0]), choice="loop")
            output.sum().backward()

    return run


def generating(model: Draw, choice: str) -> Run:
    """100 images from the prior."""
    params, z = model.init(0)[0], model._noise(IMAGES, "benchmark")

    def run() -> object:
        with patch.object(sequence, "run", partial(sequence.run, choice=choice)):
            return model.painted_with(params, z)

    return run


def checked(model: Draw) -> None:
    """Both ways of generation give one image."""
    fast, loop = (generating(model, choice)().canvases[-1] for choice in ("fast", "loop"))
    torch.testing.assert_close(fast, loop, rtol=1e-5, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--cells", nargs="+", default=["lstm", "ihc-lstm"])
    options = parser.parse_args()
    print("| | decoder | training, images/s | cells' share | generation, images/s | loop's time / fast path's |")
    print("|---|---|---|---|---|---|", flush=True)
    with cpu_threads(options.threads):
        for name in options.sizes:
            models = {cell: model_of(name, cell) for cell in options.cells}
            runs = {}
            for cell, model in models.items():
                checked(model)
                ways = {"training": training(model), "cells": recurrent(model)}
                ways |= {choice: generating(model, choice) for choice in ("fast", "loop")}
                runs |= {(cell, way): run for way, run in ways.items()}
            for run in runs.values():
                run()
            # Round after round, so that a busy neighbour slows all of them.
            rounds = [{key: seconds(run) for key, run in runs.items()} for _ in range(options.rounds)]
            for cell in models:
                trained, fast = (IMAGES / median(times[cell, way] for times in rounds) for way in ("training", "fast"))
                share = median(times[cell, "cells"] / times[cell, "training"] for times in rounds)
                ratio = median(times[cell, "loop"] / times[cell, "fast"] for times in rounds)
                print(f"| {name} | {cell} | {trained:,.0f} | {share:.0%} | {fast:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
