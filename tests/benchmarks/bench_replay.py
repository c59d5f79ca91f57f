"""The replay by hand against autograd, in ns per coordinate and step: medians of runs taken in turn.

OMP_NUM_THREADS=1 PYTHONPATH=.:tests python tests/benchmarks/bench_replay.py
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import perf_counter

import torch
from implementations import FOLDED, RULES
from oracles import replayed
from torch import nn

from l2lopt import cells, optimisers
from l2lopt.core.layout import Layout
from l2lopt.estimators.window import Meeting, Window
from l2lopt.kernels.cpu import replay as by_hand
from l2lopt.kernels.cpu.workspace import Workspace
from l2lopt.optimisers import INPUTS


def replay(optimiser, phi, window, space):
    """The window's part of the meta-gradient."""
    return by_hand.replay(optimiser, phi, window, {}, space).phi


def whole_window(optimiser, coordinates, length):
    """A window of all coordinates, one tensor, from the start."""
    torch.manual_seed(0)
    params, grads = torch.randn(coordinates), 0.1 * torch.randn(length, coordinates)
    state = optimiser.init(Layout(("all",), ((coordinates,),)), like=params)
    meetings = [Meeting({"tensors.direction": torch.ones(1)}, {}, {})] * length
    return Window(state, params, grads, torch.randn(length, coordinates), torch.ones(length), meetings)


def blocks(window, size):
    """The window cut into blocks."""
    for low in range(0, len(window.params), size):
        part = {name: value[..., low : low + size] for name, value in window.state.coordinates.items()}
        params = window.params[low : low + size]
        state = window.state._replace(layout=window.state.layout.slice(low, low + len(params)), coordinates=part)
        grads, sources = (x[:, low : low + size].contiguous() for x in (window.grads, window.sources))
        yield window._replace(state=state, params=params, grads=grads, sources=sources)


def summed(gradients):
    gradients = list(gradients)
    return {name: sum(gradient[name] for gradient in gradients) for name in gradients[0]}


def lstm_cell(features, hidden_size, window):
    """Autograd through nn.LSTMCell on [n, features], log-and-sign and the additive rule: what one writes first."""
    embedding, cell = nn.Linear(2, hidden_size), nn.LSTMCell(hidden_size, hidden_size)
    head, log_and_sign = nn.Linear(hidden_size, 1), INPUTS["log-and-sign"]()
    step_inputs = optimisers.inputs.StepInputs(
        window.grads, window.params, torch.ones(()), None, window.state.layout, torch.ones(1)
    )
    rows = log_and_sign(step_inputs, {})[0].movedim(0, -1).contiguous()
    theta, state, total = window.params, None, 0
    for x, q in zip(rows, window.sources, strict=True):
        state = cell(embedding(x), state)
        theta = theta + 0.1 * head(state[0])[:, 0]
        total = total + (q * theta).sum()
    total.backward()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinates", type=int, default=98_304)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--cell", choices=FOLDED, default="lstm")
    parser.add_argument("--rule", choices=RULES, default="additive")
    parser.add_argument("--inputs", choices=INPUTS, nargs="+", default=["log-and-sign"])
    parser.add_argument("--hidden", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="Python threads, a block each")
    parser.add_argument("--tensors", action="store_true", help="also autograd through nn.LSTMCell on all coordinates")
    options = parser.parse_args()

    choice = FOLDED[options.cell] if not isinstance(FOLDED[options.cell], str) else {"name": FOLDED[options.cell]}
    rule, size = RULES[options.rule](), options.hidden
    inputs = {name: INPUTS[name]() for name in dict.fromkeys([*options.inputs, *rule.needs])}
    torch.manual_seed(0)
    network = cells.make(**choice, input_size=size, hidden_size=size)
    optimiser = optimisers.Coordinatewise(inputs, network, rule)
    phi, space = optimiser.phi(), Workspace()
    window = whole_window(optimiser, options.coordinates, options.steps)

    first = next(blocks(window, min(options.blocks)))
    wanted, actual = replayed(optimiser, phi, first), replay(optimiser, phi, first, space)
    for name, value in wanted.items():
        error = (actual[name] - value).abs().max().item() / max(value.abs().max().item(), 1e-30)
        assert error < 1e-4, (name, error)
    print(f"{options.cell}, {options.rule}, {', '.join(inputs)}; {options.workers} × {torch.get_num_threads()} threads")

    def timed(function):
        start = perf_counter()
        function()
        return 1e9 * (perf_counter() - start) / options.coordinates / options.steps

    ways = {}
    for block in options.blocks:
        parts = list(blocks(window, block))
        for way, function in (("by hand", partial(replay, space=space)), ("autograd", replayed)):
            one = partial(function, optimiser, phi)
            ways[f"{way}, blocks of {block}"] = lambda one=one, parts=parts: summed(pool.map(one, parts))
    if options.tensors:
        ways["autograd through nn.LSTMCell"] = lambda: lstm_cell(2, size, window)
    times = {name: [] for name in ways}
    with ThreadPoolExecutor(options.workers) as pool:
        for _ in range(options.repeats):
            for name, way in ways.items():
                times[name].append(timed(way))
    for name, values in times.items():
        print(f"{name:32} {median(values):8.0f} ns per coordinate and step")


if __name__ == "__main__":
    main()
