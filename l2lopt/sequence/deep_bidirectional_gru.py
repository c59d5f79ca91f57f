"""The deep bidirectional GRU (Adamson 2015, extending the deep bidirectional RNN of Irsoy and Cardie 2014)."""

from collections.abc import Mapping
from typing import Literal

from l2lopt import cells
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from l2lopt.sequence.stack import Stack


@checks_words
def deep_bidirectional_gru(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    *,
    bidirectional: bool = True,
    batch_first: bool = False,
    dropout: float = 0.0,
    weight_drop: Mapping[str, float] | None = None,
    activation: Literal["tanh", "relu"] = "tanh",
) -> Stack:
    """A bidirectional stack of GRUs over a plain recurrent layer; its state is h alone, [2L, B, M].

    Layer 1, with a bias: h_t = f(W x_t + V h_p + b), p = t − 1 forward and t + 1 backward. Layers i > 1, without
    biases and with separate matrices for the two directions below (the columns of `weight_x` side by side):
    z, r = σ(W_1 h→ + W_2 h← + V h_p), h̃ = f(W_1 h→ + W_2 h← + r∘(V h_p)), h_t = z∘h_p + (1−z)∘h̃, each gate with
    separate matrices. The output is that of the last layer alone; the paper's softmax(U_1 h→ + U_2 h← + c) over it is a
    linear layer 2M → classes. The paper prints h for h̃ in eq. 8 and another state than t + 1 in eq. 7.

    Args:
        input_size: N.
        hidden_size: M, in each direction.
        num_layers: L, at least 1; the first layer is the plain one.
        bidirectional: Whether there are backward directions; without them each layer reads M features of the one below,
            the comparison that shows what the backward directions are worth.
        batch_first: Whether the batch is the first axis of inputs and outputs.
        dropout: Probability p in [0, 1) of dropout between layers.
        weight_drop: Weight of the cells → probability p in [0, 1) of weight drop, see `Stack`.
        activation: Function f of the first layer and of the candidates: "tanh", or "relu" as Irsoy and Cardie have it,
            whose states have no upper bound.

    Raises:
        UserError: For numbers out of range, and another activation.
    """
    if num_layers < 1:
        raise UserError("num_layers", expected="at least 1", found=str(num_layers), remedy="give a positive number")
    gru = {"update": "kept", "reset": "after", "biases": "none", "activation": activation}
    directions = 1 + bidirectional
    layers = [[cells.make("rnn", input_size, hidden_size, activation=activation) for _ in range(directions)]]
    for _ in range(num_layers - 1):
        layers.append([cells.make("gru", directions * hidden_size, hidden_size, **gru) for _ in range(directions)])
    return Stack(layers, dropout=dropout, weight_drop=weight_drop, batch_first=batch_first)
