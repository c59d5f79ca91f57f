"""Results of benchmarks to draw from: the numbers are made up, their shapes are those of real runs."""

import math

import torch

from l2lopt.evaluation.benchmark_result import LEAGUES, BenchmarkResult, TaskInfo, TaskRun

FAMILIES = {"digits": 1.0, "convnets": 1.4, "autoencoders": 0.7, "language": 2.5, "quadratics": 1.8}
"""Family → how hard its tasks are."""
SPLITS = ("meta-training", "held-out", "validation", "held-out", "held-out")
OPTIMISERS = {
    "transferable": ("learned", 1.08),
    "transferable-ihc-lstm": ("learned", 0.94),
    "normalised-muon": ("harness", 1.0),
    "momentum": ("baseline", 0.74),
    "adam": ("baseline", 0.86),
    "adamw": ("baseline", 0.97),
    "muon": ("baseline", 1.05),
    "prodigy": ("baseline", 0.8),
    "schedulefree": ("baseline", 0.9),
}
"""Name → kind, and how quickly its losses fall."""


def run_of(
    task, optimiser, league, losses, *, kind="baseline", first=None, rate=1e-3, trials=1, warnings=(), seconds=1e-3
):
    """A run with the same losses, step → a list of seeds, on both splits."""
    rows = {step: torch.tensor(row, dtype=torch.float64) for step, row in losses.items()}
    begin = rows[min(rows)] if first is None else torch.tensor(first, dtype=torch.float64)
    both = {"train": rows, "test": rows}
    return TaskRun(
        task, optimiser, kind, league, dict.fromkeys(both, rate), trials, both, begin, seconds, tuple(warnings)
    )


def realistic(tasks=20, seeds=5, leagues=LEAGUES, optimisers=tuple(OPTIMISERS), splits=SPLITS, diverging=True):
    """Power laws with noise: every optimiser has its speed, every family its difficulty, tuning helps."""
    generator = torch.Generator().manual_seed(3)
    infos, runs = [], []
    for index in range(tasks):
        family = list(FAMILIES)[index % len(FAMILIES)]
        steps = (200, 1000, 500)[index % 3]
        name = f"{family}-{('mlp', 'wide', 'deep', 'relu')[index // 5 % 4]}-{index}"
        infos.append(
            TaskInfo(name, family, splits[index % len(splits)], steps, 1000 + 731 * index, f"{family}, number {index}")
        )
        for optimiser in optimisers:
            kind, speed = OPTIMISERS[optimiser]
            taste = 1 + 0.22 * float(torch.randn((), generator=generator))
            for league in leagues:
                if league == "self-tuned" and kind != "baseline":
                    continue
                effort = {"untuned": 0.8, "self-tuned": 0.92, "tuned": 1.0}[league] if kind == "baseline" else 1.0
                rate = speed * taste * effort
                runs.append(
                    _run(infos[-1], optimiser, kind, league, rate, seeds, FAMILIES[family], diverging, generator)
                )
    seconds = {
        info.name: {name: 1e-4 * (1 + k / 3) * (info.parameters / 1000) ** 0.5 for k, name in enumerate(optimisers)}
        for info in infos
    }
    environment = {
        "processor": "a processor of 2 cores",
        "torch": "2.11.0",
        "l2lopt": "0.1.0",
        "command": "l2lopt benchmark",
    }
    return BenchmarkResult("example", seeds, tuple(infos), tuple(runs), "adamw", seconds, environment)


def _run(info, optimiser, kind, league, speed, seeds, hardness, diverging, generator):
    marks = sorted({0, info.steps, *(round(1.35**k) for k in range(40) if 1.35**k < info.steps)})
    noise = 0.05 * torch.randn(seeds, generator=generator, dtype=torch.float64)
    losses = {"train": {}, "test": {}}
    for step in marks:
        jitter = 0.02 * torch.randn(seeds, generator=generator, dtype=torch.float64)
        fall = 2.3 * hardness * (1 + step / 8) ** (-0.55 * max(speed, 0.05) / hardness)
        losses["train"][step] = fall * (1 + noise + jitter)
        losses["test"][step] = (fall + 0.12 * hardness) * (1 + noise + jitter)
    if diverging and league == "untuned" and optimiser == "momentum" and info.family == "quadratics":
        for steps in losses.values():
            for step, row in steps.items():
                row[0] = math.nan if step > 20 else row[0]
    trials = {"untuned": 1, "self-tuned": 9, "tuned": 9}[league]
    warnings = ("the best rate, 0.1, is the upper end of its grid",) if speed < 0.5 and trials > 1 else ()
    rates = {"train": 1e-3, "test": 3e-4 if league == "tuned" else 1e-3}
    return TaskRun(
        info.name, optimiser, kind, league, rates, trials, losses, losses["train"][0].clone(), 2e-3, warnings
    )
