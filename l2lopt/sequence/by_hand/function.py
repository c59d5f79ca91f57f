"""A hand-derived pass over time as an `autograd.Function`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2lopt.cells import Cell, CellState
from l2lopt.core.types import Params
from l2lopt.sequence import loop
from l2lopt.sequence.by_hand.sweep import Slopes, Sweep, Way


@dataclass(frozen=True)
class Call:
    """What a call is beside its tensors.

    Args:
        sweep: the pass.
        cell: the cell whose pass it is, for the loop that stands in where the way back is itself differentiated; None
            where it never is.
        states: the states' names, in the order of the tensors.
        weights: the weights' names, after them.
        lengths: steps of each sequence [B], or None.
        reverse: from the last step to the first.
        autocast: whether autocast is on.
        dtype: the precision of the products.
    """

    sweep: Sweep
    cell: Cell | None
    states: tuple[str, ...]
    weights: tuple[str, ...]
    lengths: Tensor | None
    reverse: bool
    autocast: bool
    dtype: torch.dtype

    def way(self, x: Tensor) -> Way:
        """Direction and ends, for x [T, B, N]."""
        if self.lengths is None:
            return Way(self.reverse, None)
        return Way(self.reverse, (torch.arange(len(x), device=x.device).unsqueeze(1) < self.lengths).unsqueeze(2))

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[CellState, Params]:
        """States and weights by their names."""
        states = dict(zip(self.states, tensors, strict=False))
        return states, dict(zip(self.weights, tensors[len(states) :], strict=True))


class ByHand(torch.autograd.Function):
    """`apply(call, x, *states, *weights)` gives the outputs [T, B, M] and the final states [B, size].

    The way back is the pass's. Where it is differentiated in turn (`create_graph`), the loop runs again with a tape.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Keeps the arguments, the prepared weights and the tape of the pass."""
        state, weights = call.split(tensors)
        with torch.autocast(x.device.type, enabled=False):
            with torch.enable_grad():
                leaves = {name: w.detach().requires_grad_(w.requires_grad) for name, w in weights.items()}
                prepared = call.sweep.prepare(leaves)
            dtype = next(iter(weights.values())).dtype
            state = {name: value.to(dtype) for name, value in state.items()}
            w = {name: v.detach().to(call.dtype if v.dim() == 2 else dtype) for name, v in prepared.items()}
            way = call.way(x)
            outputs, final, tape = call.sweep.forward(way, way.visible(x).to(dtype), state, w)
        ctx.call, ctx.leaves, ctx.prepared, ctx.names = call, leaves, prepared, (tuple(w), tuple(tape))
        ctx.save_for_backward(x, *tensors, *w.values(), *tape.values())
        return outputs, *(final[name] for name in call.states)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """One slope per argument of `forward`."""
        call: Call = ctx.call
        count = 1 + len(call.states) + len(call.weights)
        saved = ctx.saved_tensors  # asked for once: checkpointing gives them once
        x, *tensors = saved[:count]
        if torch.is_grad_enabled():
            return None, *_through_the_loop(call, ctx.needs_input_grad[1:], [x, *tensors], slopes)
        names, rest = ctx.names, saved[count:]
        w, tape = (
            dict(zip(n, v, strict=True))
            for n, v in zip(names, (rest[: len(names[0])], rest[len(names[0]) :]), strict=True)
        )
        state, weights = call.split(tuple(tensors))
        dtype = next(iter(weights.values())).dtype
        asked = Slopes(
            slopes[0],
            dict(zip(call.states, slopes[1:], strict=True)),
            ctx.needs_input_grad[1],
            any(ctx.needs_input_grad[2 + len(state) :]),
        )
        with torch.autocast(x.device.type, enabled=False):
            way = call.way(x)
            dx, d_state, dw = call.sweep.backward(way, way.visible(x).to(dtype), state, w, tape, asked)
            dw = _pulled_back(ctx.leaves, ctx.prepared, dw) if asked.of_weights else {}
        dx = None if dx is None else dx.to(x.dtype)
        d_states = [d_state[name].to(value.dtype) for name, value in state.items()]
        return None, dx, *d_states, *(dw.get(name) for name in weights)


def _pulled_back(leaves: Params, prepared: Params, slopes: Params) -> Params:
    """The slopes of the cell's weights, from those of the prepared ones."""
    outputs = {name: prepared[name] for name in slopes if prepared[name].requires_grad}
    inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(
        list(outputs.values()),
        list(inputs.values()),
        [slopes[name].view_as(value) for name, value in outputs.items()],
        retain_graph=True,
        allow_unused=True,
    )
    return {name: slope for name, slope in zip(inputs, found, strict=True) if slope is not None}


class _Loop(nn.Module):
    """The plain loop as a module, for its weights to be given."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        assert call.cell is not None
        self.cell, self.call = call.cell, call

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """`loop.run`."""
        return loop.run(self.cell, x, state, self.call.lengths, self.call.reverse)


def _through_the_loop(
    call: Call, needed: tuple[bool, ...], arguments: list[Tensor], slopes: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The same slopes, differentiable: the loop's, of aliases, since the arguments may depend on each other."""
    x, *tensors = (argument.view_as(argument) for argument in arguments)
    state, weights = call.split(tuple(tensors))
    columns = {name: value.movedim(-1, 0) for name, value in state.items()}
    with torch.autocast(x.device.type, dtype=call.dtype if call.autocast else None, enabled=call.autocast):
        named = {f"cell.{name}": value for name, value in weights.items()}
        outputs, final = functional_call(_Loop(call), named, (x.movedim(-1, 1), columns))
    results = [outputs.movedim(1, -1), *(final[name].movedim(0, -1) for name in call.states)]
    pairs = [
        (result, slope.to(result.dtype)) for result, slope in zip(results, slopes, strict=True) if result.requires_grad
    ]
    inputs = [argument for argument, need in zip([x, *tensors], needed, strict=True) if need]
    found = iter(
        torch.autograd.grad([r for r, _ in pairs], inputs, [s for _, s in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if need else None for need in needed]
