"""The joint pass of a coupled GRU over all pairs of a validation set: time and peak memory, beside the siamese form.

python tests/benchmarks/bench_all_pairs.py [--threads 2] [--windows 990] [--hidden 100] [--size 512]

A sample of the distances is checked against passes of one pair; a difference ends the benchmark.
"""

import argparse
import resource
import time

import torch

from l2lopt.parallel.threads import cpu_threads
from optimisees import SequenceMetric
from optimisees.data.har import CHANNELS, STEPS, Windows


def model_of(encoder: str, windows: int, hidden: int) -> SequenceMetric:
    """On windows of noise, so many of which are test windows."""
    count = windows + 60
    signals = torch.randn(count, len(CHANNELS), STEPS, generator=torch.Generator().manual_seed(0))
    subjects = torch.where(torch.arange(count) < windows, 1, 2)
    data = Windows(signals, torch.arange(count) % 6, subjects, tuple("abcdef"))
    return SequenceMetric([1], encoder=encoder, hidden_size=hidden, data=data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=990)
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--size", type=int, default=512)
    options = parser.parse_args()
    print("| encoder | pairs | seconds | peak memory of the process |\n|---|---|---|---|")
    for encoder in ("siamese", "coupled"):
        model = model_of(encoder, options.windows, options.hidden)
        params, inputs = model.init(0)[0], model.inputs("test")
        with cpu_threads(options.threads):
            start = time.perf_counter()
            found = model.all_distances(params, inputs, size=options.size)
            seconds = time.perf_counter() - start
        pairs = torch.randint(options.windows, (20, 2), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            alone = torch.cat([model.between(params, inputs[i : i + 1], inputs[j : j + 1]) for i, j in pairs.tolist()])
        torch.testing.assert_close(found[pairs[:, 0], pairs[:, 1]], alone, rtol=1e-3, atol=1e-4)
        count = options.windows * (options.windows - 1) // 2
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"| {encoder} | {count:,} | {seconds:.1f} | {memory:.2f} GB |", flush=True)


if __name__ == "__main__":
    main()
