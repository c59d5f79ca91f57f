"""Small rules that use what a contract allows and the library's own rules do not: test doubles for groups."""

import torch
from torch import Tensor, nn

from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser
from l2lopt.optimisers.inputs import Input


def _counts(layout, *names):
    return {name: layout.grouping(name).count for name in names}


class FactoredMoments(Optimiser):
    """An MLP per coordinate behind factored second moments with a learned decay, scaled by the tensor's mean square.

    v̂_ij = R_i C_j / mean(R), R and C running means of the rows' and columns' mean g²; o = MLP(g/√v̂, θ);
    u = s·o / RMS(o).
    """

    groupings = ("tensors", "rows", "columns")

    def __init__(self, hidden: int = 4, seed: int = 0, sees_params: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        inputs = 2 + sees_params
        self.sees_params = sees_params
        self.first = nn.Parameter(torch.randn(hidden, inputs, generator=draw))
        self.second = nn.Parameter(torch.randn(hidden, generator=draw))
        self.decay = nn.Parameter(torch.zeros(()))

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        like = torch.zeros(()) if like is None else like
        groups = {
            name: {"second_moment": like.new_zeros(*batch, count)}
            for name, count in _counts(layout, "rows", "columns").items()
        }
        step = torch.zeros((), dtype=torch.int64)
        return OptimiserState(layout, {"m": like.new_zeros(*batch, layout.size)}, groups, {"step": step})

    def update(self, grads, state, params, *, loss=None):
        layout, beta = state.layout, torch.sigmoid(self.decay)
        moments = {
            name: beta * state.groups[name]["second_moment"]
            + (1 - beta) * layout.grouping(name).mean("square", grads.square())
            for name in ("rows", "columns")
        }
        spread = {name: layout.grouping(name).spread(value) for name, value in moments.items()}
        overall = layout.tensors.spread(layout.tensors.mean("rows", spread["rows"]))
        scale = (spread["rows"] * spread["columns"] / (overall + 1e-12) + 1e-8).sqrt()
        m = 0.9 * state.coordinates["m"] + 0.1 * grads
        seen = [grads / scale, m / scale, *([params] if self.sees_params else [])]
        hidden = torch.tanh(torch.tensordot(self.first, torch.stack(seen), 1))
        out = torch.tensordot(self.second, hidden, 1)
        size = (layout.tensors.mean("output", out.square()) + 1e-12).sqrt()
        update = -0.05 * out / layout.tensors.spread(size)
        groups = {name: {"second_moment": value} for name, value in moments.items()}
        return update, OptimiserState(layout, {"m": m}, groups, {"step": state.shared["step"] + 1})


class Steered(Optimiser):
    """A GRU per tensor, fed with the tensor's mean square gradient, that steers an MLP per coordinate."""

    groupings = ("tensors",)

    def __init__(self, hidden: int = 3, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.gates = nn.Parameter(0.5 * torch.randn(3, hidden, hidden + 1, generator=draw))
        self.head = nn.Parameter(torch.randn(2, hidden, generator=draw))
        self.layer = nn.Parameter(torch.randn(4, 3, generator=draw))
        self.out = nn.Parameter(torch.randn(4, generator=draw))

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        like = torch.zeros(()) if like is None else like
        memory = like.new_zeros(self.gates.shape[1], *batch, layout.tensors.count)
        step = torch.zeros((), dtype=torch.int64)
        return OptimiserState(
            layout, {"m": like.new_zeros(*batch, layout.size)}, {"tensors": {"h": memory}}, {"step": step}
        )

    def update(self, grads, state, params, *, loss=None):
        tensors, memory = state.layout.tensors, state.groups["tensors"]
        square = tensors.mean("square", grads.square())

        def network():
            x = torch.cat([square.clamp(min=1e-12).log()[None], memory["h"]])
            z, r = (torch.sigmoid(torch.tensordot(gate, x, 1)) for gate in self.gates[:2])
            fresh = torch.tanh(torch.tensordot(self.gates[2], torch.cat([x[:1], r * memory["h"]]), 1))
            h = (1 - z) * memory["h"] + z * fresh
            return torch.tensordot(self.head, h, 1), {"h": h}

        controls, memory = tensors.controls("steer", network, memory)
        step, mix = (tensors.spread(control) for control in controls)
        m = 0.9 * state.coordinates["m"] + 0.1 * grads
        seen = torch.stack([grads, m, torch.tanh(mix) * params])
        out = torch.tensordot(self.out, torch.tanh(torch.tensordot(self.layer, seen, 1)), 1)
        update = -0.01 * step.exp() * out
        return update, OptimiserState(state.layout, {"m": m}, {"tensors": memory}, {"step": state.shared["step"] + 1})


class SteeredByPhi(Steered):
    """The network's input, a mean square, depends on φ, so that its adjoint would have to come through the network."""

    def update(self, grads, state, params, *, loss=None):
        return super().update(grads * self.out.square().mean(), state, params, loss=loss)


def orthogonalised(values: Tensor, layout: Layout) -> Tensor:
    """Five Newton-Schulz steps on each tensor's matrix view; vectors are divided by their length."""
    parts = []
    for part, shape in zip(layout.split(values), layout.shapes, strict=True):
        x = part.reshape(*part.shape[:-1], shape[0] if shape else 1, -1)
        x = x / (x.square().sum((-1, -2), keepdim=True).sqrt() + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        parts.append(x.flatten(-2))
    return torch.cat(parts, -1)


class Orthogonalised(Input):
    """The orthogonalised momentum, a function of whole tensors."""

    size = 1
    memory = ("m",)

    def __init__(self, beta: float = 0.9) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, step_inputs, memory):
        m = self.beta * memory["m"] + (1 - self.beta) * step_inputs.grads
        return step_inputs.layout.whole("orthogonalised", orthogonalised, m)[None], {"m": m}


class OwnMean(Optimiser):
    """Divides by each vector's root mean square without a word to the layout: what `blockwise` must refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.tensor(-3.0))

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        like = torch.zeros(()) if like is None else like
        return OptimiserState(layout, {"m": like.new_zeros(*batch, layout.size)}, {}, {})

    def update(self, grads, state, params, *, loss=None):
        m = 0.9 * state.coordinates["m"] + grads
        update = -self.log_rate.exp() * m / m.square().mean(-1, keepdim=True).sqrt()
        return update, state._replace(coordinates={"m": m})
