"""Seconds of one run of each task of the catalogue, side by side, and with a class of torch.optim.

python tests/benchmarks/bench_tasks.py [TASK …] [--rows 16] [--share 0.1] [--budget medium]

TASK is a name, "family:NAME" or "split:NAME"; all by default. One thread. Each task makes a share of the steps of its
budget with our AdamW, all rows in one vectorised pass, and with torch.optim.AdamW one run by itself; the losses are
read at as many steps as in a benchmark of the whole budget, and their time is measured apart. What is printed is the
processor time of a whole run for one seed: steps and evaluations. A task whose data are not there is left out.
"""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.evaluation.contestants import Runner
from l2lopt.evaluation.free_runs import record_steps, run_free
from l2lopt.evaluation.settings import SPLITS
from l2lopt.evaluation.suites import Task, load_catalogue, selected
from l2lopt.evaluation.torch_classes import NamedTensors
from l2lopt.optimisee import Optimisee, evaluate_rows, init_rows

CATALOGUE = Path(__file__).parents[2] / "configs" / "suites" / "tasks.toml"


def spent(call: Callable[[], object]) -> float:
    """Processor time of a call: what others do on the machine does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def step_seconds(optimiser: Runner, task: Optimisee, rows: int, steps: int) -> float:
    """Time of a step of one run, its batch drawn: what more steps cost beyond a few."""

    def run(count: int) -> float:
        return spent(lambda: run_free(optimiser, task, range(rows), [count], ()))

    run(2)  # whatever is made once
    return max(0.0, run(2 + steps) - run(2)) / (steps * rows)


def reading_seconds(task: Optimisee, rows: int) -> float:
    """Time of one reading of the losses on both splits, for one of the rows."""
    layout, params, aux = init_rows(task, range(rows))
    for split in SPLITS:  # what is read for the first time
        next(iter(task.evaluation_batches(split, 0)))
    return spent(lambda: [evaluate_rows(task, layout, split, range(rows), params, aux) for split in SPLITS]) / rows


def adamw(named: NamedTensors) -> torch.optim.Optimizer:
    """PyTorch's."""
    return torch.optim.AdamW([value for _, value in named], lr=1e-3)


def seconds(task: Task, rows: int, share: float, budget: str) -> tuple[str, list[float]]:
    """Facts of a task, and its times in seconds: building it, a run among others, a run by itself."""
    made: list[Optimisee] = []
    building = spent(lambda: made.append(optimisees.build(task.optimisee)))
    problem, steps = made[0], getattr(task, budget)
    some, marks = max(10, round(share * steps)), len(record_steps(steps, [steps]))
    times = [building]
    for runner, count in ((optimisers.make("adamw", lr=1e-3), rows), (adamw, 1)):
        stepping = step_seconds(runner, problem, count, some)
        times.append(steps * stepping + marks * reading_seconds(problem, count))
    layout = Layout.of(problem.init(0)[0])
    return f"{layout.size:,} parameters, {steps} steps", times


def processor() -> str:
    """The processor's name, where the system tells it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


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
    print(f"{processor()}, torch {torch.__version__}, {arguments.rows} rows\n")
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
