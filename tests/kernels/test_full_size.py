"""The meta-gradient of the full ResNet-34: 21,282,122 coordinates, 100 steps, in memory that a workstation has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from l2lopt.estimators import Backprop

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_meta_gradient.py"
COORDINATES, STEPS = 21_282_122, 100


@pytest.mark.huge
@pytest.mark.parametrize("rule", ["gated"])
def test_hundred_steps_of_resnet34_in_under_16_gb(rule, capsys):
    """The record whole and in float32, forward steps included; equal to the tape on the thousand coordinates of which
    the problem is made.
    """
    sys.path.insert(0, str(BENCHMARK.parent))
    try:
        from bench_meta_gradient import difference, problem
    finally:
        sys.path.remove(str(BENCHMARK.parent))
    arguments = json.dumps(["blockwise", COORDINATES, STEPS, 1, 2, {"rule": rule}])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARK), "--child", arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    capsys.readouterr()
    with capsys.disabled():
        sys.stdout.write(f"\n{found['seconds'][0] / 60:.1f} min, peak {found['total'] / 1e9:.2f} GB\n")
    assert found["total"] < 16e9
    wanted = {name: torch.zeros(len(values)).double() for name, values in found["gradient"].items()}
    for few, times in ((1000, COORDINATES // 1000), (COORDINATES % 1000, 1)):
        optimiser, loss, carry, listed = problem(few, STEPS, rule)
        piece = Backprop()(optimiser.update_with, loss, optimiser.phi(), carry, listed)
        for name, value in piece.gradient.items():
            wanted[name] += times * few / COORDINATES * value.flatten().double()
    assert difference(found["gradient"], {name: value.tolist() for name, value in wanted.items()}) < 1e-4
