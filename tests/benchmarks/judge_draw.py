"""How good trained DRAWs are: bounds on held-out images, and what a classifier says of their samples.

python tests/benchmarks/judge_draw.py RUN... [--images 1000] [--draws 50] [--samples 1000] [--classifier-steps 1500]

The bound and the importance-weighted estimate (of `--draws` passes) are those of test images, nats per image, the mean
over runs of one kind (decoder, latents, steps) and its standard deviation between them. The classifier is a small
ConvNet trained on the runs' own training images; it must be at least 97 % right on their test images. Of the samples it
is told how sure it is of its first choice, on average, and how many there are of the rarest class.

A sample of digits was never begun where its border is grey, 0.2 and more over the outer two pixels: digits have a black
one. The next column has the share of them where z is drawn with the means and deviations that the encoder gives z over
1,000 test images, step by step, in place of the prior's 0 and 1; the last the largest of these means, without its sign.
"""

import argparse
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import l2lopt
from l2lopt.core.layout import Params
from l2lopt.experiments.config import TrainConfig, load
from l2lopt.training import train as training
from l2lopt.training.train import Trained, TrainSettings
from optimisees import Draw, ModuleOptimisee, convnet

RIGHT = 0.97


def estimate(model: Draw, params: Params, images: int, draws: int) -> float:
    """The importance-weighted estimate, 100 test images at a time."""
    total, seen = 0.0, 0
    for batch, _ in model.evaluation_batches("test", 0):
        inputs = batch["inputs"][: images - seen]
        for index, part in enumerate(inputs.split(100)):
            total += float(model.importance_weighted(params, part, draws, seed=seen + index).sum())
        seen += len(inputs)
        if seen >= images:
            break
    return total / seen


def grey_borders(images: Tensor) -> float:
    """The share of images [n, C, B, A] in [0, 1] whose outer two pixels are 0.2 and more on average."""
    border = torch.ones(images.shape[-2:], dtype=torch.bool)
    border[2:-2, 2:-2] = False
    return float((images[..., border].flatten(1).mean(1) > 0.2).float().mean())


def encoded(model: Draw, params: Params, images: int) -> Tensor:
    """z [T, n, Z] of the first test images, one draw each, as the decoder gets it."""
    codes: list[Tensor] = []
    hook = model.network.decoder.register_forward_pre_hook(
        lambda _, inputs: codes.append(inputs[0].T[:, : model.latent_size])
    )
    model.reconstruct(params, model.data.test_inputs[:images])
    hook.remove()
    return torch.stack(codes)


def classifier(dataset: str, steps: int) -> tuple[ModuleOptimisee, Trained]:
    """A ConvNet on the same images, and its share of right answers on the test images."""
    task = convnet((16, 32), 64, dataset=dataset)
    settings = TrainSettings(steps=steps, evaluate_every=steps, schedule="cosine")
    return task, training.train(task, partial(torch.optim.Adam, lr=3e-3), settings)


def told(task: ModuleOptimisee, result: Trained, samples: Tensor) -> tuple[float, Tensor]:
    """How sure it is of its first choices, and how many samples there are of each class."""
    model = task.factory().eval()
    with torch.no_grad():
        pieces = (255 * part for part in samples.split(200))
        outputs = torch.cat([functional_call(model, (result.params, result.aux), (piece,)) for piece in pieces])
    sure, chosen = outputs.softmax(1).max(1)
    return float(sure.mean()), chosen.bincount(minlength=outputs.shape[1])


def spread(values: list[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--classifier-steps", type=int, default=1500)
    options = parser.parse_args()
    judged: dict[str, Any] = {}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in options.runs:
        config, (model, params, _) = load(run / "config.toml", kind=TrainConfig), l2lopt.load_trained(run)
        choice = config.optimisee
        if choice["dataset"] not in judged:
            judged[choice["dataset"]] = classifier(choice["dataset"], options.classifier_steps)
            right = judged[choice["dataset"]][1].metrics["accuracy"]
            print(f"classifier of {choice['dataset']}: {right:.2%} right", "" if right >= RIGHT else "(too few)")
        parts = [model.sample_images(params, min(100, options.samples - k), k) for k in range(0, options.samples, 100)]
        samples = torch.cat([part.images[-1] for part in parts])
        sure, counts = told(*judged[choice["dataset"]], samples)
        code = encoded(model, params, 1000)
        noise = torch.randn(len(code), len(samples), model.latent_size, generator=torch.Generator().manual_seed(0))
        moved = model.painted_with(params, code.mean(1, keepdim=True) + code.std(1, keepdim=True) * noise)
        figures = {
            "bound": json.loads((run / "result.json").read_text(encoding="utf-8"))["metrics"]["bound"],
            "estimate": estimate(model, params, options.images, options.draws),
            "sure": sure,
            "rarest": float(counts.min()),
            "never begun": grey_borders(samples),
            "never begun, of the encoder's z": grey_borders(moved.canvases[-1].sigmoid()),
            "largest mean of z": float(code.mean(1).abs().max()),
        }
        print(
            f"{run}:", ", ".join(f"{name} {value:.3f}" for name, value in figures.items()), counts.tolist(), flush=True
        )
        beside = ", a 1 beside z" * choice.get("constant", False)
        kind = f"{choice.get('decoder', 'lstm')}{beside} | {model.latent_size} | {config.train.steps:,}"
        for name, value in figures.items():
            found[kind][name].append(value)
    names = "bound | importance-weighted | surest class | rarest class | never begun | of the encoder's z | mean of z"
    print(f"\n| decoder | latents | steps | runs | {names} |")
    print("|---" * 11 + "|")
    for kind, own in found.items():
        print(f"| {kind} | {len(own['bound'])} | {' | '.join(map(spread, own.values()))} |")


if __name__ == "__main__":
    main()
