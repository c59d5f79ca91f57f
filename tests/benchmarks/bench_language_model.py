"""Language models in training: tokens a second of whole steps, all from one run; equality is checked first.

python tests/benchmarks/bench_language_model.py [--threads 2] [--rounds 3] [--window 70] [--cells lstm irc-gru]
[--sizes "650,650×2"]

A step is a window of 20 columns: masks, loss, gradient, clip and SGD, over 10,000 words. Our layers go their fast way
through time, by the loop, and the fast way in bfloat16; beside them stand those of `nn.LSTM` with the same weights,
masks and everything else.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt.core.layout import Params
from l2lopt.parallel.threads import cpu_threads
from l2lopt.sequence import Stack
from optimisees import LanguageModel
from optimisees.data.text import EOS, Corpus, Vocabulary

SIZES = {"400, 1150 × 3": (400, 1150, 3), "650, 650 × 2": (650, 650, 2), "200, 200 × 2": (200, 200, 2)}
CELLS = ("lstm", "ihc-lstm", "gru", "irc-gru")
WORDS = 10_000
Run = Callable[[], object]


class TorchLayers(nn.Module):
    """`nn.LSTM`s in the place of a language model's stack, under the same parameters, states and masks."""

    def __init__(self, stack: Stack, sizes: list[int]) -> None:
        super().__init__()
        self.draw_masks = stack.draw_masks
        self.sizes = list(pairwise(sizes))
        self.lstms = [nn.LSTM(n, m, bias=True) for n, m in self.sizes]
        for layer, (n, m) in enumerate(self.sizes):
            for name, shape in {"weight_x": (4 * m, n), "weight_h": (4 * m, m), "bias": (4 * m,)}.items():
                self.register_parameter(f"{layer}_{name}", nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor, states: list[Params], masks: Mapping[str, Tensor]) -> tuple[Tensor, list[Params]]:
        after = []
        for layer, lstm in enumerate(self.lstms):
            weights = {
                "weight_ih_l0": getattr(self, f"{layer}_weight_x"),
                "weight_hh_l0": getattr(self, f"{layer}_weight_h") * masks[f"{layer}.0.weight_h"],
                "bias_ih_l0": getattr(self, f"{layer}_bias"),
                "bias_hh_l0": torch.zeros(4 * self.sizes[layer][1]),
            }
            before = tuple(states[layer][name][None] for name in "hc")
            x, (h, c) = functional_call(lstm, weights, (x, before))
            after.append({"h": h[0], "c": c[0]})
            if f"dropout.{layer}" in masks:
                x = x * masks[f"dropout.{layer}"]
        return x, after


def model_of(
    cell: str, sizes: tuple[int, int, int], window: int, backend: str = "fast", autocast: bool = False
) -> LanguageModel:
    """On random words, its windows all of one length."""
    vocabulary = Vocabulary((EOS, *map(str, range(1, WORDS))), "word")
    text = torch.randint(WORDS, (20 * (4 * window + 1),), generator=torch.Generator().manual_seed(0))
    corpus = Corpus(vocabulary, text, text, text)
    return LanguageModel(corpus, cell, *sizes, window=window, variable=False, backend=backend, autocast=autocast)


def with_torch(model: LanguageModel, params: Params) -> Params:
    """Puts `nn.LSTM`s into the model; its parameters under their names."""
    model.stack = TorchLayers(model.stack, model.sizes)  # type: ignore[assignment]  # a stand-in for the stack
    return {name.replace("stack.layers.", "stack.").replace(".0.cell.", "_"): p.clone() for name, p in params.items()}


def stepping(model: LanguageModel, params: Params) -> Run:
    """A training step from wherever the last one ended."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=1.0, weight_decay=1.2e-6)
    place: dict[str, Any] = {"aux": model.init(0)[1], "step": 0}

    def step() -> None:
        batch = model.batch("train", 0, place["step"] % 4)
        loss, place["aux"] = model.loss(leaves, place["aux"], batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(leaves.values(), 0.25)
        optimizer.step()
        place["step"] += 1

    return step


def checked(
    model: LanguageModel, params: Params, other: LanguageModel, theirs: Params, tolerance: float = 1e-5
) -> None:
    """Both losses are one."""
    aux, batch = model.init(0)[1], model.batch("train", 0, 1)
    one, two = model.loss(params, aux, batch)[0], other.loss(theirs, aux, batch)[0]
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=int, default=70)
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--sizes", nargs="+", choices=[name.replace(" ", "") for name in SIZES], default=None)
    options = parser.parse_args()
    print("| sizes | | tokens/s | of nn.LSTM's time |\n|---|---|---|---|")
    for label, sizes in SIZES.items():
        if options.sizes and label.replace(" ", "") not in options.sizes:
            continue
        runs = {}
        for cell in options.cells:
            model = model_of(cell, sizes, options.window)
            params = model.init(0)[0]
            runs[cell] = stepping(model, params)
            looping = model_of(cell, sizes, options.window, "loop")
            checked(model, params, looping, params)
            runs[f"{cell}, loop"] = stepping(looping, params)
            halved = model_of(cell, sizes, options.window, autocast=True)
            checked(model, params, halved, params, tolerance=1e-2)
            runs[f"{cell}, bfloat16"] = stepping(halved, params)
            if cell == "lstm":
                other = model_of(cell, sizes, options.window)
                theirs = with_torch(other, params)
                checked(model, params, other, theirs)
                runs["nn.LSTM"] = stepping(other, theirs)
        with cpu_threads(options.threads):
            for run in runs.values():
                run()
            # Round after round, so that a busy neighbour slows all of them.
            rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(options.rounds)]
        for name in runs:
            taken = median(times[name] for times in rounds)
            ratio = median(times[name] / times["nn.LSTM"] for times in rounds) if "nn.LSTM" in runs else float("nan")
            print(f"| {label} | {name} | {20 * options.window / taken:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
