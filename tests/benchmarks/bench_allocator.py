"""Inner steps of a large model where the allocator keeps what is freed, and where it gives it back: equality, times.

Steps of ResNet-34 (21 million parameters) on 32 random images. Each round is a process of its own for either way, since
the setting is a process's.

python tests/benchmarks/bench_allocator.py [--rule adam] [--rounds 3] [--steps 4]
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from bench_resnet import folder

from l2lopt import kernels
from l2lopt.core.allocator import keep_freed_memory
from l2lopt.core.types import Carry
from l2lopt.experiments.build import ready_optimiser
from l2lopt.kernels.inner_step import eager_steps
from l2lopt.optimisee import BatchesOfRows, flat_loss, init_rows
from optimisees import resnet

WAYS = ("give back", "keep")


def steps(rule: str, count: int, images: str) -> dict:
    """Seconds and page faults of some steps, and the digest of the parameters after them."""
    torch.set_num_threads(1)
    task = resnet(width=64, batch_size=32, dataset=images)
    layout, params, aux = init_rows(task, [0])
    optimiser = kernels.fuse(ready_optimiser({"weights": rule} if "lstm" in rule else {"name": rule, "lr": 1e-3}))
    carry = Carry(params, aux, optimiser.init(layout, (1,), like=params, total_steps=count))
    advance, batches = eager_steps(flat_loss(task, layout), optimiser), BatchesOfRows(task, "train", [0])
    times, faults = [], []
    for step in range(count):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _, carry = advance(carry, *batches.at(step, 1))
        times.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    digest = hashlib.sha256(carry.params.numpy().tobytes()).hexdigest()
    return {"seconds": times[1:], "faults": faults[1:], "peak": peak, "digest": digest}


def alone(options: argparse.Namespace, way: str, images: str) -> dict:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--rule", options.rule, "--steps", str(options.steps), "--way", way]
    told = subprocess.run([*command, "--images", images], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(told.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="adam")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help="For the processes of the rounds.")
    parser.add_argument("--images", help="Likewise.")
    options = parser.parse_args()
    if options.way:
        assert options.way != "keep" or keep_freed_memory(), "the C library is not glibc"
        print(json.dumps(steps(options.rule, options.steps, options.images)))
        return
    made = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as home:
        images = folder(Path(home) / "images")
        for _ in range(options.rounds):
            for way, runs in made.items():
                runs.append(alone(options, way, images))
    assert len({run["digest"] for runs in made.values() for run in runs}) == 1, "the results differ"
    print(f"{options.rule}, 21 million parameters, 32 images, one thread; results equal to the bit")
    print("way        seconds a step  faults a step  peak, GB")
    seconds = {way: median(time for run in runs for time in run["seconds"]) for way, runs in made.items()}
    for way, runs in made.items():
        faults, peak = median(count for run in runs for count in run["faults"]), max(run["peak"] for run in runs)
        print(f"{way:9}  {seconds[way]:14.2f}  {faults:13.0f}  {peak:8.2f}")
    print(f"ratio: {seconds['keep'] / seconds['give back']:.2f}")


if __name__ == "__main__":
    main()
