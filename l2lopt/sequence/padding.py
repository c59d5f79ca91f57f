"""Sequences of different lengths: padded with `lengths`, or PyTorch's `PackedSequence`."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from l2lopt.core.errors import UserError

Lengths: TypeAlias = Sequence[int] | Tensor


def check_lengths(lengths: Lengths, steps: int, batch: tuple[int, ...], device: torch.device) -> Tensor | None:
    """`lengths` as a tensor [*batch] on `device`; None if every sequence has all T steps.

    The values of lengths that differ between the rows of a `vmap` cannot be read: only their shape is checked.

    Args:
        lengths: Number of steps of each sequence.
        steps: T.
        batch: Batch axes of the inputs.
        device: Device of the inputs.

    Raises:
        UserError: For a number of lengths other than the number of sequences, and for a length that is no whole number
            or outside [0, T].
    """
    try:
        # An empty list would become floating-point numbers, which are refused below.
        given = (
            lengths
            if isinstance(lengths, Tensor)
            else torch.tensor(lengths, dtype=None if len(lengths) else torch.int64)
        )
    except (RuntimeError, TypeError, ValueError):
        expected, remedy = "whole numbers, one for each sequence", "give a list or a tensor of them"
        raise UserError("lengths", expected=expected, found=repr(lengths), remedy=remedy) from None
    if not batch:
        remedy = "leave lengths out, or give x a batch axis"
        raise UserError(
            "lengths", expected="none for a single sequence [T, N]", found=str(given.tolist()), remedy=remedy
        )
    if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
        raise UserError("lengths", expected="whole numbers", found=str(given.dtype), remedy="give integers")
    if given.shape != batch:
        remedy = "give one length per sequence"
        raise UserError("lengths", expected=f"shape {list(batch)}", found=f"{list(given.shape)}", remedy=remedy)
    # T need not fit into a narrower type, and comparisons would take it for what it is there.
    given = given.to(torch.int64)
    if torch._C._functorch.is_batchedtensor(given):
        return given.to(device)
    for index in ((given < 0) | (given > steps)).nonzero().tolist()[:1]:
        where, found = f"lengths{index}", str(given[tuple(index)].item())
        remedy = "cut the length, or pad x to the longest sequence"
        raise UserError(where, expected=f"0 to T = {steps}", found=found, remedy=remedy)
    # None where nothing is padded: steps need no masks then, and cuDNN's LSTM can run, which takes no lengths.
    return None if bool((given == steps).all()) else given.to(device)


def unpack(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """The padded sequences [T, B, N] in the caller's order, and their lengths [B]."""
    return pad_packed_sequence(packed)


def pack_like(packed: PackedSequence, x: Tensor, lengths: Tensor) -> PackedSequence:
    """Padded sequences x [T, B, M] in the caller's order, packed as `packed` is."""
    # By the given indices, not by a new sort, which might order sequences of equal length in another way.
    if packed.sorted_indices is not None:
        x, lengths = x.index_select(1, packed.sorted_indices), lengths[packed.sorted_indices.to(lengths.device)]
    data = pack_padded_sequence(x, lengths).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
