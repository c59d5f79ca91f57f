"""Hand-designed optimisers: gradient descent, momentum, Adam, AdamW, NAdamW, Lion.

Each but Lion, which PyTorch does not have, equals its namesake in `torch.optim`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from l2lopt.core.errors import UserError, at_least_0
from l2lopt.core.layout import Layout
from l2lopt.core.precision import double
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, no_moments, zeros
from l2lopt.optimisers.rates import Rate, check_rate, per_row
from l2lopt.optimisers.schedules import check_schedule, warm_up_cosine


class SGD(Optimiser):
    """Gradient descent: u = −η g. Robbins and Monro 1951; `torch.optim.SGD`.

    Args:
        lr: η > 0, the rate.
    """

    def __init__(self, lr: Rate) -> None:
        super().__init__()
        self.lr = check_rate(lr)

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """No state."""
        return OptimiserState(layout, {}, {}, {})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η g."""
        return -per_row(self.lr, grads) * grads, state


class Momentum(Optimiser):
    """Gradient descent with momentum: v' = μ v + g; u = −η v'. Polyak 1964; `torch.optim.SGD(momentum=μ)`.

    Nesterov's looks one step ahead: u = −η (g + μ v'). Nesterov 1983; `torch.optim.SGD(momentum=μ, nesterov=True)`.

    Args:
        lr: η > 0, the rate.
        momentum: μ in [0, 1).
        nesterov: Whether it is Nesterov's.
    """

    def __init__(self, lr: Rate, momentum: float = 0.9, nesterov: bool = False) -> None:
        super().__init__()
        self.lr, self.momentum, self.nesterov = check_rate(lr), check_decay("momentum", momentum), nesterov

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The state v = 0."""
        return OptimiserState(layout, {"velocity": zeros(layout, batch, like)}, {}, {})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η v', or −η (g + μ v')."""
        velocity = self.momentum * state.coordinates["velocity"] + grads
        direction = grads + self.momentum * velocity if self.nesterov else velocity
        return -per_row(self.lr, grads) * direction, state._replace(coordinates={"velocity": velocity})


class AdamW(Optimiser):
    """Adam with decoupled weight decay, warm-up and cosine. Kingma and Ba 2015, Loshchilov and Hutter 2019.

    m' = β₁ m + (1 − β₁) g; v' = β₂ v + (1 − β₂) g²; u = −η_t (m̂ / (√v̂ + ε) + λ θ) with m̂ = m' / (1 − β₁ᵗ),
    v̂ = v' / (1 − β₂ᵗ) and η_t = η · `warm_up_cosine`. Equals `torch.optim.AdamW` under a `LambdaLR` of that
    multiplier.

    Args:
        lr: η > 0, the highest rate.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0.
        weight_decay: λ ≥ 0.
        warm_up: Updates of linear warm-up.
        total: Update at which the cosine reaches 0; None keeps the rate constant after the warm-up.

    Raises:
        UserError: For a value out of its range.
    """

    def __init__(
        self,
        lr: Rate,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        warm_up: int = 0,
        total: int | None = None,
    ) -> None:
        super().__init__()
        self.lr, self.eps = check_rate(lr), eps
        self.beta1, self.beta2 = check_decays("betas", betas)
        self.weight_decay, self.warm_up, self.total = weight_decay, warm_up, total
        at_least_0("adamw", eps=eps, weight_decay=weight_decay)
        check_schedule("adamw", "cosine", warm_up, total)

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The state m = v = 0."""
        return no_moments(layout, batch, like)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η_t (m̂ / (√v̂ + ε) + λ θ)."""
        step = state.shared["step"]
        m = self.beta1 * state.coordinates["m"] + (1 - self.beta1) * grads
        v = self.beta2 * state.coordinates["v"] + (1 - self.beta2) * grads.square()
        root = safe_sqrt(bias_corrected(v, self.beta2, step + 1))
        direction = bias_corrected(m, self.beta1, step + 1) / (root + self.eps)
        if self.weight_decay:
            direction = direction + self.weight_decay * params
        # The rate is multiplied here and not the update, as `Scheduled` does: one rounding differs, and with it results
        # that have been published.
        rate = -per_row(self.lr, grads)
        if self.warm_up or self.total is not None:
            rate = rate * warm_up_cosine(step, self.warm_up, self.total).to(grads.dtype)
        return rate * direction, state._replace(coordinates={"m": m, "v": v}, shared={"step": step + 1})


def adam(lr: Rate, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8) -> AdamW:
    """Adam: `AdamW` without decay and at a constant rate. Equals `torch.optim.Adam`."""
    return AdamW(lr, betas, eps, weight_decay=0.0)


class NAdamW(Optimiser):
    """Adam with Nesterov's momentum and decoupled weight decay. Dozat 2016; `torch.optim.NAdam`.

    μ_t = β₁ (1 − ½·0.96^(ψ t)), M_t = μ₁ ⋯ μ_t; m' = β₁ m + (1 − β₁) g; v' = β₂ v + (1 − β₂) g²;
    u = −η ([μ_{t+1} m' / (1 − M_{t+1}) + (1 − μ_t) g / (1 − M_t)] / (√v̂ + ε) + λ θ) with v̂ = v' / (1 − β₂ᵗ).

    Equals `torch.optim.NAdam(decoupled_weight_decay=True)`.

    Args:
        lr: η > 0.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0.
        weight_decay: λ ≥ 0.
        momentum_decay: ψ ≥ 0.

    Raises:
        UserError: For a value out of its range.
    """

    def __init__(
        self,
        lr: Rate,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        momentum_decay: float = 0.004,
    ) -> None:
        super().__init__()
        self.lr, self.eps = check_rate(lr), eps
        self.beta1, self.beta2 = check_decays("nadamw: betas", betas)
        self.weight_decay, self.momentum_decay = weight_decay, momentum_decay
        at_least_0("nadamw", eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The state m = v = 0 and the product M = 1."""
        state = no_moments(layout, batch, like)
        product = double(torch.ones((), device=state.coordinates["m"].device))
        return state._replace(shared={**state.shared, "momentum_product": product})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η ([…] / (√v̂ + ε) + λ θ)."""
        step = state.shared["step"] + 1
        m = self.beta1 * state.coordinates["m"] + (1 - self.beta1) * grads
        v = self.beta2 * state.coordinates["v"] + (1 - self.beta2) * grads.square()
        now, after = self._momentum(step), self._momentum(step + 1)
        product = state.shared["momentum_product"] * now
        ahead = (after / (1 - product * after)).to(grads.dtype) * m
        root = safe_sqrt(bias_corrected(v, self.beta2, step)) + self.eps
        direction = (ahead + ((1 - now) / (1 - product)).to(grads.dtype) * grads) / root + self.weight_decay * params
        shared = {"step": step, "momentum_product": product}
        return -per_row(self.lr, grads) * direction, state._replace(coordinates={"m": m, "v": v}, shared=shared)

    def _momentum(self, step: Tensor) -> Tensor:
        """μ_t, float64."""
        return self.beta1 * (1 - 0.5 * 0.96 ** (self.momentum_decay * double(step)))


class Lion(Optimiser):
    """The sign of a momentum, with decoupled weight decay. Chen et al. 2023, arXiv:2302.06675.

    u = −η (sign(β₁ m + (1 − β₁) g) + λ θ); m' = β₂ m + (1 − β₂) g.

    Its rates are some 3 to 10 times smaller than AdamW's and its decay larger by as much.

    Args:
        lr: η > 0.
        betas: (β₁, β₂), each in [0, 1).
        weight_decay: λ ≥ 0.

    Raises:
        UserError: For a value out of its range.
    """

    def __init__(self, lr: Rate, betas: Sequence[float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__()
        self.lr, self.weight_decay = check_rate(lr), weight_decay
        self.beta1, self.beta2 = check_decays("lion: betas", betas)
        at_least_0("lion", weight_decay=weight_decay)

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The state m = 0."""
        return OptimiserState(layout, {"m": zeros(layout, batch, like)}, {}, {})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η (sign(β₁ m + (1 − β₁) g) + λ θ)."""
        m = state.coordinates["m"]
        direction = (self.beta1 * m + (1 - self.beta1) * grads).sign() + self.weight_decay * params
        m = self.beta2 * m + (1 - self.beta2) * grads
        return -per_row(self.lr, grads) * direction, state._replace(coordinates={"m": m})


def bias_corrected(mean: Tensor, beta: float, step: Tensor) -> Tensor:
    """A running mean over the weight its `step` terms have so far, 1 − βᵗ."""
    # In float64: for β near 1 and small t the difference 1 − βᵗ would lose digits in float32.
    return mean / (1 - beta ** double(step)).to(mean)


def safe_sqrt(x: Tensor) -> Tensor:
    """√x, with derivative 0 at 0: there the true one is infinite, and the gradient of a later loss would be NaN."""
    if not torch.is_grad_enabled():
        return x.sqrt()
    zero = x == 0
    # Two `where`: the inner one keeps √ away from 0, where an infinite derivative times 0 would be NaN.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def check_decays(name: str, values: Sequence[float]) -> tuple[float, float]:
    """Two numbers in [0, 1), as decay rates of running means are."""
    if not isinstance(values, Sequence) or len(values) != 2:
        found = str(list(values)) if isinstance(values, Sequence) else str(values)
        raise UserError(name, expected="two numbers", found=found, remedy="give both")
    return check_decay(name, values[0]), check_decay(name, values[1])


def check_decay(name: str, value: float) -> float:
    """A number in [0, 1), as the decay rate of a running mean is."""
    if not 0 <= value < 1:
        raise UserError(name, expected="a number in [0, 1)", found=str(value), remedy="change the value")
    return value
