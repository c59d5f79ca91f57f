"""Compiles the Triton kernels as they are launched, for an H100 or H200, and prints what each takes of it.

python tests/benchmarks/compiled_triton.py [--precision tf32x3] [--width 64] [--warps 8] [--rule gated]

No GPU is needed: Triton is told that there is one, so that it takes the arguments of a launch, compiles for them and
stops there. Its interpreter, in which the tests run, has another way to the kernels.
"""

import argparse
import re
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from l2lopt import optimisers
from l2lopt.core.layout import Layout
from l2lopt.estimators.window import Meeting, Window
from l2lopt.kernels import triton
from l2lopt.kernels.triton import device, device_replay, replay, step

INPUTS = {"direction-and-magnitude": ("log-and-sign", "rnnprop", "log-step"), "bounded": ("momenta", "parameter")}
RULES = ("gated", "additive", *INPUTS)
COORDINATES, STEPS = 12_305, 100
TOOLS = Path(find_spec("triton").origin).parent / "backends/nvidia/bin"


class NoGPU:
    """What Triton asks of a driver before it launches: an H200, with tensors in the CPU's memory."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def usage(made):
    """Registers, bytes of stack and of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
    return *(int(re.search(rf"{word}:(\d+)", report.stdout)[1]) for word in ("REG", "STACK")), made.metadata.shared


def pretend(doing):
    """Has launches compile and no more, and prints what each kernel takes, after the last text in `doing`."""
    names = {device.step: "step", device.squares: "squares", device.finish: "finish", device_replay.replay: "replay"}
    launch = JITFunction.run

    def run(self, *arguments, grid, warmup, **options):
        made = launch(self, *arguments, grid=grid, warmup=True, **options)
        text = "{}, {}: {} registers, {} bytes of stack, {} of shared memory"
        print(text.format(doing[-1], names[self], *usage(made)), flush=True)

    driver.set_active(NoGPU())
    JITFunction.run = run
    triton.interpreted = step.interpreted = lambda: True  # tensors in the CPU's memory pass


def launched(cell, rule, state_dtype):
    """A step, and the way back through a window."""
    optimiser = optimisers.make(
        "coordinatewise", cell=cell, rule=rule, inputs=INPUTS.get(rule, ("log-and-sign", "loss"))
    )
    layout = Layout(("a", "b"), ((COORDINATES - 100,), (100,)))
    theta = torch.zeros(1, COORDINATES)
    state = optimiser.init(layout, (1,), like=theta)
    state = state._replace(coordinates={name: value.to(state_dtype) for name, value in state.coordinates.items()})
    step.Triton(optimiser).update_(torch.ones(1, COORDINATES), state, theta, loss=torch.ones(1))
    if state_dtype == torch.float32:
        gradients = torch.ones(STEPS, COORDINATES)
        first = optimiser.init(layout, like=theta[0])
        window = Window(first, theta[0], gradients, gradients, torch.ones(STEPS), [Meeting({}, {}, {})] * STEPS)
        # The rule's statistic is read from the meetings of a real window.
        replay._statistics = lambda *_: ((torch.ones(STEPS, 2),) * 3, rule == "direction-and-magnitude")
        replay.replay(optimiser, optimiser.phi(), window)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default=step.PRECISION)
    parser.add_argument("--width", type=int, default=step.WIDTH)
    parser.add_argument("--warps", type=int, default=step.WARPS)
    parser.add_argument("--rule", choices=RULES, action="append", help="repeatable; all by default")
    options = parser.parse_args()
    step.PRECISION = replay.PRECISION = options.precision
    step.WIDTH = replay.WIDTH = options.width
    step.LAUNCH["num_warps"] = options.warps
    doing = []
    pretend(doing)
    for cell in ("lstm", "ihc-lstm"):
        for rule in options.rule or RULES:
            for dtype in (torch.float32, torch.bfloat16):
                doing.append(f"{cell}, {rule}, state {str(dtype).removeprefix('torch.')}")
                launched(cell, rule, dtype)


if __name__ == "__main__":
    main()
