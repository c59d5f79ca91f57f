"""The coordinatewise learned optimiser on a GPU: its step and the way back through a window, in Triton.

On a machine without a GPU the kernels run in Triton's interpreter, if TRITON_INTERPRET=1 stood in the environment
before Triton was imported: slow, and meant for tests.
"""

import os
from importlib.util import find_spec

import torch

from l2lopt.kernels import folding
from l2lopt.kernels.triton.packing import CODES, PLACES, items
from l2lopt.optimisers import Coordinatewise, Optimiser


def refusal(optimiser: Optimiser) -> str | None:
    """Why an optimiser has no twin in Triton here, or None where it has one."""
    reason = folding.refusal(optimiser)
    if reason is not None:
        return reason
    assert isinstance(optimiser, Coordinatewise)
    kinds = [type(item) for _, item in items(optimiser)]
    for kind in kinds:
        if kind not in PLACES:
            return f"an input is not one of the library's: {kind.__name__}"
        # The kernels' constants have one place for each kind.
        if kinds.count(kind) > 1:
            return f"there are several inputs of one kind, {kind.__name__}"
    if type(optimiser.rule) not in CODES:
        return f"the rule is not one of the library's: {type(optimiser.rule).__name__}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    for name, value in optimiser.phi().items():
        if value.dtype != torch.float32 or not (value.is_cuda or interpreted()):
            where = "" if torch.cuda.is_available() or value.dtype != torch.float32 else ", and there is no GPU"
            return f"{name} is {value.dtype} on {value.device}{where}".replace("torch.", "")
    return None


def interpreted() -> bool:
    """Whether kernels run in the interpreter, on tensors in any memory."""
    return os.environ.get("TRITON_INTERPRET") == "1"


__all__ = ["interpreted", "refusal"]
