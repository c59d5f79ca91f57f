"""Sequence layers on the CPU, forward and backward, ms: the loop, the hand-derived pass, PyTorch's own, the products.

Medians of rounds in which every way has its turn, and the ratios within them; equality is checked first.

python tests/benchmarks/bench_sequence.py [--threads 2] [--rounds 10] [--cells lstm irc-gru] [--sizes 650,650,70]
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from l2lopt import cells
from l2lopt.cells import Cell, CellState
from l2lopt.core.errors import UserError
from l2lopt.parallel.threads import cpu_threads
from l2lopt.sequence import by_hand, from_torch, loop
from l2lopt.sequence.by_hand import products

SIZES = ("650,650,35", "650,650,70", "400,1150,70", "1150,1150,70")
"""N, M, T."""
BATCH = 20
CHOICES = {
    **{name: {"name": name} for name in cells.CELLS if name != "stacked"},
    "gru, reset after": {"name": "gru", "reset": "after", "update": "kept", "biases": "two"},
}
TORCH: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru, reset after": nn.GRU, "rnn": nn.RNN}
Run = Callable[[], Tensor]


class Problem:
    """A cell, an input that needs a gradient, and the gradient of the outputs."""

    def __init__(self, label: str, n: int, m: int, steps: int) -> None:
        kind = TORCH.get(label)
        self.module = None if kind is None else kind(n, m)
        if self.module is None:
            self.cell = cells.build(CHOICES[label], n, m)
        else:
            self.cell = from_torch(self.module).layers[0][0].cell
        self.x = torch.randn(steps, BATCH, n, requires_grad=True)
        self.gradients = torch.randn(steps, BATCH, m)

    def ours(self, run: Callable[[Cell, Tensor, CellState], tuple[Tensor, CellState]]) -> Run:
        """Forward and backward by one of our ways; it gives the gradient of x."""

        def once() -> Tensor:
            self.cell.zero_grad()
            self.x.grad = None
            state = self.cell.initial_state(self.x.new_zeros(self.x.shape[2], BATCH))
            run(self.cell, self.x.movedim(-1, 1), state)[0].movedim(1, -1).backward(self.gradients)
            return self.x.grad

        return once

    def torchs(self) -> Run:
        """The same by PyTorch's module."""

        def once() -> Tensor:
            self.module.zero_grad()
            self.x.grad = None
            self.module(self.x)[0].backward(self.gradients)
            return self.x.grad

        return once

    def limit(self) -> Run:
        """The products alone: three for every matrix, those with h (or with what is made of it) step by step.

        A matrix whose columns are x's alone is multiplied over all of time at once, as are all weights' gradients.
        """
        steps, _, n = self.x.shape
        recurrent = ("weight_h", "weight_v", "gamma")
        matrices = [(name.rpartition(".")[2], p.detach()) for name, p in self.cell.named_parameters() if p.dim() == 2]
        serial = [p for name, p in matrices if name in recurrent]
        inputs = {size: torch.randn(steps * BATCH, size) for _, p in matrices for size in p.shape}
        outputs = {size: products.room(x, *x.shape) for size, x in inputs.items()}

        there_and_back = [(product, q) for p in serial for q in (p, p.t()) for product in [products.Repeated(q)]]

        def once() -> Tensor:
            for _ in range(steps):
                for product, p in there_and_back:
                    product.write(outputs[p.shape[0]][:BATCH], inputs[p.shape[1]][:BATCH])
            for name, p in matrices:
                if name not in recurrent:
                    products.write(outputs[p.shape[0]], inputs[p.shape[1]], p)
                    products.write(outputs[p.shape[1]], inputs[p.shape[0]], p.t())
                products.outer(*(inputs[size].unsqueeze(0) for size in p.shape), p.dtype)
            return inputs[n]

        return once


def check(problem: Problem, runs: dict[str, Run]) -> None:
    """All ways give the same gradients, of x and of the weights."""
    found = {}
    for name, run in runs.items():
        found[name] = [run().clone()]
        found[name] += [] if name == "torch" else [p.grad.clone() for p in problem.cell.parameters()]
    for name, gradients in found.items():
        for mine, wanted in zip(gradients, found["loop"], strict=False):
            assert (mine - wanted).abs().max() <= 2e-5 * wanted.abs().max(), (type(problem.cell).__name__, name)


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Ms, a list per way."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def row(label: str, n: int, m: int, steps: int, rounds: int) -> str:
    """A line of the table."""
    problem = Problem(label, n, m, steps)
    runs = {"loop": problem.ours(loop.run), "by hand": problem.ours(by_hand.run)}
    if problem.module is not None:
        runs["torch"] = problem.torchs()
    check(problem, runs)
    times = measure(runs | {"limit": problem.limit()}, rounds)
    ms = {name: median(values) for name, values in times.items()}

    def ratio(one: str, other: str) -> str:
        if one not in times or other not in times:
            return ""
        return f"{median(a / b for a, b in zip(times[one], times[other], strict=True)):.2f}"

    columns = [f"{ms[name]:.0f}" if name in ms else "" for name in ("loop", "by hand", "torch", "limit")]
    ratios = [ratio("loop", "by hand"), ratio("by hand", "torch"), ratio("by hand", "limit")]
    return " | ".join([f"| {label} | {n}→{m}, T {steps}", *columns, *ratios]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cells", nargs="+", default=list(CHOICES), choices=list(CHOICES))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    sizes = [tuple(map(int, size.split(","))) for size in arguments.sizes]
    print("| cell | N→M, T | loop | by hand | torch | limit | loop / by hand | by hand / torch | by hand / limit |")
    print("|" + "---|" * 9)
    with cpu_threads(arguments.threads):
        torch.manual_seed(0)
        for label in arguments.cells:
            for n, m, steps in sizes:
                square = label in ("sru", "irc-sru", "ihc-sru", "no-irc-sru", "irc-t-lstm", "ihc-t-lstm")
                if square != (n == m) and (square or n == m == 1150):
                    continue  # cells that need N = M, and only those, are run at 1150→1150
                try:
                    print(row(label, n, m, steps, arguments.rounds), flush=True)
                except UserError as error:
                    print(f"| {label} | {n}→{m} | {error}")


if __name__ == "__main__":
    main()
