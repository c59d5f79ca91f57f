"""PyTorch's own LSTM kernel (cuDNN's on a GPU, oneDNN's on a CPU) on the weights of our cell."""

import torch
from torch import Tensor

from l2lopt.cells import LSTM, Cell, CellState


def run(
    cell: Cell, x: Tensor, state: CellState, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, CellState]:
    """`loop.run` for an `LSTM` without lengths, with any weights, masked ones included.

    Our gates have PyTorch's order. PyTorch has two biases: the second is zero for a cell with one.
    """
    assert isinstance(cell, LSTM)
    assert lengths is None
    batch = x.shape[2:]
    rows = x.movedim(1, -1).reshape(x.shape[0], -1, x.shape[1])
    h, c = (state[name].movedim(0, -1).reshape(1, -1, cell.hidden_size) for name in ("h", "c"))
    second = torch.zeros_like(cell.bias) if cell.bias_h is None else cell.bias_h
    weights = [cell.weight_x, cell.weight_h, cell.bias, second]
    # The kernel has no single reversed direction, so time is flipped on both sides of it.
    outputs, h, c = torch.lstm(
        rows.flip(0) if reverse else rows,
        # cuDNN refuses states that are not contiguous, and `movedim` gives views.
        (h.contiguous(), c.contiguous()),
        weights,
        has_biases=True,
        num_layers=1,
        dropout=0.0,
        train=torch.is_grad_enabled(),
        bidirectional=False,
        batch_first=False,
    )
    outputs = (outputs.flip(0) if reverse else outputs).reshape(x.shape[0], *batch, cell.hidden_size)
    final = {"h": h.reshape(*batch, -1).movedim(-1, 0), "c": c.reshape(*batch, -1).movedim(-1, 0)}
    return outputs.movedim(-1, 1), final
