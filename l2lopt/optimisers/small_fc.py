"""The small fully connected learned optimiser of Metz et al., whose weights others have published.

Source: Metz, Freeman, Harrison, Maheswaranathan, Sohl-Dickstein, Practical tradeoffs between memory, compute, and
performance in learned optimizers, CoLLAs 2022, arXiv:2203.11860; `adafac_mlp_lopt` of learned_optimization.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from l2lopt.core.errors import above_0, few
from l2lopt.core.layout import Layout
from l2lopt.core.seeding import seeded
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, zero_step, zeros
from l2lopt.optimisers.rates import Rate, check_rate, per_row

MOMENTA, SQUARES, FACTORED = (0.9, 0.99, 0.999), (0.999,), (0.9, 0.99, 0.999)
"""Initial decays of the running means of g, of g², and of the means of g² over rows and columns."""
TIMES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Time scales τ of the inputs tanh(t/τ − 1)."""
FEATURES = 28
"""Number of inputs per coordinate, beside those of time."""
REST, PATIENCE, NEVER = 0.9, 20, 10_000
"""Factor of the update for each step without a gradient after so many of them; steps that stand for all so far."""


class SmallFC(Optimiser):
    """An MLP per coordinate on momenta and factored second moments. Metz et al. 2022, `small_fc_lopt`.

    Running means with decays β: m (three) of g, v of g², and per matrix R and C (three each) of the means of g² over
    its longest axis and over its second longest, as in Adafactor, C̄ the mean of R over the second longest. Inputs:

    - g, θ, m, v, m/√(v + 10⁻⁶), 1/√(v + 10⁻⁶), R, C, 1/√(R + 10⁻⁸), 1/√(C + 10⁻⁸);
    - f g and f m, f = (R/(C̄ + 10⁻⁹))^−½ · C^−½, both powers of at least 10⁻⁹; of a vector R = C is the running mean of
      g² itself, and f is 1/√(R + 10⁻⁹) for g and 1/√(R + 10⁻⁶) for m;
    - each of these over its root mean square in the tensor: x/√(10⁻⁵ + mean x²);
    - tanh(t/τ − 1) for the eleven τ of `TIMES`, t the number of updates so far.

    (d, a) = MLP(inputs), with ReLU; u = −η s d e^{c a}. The decays are meta-learned as well: β = 1 − (1 − β₀) e^{10 b},
    within [0, 1].

    The published rule moves coordinates without a gradient too. Here an update whose gradient has been 0 for more than
    20 steps fades by 0.9 a step, and is 0 if it has always been 0; `rests=False` is the published rule to the letter.

    The root mean square of θ depends on itself by way of the updates, so `Blockwise` takes it as a constant; all else
    in its meta-gradient is the tape's of first order.

    R, C and C̄ are kept per coordinate, so that tensors of any shape can be cut into slices: 56 bytes of state a
    parameter in float32.

    Args:
        hidden_size: Units of a hidden layer.
        hidden_layers: Hidden layers, at least 1.
        step_scale: s > 0, `step_mult` of the source.
        exponent_scale: c > 0, `exp_mult` of the source.
        lr: η > 0.
        rests: Whether coordinates without a gradient come to rest.
        seed: Seed of the initial values of φ.

    Raises:
        UserError: For a value out of its range.

    Example:
        >>> import torch, l2lopt
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = l2lopt.LearnedOptimizer(model.parameters(), {"name": "small-fc", "step_scale": 0.01})
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> _ = optimizer.step()
    """

    groupings = ("tensors",)

    def __init__(
        self,
        hidden_size: int = 4,
        hidden_layers: int = 2,
        step_scale: float = 0.001,
        exponent_scale: float = 0.001,
        lr: Rate = 1.0,
        rests: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        few("small-fc", hidden_size=hidden_size, hidden_layers=hidden_layers)
        above_0("small-fc", step_scale=step_scale, exponent_scale=exponent_scale)
        self.step_scale, self.exponent_scale = step_scale, exponent_scale
        self.lr, self.rests = check_rate(lr), rests
        sizes = [FEATURES + len(TIMES), *[hidden_size] * hidden_layers, 2]
        with seeded(seed):
            self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
            for layer in self._linear():
                deviation = layer.in_features**-0.5
                nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
                nn.init.zeros_(layer.bias)
        self.momenta_decay = nn.Parameter(torch.zeros(len(MOMENTA)))
        self.squares_decay = nn.Parameter(torch.zeros(len(SQUARES)))
        self.factored_decay = nn.Parameter(torch.zeros(len(FACTORED)))

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The running means at 0."""
        one = zeros(layout, batch, like)
        three = one.new_zeros(3, *one.shape)
        coordinates = {"m": three, "v": one, "row": three.clone(), "column": three.clone(), "both": three.clone()}
        coordinates |= {"idle": torch.full_like(one, NEVER)} if self.rests else {}
        step = zero_step(one)
        return OptimiserState(layout, coordinates, {}, {"step": step, "skipped": step.new_zeros(tuple(batch))})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η s d e^{c a}; see the class."""
        layout, old, step = state.layout, state.coordinates, state.shared["step"]
        good = grads.square().isfinite()
        g = grads.where(good, 0.0)
        new = self._accumulated(g, old, layout)
        # θ has a mean of its own: blockwise takes a mean that depends on θ as a constant, and all of it.
        features = _normalised("features", self._features(g, new, layout), layout)
        theta = _normalised("parameters", params[None], layout)
        # In the source's order.
        direction, magnitude = self._network(torch.cat([features[:1], theta, features[1:]]), step)
        update = self.step_scale * direction * (self.exponent_scale * magnitude).exp()
        if self.rests:
            new["idle"] = torch.where(g != 0, 0.0, old["idle"] + 1)
            update = update * REST ** (new["idle"] - PATIENCE).clamp(min=0)
        kept = {key: torch.where(good, new[key], value) for key, value in old.items()}
        shared = {"step": step + 1, "skipped": state.shared["skipped"] + (~good).sum(-1)}
        return (-per_row(self.lr, grads) * update).where(good, 0.0), OptimiserState(layout, kept, {}, shared)

    def _accumulated(self, g: Tensor, old: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """The running means after this step."""
        square = g.square().clamp(max=1e30)  # the mean of many must be a number, too
        fresh = {"m": g, "v": square}
        for name in ("row", "column", "both"):
            fresh[name] = layout.whole(name, partial(_means, which=name), square + 1e-30)
        decays = {"m": (MOMENTA, self.momenta_decay), "v": (SQUARES, self.squares_decay)}
        new = {}
        for name, value in fresh.items():
            initial, offset = decays.get(name, (FACTORED, self.factored_decay))
            start = torch.tensor(initial, dtype=offset.dtype, device=offset.device)
            beta = (1 - (1 - start) * (10 * offset).exp()).clamp(0, 1)
            beta = beta.view(-1, *[1] * g.dim()) if name != "v" else beta[0]
            new[name] = beta * old[name] + (1 - beta) * value
        return new

    def _features(self, g: Tensor, new: dict[str, Tensor], layout: Layout) -> Tensor:
        """The inputs but for θ and time, before they are normalised, [27, *batch, n], in the source's order."""
        m, v, row, column = new["m"], new["v"], new["row"], new["column"]
        matrices = [float(len(shape) > 1) for shape in layout.whole_shapes]
        factored = layout.tensors.spread(layout.tensors.each(matrices, g)) > 0
        by_factors = (row / (new["both"] + 1e-9)).clamp(min=1e-9).rsqrt() * column.clamp(min=1e-9).rsqrt()
        of_g = torch.where(factored, by_factors, (row + 1e-9).rsqrt())
        of_m = torch.where(factored, by_factors, (row + 1e-6).rsqrt())
        root = (v + 1e-6).rsqrt()
        parts = [g[None], m, v[None], m * root, root[None], g * of_g]
        return torch.cat([*parts, row, column, (row + 1e-8).rsqrt(), (column + 1e-8).rsqrt(), m * of_m])

    def _network(self, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Direction and magnitude, [*batch, n] each."""
        times = torch.tensor(TIMES, dtype=x.dtype, device=x.device)
        first, *others = self._linear()
        of_time = first.weight[:, FEATURES:] @ torch.tanh(step / times - 1) + first.bias
        x = torch.tensordot(first.weight[:, :FEATURES], x, 1) + of_time.view(-1, *[1] * (x.dim() - 1))
        for layer in others:
            x = torch.tensordot(layer.weight, x.relu(), 1) + layer.bias.view(-1, *[1] * (x.dim() - 1))
        direction, magnitude = x.unbind()
        return direction, magnitude

    def _linear(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]


def factored_axes(shape: Sequence[int]) -> tuple[int, int] | None:
    """The second longest and the longest axis of a tensor, the later one of equals longer; None for a vector."""
    if len(shape) < 2:
        return None
    second, longest = sorted(range(len(shape)), key=lambda axis: shape[axis])[-2:]
    return second, longest


def _normalised(name: str, features: Tensor, layout: Layout) -> Tensor:
    """Features [..., n] over their root mean square in each tensor, by the mean called `name`."""
    size = layout.tensors.spread(layout.tensors.mean(name, features.square()))
    return features * (1e-5 + size).rsqrt()


def _means(values: Tensor, layout: Layout, which: str) -> Tensor:
    """Means over the longest axis ("row"), the second longest ("column") or both of each matrix, at its coordinates."""
    parts = [values[..., :0]]
    for part, shape in zip(layout.split(values), layout.shapes, strict=True):
        if (axes := factored_axes(shape)) is not None:
            second, longest = (axis - len(shape) for axis in axes)
            tensor = part.unflatten(-1, shape)
            over = {"row": [longest], "column": [second], "both": [second, longest]}[which]
            part = tensor.mean(over, keepdim=True).expand_as(tensor).flatten(-len(shape))
        parts.append(part)
    return torch.cat(parts, -1)
