"""Meta-gradients blockwise and on the tape: seconds and peak memory above the start, each run in a process of its own.

python tests/benchmarks/bench_meta_gradient.py [--coordinates 98304] [--steps 20] [--threads 2] [--growth]
    [--rule direction-and-magnitude]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

import torch

from l2lopt import estimators, kernels, optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.optimisers.rules import RULES


def problem(coordinates, steps, rule="additive", inputs=("log-and-sign",), cell="lstm", dtype=torch.float32):
    """A separable quadratic whose gradient costs next to nothing: what is measured is the optimiser's part.

    Every thousandth coordinate is the same one again, so that the meta-gradient of many is that of few, many times.
    """
    source = torch.Generator().manual_seed(0)
    curvature, centre, start, noise = (torch.randn(1000, generator=source, dtype=dtype) for _ in range(4))
    repeated = torch.arange(coordinates) % 1000
    curvature, centre, start, noise = (part[repeated] for part in (curvature.abs(), centre, start, noise))

    def loss(theta, aux, batch):
        away = theta - centre
        return (0.5 * curvature * away.square() + batch * noise * theta).sum(), aux

    inputs = dict.fromkeys([*inputs, *RULES[rule]().needs])
    optimiser = optimisers.make("coordinatewise", cell=cell, inputs=list(inputs), rule=rule).to(dtype)
    layout = Layout(("all",), ((coordinates,),))
    carry = Carry(start, {}, optimiser.init(layout, like=start))
    batches = [torch.tensor(0.1 * (-1) ** t, dtype=dtype) for t in range(steps + 1)]
    listed = [InnerStep(batches[t], (Target(batches[t + 1], 1.0 / coordinates),)) for t in range(steps)]
    return optimiser, loss, carry, listed


def unroll_of(name):
    record = "bfloat16" if name.endswith("bfloat16") else "full"
    return estimators.make("backprop") if name == "backprop" else estimators.make("blockwise", record=record)


def measured(name, coordinates, steps, repeats, **options):
    """Seconds of each repeat, the peak of memory above the start, the gradient."""
    optimiser, loss, carry, listed = problem(coordinates, steps, **options)
    unroll, update = unroll_of(name), kernels.block_update(optimiser)
    few = problem(2000, 2, **options)
    unroll(kernels.block_update(few[0]), few[1], few[0].phi(), few[2], few[3])  # what a process does once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = unroll(update if name != "backprop" else optimiser.update_with, loss, optimiser.phi(), carry, listed)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    gradient = {key: value.flatten().tolist() for key, value in result.gradient.items()}
    return {"seconds": seconds, "peak": peak * 1024, "total": (peak + before) * 1024, "gradient": gradient}


def child(*arguments):
    """`measured` in a process of its own, so that its peak is its own too."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(arguments)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def difference(one, other):
    """The largest difference over the largest component."""
    pairs = [(a, b) for key in one for a, b in zip(one[key], other[key], strict=True)]
    return max(abs(a - b) for a, b in pairs) / max(abs(b) for _, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinates", type=int, default=98304)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", nargs="+", default=["lstm", "ihc-lstm"])
    parser.add_argument("--rule", choices=RULES, default="additive")
    parser.add_argument("--growth", action="store_true", help="with the coordinates, and with the steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, coordinates, steps, repeats, threads, more = json.loads(options.child)
        torch.set_num_threads(threads)
        print(json.dumps(measured(name, coordinates, steps, repeats, **more)))
        return
    if options.growth:
        print("coordinates  steps  ns per coordinate and step  bytes above the start per coordinate and step")
        sizes = [(10**4, 20), (10**5, 20), (10**6, 20), (10**7, 4), (2 * 10**7, 4)]
        for coordinates, steps in [*sizes, (10**5, 10), (10**5, 100), (10**5, 1000)]:
            found = child(
                "blockwise",
                coordinates,
                steps,
                1 if coordinates * steps > 3 * 10**7 else 3,
                options.threads,
                {"rule": options.rule},
            )
            share = coordinates * steps
            time_each, peak_each = 1e9 * min(found["seconds"]) / share, found["peak"] / share
            print(f"{coordinates:11,}  {steps:5,}  {time_each:26.0f}  {peak_each:45.1f}", flush=True)
        return
    for cell in options.cells:
        more = {"cell": cell, "rule": options.rule}
        names = ("backprop", "blockwise", "blockwise in bfloat16")
        found = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                found[name].append(child(name, options.coordinates, options.steps, 3, options.threads, more))
        error = difference(found["blockwise"][0]["gradient"], found["backprop"][0]["gradient"])
        if error > 1e-5:
            raise SystemExit(f"{cell}: blockwise differs from the tape by {error:.1e} of the largest component")
        print(f"{cell}, {options.coordinates:,} coordinates, {options.steps} steps; they differ by {error:.1e}")
        taped = (
            median(min(one["seconds"]) for one in found["backprop"]),
            max(one["peak"] for one in found["backprop"]),
        )
        for name in names:
            seconds = median(min(one["seconds"]) for one in found[name])
            peak = max(one["peak"] for one in found[name])
            each = 1e9 * seconds / options.coordinates / options.steps
            print(
                f"  {name:22} {seconds:7.3f} s  {each:6.0f} ns  {peak / 1e6:8.1f} MB"
                f"   {seconds / taped[0]:5.2f} of the tape's time, {peak / taped[1]:5.3f} of its memory"
            )


if __name__ == "__main__":
    main()
