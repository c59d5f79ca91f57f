"""Initial values of the authors' language models (Kuo et al., IJCNN 2020): a recipe's choice, no part of the equations.

What is not named here stays as the cells have it, U(±1/√M). The biases of `gate_bias` start at ±1 by themselves.
"""

import torch
from torch import nn

from l2lopt.cells.cell import Cell

RAW = {"alpha": 2.0, "beta": 1.0, "kappa": -4.0}
"""Before the sigmoid: α = 0.881, β = 0.731, κ = 0.018."""


def authors(cell: Cell) -> Cell:
    """The cell itself, α, β and κ set to the authors' values and a FastGRNN's matrices drawn from N(0, 0.1²)."""
    parameters = {name.rpartition(".")[-1]: parameter for name, parameter in cell.named_parameters()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in RAW:
                parameter.fill_(RAW[name])
        if "beta" in parameters:
            for parameter in cell.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.1)
    return cell
