"""A gradient of the ResNets on random images, by batch size and precision: least and median seconds of a few.

python tests/benchmarks/bench_resnet.py --width 16 --threads 2
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

from l2lopt.core.layout import Layout
from l2lopt.optimisee import flat_loss
from optimisees import resnet


def folder(home):
    """A hundred and sixty images of 32×32 in ten classes."""
    for split, count in (("train", 16), ("test", 1)):
        for label in range(10):
            (home / split / str(label)).mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(256, (32, 32, 3), dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(home / split / str(label) / f"{number}.png")
    return str(home)


def seconds(task, device, repeats):
    params, aux = task.init(0)
    layout = Layout.of(params)
    loss, theta, batch = flat_loss(task, layout), layout.ravel(params), task.batch("train", 0, 0)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        flat = theta.detach().requires_grad_()
        torch.autograd.grad(loss(flat, aux, batch)[0], flat)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="*", default=[32, 64, 128])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as home:
        images = folder(Path(home) / "images")
        print("batch  precision  channels   least  median")
        for size in options.batch:
            for autocast in (False, True):
                for last in (False, True):
                    task = resnet(
                        width=options.width,
                        dataset=images,
                        batch_size=size,
                        autocast=autocast,
                        channels_last=last,
                        device=options.device,
                    )
                    times = seconds(task, options.device, options.repeats)
                    kind, place = ("bfloat16" if autocast else "float32"), ("last" if last else "first")
                    least, median = min(times), statistics.median(times)
                    print(f"{size:5}  {kind:9}  {place:8}  {least:6.3f}  {median:6.3f}", flush=True)


if __name__ == "__main__":
    main()
