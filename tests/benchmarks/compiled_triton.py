"""Compiles the Triton kernels for an H100 or H200, which needs none, and prints what each takes of a multiprocessor.

python tests/benchmarks/compiled_triton.py [--precision tf32x3] [--width 64] [--warps 8]
"""

import argparse
import re
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from l2lopt import optimisers
from l2lopt.kernels.triton import device, device_replay, step
from l2lopt.kernels.triton.packing import KernelShape

OTHERS = {"tensors": "*i64", "skipped": "*i32", "sums": "*fp64", "starts": "*i64", "sizes": "*i64"}
NUMBERS = ("n", "stride", "blocks", "total", "T", "width", "count", "chunks")


def compiled(kernel, shape, state, warps, **constants):
    """Registers, bytes of stack and of shared memory."""
    constants |= {"S": shape.constants}
    signature, known = {}, {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name], known[name] = "constexpr", constants[name]
        elif name in ("memory", "running"):
            signature[name] = ("*fp32" if name == "running" else state,) * len(shape.memory)
        elif name == "tensors":
            signature[name] = "*i32" if kernel is device_replay.replay else "*i64"
        elif name == "state":
            signature[name] = (state,) * 4
        elif name == "statistics":
            signature[name] = ("*fp32",) * 3
        else:
            signature[name] = OTHERS.get(name, "i32" if name in NUMBERS else "*fp32")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if str(signature[name]).startswith("*") or name in ("n", "stride")
    }
    aligned |= {
        (place, k): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in ("state", "statistics")
        for k in range(len(signature[name]))
    }
    source = ASTSource(kernel, signature, known, aligned)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(find_spec("triton").origin).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = (int(re.search(rf"{word}:(\d+)", report.stdout)[1]) for word in ("REG", "STACK"))
    return *found, made.metadata.shared


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default=step.PRECISION)
    parser.add_argument("--width", type=int, default=step.WIDTH)
    parser.add_argument("--warps", type=int, default=step.WARPS)
    options = parser.parse_args()
    for cell in ("lstm", "ihc-lstm"):
        for rule in ("direction-and-magnitude", "gated"):
            inputs = ("log-and-sign",) if rule == "gated" else ("log-and-sign", "rnnprop", "log-step")
            shape = KernelShape.of(optimisers.coordinatewise(inputs, cell, rule=rule), options.precision, options.width)
            back = {"PULLED": rule == "direction-and-magnitude"}
            ways = [("step", {}, "*fp32"), ("replay", back, "*fp32")] + [("step", {}, "*bf16")] * (rule != "gated")
            for name, constants, state in ways:
                kernel = device.step if name == "step" else device_replay.replay
                taken = compiled(kernel, shape, state, options.warps, **constants)
                print(
                    f"{cell}, {rule}, {name}, state {state[1:]}: {taken[0]} registers, {taken[1]} bytes of stack, ",
                    end="",
                )
                print(f"{taken[2]} of shared memory")


if __name__ == "__main__":
    main()
