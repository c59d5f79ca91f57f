"""Cells of the tests' own, PyTorch's layers in float64, and pairs of inputs and states."""

from itertools import product

import pytest
import torch
from implementations import normal, seeded
from torch import nn

from l2lopt import sequence
from l2lopt.cells import Cell, CellState
from l2lopt.cells.cell import affine, uniform, zeros

N, M = 3, 4
each_shape = pytest.mark.parametrize(
    ("layers", "bidirectional"), list(product((1, 2), (False, True))), ids=["1", "1 both ways", "2", "2 both ways"]
)


class Own(Cell):
    """A cell of the tests' own: the contract is two sizes and two methods."""

    def __init__(self, input_size, hidden_size):
        nn.Module.__init__(self)
        self.input_size, self.hidden_size = input_size, hidden_size

    def initial_state(self, x):
        return {"h": zeros(self.hidden_size, x)}


class Elman(Own):
    """h' = tanh(W x + U h + b)."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.weight_x = uniform(hidden_size, hidden_size, input_size)
        self.weight_h = uniform(hidden_size, hidden_size, hidden_size)
        self.bias = uniform(hidden_size, hidden_size)

    def forward(self, x, state):
        h = torch.tanh(affine(self.bias, (self.weight_x, x), (self.weight_h, state["h"])))
        return h, {"h": h}


class GRU(Own):
    """`torch.nn.GRUCell`: z kept, reset after the product, two biases."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.weight_x = uniform(hidden_size, 3 * hidden_size, input_size)
        self.weight_h = uniform(hidden_size, 3 * hidden_size, hidden_size)
        self.bias_x = uniform(hidden_size, 3 * hidden_size)
        self.bias_h = uniform(hidden_size, 3 * hidden_size)

    def forward(self, x, state):
        r, z, a = affine(self.bias_x, (self.weight_x, x)).chunk(3)
        r_h, z_h, a_h = affine(self.bias_h, (self.weight_h, state["h"])).chunk(3)
        z = torch.sigmoid(z + z_h)
        h = z * state["h"] + (1 - z) * torch.tanh(a + torch.sigmoid(r + r_h) * a_h)
        return h, {"h": h}


class Delayed(Own):
    """h' = tanh(W x_{t−1} + w h): a state of an odd form, with the last input in it (size N), which starts at 1."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.weight = uniform(hidden_size, hidden_size, input_size)
        self.scale = uniform(hidden_size, hidden_size)

    def initial_state(self, x):
        return {"last": torch.ones_like(x), "h": zeros(self.hidden_size, x)}

    def forward(self, x, state) -> tuple[torch.Tensor, CellState]:
        h = torch.tanh(
            affine(None, (self.weight, state["last"])) + (self.scale * state["h"].movedim(0, -1)).movedim(-1, 0)
        )
        return h, {"last": x, "h": h}


def grid(cell, layers=1, bidirectional=False, seed=0, **options):
    """A stack of the tests' own cells with seeded weights in float64."""
    width = M * (1 + bidirectional)
    cells = [[cell(width if i else N, M) for _ in range(1 + bidirectional)] for i in range(layers)]
    return seeded(sequence.Stack(cells, **options), seed)


def torch_layer(kind, layers=1, bidirectional=False, seed=0, **options):
    """PyTorch's layer with seeded weights in float64."""
    return seeded(kind(N, M, layers, bidirectional=bidirectional, **options), seed)


def lstm_state(layers, bidirectional, batch):
    """(h, c) of a stack of LSTMs."""
    shape = (layers * (1 + bidirectional), *batch, M)
    return normal(*shape, seed=7), normal(*shape, seed=8)


class Pair(Own):
    """h' = tanh(W x + U (h of the other side)): columns come in pairs, x [N, 2, ...]."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.weight_x = uniform(hidden_size, hidden_size, input_size)
        self.weight_h = uniform(hidden_size, hidden_size, hidden_size)

    def forward(self, x, state):
        assert x.shape[1] == 2
        h = torch.tanh(affine(None, (self.weight_x, x), (self.weight_h, state["h"].flip(1))))
        return h, {"h": h}
