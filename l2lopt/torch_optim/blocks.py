"""Blocks of a flat vector whose state is stored in another dtype than the rule computes in.

Only one block of the state is there in the rule's dtype at once. A rule whose coordinates do not meet gives the same
update on any block. One whose coordinates meet, in means over groups or in functions of whole tensors, gives it on
blocks of whole tensors.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.groupings import COMPUTED
from l2lopt.core.layout import Layout, Params
from l2lopt.core.types import OptimiserState
from l2lopt.estimators.exchange import Recorder
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim.state_parts import AXES

BLOCK = 2**16
"""Coordinates of a block."""


class Block(NamedTuple):
    """Neighbouring coordinates of a flat vector.

    Attributes:
        layout: Layout of the block.
        low: First coordinate.
        high: Coordinate after the last one.
        first: First tensor of a block of whole tensors.
        end: Tensor after the last one; equal to `first` for a block that may end within a tensor.
    """

    layout: Layout
    low: int
    high: int
    first: int = 0
    end: int = 0


def update_in_blocks_(
    rule: Optimiser, blocks: Sequence[Block], state: OptimiserState, grads: Tensor, theta: Tensor, loss: Tensor | None
) -> tuple[Tensor, Params]:
    """The update [n] and the shared tensors after it; the other arrays of the state change in place.

    Args:
        rule: Rule that computes the update.
        blocks: Result of `blocks_of`.
        state: State before the step, in the dtype that it is stored in.
        grads: Gradients, [n].
        theta: Parameters θ, [n].
        loss: Loss at θ, a scalar; None where the rule does not use it.
    """
    updates, results = [], list[Params]()
    for block in blocks:
        part = slice(block.low, block.high)
        coordinates = {name: value[..., part].to(grads.dtype) for name, value in state.coordinates.items()}
        groups = _groups(state, block)
        before = dict(state.shared)  # the same for each block: a mean of the loss moves once a step, not once a block
        if results and "skipped" in before:
            before["skipped"] = results[-1]["skipped"]  # but these count on from block to block
        given = OptimiserState(block.layout, coordinates, groups, before)
        update, after = rule.update_(grads[part], given, theta[part], loss=loss)
        updates.append(update.clone())  # a fused rule overwrites its last result
        results.append(after.shared)
        for name, value in after.coordinates.items():
            state.coordinates[name][..., part] = value
        for kind, values in after.groups.items():
            for name, value in values.items():
                # Into the views, and so into the state's own arrays.
                groups[kind][name].copy_(value)
    return torch.cat(updates), results[-1]


def blocks_of(layout: Layout, rule: Optimiser, like: Tensor) -> list[Block]:
    """The blocks of a vector on which `rule` gives the same update as on the whole, of `BLOCK` coordinates or more.

    Args:
        layout: Layout of the vector.
        rule: Rule to update with.
        like: Tensor of the dtype and on the device that the rule computes in.
    """
    if not rule.coordinatewise:
        return [Block(layout, 0, layout.size, 0, len(layout.names))]
    if not _coordinates_meet(rule, like):
        # An empty vector has a block as well: a process without coordinates counts the step as the others do.
        bounds = [(low, min(low + BLOCK, layout.size)) for low in range(0, max(layout.size, 1), BLOCK)]
        return [Block(layout.slice(low, high), low, high) for low, high in bounds]
    # Every process cuts between the same tensors, as means over groups are sums over the processes.
    whole = map(prod, layout.whole_shapes)
    blocks, first, low, high, count = [], 0, 0, 0, 0
    for end, (size, counted) in enumerate(zip(layout.sizes, whole, strict=True), 1):
        high, count = high + size, count + counted
        if count >= BLOCK or end == len(layout.names):
            blocks.append(Block(layout.part(first, end), low, high, first, end))
            first, low, count = end, high, 0
    return blocks


def _groups(state: OptimiserState, block: Block) -> dict[str, Params]:
    """The state per group of a block's groups, as views."""
    groups: dict[str, Params] = {}
    for kind, values in state.groups.items():
        ends = [0, *accumulate(prod(shape[AXES[kind]]) for shape in state.layout.shapes)]
        groups[kind] = {name: value[..., ends[block.first] : ends[block.end]] for name, value in values.items()}
    return groups


def _coordinates_meet(rule: Optimiser, like: Tensor) -> bool:
    """Whether the coordinates of a rule meet, found by one update of a single coordinate."""
    recorder = Recorder(COMPUTED)
    layout = Layout(("one",), ((1,),)).meeting(recorder)
    one = like.new_zeros(1)
    rule.update(one, rule.init(layout, like=one), one, loss=one.sum())
    return any(recorder.meeting)
