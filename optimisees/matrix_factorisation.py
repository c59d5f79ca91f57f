"""Matrix factorisation: a matrix of low rank from some of its entries, with noise on them, as an optimisee."""

from typing import Literal

import torch
from torch import Tensor, nn

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0, at_least_0
from l2lopt.core.seeding import generator
from optimisees.data.datasets import InMemory
from optimisees.module import ModuleOptimisee


class Factors(nn.Module):
    """Places (i, j) [batch, 2] to (U Vᵀ)ᵢⱼ [batch]; U and V from N(0, scale²/√k).

    Args:
        rows: Number of rows.
        columns: Number of columns.
        rank: k, the number of columns of U and V.
        scale: Square root of the size of the first entries of U Vᵀ.
    """

    def __init__(self, rows: int, columns: int, rank: int, scale: float) -> None:
        super().__init__()
        deviation = scale * rank**-0.25
        self.left = nn.Parameter(deviation * torch.randn(rows, rank))
        self.right = nn.Parameter(deviation * torch.randn(columns, rank))

    def forward(self, places: Tensor) -> Tensor:
        """The entries at these places."""
        left = nn.functional.embedding(places[..., 0], self.left)
        return (left * nn.functional.embedding(places[..., 1], self.right)).sum(-1)


@checks_words
def matrix_factorisation(
    rows: int = 60,
    columns: int = 40,
    true_rank: int = 3,
    rank: int = 5,
    noise: float = 0.1,
    observed: float = 0.5,
    scale: float = 0.3,
    problem: int = 0,
    batch_size: int = 128,
    heldout: float = 0.2,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
) -> ModuleOptimisee:
    """‖(U Vᵀ − M)ᵢⱼ‖² over entries of M = A Bᵀ/√r + noise: mean squared error; 500 parameters as it stands.

    A and B are from N(0, 1), so that the entries of A Bᵀ/√r have a variance of 1; noise from N(0, `noise`²) is on every
    entry, and so a perfect recovery has a loss of noise² on the test entries. A sample is an entry: `train` are the
    observed ones, which each seed divides into `inner` and `heldout`, `test` are all others. Not convex: U and V may
    be turned together, and start near the saddle point at 0 (Koren et al. 2009; Saxe et al. 2014).

    Args:
        rows: Rows of M.
        columns: Columns of M.
        true_rank: r, the rank of M without noise.
        rank: k, the columns of U and V; more than r leaves room to fit the noise.
        noise: Standard deviation of the noise.
        observed: Share of the entries that are trained on.
        scale: Size of the initial factors; entries of U Vᵀ are of the size of its square.
        problem: Seed of M and of which entries are observed; all runs share them.
        batch_size: Entries a step.
        heldout: Share of the observed entries held out of the inner steps of meta-training.
        dtype: Data type of entries and parameters.
        device: Device of entries and parameters.

    Raises:
        UserError: For values out of range.
    """
    where = "matrix-factorisation"
    above_0(where, rows=rows, columns=columns, true_rank=true_rank, rank=rank, scale=scale)
    at_least_0(where, noise=noise)
    known = round(observed * rows * columns) if 0 < observed < 1 else 0
    if not 0 < known < rows * columns:
        remedy = "change the value"
        raise UserError(f"{where}: observed", expected="a share in (0, 1)", found=str(observed), remedy=remedy)
    kind, draw = getattr(torch, dtype), generator(where, problem)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    matrix = normal(rows, true_rank) @ normal(true_rank, columns) / true_rank**0.5 + noise * normal(rows, columns)
    order = torch.randperm(rows * columns, generator=draw)
    places = torch.stack([order // columns, order % columns], 1)
    values = matrix.flatten()[order].to(kind)
    return ModuleOptimisee(
        lambda: Factors(rows, columns, rank, scale).to(kind),
        nn.functional.mse_loss,
        InMemory(places[:known], values[:known], places[known:], values[known:]),
        batch_size,
        heldout,
        device,
    )
