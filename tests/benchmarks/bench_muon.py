"""A step of the harness, of the hierarchical rule on it, and of torch's Muon with AdamW on the rest.

Of a GPT of 10M parameters, and of 1,000 small matrices.

python tests/benchmarks/bench_muon.py [--width 320] [--layers 8] [--tensors 1000] [--threads 2] [--seconds 60]

Equality with the plain rule is checked first; times are medians of interleaved rounds. Both multiply in the precision
that they choose by themselves: torch's Muon in bfloat16, the harness on a CPU too where the processor has instructions
for it and the matrices are large.
"""

import argparse
from functools import partial

import torch
from bench_optimizer import bytes_each
from bench_step import Run, measure
from torch import nn

from l2lopt import LearnedOptimizer, optimisers
from l2lopt.core.kinds import roles
from l2lopt.core.layout import Layout
from l2lopt.parallel.threads import cpu_threads

Shapes = dict[str, tuple[int, ...]]


def gpt(width: int, layers: int, vocabulary: int = 96, window: int = 64) -> Shapes:
    """The parameters of a GPT, without the model."""
    shapes: Shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (window, width)}
    for layer in range(layers):
        for name, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"blocks.{layer}.{name}.weight"] = (rows * width, columns * width)
            shapes[f"blocks.{layer}.{name}.bias"] = (rows * width,)
        for name in ("first", "second"):
            shapes |= {f"blocks.{layer}.{name}.weight": (width,), f"blocks.{layer}.{name}.bias": (width,)}
    return shapes | {"lm_head.weight": (vocabulary, width)}


def params(shapes: Shapes) -> dict[str, nn.Parameter]:
    """Parameters with gradients."""
    draw = torch.Generator().manual_seed(0)
    made = {name: nn.Parameter(0.02 * torch.randn(shape, generator=draw)) for name, shape in shapes.items()}
    for param in made.values():
        param.grad = torch.randn(param.shape, generator=draw)
    return made


def check(shapes: Shapes) -> None:
    """Three steps of the class give what the plain rule gives by hand."""
    rule, ours = optimisers.make("normalised-muon"), params(shapes)
    optimizer, layout = LearnedOptimizer(list(ours.items()), rule, steps=10), Layout.of(ours)
    theta, grads = (layout.ravel(given).clone() for given in (ours, {name: p.grad for name, p in ours.items()}))
    state = rule.init(layout, like=theta, total_steps=10)
    for _ in range(3):
        update, state = rule.update(grads, state, theta)
        theta = theta + update
        optimizer.step()
    assert (layout.ravel(ours) - theta).abs().max() <= 1e-5 * theta.abs().max()


def torchs(shapes: Shapes) -> Run:
    """The step of torch's Muon on the matrices and of its AdamW on all else."""
    ours, kinds = params(shapes), roles(list(shapes), list(shapes.values()))
    pairs = list(zip(ours.values(), kinds, strict=True))
    muon = torch.optim.Muon([param for param, role in pairs if role.kind == "matrix"])
    rest = [param for param, role in pairs if role.kind != "matrix"]
    adamw = torch.optim.AdamW(rest, foreach=True) if rest else None

    def step() -> None:
        muon.step()
        if adamw is not None:
            adamw.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=1_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    problems: dict[str, Shapes] = {
        "GPT": gpt(arguments.width, arguments.layers),
        "small matrices": {f"layers.{index}.weight": (32, 32) for index in range(arguments.tensors)},
    }
    with cpu_threads(arguments.threads), torch.no_grad():
        check(gpt(16, 2))
        for label, shapes in problems.items():
            given = params(shapes)
            optimizer = LearnedOptimizer(list(given.items()), "normalised-muon", steps=1000)
            steered = LearnedOptimizer(list(params(shapes).items()), optimisers.make("hierarchical"), steps=1000)
            runs: dict[str, Run] = {
                "the harness": optimizer.step,
                "the hierarchical rule": partial(steered.step, loss=1.0),
                "torch.optim.Muon and AdamW": torchs(shapes),
            }
            count = sum(param.numel() for param in given.values())
            ns = measure(runs, count, arguments.seconds)
            for name, value in ns.items():
                print(f"{label}, {count:,} parameters: {name:28} {value:8.1f} ns {value * count / 1e6:8.1f} ms")
            ours, learned, theirs = ns.values()
            kept = f"{bytes_each(optimizer):.1f} and {bytes_each(steered):.1f} bytes a parameter kept"
            print(
                f"{label}: {ours / theirs:.2f} of torch's time, the rule {learned / ours:.2f} of the harness's; {kept}"
            )


if __name__ == "__main__":
    main()
