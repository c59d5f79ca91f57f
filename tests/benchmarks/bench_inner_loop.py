"""Steps a second of small training runs side by side: eager, compiled, and JAX in the same run.

python tests/benchmarks/bench_inner_loop.py [--problems mlp-20 mlp-50-50 …] [--rules adam harness …] [--rows 1 16 64]
    [--seconds 10] [--no-jax]

One thread each. Every variant makes the same steps from the same initial values, 64 for small problems; the losses are
compared first. Times are medians of interleaved rounds, in µs per step of one row; a compilation is not in them. JAX
and Optax come with `uv sync --group jax`. The language model, the transformer and the ResNet need L2LOPT_DATA, have no
form in JAX, and take up to two minutes to compile. Where a step has too many operations to be compiled, a line says so.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

# Before JAX is imported, which reads it then: one thread, as PyTorch's has.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import torch
from bench_step import Run, measure

import optimisees
from l2lopt import kernels, optimisers
from l2lopt.core.types import Carry
from l2lopt.kernels.graph import NotCompiledError
from l2lopt.kernels.inner_step import InnerSteps, compiled_steps, eager_steps
from l2lopt.optimisee import BatchesOfRows, Optimisee, flat_loss, init_rows
from l2lopt.parallel.threads import cpu_threads

STEPS, SEEN = {"gru": 16, "transformer": 16, "resnet": 6}, 4
"""Number of steps, 64 for problems that are not here, and of those whose losses are compared."""
PROBLEMS: dict[str, dict[str, Any]] = {
    "mlp-20": {"name": "mlp", "hidden": [20], "activation": "relu"},
    "mlp-50-50": {"name": "mlp", "hidden": [50, 50], "activation": "relu"},
    "convnet": {"name": "convnet"},
    # Windows of one length, and short: a graph has the steps of a recurrence one by one, and 35 tokens are refused.
    "gru": {"name": "language-model", "cell": "gru", "hidden_size": 64, "embedding_size": 64, "window": 5}
    | {"variable": False, "evaluation_tokens": 100},
    "transformer": {"name": "transformer", "width": 64, "layers": 2, "heads": 2, "window": 64, "batch_size": 16},
    "resnet": {"name": "resnet", "width": 8, "batch_size": 16},
}
RULES: dict[str, Callable[[], optimisers.Optimiser]] = {
    "adam": lambda: optimisers.make("adam", lr=0.001),
    "muon": lambda: optimisers.make("muon", lr=0.01),
    "harness": lambda: optimisers.make("normalised-muon"),
    "coordinatewise": lambda: kernels.fuse(optimisers.make("coordinatewise")),
}


class Runs:
    """The same steps of the same runs in several forms.

    Args:
        task: Problem.
        rule: Optimiser.
        rows: Number of runs.
        steps: Number of steps.
    """

    def __init__(self, task: Optimisee, rule: optimisers.Optimiser, rows: int, steps: int) -> None:
        self.task, self.rule, self.rows, self.steps = task, rule, rows, steps
        seeds = list(range(rows))
        self.layout, self.params, self.aux = init_rows(task, seeds)
        self.loss, self.batches = flat_loss(task, self.layout), BatchesOfRows(task, "train", seeds)

    def carry(self) -> Carry:
        """Before the first step."""
        state = self.rule.init(self.layout, (self.rows,), like=self.params, total_steps=self.steps)
        return Carry(self.params.clone(), dict(self.aux), state)

    def form(self, steps: InnerSteps) -> Callable[[], torch.Tensor]:
        """All steps, to the losses of some of them, [SEEN + 1, rows]."""

        def run() -> torch.Tensor:
            carry, step, losses = self.carry(), 0, []
            for stop in (*range(1, SEEN + 1), self.steps):
                while step < stop:
                    samples, places = self.batches.at(step, stop - step)
                    values, carry = steps(carry, samples, places)
                    step += 1 if places is None else len(places)
                losses.append(values)
            return torch.stack(losses)

        return run

    def jax(self, problem: str, rule: str) -> Callable[[], Any] | None:
        """The same in JAX, where it is written."""
        import jax_inner_loop as there  # of a dependency group of its own

        models = {"mlp-20": there.mlp, "mlp-50-50": there.mlp, "convnet": there.convnet}
        if problem not in models or rule not in ("adam", "harness"):
            return None
        fan_ins = dict(zip(self.layout.names, self.layout.fan_ins, strict=True))
        made = there.adam(0.001) if rule == "adam" else there.harness(fan_ins, self.steps)
        shapes = zip(self.layout.names, self.layout.split(self.params), self.layout.shapes, strict=True)
        params = {name: part.view(self.rows, *shape).numpy() for name, part, shape in shapes}
        indexed = self.task.indexed_batches("train")
        assert indexed is not None  # classifiers of plain samples
        places = torch.stack([indexed.drawn(seed, 0, self.steps) for seed in self.batches.seeds], dim=1)
        samples = [indexed.samples[key].numpy() for key in ("inputs", "targets")]
        return there.loop(models[problem], made, params, samples, places.numpy())


def timed(problem: str, rule: str, rows: int, seconds: float, jax: bool) -> dict[str, float]:
    """µs per step of one row, by form."""
    steps = STEPS.get(problem, 64)
    runs = Runs(optimisees.build(PROBLEMS[problem]), RULES[rule](), rows, steps)
    forms: dict[str, Callable[[], Any]] = {"eager": runs.form(eager_steps(runs.loss, runs.rule))}
    begin = time.perf_counter()
    try:
        forms["compiled"] = runs.form(compiled_steps(runs.loss, runs.rule, runs.carry(), *runs.batches.at(0)))
        print(f"  compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    except NotCompiledError as reason:
        print(f"  not compiled: {reason}", flush=True)
    in_jax = runs.jax(problem, rule) if jax else None
    if in_jax is not None:
        forms["JAX"] = in_jax
    wanted = forms["eager"]()
    for name, form in forms.items():
        # Training is chaotic: Adam makes a step of the rate's size of rounding, which then grows tenfold in four steps.
        torch.testing.assert_close(torch.as_tensor(form())[:SEEN], wanted[:SEEN], rtol=2e-3, atol=1e-3, msg=name)
    measured: dict[str, Run] = dict(forms)
    return {name: value / 1e3 for name, value in measure(measured, steps * rows, seconds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["mlp-20", "mlp-50-50", "convnet"])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["adam", "harness"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--no-jax", dest="jax", action="store_false")
    arguments = parser.parse_args()
    with cpu_threads(1):
        for problem in arguments.problems:
            for rule in arguments.rules:
                for rows in arguments.rows:
                    print(f"{problem}, {rule}, {rows} rows", flush=True)
                    found = timed(problem, rule, rows, arguments.seconds, arguments.jax)
                    for name, value in found.items():
                        print(f"  {name:9} {value:9.1f} µs, {found['eager'] / value:.2f} times as fast as eager")
                    if {"JAX", "compiled"} <= set(found):
                        print(f"  compiled is {found['JAX'] / found['compiled']:.2f} times as fast as JAX")


if __name__ == "__main__":
    main()
