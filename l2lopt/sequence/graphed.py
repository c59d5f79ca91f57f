"""A hand-derived pass as a CUDA graph: one launch for all time steps instead of some ten launches for each.

`torch.cuda.make_graphed_callables` records the forward and the backward pass. A graph has static memory for one call at
a time: a second call takes another graph as long as the backward pass of the first is still to come.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from l2lopt.cells import Cell, CellState
from l2lopt.sequence import by_hand
from l2lopt.sequence.by_hand.function import ByHand, Call

ENOUGH = 3
"""Number of calls of one kind (sizes, precision, direction) that make a graph worth its cost, which is five calls."""
MOST = 8
"""Largest number of graphs for a cell; windows of ever new lengths would otherwise fill the memory with graphs."""


@dataclass
class Graph:
    """A recorded pass, and the autograd node of its last call, whose backward pass needs the graph's memory.

    Attributes:
        run: Replays the pass.
        holder: Weak reference to that node; it gives None as soon as the memory is free.
    """

    run: Callable[..., tuple[Tensor, ...]]
    holder: Callable[[], Any] = lambda: None


@dataclass
class Graphs:
    """The graphs of a cell.

    Attributes:
        seen: Number of calls of each kind so far.
        made: Kind of call → its graphs.
        failed: Whether recording has failed; it is not tried again.
    """

    seen: Counter[Hashable] = field(default_factory=Counter)
    made: dict[Hashable, list[Graph]] = field(default_factory=dict)
    failed: bool = False


# Weak keys: the graphs go when their cell goes.
_OF: "weakref.WeakKeyDictionary[Cell, Graphs]" = weakref.WeakKeyDictionary()


def run(
    cell: Cell, x: Tensor, state: CellState, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, CellState]:
    """`by_hand.run` on a GPU, replayed from a graph for training calls of a kind that was seen before.

    All other calls run without a graph. Outputs and gradients are copies. There is no second derivative, as for
    cuDNN's LSTM. If recording fails, a warning is logged once for the cell, which then runs without graphs.

    Args:
        cell: Cell to run.
        x: Inputs, [T, N, *batch].
        state: name → [size, *batch], the state before the first step.
        lengths: Number of steps of each sequence, [*batch]; None for T everywhere.
        reverse: Whether the cell runs from the last step to the first.
    """
    return by_hand.run(cell, x, state, lengths, reverse, through=_apply)


def _apply(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`ByHand.apply`, replayed from a graph if there is a free one or one is made now."""
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    assert call.cell is not None
    graphs = _OF.setdefault(call.cell, Graphs())
    if not training or graphs.failed or torch.cuda.is_current_stream_capturing():
        return ByHand.apply(call, *tensors)  # type: ignore[no-any-return]  # autograd.Function has no types
    lengths = () if call.lengths is None else (call.lengths,)
    # All that is fixed in a recorded graph: shapes, precisions, GPU, direction, and which gradients it computes.
    kinds = tuple((value.shape, value.dtype, value.device, value.requires_grad) for value in (*lengths, *tensors))
    key = (kinds, call.reverse, call.dtype, call.autocast)
    graphs.seen[key] += 1
    graph = next((graph for graph in graphs.made.get(key, []) if graph.holder() is None), None)
    if graph is None:
        if graphs.seen[key] < ENOUGH or sum(map(len, graphs.made.values())) >= MOST:
            return ByHand.apply(call, *tensors)  # type: ignore[no-any-return]  # autograd.Function has no types
        try:
            graph = Graph(_recorded(call, lengths, tensors))
        except RuntimeError as error:
            graphs.failed = True
            reason = str(error).partition("\n")[0]
            logging.getLogger("l2lopt").warning("no CUDA graph of %s: %s", type(call.cell).__name__, reason)
            return ByHand.apply(call, *tensors)  # type: ignore[no-any-return]  # autograd.Function has no types
        graphs.made.setdefault(key, []).append(graph)
    with torch.autocast(tensors[0].device.type, enabled=False):
        results = graph.run(*lengths, *tensors)
    # The node lives as long as anything that was computed from the outputs, so its end frees the graph's memory.
    node = results[0].grad_fn
    assert node is not None
    graph.holder = weakref.ref(node)
    # Copies: the graph's own outputs are overwritten by its next call, and its gradients, which autograd would keep as
    # they are in `.grad`, by the next backward pass.
    node.register_hook(_copied)
    return tuple(result.clone() for result in results)


def _copied(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.clone() for gradient in gradients)


def _recorded(
    call: Call, lengths: tuple[Tensor, ...], tensors: tuple[Tensor, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """The pass of (lengths if any, x, states, weights) as a graph."""
    # Without the cell: the graph is a value of `_OF`, whose entry for the cell would otherwise never be dropped.
    alone = replace(call, cell=None, lengths=None)

    def forward(*arguments: Tensor) -> tuple[Tensor, ...]:
        given = replace(alone, lengths=arguments[0]) if lengths else alone
        return ByHand.apply(given, *arguments[len(lengths) :])  # type: ignore[no-any-return]  # autograd.Function has no types

    # Clones: these become the static inputs of the graph, which every replay overwrites.
    samples = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in (*lengths, *tensors))
    # PyTorch records on the current GPU, wherever the tensors are.
    with torch.cuda.device_of(tensors[0]), torch.autocast(tensors[0].device.type, enabled=False):
        return torch.cuda.make_graphed_callables(forward, samples, allow_unused_input=True)  # type: ignore[return-value]  # a callable for a callable, and a tuple for several
