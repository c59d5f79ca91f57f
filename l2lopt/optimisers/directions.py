"""Directions of an update: what an optimiser steps along, and what a learned rule may see.

Each is an `Input` of one feature, so that hand-designed optimisers, learned rules and their inputs share it.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import above_0
from l2lopt.core.kinds import stack_of
from l2lopt.core.layout import Layout, Params
from l2lopt.optimisers.hand_designed import bias_corrected, check_decay, check_decays
from l2lopt.optimisers.inputs import Input, StepInputs, moments

Coefficients = Sequence[tuple[float, float, float]]
"""(a, b, c) of each Newton-Schulz step."""

COEFFICIENTS: Mapping[str, Coefficients] = {
    "keller-jordan": [(3.4445, -4.7750, 2.0315)] * 5,
    "you-jiacheng": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    "polar-express": [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ],
}
"""Name → (a, b, c) of each step.

"keller-jordan": Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon), also Moonlight's (Liu et al. 2025,
arXiv:2502.16982) and PyTorch's: steep at 0 and no closer to 1 than 0.7 to 1.2. "you-jiacheng": other coefficients at
each step, nearer to 1 (modded-nanogpt, 2025). "polar-express": the best polynomials step by step for singular values
from 0.001 of the largest (Amsel et al. 2025, arXiv:2505.16932), with a safety factor of 1.02.
"""
PRECISIONS: Mapping[str, torch.dtype | None] = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""Name → dtype of the products."""
EPS = 1e-7
LARGE = 128
"""Rows and columns from which a matrix's products are quicker in bfloat16 on a CPU that multiplies it."""


def newton_schulz(
    matrices: Tensor, coefficients: Coefficients = COEFFICIENTS["keller-jordan"], eps: float = EPS
) -> Tensor:
    """Matrices U S Vᵀ with their singular values brought near 1: about U Vᵀ, the polar factor.

    X₀ = M / max(‖M‖, ε) in the Frobenius norm; X ← a X + (b A + c A²) X with A = X Xᵀ. A matrix of zeros stays so.

    Args:
        matrices: [..., rows, columns], any number at once.
        coefficients: (a, b, c) of each step.
        eps: ε > 0.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # A is then the smaller of the two products
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    # The clamp is inside the root, which has no finite derivative at 0.
    x = x / x.square().sum((-2, -1), keepdim=True).clamp(min=eps**2).sqrt()
    for a, b, c in coefficients:
        gram = x @ x.mT
        # One call each for b A + c A² and a X + (…) X: these passes over memory are what small matrices cost.
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(shape)
    return x.mT if tall else x


def orthogonalised(
    values: Tensor,
    layout: Layout,
    coefficients: Coefficients = COEFFICIENTS["keller-jordan"],
    precision: torch.dtype | None = None,
) -> Tensor:
    """`newton_schulz` of every matrix of the layout, and 0 at all other coordinates.

    A tensor of more than two axes is its matrix view [shape[0], the rest], as a convolution is [out, in·k·k]; one that
    is a stack of matrices (`Role.split`) is orthogonalised matrix by matrix. Those of one shape, transposed or not,
    are multiplied as one batch.

    Args:
        values: [..., n].
        layout: Layout of whole tensors.
        coefficients: (a, b, c) of each step.
        precision: Dtype of the products; None chooses as `fast_precision` does.
    """
    batch = values.shape[:-1]
    parts = list(layout.split(values))
    found: list[Tensor | None] = [None] * len(parts)
    alike: dict[tuple[int, int], list[int]] = {}
    shapes = [stack_of(shape, role.split) for shape, role in zip(layout.shapes, layout.roles, strict=True)]
    for index, role in enumerate(layout.roles):
        if role.kind == "matrix":
            _, rows, columns = shapes[index]
            alike.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    for (smaller, _), indices in alike.items():
        dtype = precision or fast_precision(values, smaller)
        wide = [_wide(parts[index].reshape(*batch, *shapes[index]).to(dtype)) for index in indices]
        counts = [piece.shape[-3] for piece in wide]
        results = newton_schulz(torch.cat(wide, -3), coefficients).to(values.dtype).split(counts, -3)
        for index, result in zip(indices, results, strict=True):
            _, rows, columns = shapes[index]
            found[index] = (result.mT if rows > columns else result).reshape(parts[index].shape)
    filled = [torch.zeros_like(part) if one is None else one for part, one in zip(parts, found, strict=True)]
    return torch.cat([values[..., :0], *filled], -1)


def orthogonalised_whole(
    values: Tensor, layout: Layout, coefficients: Coefficients, precision: torch.dtype | None
) -> Tensor:
    """`orthogonalised`, also for a layout of parts of tensors: in a slice of the coordinates or across processes.

    Args:
        values: [..., n].
        layout: Layout of the values; see `Layout.whole`.
        coefficients: (a, b, c) of each step.
        precision: Dtype of the products; None chooses as `fast_precision` does.

    Raises:
        UserError: If the layout is a slice that nothing is recorded for, or its tensors cannot be gathered.
    """
    function = partial(orthogonalised, coefficients=coefficients, precision=precision)
    return layout.whole("orthogonalised", function, values, "matrix")


def fast_precision(values: Tensor, smaller: int) -> torch.dtype:
    """The dtype in which the products of a matrix are quickest: bfloat16 in place of float32, or the values' own.

    bfloat16 on a GPU, and for matrices of at least `LARGE` rows and columns on a CPU with instructions for it. It goes
    by the matrix alone, so that runs side by side are computed as each by itself.

    Args:
        values: The matrices' coordinates.
        smaller: Number of rows or columns, whichever is smaller.
    """
    fast = values.is_cuda or (values.device.type == "cpu" and smaller >= LARGE and _cpu_multiplies_bfloat16())
    return torch.bfloat16 if fast and values.dtype == torch.float32 else values.dtype


@cache
def _cpu_multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16; without them they are emulated, slowly."""
    checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(check is not None and check() for check in checks)


class Momentum(Input):
    """The bias-corrected running mean of the gradient: m' = β m + (1 − β) g; m̂ = m' / (1 − βᵗ).

    Args:
        beta: β in [0, 1).
    """

    size = 1
    memory = ("m",)

    def __init__(self, beta: float = 0.9) -> None:
        super().__init__()
        self.beta = check_decay("momentum: beta", beta)

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """m̂."""
        m = self.beta * memory["m"] + (1 - self.beta) * step_inputs.grads
        return bias_corrected(m, self.beta, step_inputs.step)[None], {"m": m}


class Sign(Input):
    """Lion's direction: sign(β₁ m + (1 − β₁) g); m' = β₂ m + (1 − β₂) g (Chen et al. 2023, arXiv:2302.06675).

    Args:
        betas: (β₁, β₂), each in [0, 1).
    """

    size = 1
    memory = ("m",)

    def __init__(self, betas: Sequence[float] = (0.9, 0.99)) -> None:
        super().__init__()
        self.beta1, self.beta2 = check_decays("sign: betas", betas)

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """sign(β₁ m + (1 − β₁) g)."""
        m, g = memory["m"], step_inputs.grads
        direction = (self.beta1 * m + (1 - self.beta1) * g).sign()
        return direction[None], {"m": self.beta2 * m + (1 - self.beta2) * g}


class Adam(Input):
    """Adam's direction m̂ / (√v̂ + ε), m̂ and v̂ the bias-corrected running means of g and g² (Kingma and Ba 2015).

    Args:
        betas: Decay rates of the two running means, each in [0, 1).
        eps: ε > 0.
    """

    size = 1
    memory = ("m", "v")

    def __init__(self, betas: Sequence[float] = (0.9, 0.99), eps: float = 1e-8) -> None:
        super().__init__()
        self.beta1, self.beta2 = check_decays("adam: betas", betas)
        above_0("adam", eps=eps)
        self.eps = eps

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """m̂ / (√v̂ + ε)."""
        mean, root, memory = moments(step_inputs, memory, self.beta1, self.beta2)
        return (mean / (root + self.eps))[None], memory


class Orthogonalised(Input):
    """The orthogonalised Nesterov momentum on matrices, Adam's direction elsewhere (Jordan et al. 2024).

    m' = β₁ m + (1 − β₁) g. On matrices (`Layout.roles`) NS(β₁ m' + (1 − β₁) g), `newton_schulz` of each; on vectors,
    embeddings and heads `Adam`'s direction, of the same running mean. On matrices v stays 0.

    In a slice of the coordinates the orthogonalised part is the recorded one, as a constant.

    Args:
        betas: (β₁, β₂), each in [0, 1); β₂ serves where there is no matrix.
        eps: ε > 0 of Adam's direction.
        coefficients: Any of `COEFFICIENTS`.
        precision: Dtype of the products: "float32", "bfloat16", or "auto" for `fast_precision`, with which the step in
            place on a CPU also takes quicker products for wide matrices in float32.
    """

    size = 1
    memory = ("m", "v")

    @checks_words
    def __init__(
        self,
        betas: Sequence[float] = (0.9, 0.99),
        eps: float = 1e-8,
        coefficients: Literal["keller-jordan", "you-jiacheng", "polar-express"] = "keller-jordan",
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        super().__init__()
        self.adam = Adam(betas, eps)
        self.coefficients, self.precision = COEFFICIENTS[coefficients], PRECISIONS[precision]

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """NS of the Nesterov momentum on matrices, m̂ / (√v̂ + ε) elsewhere."""
        adam, after = self.adam(step_inputs, memory)
        nesterov = self.adam.beta1 * after["m"] + (1 - self.adam.beta1) * step_inputs.grads
        layout = step_inputs.layout
        found = orthogonalised_whole(nesterov, layout, self.coefficients, self.precision)
        matrix = is_matrix(layout, nesterov)
        return torch.where(matrix, found, adam[0])[None], {**after, "v": torch.where(matrix, 0.0, after["v"])}


def is_matrix(layout: Layout, like: Tensor) -> Tensor:
    """Whether each coordinate is one of a matrix, [n]."""
    matrices = [float(role.kind == "matrix") for role in layout.roles]
    return layout.tensors.spread(layout.tensors.each(matrices, like)) > 0


def _wide(matrices: Tensor) -> Tensor:
    """Matrices [..., rows, columns] with at most as many rows as columns."""
    return matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices


DIRECTIONS: Mapping[str, type[Input]] = {
    "momentum": Momentum,
    "sign": Sign,
    "adam": Adam,
    "orthogonalised": Orthogonalised,
}
