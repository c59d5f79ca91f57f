"""A hand-derived pass over time as an `autograd.Function`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt.cells import Cell, CellState
from l2lopt.core.layout import Params
from l2lopt.sequence import loop
from l2lopt.sequence.by_hand.sweep import Adjoints, Sweep, TimeOrder


@dataclass(frozen=True)
class Call:
    """The arguments of a call that are no differentiable tensors.

    Args:
        sweep: The pass.
        cell: Cell of the pass, for the plain loop that replaces it when the backward pass is differentiated in turn;
            None if it never is.
        states: Names of the states, in the order of the tensors.
        weights: Names of the weights, whose tensors follow those of the states.
        lengths: Number of steps of each sequence, [B], or None.
        reverse: Whether the pass runs from the last step to the first.
        autocast: Whether autocast is on.
        dtype: Precision of the products.
    """

    sweep: Sweep
    cell: Cell | None
    states: tuple[str, ...]
    weights: tuple[str, ...]
    lengths: Tensor | None
    reverse: bool
    autocast: bool
    dtype: torch.dtype

    def time_order(self, x: Tensor) -> TimeOrder:
        """The direction, and the steps that count, for x [T, B, N]."""
        if self.lengths is None:
            return TimeOrder(self.reverse, None)
        return TimeOrder(self.reverse, (torch.arange(len(x), device=x.device).unsqueeze(1) < self.lengths).unsqueeze(2))

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[CellState, Params]:
        """The states and the weights by name."""
        states = dict(zip(self.states, tensors, strict=False))
        return states, dict(zip(self.weights, tensors[len(states) :], strict=True))


class ByHand(torch.autograd.Function):
    """`apply(call, x, *states, *weights)` gives the outputs [T, B, M] and the final states [B, size].

    The backward pass is hand-derived. If it is differentiated in turn (`create_graph`), or adjoints come in batches
    (`is_grads_batched`, `vmap` over a backward pass), the plain loop runs again on autograd's tape.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the pass; saves the arguments, the prepared weights and the tape."""
        state, weights = call.split(tensors)
        with torch.autocast(x.device.type, enabled=False):
            # `prepare` is a few operations on the weights alone, so autograd differentiates it: its small graph is
            # stored, and `_pulled_back` goes through it after the hand-derived part.
            with torch.enable_grad():
                # Weights made under `inference_mode` require a gradient, but cannot have one.
                wanted = {name: w.requires_grad and not w.is_inference() for name, w in weights.items()}
                leaves = {name: w.detach().requires_grad_(wanted[name]) for name, w in weights.items()}
                prepared = call.sweep.prepare(leaves)
            dtype = next(iter(weights.values())).dtype
            state = {name: value.to(dtype) for name, value in state.items()}
            # Only matrices have the precision of the products; biases and diagonals act on the states element by
            # element.
            w = {name: v.detach().to(call.dtype if v.dim() == 2 else dtype) for name, v in prepared.items()}
            time = call.time_order(x)
            outputs, final, tape = call.sweep.forward(time, time.visible(x).to(dtype), state, w)
        ctx.call, ctx.leaves, ctx.prepared, ctx.names = call, leaves, prepared, (tuple(w), tuple(tape))
        ctx.save_for_backward(x, *tensors, *w.values(), *tape.values())
        return outputs, *(final[name] for name in call.states)

    @staticmethod
    def backward(ctx: Any, *adjoints: Tensor) -> tuple[Tensor | None, ...]:
        """One gradient per argument of `forward`."""
        call: Call = ctx.call
        count = 1 + len(call.states) + len(call.weights)
        saved = ctx.saved_tensors  # read once: under activation checkpointing a second read raises
        x, *tensors = saved[:count]
        # Gradients are on in a backward pass only if it is to be differentiated again (`create_graph`).
        if torch.is_grad_enabled() or any(map(_has_hidden_axis, adjoints)):
            with torch.enable_grad():
                return None, *_through_the_loop(call, ctx.needs_input_grad[1:], [x, *tensors], adjoints)
        names, rest = ctx.names, saved[count:]
        w, tape = (
            dict(zip(n, v, strict=True))
            for n, v in zip(names, (rest[: len(names[0])], rest[len(names[0]) :]), strict=True)
        )
        state, weights = call.split(tuple(tensors))
        dtype = next(iter(weights.values())).dtype
        asked = Adjoints(
            adjoints[0],
            dict(zip(call.states, adjoints[1:], strict=True)),
            ctx.needs_input_grad[1],
            any(ctx.needs_input_grad[2 + len(state) :]),
        )
        with torch.autocast(x.device.type, enabled=False):
            time = call.time_order(x)
            dx, d_state, dw = call.sweep.backward(time, time.visible(x).to(dtype), state, w, tape, asked)
            dw = _pulled_back(ctx.leaves, ctx.prepared, dw) if asked.of_weights else {}
        dx = None if dx is None else dx.to(x.dtype)
        d_states = [d_state[name].to(value.dtype) for name, value in state.items()]
        return None, dx, *d_states, *(dw.get(name) for name in weights)


def _has_hidden_axis(adjoint: Tensor) -> bool:
    """Whether `vmap` or `is_grads_batched` hides an axis of this tensor, which cannot be written into other memory."""
    functorch = torch._C._functorch
    # `is_grads_batched` has the older of the two kinds, which may go.
    legacy = getattr(functorch, "is_legacy_batchedtensor", functorch.is_batchedtensor)
    return functorch.is_batchedtensor(adjoint) or bool(legacy(adjoint))


def _pulled_back(leaves: Params, prepared: Params, adjoints: Params) -> Params:
    """The gradients of the cell's weights, from those of the prepared weights."""
    outputs = {name: prepared[name] for name in adjoints if prepared[name].requires_grad}
    inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(
        list(outputs.values()),
        list(inputs.values()),
        [adjoints[name].view_as(value) for name, value in outputs.items()],
        # The caller may go backward a second time, and then needs this small graph again.
        retain_graph=True,
        allow_unused=True,
    )
    return {name: adjoint for name, adjoint in zip(inputs, found, strict=True) if adjoint is not None}


class _Loop(nn.Module):
    """The plain loop as a module, so that `functional_call` can replace its weights."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        assert call.cell is not None
        self.cell, self.call = call.cell, call

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """`loop.run`."""
        return loop.run(self.cell, x, state, self.call.lengths, self.call.reverse)


def _through_the_loop(
    call: Call, needed: tuple[bool, ...], arguments: list[Tensor], adjoints: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The same gradients, by autograd through the plain loop, so that they can be differentiated again."""
    # Aliases: if one argument was computed from another, `grad` with respect to both would count that path twice.
    x, *tensors = (argument.view_as(argument) for argument in arguments)
    state, weights = call.split(tuple(tensors))
    columns = {name: value.movedim(-1, 0) for name, value in state.items()}
    with torch.autocast(x.device.type, dtype=call.dtype if call.autocast else None, enabled=call.autocast):
        named = {f"cell.{name}": value for name, value in weights.items()}
        # Not tied: each weight has a tensor of its own here, even where two are one parameter of the cell.
        outputs, final = functional_call(_Loop(call), named, (x.movedim(-1, 1), columns), tie_weights=False)
    results = [outputs.movedim(1, -1), *(final[name].movedim(0, -1) for name in call.states)]
    pairs = [
        (result, adjoint.to(result.dtype))
        for result, adjoint in zip(results, adjoints, strict=True)
        if result.requires_grad
    ]
    inputs = [argument for argument, need in zip([x, *tensors], needed, strict=True) if need]
    found = iter(
        torch.autograd.grad([r for r, _ in pairs], inputs, [s for _, s in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if need else None for need in needed]
