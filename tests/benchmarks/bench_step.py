"""One step of the learned rule on the CPU: ns per coordinate and ratios, all from one run; equality is checked first.

python tests/benchmarks/bench_step.py [--coordinates 1000000] [--threads 2] [--growth]
"""

import argparse
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from l2lopt import kernels, optimisers
from l2lopt.core.layout import Layout
from l2lopt.kernels.cpu.block import WIDTH
from l2lopt.parallel.threads import cpu_threads, one_each, share_out

CELLS = ("lstm", "ihc-lstm")
PLAIN: dict[str, Any] = {"inputs": ["log-and-sign"], "rule": "additive"}
GROWTH = (10_000, 100_000, 1_000_000, 10_000_000, 20_000_000)
M = 20
Run = Callable[[], object]


class Problem:
    """Gradients, parameters and their layout: 20 matrices."""

    def __init__(self, coordinates: int) -> None:
        sizes = [coordinates // 20] * 19
        sizes.append(coordinates - sum(sizes))
        self.layout = Layout(tuple(map(str, range(20))), tuple((size,) for size in sizes))
        self.grads, self.params = torch.randn(coordinates), torch.randn(coordinates)


def twin(cell: str, problem: Problem, **options: Any) -> tuple[optimisers.Optimiser, Run]:
    """The reference, and a step of its twin from its own last state."""
    reference = optimisers.coordinatewise(cell=cell, hidden_size=M, **options)
    fast = kernels.fuse(reference, "cpu")
    state = fast.init(problem.layout)

    def step() -> Tensor:
        nonlocal state
        update, state = fast.update_(problem.grads, state, problem.params)
        return update

    return reference, step


def features(grads: Tensor, p: float = 10.0) -> Tensor:
    """log-and-sign, [n, 2]."""
    large = grads.abs() >= torch.exp(torch.tensor(-p))
    size = torch.where(large, grads.abs().log() / p, -1.0)
    return torch.stack([size, torch.where(large, grads.sign(), grads * torch.exp(torch.tensor(p)))], dim=1)


def rowwise_lstm(reference: optimisers.Coordinatewise, grads: Tensor) -> Run:
    """The plain rule as it is commonly written: a coordinate a row, `nn.LSTMCell` on [n, 20]."""
    cell, ours = nn.LSTMCell(M, M), reference.cell
    weights = (ours.weight_x, ours.weight_h, ours.bias, torch.zeros_like(ours.bias))
    for mine, theirs in zip(cell.parameters(), weights, strict=True):
        mine.copy_(theirs)
    state = (torch.zeros(len(grads), M), torch.zeros(len(grads), M))

    def step() -> Tensor:
        nonlocal state
        state = cell(reference.embedding(features(grads)), state)
        return reference.rule.step_size * reference.head(state[0])[:, 0]

    return step


def rowwise_ihc_lstm(reference: optimisers.Coordinatewise, grads: Tensor) -> Run:
    """Likewise, the IHC-LSTM's equations on [n, 20]."""
    highway, core = reference.cell.highway, reference.cell.core
    h, c = torch.zeros(len(grads), M), torch.zeros(len(grads), M)

    def step() -> Tensor:
        nonlocal h, c
        x = reference.embedding(features(grads))
        back = linear(h, highway.feedback.weight_h)
        g = torch.sigmoid(linear(x, highway.weight_g, highway.bias_g) + linear(h, highway.gamma))
        v = (1 - g) * x + g * back
        f, i, o = linear(v, core.weight_v).chunk(3, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * linear(x, core.weight_x)
        h = torch.sigmoid(o) * torch.tanh(c)
        return reference.rule.step_size * reference.head(h)[:, 0]

    return step


def adam(problem: Problem) -> Run:
    """torch's, over the same tensors."""
    params = [nn.Parameter(part.clone()) for part in problem.layout.split(problem.params)]
    for parameter, part in zip(params, problem.layout.split(problem.grads), strict=True):
        parameter.grad = part.clone()
    return torch.optim.Adam(params, foreach=True).step


def limit(coordinates: int) -> Run:
    """What an LSTM cannot do without: its product (K = 23) and its 5 · 20 activations, on buffers that stay in cache.

    By threads of one intra-op thread each, as the twin. σ stands for tanh too: it is the fastest of that kind.
    """
    weight = torch.randn(4 * M, 2 + M + 1) / 5
    idle: list[tuple[Tensor, Tensor]] = []
    blocks = -(-coordinates // WIDTH)

    def work(index: int) -> None:
        stacked, gates = idle.pop() if idle else (torch.randn(2 + M + 1, WIDTH), torch.empty(4 * M, WIDTH))
        for _ in range(16 * index, min(16 * index + 16, blocks)):
            torch.mm(weight, stacked, out=gates)
            gates.sigmoid_()
            gates[:M].sigmoid_()
        idle.append((stacked, gates))

    def run() -> None:
        with one_each() as threads:
            share_out(work, -(-blocks // 16), threads)

    return run


def check(cell: str, rowwise: Callable[..., Run], **options: Any) -> None:
    """Three steps of twin and row by row, and of twin and reference, give the same updates."""
    problem = Problem(10_007)
    reference, fast = twin(cell, problem, **options)
    other = rowwise(reference, problem.grads) if options == PLAIN else None
    state = reference.init(problem.layout)
    for _ in range(3):
        update = fast()
        wanted, state = reference.update(problem.grads, state, problem.params)
        for expected in [wanted] + ([other()] if other else []):
            assert (update - expected).abs().max() <= 2e-6 * expected.abs().max(), (cell, options)


def measure(runs: Mapping[str, Run], coordinates: int, seconds: float) -> dict[str, float]:
    """ns per coordinate: medians over rounds in which every variant has its turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < 3:
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - before) / coordinates * 1e9)
    return {name: median(values) for name, values in times.items()}


def table(coordinates: int, seconds: float) -> None:
    problem = Problem(coordinates)
    runs: dict[str, Run] = {}
    for cell, rowwise in zip(CELLS, (rowwise_lstm, rowwise_ihc_lstm), strict=True):
        check(cell, rowwise, **PLAIN)
        check(cell, rowwise)
        reference, runs[f"{cell}, twin"] = twin(cell, problem, **PLAIN)
        runs[f"{cell}, [n, 20]"] = rowwise(reference, problem.grads)
        runs[f"{cell}, twin, the library's recipe"] = twin(cell, problem)[1]
    runs |= {"torch.optim.Adam": adam(problem), "limit for the LSTM": limit(coordinates)}
    ns = measure(runs, coordinates, seconds)
    for name, value in ns.items():
        print(f"{name:40} {value:8.1f} ns")
    for cell in CELLS:
        print(f"{cell}: twin {ns[f'{cell}, [n, 20]'] / ns[f'{cell}, twin']:.1f} times as fast as [n, 20]")
    print(f"lstm: {ns['lstm, twin'] / ns['limit for the LSTM']:.2f} times the limit's time")
    print(f"lstm: {ns['lstm, twin'] / ns['torch.optim.Adam']:.1f} times torch.optim.Adam's time")


def growth(seconds: float) -> None:
    """All sizes take turns, the small ones with several steps each."""
    rows = {}
    for cell in CELLS:
        runs = {str(n): repeated(twin(cell, Problem(n), **PLAIN)[1], -(-1_000_000 // n)) for n in GROWTH}
        times = measure(runs, 1, seconds / len(CELLS))
        rows[cell] = [times[str(n)] / (n * -(-1_000_000 // n)) for n in GROWTH]
    for n, *values in zip(GROWTH, *rows.values(), strict=True):
        print(f"{n:>12,}" + "".join(f"  {cell} {value:6.1f} ns" for cell, value in zip(CELLS, values, strict=True)))


def repeated(run: Run, times: int) -> Run:
    def step() -> None:
        for _ in range(times):
            run()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinates", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--growth", action="store_true")
    arguments = parser.parse_args()
    with cpu_threads(arguments.threads), torch.no_grad():
        torch.manual_seed(0)
        growth(arguments.seconds) if arguments.growth else table(arguments.coordinates, arguments.seconds)


if __name__ == "__main__":
    main()
