"""A step of `LearnedOptimizer` beside torch's Adam: ns and bytes per parameter, and what many small tensors cost.

python tests/benchmarks/bench_optimizer.py [--parameters 1000000] [--tensors 1000] [--threads 2]

Equality with the rule run by hand is checked first; times are medians of interleaved rounds.
"""

import argparse
from typing import Any

import torch
from bench_step import Run, measure
from torch import nn

from l2lopt import LearnedOptimizer, optimisers
from l2lopt.core.layout import Layout
from l2lopt.parallel.threads import cpu_threads

RULES: dict[str, dict[str, Any]] = {
    "the library's recipe": {},
    "log-and-sign, additive": {"inputs": ["log-and-sign"], "rule": "additive"},
}


def params(count: int, size: int) -> list[nn.Parameter]:
    """`count` tensors of `size`, with gradients; the same numbers however they are cut."""
    numbers = torch.randn(2, count * size, generator=torch.Generator().manual_seed(0))
    made = [nn.Parameter(part.clone()) for part in numbers[0].split(size)]
    for param, grad in zip(made, numbers[1].split(size), strict=True):
        param.grad = grad.clone()
    return made


def check(**options: Any) -> None:
    """Three steps of the class from 0 give what the plain rule gives by hand, for one tensor and for many."""
    for count, size in ((1, 10_007), (100, 97)):
        rule, ours = optimisers.coordinatewise(**options), params(count, size)
        torch._foreach_zero_(ours)
        optimizer = LearnedOptimizer(ours, rule)
        names = {str(index): param for index, param in enumerate(ours)}
        layout = Layout.of(names)
        theta = torch.zeros(layout.size)
        grads, state = torch.cat([param.grad for param in ours]), rule.init(layout)
        for _ in range(3):
            update, state = rule.update(grads, state, theta)
            theta = theta + update
            optimizer.step()
        assert (layout.ravel(names) - theta).abs().max() <= 4e-6 * theta.abs().max(), options


def bytes_each(optimizer: torch.optim.Optimizer) -> float:
    """What is kept between steps, per parameter."""
    values = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, torch.Tensor)]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    return sum(storages.values()) / sum(param.numel() for group in optimizer.param_groups for param in group["params"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=1_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    shapes = {"one": (1, arguments.parameters), "many": (arguments.tensors, arguments.parameters // arguments.tensors)}
    with cpu_threads(arguments.threads), torch.no_grad():
        optimizers: dict[str, torch.optim.Optimizer] = {}
        for label, options in RULES.items():
            check(**options)
            rule = optimisers.coordinatewise(**options)
            for shape, sizes in shapes.items():
                optimizers[f"{label}, {shape}"] = LearnedOptimizer(params(*sizes), rule)
        recipe = optimisers.coordinatewise()
        optimizers["with a fallback, one"] = LearnedOptimizer(params(*shapes["one"]), recipe, fallback="adam")
        optimizers["state in bfloat16, one"] = LearnedOptimizer(params(*shapes["one"]), recipe, state_dtype="bfloat16")
        for shape, sizes in shapes.items():
            optimizers[f"our Adam, {shape}"] = LearnedOptimizer(params(*sizes), optimisers.adam(1e-3))
            optimizers[f"torch.optim.Adam, {shape}"] = torch.optim.Adam(params(*sizes), foreach=True)
        runs: dict[str, Run] = {label: optimizer.step for label, optimizer in optimizers.items()}
        ns = measure(runs, arguments.parameters, arguments.seconds)
        for label, value in ns.items():
            print(f"{label:36} {value:8.1f} ns {bytes_each(optimizers[label]):8.1f} bytes")
        for label in [*RULES, "our Adam", "torch.optim.Adam"]:
            print(f"{label}: many tensors cost {ns[f'{label}, many'] / ns[f'{label}, one']:.2f} times one")


if __name__ == "__main__":
    main()
