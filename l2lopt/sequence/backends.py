"""The choice of a pass over time, in one place: hand-derived, a CUDA graph, PyTorch's own kernel, or the plain loop."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module
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
}
"""Name → `run(cell, x, state, lengths, reverse)`; all give the loop's numbers, some in float32 under autocast."""


def check_backend(backend: str) -> str:
    """Gives a name in `BACKENDS` back.

    Raises:
        UserError: For any other name.
    """
    if backend not in BACKENDS:
        remedy = did_you_mean(backend, BACKENDS)
        raise UserError("backend", expected="a known name", found=repr(backend), remedy=remedy)
    return backend


def backend(cell: Cell, x: Tensor, lengths: Tensor | None = None) -> tuple[str, str | None]:
    """What "auto" takes for a call at this moment: a name in `RUNS`; or "loop", and the reason.

    On a CPU "by-hand"; on a GPU "torch" for an LSTM without lengths (cuDNN's kernel), otherwise "graph"; neither of the
    two has a second derivative, and neither has been timed. "loop" under `torch.func`, `vmap`, forward-mode
    differentiation, `torch.compile` and `torch.jit.trace`, for cells without a hand-derived pass, with hooks (those of
    all modules too), with a `forward` of the instance's own, with parametrizations (pruning, spectral norm) or with
    weights that are no parameters, on the meta device, and for mixed precisions outside autocast. Whether a second
    derivative or a batch of gradients is wanted is known during the backward pass only: "by-hand" then runs the loop
    again, on autograd's tape.

    Args:
        cell: Cell to run.
        x: Inputs, [T, N, *batch].
        lengths: Number of steps of each sequence, [*batch]; None for T everywhere.

    Returns:
        The name, and the reason for "loop", else None.
    """
    # These transforms trace the operations of the loop; a custom autograd.Function that works in place hides them.
    if torch._C._are_functorch_transforms_active():
        return "loop", "a transform of torch.func is at work"
    if forward_ad._current_level >= 0:
        return "loop", "forward-mode differentiation is at work"
    if torch.compiler.is_compiling():
        return "loop", "torch.compile is tracing"
    if torch._C._is_tracing():
        return "loop", "torch.jit.trace is at work"
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
    """The reason why a cell has no hand-derived pass over such inputs; None if it has one."""
    # First, as the cells of a `Stacked` are asked one by one, and never it itself.
    if any(_watched(part) for part in cell.modules()):
        return "hooks or parametrizations are at work"
    if type(cell) is Stacked:
        return next((reason for layer in cell.cells() if (reason := refusal(layer, x))), None)
    sweep = by_hand.plan(cell)
    if isinstance(sweep, str):
        return sweep
    kinds = {(value.dtype, value.device) for value in cell.parameters()}
    if not kinds or any(_lacks_parameters(part) for part in cell.modules()):
        return "a weight is no parameter of the cell"
    if len(kinds) > 1:
        return "the weights are of several precisions or on several devices"
    ((dtype, device),) = kinds
    if dtype not in (torch.float32, torch.float64):
        return f"the weights are {dtype}".replace("torch.", "")
    if x.device != device or (x.dtype != dtype and not torch.is_autocast_enabled(x.device.type)):
        return f"x is {x.dtype} on {x.device}, the weights are {dtype} on {device}".replace("torch.", "")
    return None


def _watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's `forward`, or computes its weights from others."""
    # A hand-derived pass reads the weights and never calls the cell, so it would skip hooks without a word.
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    of_all = nn_module._has_any_global_hook()
    return any(hooks) or of_all or "forward" in vars(module) or is_parametrized(module)


def _lacks_parameters(module: nn.Module) -> bool:
    """Whether one of a module's parameters was taken away, or replaced by a buffer or a plain tensor."""
    # A hand-derived pass knows the cell's parameters alone. FSDP with flat parameters and the replicas of
    # `nn.DataParallel` have tensors in their place.
    if module._buffers or any(value is None for value in module._parameters.values()):
        return True
    # By type: asked at every call, and `isinstance` of a tensor's class is slow.
    return any(issubclass(type(value), Tensor) for value in vars(module).values())


def run(
    cell: Cell,
    x: Tensor,
    state: CellState,
    lengths: Tensor | None = None,
    reverse: bool = False,
    choice: str = "auto",
) -> tuple[Tensor, CellState]:
    """Applies a cell to all time steps: `loop.run`, by the pass that `choice` names.

    Args:
        cell: Cell to run.
        x: Inputs, [T, N, *batch].
        state: name → [size, *batch], the state before the first step.
        lengths: Number of steps of each sequence, [*batch]; None for T everywhere.
        reverse: Whether the cell runs from the last step to the first.
        choice: "loop"; "fast", any other pass, or an error with the reason if there is none; "auto", the fastest pass
            that there is.

    Returns:
        The outputs [T, M, *batch] and the state after the last step.

    Raises:
        UserError: For an unknown choice, and for "fast" if `backend` gives "loop".
    """
    check_backend(choice)
    if choice == "loop":
        return loop.run(cell, x, state, lengths, reverse)
    name, reason = backend(cell, x, lengths)
    if name == "loop":
        # Without steps the loop costs nothing, so "fast" has no reason to refuse.
        if choice == "fast" and x.numel():
            expected, remedy = "a call with a hand-derived pass", "choose 'auto' or 'loop'"
            raise UserError("backend 'fast'", expected=expected, found=str(reason), remedy=remedy)
        return loop.run(cell, x, state, lengths, reverse)
    # A hand-derived pass never calls the cell, whose `forward` would check this.
    cell.check(x[0], state)
    if type(cell) is not Stacked:
        return RUNS[name](cell, x, state, lengths, reverse)
    after: CellState = {}
    # Layer by layer over all steps, instead of step by step over all layers: each layer then has its own pass.
    for index, layer in enumerate(cell.cells()):
        own = {key.removeprefix(f"{index}."): v for key, v in state.items() if key.startswith(f"{index}.")}
        x, own = run(layer, x, own, lengths, reverse, choice)
        after |= {f"{index}.{key}": value for key, value in own.items()}
    return x, after


class Direction(nn.Module):
    """A cell with its direction in time, as a module, so that `functional_call` can replace the weights for one `run`.

    Args:
        cell: Cell to run.
        reverse: Whether the cell runs from the last step to the first.
        choice: "auto", "fast" or "loop", see `run`.
    """

    def __init__(self, cell: Cell, reverse: bool, choice: str = "auto") -> None:
        super().__init__()
        self.cell, self.reverse, self.choice = cell, reverse, choice

    def forward(self, x: Tensor, state: CellState, lengths: Tensor | None) -> tuple[Tensor, CellState]:
        """`run`."""
        return run(self.cell, x, state, lengths, self.reverse, self.choice)
