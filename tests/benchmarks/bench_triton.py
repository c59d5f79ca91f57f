"""The learned step and its way back on a GPU: ms, bytes moved over time, and eager PyTorch beside; equality first.

python tests/benchmarks/bench_triton.py [--coordinates 21282122] [--steps 20] [--width 64] [--warps 8] [--programs 2]
    [--precision tf32x3]

The step with its state in float32 and bfloat16; the way back through `--steps` steps, per step; `nn.LSTMCell` on
[n, 20] (of an IHC-LSTM the plain rule) in parts. Medians of interleaved rounds, by the GPU's own clock. Without a GPU
it runs in Triton's interpreter (TRITON_INTERPRET=1), where only the checks mean anything: give it few coordinates.

A whole meta-iteration: python tests/benchmarks/bench_meta_iteration.py configs/resnet34-cifar10-lstm.toml
    --set device='"cuda"' --set unroll.length=100
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from l2lopt import kernels, optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.estimators.exchange import Recorder
from l2lopt.estimators.replay import autograd_replay
from l2lopt.estimators.window import Meeting, Window
from l2lopt.kernels.triton import replay, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PART = 2**21
"""Coordinates that the eager cell is given at once, at most."""


def milliseconds(work: Callable[[], object]) -> float:
    """One call's time on the GPU."""
    if DEVICE == "cpu":
        begun = time.perf_counter()
        work()
        return (time.perf_counter() - begun) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def layout_of(coordinates: int) -> Layout:
    """A hundred matrices."""
    sizes = [coordinates // 100] * 99
    return Layout(tuple(map(str, range(100))), tuple((size,) for size in [*sizes, coordinates - sum(sizes)]))


def state_of(optimiser: optimisers.Optimiser, layout: Layout, like: Tensor, dtype: torch.dtype) -> OptimiserState:
    """A first state in memory of its own."""
    state = optimiser.init(layout, like=like)
    return state._replace(coordinates={key: value.to(dtype).contiguous() for key, value in state.coordinates.items()})


def check(optimiser: optimisers.Coordinatewise) -> None:
    """A step and the way back equal the reference's on 100,003 coordinates."""
    layout = layout_of(100_003 if DEVICE == "cuda" else 1_003)
    grads, params = torch.randn(3, layout.size, device=DEVICE), torch.randn(layout.size, device=DEVICE)
    state, fast = optimiser.init(layout, like=params), kernels.fuse(optimiser, "triton")
    with torch.no_grad():
        wanted, _ = optimiser.update(grads[0], state, params)
        found, _ = fast.update(grads[0], state, params)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max(), "the step"
    losses, recorder = torch.zeros(3, device=DEVICE), Recorder(layout.exchange)
    meetings = [recorder.begin()] * 3
    with torch.no_grad():
        optimiser.update(grads[0], state._replace(layout=layout.meeting(recorder)), params)
    window = Window(state, params, grads, torch.randn_like(grads), losses, meetings)
    whole = window._replace(state=state._replace(layout=layout.slice(0, layout.size)))
    wanted = autograd_replay(optimiser.update_with)(optimiser.phi(), whole, {}).phi
    found = replay.replay(optimiser, optimiser.phi(), window).phi
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 1e-3 * value.norm() + 1e-12, name


def eager_step(cell: str, optimiser: optimisers.Coordinatewise, coordinates: int) -> Callable[[], object]:
    """`nn.LSTMCell` on [n, 20] in parts, forward; of an IHC-LSTM the reference's update in parts."""
    part = min(PART, coordinates)
    if cell == "lstm":
        made = nn.LSTMCell(20, 20).to(DEVICE)
        x = torch.randn(part, 20, device=DEVICE)
        state = torch.zeros(part, 20, device=DEVICE), torch.zeros(part, 20, device=DEVICE)
        return lambda: [made(x, state) for _ in range(max(coordinates // part, 1))]
    layout = layout_of(part)
    grads, params = torch.randn(2, part, device=DEVICE)
    state = state_of(optimiser, layout, params, torch.float32)
    return lambda: [optimiser.update(grads, state, params) for _ in range(max(coordinates // part, 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinates", type=int, default=21_282_122)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=step.WIDTH)
    parser.add_argument("--warps", type=int, default=step.WARPS)
    parser.add_argument("--programs", type=int, default=step.PROGRAMS)
    parser.add_argument("--precision", default=step.PRECISION)
    options = parser.parse_args()
    step.WIDTH = replay.WIDTH = options.width
    step.PRECISION = replay.PRECISION = options.precision
    step.PROGRAMS = options.programs
    step.LAUNCH["num_warps"] = options.warps
    torch.manual_seed(0)
    n, T = options.coordinates, options.steps
    layout = layout_of(n)
    grads, params = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter"
    print(f"{name}, {n:,} coordinates")
    for cell in ("lstm", "ihc-lstm"):
        for rule, inputs in (("gated", ["log-and-sign"]), ("direction-and-magnitude", None)):
            more = {} if inputs is None else {"inputs": inputs}
            optimiser = optimisers.coordinatewise(cell=cell, rule=rule, **more).to(DEVICE)
            check(optimiser)
            rows: dict[str, tuple[Callable[[], object], float]] = {}
            for dtype in (torch.float32, torch.bfloat16):
                fast, state = kernels.fuse(optimiser, "triton"), state_of(optimiser, layout, params, dtype)
                numbers = sum(value.numel() // n for value in state.coordinates.values())
                moved = n * (2 * numbers * dtype.itemsize + 12)
                rows[f"step, state {dtype}"] = (
                    lambda fast=fast, state=state: fast.update_(grads, state, params),
                    moved,
                )
            state = state_of(optimiser, layout, params, torch.float32)
            meeting = Meeting({"tensors.direction": torch.ones(100, device=DEVICE)}, {}, {})
            window = Window(
                state,
                params,
                grads.expand(T, n).contiguous(),
                grads.expand(T, n).contiguous(),
                torch.zeros(T, device=DEVICE),
                [meeting] * T,
            )
            rows["way back, a step"] = partial(replay.replay, optimiser, optimiser.phi(), window), 8 * n * T
            with torch.no_grad():
                rows["eager step"] = (eager_step(cell, optimiser, n), 0)
                times: dict[str, list[float]] = {name: [] for name in rows}
                for turn in range(options.rounds + 2):
                    for name, (work, _) in rows.items():
                        taken = milliseconds(work)
                        if turn >= 2:
                            times[name].append(taken)
            for name, (_, moved) in rows.items():
                each = median(times[name]) / (T if "back" in name else 1)
                rate = f", {moved / (T if 'back' in name else 1) / each / 1e9:.2f} TB/s" if moved else ""
                print(f"{cell}, {rule}, {name}: {each:.3f} ms{rate}", flush=True)
            del rows, window, state
    if DEVICE == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
