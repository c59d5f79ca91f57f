"""The contract of a recurrent cell: one time step, features on the first axis."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from l2lopt.core.errors import UserError

CellState: TypeAlias = dict[str, Tensor]
"""Name → [size, ...]: what the cell hands from one time step to the next."""


def check_sizes(input_size: int, hidden_size: int) -> None:
    """Refuses sizes below 1, before anything is divided by them."""
    for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
        if size < 1:
            raise UserError(f"cell: {name}", expected="at least 1", found=str(size), remedy="give a positive size")


class Cell(nn.Module, ABC):
    """One time step of a recurrent network, the same function for every column.

    Features lie on the first axis; the axes that follow (batch, coordinates) keep their shape, and every column is
    computed independently of the others.

    A new cell is a subclass with a `forward`, and one line in `cells.CELLS`: tests, layers, language models and learned
    optimisers then take it by its name. Hand-derived passes and fused steps are optional.

    Args:
        input_size: N, features of the input.
        hidden_size: M, features of the output.
        state: name → size of each part of the state.
    """

    @property
    def recurrent_weights(self) -> tuple[str, ...]:
        """Names of the parameters that act on the state: those that weight drop masks in a language model.

        A cell names its own in the class, `recurrent_weights = ("weight_h",)`; none by default.
        """
        return ()

    def __init__(self, input_size: int, hidden_size: int, state: Mapping[str, int]) -> None:
        super().__init__()
        check_sizes(input_size, hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.state_sizes = dict(state)

    def initial_state(self, x: Tensor) -> CellState:
        """The state before the first step: zeros, with the columns, dtype and device of x [N, ...]."""
        self.check(x)
        return {name: zeros(size, x) for name, size in self.state_sizes.items()}

    @abstractmethod
    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One time step, without side effects.

        Args:
            x: Input, [N, ...].
            state: State before the step, name → [size, ...].

        Returns:
            The output [M, ...] and the state after the step.

        Raises:
            UserError: For shapes that do not fit.
        """

    def extra_repr(self) -> str:
        """N and M, which `print` shows."""
        return f"{self.input_size}, {self.hidden_size}"

    def check(self, x: Tensor, state: CellState | None = None) -> None:
        """Refuses an x that is not [N, ...], and a state whose columns are not those of x.

        Only shapes are compared, so the check costs no device synchronisation and works under `vmap` and tracing.
        """
        if not x.dim() or x.shape[0] != self.input_size:
            found, remedy = f"shape {tuple(x.shape)}", "put the features first: x.movedim(-1, 0) if they are last"
            raise UserError("cell: x", expected=f"{self.input_size} features on axis 0", found=found, remedy=remedy)
        if state is None:
            return
        remedy = "start with the cell's initial_state(x)"
        given: object = state  # whatever a caller takes for a state, such as PyTorch's pair
        if not isinstance(given, Mapping):
            expected, found = f"a mapping of {', '.join(self.state_sizes)}", f"a {type(given).__name__}"
            raise UserError("cell: state", expected=expected, found=found, remedy=remedy)
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        wanted = {name: (size, *x.shape[1:]) for name, size in self.state_sizes.items()}
        # One by one: `torch.compile` cannot compare dictionaries of sizes that are symbols.
        if shapes.keys() != wanted.keys() or any(shapes[name] != shape for name, shape in wanted.items()):
            raise UserError("cell: state", expected=f"shapes {wanted}", found=str(shapes), remedy=remedy)


def same_size(name: str, input_size: int, hidden_size: int) -> None:
    """Refuses N ≠ M for a cell that adds inputs and states element by element."""
    if input_size != hidden_size:
        raise UserError(
            f"cell {name!r}",
            expected="input_size = hidden_size",
            found=f"input_size {input_size} and hidden_size {hidden_size}",
            remedy="make them equal, for instance by a linear layer in front",
        )


def affine(bias: Tensor | None, *products: tuple[Tensor, Tensor]) -> Tensor:
    """Σ W x (+ b) over pairs of W [M, N] and x [N, ...]: [M, ...]."""
    # `addmm` adds each product to the sum within the BLAS call, which saves a pass over [M, columns] per product.
    shape = products[0][1].shape[1:]
    total = None if bias is None else bias[:, None]
    for weight, x in products:
        # `addmm` knows matrices only, so all axes of columns become one.
        columns = x.reshape(x.shape[0], -1)
        total = weight @ columns if total is None else torch.addmm(total, weight, columns)
    assert total is not None
    return total.view(total.shape[0], *shape)


def column(vector: Tensor, x: Tensor) -> Tensor:
    """`vector` [M] as [M, 1, ...], which broadcasts against x [M, ...]."""
    return vector.reshape(-1, *(1,) * (x.dim() - 1))


def shifted(x: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of x [M, ...] and a bias [M]; x itself without a bias."""
    return x if bias is None else x + column(bias, x)


def activated(name: str, z: Tensor) -> Tensor:
    """The value of an activation by its name: "tanh"; "relu"; "linear", z itself."""
    return torch.tanh(z) if name == "tanh" else torch.relu(z) if name == "relu" else z


def zeros(size: int, x: Tensor) -> Tensor:
    """A state of zeros [size, ...] for the columns of x [N, ...]."""
    return x.new_zeros(size, *x.shape[1:])


def uniform(size: int, *shape: int) -> nn.Parameter:
    """A parameter drawn from U(±1/√size), PyTorch's initial values for recurrent layers."""
    return nn.Parameter(torch.empty(shape).uniform_(-(size**-0.5), size**-0.5))


def constant(present: bool, value: float, size: int) -> nn.Parameter | None:
    """A trainable bias [size] that starts at `value`, or none."""
    return nn.Parameter(torch.full((size,), value)) if present else None
