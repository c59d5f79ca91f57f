"""Seconds of one run of each task of the catalogue, side by side, and with a class of torch.optim.

python tests/benchmarks/bench_tasks.py [TASK …] [--rows 16] [--share 0.1] [--budget medium]

TASK is a name, "family:NAME" or "split:NAME"; all by default. One thread. Each task makes a share of the steps of its
budget with our AdamW, all rows in one vectorised pass, and with torch.optim.AdamW one run by itself; the losses are
read at as many steps as in a benchmark of the whole budget, and their time is measured apart. What is printed is the
time of a whole run for one seed: steps and evaluations. A task whose data are not there is left out.
"""

import argparse
import platform
import time
from pathlib import Path

import torch

import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.evaluation.free_runs import record_steps, run_free
from l2lopt.evaluation.suites import Task, load_catalogue, selected
from l2lopt.optimisee import Optimisee, evaluate_rows, init_rows

CATALOGUE = Path(__file__).parents[2] / "configs" / "suites" / "tasks.toml"


def reading_seconds(task: Optimisee, rows: int) -> float:
    """Time of one reading of the losses on both splits, for one of the rows."""
    layout, params, aux = init_rows(task, range(rows))
    for split in ("train", "test"):  # what is read for the first time
        next(iter(task.evaluation_batches(split, 0)))
    start = time.perf_counter()
    for split in ("train", "test"):
        evaluate_rows(task, layout, split, range(rows), params, aux)
    return (time.perf_counter() - start) / rows


def seconds(task: Task, rows: int, share: float, budget: str) -> tuple[str, list[float]]:
    """Facts of a task, and its times in seconds: building it, a run among others, a run by itself."""
    start = time.perf_counter()
    made = optimisees.build(task.optimisee)
    building = time.perf_counter() - start
    steps = getattr(task, budget)
    some, marks = max(3, round(share * steps)), len(record_steps(steps, [steps]))
    side = run_free(optimisers.make("adamw", lr=1e-3), made, range(rows), [0, some], ("train",)).seconds
    few = max(3, some // 4)
    alone = run_free(
        lambda named: torch.optim.AdamW([value for _, value in named], lr=1e-3), made, [0], [0, few], ("train",)
    ).seconds
    times = [side * steps + marks * reading_seconds(made, rows), alone * steps + marks * reading_seconds(made, 1)]
    layout = Layout.of(made.init(0)[0])
    return f"{layout.size:,} parameters, {steps} steps", [building, *times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--budget", default="medium", choices=["short", "medium", "long"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    catalogue = load_catalogue(CATALOGUE)
    tasks = selected(arguments.tasks, catalogue) if arguments.tasks else catalogue.tasks
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {arguments.rows} rows")
    print("| task | split | size | build, s | run among rows, s | run by itself, s |\n|---|---|---|--:|--:|--:|")
    for name, task in tasks.items():
        try:
            size, times = seconds(task, arguments.rows, arguments.share, arguments.budget)
        except UserError as error:
            print(f"| {name} | left out: {error} |")
            continue
        cells = " | ".join(f"{value:.2f}" for value in times)
        print(f"| {name} | {catalogue.families[task.family]} | {size} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
