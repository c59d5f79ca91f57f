"""A hand-derived pass as a CUDA graph: one launch for all its steps, where a GPU would wait for some ten of each.

PyTorch's `torch.cuda.make_graphed_callables` records the pass and its way back. A graph works in memory of its own,
which holds one call at a time: a second call before the first has gone back takes another graph.
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
"""Calls of one kind (sizes, precision, direction) after which it is worth a graph: to make one takes five calls."""
MOST = 8
"""Graphs that a cell has at most; windows of ever other lengths would fill the memory with them."""


@dataclass
class Graph:
    """A recorded pass, and what holds its memory: the autograd node of the last call, while that lives."""

    run: Callable[..., tuple[Tensor, ...]]
    holder: Callable[[], Any] = lambda: None


@dataclass
class Graphs:
    """A cell's: how often each kind of call was seen, and the graphs made for it; none, where that failed."""

    seen: Counter[Hashable] = field(default_factory=Counter)
    made: dict[Hashable, list[Graph]] = field(default_factory=dict)
    failed: bool = False


_OF: "weakref.WeakKeyDictionary[Cell, Graphs]" = weakref.WeakKeyDictionary()


def run(
    cell: Cell, x: Tensor, state: CellState, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, CellState]:
    """What `by_hand.run` gives, on a GPU, for training calls of a kind that comes again; others go by hand.

    Outputs are copies. There is no second derivative, as with cuDNN's LSTM. A failure to record is logged once for a
    cell, which then goes by hand.

    Args:
        cell: as in `loop.run`, like the other arguments.
        x: [T, N, *batch].
        state: name → [size, *batch].
        lengths: [*batch] or None.
        reverse: from the last step to the first.
    """
    return by_hand.run(cell, x, state, lengths, reverse, through=_apply)


def _apply(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`ByHand.apply`, by a graph where there is one, or now is the time to make one."""
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    assert call.cell is not None
    graphs = _OF.setdefault(call.cell, Graphs())
    if not training or graphs.failed or torch.cuda.is_current_stream_capturing():
        return ByHand.apply(call, *tensors)  # type: ignore[no-any-return]
    lengths = () if call.lengths is None else (call.lengths,)
    kinds = tuple((value.shape, value.dtype, value.requires_grad) for value in (*lengths, *tensors))
    key = (kinds, call.reverse, call.dtype, call.autocast)
    graphs.seen[key] += 1
    graph = next((graph for graph in graphs.made.get(key, []) if graph.holder() is None), None)
    if graph is None:
        if graphs.seen[key] < ENOUGH or sum(map(len, graphs.made.values())) >= MOST:
            return ByHand.apply(call, *tensors)  # type: ignore[no-any-return]
        try:
            graph = Graph(_recorded(call, lengths, tensors))
        except RuntimeError as error:
            graphs.failed = True
            reason = str(error).partition("\n")[0]
            logging.getLogger("l2lopt").warning("no CUDA graph of %s: %s", type(call.cell).__name__, reason)
            return ByHand.apply(call, *tensors)  # type: ignore[no-any-return]
        graphs.made.setdefault(key, []).append(graph)
    with torch.autocast(tensors[0].device.type, enabled=False):
        results = graph.run(*lengths, *tensors)
    graph.holder = weakref.ref(results[0].grad_fn)
    return tuple(result.clone() for result in results)


def _recorded(
    call: Call, lengths: tuple[Tensor, ...], tensors: tuple[Tensor, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """The pass of (lengths if any, x, states, weights) as a graph."""
    alone = replace(call, cell=None, lengths=None)  # the graph must not keep the cell

    def forward(*arguments: Tensor) -> tuple[Tensor, ...]:
        given = replace(alone, lengths=arguments[0]) if lengths else alone
        return ByHand.apply(given, *arguments[len(lengths) :])  # type: ignore[no-any-return]

    samples = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in (*lengths, *tensors))
    with torch.autocast(tensors[0].device.type, enabled=False):
        return torch.cuda.make_graphed_callables(forward, samples, allow_unused_input=True)  # type: ignore[return-value]
