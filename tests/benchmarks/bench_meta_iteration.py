"""One meta-iteration of a config as it stands: an unroll of fresh parameters, its meta-gradient, time and peak memory.

python tests/benchmarks/bench_meta_iteration.py configs/resnet34-width16-cifar10-lstm.toml
python tests/benchmarks/bench_meta_iteration.py configs/resnet34-cifar10-lstm.toml --set unroll.length=5
"""

import argparse
import logging
import resource
import time

import torch

from l2lopt.experiments import build
from l2lopt.experiments import config as configs
from l2lopt.parallel.threads import cpu_threads
from l2lopt.training.meta_train import meta_train


class Timed:
    """An unroll that says how long it took."""

    def __init__(self, unroll):
        self.unroll, self.init, self.plan, self.seconds = unroll, unroll.init, unroll.plan, 0.0

    def __call__(self, *args):
        start = time.perf_counter()
        result = self.unroll(*args)
        if result.carry.params.is_cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self.losses = result.losses
        return result


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    experiment = build.build(configs.load(options.config, options.changes))
    config, before = experiment.config, peak()
    timed = Timed(experiment.estimator)
    with cpu_threads(config.threads):
        print(f"{torch.get_num_threads()} threads")
        meta_train(
            experiment.optimiser,
            experiment.optimisees,
            timed,
            config.meta.model_copy(update={"updates": 1}),
            config.unroll,
            score=lambda optimiser: {"any": 0.0},
            seed=config.seed,
            backend=config.backend,
        )
    steps, losses, each = len(timed.losses), timed.losses.tolist(), timed.seconds / len(timed.losses)
    print(
        f"{steps} steps in {timed.seconds:.1f} s, {each:.3f} s each; the loss from {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    print(f"peak memory {peak():.2f} GB, of which {before:.2f} GB for the images and their decoding")
    if torch.cuda.is_available():
        print(f"on the GPU {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
