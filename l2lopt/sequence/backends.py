"""Which way a cell goes through time, chosen in one place: hand-derived, PyTorch's own kernel, or the plain loop."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import is_parametrized

from l2lopt.cells import LSTM, Cell, CellState, Stacked
from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.sequence import by_hand, graphed, loop, torch_lstm

BACKENDS = ("auto", "fast", "loop")
Run: TypeAlias = Callable[[Cell, Tensor, CellState, Tensor | None, bool], tuple[Tensor, CellState]]
RUNS: dict[str, Run] = {
    "by-hand": by_hand.run,
    "graph": graphed.run,
    "torch": torch_lstm.run,
    "loop": loop.run,
}
"""Name → `run(cell, x, state, lengths, reverse)`; all give the same numbers."""


def check_backend(backend: str) -> str:
    """A name among `BACKENDS`.

    Raises:
        UserError: for another.
    """
    if backend not in BACKENDS:
        remedy = did_you_mean(backend, BACKENDS)
        raise UserError("backend", expected="a known name", found=repr(backend), remedy=remedy)
    return backend


def backend(cell: Cell, x: Tensor, lengths: Tensor | None = None) -> tuple[str, str | None]:
    """The name in `RUNS` that "auto" takes for a call at this moment, and why it is the loop, if it is.

    "by-hand" wherever it can be; on a GPU "torch" for an LSTM without lengths (cuDNN's kernel), else "graph"; both
    without a second derivative, neither measured. The loop under `torch.func`, `vmap`, forward-mode differentiation and
    `torch.compile`, for cells without a hand-derived pass, with hooks or with parametrizations (pruning, spectral
    norm), on the meta device, and where precisions are mixed outside autocast. A second
    derivative is only asked for on the way back: "by-hand" then runs the loop again, with a tape.

    Args:
        cell: the step.
        x: the inputs [T, N, *batch].
        lengths: as in `loop.run`.
    """
    if torch._C._are_functorch_transforms_active():
        return "loop", "a transform of torch.func is at work"
    if forward_ad._current_level >= 0:
        return "loop", "forward-mode differentiation is at work"
    if torch.compiler.is_compiling():
        return "loop", "torch.compile is tracing"
    if not x.numel():
        return "loop", "there are no steps"
    if x.is_meta:
        return "loop", "x has no numbers"
    reason = refusal(cell, x)
    if reason is not None:
        return "loop", reason
    if x.is_cuda and type(cell) is LSTM and lengths is None:
        return "torch", None
    return "graph" if x.is_cuda else "by-hand", None


def refusal(cell: Cell, x: Tensor) -> str | None:
    """Why a cell has no hand-derived pass over such inputs, or None where it has one."""
    if type(cell) is Stacked:
        return next((reason for layer in cell.cells() if (reason := refusal(layer, x))), None)
    if any(_watched(part) for part in cell.modules()):
        return "hooks or parametrizations are at work"
    sweep = by_hand.plan(cell)
    if isinstance(sweep, str):
        return sweep
    kinds = {(value.dtype, value.device) for value in cell.parameters()}
    if len(kinds) > 1:
        return "the weights are of several precisions or on several devices"
    ((dtype, device),) = kinds
    if dtype not in (torch.float32, torch.float64):
        return f"the weights are {dtype}".replace("torch.", "")
    if x.device != device or (x.dtype != dtype and not torch.is_autocast_enabled(x.device.type)):
        return f"x is {x.dtype} on {x.device}, the weights are {dtype} on {device}".replace("torch.", "")
    return None


def _watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its `forward`, or its weights are made of others."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or is_parametrized(module)


def run(
    cell: Cell,
    x: Tensor,
    state: CellState,
    lengths: Tensor | None = None,
    reverse: bool = False,
    choice: str = "auto",
) -> tuple[Tensor, CellState]:
    """`loop.run`, by the way that `choice` names.

    Args:
        cell: the step.
        x: the inputs [T, N, *batch].
        state: name → [size, *batch], the state before the first step.
        lengths: steps of each sequence [*batch]; None stands for T everywhere.
        reverse: from the last step to the first.
        choice: "loop"; "fast", or a refusal with the reason; "auto", fast where it can be.

    Raises:
        UserError: for an unknown choice, and for "fast" where `backend` says the loop.
    """
    check_backend(choice)
    if choice == "loop":
        return loop.run(cell, x, state, lengths, reverse)
    name, reason = backend(cell, x, lengths)
    if name == "loop":
        if choice == "fast" and x.numel():
            expected, remedy = "a call with a hand-derived pass", "choose 'auto' or 'loop'"
            raise UserError("backend 'fast'", expected=expected, found=str(reason), remedy=remedy)
        return loop.run(cell, x, state, lengths, reverse)
    cell.check(x[0], state)
    if type(cell) is not Stacked:
        return RUNS[name](cell, x, state, lengths, reverse)
    after: CellState = {}
    for index, layer in enumerate(cell.cells()):
        own = {key.removeprefix(f"{index}."): v for key, v in state.items() if key.startswith(f"{index}.")}
        x, own = run(layer, x, own, lengths, reverse, choice)
        after |= {f"{index}.{key}": value for key, value in own.items()}
    return x, after


class Direction(nn.Module):
    """A cell and the direction in which it goes through time, as a module: `run` with masked weights is one call of it.

    Args:
        cell: the step.
        reverse: whether it goes from the last step to the first.
        choice: as in `run`.
    """

    def __init__(self, cell: Cell, reverse: bool, choice: str = "auto") -> None:
        super().__init__()
        self.cell, self.reverse, self.choice = cell, reverse, choice

    def forward(self, x: Tensor, state: CellState, lengths: Tensor | None) -> tuple[Tensor, CellState]:
        """`run`."""
        return run(self.cell, x, state, lengths, self.reverse, self.choice)
