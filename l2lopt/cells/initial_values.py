"""Initial values as published for the language models of Kuo et al. (IJCNN 2020).

They belong to a training recipe, not to the equations. Parameters that are not named here keep the values of the cells,
U(±1/√M); the biases of `gate_bias` start at ±1 in any case.
"""

import torch
from torch import nn

from l2lopt.cells.cell import Cell
from l2lopt.cells.stacked import Stacked

RAW = {"alpha": 2.0, "beta": 1.0, "kappa": -4.0}
"""Before the sigmoid: α = 0.881, β = 0.731, κ = 0.018."""


def init_as_published(cell: Cell) -> Cell:
    """Sets α, β and κ to the published values, and draws a FastGRNN's matrices from N(0, 0.1²); gives the cell back."""
    # By the last part of the name: β is `beta` in a FastGRNN, but `core.beta` behind a highway.
    parameters = [(name.rpartition(".")[-1], parameter) for name, parameter in cell.named_parameters()]
    with torch.no_grad():
        for name, parameter in parameters:
            if name in RAW:
                parameter.fill_(RAW[name])
        for part in cell.cells() if isinstance(cell, Stacked) else [cell]:
            if not any(name.rpartition(".")[-1] == "beta" for name, _ in part.named_parameters()):
                continue  # no other cell than a FastGRNN, or what has it as its core, has a β
            for parameter in part.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.1)
    return cell
