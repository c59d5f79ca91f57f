"""The hierarchical learned optimiser: a small network per tensor that steers the harness.

The harness is `NormalisedMuon`. A network per coordinate on top of it has cost much and gained nothing; one per tensor
costs next to nothing (cf. VeLO, Metz et al. 2022, arXiv:2211.09760, whose tensors' networks make those of coordinates).
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from l2lopt import cells
from l2lopt.cells.cell import Cell, CellState, affine
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, finite
from l2lopt.core.layout import Layout, Params
from l2lopt.core.precision import double
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import seeded
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers import controls as controls_module
from l2lopt.optimisers import facts as facts_module
from l2lopt.optimisers.base import Optimiser, zero_step, zeros
from l2lopt.optimisers.controls import Bounds, mixed
from l2lopt.optimisers.directions import Orthogonalised, is_matrix, orthogonalised_whole
from l2lopt.optimisers.facts import LOSSES, SLOW, USUAL
from l2lopt.optimisers.hand_designed import bias_corrected, safe_sqrt
from l2lopt.optimisers.normalised_muon import REST, NormalisedMuon
from l2lopt.optimisers.rates import Rate, per_row
from l2lopt.optimisers.rules import activity
from l2lopt.optimisers.schedules import to_the_end


class Perceptron(Cell):
    """A layer of tanh(W x + b): a network without a memory."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, {})
        self.layer = nn.Linear(input_size, hidden_size)

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """tanh(W x + b)."""
        self.check(x, state)
        return torch.tanh(affine(self.layer.bias, (self.layer.weight, x))), {}


class Moments(NamedTuple):
    """Running means of the gradient, [*batch, n], each over the weight that its terms have so far.

    Attributes:
        mean: m̂.
        square: v̂.
        slow: ŝ, at the rate 0.98; None where nothing looks at it.
    """

    mean: Tensor
    square: Tensor
    slow: Tensor | None


class Hierarchical(Optimiser):
    """The harness, steered per tensor by a small network: facts → cell → linear head → bounded controls.

    For each tensor at each step, o = W_o h + b_o with (h, s') = cell(facts, s), and

    u = −η s_t (a e^{c_step} r d + e^{c_decay} λ θ),

    with η, s_t, a, r, λ as in `NormalisedMuon`. Each control is an output of the network:

    - step and decay: c = B tanh(o / B) with B the logarithm of the bound: the factor of the harness's step stays within
      [1/bound, bound];
    - mix: d = normal(cos α normal(d₀) + sin α normal(d₁)), where normal divides by the RMS over the tensor, d₀ is the
      harness's direction and d₁ Adam's. α = A tanh(o / A) with A = π/2 for o > 0, which is all Adam in the limit, and
      A = 0.25 for o < 0, a little away from it. On vectors, embeddings and heads the two directions are one, and α does
      nothing. With `mix="logit"` the weights are σ(2 o + 4) and 1 − σ(2 o + 4), which are never 1 and 0;
    - sign and slow: the same towards sign(d₀'s momentum) and the running mean of the gradient at the rate 0.98, each
      times `rules.activity` of Adam's direction, one turn after the other in this order;
    - momentum: with p = tanh o, the momentum of all directions is (1 − |p|) times the harness's plus |p| times the slow
      running mean (p > 0) or the gradient itself (p < 0).

    So outputs of 0 are the harness, up to rounding, and every control has a derivative of 1 there, on both sides: a
    step of evolution or of a gradient can leave 0 either way. Outputs of 0 are the initial values, as `head_scale` is 0
    at first. With `mix="logit"` there is 1.8 % of the other directions in it.

    The facts are functions of gradients and losses, constants of first order, and of θ ("weight-size", "growth",
    "update-to-weight"): through these `blockwise` takes no gradient, and says so in the log. With the control
    "momentum" the orthogonalised direction depends on φ, and is a constant there, too.

    A coordinate whose gradient is not finite gets the update 0, keeps its state, counts as 0 in means and is counted in
    `state.shared["skipped"]`. A loss that is not given makes the facts of the losses 0.

    12 bytes of state a parameter in float32, 8 where nothing looks at the slow running mean.

    Args:
        facts: Names of facts, see `facts.FACTS`.
        network: Cell of as many inputs as facts, or as the embedding gives.
        controls: Names of controls, any of `controls.CONTROLS`.
        harness: The harness that it steers, with its direction of orthogonalised matrices.
        bounds: Limits of the controls.
        embedding: Whether a linear layer lies between facts and cell.
        head_scale: Factor of the head's initial weights; at 0 the untrained rule is the harness,
            up to what `mix="logit"` adds.
    """

    groupings = ("tensors",)
    knows_end = True

    def __init__(
        self,
        facts: Sequence[str],
        network: Cell,
        controls: Sequence[str],
        harness: NormalisedMuon,
        bounds: Bounds,
        embedding: bool = False,
        head_scale: float = 0.0,
    ) -> None:
        super().__init__()
        self.facts, self.controls = facts_module.chosen(facts), controls_module.chosen(controls)
        self.harness, self.bounds = harness, bounds
        if not isinstance(harness.direction, Orthogonalised):
            found, remedy = type(harness.direction).__name__, "leave its direction out"
            raise UserError("hierarchical: harness", expected="an orthogonalised one", found=found, remedy=remedy)
        self.direction: Orthogonalised = harness.direction
        self.embedding = nn.Linear(len(facts), network.input_size) if embedding else None
        self.cell = network
        self.head = nn.Linear(network.hidden_size, len(controls))
        with torch.no_grad():
            self.head.weight.mul_(head_scale)
            self.head.bias.zero_()
        # Names are kept and not the facts, whose functions cannot be pickled.
        seen = [facts_module.FACTS[name] for name in self.facts]
        self.needs_loss = any(fact.needs_loss for fact in seen)
        self.means = tuple(dict.fromkeys(name for fact in seen for name in fact.means))
        self.remembers = tuple(dict.fromkeys(fact.memory for fact in seen if fact.memory is not None))
        self.keeps_slow = "slow" in self.means or bool({"slow", "momentum"} & {*self.controls})

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """Running means at 0, what the facts remember, the cell's initial state, and the number of steps of the run."""
        names = ("m", "v", "slow") if self.keeps_slow else ("m", "v")
        coordinates = {name: zeros(layout, batch, like) for name in names}
        wide = torch.promote_types(coordinates["m"].dtype, torch.float32)
        zero = coordinates["m"].new_zeros(*batch, layout.tensors.count, dtype=wide)
        groups = {"idle": zero.clone(), **facts_module.initial_memory(self.remembers, layout, zero)}
        x = zero.expand(self.cell.input_size, *zero.shape)
        groups |= {f"cell.{name}": value for name, value in self.cell.initial_state(x).items()}
        step = zero_step(zero)
        shared = {"step": step, "total_steps": step + (total_steps or 0)}
        shared["skipped"] = zero.new_zeros(tuple(batch), dtype=torch.int64)
        if self.needs_loss:
            shared |= {name: zero.new_zeros(tuple(batch)) for name in LOSSES}
        return OptimiserState(layout, coordinates, {"tensors": groups}, shared)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η s_t (a e^{c_step} r d + e^{c_decay} λ θ)."""
        layout, tensors, shared = state.layout, state.layout.tensors, state.shared
        finite = grads.square().isfinite()
        g = grads.where(finite, 0.0)
        after = self._running(g, state.coordinates)
        moments = self._moments(after, shared["step"] + 1)
        losses, remembered = facts_module.told(shared, loss) if self.needs_loss else (None, {})
        memory = dict(state.groups["tensors"])
        moves = tensors.mean("moves", (g != 0).to(grads.dtype)) > 0
        memory["idle"] = torch.where(moves, 0.0, memory["idle"] + 1)
        factor = to_the_end(self.harness.schedule, shared["step"], shared["total_steps"], self.harness.warm_up)
        rate = per_row(self.harness.lr, memory["idle"]) * factor.to(memory["idle"].dtype)

        def network() -> tuple[Tensor, Params]:
            # Within it, as a slice of the coordinates has no use for these means.
            wide = memory["idle"].dtype
            values = {name: tensors.mean(name, self._of_mean(name, g, params, moments)) for name in self.means}
            means = {name: value.to(wide) for name, value in values.items()}
            return self.steered(layout, means, memory, shared, losses, rate)

        outputs, memory = tensors.controls("controls", network, memory)
        controls = dict(zip(self.controls, outputs, strict=True))
        directions = self._directions(g, after["m"], moments, controls, layout, shared["step"] + 1)
        products = {
            (one, other): tensors.mean(f"{one} {other}", directions[one] * directions[other])
            for index, one in enumerate(directions)
            for other in list(directions)[index:]
        }
        weights = self.weights(layout, products, controls, memory["idle"])
        decay = self.harness.weight_decay * self.decay_factor(controls, memory["idle"])
        update = tensors.spread(decay.to(grads.dtype)) * params
        for name, direction in directions.items():
            update = update + tensors.spread(weights[name].to(grads.dtype)) * direction
        update = -per_row(self.harness.lr, grads) * factor.to(grads.dtype) * update
        kept = {name: torch.where(finite, after[name].to(old), old) for name, old in state.coordinates.items()}
        counted = {"step": shared["step"] + 1, "skipped": shared["skipped"] + (~finite).sum(-1)}
        groups = {"tensors": {name: memory[name] for name in state.groups["tensors"]}}
        return update.where(finite, 0.0), OptimiserState(layout, kept, groups, {**shared, **counted, **remembered})

    def steered(
        self,
        layout: Layout,
        means: Params,
        memory: Params,
        shared: Mapping[str, Tensor],
        losses: facts_module.Losses | None,
        rate: Rate,
    ) -> tuple[Tensor, Params]:
        """The bounded controls [controls, *batch, tensors], and what is remembered per tensor after this step.

        Args:
            layout: Layout of the coordinates.
            means: Means by name, see `facts.MEANS`, [*batch, tensors].
            memory: State per tensor before the step, its idle updates counted.
            shared: Shared state before the step.
            losses: Losses of the run, if this step has one.
            rate: η s_t.
        """
        like, phi = memory["idle"], self.head.weight
        means = facts_module.finite_means(means)
        after = facts_module.remembered(memory, means)
        x = facts_module.stated(self.facts, layout, means, after, shared["step"], shared["total_steps"], losses)
        before = {name: memory[f"cell.{name}"].to(phi.dtype) for name in self.cell.state_sizes}
        outputs, cell = self.respond(x.to(phi.dtype), before)
        outputs = outputs.to(like.dtype)
        found = torch.stack([self.bounds.bounded(name, o) for name, o in zip(self.controls, outputs, strict=True)])
        after |= {f"cell.{name}": value.to(like.dtype) for name, value in cell.items()}
        if "moved" in memory:
            by_name = dict(zip(self.controls, found, strict=True))
            after["moved"] = rate * self._size(layout, by_name, like)
        return found, after

    def respond(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """The outputs [controls, *batch, tensors] for facts x [facts, *batch, tensors], and the cell's next state."""
        if self.embedding is not None:
            x = affine(self.embedding.bias, (self.embedding.weight, x))
        h, after = self.cell(x, state)
        return affine(self.head.bias, (self.head.weight, h)), after

    def weights(
        self, layout: Layout, products: Mapping[tuple[str, str], Tensor], controls: Params, idle: Tensor
    ) -> Params:
        """What each direction is multiplied by before the rate, name → [*batch, tensors].

        Args:
            layout: Layout of the coordinates.
            products: Means over each tensor of the product of two directions, for every pair, [*batch, tensors].
            controls: Bounded controls by name, [*batch, tensors].
            idle: Updates since each tensor has last had a gradient, [*batch, tensors].
        """
        factors = mixed(
            {pair: value.to(idle.dtype) for pair, value in products.items()}, self.bounds.shares(controls, idle)
        )
        size = self._size(layout, controls, idle)
        return {name: size * factor for name, factor in factors.items()}

    def decay_factor(self, controls: Params, like: Tensor) -> Tensor:
        """e^{c_decay}, [*batch, tensors]."""
        return controls["decay"].exp() if "decay" in controls else torch.ones_like(like)

    def _size(self, layout: Layout, controls: Params, idle: Tensor) -> Tensor:
        """The size of the direction, a e^{c_step} r."""
        size = self.harness.scales(layout, idle) * REST**idle / layout.tensors.each(layout.fan_ins, idle).sqrt()
        return size * controls["step"].exp() if "step" in controls else size

    def _running(self, g: Tensor, before: Params) -> Params:
        """The running means of g and g² after this step."""
        beta1, beta2 = self.direction.adam.beta1, self.direction.adam.beta2
        m, v = before["m"].to(g.dtype), before["v"].to(g.dtype)
        after = {"m": beta1 * m + (1 - beta1) * g, "v": beta2 * v + (1 - beta2) * g.square()}
        if self.keeps_slow:
            after["slow"] = SLOW * before["slow"].to(g.dtype) + (1 - SLOW) * g
        return after

    def _moments(self, after: Params, step: Tensor) -> Moments:
        """The running means over the weight that their terms have so far."""
        beta1, beta2 = self.direction.adam.beta1, self.direction.adam.beta2
        slow = bias_corrected(after["slow"], SLOW, step) if self.keeps_slow else None
        return Moments(bias_corrected(after["m"], beta1, step), bias_corrected(after["v"], beta2, step), slow)

    def _of_mean(self, name: str, g: Tensor, params: Tensor, moments: Moments) -> Tensor:
        """What a mean of `facts.MEANS` is of, [*batch, n]."""
        if name == "square":
            return moments.square
        if name == "alignment":
            return g * moments.mean
        values = {"grads": g, "params": params, "momentum": moments.mean, "slow": moments.slow}[name]
        assert values is not None
        return values.square()

    def _directions(
        self, g: Tensor, m: Tensor, moments: Moments, controls: Params, layout: Layout, step: Tensor
    ) -> Params:
        """The harness's direction, "main", and those that controls turn to."""
        beta, mean = self.direction.adam.beta1, moments.mean
        momentum = beta * m + (1 - beta) * g
        if "momentum" in controls:
            assert moments.slow is not None
            turn = layout.tensors.spread(controls["momentum"].to(g.dtype))
            other = torch.where(turn > 0, moments.slow, g)
            # Nesterov's momentum has terms of this weight so far, and only means of equal weight can be mixed.
            weight = (1 - beta * beta ** double(step)).to(g)
            momentum = momentum + turn.abs() * (weight * other - momentum)
            mean = mean + turn.abs() * (other - mean)
        adam = mean / (safe_sqrt(moments.square) + self.direction.adam.eps)
        found = orthogonalised_whole(momentum, layout, self.direction.coefficients, self.direction.precision)
        directions = {"main": torch.where(is_matrix(layout, momentum), found, adam)}
        # A sign is of size 1 however small its momentum is, and the slow mean outlasts the others by far: without this
        # a coordinate that has lost its gradient would go on.
        share = activity(g, {"rnnprop": adam[None]})
        for control in self.controls:
            if control == "mix":
                directions["adam"] = adam
            elif control == "sign":
                directions["sign"] = momentum.sign() * share
            elif control == "slow":
                assert moments.slow is not None
                directions["slow"] = moments.slow * share
        return directions


@checks_words
def hierarchical(
    cell: Choice = "lstm",
    hidden_size: int = 8,
    facts: Sequence[str] = USUAL,
    controls: Sequence[str] = ("step", "decay", "mix"),
    lr: Rate = 0.03,
    weight_decay: float = 0.1,
    schedule: Literal["cosine", "linear", "warm-up-stable-decay", "constant"] = "cosine",
    warm_up: float = 0.05,
    step_bound: float = 4.0,
    decay_bound: float = 16.0,
    mix: Literal["angle", "logit"] = "angle",
    embedding: bool = False,
    head_scale: float = 0.0,
    embedding_scale: float | None = None,
    seed: int = 0,
) -> Hierarchical:
    """A hierarchical optimiser from choices by name.

    Args:
        cell: Any of `cells.CELLS`, or "none" for a layer of tanh without a memory.
        hidden_size: The cell's hidden size.
        facts: Any of `facts.FACTS`.
        controls: Any of `controls.CONTROLS`.
        lr: η of the harness.
        weight_decay: λ of the harness.
        schedule: Schedule of the harness.
        warm_up: Share of the updates over which the harness's step rises.
        step_bound: Largest factor of the harness's step, at least 1; infinity for none.
        decay_bound: Largest factor of the harness's decay, at least 1; infinity for none.
        mix: Map from the network's output to the mixture of directions.
        embedding: Whether a linear layer of `hidden_size` features lies between facts and cell, for cells that need as
            many inputs as outputs.
        head_scale: Factor of the head's initial weights.
        embedding_scale: Factor of the step of embeddings of the harness, by default by the number of words.
        seed: Seed of the initial values of φ.

    Raises:
        UserError: For an unknown name, or a value out of its range.

    Example:
        >>> import torch
        >>> from l2lopt import optimisers
        >>> from l2lopt.core.layout import Layout
        >>> rule, harness = optimisers.make("hierarchical"), optimisers.make("normalised-muon")
        >>> layout, theta, grads = Layout(("w",), ((2, 2),)), torch.ones(4), torch.arange(4.0)
        >>> ours, theirs = (r.update(grads, r.init(layout, total_steps=10), theta)[0] for r in (rule, harness))
        >>> torch.allclose(ours, theirs)
        True
    """
    for name, bound in (("step_bound", step_bound), ("decay_bound", decay_bound)):
        if not bound >= 1:
            remedy = "give a factor of at least 1"
            raise UserError(f"hierarchical: {name}", expected="at least 1", found=str(bound), remedy=remedy)
    finite("hierarchical", head_scale=head_scale)
    facts_module.chosen(facts)  # before the network, whose size they decide
    harness = NormalisedMuon(lr, weight_decay, schedule=schedule, warm_up=warm_up, embedding_scale=embedding_scale)
    inputs = hidden_size if embedding else len(facts)
    # Modules draw their first values from the global generator: in the block φ depends on the seed alone.
    with seeded(seed):
        network = Perceptron(inputs, hidden_size) if cell == "none" else cells.build(cell, inputs, hidden_size)
        bounds = Bounds(step_bound, decay_bound, mix)
        return Hierarchical(facts, network, controls, harness, bounds, embedding, head_scale)
